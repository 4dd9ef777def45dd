"""Block arithmetic: exact values derived by hand, and laws over random policies and block sizes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopkv.policy import Policy
from loopkv.residency import Residency

OURO_INT4 = Residency(Policy(), history_block_tokens=32, window_block_tokens=10)


@st.composite
def rules(draw: st.DrawFn) -> Residency:
    page = draw(st.sampled_from((1, 8, 16, 32)))
    policy = Policy(
        sink_tokens=page * draw(st.integers(0, 4)), window_tokens=draw(st.integers(1, 300)), page_tokens=page
    )
    return Residency(policy, page * draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 200)))


def test_tables_of_an_8k_request_by_hand() -> None:
    # E(8192) = 32 * floor((8192 - 256) / 32) = 7936 = 248 pages; entry 0 holds the sink alone and is null.
    assert OURO_INT4.history_entries(8192) == 248
    assert OURO_INT4.history_blocks(8192) == 247
    # Exact: 4 entries hold the 32 sink tokens. While token 8192 is computed, 8191 are processed: E = 7904, so entries
    # from 790 on are live, and ceil(8192 / 10) = 820 exist.
    assert OURO_INT4.window_blocks(8192) == 4 + (820 - 790)
    assert OURO_INT4.window_blocks(8192, unprocessed=2) == 34
    assert OURO_INT4.first_live_window_entry(8192) == 793


def test_nothing_is_coded_before_token_320() -> None:
    assert OURO_INT4.history_entries(319) == 0
    assert OURO_INT4.history_entries(320) == 2
    assert OURO_INT4.leaving_pages(319, 1) == range(1, 2)
    assert OURO_INT4.window_blocks(319) == 32


def test_large_history_blocks_share_block_0_with_the_sink() -> None:
    rule = Residency(Policy(), history_block_tokens=128, window_block_tokens=8)
    assert rule.null_history_entries == 0
    assert [rule.history_blocks(n) for n in (319, 320, 320 + 96, 320 + 97, 512)] == [0, 1, 2, 2, 2]
    assert rule.full_history_entries(383) == 0  # E = 96: block 0 is not complete
    assert rule.full_history_entries(384) == 1


def test_block_sizes_that_fit_no_page_are_refused() -> None:
    with pytest.raises(ValueError, match="48 tokens is no multiple of the page of 32"):
        Residency(Policy(), 48, 8)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        Residency(Policy(), 32, 0)


def test_hits_resume_where_blocks_begin() -> None:
    assert OURO_INT4.grid_tokens == 160
    assert OURO_INT4.last_resume_point(8191) == 8160
    assert OURO_INT4.last_resume_point(159) == 0
    # With 2 history entries at hand (32 coded tokens), E(L) must not pass 64: L <= 351, on the grid 320.
    assert OURO_INT4.last_resume_point(8191, coded_entries=2) == 320
    assert OURO_INT4.last_resume_point(8191, grid_tokens=480) == 8160
    # A window of 100 tokens ends history at 16 * floor((160 - 100) / 16) = 48 of 32: no multiple of 32 resumes there.
    odd = Residency(Policy(window_tokens=100, page_tokens=16), 32, 32)
    assert odd.last_resume_point(8191) == 128  # E(128) = 32, the sink: nothing is coded yet
    assert not odd.can_resume_at(160) and not odd.hits_are_possible


@given(rule=rules(), entries=st.integers(0, 40), more=st.integers(0, 40))
def test_how_long_nothing_changes_is_exact(rule: Residency, entries: int, more: int) -> None:
    tokens = rule.tokens_within_history(entries)
    assert rule.history_entries(tokens) <= entries < rule.history_entries(tokens + 1)
    first = rule.sink_window_entries + more
    processed = rule.tokens_while_first_live(first)
    assert rule.first_live_window_entry(processed) <= first < rule.first_live_window_entry(processed + 1)


@given(rules(), st.integers(0, 3000), st.integers(1, 300))
def test_pages_leave_once_and_have_a_place(rule: Residency, computed: int, new: int) -> None:
    policy = rule.policy
    leaving = rule.leaving_pages(computed, new)
    assert leaving.start * policy.page_tokens == policy.history_end(computed)
    assert leaving.stop == rule.leaving_pages(computed + new, 1).start
    if leaving:
        assert leaving.start * policy.page_tokens >= policy.sink_tokens
        entries = rule.history_entries(computed + new)
        assert (leaving.stop * policy.page_tokens - 1) // rule.history_block_tokens == entries - 1
        first = leaving.start * policy.page_tokens // rule.history_block_tokens
        assert first >= rule.null_history_entries
        assert first >= rule.full_history_entries(computed), "a complete block would be written again"
    if new <= policy.max_exact_chunk_tokens:
        assert leaving.stop * policy.page_tokens <= max(computed, policy.sink_tokens)


@given(rules(), st.integers(0, 3000), st.integers(1, 2000), st.integers(0, 500))
def test_freed_and_null_entries_are_never_read(rule: Residency, processed: int, new: int, in_flight: int) -> None:
    policy, bw = rule.policy, rule.window_block_tokens
    computed = processed + in_flight
    for entry in range(rule.sink_window_entries, rule.first_live_window_entry(processed)):
        assert policy.sink_tokens <= entry * bw
        assert (entry + 1) * bw <= policy.history_end(computed + 1)
    held = rule.window_entries(computed)
    for keep in (True, False):
        for entry in rule.null_window_entries(held, computed + new, keep_resume_point=keep):
            assert entry * bw >= computed, "a token of an earlier chunk is not in this chunk's activations"
            assert (entry + 1) * bw <= policy.history_end(computed + new)
            assert entry >= rule.sink_window_entries


@settings(max_examples=200)
@given(rules(), st.integers(1, 600), st.integers(1, 2500))
@example(Residency(Policy(sink_tokens=8, window_tokens=100, page_tokens=8), 32, 32), 1, 162)
@example(Residency(Policy(), 32, 160), 1, 482)
@example(Residency(Policy(), 128, 128), 7, 1536)
def test_most_window_blocks_is_exact(rule: Residency, in_flight: int, longest: int) -> None:
    most = rule.max_window_blocks(in_flight, longest)
    assert most == max(rule.window_blocks(n, in_flight) for n in range(1, longest + 1))


@settings(max_examples=60)
@given(rules(), st.lists(st.integers(1, 700), min_size=1, max_size=12), st.sampled_from((1, 2)), st.booleans())
def test_long_chunks_hold_no_more_than_said(rule: Residency, chunks: list[int], steps: int, keep: bool) -> None:
    live: set[int] = set()
    ends = [0]
    for chunk in chunks:
        held, tokens = rule.window_entries(ends[-1]), ends[-1] + chunk
        processed = ends[max(0, len(ends) - steps)]
        freed = set(range(rule.sink_window_entries, rule.first_live_window_entry(processed)))
        nulls = rule.null_window_entries(held, tokens, keep_resume_point=keep)
        live = (live - freed) | (set(range(held, rule.window_entries(tokens))) - set(nulls))
        ends.append(tokens)
        assert len(live) <= rule.max_window_blocks_with_nulls(steps, tokens)
        needed = range(rule.policy.history_end(tokens) // rule.window_block_tokens, rule.window_entries(tokens))
        assert live.issuperset(needed)


@given(rules(), st.integers(0, 3000), st.none() | st.integers(0, 60))
def test_resume_points(rule: Residency, limit: int, entries: int | None) -> None:
    tokens = rule.last_resume_point(limit, entries)
    assert 0 <= tokens <= limit
    assert tokens % rule.grid_tokens == 0

    def fits(n: int) -> bool:
        return rule.can_resume_at(n) and (entries is None or rule.history_entries(n) <= entries)

    assert tokens == 0 or fits(tokens)
    assert not any(fits(n) for n in range(tokens + rule.grid_tokens, limit + 1, rule.grid_tokens))


@given(rules())
@example(Residency(Policy(window_tokens=100, page_tokens=16), 112, 8))
def test_hits_land_on_every_multiple_of_the_grid_or_on_none_with_history(rule: Residency) -> None:
    first = -(-(rule.policy.first_coded_position + 1) // rule.grid_tokens)
    for number in range(1, first):
        assert rule.can_resume_at(number * rule.grid_tokens), "nothing is coded there"
    for number in range(first, first + 5):
        assert rule.can_resume_at(number * rule.grid_tokens) is rule.hits_are_possible
