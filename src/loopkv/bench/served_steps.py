"""Step times that a server showed in a rung of traffic, read from the times at which its tokens arrived.

A rung is cut into windows of two seconds. In each, the requests that decode all through it give the time per token;
how many decode and how long they are give the bytes of the step. So a ladder's own Records can fit the step-time
model, host time and streaming included, which a benchmark inside the engine's process does not see.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopkv.errors import LoopKVError

WINDOW_S = 2.0
PAUSE_MEDIANS = 10.0
PAUSE_S = 0.1
"""A gap between two chunks longer than both: the request was preempted, and did not decode meanwhile."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When the chunks of one request arrived.

    Args:
        prompt_tokens: of the request.
        output_tokens: tokens that came.
        chunks_s: [chunks] arrival of each in seconds since the first request was sent; the first holds one token, the
            others share the rest evenly.
    """

    prompt_tokens: int
    output_tokens: int
    chunks_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What one window showed.

    Args:
        start_s: its beginning, since the first request was sent.
        decoding: mean number of requests that decode.
        context_tokens: mean length of those.
        step_ms: time per token: the median over the requests that decode all through the window.
    """

    start_s: float
    decoding: float
    context_tokens: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class _Track:
    times: FloatArray
    lengths: FloatArray
    pauses: tuple[tuple[float, float], ...]


def step_windows(requests: Sequence[TokenTimes], window_s: float = WINDOW_S) -> tuple[StepWindow, ...]:
    """The windows of a rung in which at least one request decodes from end to end and none is preempted or resumed.

    Args:
        requests: those that got tokens; one with a single chunk says nothing and is left out.
        window_s: length of a window.
    """
    tracks = [_track(one) for one in requests if len(one.chunks_s) > 1]
    if not tracks:
        return ()
    edges = {edge for track in tracks for pause in track.pauses for edge in pause}
    found = []
    for i in range(math.floor(max(float(track.times[-1]) for track in tracks) / window_s)):
        start, end = i * window_s, (i + 1) * window_s
        if any(start <= edge < end for edge in edges):
            continue
        window = _window(tracks, start, end)
        if window is not None:
            found.append(window)
    return tuple(found)


def _track(request: TokenTimes) -> _Track:
    times = np.asarray(request.chunks_s, dtype=np.float64)
    tokens = np.linspace(1.0, request.output_tokens, len(times))
    gaps = np.diff(times)
    limit = max(PAUSE_S, PAUSE_MEDIANS * float(np.median(gaps)))
    pauses = tuple((float(times[i]), float(times[i + 1])) for i in np.flatnonzero(gaps > limit))
    return _Track(times, request.prompt_tokens + tokens, pauses)


def _window(tracks: Sequence[_Track], start: float, end: float) -> StepWindow | None:
    decoding = contexts = 0.0
    steps = []
    for track in tracks:
        first, last = float(track.times[0]), float(track.times[-1])
        begin, stop = max(first, start), min(last, end)
        if stop <= begin or any(low <= start and end <= high for low, high in track.pauses):
            continue
        share = (stop - begin) / (end - start)
        before, middle, after = np.interp((begin, (begin + stop) / 2, stop), track.times, track.lengths)
        decoding += share
        contexts += share * float(middle)
        if share == 1.0 and after > before:
            steps.append((end - start) / float(after - before))
    if not steps:
        return None
    return StepWindow(start, decoding, contexts / decoding, 1e3 * float(np.median(steps)))


def windows_to_json(windows: Sequence[StepWindow]) -> list[list[float]]:
    """Windows as they are kept in ``slo.cell`` Records: [start_s, decoding, context_tokens, step_ms] each."""
    return [
        [round(w.start_s, 3), round(w.decoding, 3), round(w.context_tokens, 1), round(w.step_ms, 4)] for w in windows
    ]


def windows_from_json(rows: object) -> tuple[StepWindow, ...]:
    """The windows of a ``slo.cell`` Record.

    Raises:
        LoopKVError: rows that are not what ``windows_to_json`` writes.
    """
    try:
        assert isinstance(rows, list)
        found = tuple(StepWindow(*(float(number) for number in row)) for row in rows)
        assert all(
            1e-6 < w.step_ms < 1e9 and 0 < w.decoding < 1e6 and 1 <= w.context_tokens < 1e9 and math.isfinite(w.start_s)
            for w in found
        )
    except (AssertionError, TypeError, ValueError, OverflowError):
        raise LoopKVError(
            "slo.cell record: steps", got=json.dumps(rows)[:80], wanted="four possible numbers for each window"
        ) from None
    return found
