"""A tokenizer and pools small enough to build in a second."""

import random

import pytest
from tokenizers import Tokenizer

from training.tasks import Pools
from training.tokenizer import train_tokenizer

STEMS = [
    "stone",
    "river",
    "cloud",
    "green",
    "north",
    "amber",
    "field",
    "light",
    "paper",
    "water",
    "glass",
    "metal",
    "winter",
    "summer",
    "ocean",
    "forest",
    "silver",
    "garden",
]
WORDS = [
    stem + end
    for stem in STEMS
    for end in ("", "s", "ed", "er", "ly", "ing", "ish", "less", "ful", "like", "y", "wise")
]


def _line(rng: random.Random) -> str:
    return f"The {rng.choice(WORDS)} of the {rng.choice(WORDS)} was {rng.choice(WORDS)} in {rng.randrange(1700, 1999)}."


@pytest.fixture(scope="session")
def runs() -> list[list[str]]:
    rng = random.Random(0)
    return [[_line(rng) for _ in range(20)] for _ in range(30)]


@pytest.fixture(scope="session")
def tokenizer(runs: list[list[str]]) -> Tokenizer:
    tasks = ["Question: What is the special magic number for stones?\nAnswer: VAR ABC = VAR DEF."] * 5
    words = [sep.join(WORDS) for sep in (" ", "\n", "_")]
    return train_tokenizer(["\n".join(run) for run in runs] + tasks + 5 * words, vocab_size=1024)


@pytest.fixture(scope="session")
def pools(tokenizer: Tokenizer, runs: list[list[str]]) -> Pools:
    return Pools(sorted(WORDS), runs, tokenizer)
