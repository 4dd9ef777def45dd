"""Tokens to text as they come: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of one continuation.

    ``push`` and ``finish`` return text that no later token can change; a tail that may become a stop string, or the
    first bytes of a character, is held back until it is decided.

    Args:
        tokenizer: a fast tokenizer.
        prompt: ids before the first token (some tokenizers write a leading space only between words).
        stop: strings that end the text; it ends before the one that is complete first.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = DecodeStream(ids=list(prompt[-8:]), skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; returns the text that is now certain. Nothing follows once ``stopped`` is true."""
        self._ids.append(token)
        piece = self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += len(piece)
        return self._take(piece, last=False)

    def finish(self) -> str:
        """The rest: what was held back, and bytes that never became a character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._take(str(whole)[self._decoded :], last=True)

    def _take(self, piece: str, *, last: bool) -> str:
        self._held += piece
        # The stop string that is complete first ends the text, however many characters a token brings.
        found = min(((at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            certain, self._held = self._held[: found[1]], ""
        else:
            keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
            certain = self._held[: len(self._held) - keep]
            self._held = self._held[len(certain) :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
