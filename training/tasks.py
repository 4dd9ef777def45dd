"""Synthetic long-context tasks: eleven generators, their scoring, and the fixed evaluation set.

    python -m training.tasks --data DIR --out FILE.jsonl.xz      # the evaluation items

An item is a context and one or more turns (question, answer). Evaluation items have one turn; training items often
ask several questions about one context, which makes answers a larger share of the tokens. Every draw comes from one
``random.Random``, so an item is a function of (task, length, seed) and of the pools.

==============  =========================================================================  ========
task            what is asked                                                              score
==============  =========================================================================  ========
needle_num      one of several 7-digit numbers hidden in prose                             exact
needle_word     one of several word pairs hidden in prose                                  exact
multivalue      all 5-digit numbers given for one of several keys                          set
multiquery      the 5-digit numbers of two or three keys                                   set
vt_list         all variables of an assignment chain, from the value                       set
vt_value        the value of a variable, through the chain                                 exact
freq_words      the three most common words of a list                                      set
copy            a passage marked earlier, word for word                                    exact
induction       the eight words that follow three given words in a random list             exact
kv_dict         one value of a table that fills the context                                exact
arith           a chain of operations modulo 7, 10 or 11, written out, after prose         final
==============  =========================================================================  ========
"""

import argparse
import json
import lzma
import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

EVAL_LENGTHS = (1000, 1900)
EVAL_ITEMS = 60


@dataclass(frozen=True, slots=True)
class Item:
    """A task item; ``turns`` are (question, answer) pairs, an answer starts with a space and ends with a newline."""

    task: str
    context: str
    turns: tuple[tuple[str, str], ...]
    score: str

    @property
    def prompt(self) -> str:
        return self.context + self.turns[0][0]

    @property
    def answer(self) -> str:
        return self.turns[0][1]


class Pools:
    """Words and runs of sentences the generators draw from, with their lengths in tokens."""

    def __init__(self, words: list[str], runs: list[list[str]], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = words
        self.runs = runs
        self.word_tokens = dict(zip(words, self._lengths([" " + w for w in words]), strict=True))
        flat = iter(self._lengths([line for run in runs for line in run]))
        self.run_tokens = [[next(flat) + 1 for _ in run] for run in runs]

    @classmethod
    def load(cls, folder: Path, side: str) -> "Pools":
        """``side`` is "train" or "eval": the eval sentences come from held-out documents."""
        with lzma.open(folder / "pools.json.xz", "rt", encoding="utf-8") as f:
            data = json.load(f)
        return cls(data["words"], data[side], Tokenizer.from_file(str(folder / "tokenizer.json")))

    def _lengths(self, texts: list[str]) -> list[int]:
        return [len(e.ids) for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def count(self, text: str) -> int:
        """Length of a text in tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def filler(self, rng: random.Random, tokens: int) -> list[str]:
        """Sentences of about ``tokens`` tokens in all: short stretches of neighbouring sentences."""
        lines: list[str] = []
        while tokens > 0:
            k = rng.randrange(len(self.runs))
            start = rng.randrange(len(self.runs[k]))
            stretch = slice(start, start + 12)
            for line, size in zip(self.runs[k][stretch], self.run_tokens[k][stretch], strict=True):
                if size > tokens:
                    tokens = 0 if tokens < 40 else tokens
                    break
                lines.append(line)
                tokens -= size
        return lines

    def word_list(self, rng: random.Random, tokens: int) -> list[str]:
        """Random words of about ``tokens`` tokens in all."""
        words: list[str] = []
        while tokens > 0:
            words.append(rng.choice(self.words))
            tokens -= self.word_tokens[words[-1]]
        return words


def _key(rng: random.Random, pools: Pools, taken: set[str], joint: str = "-") -> str:
    """A word or a pair of words that is not in ``taken``; adds it there."""
    while True:
        key = joint.join(rng.sample(pools.words, rng.choice((1, 2))))
        if key not in taken:
            taken.add(key)
            return key


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _hide(rng: random.Random, pools: Pools, header: str, statements: list[str], tokens: int, reserve: str) -> str:
    """Context of about ``tokens``: header, and statements in their order at random places between filler sentences.

    ``reserve`` is the text that follows (questions and answers) and counts towards the length.
    """
    fixed = pools.count("\n".join([header, *statements, reserve])) + 4
    lines = pools.filler(rng, tokens - fixed)
    places = sorted(rng.randrange(len(lines) + 1) for _ in statements)
    for place, statement in reversed(list(zip(places, statements, strict=True))):
        lines.insert(place, statement)
    return (header + "\n" if header else "") + rng.choice("\n ").join(lines) + "\n"


def _fits(tokens: int, each: int, low: int, high: int, rng: random.Random) -> int:
    """A count between low and high, lowered where ``tokens`` leave no room for that many statements of ``each``."""
    return rng.randint(low, max(low, min(high, (tokens - 50) // (2 * each))))


_NEEDLE_HEADERS = (
    "Some special magic values are hidden in the following text. Remember them.",
    "Memorize the important facts in this text.",
    "",
)


def _needles(kind: str, rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    taken: set[str] = set()
    keys = [_key(rng, pools, taken) for _ in range(_fits(tokens, 16, 3, 9, rng))]
    if kind == "number":
        values = [_digits(rng, 7) for _ in keys]
    else:
        values = [" ".join(rng.sample(pools.words, 2)) for _ in keys]
    statements = [f"The special magic {kind} for {k} is: {v}." for k, v in zip(keys, values, strict=True)]
    asked = rng.sample(range(len(keys)), min(turns, len(keys)))
    pairs = tuple(
        (
            f"Question: What is the special magic {kind} for {keys[i]}?\n"
            f"Answer: The special magic {kind} for {keys[i]} is:",
            f" {values[i]}\n",
        )
        for i in asked
    )
    context = _hide(rng, pools, rng.choice(_NEEDLE_HEADERS), statements, tokens, "".join(q + a for q, a in pairs))
    return Item("needle_num" if kind == "number" else "needle_word", context, pairs, "exact")


def needle_num(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    return _needles("number", rng, pools, tokens, turns)


def needle_word(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    return _needles("word", rng, pools, tokens, turns)


def multivalue(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    taken: set[str] = set()
    keys = [_key(rng, pools, taken) for _ in range(_fits(tokens, 48, 1, 4, rng))]
    statements: list[str] = []
    owners = [k for k in keys for _ in range(rng.randint(2, 4))]
    rng.shuffle(owners)
    values: dict[str, list[str]] = {k: [] for k in keys}
    for owner in owners:
        value = _digits(rng, 5)
        values[owner].append(value)
        statements.append(f"One of the special magic numbers for {owner} is: {value}.")
    pairs = tuple(
        (
            f"Question: What are all the special magic numbers for {k}?\n"
            f"Answer: The special magic numbers for {k} are:",
            f" {', '.join(values[k])}\n",
        )
        for k in rng.sample(keys, min(turns, len(keys)))
    )
    context = _hide(rng, pools, rng.choice(_NEEDLE_HEADERS), statements, tokens, "".join(q + a for q, a in pairs))
    return Item("multivalue", context, pairs, "set")


def multiquery(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    taken: set[str] = set()
    keys = [_key(rng, pools, taken) for _ in range(_fits(tokens, 16, 3, 8, rng))]
    values = {k: _digits(rng, 5) for k in keys}
    statements = [f"The special magic number for {k} is: {values[k]}." for k in keys]
    pairs = []
    for _ in range(turns):
        asked = rng.sample(keys, rng.choice((2, 3)))
        question = f"Question: What are the special magic numbers for {', '.join(asked)}?\nAnswer:"
        pairs.append((question, " " + ", ".join(f"{k}: {values[k]}" for k in asked) + "\n"))
    context = _hide(rng, pools, rng.choice(_NEEDLE_HEADERS), statements, tokens, "".join(q + a for q, a in pairs))
    return Item("multiquery", context, tuple(pairs), "set")


def _chains(rng: random.Random, tokens: int, dense: bool) -> tuple[list[list[str]], list[str], list[str]]:
    """Chains of variable names, one value for each chain, and the assignments in an order that keeps each chain's."""
    room = max(2, (tokens - 70) // (16 if dense else 30))
    if dense:
        roots, length = rng.randint(2, 6), rng.randint(1, 5)
    else:
        roots, length = rng.choice((2, 3)), rng.choice((2, 3, 4))
    while roots * length > room and length > 1:
        length -= 1
    roots = max(1, min(roots, room // length))
    names: set[str] = set()
    while len(names) < roots * length:
        names.add("".join(rng.choices(string.ascii_uppercase, k=3)))
    ordered = sorted(names)
    rng.shuffle(ordered)
    chains = [ordered[i * length : (i + 1) * length] for i in range(roots)]
    values: list[str] = []
    while len(values) < roots:
        value = _digits(rng, 5)
        if value not in values:
            values.append(value)
    turns = [c for c in range(roots) for _ in range(length)]
    rng.shuffle(turns)
    at = [0] * roots
    statements = []
    for c in turns:
        k = at[c]
        source = values[c] if k == 0 else f"VAR {chains[c][k - 1]}"
        statements.append(f"VAR {chains[c][k]} = {source}.")
        at[c] += 1
    return chains, values, statements


def _variables(first: str, rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    """Several turns mix both kinds of question about the same chains: training only."""
    chains, values, statements = _chains(rng, tokens, dense=turns > 1 and rng.random() < 0.5)
    pairs = []
    for turn in range(turns):
        c = rng.randrange(len(chains))
        if (first if turn == 0 else rng.choice(("vt_list", "vt_value"))) == "vt_list":
            question = f"Question: Which variables hold the value {values[c]}?\nAnswer:"
            pairs.append((question, f" {', '.join(chains[c])}\n"))
        else:
            name = rng.choice(chains[c])
            pairs.append((f"Question: What is the value of {name}?\nAnswer: The value of {name} is", f" {values[c]}\n"))
    header = "Track the variable assignments hidden in this text."
    context = _hide(rng, pools, header, statements, tokens, "".join(q + a for q, a in pairs))
    return Item(first, context, tuple(pairs), "set" if first == "vt_list" else "exact")


def vt_list(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    return _variables("vt_list", rng, pools, tokens, turns)


def vt_value(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    return _variables("vt_value", rng, pools, tokens, turns)


def freq_words(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    """Three words make up 30%, 20% and 12% of the list; others, each about three times, the rest."""
    del turns
    shares = (0.30, 0.20, 0.12)
    rest = 1 - sum(shares)
    words = rng.sample(pools.words, 3 + max(8, int((tokens - 45) * 0.8 * rest / 3.2)))
    mean = sum(s * pools.word_tokens[w] for s, w in zip(shares, words, strict=False))
    mean += rest * sum(pools.word_tokens[w] for w in words[3:]) / (len(words) - 3)
    size = max(16, int((tokens - 45) / mean))
    listed = [w for s, w in zip(shares, words, strict=False) for _ in range(int(s * size))]
    listed += rng.choices(words[3:], k=size - len(listed))
    rng.shuffle(listed)
    question = "Question: What are the three most common words, most common first?\nAnswer:"
    context = "Read the list of words and count how often each one appears.\n" + " ".join(listed) + "\n"
    return Item("freq_words", context, ((question, f" {', '.join(words[:3])}\n"),), "set")


def copy(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    names = rng.sample(pools.words, _fits(tokens, 40, 1, 3, rng) if tokens < 250 else rng.choice((2, 3)))
    passages = []
    for _ in names:
        if rng.random() < 0.5:
            passages.append(" ".join(rng.sample(pools.words, rng.randint(4, 20))))
        else:
            run = rng.choice(pools.runs)
            passages.append(" ".join(rng.choice(run).split()[: rng.randint(8, 22)]))
    statements = [f"Passage {n}: {p}" for n, p in zip(names, passages, strict=True)]
    asked = rng.sample(range(len(names)), min(turns, len(names)))
    pairs = tuple((f"Repeat passage {names[i]} exactly: Passage {names[i]}:", f" {passages[i]}\n") for i in asked)
    fixed = pools.count("\n".join(statements) + "".join(q + a for q, a in pairs)) + 4
    lines = pools.filler(rng, tokens - fixed)
    for place, statement in zip(
        sorted((rng.randrange(len(lines) + 1) for _ in statements), reverse=True), reversed(statements), strict=True
    ):
        lines.insert(place, statement)
    return Item("copy", "\n".join(lines) + "\n", pairs, "exact")


def induction(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    cue, tail = 3, 8
    turns = min(turns, max(1, (tokens - 60) // 60))
    words = pools.word_list(rng, max(24, tokens - 12 - turns * 24))
    pairs = []
    for _ in range(turns):
        start = rng.randrange(max(1, len(words) - cue - tail))
        given, wanted = words[start : start + cue], words[start + cue : start + cue + tail]
        pairs.append((f"Continue the list from: {' '.join(given)}", f" {' '.join(wanted)}\n"))
    return Item("induction", f"List: {' '.join(words)}\n", tuple(pairs), "exact")


def kv_dict(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    numeric_keys, numeric_values = rng.random() < 0.5, rng.random() < 0.5
    taken: set[str] = set()
    rows: list[tuple[str, str]] = []
    left = tokens - 20 - 18 * turns
    while left > 0 or len(rows) < 3:
        if numeric_keys:
            key = f"id{_digits(rng, 4)}"
            size = 5
        else:
            first, second = rng.sample(pools.words, 2)
            key = f"{first}_{second}"
            size = 1 + pools.word_tokens[first] + pools.word_tokens[second]
        if key in taken:
            continue
        taken.add(key)
        value = _digits(rng, 4) if numeric_values else rng.choice(pools.words)
        size += 2 + (5 if numeric_values else pools.word_tokens[value])
        rows.append((key, value))
        left -= size
    asked = rng.sample(rows, min(turns, len(rows)))
    pairs = tuple((f"Look up in the table: {k} =", f" {v}\n") for k, v in asked)
    return Item("kv_dict", "Table:\n" + "".join(f"{k} = {v}\n" for k, v in rows), pairs, "exact")


_OPERATIONS = (("add", "+"), ("subtract", "-"), ("multiply by", "*"))


def _sum(rng: random.Random) -> tuple[str, str]:
    modulus = rng.choice((7, 10, 11))
    value = rng.randrange(modulus)
    words, steps = [], []
    start = value
    for _ in range(rng.randint(2, 5)):
        (word, sign), operand = rng.choice(_OPERATIONS), rng.randrange(1, modulus)
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
        steps.append(f"{value} {sign} {operand} = {result} -> {result % modulus}")
        words.append(f"{word} {operand}")
        value = result % modulus
    question = f"\nCompute step by step modulo {modulus}: start with {start}, then {', '.join(words)}.\nSteps:"
    return question, f" {'; '.join(steps)}; Answer: {value}\n"


def arith(rng: random.Random, pools: Pools, tokens: int, turns: int) -> Item:
    pairs = tuple(_sum(rng) for _ in range(turns))
    lines = pools.filler(rng, tokens - pools.count("".join(q + a for q, a in pairs)) - 4)
    return Item("arith", " ".join(lines) + "\n", pairs, "final")


Generator = Callable[[random.Random, Pools, int, int], Item]
TASKS: dict[str, Generator] = {
    f.__name__: f
    for f in (
        needle_num, needle_word, multivalue, multiquery, vt_list, vt_value, freq_words, copy, induction, kv_dict, arith
    )
}  # fmt: skip


def score(kind: str, answer: str, output: str) -> float:
    """Score in [0, 1] of an output, which is cut at its first newline.

    exact: stripped texts equal. final: the number after "Answer:" equal. set: share of the wanted comma-separated
    items that are present.
    """
    output = output.split("\n", 1)[0].strip()
    answer = answer.strip()
    if kind == "exact":
        return float(output == answer)
    if kind == "final":
        wanted, got = (re.search(r"Answer:\s*(-?\d+)", text) for text in (answer, output))
        return float(bool(wanted and got and wanted.group(1) == got.group(1)))
    if kind == "set":
        wanted_items = {piece.strip() for piece in answer.split(",")}
        return len(wanted_items & {piece.strip() for piece in output.split(",")}) / len(wanted_items)
    raise ValueError(f"score kind: got {kind!r}, wanted exact, final or set")


def eval_items(pools: Pools, lengths: tuple[int, ...] = EVAL_LENGTHS, count: int = EVAL_ITEMS) -> Iterator[dict]:
    """The fixed evaluation set, as rows: id, task, length, prompt, answer, score."""
    for task, make in TASKS.items():
        for length in lengths:
            for i in range(count):
                item = make(random.Random(f"eval-{task}-{length}-{i}"), pools, length, 1)
                yield {
                    "id": f"{task}-{length}-{i:03d}",
                    "task": task,
                    "length": length,
                    "prompt": item.prompt,
                    "answer": item.answer,
                    "score": item.score,
                }


def main() -> None:
    from .corpus import write_jsonl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that training.tokenizer wrote")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = list(eval_items(Pools.load(args.data, "eval")))
    write_jsonl(args.out, rows)
    print(f"{len(rows)} items, {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
