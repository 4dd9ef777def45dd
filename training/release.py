"""Collects what ships: the checkpoint, a sample of held-out documents, the evaluation items, the run's record.

python -m training.release --run DIR --data DIR --out DIR
"""

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from .corpus import read_jsonl, write_jsonl
from .export import TOKENIZER_FILES

MODEL_FILES = ("config.json", "model.safetensors", *TOKENIZER_FILES)


def sample_heldout(
    documents: list[dict], tokenizer: Tokenizer, per_source: int = 2, least: int = 3000, most: int = 4200
) -> list[dict]:
    """Up to ``per_source`` documents of every source, cut at a line end to between ``least`` and ``most`` tokens."""
    taken: dict[str, int] = {}
    out: list[dict] = []
    for document in documents:
        source = document["source"]
        encoding = tokenizer.encode(document["text"], add_special_tokens=False)
        if taken.get(source, 0) >= per_source or len(encoding.ids) <= least:
            continue
        text = document["text"]
        if len(encoding.ids) > most:
            floor, ceiling = encoding.offsets[least][1], encoding.offsets[most][0]
            cut = text.rfind("\n", floor, ceiling)
            text = text[: cut if cut > 0 else ceiling]
        taken[source] = taken.get(source, 0) + 1
        out.append({"source": source, "text": text})
    return out


def release(run: Path, data: Path, out: Path) -> None:
    """Writes the folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        shutil.copy(run / "looped-open" / name, out / name)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    rows = sample_heldout(read_jsonl(data / "heldout.jsonl.xz"), tokenizer)
    write_jsonl(out / "heldout.jsonl.xz", rows)
    shutil.copy(data / "tasks.jsonl.xz", out / "tasks.jsonl.xz")
    record = json.loads((run / "results.json").read_text())
    for name in ("data", "out", "tasks"):
        record["arguments"].pop(name, None)
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.copy(data / "manifest.json", out / "manifest.json")
    sizes = {f.name: f.stat().st_size for f in sorted(out.iterdir())}
    print(f"{len(rows)} held-out documents; " + ", ".join(f"{n} {s / 1e3:.0f} kB" for n, s in sizes.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="OUT of training.train")
    parser.add_argument("--data", type=Path, required=True, help="OUT of training.tokenizer, with tasks.jsonl.xz")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    release(args.run, args.data, args.out)


if __name__ == "__main__":
    main()
