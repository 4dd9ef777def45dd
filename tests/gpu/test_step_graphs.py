"""Prefill steps as CUDA graphs: the bits of the same step without one, and a pool that padding never touches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from support.mixed_steps import mixed_step, near_queries, new_keys_values
from torch import Tensor

from loopkv.kernels import prefill_plan
from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.operators_cuda import CudaStepOperators
from loopkv.vllm_plugin.prefill_cuda import flash_attention
from loopkv.vllm_plugin.step import Step
from loopkv.vllm_plugin.step_graphs import StepGraphs

MAX_ROWS = 96


@pytest.fixture(autouse=True)
def _same_path_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    if flash_attention() is None:
        pytest.skip("no FlashAttention 3 on this device")
    monkeypatch.setattr(prefill_plan, "MIN_NEW_TOKENS", 2)
    monkeypatch.setattr(prefill_plan, "WORTH_OPERATIONS", 0.0)


class Model:
    """All cells of a case, each attending over queries, keys and values that the token id chooses.

    Args:
        case: its last ``counts[row]`` tokens have ids 1, 2, ... in the order of rows; id 0 is NaN.
    """

    def __init__(self, case: Case, counts: Sequence[int]) -> None:
        self.case, self.counts = case, list(counts)
        self.operators = CudaStepOperators(
            case.layout,
            case.spec.dtype,
            seed="sink",
            max_rows=MAX_ROWS,
            max_tokens=4096,
            max_model_tokens=4096,
            device=torch.device("cuda"),
            counters=Counters(),
        )
        self.graphs = StepGraphs(
            self.operators,
            self.run,
            max_rows=MAX_ROWS,
            max_tokens=4096,
            max_model_tokens=4096,
            device=self.operators.kernels.device,
        )
        cells = range(len(case.layout.cells))
        of_cell = [
            torch.cat([near_queries(case, c, self.counts, c), *new_keys_values(case, c, counts)], 1) for c in cells
        ]
        self.qkv = [torch.cat([torch.full_like(x[:1], float("nan")), x]) for x in of_cell]

    def run(self, step: Step, ids: Tensor, positions: Tensor) -> Tensor:
        """Outputs of all cells [T, cells * Hq * D]; positions are checked by what they add."""
        heads = self.case.spec.kv_heads
        self.operators.code_leaving_pages(step)
        outs = []
        for cell, table in enumerate(self.qkv):
            q, k, v = table[ids].split([heads * self.case.spec.group_queries, heads, heads], dim=1)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            self.operators.attend(cell, q, k, v, out, step)
            outs.append(out.flatten(1))
        return torch.cat([*outs, positions[:, None].to(q.dtype)], 1)

    def inputs(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[Step, Tensor, Tensor]:
        """The step that ends at these rows' last tokens, ids and positions."""
        step = mixed_step(self.case, counts, rows)
        begins = [1 + sum(self.counts[:row]) + self.counts[row] - n for row, n in zip(rows, counts, strict=True)]
        ids = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, counts, strict=True)])
        lasts = [self.case.spec.tokens[row] for row in rows]
        positions = torch.cat([torch.arange(last - n, last) for last, n in zip(lasts, counts, strict=True)])
        return step, ids.int().cuda(), positions.cuda()

    def check(self, rows: Sequence[int], counts: Sequence[int], *, bits: bool) -> Tensor:
        """A step gives the same with and without a graph, and leaves the same bytes; returns its outputs."""
        step, ids, positions = self.inputs(rows, counts)
        other = dataclasses.replace(step, pool=step.pool.clone())
        kernels, pages = self.operators.kernels, []
        for graph in (False, True):
            kernels.code_counters.zero_()
            if graph:
                self.graphs.clear()  # they hold another pool's address
                got = self.graphs.forward(step, ids, positions)
            else:
                wanted = self.run(other, ids, positions)
            pages.append(int(kernels.code_counters[0]))
        assert got is not None and self.graphs.count == 1
        assert pages[0] == pages[1]
        assert not wanted.isnan().any()
        assert torch.equal(step.pool, other.pool)
        if bits:
            assert torch.equal(got, wanted)
        else:
            error = (got.float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
            assert float(error.max()) < 1e-2, (int(error.argmax()), float(error.max()))
        return got


@pytest.mark.parametrize(
    ("dim", "group", "options"),
    [
        (128, 1, ("share", "int4")),
        (128, 1, ("int4", "share", "int4", "int2")),  # the first loop shares, and does not
        (128, 4, ("int2", "bf16")),
        (64, 1, ("share", "int4")),
        (96, 1, ("int4", "int2")),
    ],
)
def test_chunks_of_any_length_and_history_are_the_same_bits(dim: int, group: int, options: tuple[str, ...]) -> None:
    tokens = (256, 130, 288, 319, 320, 700, 2300, 3900)
    counts = [256, 130, 255, 200, 256, 256, 130, 200]
    model = Model(make_case(CaseSpec(tokens, 2, group, dim, options, keep_exact=True), "cuda"), counts)
    for row, count in enumerate(counts):
        model.check([row], [count], bits=True)


def test_few_new_tokens_and_several_rows_differ_by_rounding_alone() -> None:
    tokens, counts = (900, 2000, 301, 33, 1500), [256, 2, 100, 33, 121]
    model = Model(make_case(CaseSpec(tokens, 2, 1, 128, ("share", "int4"), keep_exact=True), "cuda"), counts)
    model.check([1], [2], bits=False)
    model.check(range(5), counts, bits=False)
    model.check([2, 0], [50, 256], bits=False)


@pytest.mark.parametrize("tau", [None, 14.0])
def test_decode_rows_beside_a_chunk_keep_the_bits_of_a_decode_step(tau: float | None) -> None:
    tokens, counts = (900, 2000, 301, 3000), [1, 1, 1, 256]
    model = Model(make_case(CaseSpec(tokens, 2, 1, 128, ("share", "int4"), tau, keep_exact=True), "cuda"), counts)
    alone = model.run(*model.inputs([0, 1, 2], [1, 1, 1]))
    beside = model.check([0, 1, 2, 3], counts, bits=True)
    assert torch.equal(beside[:3], alone)


def test_one_graph_serves_one_request_after_another_and_capturing_touches_nothing() -> None:
    tokens, counts = (1900, 600, 1200, 1300), [256, 256, 140, 1]
    model = Model(make_case(CaseSpec(tokens, 2, 1, 128, ("share", "int4"), keep_exact=True), "cuda"), counts)
    step, ids, positions = model.inputs([0], [256])
    before = step.pool.clone()
    model.graphs.prepare(step, ids, positions)
    torch.cuda.synchronize()
    assert torch.equal(step.pool, before)
    assert model.graphs.count == 2  # histories of 2,048 tokens and of 8,192: none is longer
    for rows, now in (([0], [256]), ([1], [256]), ([2], [140]), ([0], [3]), ([1], [256])):
        this, ids, positions = model.inputs(rows, now)
        step.pool.copy_(before)
        got = model.graphs.forward(dataclasses.replace(this, pool=step.pool), ids, positions)
        wanted = model.run(this, ids, positions)
        assert got is not None
        assert torch.equal(step.pool, this.pool)
        assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 1e-2
    assert model.graphs.count == 2 and model.graphs.replays == 5
    step, ids, positions = model.inputs([3], [1])
    assert model.graphs.forward(step, ids, positions) is None  # a decode step has vLLM's own graphs
