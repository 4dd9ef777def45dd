"""Attention primitives against loops over queries, and the bound of V precision (paper Proposition 1)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopkv.codec import decode_values, encode_values
from loopkv.engine.attention import (
    KV,
    cold_attention,
    exact_attention,
    masked_attention,
    merge_partials,
    partial_attention,
    policy_attention,
    policy_mask,
)
from loopkv.policy import DEFAULT_POLICY, MAX_SPLITS, MIN_SPLIT_PAGES, Policy

SMALL = Policy(sink_tokens=8, window_tokens=16, page_tokens=8)
BLOCKS = [(0, 1), (0, 33), (0, 256), (256, 300), (300, 400), (576, 832), (1400, 1401)]
SMALL_BLOCKS = [(0, 16), (16, 32), (31, 32), (32, 48), (100, 116), (1000, 1016)]


class Block:
    """Random queries at [a, b) over b tokens whose decoded keys and values differ from the exact ones."""

    def __init__(self, policy: Policy, a: int, b: int, heads: int, kv_heads: int, dim: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(tokens: int, count: int) -> Tensor:
            return torch.randn(2, tokens, count, dim, generator=generator, dtype=torch.float64)

        self.policy, self.a, self.b, self.group = policy, a, b, heads // kv_heads
        self.q = 3.0 * random(b - a, heads)
        self.k, self.v, self.coded_k, self.coded_v, self.cold_v = (random(b, kv_heads) for _ in range(5))
        start, end = policy.history_end(a + 1), policy.history_end(b)
        sink = policy.sink_tokens
        self.sink = KV(self.k[:, : min(sink, b)], self.v[:, : min(sink, b)])
        self.history = KV(self.coded_k[:, sink:end], self.coded_v[:, sink:end])
        self.history_cold = self.cold_v[:, sink:end]
        self.recent = KV(self.k[:, start:b], self.v[:, start:b])

    def one(self, batch: int, position: int, head: int, tau: float | None = None) -> tuple[Tensor, int]:
        """Output and hot count of one query by the definition, token by token."""
        policy, kv_head, n = self.policy, head // self.group, position + 1
        sink, end = policy.sink_tokens, policy.history_end(n)
        coded = torch.arange(n).ge(sink) & torch.arange(n).lt(end)
        k = torch.where(coded[:, None], self.coded_k[batch, :n, kv_head], self.k[batch, :n, kv_head])
        v = torch.where(coded[:, None], self.coded_v[batch, :n, kv_head], self.v[batch, :n, kv_head])
        scale = k.shape[-1] ** -0.5
        cold = [False] * n
        if tau is not None and end > sink:
            cold = [bool(c) for c in coded]
            for other in range(kv_head * self.group, (kv_head + 1) * self.group):
                s = (k @ self.q[batch, position - self.a, other] * scale).tolist()
                seed, page, split = max(s[:sink]), policy.page_tokens, policy.split_pages(n) * policy.page_tokens
                for j in range(sink, end):
                    first = sink + (j - sink) // split * split
                    last = sink + (j - sink) // page * page + page
                    if not s[j] < max([seed, *s[first:last]]) - tau * math.log(2):
                        cold[j] = False
        v = torch.where(torch.tensor(cold)[:, None], self.cold_v[batch, :n, kv_head], v)
        weights = torch.softmax(k @ self.q[batch, position - self.a, head] * scale, dim=0)
        return weights @ v, sum(1 for j in range(sink, end) if not cold[j])


def _positions(a: int, b: int) -> list[int]:
    return sorted({a, (a + b) // 2, b - 1})


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("policy", "span"), [(DEFAULT_POLICY, s) for s in BLOCKS] + [(SMALL, s) for s in SMALL_BLOCKS])
def test_each_query_has_its_own_boundary(policy, span, heads, kv_heads):
    block = Block(policy, *span, heads, kv_heads)
    o = policy_attention(block.q, block.a, block.sink, block.history, block.recent, policy)
    for position in _positions(*span):
        for head in range(heads):
            expected, _ = block.one(1, position, head)
            assert torch.allclose(o[1, position - block.a, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("policy", "span"), [(DEFAULT_POLICY, (576, 640)), (SMALL, (31, 47)), (SMALL, (1292, 1300))])
def test_cold_tokens_are_those_of_the_rule(policy, span, heads, kv_heads, tau):
    block = Block(policy, *span, heads, kv_heads)
    o, hot = cold_attention(block.q, block.a, block.sink, block.history, block.history_cold, block.recent, policy, tau)
    for position in _positions(*span):
        for head in range(heads):
            expected, count = block.one(0, position, head, tau)
            assert torch.allclose(o[0, position - block.a, head], expected, rtol=0, atol=1e-12)
            assert hot[0, position - block.a, head // block.group] == count


def test_a_block_without_history_has_nothing_cold():
    block = Block(DEFAULT_POLICY, 100, 140, 4, 2)
    o, hot = cold_attention(
        block.q, block.a, block.sink, block.history, block.history_cold, block.recent, DEFAULT_POLICY, 0.0
    )
    assert torch.equal(o, policy_attention(block.q, 100, block.sink, block.history, block.recent, DEFAULT_POLICY))
    assert not hot.any()


def test_a_tau_that_no_score_reaches_reads_everything_in_full():
    block = Block(DEFAULT_POLICY, 576, 640, 4, 2)
    o, hot = cold_attention(
        block.q, block.a, block.sink, block.history, block.history_cold, block.recent, DEFAULT_POLICY, 1e6
    )
    full = policy_attention(block.q, block.a, block.sink, block.history, block.recent, DEFAULT_POLICY)
    assert torch.allclose(o, full, rtol=0, atol=1e-12)
    ends = [DEFAULT_POLICY.history_end(n) - 32 for n in range(577, 641)]
    assert torch.equal(hot, torch.tensor(ends)[None, :, None].expand(2, -1, 2))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    tau=st.floats(0.0, 8.0),
    spread=st.floats(0.1, 8.0),
    group=st.integers(1, 3),
    last=st.integers(40, 400),
)
def test_v_precision_changes_the_output_by_at_most_one_and_a_half_steps(seed, tau, spread, group, last):
    """|o - o_int4|_inf <= 1.5 * sum over cold j of a_j * sigma_j (paper Proposition 1), per query and head."""
    block = Block(SMALL, last - 4, last, 2 * group, 2, dim=32, seed=seed)
    end = SMALL.history_end(last)
    coded = encode_values(spread * block.coded_v[:, 8:end].unflatten(1, (-1, 8)), 4, 32)
    everywhere = torch.ones(coded.q.shape[:-1], dtype=torch.bool)
    values = decode_values(coded, torch.float64).flatten(1, 2)
    cold_values = decode_values(coded, torch.float64, cold=everywhere).flatten(1, 2)
    history = KV(block.history.k, values)
    o, hot = cold_attention(block.q, block.a, block.sink, history, cold_values, block.recent, SMALL, tau)
    full = policy_attention(block.q, block.a, block.sink, history, block.recent, SMALL)
    sigma = coded.scale.double().flatten(1, 2)[..., 0]  # [B, N, H]: one group of 32 channels
    sigma = torch.cat([torch.zeros(2, 8, 2), sigma, torch.zeros(2, block.recent.k.shape[1], 2)], dim=1)
    # The attention weights come out when every token's value is its own sigma and the cold ones are found by the rule.
    joined_k = torch.cat([block.sink.k, history.k, block.recent.k], dim=1)
    mask = policy_mask(SMALL, block.a, 4, torch.device("cpu"))
    scores = torch.einsum("bthgd,bnhd->bhgtn", block.q.unflatten(2, (2, group)), joined_k) * 32**-0.5
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    bound = torch.zeros(2, 4, 2 * group, dtype=torch.float64)
    for b in range(2):
        for t in range(4):
            for h in range(2):
                cold = _cold_tokens(block, b, block.a + t, h, tau)
                assert hot[b, t, h] == SMALL.history_end(block.a + t + 1) - 8 - len(cold)
                for g in range(group):
                    part = sum(float(weights[b, h, g, t, j] * sigma[b, j, h]) for j in cold)
                    bound[b, t, h * group + g] = 1.5 * part
    assert ((o - full).abs().amax(-1) <= bound + 1e-12).all()


def _cold_tokens(block: Block, batch: int, position: int, kv_head: int, tau: float) -> list[int]:
    policy, n = block.policy, position + 1
    sink, page, end = policy.sink_tokens, policy.page_tokens, policy.history_end(n)
    split = policy.split_pages(n) * page
    cold = set(range(sink, end))
    k = torch.cat([block.k[batch, :sink, kv_head], block.coded_k[batch, sink:end, kv_head]])
    for head in range(kv_head * block.group, (kv_head + 1) * block.group):
        s = (k @ block.q[batch, position - block.a, head] * k.shape[-1] ** -0.5).tolist()
        for j in range(sink, end):
            first, last = sink + (j - sink) // split * split, sink + (j - sink) // page * page + page
            if s[j] >= max([*s[:sink], *s[first:last]]) - tau * math.log(2):
                cold.discard(j)
    return sorted(cold)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_exact_attention_is_causal_softmax(dtype, heads, kv_heads):
    block = Block(DEFAULT_POLICY, 40, 340, heads, kv_heads)
    q, kv = block.q.to(dtype), KV(block.k.to(dtype), block.v.to(dtype))
    o = exact_attention(q, kv, 40)
    assert o.dtype == dtype
    causal = torch.arange(340) <= torch.arange(40, 340)[:, None]
    wide = KV(kv.k.double(), kv.v.double())
    expected = partial_attention(q.double(), wide, causal).o
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert torch.allclose(o.double(), expected, rtol=tolerance, atol=tolerance)


def test_later_tokens_of_the_buffer_are_not_read():
    block = Block(DEFAULT_POLICY, 40, 60, 4, 2)
    k, v = block.k.clone(), block.v.clone()
    o = exact_attention(block.q[:, :10], KV(k, v), 40)
    k[:, 50:], v[:, 50:] = math.nan, math.nan
    assert torch.equal(o, exact_attention(block.q[:, :10], KV(k, v), 40))


def test_partials_merge_to_the_whole():
    block = Block(DEFAULT_POLICY, 300, 400, 4, 2)
    whole = policy_attention(block.q, 300, block.sink, block.history, block.recent, DEFAULT_POLICY)
    mask = policy_mask(DEFAULT_POLICY, 300, 100, torch.device("cpu"))
    parts, start = [], 0
    for segment in (block.sink, block.history, block.recent):
        end = start + segment.k.shape[1]
        parts.append(partial_attention(block.q, segment, mask[:, start:end]))
        start = end
    merged = merge_partials(parts)
    assert torch.allclose(merged.o, whole, rtol=0, atol=1e-12)
    # Query 300 sees 301 tokens, whose history is empty: that part has no weight and does not spoil the sum.
    assert (parts[1].lse[:, 0] == -math.inf).all() and (parts[1].o[:, 0] == 0).all()


def test_grouped_queries_equal_repeated_heads():
    block = Block(DEFAULT_POLICY, 0, 20, 6, 2)
    kv = KV(block.k, block.v)
    repeated = KV(block.k.repeat_interleave(3, dim=2), block.v.repeat_interleave(3, dim=2))
    assert torch.allclose(masked_attention(block.q, kv), masked_attention(block.q, repeated), rtol=0, atol=1e-12)


@given(st.integers(1, 2**22))
def test_splits_depend_on_the_length_alone_and_stay_few(tokens):
    policy = DEFAULT_POLICY
    split = policy.split_pages(tokens)
    pages = (policy.history_end(tokens) - policy.sink_tokens) // policy.page_tokens
    assert split >= MIN_SPLIT_PAGES
    assert math.ceil(pages / split) <= MAX_SPLITS
    assert split == MIN_SPLIT_PAGES or math.ceil(pages / (split - 1)) > MAX_SPLITS


@pytest.mark.parametrize(
    ("tokens", "split"), [(320, 4), (4384, 4), (4416, 5), (8192, 8), (8544, 9), (16384, 16), (32768, 32)]
)
def test_split_sizes(tokens, split):
    # 4384 tokens: 128 pages = 32 splits of 4; one page more needs splits of 5.
    assert DEFAULT_POLICY.split_pages(tokens) == split
