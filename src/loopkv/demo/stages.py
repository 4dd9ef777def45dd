"""Stages of a long command: announced when they begin, timed when they end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Say = Callable[[str], None]


@dataclass(slots=True)
class Stages:
    """Numbered stages and the seconds each took.

    Args:
        total: how many stages there will be.
        say: prints a line.
    """

    total: int
    say: Say
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Announce ``what``, run the body, keep its seconds under ``name``."""
        self.say(f"[{len(self.seconds) + 1}/{self.total}] {what}")
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
        self.say(f"      {self.seconds[name]:.1f} s")
