"""The codec kernel: every byte of every page as the reference codes it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from loopkv.codec import sanitize
from loopkv.kernels.cases import Case, CaseSpec, coded_pages, make_case
from loopkv.kernels.operators import CudaOperators, StepView


def _leaving(case: Case, new_tokens: int, fill: int = 0x5A) -> tuple[Case, StepView, CudaOperators]:
    """The case before its last ``new_tokens`` tokens: pages that leave with them are overwritten with ``fill``."""
    policy, layout, rows = case.layout.policy, case.layout, len(case.spec.tokens)
    before = dataclasses.replace(case, pool=case.pool.clone())
    counts = [min(new_tokens, tokens) for tokens in case.spec.tokens]
    for row, tokens in enumerate(case.spec.tokens):
        first, last = policy.history_end(max(tokens - counts[row], 0)), policy.history_end(tokens)
        for page in range(first // policy.page_tokens, last // policy.page_tokens if tokens else 0):
            block = int(case.history_table[row, page // layout.pages_per_block])
            before.history_view()[block, page % layout.pages_per_block] = fill
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    step = StepView(before.pool, case.history_table, case.window_table, case.seq_lens, start, rows)
    operators = CudaOperators(layout, case.spec.dtype, max_rows=16, device=torch.device("cuda"))
    return before, step, operators


def _assert_pages_equal(case: Case, coded: Case) -> int:
    pages = 0
    for cell, place in enumerate(case.layout.cells):
        if place.holder != cell:
            continue
        for row, tokens in enumerate(case.spec.tokens):
            if tokens:
                wanted, got = case.history_pages(cell, row), coded.history_pages(cell, row)
                different = (wanted != got).nonzero()
                where = different[0].tolist() if len(different) else None
                assert where is None, f"cell {cell}, row {row}: page, byte {where}, {len(different)} bytes differ"
                pages += wanted.shape[0]
    return pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_pages_are_bit_equal(dim: int, dtype: torch.dtype) -> None:
    spec = CaseSpec((352, 0, 700, 1504), 3, 1, dim, ("int4", "int2", "int4", "bf16"), keep_exact=True, dtype=dtype)
    case = make_case(dataclasses.replace(spec, window_block_tokens=10, history_block_tokens=64), "cuda")
    for new_tokens in (1, 70, 256):
        before, step, operators = _leaving(case, new_tokens)
        operators.code_leaving_pages(step)
        assert _assert_pages_equal(case, before) > 40
        policy = case.layout.policy
        leaving = sum(
            (policy.history_end(n) - policy.history_end(max(n - new_tokens, 0))) // policy.page_tokens
            for n in spec.tokens
            if n
        )
        assert operators.code_counters.tolist() == [leaving, 0]


def test_pages_of_a_long_chunk_are_coded_by_their_cell() -> None:
    """600 new tokens: pages that hold tokens of the chunk come from its keys and values, not from the window."""
    case = make_case(CaseSpec((900, 1500), 2, 1, 128, ("int4", "int2"), keep_exact=True), "cuda")
    before, step, operators = _leaving(case, 600)
    operators.code_leaving_pages(step)
    for cell in range(2):
        parts = [case.exact_kv(cell, row, range(n - 600, n)) for row, n in enumerate(case.spec.tokens)]
        k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        out = torch.empty(len(k), 2, 128, dtype=k.dtype, device="cuda")
        operators.attend(cell, k.clone(), k, v, out, step, max_queries=600)
    _assert_pages_equal(case, before)


def test_hostile_values_are_coded_as_the_reference_codes_them() -> None:
    """NaN, infinities, values beyond fp16, equal and tiny values, both zeros: bit-equal, counted, and never NaN."""
    case = make_case(CaseSpec((352,), 2, 1, 128, ("int4", "int2"), keep_exact=True, dtype=torch.float32), "cuda")
    policy = case.layout.policy
    view = case.window_view()
    size = case.layout.window_block_tokens
    position = torch.arange(policy.sink_tokens, policy.history_end(352), device="cuda")
    blocks = case.window_table[0].long()[position // size]
    generator = torch.Generator("cuda").manual_seed(1)
    clamped = 0
    pages = torch.arange(policy.sink_tokens // 32, policy.history_end(352) // 32, device="cuda")
    history = case.history_table[0].long()[pages // case.layout.pages_per_block]
    for cell in range(2):
        parts = []
        for part in range(2):
            x = torch.randn(len(position), 2, 128, device="cuda", generator=generator)
            x[:, 0, 0:4] = torch.tensor([math.nan, math.inf, -math.inf, 1e5], device="cuda")
            x[:, 0, 8] = 0.0
            x[::2, 0, 8] = -0.0
            x[:, 0, 16] = 3.25
            x[:, 0, 32:64] = 7.0
            x[:, 0, 64:96] *= 1e-7
            x[:, 1, 0:32] *= 6e4
            x[:, 1, 40] *= 1e-8
            view[blocks, cell, part, position % size] = x
            parts.append(x)
            clamped += sanitize(x)[1]
        data = coded_pages(case.layout, cell, *parts)
        offset = case.layout.cells[cell].history_offset
        case.history_view()[history, pages % case.layout.pages_per_block, offset : offset + data.shape[1]] = data
    before, step, operators = _leaving(case, 32)
    case_pages = policy.history_end(352) // 32 - policy.history_end(320) // 32
    operators.code_leaving_pages(step)
    _assert_pages_equal(case, before)
    assert operators.code_counters.tolist()[0] == case_pages == 1
    last = slice(-32, None)
    counted = sum(
        sanitize(view[blocks, cell, part, position % size][last])[1] for cell in range(2) for part in range(2)
    )
    assert operators.code_counters.tolist()[1] == counted
    for cell in range(2):
        for x in before.history_kv(cell, 0):
            assert bool(x.isfinite().all())


def test_nothing_leaves_nothing_is_written() -> None:
    case = make_case(CaseSpec((353, 700), 2, 1, 128, ("int4", "int4"), keep_exact=True), "cuda")
    pool = case.pool.clone()
    step = StepView(pool, case.history_table, case.window_table, case.seq_lens, None, 2)
    operators = CudaOperators(case.layout, case.spec.dtype, max_rows=4, device=torch.device("cuda"))
    operators.code_leaving_pages(step)
    assert torch.equal(pool, case.pool)
    assert operators.code_counters.tolist() == [0, 0]
