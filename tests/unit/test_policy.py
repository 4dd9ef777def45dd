"""Which tokens are coded for which query."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loopkv.policy import DEFAULT_POLICY, Policy


@pytest.mark.parametrize(
    ("tokens", "end"),
    # S = 32, W = 256, P = 32: max(32, 32 * floor((n - 256) / 32))
    [(1, 32), (256, 32), (287, 32), (288, 32), (319, 32), (320, 64), (351, 64), (352, 96), (8192, 7936)],
)
def test_history_end(tokens, end):
    assert DEFAULT_POLICY.history_end(tokens) == end


def test_the_first_coded_position_is_319():
    first = DEFAULT_POLICY.first_coded_position
    assert first == 319
    assert DEFAULT_POLICY.history_end(first) == 32
    assert DEFAULT_POLICY.history_end(first + 1) == 64


@given(st.integers(1, 10**6))
def test_the_window_holds_at_least_w_and_less_than_w_plus_p_tokens(tokens):
    end = DEFAULT_POLICY.history_end(tokens)
    assert end % 32 == 0
    if end > 32:
        assert 256 <= tokens - end <= 287


@given(st.integers(0, 10**5), st.integers(1, 256))
def test_a_chunk_of_at_most_w_tokens_never_needs_a_page_of_its_own(computed, new):
    assert DEFAULT_POLICY.history_end(computed + new) <= max(computed, DEFAULT_POLICY.sink_tokens)
    assert DEFAULT_POLICY.max_exact_chunk_tokens == 256


@pytest.mark.parametrize("bad", [{"sink_tokens": 33}, {"page_tokens": 0}, {"window_tokens": 0}, {"group": True}])
def test_impossible_constants_are_refused(bad):
    with pytest.raises(ValidationError):
        Policy(**bad)
