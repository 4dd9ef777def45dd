"""Prompt text of a stated length in tokens, for workloads that give lengths only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from loopkv.bench.workload import Request
from loopkv.errors import ModelFormatError

_TEXT = """
find the number of ways that a train can reach town before noon when each line adds one more stop and no two lines
share their last station given that every ticket costs three coins and the clock runs slow by a minute
"""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def count(self, text: str) -> int:
        """Tokens of ``text`` as the server will see them."""
        ...

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of ``text`` that holds at most ``tokens`` tokens."""
        ...


class FolderTokenizer:
    """``tokenizer.json`` of a model folder (no vLLM, no torch)."""

    def __init__(self, folder: Path | str) -> None:
        from tokenizers import Tokenizer as Loaded

        path = Path(folder) / "tokenizer.json"
        try:
            self._tokenizer = Loaded.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelFormatError(f"tokenizer {path}", got=str(error)[:120], wanted="a tokenizer.json") from None

    def count(self, text: str) -> int:
        """Tokens of ``text``, special tokens included as the server adds them."""
        return len(self._tokenizer.encode(text).ids)

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of ``text`` that holds at most ``tokens`` tokens."""
        encoded = self._tokenizer.encode(text)
        spans = [end for _, end in encoded.offsets[:tokens]]
        return text[: max(spans, default=0)]


def fill_prompts(requests: Sequence[Request], tokenizer: Tokenizer, seed: int) -> tuple[Request, ...]:
    """Give every request without text a prompt of its length (within 2 tokens), different from its first words on.

    Different beginnings matter: a shared one would be served from the prefix cache.
    """
    rng = np.random.default_rng([seed, 0x70726F6D])
    filled = []
    for request in requests:
        if request.prompt is not None:
            filled.append(request)
            continue
        # Letters first: the serving client reads a column of digits as numbers.
        opening = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 12))
        words = rng.choice(_TEXT.split(), size=2 * request.prompt_tokens + 8)
        text = tokenizer.cut(f"{opening} {' '.join(words)}", request.prompt_tokens)
        filled.append(dataclasses.replace(request, prompt=text, prompt_tokens=max(1, tokenizer.count(text))))
    return tuple(filled)
