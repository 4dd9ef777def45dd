"""Requests resident together on a fixed pool in decode: vLLM's own scheduler against whole-block arithmetic."""

import pytest

pytest.importorskip("vllm", reason="the CPU build of vLLM is not installed")

from support.residents import GIB, PLANS, as_markdown, resident_row


@pytest.mark.parametrize("tokens", [2048, 8192, 16384])
@pytest.mark.parametrize("plan", PLANS)
def test_residents_are_what_whole_blocks_say(plan: str, tokens: int) -> None:
    row = resident_row(plan, tokens, 48 * GIB)
    # For the lengths that the requests had, the scheduler keeps exactly as many as fit by whole blocks ...
    assert row.measured == int(row.predicted_there)
    print(as_markdown([row]).splitlines()[-1])
    # ... which is the figure for the full length, within 2% (a request that lost its blocks for a while is shorter).
    assert abs(row.measured - int(row.predicted)) <= 0.02 * row.predicted
    assert 0 <= row.slack_share < 0.08
    assert 0 <= row.partial_share < 0.08
    # Bytes alone, without sink, window and partial blocks, would promise more than there is.
    assert row.request_bytes > row.stored_bytes * tokens
    if plan == "KIVI-4" and tokens == 8192:
        # 48 GiB / 7.5 MiB = 6,553 blocks, one of them null; 247 + 34 blocks a request: 23.3.
        assert (row.history_blocks, row.window_blocks, row.measured) == (247, 34, 23)
        line = "| KIVI-4 | 8192 | 240 | 247 + 34 | 7.50 | 0.0% | 1.9% | 2108 | 23.32 | 23 | 0.0% |"
        assert line in as_markdown([row])
