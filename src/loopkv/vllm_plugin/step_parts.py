"""A mixed step on CUDA cut into the parts that different kernels take.

Rows with one new token go through the decode kernel, as they would in a step of their own: what a row reads, and every
bit of its result, then depends on no neighbour's prefill (semantics, "Read-time V precision"). Rows with many go
through FlashAttention where the device has it, and the rest through the mixed kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopkv.kernels.operators import StepView
from loopkv.kernels.prefill import Prefill, PrefillPlan
from loopkv.kernels.prefill_plan import runs_of
from loopkv.vllm_plugin.step import Step


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows: their new tokens are ``tokens`` of the step's."""

    view: StepView
    tokens: slice

    @property
    def count(self) -> int:
        """New tokens."""
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, slots=True)
class StepParts:
    """A mixed step.

    Args:
        decode: rows with one new token each; their views are decode steps.
        mixed: rows for the mixed kernel; ``query_start`` of their views still counts from the step's first token.
        plan: what goes through FlashAttention, or None.
        most_stored: most new tokens of a row whose leaving pages are coded apart from FlashAttention's.
    """

    decode: tuple[Part, ...]
    mixed: tuple[Part, ...]
    plan: PrefillPlan | None
    most_stored: int


def divide(step: Step, view: StepView, prefill: Prefill | None) -> StepParts:
    """Cut a step that has a row with several new tokens; padded rows are in no part."""
    starts = step.query_start_cpu.numpy()
    rows = len(starts) - 1
    new = np.diff(starts)
    plan = None
    if prefill is not None and step.seq_lens_cpu is not None:
        plan = prefill.plan(step.seq_lens_cpu[:rows].numpy(), starts)
    rest = new > 1
    if plan is not None:
        left = np.zeros(rows, dtype=bool)
        for begin, end in plan.others:
            left[begin:end] = True
        rest &= left
    return StepParts(
        decode=tuple(_part(view, run, starts, decode=True) for run in runs_of(new == 1)),
        mixed=tuple(_part(view, run, starts, decode=False) for run in runs_of(rest)),
        plan=plan,
        most_stored=step.max_query_tokens if plan is None or plan.others_leave else 1,
    )


def view_of(step: Step) -> StepView:
    """The cache as the kernels see it in a step."""
    decode = step.max_query_tokens == 1  # then every row has one new token, padding included
    return StepView(
        pool=step.pool,
        history_table=step.history_table,
        window_table=step.window_table,
        seq_lens=step.seq_lens,
        query_start=None if decode else step.query_start,
        rows=int(step.seq_lens.shape[0]),
    )


def decode_part(view: StepView, rows: int) -> Part:
    """The first ``rows`` rows of a step, of one new token or padding each."""
    return Part(_rows(view, 0, rows, decode=True), slice(0, rows))


def _part(view: StepView, run: tuple[int, int], starts: npt.NDArray[np.int32], *, decode: bool) -> Part:
    begin, end = run
    return Part(_rows(view, begin, end, decode=decode), slice(int(starts[begin]), int(starts[end])))


def _rows(view: StepView, begin: int, end: int, *, decode: bool) -> StepView:
    assert view.query_start is not None
    return StepView(
        pool=view.pool,
        history_table=view.history_table[begin:end],
        window_table=view.window_table[begin:end],
        seq_lens=view.seq_lens[begin:end],
        query_start=None if decode else view.query_start[begin : end + 1],
        rows=end - begin,
    )
