"""The CUDA kernels' logic without a GPU: the same sources compiled for the host, against the reference.

Every lane of a warp runs as a fiber; matrix, shuffle and copy instructions are emulated. What this cannot show (races,
the memory model, speed) the GPU tests do.
"""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch
from support.emulator import EmulatedKernels

from loopkv.bench.kernel_reference import plain_bf16, reference_decode, relative_error
from loopkv.codec.pages import page_struct
from loopkv.engine.attention import KV, policy_attention
from loopkv.kernels import prefill_plan
from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.kernels.descriptor import SeedMode
from loopkv.options import INT2, INT4

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) to build the emulation")


def _check_decode(case: Case, kernels: EmulatedKernels, cell: int) -> None:
    pool = case.pool.clone()
    kernels.hot_values.zero_()
    out = kernels.decode(cell, pool=pool)
    hot = 0
    for row, tokens in enumerate(case.spec.tokens):
        if tokens == 0:
            assert bool(out[row].isnan().all())
            continue
        wanted = reference_decode(case, cell, row)
        hot += wanted.hot or 0
        usual = relative_error(plain_bf16(case, cell, row), reference_decode(case, cell, row, precision=False).o)
        assert relative_error(out[row].float(), wanted.o) <= 2 * usual
    assert int(kernels.hot_values) == hot
    assert kernels.arrivals.abs().sum() == 0 and kernels.control[:2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "tau"), [(("share", "int4"), 14.0), (("int4", "int2"), None), (("int2", "bf16"), None)]
)
def test_decode_in_every_option(options: tuple[str, ...], tau: float | None) -> None:
    case = make_case(CaseSpec((5, 321, 0, 1000), 1, 1, 128, options, tau, window_block_tokens=10))
    kernels = EmulatedKernels(case)
    for cell in range(2):
        _check_decode(case, kernels, cell)


def test_decode_without_bulk_copies() -> None:
    case = make_case(CaseSpec((330, 700), 1, 1, 128, ("int4", "int2"), 14.0))
    kernels = EmulatedKernels(case, bulk_copy=False)
    for cell in range(2):
        _check_decode(case, kernels, cell)


def test_grouped_queries_and_two_channel_blocks() -> None:
    case = make_case(CaseSpec((330, 700), 1, 3, 96, ("int4", "int2"), 14.0, history_block_tokens=64))
    kernels = EmulatedKernels(case)
    for cell in range(2):
        _check_decode(case, kernels, cell)


@pytest.mark.parametrize("dim", [64, 96, 256])
def test_one_query_a_head_in_every_head_size(dim: int) -> None:
    """Channel blocks of 128, 64 and 32, alone and after another; 7, 8 and 9 pages of one and two splits."""
    case = make_case(CaseSpec((544, 580, 620), 2, 1, dim, ("int4", "int2"), 14.0, window_block_tokens=10))
    kernels = EmulatedKernels(case)
    for cell in range(2):
        _check_decode(case, kernels, cell)
        plain = kernels.decode(cell, precision=False)
        assert torch.equal(kernels.decode(cell, tau=math.inf, precision=True), plain)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 20.0, 1000.0])
def test_scores_of_any_size(factor: float) -> None:
    """Scores that differ by nothing, or by hundreds from page to page: what was summed so far is brought to new units,
    by factors that no float holds."""
    case = make_case(CaseSpec((1100, 800), 1, 1, 128, ("int4", "int2"), 14.0))
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(case.spec.dtype))
    kernels = EmulatedKernels(case)
    for cell in range(2):
        for row in range(2):
            full = reference_decode(case, cell, row, precision=False).o
            usual = relative_error(plain_bf16(case, cell, row), full)
            for precision in {False, case.layout.has_precision(cell)}:
                wanted = reference_decode(case, cell, row, precision=precision).o
                error = relative_error(kernels.decode(cell, precision=precision)[row].float(), wanted)
                assert error <= 2 * usual, (cell, row, precision)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_query_of_zeros_finds_every_token_as_good_as_the_best(dim: int) -> None:
    """All scores are exactly 0, so nothing is cold even at a threshold of 0 bits."""
    case = make_case(CaseSpec((700,), 1, 1, dim, ("int4", "int4"), 0.0))
    case = dataclasses.replace(case, q=torch.zeros_like(case.q))
    _check_decode(case, EmulatedKernels(case), 0)


@pytest.mark.parametrize("plane", ["v_scales", "k_scales"])
def test_pages_of_equal_tokens_or_channels(plane: str) -> None:
    """Scales of zero, in all pages but the last, and the other way round: weights of zero have no largest one."""
    case = make_case(CaseSpec((900,), 1, 1, 128, ("int4", "int2"), 14.0))
    kernels = EmulatedKernels(case)
    clean = case.pool.clone()
    for cell, option in enumerate((INT4, INT2)):
        struct = page_struct(option, 1, 128, case.layout.policy)
        zeros = getattr(struct, plane)
        first = case.layout.cells[cell].history_offset + zeros.offset
        for zeroed in (slice(0, 17), slice(17, 18)):
            case.pool.copy_(clean)
            for page in range(*zeroed.indices(18)):
                place = page + case.layout.policy.sink_tokens // 32
                block = int(case.history_table[0, place // case.layout.pages_per_block])
                case.history_view()[block, place % case.layout.pages_per_block, first : first + zeros.nbytes] = 0
            wanted = reference_decode(case, cell, 0, precision=False).o
            assert relative_error(kernels.decode(cell, precision=False)[0].float(), wanted) < 6e-3


def test_the_same_bits_from_any_grid_seed_or_batch() -> None:
    case = make_case(CaseSpec((700, 330, 520), 1, 1, 128, ("int4", "int4"), 14.0))
    one, many = EmulatedKernels(case, blocks=1), EmulatedKernels(case, blocks=3)
    pool = case.pool.clone()
    wanted = one.decode(0, pool=pool)
    # In the emulation blocks run one after the other: a split of the first block finds no sink of a later one and
    # computes it itself.
    assert torch.equal(many.decode(0, pool=pool), wanted)
    assert torch.equal(one.decode(0, pool=pool, rows=slice(1, 2))[0], wanted[1])
    plain = one.decode(0, pool=pool, precision=False)
    assert torch.equal(one.decode(0, pool=pool, tau=math.inf, precision=True), plain)
    assert not torch.equal(wanted, plain)
    assert int(one.control[2]) == 4  # epochs: one a launch
    none = one.decode(0, pool=pool, seed=SeedMode.NONE)
    assert bool(none.isfinite().all())


def test_the_same_bits_however_splits_are_grouped() -> None:
    """36 splits of two heads: 72 for 2 warps (groups of eight) or for 64 (single splits at once)."""
    case = make_case(CaseSpec((2600, 0, 2100, 700), 2, 1, 64, ("int4", "int2"), 14.0))
    few, many = EmulatedKernels(case, blocks=1), EmulatedKernels(case, blocks=32)
    for cell in range(2):
        _check_decode(case, few, cell)
        wanted, other = few.decode(cell), many.decode(cell)
        assert all(torch.equal(wanted[row], other[row]) for row in (0, 2, 3))


@pytest.mark.parametrize("blocks", [1, 16])
def test_splits_of_a_number_of_pages_that_is_no_power_of_two(blocks: int) -> None:
    """135 pages: 27 splits of five, in groups of several and alone."""
    case = make_case(CaseSpec((4600,), 1, 1, 64, ("int4", "int2"), 14.0))
    assert case.spec.policy.split_pages(4600) == 5
    kernels = EmulatedKernels(case, blocks=blocks)
    for cell in range(2):
        _check_decode(case, kernels, cell)


def test_pages_and_mixed_steps() -> None:
    """A step of 40 new tokens a row: coded pages byte for byte, every query by its own boundary."""
    case = make_case(CaseSpec((330, 20, 660), 1, 3, 96, ("share", "int4"), keep_exact=True, window_block_tokens=10))
    kernels, policy = EmulatedKernels(case), case.layout.policy
    counts = [40, 20, 40]
    start = torch.tensor([0, 40, 60, 100], dtype=torch.int32)
    before = dataclasses.replace(case, pool=case.pool.clone())
    for row, tokens in enumerate(case.spec.tokens):
        for page in range(policy.history_end(tokens - counts[row]) // 32, policy.history_end(tokens) // 32):
            block = int(case.history_table[row, page // case.layout.pages_per_block])
            before.history_view()[block, page % case.layout.pages_per_block] = 0x5A
    kernels.code_pages(pool=before.pool, seq_lens=case.seq_lens, query_start=start)
    assert torch.equal(case.history_pages(1, 0), before.history_pages(1, 0))
    assert torch.equal(case.history_pages(1, 2), before.history_pages(1, 2))
    for cell in range(2):
        pairs = [
            case.exact_kv(cell, row, range(n - c, n))
            for row, (n, c) in enumerate(zip((330, 20, 660), counts, strict=True))
        ]
        k, v = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        rows = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        q = (case.q[cell][rows].float() * (1 + 0.3 * torch.randn(100, 1, 1))).to(case.spec.dtype)
        kernels.append(cell, k, v, pool=before.pool, seq_lens=case.seq_lens, query_start=start)
        out = kernels.mixed(cell, q, k, v, pool=before.pool, seq_lens=case.seq_lens, query_start=start)
        for row, tokens in enumerate(case.spec.tokens):
            first = tokens - counts[row]
            recent = policy.history_end(first + 1)
            sink = before.exact_kv(cell, row, range(min(32, tokens)))
            history = before.history_kv(cell, row) if tokens > 320 else (sink[0][:0], sink[1][:0])
            exact = before.exact_kv(cell, row, range(min(recent, tokens), tokens))
            segments = (KV(a.float()[None], b.float()[None]) for a, b in (sink, history, exact))
            part = slice(int(start[row]), int(start[row + 1]))
            wanted = policy_attention(q[part].float()[None], first, *segments, policy)[0]
            error = (out[part].float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
            assert float(error.max()) < 6e-3


@pytest.mark.parametrize(
    ("dim", "heads", "options"), [(128, 6, ("int4", "int2", "bf16", "int4")), (256, 2, ("int4", "int2"))]
)
def test_a_history_is_expanded_to_the_bit(dim: int, heads: int, options: tuple[str, ...]) -> None:
    """Coded pages as the codec decodes them, rounded once; exact tokens from window blocks and from the step's own."""
    tokens, counts = (700, 20, 900, 0, 1300), [140, 20, 256, 0, 256]
    case = make_case(CaseSpec(tokens, heads, 1, dim, options, keep_exact=True, window_block_tokens=10))
    kernels, policy = EmulatedKernels(case), case.layout.policy
    new, lens = np.array(counts, np.int32), np.array(tokens, np.int32)
    start = (np.cumsum(new) - new).astype(np.int32)
    rows = prefill_plan.boundaries(policy, np.arange(len(new), dtype=np.int32), start, lens - new, new)
    arrays = prefill_plan.group_arrays(policy, rows, copies=True)
    info = torch.from_numpy(arrays.info)
    tasks = torch.cat([torch.from_numpy(arrays.expand_tasks.astype(np.int32)), torch.tensor([[-1, 7]]).int()])

    def scratch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.full((2, count, heads, dim), math.nan, dtype=torch.bfloat16)
        return k, v

    for cell in range(len(options)):
        pairs = [
            case.exact_kv(cell, row, range(n - count, n))
            for row, (n, count) in enumerate(zip(tokens, counts, strict=True))
        ]
        kv = torch.cat([torch.cat(pair, 1) for pair in pairs])  # tokens lie further apart than their heads
        coded, exact = scratch(rows.scratch_tokens(policy)), scratch(int(rows.exact.sum()) + 1)
        kernels.expand(cell, kv[:, :heads], kv[:, heads:], tasks=tasks, info=info, coded=coded, exact=exact)
        for row, count in enumerate(counts):
            _, _, _, _, first, exact_at, coded_at, read, tail_at = info[row, :9].tolist()
            end = int(rows.coded_end[row])
            token = torch.arange(end)
            place = torch.where(token < read, coded_at + token, tail_at + token - read)
            sink = case.exact_kv(cell, row, range(min(32, end)))
            history = case.history_kv(cell, row) if end > 32 else (sink[0][:0], sink[1][:0])
            near = case.exact_kv(cell, row, range(first, tokens[row]))
            for i in range(2):
                wanted = torch.cat([sink[i].float(), history[i].float()])[:end].bfloat16()
                assert torch.equal(coded[i][place].view(torch.int16), wanted.view(torch.int16)), (cell, row)
                got = exact[i][exact_at : exact_at + int(rows.exact[row])]
                assert torch.equal(got.view(torch.int16), near[i].view(torch.int16)), (cell, row, count)
        assert bool(exact[0][-1].isnan().all()), "nothing is written behind the last token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scalar_path(dtype: torch.dtype) -> None:
    case = make_case(CaseSpec((5, 330, 0, 420), 1, 2, 64, ("int4", "int2"), 14.0, dtype=dtype))
    kernels = EmulatedKernels(case)
    view = case.window_view()
    size = case.layout.window_block_tokens
    for row, tokens in enumerate(case.spec.tokens):
        if tokens:
            block = int(case.window_table[row, (tokens - 1) // size])
            for cell in range(2):
                view[block, cell, 0, (tokens - 1) % size] = case.k_new[cell, row]
                view[block, cell, 1, (tokens - 1) % size] = case.v_new[cell, row]
    for cell in range(2):
        out = kernels.scalar(cell, pool=case.pool)
        for row, tokens in enumerate(case.spec.tokens):
            if tokens:
                error = relative_error(out[row].float(), reference_decode(case, cell, row).o)
                assert error < (2e-6 if dtype == torch.float32 else 5e-3)
