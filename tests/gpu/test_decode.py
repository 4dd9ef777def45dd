"""Fused decode attention: right within the usual rounding, and the same bits however a row is batched or launched."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from loopkv.bench.kernel import step_view
from loopkv.bench.kernel_reference import plain_bf16, reference_decode, relative_error
from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.kernels.descriptor import SeedMode, max_parts
from loopkv.kernels.operators import CudaOperators, StepView

SHAPES = [(dim, group) for dim in (64, 96, 128, 256) for group in (1, 2, 3, 4, 5, 6, 7, 8, 16)]
OPTIONS = [(("int4", "int4"), None), (("share", "int4"), 14.0), (("int2", "bf16"), None)]
EDGES = (1, 31, 32, 33, 287, 288, 319, 320, 321, 351, 352, 353, 1000, 2501, 4600)


@functools.lru_cache(maxsize=4)
def _case(spec: CaseSpec) -> Case:
    return make_case(spec, "cuda")


def _operators(case: Case, **options: object) -> CudaOperators:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = max(16, len(case.spec.tokens))
    return CudaOperators(case.layout, case.spec.dtype, max_rows=rows, device=device, **options)  # type: ignore[arg-type]


def _attend(operators: CudaOperators, case: Case, cell: int, rows: slice = slice(None), **options: object) -> Tensor:
    """o [B, Hq, D] of some rows, poisoned first; the pool's copy of the newest token is written each time."""
    q, k, v = (x[cell, rows] for x in (case.q, case.k_new, case.v_new))
    out = torch.full_like(q, math.nan)
    step = step_view(case)
    step = dataclasses.replace(
        step,
        history_table=step.history_table[rows],
        window_table=step.window_table[rows],
        seq_lens=step.seq_lens[rows],
        rows=q.shape[0],
    )
    operators.attend(cell, q, k, v, out, step, **options)  # type: ignore[arg-type]
    return out


def _check_errors(case: Case, cell: int, out: Tensor) -> int:
    """Every row within twice the error of plain PyTorch attention in BF16; the hot values the reference counts."""
    hot = 0
    for row, tokens in enumerate(case.spec.tokens):
        if tokens == 0:
            assert bool(out[row].isnan().all()), "a padded row was written"
            continue
        wanted = reference_decode(case, cell, row)
        hot += wanted.hot or 0
        usual = relative_error(plain_bf16(case, cell, row), reference_decode(case, cell, row, precision=False).o)
        error = relative_error(out[row].float(), wanted.o)
        assert error <= 2 * max(usual, 1e-3), (
            f"cell {cell}, row {row} of {tokens} tokens: {error:.2e}, usual {usual:.2e}"
        )
    return hot


@pytest.mark.parametrize(("options", "tau"), OPTIONS, ids=["int4", "share+v", "int2,bf16"])
@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_every_shape_and_option(dim: int, group: int, options: tuple[str, ...], tau: float | None) -> None:
    spec = CaseSpec((330, 0, 1300), 2, group, dim, options, tau, seed=dim + group, window_block_tokens=10)
    case = _case(spec)
    operators = _operators(case, count_hot=True)
    for cell in range(2):
        operators.hot_values.zero_()
        hot = _check_errors(case, cell, _attend(operators, case, cell))
        if tau is not None:  # a score within rounding of the threshold may fall either way
            assert abs(hot - int(operators.hot_values)) <= 0.01 * hot


@pytest.mark.parametrize(("options", "tau"), OPTIONS, ids=["int4", "share+v", "int2,bf16"])
def test_lengths_around_every_boundary(options: tuple[str, ...], tau: float | None) -> None:
    case = _case(CaseSpec(EDGES, 2, 1, 128, options, tau, history_block_tokens=64, window_block_tokens=12))
    operators = _operators(case)
    for cell in range(2):
        _check_errors(case, cell, _attend(operators, case, cell))


def test_the_newest_token_is_written_to_the_window() -> None:
    case = _case(CaseSpec((5, 700), 2, 1, 128))
    size = case.layout.window_block_tokens
    _attend(_operators(case), case, 1)
    view = case.window_view()
    for row, tokens in enumerate(case.spec.tokens):
        block = int(case.window_table[row, (tokens - 1) // size])
        for part, new in enumerate((case.k_new, case.v_new)):
            assert torch.equal(view[block, 1, part, (tokens - 1) % size], new[1, row])


@pytest.mark.parametrize("seed", [SeedMode.SINK, SeedMode.NONE])
@pytest.mark.parametrize(("options", "tau"), OPTIONS, ids=["int4", "share+v", "int2,bf16"])
def test_a_row_alone_and_in_any_batch_is_the_same(options: tuple[str, ...], tau: float | None, seed: SeedMode) -> None:
    tokens = (2100, 330, 0, 900, 45, 5000, 1300, 320)
    case = _case(CaseSpec(tokens, 4, 1, 128, options, tau))
    operators = _operators(case, seed=seed)
    for cell in range(2):
        together = _attend(operators, case, cell)
        for row, length in enumerate(tokens):
            if length:
                assert torch.equal(_attend(operators, case, cell, slice(row, row + 1))[0], together[row])
        assert torch.equal(_attend(operators, case, cell, slice(3, 7)), together[3:7])
        for _ in range(10):
            assert torch.equal(_attend(operators, case, cell)[[0, 1, 3, 4, 5]], together[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(("options", "tau"), OPTIONS, ids=["int4", "share+v", "int2,bf16"])
def test_a_row_alone_and_in_a_large_batch_is_the_same(options: tuple[str, ...], tau: float | None) -> None:
    """39 rows of 31 splits, 16 heads: warps read four splits in a row at first, two later, one at the end."""
    tokens = (8192,) * 39 + (700,)
    case = _case(CaseSpec(tokens, 16, 1, 128, options, tau))
    operators = CudaOperators(case.layout, case.spec.dtype, max_rows=40, device=torch.device("cuda", 0))
    for cell in range(2):
        together = _attend(operators, case, cell)
        for row in (0, 12, 20, 29, 38, 39):
            assert torch.equal(_attend(operators, case, cell, slice(row, row + 1))[0], together[row])
        assert torch.equal(_attend(operators, case, cell), together)


def test_infinite_threshold_is_the_plain_reader_bit_for_bit() -> None:
    case = _case(CaseSpec((2100, 330, 900, 5000), 16, 1, 128, ("share", "int4"), 14.0))
    operators = _operators(case)
    for cell in range(2):
        plain = _attend(operators, case, cell, precision=False)
        assert torch.equal(_attend(operators, case, cell, tau=math.inf), plain)
        assert not torch.equal(_attend(operators, case, cell), plain)


@pytest.mark.parametrize(("options", "tau"), OPTIONS, ids=["int4", "share+v", "int2,bf16"])
def test_graph_replay_is_eager_bit_for_bit_and_never_syncs(options: tuple[str, ...], tau: float | None) -> None:
    case = _case(CaseSpec((2100, 330, 900, 5000), 16, 1, 128, options, tau))
    operators, step = _operators(case), step_view(case)
    eager = [_attend(operators, case, cell) for cell in range(2)]
    outs = [torch.zeros_like(case.q[cell]) for cell in range(2)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph, stream=stream):
                operators.code_leaving_pages(step)
                for cell in range(2):
                    operators.attend(cell, case.q[cell], case.k_new[cell], case.v_new[cell], outs[cell], step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(5):
            for out in outs:
                out.zero_()
            graph.replay()
            stream.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(outs, eager, strict=True))


def test_seeds_none_and_timed_only_read_more() -> None:
    """A seed of -inf keeps more tokens hot than the sink's; a timed one lies between; all stay right."""
    case = _case(CaseSpec((3000, 900), 8, 1, 128, ("int4", "int4"), 14.0))
    counts = {}
    for seed in SeedMode:
        operators = _operators(case, seed=seed, count_hot=True)
        out = _attend(operators, case, 0)
        counts[seed] = int(operators.hot_values)
        for row in range(2):
            assert relative_error(out[row].float(), reference_decode(case, 0, row, precision=False).o) < 1e-2
    assert counts[SeedMode.SINK] <= counts[SeedMode.TIMED] <= counts[SeedMode.NONE]


def _merged(operators: CudaOperators, case: Case) -> Tensor:
    """The result of the last launch in fp64, from its fp32 partials: [B, H, D] (one query per kv head)."""
    rows, heads, parts = len(case.spec.tokens), case.spec.kv_heads, max_parts(case.layout.policy)
    o = operators.partial_o[: rows * heads * parts].view(rows, heads, parts, -1).double()
    ml = operators.partial_ml[: rows * heads * parts].view(rows, heads, parts, 2).double()
    best = ml[..., 0].amax(-1, keepdim=True)
    weight = torch.exp2(ml[..., 0] - best)
    weight[ml[..., 1] == 0] = 0.0  # a part that the row does not have
    return (o * weight.unsqueeze(-1)).sum(2) / (ml[..., 1] * weight).sum(-1, keepdim=True)


def test_proposition_1_on_a_thousand_rows() -> None:
    """|o - o_int4| <= 1.5 * (weight of the cold tokens, each times its value scale): 64 rows x 16 heads."""
    from loopkv.codec.pages import page_struct, unpack_page
    from loopkv.options import INT4

    case = _case(CaseSpec((1500, 700, 2300, 400) * 16, 16, 1, 128, ("int4", "int4"), 8.0, hot_share=0.15, seed=9))
    policy, scale = case.layout.policy, case.scale
    differences = []
    for precision in (False, True):
        operators = _operators(case)
        operators.partial_ml[:, 0] = -math.inf
        operators.partial_ml[:, 1] = 0.0
        _attend(operators, case, 0, precision=precision)
        differences.append(_merged(operators, case))
    difference = (differences[1] - differences[0]).abs().amax(-1)  # [B, H]
    struct = page_struct(INT4, 16, 128, policy)
    checked = 0
    for row, tokens in enumerate(case.spec.tokens):
        end = policy.history_end(tokens)
        q = case.q[0, row].double()
        coded = case.history_kv(0, row)[0].double()
        others = list(range(policy.sink_tokens)) + list(range(end, tokens))
        exact = case.exact_kv(0, row, others)[0].double()
        scores = torch.einsum("nhd,hd->hn", torch.cat([exact, coded]), q) * scale
        weights = torch.softmax(scores, -1)[:, len(others) :]
        history = scores[:, len(others) :].unflatten(-1, (-1, policy.page_tokens))
        split = policy.split_pages(tokens)
        page_best = history.amax(-1)
        padded = torch.nn.functional.pad(page_best, (0, -page_best.shape[-1] % split), value=-math.inf)
        running = padded.unflatten(-1, (-1, split)).cummax(-1).values.flatten(-2)[:, : page_best.shape[-1]]
        seed = scores[:, : policy.sink_tokens].amax(-1, keepdim=True)
        bar = torch.maximum(running, seed).unsqueeze(-1) - 8.0 * math.log(2.0)
        cold = (history < bar + 1e-3).flatten(-2)  # what rounding may make cold counts too
        sigma = unpack_page(struct, case.history_pages(0, row))[1].scale.double().flatten(0, 1).amax(-1).T  # [H, N]
        bound = 1.5 * (weights * cold * sigma).sum(-1)
        slack = 1e-5 * differences[0][row].abs().amax(-1)
        assert bool((difference[row] <= bound + slack).all()), (row, difference[row], bound)
        checked += len(bound)
    assert checked == 1024
    assert bool((difference > 0).any())


def test_offsets_beyond_four_gigabytes() -> None:
    """Blocks of the same rows at the far end of a 9 GB pool: 32-bit offsets would wrap."""
    case = _case(CaseSpec((900, 2100), 4, 1, 128, ("int4", "int2"), 14.0))
    wanted = [_attend(_operators(case), case, cell) for cell in range(2)]
    blocks, size = case.pool.shape
    shift = 9 * (1 << 30) // size
    pool = torch.empty((shift + blocks, size), dtype=torch.uint8, device="cuda")
    pool[shift:] = case.pool
    history, window = (torch.where(table > 0, table + shift, 0) for table in (case.history_table, case.window_table))
    far = dataclasses.replace(case, pool=pool, history_table=history, window_table=window)
    operators = _operators(far)
    for cell in range(2):
        assert torch.equal(_attend(operators, far, cell), wanted[cell])
    del pool, far
    torch.cuda.empty_cache()


@pytest.mark.parametrize("magnitude", [1e-7, 1e-3, 3e3, 6e4])
def test_values_and_keys_of_any_size(magnitude: float) -> None:
    """Scales from subnormal to the largest: finite, and as exact as the page allows."""
    spec = CaseSpec((1300,), 2, 1, 128, ("int4", "int2"), None)
    case = make_case(spec, "cuda")
    scaled = dataclasses.replace(case, pool=case.pool.clone())
    from loopkv.codec import encode_keys, encode_values
    from loopkv.codec.pages import pack_page, page_struct

    policy = case.layout.policy
    for cell in range(2):
        option = case.layout.cells[cell].option
        struct = page_struct(option, 2, 128, policy)
        keys, _ = case.history_kv(cell, 0)
        values = torch.randn(keys.shape, device="cuda") * magnitude
        keys, values = (x.unflatten(0, (-1, policy.page_tokens)) for x in (keys, values))
        data = pack_page(struct, encode_keys(keys, struct.bits), encode_values(values, struct.bits))
        pages = torch.arange(1, 1 + data.shape[0], device="cuda")
        per_block = case.layout.pages_per_block
        blocks = case.history_table[0].long()[pages // per_block]
        offset = case.layout.cells[cell].history_offset
        scaled.history_view()[blocks, pages % per_block, offset : offset + data.shape[1]] = data
        own = case.window_table[0].long().unique()
        scaled.window_view()[own[own > 0], cell, 1] *= magnitude
        scaled.v_new[cell] *= magnitude
        out = _attend(_operators(scaled), scaled, cell)
        wanted = reference_decode(scaled, cell, 0).o
        assert bool(out.isfinite().all())
        assert relative_error(out[0].float(), wanted) < 2 * max(
            relative_error(plain_bf16(scaled, cell, 0), wanted), 2e-3
        )


def test_more_rows_than_the_workspace_are_refused() -> None:
    from loopkv.errors import UnsupportedError

    case = _case(CaseSpec((330,), 2, 1, 128))
    operators = _operators(case)
    step = StepView(case.pool, case.history_table, case.window_table, case.seq_lens, None, 17)
    with pytest.raises(UnsupportedError, match="rows of a step"):
        operators.code_leaving_pages(step)
