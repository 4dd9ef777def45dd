"""Documents and help texts: every command parses, every link leads somewhere, every figure names its Records."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from support.documents_text import ROOT, blocks, inline_commands, shell_commands, user_documents

from loopkv.cli.app import app
from loopkv.records import read_records

CLI: Any = typer.main.get_command(app)
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in user_documents()}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the folders that examples write into."""
    monkeypatch.chdir(tmp_path)
    for name in ("results", "build/slo", "plots"):
        Path(name).mkdir(parents=True)
    return tmp_path


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` (without the program) name, and its arguments."""
    command, rest = CLI, list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no such command: {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    return command, rest


def parse(words: list[str]) -> None:
    """Parse a command line as the program would, without running it (SystemExit or a usage error otherwise)."""
    command, rest = find(words)
    try:
        context = command.make_context(" ".join(words), list(rest))
    except Exception as problem:
        raise AssertionError(f"loopkv {' '.join(words)}: {getattr(problem, 'message', problem)!r}") from problem
    assert words[0] == "serve" or not context.args, f"{words}: left over"  # tests/engine looks at vLLM's options


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_in_a_fenced_block_parses(name: str, workplace: Path) -> None:
    for words in shell_commands(DOCUMENTS[name]):
        if words[0] == "loopkv":
            parse(words[1:])
        elif words[0] == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in words[1:] if "=" not in word} <= set(targets), words


def test_the_documents_hold_the_commands_that_this_looks_for() -> None:
    found = [words for text in DOCUMENTS.values() for words in shell_commands(text) if words[0] == "loopkv"]
    assert {"profile", "plan", "tau", "measure", "capacity", "serve", "bench", "report"} <= {
        words[1] for words in found
    }
    ladder = [words for words in shell_commands(DOCUMENTS["docs/benchmarks.md"]) if words[1:3] == ["bench", "slo"]]
    assert len(ladder) > 1 and all("$" not in word for words in ladder for word in words), "variables are filled in"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_in_the_text_exists_with_its_options(name: str) -> None:
    for words in inline_commands(DOCUMENTS[name], "loopkv"):
        command, rest = find(words[1:])
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
        assert given <= known, f"`{' '.join(words)}`: no {sorted(given - known)}"


def examples() -> list[tuple[str, str]]:
    """(command, line) of all examples in help texts."""
    found = []

    def collect(command: Any, path: str) -> None:
        for name, one in getattr(command, "commands", {}).items():
            collect(one, f"{path} {name}".strip())
        text = re.sub(r"\[/?bold\]", "\n", f"{command.help or ''}\n{command.epilog or ''}")
        text = re.sub(r"(?<=\S)\n(?=[^\n ])", " ", text) if "Example" in text else ""
        for line in re.findall(r"(loopkv [^;\n]+)", text[text.find("Example") :] if text else ""):
            found.append((path, line.strip().rstrip(".")))

    collect(CLI, "")
    return found


def test_every_verb_has_an_example() -> None:
    assert {path.split()[0] for path, _ in examples()} == set(CLI.commands)


@pytest.mark.parametrize(("path", "line"), examples())
def test_every_example_of_a_help_text_parses(path: str, line: str, workplace: Path) -> None:
    words = shlex.split(line)
    assert " ".join(words[1:]).startswith(path)
    parse(words[1:])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = DOCUMENTS[name]
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


FIGURE = re.compile(r"\d[\d,.]*\s?(?:%|x\b|ms\b|tok/s|min\b|GB\b|s\b|points\b)|0\.\d\d")
"""A number that somebody has measured: with a unit of time, rate, size or ratio, or a share."""
RECORDS = re.compile(r"\]\((results/[\w./-]+)\)")


def test_every_figure_of_the_readme_names_its_records() -> None:
    """A block with figures has a link to Records, or stands under a heading of "Measured" with one above it.

    Elsewhere only what "took" time or memory is looked at: sizes and constants are no measurements.
    """
    before, _, rest = DOCUMENTS["README.md"].partition("\n## Measured\n")
    measured, _, after = rest.partition("\n## ")
    assert measured and FIGURE.search(measured), "the part that this looks at"
    linked: dict[str, bool] = {}
    for heading, block in blocks(measured):
        linked[heading] = linked.get(heading, False) or bool(RECORDS.search(block))
        assert linked[heading] or not FIGURE.search(block), f"figures without Records: {block[:200]}"
    for _, block in (*blocks(before), *blocks(after)):
        if re.search(r"\btook\b", block) and FIGURE.search(block):
            assert RECORDS.search(block), f"figures without Records: {block[:200]}"


def test_the_records_that_the_readme_names_are_records_of_commands() -> None:
    names = {name for name in RECORDS.findall(DOCUMENTS["README.md"]) if name.endswith(".jsonl")}
    assert len(names) > 3
    for name in names:
        records = list(read_records([ROOT / name]))
        assert records and all(record.command and record.commit for record in records), name
