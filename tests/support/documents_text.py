"""Commands and figures as they stand in Markdown: what a reader would type, and what a reader would believe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def user_documents() -> list[Path]:
    """Documents that say how things are done today; ``dev/LOG.md`` says what was done."""
    names = ("README.md", "CONTRIBUTING.md", "training/README.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]


def shell_commands(markdown: str) -> Iterator[list[str]]:
    """The simple commands of all fenced shell blocks, as words, with variables that the block sets filled in."""
    for language, block in _FENCE.findall(markdown):
        if language in ("sh", "bash", "console", "shell"):
            yield from _commands(block)


def _commands(block: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}

    def fill(text: str) -> str:
        return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text)

    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(fill(line), posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|"):
                words.append(word)
                continue
            while words and (match := _ASSIGNMENT.fullmatch(words[0])):
                variables[match[1]] = match[2]
                words.pop(0)
            if words:
                yield words
            words = []


def inline_commands(markdown: str, program: str) -> Iterator[list[str]]:
    """Commands of ``program`` that stand in the text between backticks."""
    text = _FENCE.sub("", markdown)
    for code in re.findall(r"`([^`]+)`", text):
        if code.startswith(f"{program} "):
            yield shlex.split(code.replace("\n", " ").replace("...", ""))


def blocks(markdown: str) -> Iterator[tuple[str, str]]:
    """(heading, block): paragraphs, tables and single list items outside fences, each under its nearest heading."""
    heading = ""
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", markdown)):
        for part in re.split(r"\n(?=[*-] )", paragraph.strip()):
            if part.startswith("#"):
                heading, _, part = part.lstrip("#").strip().partition("\n")
            if part.strip():
                yield heading, part.strip()
