"""Byte-level BPE of 4,096 tokens, single digits, ``<|endoftext|>`` as id 0; encodes the corpus to token shards.

    python -m training.tokenizer --corpus DIR --out DIR

Writes ``tokenizer.json``, ``tokenizer_config.json``, ``tokens.bin.xz`` (little-endian uint16, one document after the
other, each followed by id 0, documents shuffled), ``heldout.jsonl.xz`` (copied) and ``pools.json.xz`` (sentences and
words for the synthetic tasks; see ``tasks.Pools``).
"""

import argparse
import json
import lzma
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .clean import sentences
from .corpus import read_jsonl

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 4096
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "unk_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "model_max_length": 8192,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
LZMA2_UINT16 = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 26}]
"""xz filter for 16-bit data: two-byte alignment, a dictionary as long as the file."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the BPE. Digits stand alone, so numbers are read digit by digit at every length."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes both tokenizer files of a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1) + "\n")


def balanced_sample(rows: list[dict], chars_per_source: int, rng: random.Random) -> Iterator[str]:
    """At most ``chars_per_source`` of each source, so no single manual decides the vocabulary."""
    used: Counter[str] = Counter()
    for row in rng.sample(rows, len(rows)):
        if used[row["source"]] < chars_per_source:
            used[row["source"]] += len(row["text"])
            yield row["text"]


def encode_corpus(tokenizer: Tokenizer, texts: list[str], batch: int = 256) -> np.ndarray:
    """All texts as one uint16 array, id 0 after each."""
    end = np.zeros(1, np.uint16)
    parts: list[np.ndarray] = []
    for i in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch_fast(texts[i : i + batch], add_special_tokens=False):
            parts += [np.asarray(encoding.ids, np.uint16), end]
    return np.concatenate(parts)


def pick_words(rows: list[dict], tokenizer: Tokenizer, count: int = 1200) -> list[str]:
    """Common lower-case words of 4 to 10 letters that several sources share and that are one or two tokens long."""
    frequency: Counter[str] = Counter()
    sources: dict[str, set[str]] = {}
    for row in rows:
        words = Counter(w for w in row["text"].split() if re.fullmatch("[a-z]{4,10}", w))
        frequency.update(words)
        for word in words:
            sources.setdefault(word, set()).add(row["source"])
    ranked = [w for w, n in frequency.most_common(12_000) if len(sources[w]) >= 8 and n >= 100][120:]
    short = [w for w in ranked if len(tokenizer.encode(" " + w, add_special_tokens=False).ids) <= 2]
    return sorted(short[:count])


def pick_sentences(rows: list[dict], chars: int, rng: random.Random, run_chars: int = 4_000) -> list[list[str]]:
    """Runs of neighbouring sentences drawn evenly from all sources, ``chars`` in all."""
    by_source: dict[str, list[str]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row["text"])
    runs: list[list[str]] = []
    for texts in by_source.values():
        left = chars // len(by_source)
        for text in rng.sample(texts, len(texts)):
            if left <= 0:
                break
            start = rng.randrange(max(1, len(text) - run_chars))
            run = sentences(text[start : start + run_chars])[1:-1]
            if len(run) >= 6:
                runs.append(run)
                left -= sum(map(len, run))
    return runs


def prepare(corpus: Path, out: Path, seed: int, pool_chars: int) -> None:
    """Trains the tokenizer and writes everything the trainer reads."""
    rng = random.Random(seed)
    train, heldout = read_jsonl(corpus / "train.jsonl.xz"), read_jsonl(corpus / "heldout.jsonl.xz")
    tokenizer = train_tokenizer(balanced_sample(train, 2_500_000, rng))
    save_tokenizer(tokenizer, out)
    texts = [row["text"] for row in rng.sample(train, len(train))]
    tokens = encode_corpus(tokenizer, texts)
    with lzma.open(out / "tokens.bin.xz", "wb", format=lzma.FORMAT_XZ, filters=LZMA2_UINT16) as f:
        f.write(tokens.astype("<u2").tobytes())
    pools = {
        "words": pick_words(train, tokenizer),
        "train": pick_sentences(train, pool_chars, rng),
        "eval": pick_sentences(heldout, pool_chars // 16, rng),
    }
    with lzma.open(out / "pools.json.xz", "wt", encoding="utf-8") as f:
        json.dump(pools, f, ensure_ascii=False)
    for name in ("heldout.jsonl.xz", "manifest.json"):
        shutil.copy(corpus / name, out / name)
    chars = sum(map(len, texts))
    print(f"{len(tokens) / 1e6:.2f}M tokens, {chars / len(tokens):.3f} characters a token, {len(pools['words'])} words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool-chars", type=int, default=6_000_000, help="sentences kept as filler for the tasks")
    args = parser.parse_args()
    prepare(args.corpus, args.out, args.seed, args.pool_chars)


if __name__ == "__main__":
    main()
