"""Step times read from the arrival of tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loopkv.bench.served_steps import StepWindow, TokenTimes, step_windows, windows_from_json, windows_to_json
from loopkv.errors import LoopKVError


def steady(prompt: int, start: float, step: float, tokens: int, interval: int = 1) -> TokenTimes:
    """A request that gains a token every ``step`` seconds, sent in chunks of ``interval``."""
    chunks = np.arange(0, tokens, interval) * step + start
    return TokenTimes(prompt, 1 + (len(chunks) - 1) * interval, chunks.tolist())


def test_two_requests_that_decode_side_by_side() -> None:
    # 10 ms a token; windows of 1 s. The first decodes from 0 to 4 s, the second from 1.5 to 5.5 s.
    found = step_windows([steady(100, 0.0, 0.01, 401), steady(50, 1.5, 0.01, 401)], window_s=1.0)
    assert [w.start_s for w in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [w.step_ms for w in found] == pytest.approx([10.0] * 5)
    assert [w.decoding for w in found] == pytest.approx([1.0, 1.5, 2.0, 2.0, 1.0])
    # Window 0: the first has 1 token at 0 s and 101 at 1 s: 51 half way. Window 1: 251 of it all through, and of the
    # second, which decodes in its second half alone, 26 half way through that: (251 + 0.5 * 76) / 1.5.
    assert [w.context_tokens for w in found[:2]] == pytest.approx([151.0, (251.0 + 0.5 * 76.0) / 1.5])
    # 5.0 to 5.5 s: nobody decodes through a whole window.
    assert len(found) == 5


def test_chunks_of_several_tokens_give_the_same_times() -> None:
    one = step_windows([steady(100, 0.0, 0.01, 801)], window_s=1.0)
    eight = step_windows([steady(100, 0.0, 0.01, 801, interval=8)], window_s=1.0)
    for a, b in zip(one, eight, strict=True):
        assert (b.step_ms, b.context_tokens) == (pytest.approx(a.step_ms), pytest.approx(a.context_tokens))


def test_a_preempted_request_does_not_decode_while_it_waits() -> None:
    times = steady(100, 0.0, 0.01, 401)
    paused = TokenTimes(100, 401, [t if t <= 1.5 else t + 3.0 for t in times.chunks_s])
    # Out from 1.5 to 4.51 s: the windows in which it stops and comes back are left out, those between do not count it.
    found = step_windows([paused, steady(10, 0.0, 0.02, 500)], window_s=1.0)
    assert [(w.start_s, w.decoding) for w in found] == [
        (0.0, 2.0),
        (2.0, 1.0),
        (3.0, 1.0),
        (5.0, 2.0),
        (6.0, pytest.approx(2.0, abs=0.01)),
        (7.0, 1.0),
        (8.0, 1.0),
    ]
    # One request at 10 ms, one at 20 ms: the median of two is their mean.
    assert [w.step_ms for w in found[:2]] == pytest.approx([15.0, 20.0])


def test_what_says_nothing_is_left_out() -> None:
    assert step_windows([]) == ()
    assert step_windows([TokenTimes(5, 1, [0.3])]) == ()
    assert step_windows([steady(5, 0.0, 0.01, 50)], window_s=1.0) == ()  # half a second


def test_windows_are_kept_in_records() -> None:
    windows = (StepWindow(0.0, 2.5, 1234.5, 3.25), StepWindow(2.0, 3.0, 2000.0, 3.5))
    assert windows_from_json(json.loads(json.dumps(windows_to_json(windows)))) == windows
    for broken in (None, [[1, 2, 3]], [["x", 1, 1, 1]], [[0, 1, 1, 0]], [[0, 0, 1, 1]], [3]):
        with pytest.raises(LoopKVError):
            windows_from_json(broken)
