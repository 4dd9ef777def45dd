"""Training batches: half the rows are corpus text, half are packed synthetic items; built by worker processes.

A batch is flat: tokens, labels and label weights of N = rows x row length. Weights: text 1, answers 8, the prose around
a task 0.1, random lists 0.02 (they cannot be predicted). The workers read the run's progress from shared memory and set
the items' length by it.
"""

import lzma
import multiprocessing as mp
import os
import queue
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .tasks import TASKS, Item, Pools

ANSWER_WEIGHT = 8.0
PROSE_WEIGHT = 0.1
LIST_WEIGHT = 0.02
LIST_TASKS = frozenset({"freq_words", "induction", "kv_dict"})
TASK_SHARES = {"vt_list": 2.5, "vt_value": 2.5, "induction": 1.6, "freq_words": 1.6}
"""Relative frequency of tasks in training; 1 where not named."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What batches are made of. Fractions of the run are in [0, 1]."""

    batch_tokens: int = 65_536
    row: int = 2048
    long_row: int = 4096
    long_from: float = 0.90
    synthetic_share: float = 0.5
    first_length: int = 160
    last_length: int = 2048
    curriculum: float = 1 / 3

    def row_at(self, progress: float) -> int:
        return self.long_row if progress >= self.long_from else self.row

    def item_length_at(self, progress: float) -> int:
        """Longest synthetic item in tokens: grows geometrically over the first third, then follows the row."""
        grown = min(1.0, progress / self.curriculum)
        length = self.first_length * (self.last_length / self.first_length) ** grown
        return min(self.row_at(progress), round(length)) if progress < self.long_from else self.long_row


@dataclass(slots=True)
class Batch:
    """tokens, labels [N] uint16; weights [N] float16; row: tokens of one row; answers [N] bool."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    answers: np.ndarray
    row: int
    text_tokens: int


def load_tokens(folder: Path) -> np.ndarray:
    """The corpus as [tokens] uint16."""
    with lzma.open(folder / "tokens.bin.xz") as f:
        return np.frombuffer(f.read(), "<u2").astype(np.uint16)


class TextRows:
    """Rows of row + 1 tokens from the token stream: every block once an epoch, in a fresh order and offset."""

    def __init__(self, tokens: np.ndarray, row: int, seed: int) -> None:
        self.tokens, self.row, self.seed = tokens, row, seed
        self.blocks = (len(tokens) - row - 1) // row
        self._epoch, self._order, self._offset = -1, np.zeros(0, np.int64), 0

    def __getitem__(self, index: int) -> np.ndarray:
        epoch, k = divmod(index, self.blocks)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._epoch, self._order, self._offset = epoch, rng.permutation(self.blocks), int(rng.integers(self.row))
        start = int(self._order[k]) * self.row + self._offset
        return self.tokens[start : start + self.row + 1]


def encode_item(item: Item, pools: Pools) -> tuple[list[int], list[float]]:
    """Token ids of an item, its turns and the closing end-of-text; the weight of each token as a label."""
    pieces = [item.context] + [text for turn in item.turns for text in turn]
    encoded = pools.tokenizer.encode_batch(pieces, add_special_tokens=False)
    ids: list[int] = []
    weights: list[float] = []
    context = LIST_WEIGHT if item.task in LIST_TASKS else PROSE_WEIGHT
    for i, piece in enumerate(encoded):
        ids += piece.ids
        weights += [ANSWER_WEIGHT if i and i % 2 == 0 else context] * len(piece.ids)
    return [*ids, 0], [*weights, context]


def synthetic_row(rng: random.Random, pools: Pools, row: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """row + 1 tokens of packed items and their label weights. The row starts with an item's first token."""
    names = list(TASKS)
    shares = [TASK_SHARES.get(n, 1.0) for n in names]
    ids: list[int] = []
    weights: list[float] = []
    while (room := row + 1 - len(ids)) > 96:
        length = min(int(longest * rng.uniform(0.2, 1.0)), room - 8)
        turns = 1 if rng.random() < 0.25 else rng.randint(2, min(10, 2 + length // 120))
        name = rng.choices(names, shares)[0]
        item_ids, item_weights = encode_item(TASKS[name](rng, pools, length, turns), pools)
        ids += item_ids[:room]
        weights += item_weights[:room]
    missing = row + 1 - len(ids)
    return np.array(ids + [0] * missing, np.uint16), np.array(weights + [0.0] * missing, np.float16)


def build_batch(index: int, progress: float, recipe: Recipe, text: TextRows, pools: Pools, seed: int) -> Batch:
    """Batch number ``index`` at a point of the run; text and synthetic rows alternate."""
    rng = random.Random(f"train-{seed}-{index}")
    row = recipe.row_at(progress)
    longest = recipe.item_length_at(progress)
    rows = recipe.batch_tokens // row
    n_text = rows - round(rows * recipe.synthetic_share)
    tokens = np.zeros((rows, row + 1), np.uint16)
    weights = np.ones((rows, row + 1), np.float16)
    for r in range(rows):
        if r >= n_text:
            tokens[r], weights[r] = synthetic_row(rng, pools, row, longest)
        elif row == recipe.row:
            tokens[r] = text[index * n_text + r]
        else:
            start = rng.randrange(len(text.tokens) - row - 1)
            tokens[r] = text.tokens[start : start + row + 1]
    weights = weights[:, 1:].reshape(-1)
    return Batch(
        tokens=tokens[:, :-1].reshape(-1),
        labels=tokens[:, 1:].reshape(-1),
        weights=weights,
        answers=weights == ANSWER_WEIGHT,
        row=row,
        text_tokens=n_text * row,
    )


class Loader:
    """Worker processes that keep a queue of batches full. Start before CUDA is used: workers are forked."""

    def __init__(self, recipe: Recipe, tokens: np.ndarray, pools: Pools, seed: int, workers: int) -> None:
        context = mp.get_context("fork")
        self.progress = context.Value("d", 0.0, lock=False)
        self._next = context.Value("q", 0)
        self._queue = context.Queue(maxsize=max(8, workers))
        arguments = (recipe, tokens, pools, seed, self.progress, self._next, self._queue)
        self._workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    def get(self) -> Batch:
        """The next batch; raises if every worker has died."""
        while True:
            try:
                return Batch(*self._queue.get(timeout=10))
            except queue.Empty:
                if not any(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("all batch workers have stopped") from None

    def waiting(self) -> int:
        """Batches ready now: 0 for long means that the workers are too slow."""
        return self._queue.qsize()

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def _work(recipe, tokens, pools, seed, progress, counter, out) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    text = TextRows(tokens, recipe.row, seed)
    while True:
        with counter.get_lock():
            index = counter.value
            counter.value += 1
        b = build_batch(index, progress.value, recipe, text, pools, seed)
        out.put((b.tokens, b.labels, b.weights, b.answers, b.row, b.text_tokens))
