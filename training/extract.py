"""Reads documents (plain strings, not yet filtered) out of an unpacked package: one small reader per file format."""

import ast
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from .clean import html_to_text, normalise, osis_to_text
from .fetch import Package


def documents(package: Package) -> Iterator[str]:
    """Normalised documents of a package in a fixed order."""
    read = EXTRACTORS[package.source.kind]
    files = {f for pattern in package.source.paths for f in package.root.glob(pattern) if f.is_file()}
    for path in sorted(files):
        relative = "/" + str(path.relative_to(package.root))
        if not any(s in relative for s in package.source.skip):
            for text in read(path):
                yield normalise(text)


def _html(path: Path) -> Iterator[str]:
    yield html_to_text(path.read_text("utf-8", errors="replace"))


def _text(path: Path) -> Iterator[str]:
    """One address a file; the source has one paragraph per file, so sentences are put on lines in small groups."""
    pieces = re.split(r"(?<=[.!?]) +(?=[A-Z\"'])", path.read_text("utf-8", errors="replace").strip())
    yield "\n".join(" ".join(pieces[i : i + 4]) for i in range(0, len(pieces), 4))


def _chapters(path: Path) -> Iterator[str]:
    chapter = json.loads(path.read_text("utf-8"))
    yield f"{chapter['title']}\n\n{chapter['text']}"


def _sword(index: Path) -> Iterator[str]:
    """SWORD zText / zCom module: an index of (offset, compressed, plain) uint32 triples over zlib blocks.

    A block is a book or a chapter of the work; books are cut at chapter marks.
    """
    blob = index.with_name(index.name[:-1] + "z").read_bytes()
    for offset, packed, _ in struct.iter_unpack("<III", index.read_bytes()):
        if packed:
            block = zlib.decompress(blob[offset : offset + packed]).decode("utf-8", errors="replace")
            for chapter in re.split(r"(?=<chapter\b[^>]*sID=)", block):
                yield osis_to_text(chapter)


def _wordnet(path: Path, synsets_per_document: int = 160) -> Iterator[str]:
    """WordNet ``data.*``: words and gloss of each synset, ``word, word: gloss``, neighbours in one document."""
    entries: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("  ") or " | " not in line:
            continue
        head, gloss = line.split(" | ", 1)
        fields = head.split()
        count = int(fields[3], 16)
        words = ", ".join(fields[4 + 2 * i].replace("_", " ") for i in range(count))
        entries.append(f"{words}: {gloss.strip()}")
    for i in range(0, len(entries), synsets_per_document):
        yield "\n".join(entries[i : i + synsets_per_document])


_CHARSXP = re.compile(rb"\x00[\x00\x04][\x00\x04]\x09(....)", re.DOTALL)


def _rdata(path: Path) -> Iterator[str]:
    """R lazy-load database: big-endian length, zlib stream; the strings of each vector are the lines of a novel."""
    blob = path.read_bytes()
    while len(blob) > 6:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(blob[4:])
        except zlib.error:
            return
        blob = stream.unused_data
        lines: list[str] = []
        at = 0
        while match := _CHARSXP.search(data, at):
            length = int.from_bytes(match.group(1), "big", signed=True)
            at = match.end()
            if 0 <= length < 200:
                lines.append(data[at : at + length].decode("utf-8", errors="replace"))
                at += length
        if len(lines) > 1000:  # a novel, not an index entry
            yield from _novel(lines)


def _novel(lines: list[str]) -> Iterator[str]:
    """Joins hard-wrapped lines into paragraphs and cuts at chapter headings."""
    paragraphs = re.sub(r"([^\n])\n(?=[^\n])", r"\1 ", "\n".join(lines)).split("\n")
    chapter: list[str] = []
    for paragraph in paragraphs:
        if re.match(r"chapter\b", paragraph, re.IGNORECASE) and chapter:
            yield "\n".join(chapter)
            chapter = []
        chapter.append(paragraph)
    yield "\n".join(chapter)


def _python_string(path: Path, lines_per_document: int = 60) -> Iterator[str]:
    """The longest string literal of a Python module, without the brackets that mark supplied words."""
    tree = ast.parse(path.read_text("utf-8"))
    literals = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    lines = [line for line in re.sub(r"[\[\]]", "", max(literals, key=len)).split("\n") if line.strip()]
    for i in range(0, len(lines), lines_per_document):
        yield "\n".join(lines[i : i + lines_per_document])


EXTRACTORS: dict[str, Callable[[Path], Iterator[str]]] = {
    "html": _html,
    "text": _text,
    "chapters": _chapters,
    "sword": _sword,
    "wordnet": _wordnet,
    "rdata": _rdata,
    "python_string": _python_string,
}
