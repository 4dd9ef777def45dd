"""Steps with several new tokens per row: every query has its own boundary between coded and exact tokens."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.mixed_steps import near_queries, new_keys_values
from torch import Tensor

from loopkv.bench.kernel_reference import plain_bf16, reference_decode, relative_error
from loopkv.engine.attention import KV, policy_attention
from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.kernels.operators import CudaOperators, StepView


def _step(case: Case, counts: list[int]) -> StepView:
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    pool = case.pool.clone()
    return StepView(pool, case.history_table, case.window_table, case.seq_lens, start, len(counts))


def _inputs(case: Case, cell: int, counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q near the planted direction; k, v as the case has them at the last tokens of every row."""
    return near_queries(case, cell, counts, seed), *new_keys_values(case, cell, counts)


def _reference(case: Case, cell: int, row: int, q: Tensor) -> Tensor:
    policy, tokens = case.layout.policy, case.spec.tokens[row]
    first = tokens - q.shape[0]
    recent = policy.history_end(first + 1)

    def segment(pair: tuple[Tensor, Tensor]) -> KV:
        return KV(pair[0].float()[None], pair[1].float()[None])

    sink = case.exact_kv(cell, row, range(min(policy.sink_tokens, tokens)))
    history = (
        case.history_kv(cell, row) if policy.history_end(tokens) > policy.sink_tokens else (sink[0][:0], sink[1][:0])
    )
    exact = case.exact_kv(cell, row, range(min(recent, tokens), tokens))
    return policy_attention(q.float()[None], first, segment(sink), segment(history), segment(exact), policy)[0]


@pytest.mark.parametrize("options", [("share", "int4"), ("int2", "bf16")], ids=["share,int4", "int2,bf16"])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (96, 1), (128, 1), (128, 5), (256, 4), (64, 16)])
def test_every_query_reads_what_its_position_says(dim: int, group: int, options: tuple[str, ...]) -> None:
    spec = CaseSpec((330, 20, 1500, 0), 2, group, dim, options, keep_exact=True, window_block_tokens=10)
    case = make_case(spec, "cuda")
    counts = [70, 20, 1, 0]
    operators = CudaOperators(case.layout, spec.dtype, max_rows=8, device=torch.device("cuda"))
    step = _step(case, counts)
    operators.code_leaving_pages(step)
    for cell in range(2):
        q, k, v = _inputs(case, cell, counts)
        out = torch.full_like(q, math.nan)
        operators.attend(cell, q, k, v, out, step, max_queries=70)
        at = 0
        for row, count in enumerate(counts):
            if count:
                wanted = _reference(case, cell, row, q[at : at + count])
                error = (out[at : at + count].float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
                assert float(error.max()) < 6e-3, (row, int(error.argmax()), float(error.max()))
            at += count


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64, 256])
def test_chunk_size_changes_nothing_but_rounding(chunk: int) -> None:
    """The last 320 tokens of a row in chunks: every query's result within rounding of the one-chunk result."""
    case = make_case(CaseSpec((1000,), 2, 1, 128, ("int4", "int4"), keep_exact=True), "cuda")
    q, k, v = _inputs(case, 0, [320])
    wanted = _reference(case, 0, 0, q)
    out = torch.full_like(q, math.nan)
    operators = CudaOperators(case.layout, case.spec.dtype, max_rows=2, device=torch.device("cuda"))
    pool = case.pool.clone()
    for begin in range(0, 320, chunk):
        end = min(begin + chunk, 320)
        lens = torch.tensor([680 + end], dtype=torch.int32, device="cuda")
        start = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        step = StepView(pool, case.history_table, case.window_table, lens, start, 1)
        operators.code_leaving_pages(step)
        part = slice(begin, end)
        operators.attend(0, q[part], k[part], v[part], out[part], step, max_queries=chunk)
    error = (out.float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
    assert float(error.max()) < 6e-3


def test_a_chunk_longer_than_the_window_reads_its_own_tokens() -> None:
    """700 new tokens, their window blocks null where they leave inside the chunk (poisoned besides)."""
    case = make_case(CaseSpec((1000,), 2, 1, 128, ("int4", "int2"), keep_exact=True), "cuda")
    counts = [700]
    step = _step(case, counts)
    size, policy = case.layout.window_block_tokens, case.layout.policy
    table = case.window_table.clone()
    first, last = -(-300 // size), policy.history_end(1000) // size
    table[0, first:last] = 0
    step = dataclasses.replace(step, window_table=table)
    operators = CudaOperators(case.layout, case.spec.dtype, max_rows=2, device=torch.device("cuda"))
    operators.code_leaving_pages(step)
    for cell in range(2):
        q, k, v = _inputs(case, cell, counts)
        out = torch.full_like(q, math.nan)
        operators.attend(cell, q, k, v, out, step, max_queries=700)
        wanted = _reference(case, cell, 0, q)
        error = (out.float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        assert float(error.max()) < 6e-3


def test_many_tiles_take_several_launches() -> None:
    """1,500 queries are more tiles than one launch takes."""
    case = make_case(CaseSpec((1600, 40), 2, 1, 64, ("int4", "int4"), keep_exact=True), "cuda")
    counts = [1500, 40]
    step = _step(case, counts)
    operators = CudaOperators(case.layout, case.spec.dtype, max_rows=2, device=torch.device("cuda"))
    operators.code_leaving_pages(step)
    q, k, v = _inputs(case, 0, counts)
    out = torch.full_like(q, math.nan)
    operators.attend(0, q, k, v, out, step, max_queries=1500)
    for row, (begin, end) in enumerate(((0, 1500), (1500, 1540))):
        wanted = _reference(case, 0, row, q[begin:end])
        error = (out[begin:end].float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        assert float(error.max()) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_scalar_path_agrees_in_every_dtype(dim: int, dtype: torch.dtype) -> None:
    """fp32 to 2e-6, halves to their own rounding; decode with V precision, then a mixed step."""
    spec = CaseSpec((5, 330, 0, 700), 2, 2, dim, ("share", "int4", "int2", "bf16"), 14.0, dtype=dtype, keep_exact=True)
    case = make_case(spec, "cuda")
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    operators = CudaOperators(case.layout, dtype, max_rows=4, device=torch.device("cuda"), count_hot=True, fused=False)
    step = StepView(case.pool, case.history_table, case.window_table, case.seq_lens, None, 4)
    for cell in range(4):
        operators.hot_values.zero_()
        out = torch.full_like(case.q[cell], math.nan)
        operators.attend(cell, case.q[cell], case.k_new[cell], case.v_new[cell], out, step)
        hot = 0
        for row, tokens in enumerate(spec.tokens):
            if tokens:
                wanted = reference_decode(case, cell, row)
                hot += wanted.hot or 0
                assert relative_error(out[row].float(), wanted.o) < tolerance
        assert hot == int(operators.hot_values)
    counts = [5, 70, 0, 300]
    mixed = _step(case, counts)
    operators.code_leaving_pages(mixed)
    q, k, v = _inputs(case, 1, counts)
    out = torch.full_like(q, math.nan)
    operators.attend(1, q, k, v, out, mixed, max_queries=300)
    for row, (begin, end) in enumerate(((0, 5), (5, 75), (75, 75), (75, 375))):
        if end > begin:
            wanted = _reference(case, 1, row, q[begin:end])
            error = (out[begin:end].float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
            assert float(error.max()) < 2 * tolerance


def test_fused_and_scalar_agree_on_decode() -> None:
    """Two independent kernels and the reference: the fused one within twice the usual rounding of the other."""
    case = make_case(CaseSpec((330, 2500), 4, 1, 128, ("int4", "int4"), 14.0), "cuda")
    step = StepView(case.pool, case.history_table, case.window_table, case.seq_lens, None, 2)
    results = []
    for fused in (True, False):
        operators = CudaOperators(case.layout, case.spec.dtype, max_rows=4, device=torch.device("cuda"), fused=fused)
        out = torch.full_like(case.q[0], math.nan)
        operators.attend(0, case.q[0], case.k_new[0], case.v_new[0], out, step)
        results.append(out.float())
    for row in range(2):
        usual = relative_error(plain_bf16(case, 0, row), reference_decode(case, 0, row, precision=False).o)
        assert relative_error(results[0][row], results[1][row]) < 2 * usual
