"""What a report page must be: well formed, self-contained, labelled."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Collects what a self-contained, accessible page must (not) have."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.tags: set[str] = set()
        self.classes: list[str] = []
        self.wide: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        if tag in ("table", "svg") and not any("scroll" in names.split() for names in self.classes):
            self.wide.append(f"<{tag}> in {self.open[-3:]}")
        if tag not in VOID:
            self.open.append(tag)
            self.classes.append(values.get("class") or "")
        if values.get("id"):
            self.ids.append(values["id"] or "")
        for name in ("href", "src", "xlink:href"):
            if values.get(name):
                self.links.append(values[name] or "")
        if tag == "svg":
            self.labels.append(values.get("aria-label") or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()
            self.classes.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        self.classes.pop()


def check_page(html: str) -> Checker:
    """Assert that a page needs nothing but itself and return what it holds."""
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert checker.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in checker.links)
    assert not re.search(r"url\((?!#)", html) and "@import" not in html
    # A phone is narrower than most tables: whatever is wide scrolls inside its own box, never the page.
    assert not checker.wide and re.search(r"\.scroll\{overflow-x:auto", html)
    assert re.search(r"code\.command\{display:block;overflow-x:auto", html)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert len(checker.ids) == len(set(checker.ids))
    assert {link[1:] for link in checker.links if link.startswith("#")} <= set(checker.ids)
    assert all(len(label) > 20 for label in checker.labels)
    assert not re.search(r"#0a0[01][0-9a-f]{3}\b", html), "a placeholder colour is left"
    return checker
