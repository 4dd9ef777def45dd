"""One HTML page that needs nothing but itself: sections of figures, tables and text samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, StrictUndefined

from loopkv.report.figure import Drawing, to_svg
from loopkv.report.theme import DARK_VARIABLES, LIGHT_VARIABLES


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. ``numeric`` names the columns (0-based) that are set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(row)} cells in a row of {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with everything a reader needs to trust it.

    Args:
        key: file name of its PNG, unique on the page.
        title: what it shows.
        explanation: one sentence on how to read it.
        alt: what a reader who cannot see it should know.
        command: the command lines that make it, one a line.
        drawing: how it is drawn.
        data: the numbers behind it, folded away below it.
        place: model and hardware, for the title of its PNG.
    """

    key: str
    title: str
    explanation: str
    alt: str
    command: str
    drawing: Drawing
    data: Table | None = None
    place: str = ""

    @property
    def png_title(self) -> str:
        """Title of its PNG: what it shows, of which model on which hardware."""
        return "\n".join(line for line in (self.title, self.place) if line)


@dataclass(frozen=True, slots=True)
class TextColumns:
    """Texts side by side (below each other on a phone): ``(heading, text)``."""

    title: str
    note: str
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its blocks, in order."""

    key: str
    title: str
    lead: str = ""
    blocks: tuple[Figure | Table | TextColumns, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """The whole report."""

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    footer: str = field(default="")

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures, in order."""
        return tuple(b for section in self.sections for b in section.blocks if isinstance(b, Figure))


_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ page.title }}</title>
<style>
:root{ {{ light }} }
@media (prefers-color-scheme: dark){:root{ {{ dark }} }}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:1180px;margin:0 auto;padding:0 16px}
header{padding-top:28px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .4em}
h2{font-size:1.25rem;margin:2.2em 0 .3em;padding-top:.6em;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:0 0 .25em}
p{margin:.3em 0 .8em;max-width:76ch}
.muted,figcaption p,.note{color:var(--muted);font-size:.9rem}
nav{display:flex;flex-wrap:wrap;gap:.35em .5em;margin:1em 0}
nav a{color:var(--accent);text-decoration:none;border:1px solid var(--line);border-radius:99px;
  padding:.3em .8em;font-size:.9rem;background:var(--card)}
nav a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));gap:8px;margin:1em 0;padding:0}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px;min-width:0}
.facts dt{color:var(--muted);font-size:.8rem}
.facts dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.blocks{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px;align-items:start}
.block{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;margin:0;min-width:0}
.wide{grid-column:1/-1}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch;
  background:linear-gradient(to left,var(--card) 40%,transparent) right/40px 100% no-repeat local,
  linear-gradient(to left,var(--line),transparent) right/14px 100% no-repeat scroll}
figure svg{display:block;height:auto;margin:0 auto}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif !important}
figcaption{margin-top:.4em}
table{border-collapse:separate;border-spacing:0;font-size:.88rem;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.32em .6em;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--muted);font-weight:600;vertical-align:bottom;white-space:pre}
td{white-space:nowrap}
th:first-child,td:first-child{position:sticky;left:0;background:var(--card)}
td.text{white-space:normal;min-width:12em;overflow-wrap:anywhere}
.right{text-align:right}
tbody tr:last-child td{border-bottom:0}
code,pre{font:.85rem/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code.command{display:block;overflow-x:auto;white-space:pre;background:var(--page);border:1px solid var(--line);
  border-radius:6px;padding:.3em .6em;margin-top:.4em;color:var(--ink)}
details{margin-top:.5em}
summary{cursor:pointer;color:var(--accent);font-size:.9rem;padding:.25em 0}
.texts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:10px}
.texts>div{min-width:0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--page);border:1px solid var(--line);
  border-radius:6px;padding:.6em .7em;margin:0;max-height:22em;overflow-y:auto}
footer{margin:3em auto 2em;color:var(--muted);font-size:.85rem;overflow-wrap:anywhere}
@media print{.block{break-inside:avoid}nav{display:none}}
</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
<p>{{ page.lead }}</p>
{% if page.facts %}<dl class="facts">{% for name, value in page.facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>{% endfor %}
</dl>{% endif %}
<nav aria-label="Sections">{% for section in page.sections %}
<a href="#{{ section.key }}">{{ section.title }}</a>{% endfor %}
</nav>
</header>
<main>
{% for section in page.sections %}
<section id="{{ section.key }}" aria-labelledby="{{ section.key }}-title">
<h2 id="{{ section.key }}-title">{{ section.title }}</h2>
{% if section.lead %}<p>{{ section.lead }}</p>{% endif %}
<div class="blocks">
{% for block in section.blocks %}
{% if kind(block) == "Figure" %}
{{ figure(block) }}
{% elif kind(block) == "Table" %}
<div class="block wide">
<h3>{{ block.title }}</h3>
{{ table(block) }}
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}
</div>
{% else %}
<div class="block wide">
<h3>{{ block.title }}</h3>
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}
<div class="texts">{% for heading, text in block.columns %}
<div><h3>{{ heading }}</h3><pre tabindex="0">{{ text }}</pre></div>{% endfor %}
</div>
</div>
{% endif %}
{% endfor %}
</div>
</section>
{% endfor %}
</main>
<footer>{{ page.footer }}</footer>
</body>
</html>
"""

_TABLE = """\
<div class="scroll" tabindex="0" role="region" aria-label="{{ table.title }}">
<table><thead><tr>{% for name in table.columns %}
<th scope="col"{% if loop.index0 in table.numeric %} class="right"{% endif %}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr>{% for value in row %}
<td{% if value|length > 48 %} class="text"{% elif loop.index0 in table.numeric %} class="right"{% endif %}>
{{- value }}</td>
{% endfor %}</tr>{% endfor %}
</tbody></table></div>"""

_FIGURE = """\
<figure class="block{% if figure.drawing.fills_row %} wide{% endif %}" id="{{ figure.key }}">
<h3>{{ figure.title }}</h3>
<div class="scroll"{% if figure.drawing.scrolls %}
 tabindex="0" role="region" aria-label="{{ figure.title }}"{% endif %}>
{{ svg }}
</div>
<figcaption><p>{{ figure.explanation }}</p>
{% if figure.command %}<code class="command">{{ figure.command }}</code>{% endif %}
{% if data %}<details><summary>Numbers behind this figure</summary>{{ data }}</details>{% endif %}
</figcaption>
</figure>"""


def render_page(page: Page) -> str:
    """The page as one HTML document: no script, no network, light and dark, phone to desktop."""
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    tables, figures = environment.from_string(_TABLE), environment.from_string(_FIGURE)
    order = {figure.key: number for number, figure in enumerate(page.figures)}
    ids = [section.key for section in page.sections] + [figure.key for figure in page.figures]
    if len(set(ids)) != len(ids):
        raise ValueError(f"two parts of a page have one id: {sorted(i for i in set(ids) if ids.count(i) > 1)}")

    def table(block: Table) -> Markup:
        return Markup(tables.render(table=block))

    def figure(block: Figure) -> Markup:
        svg = Markup(to_svg(block.drawing, block.alt, f"f{order[block.key]}"))
        data = table(block.data) if block.data is not None else None
        html = figures.render(figure=block, svg=svg, data=data)
        return Markup(html)

    return environment.from_string(_TEMPLATE).render(
        page=page,
        light=LIGHT_VARIABLES,
        dark=DARK_VARIABLES,
        kind=lambda block: type(block).__name__,
        table=table,
        figure=figure,
    )


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
    """A table without the columns (after the first) that hold dashes only; columns of numbers are set flush right."""
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"table {title!r}: cells in a row and columns differ in number")
    kept = [c for c in range(len(columns)) if c == 0 or not rows or any(row[c] != "-" for row in rows)]
    columns, rows = [columns[c] for c in kept], [[row[c] for c in kept] for row in rows]
    numeric = frozenset(
        column
        for column in range(1, len(columns))
        if rows and all(_is_number(row[column]) for row in rows) and any(row[column] != "-" for row in rows)
    )
    return Table(title, tuple(columns), tuple(tuple(row) for row in rows), note, numeric)


def _is_number(text: str) -> bool:
    return text == "-" or (text[:1].lstrip("+-<>").isdigit() if text[:1].isdigit() else text[1:2].isdigit())
