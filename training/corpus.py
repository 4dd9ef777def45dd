"""Builds the corpus: fetch, extract, filter, deduplicate, bundle, split; writes JSON lines and a manifest.

    python -m training.corpus --out DIR [--cache DIR] [--exclude FILE.jsonl.xz]

Writes ``train.jsonl.xz`` and ``heldout.jsonl.xz`` (fields source, text) and ``manifest.json`` (per source: package,
version, licence, archive sha256, documents and bytes on both sides of the split, sha256 of the text).
"""

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from .clean import COPYLEFT, filter_lines, shingles
from .extract import documents
from .fetch import Package, fetch
from .sources import SOURCES, Source

MIN_DOCUMENT_CHARS = 400
BUNDLE_CHARS = 14_000
MAX_BUNDLE_CHARS = 48_000


def bundle(texts: Iterable[str]) -> Iterator[str]:
    """Joins neighbours until BUNDLE_CHARS and cuts what is longer than MAX_BUNDLE_CHARS at a line end.

    Long enough units make the held-out side usable for long-context measurements.
    """
    held: list[str] = []
    size = 0
    for text in texts:
        while len(text) > MAX_BUNDLE_CHARS:
            cut = text.rfind("\n", BUNDLE_CHARS, MAX_BUNDLE_CHARS)
            cut = cut if cut > 0 else MAX_BUNDLE_CHARS
            yield text[:cut]
            text = text[cut:].lstrip("\n")
        held.append(text)
        size += len(text)
        if size >= BUNDLE_CHARS:
            yield "\n\n".join(held)
            held, size = [], 0
    if held:
        yield "\n\n".join(held)


def split(texts: list[str], share: float, at_least: int = 3) -> tuple[list[str], list[str]]:
    """(train, held out) of one source: the texts with the smallest SHA-256 are held out, so order does not matter."""
    digests = {text: hashlib.sha256(text.encode()).digest() for text in texts}
    count = min(len(digests) // 2, max(at_least, round(share * len(digests))))
    chosen = set(sorted(digests, key=digests.__getitem__)[:count])
    return [t for t in texts if t not in chosen], [t for t in texts if t in chosen]


def build_source(source: Source, cache: Path, exclude: frozenset[int]) -> tuple[Package, list[str]]:
    """All bundles of one source, filtered and deduplicated within the source."""
    package = fetch(source, cache)
    seen: set[int] = set()

    def kept() -> Iterator[str]:
        for text in documents(package):
            if COPYLEFT.search(text):
                continue
            text = filter_lines(text, seen)
            if exclude and text:
                text = "\n".join(line for line in text.split("\n") if exclude.isdisjoint(shingles(line)))
            if len(text) >= MIN_DOCUMENT_CHARS:
                yield text

    return package, list(bundle(kept()))


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """JSON lines under xz."""
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON-lines file, plain or under xz."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def build(out: Path, cache: Path, heldout_share: float, exclude_files: list[Path], jobs: int) -> dict:
    """Runs the whole build and returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    exclude = frozenset(h for f in exclude_files for row in read_jsonl(f) for h in shingles(row["text"]))
    train: list[dict] = []
    heldout: list[dict] = []
    manifest: dict = {"heldout_share": heldout_share, "excluded_shingles": len(exclude), "sources": []}
    with ProcessPoolExecutor(jobs) as pool:
        for package, bundles in pool.map(partial(build_source, cache=cache, exclude=exclude), SOURCES):
            source = package.source
            kept, held = split(list(dict.fromkeys(bundles)), heldout_share)
            train.extend({"source": source.name, "text": text} for text in kept)
            heldout.extend({"source": source.name, "text": text} for text in held)
            train_bytes, heldout_bytes = (sum(len(t.encode()) for t in side) for side in (kept, held))
            manifest["sources"].append(
                {
                    "name": source.name,
                    "registry": source.registry,
                    "package": source.package,
                    "version": package.version,
                    "licence": source.licence,
                    "attribution": source.attribution,
                    "archive_bytes": package.archive_bytes,
                    "archive_sha256": package.sha256,
                    "train_documents": len(kept),
                    "train_bytes": train_bytes,
                    "heldout_documents": len(held),
                    "heldout_bytes": heldout_bytes,
                    "text_sha256": hashlib.sha256("".join(bundles).encode()).hexdigest(),
                }
            )
            print(f"{source.name:22s} {train_bytes / 1e6:7.2f} MB train {len(held):4d} documents held out", flush=True)
    write_jsonl(out / "train.jsonl.xz", train)
    write_jsonl(out / "heldout.jsonl.xz", heldout)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--cache", type=Path, help="folder for fetched packages (default: OUT/cache)")
    parser.add_argument("--heldout-share", type=float, default=0.02, help="share of documents held out")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="drop passages of this file")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    manifest = build(args.out, args.cache or args.out / "cache", args.heldout_share, args.exclude, args.jobs)
    total = sum(s["train_bytes"] for s in manifest["sources"])
    print(f"train {total / 1e6:.1f} MB in {len(manifest['sources'])} sources")


if __name__ == "__main__":
    main()
