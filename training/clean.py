"""Turns markup into plain text and drops what a language model should not learn from. Pure functions on strings."""

import re
import unicodedata
import zlib
from html.parser import HTMLParser

_BLOCKS = frozenset(
    {
        "p", "div", "section", "article", "li", "ul", "ol", "dl", "dt", "dd", "table", "tr", "pre", "blockquote", "h1",
        "h2", "h3", "h4", "h5", "h6", "br", "hr", "title", "figure", "caption", "lb", "item", "list", "l", "lg",
        "entryfree", "def", "chapter"
    }
)  # fmt: skip
_VOID = frozenset(
    {
        "br", "hr", "img", "input", "meta", "link", "area", "base", "col", "embed", "source", "track", "wbr"
    }
)  # fmt: skip
_SKIPPED_TAGS = frozenset(
    {
        "script", "style", "nav", "svg", "head", "header", "footer", "noscript", "form", "button", "select", "math"
    }
)  # fmt: skip
_SKIPPED_CLASSES = frozenset(
    {
        "sphinxsidebar", "related", "footer", "navheader", "navfooter", "headerlink", "sidebar", "toc", "spirit-nav",
        "toplang", "top", "copyright-footer", "nav-wrapper", "nav-wide-wrapper", "menu-bar", "hidden-toc", "copyright",
        "breadcrumbs", "innertube", "up", "toctree-wrapper", "contents", "api_metadata", "srclink", "mark", "alt-docs",
        "linenos", "navbar", "fancy_toc", "startsearch", "up-next"
    }
)  # fmt: skip
_SKIPPED_IDS = frozenset(
    {
        "toc", "column2", "gtoc", "quickview", "preamble", "path", "sidebar", "innertube", "leftnav", "sidebarcontent"
    }
)  # fmt: skip

_TYPOGRAPHY = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
        "\u00a0": " ", "\u200b": "", "\u00ad": "", "\ufeff": "", "\u2192": "->", "\u00b6": "", "\u2022": "-",
        "\t": "    ",
        "\u2212": "-", "\u2002": " ", "\u2003": " ", "\u2009": " ", "\u21d2": "=>", "\u00b7": "-", "\r": "",
    }
)  # fmt: skip

COPYLEFT = re.compile(
    r"GNU (?:Lesser |Library |Affero )?General Public Licen[sc]e|GNU Free Documentation Licen[sc]e|"
    r"Creative Commons Attribution[- ]Share\s?Alike|CC[- ]BY[- ]SA|\bL?GPL(?:v?[23])?\b",
    re.IGNORECASE,
)
"""A document that matches is dropped whole: it may quote copyleft text; one that only names it is no loss."""


class _TextOf(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skip_tag = ""
        self._skip_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip_tag:
            self._skip_depth += tag == self._skip_tag
            return
        if tag not in _VOID:
            values = dict(attrs)
            classes = (values.get("class") or "").split()
            if (
                tag in _SKIPPED_TAGS
                or not _SKIPPED_CLASSES.isdisjoint(classes)
                or (values.get("id") or "").lower() in _SKIPPED_IDS
            ):
                self._skip_tag, self._skip_depth = tag, 1
                return
        if tag == "pre":
            self._pre_depth += 1
        if tag in _BLOCKS:
            self.parts.append("\n")
        elif tag in {"td", "th"}:
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._skip_tag:
            self._skip_depth -= tag == self._skip_tag
            if self._skip_depth == 0:
                self._skip_tag = ""
            return
        if tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skip_tag:
            self.parts.append(data if self._pre_depth else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Text of an HTML page without navigation, scripts and indexes; ``pre`` keeps its lines."""
    parser = _TextOf()
    parser.feed(html)
    parser.close()
    return "".join(parser.parts)


def osis_to_text(xml: str) -> str:
    """Text of one OSIS or TEI block: notes dropped, paragraphs, titles and verses of poetry on lines of their own."""
    xml = re.sub(r"<note\b.*?</note>", "", xml, flags=re.DOTALL)
    xml = re.sub(r"<(?:div|lb|l|lg|title|item|p|chapter)\b[^>]*>|</(?:title|item|p|l|lg)>", "\n", xml)
    xml = re.sub(r"<[^>]+>", "", xml)
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        xml = xml.replace(entity, char)
    return re.sub(r" +([,.;:!?])", r"\1", xml)


def normalise(text: str) -> str:
    """ASCII punctuation, NFC, no trailing blanks, at most one empty line in a row."""
    text = unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY)
    lines: list[str] = []
    for raw in text.split("\n"):
        line = raw.rstrip()
        body = line.lstrip()
        indent = min(len(line) - len(body), 24)
        line = " " * indent + re.sub(r" {2,}", " ", body) if body else ""
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip()


def is_prose_line(line: str) -> bool:
    """False for lines that are nearly all symbols, digits or a foreign script."""
    ascii_letters = sum(c.isascii() and c.isalpha() for c in line)
    return len(line) < 12 or ascii_letters >= 0.45 * len(line.replace(" ", ""))


def filter_lines(text: str, seen: set[int], min_chars: int = 60) -> str:
    """Drops symbol lines, and every line of at least ``min_chars`` that the corpus has already (``seen``, updated)."""
    kept: list[str] = []
    for line in text.split("\n"):
        if not is_prose_line(line):
            continue
        if len(line) >= min_chars:
            key = hash(line)
            if key in seen:
                continue
            seen.add(key)
        if line or (kept and kept[-1]):
            kept.append(line)
    return "\n".join(kept).strip()


def words_of(text: str) -> list[str]:
    """Lower-case words, for overlap tests."""
    return re.findall(r"[a-z0-9]+", text.lower())


def shingles(text: str, size: int = 10) -> set[int]:
    """CRC-32 of all runs of ``size`` words: two texts that share one share a passage."""
    words = words_of(text)
    return {zlib.crc32(" ".join(words[i : i + size]).encode()) for i in range(len(words) - size + 1)}


def sentences(text: str) -> list[str]:
    """Splits prose at sentence ends and documentation at line ends; each 25 to 400 characters, in order."""
    out: list[str] = []
    for line in text.split("\n"):
        for piece in re.split(r"(?<=[.!?;])\s+(?=[\"'A-Z(a-z])", line.strip()):
            if 25 <= len(piece) <= 400 and "  " not in piece:
                out.append(piece)
    return out
