"""Which tokens a query reads coded: the one function of position that profiler, engines and kernels share."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIN_SPLIT_PAGES = 4
MAX_SPLITS = 32
"""A row's history is read in splits of equally many pages: at least the one, and as few as make at most the other."""


class Policy(BaseModel):
    """The constants of a plan, in tokens (and ``group`` in channels). Paper section 2.3 and appendix C."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sink_tokens: int = Field(default=32, ge=0, le=4096)
    window_tokens: int = Field(default=256, ge=1, le=65536)
    page_tokens: int = Field(default=32, ge=1, le=256)
    group: int = Field(default=32, ge=1, le=256)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sink_tokens % self.page_tokens:
            raise ValueError(f"sink_tokens ({self.sink_tokens}) must be a multiple of page_tokens ({self.page_tokens})")
        return self

    def history_end(self, tokens: int) -> int:
        """First token that a query seeing ``tokens`` tokens (itself included) reads exact again.

        The query reads ``[0, sink)`` exact, ``[sink, history_end)`` coded and ``[history_end, tokens)`` exact.
        ``max(S, P * floor((n - W) / P))``.
        """
        return max(self.sink_tokens, self.page_tokens * ((tokens - self.window_tokens) // self.page_tokens))

    def split_pages(self, tokens: int) -> int:
        """History pages in one split of a row that sees ``tokens`` tokens: a function of the row's length only.

        Splits bound what V precision may compare a score with (semantics of paper section 3.3), so that the reference,
        the kernels and every batch decide alike which tokens are cold. The last split may be shorter.
        """
        pages = (self.history_end(tokens) - self.sink_tokens) // self.page_tokens
        return max(MIN_SPLIT_PAGES, -(-pages // MAX_SPLITS))

    @property
    def first_coded_position(self) -> int:
        """Smallest 0-based position whose query has a non-empty history (319 with the default constants)."""
        return self.window_tokens + self.sink_tokens + self.page_tokens - 1

    @property
    def max_exact_chunk_tokens(self) -> int:
        """Largest prefill chunk in which no query needs a page of its own chunk, whatever the plan shares."""
        return self.window_tokens


DEFAULT_POLICY = Policy()
