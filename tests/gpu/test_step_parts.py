"""Mixed steps: a row with one new token gives the bits of a step in which every row has one."""

from __future__ import annotations

import math

import pytest
import torch
from support.mixed_steps import mixed_step, new_keys_values
from torch import Tensor

from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.operators_cuda import CudaStepOperators


def _attend(operators: CudaStepOperators, case: Case, cell: int, rows: list[int], counts: list[int]) -> list[Tensor]:
    """[count, Hq, D] of each row."""
    q = torch.cat([case.q[cell, row].expand(count, -1, -1) for row, count in zip(rows, counts, strict=True)])
    k, v = new_keys_values(case, cell, counts, rows)
    out = torch.full_like(q, math.nan)
    step = mixed_step(case, counts, rows)
    operators.code_leaving_pages(step)
    operators.attend(cell, q, k, v, out, step)
    return list(out.split(counts))


@pytest.mark.parametrize("tau", [None, 14.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("new_tokens", [2, 40, 256], ids="{} new tokens beside it".format)
def test_a_neighbours_prefill_changes_no_bit_of_a_decode_row(
    new_tokens: int, dtype: torch.dtype, tau: float | None
) -> None:
    spec = CaseSpec((700, 2101, 900, 1300), 2, 1, 128, ("share", "int4"), tau, keep_exact=True, dtype=dtype)
    case = make_case(spec, "cuda")
    operators = CudaStepOperators(
        case.layout,
        dtype,
        seed="sink",
        max_rows=8,
        max_tokens=1024,
        max_model_tokens=4096,
        device=torch.device("cuda"),
        counters=Counters(),
    )
    for cell in range(2):
        alone = _attend(operators, case, cell, [0, 1], [1, 1])
        assert not any(out.isnan().any() for out in alone)
        beside = _attend(operators, case, cell, [0, 1, 3], [1, 1, new_tokens])
        between = _attend(operators, case, cell, [0, 3, 2, 1], [1, new_tokens, 1, 1])
        assert not beside[2].isnan().any()
        for wanted, row, other in zip(alone, (beside[0], beside[1]), (between[0], between[3]), strict=True):
            assert torch.equal(wanted, row)
            assert torch.equal(wanted, other)


@pytest.mark.parametrize("counts", [[1, 1], [1, 300]], ids=str)
def test_values_may_lie_further_apart_than_keys(counts: list[int]) -> None:
    """torch.compile leaves rotated keys in a tensor of their own and values in that of the projection."""
    case = make_case(CaseSpec((700, 2101), 2, 1, 128, ("int4", "int4"), keep_exact=True), "cuda")
    operators = CudaStepOperators(
        case.layout,
        torch.bfloat16,
        seed="sink",
        max_rows=8,
        max_tokens=1024,
        max_model_tokens=4096,
        device=torch.device("cuda"),
        counters=Counters(),
    )
    q = torch.cat([case.q[0, row].expand(count, -1, -1) for row, count in enumerate(counts)])
    k, v = new_keys_values(case, 0, counts)
    apart = torch.cat([v, torch.full_like(v, math.nan)], dim=1)[:, : v.shape[1]]
    outs = []
    for values in (v, apart):
        step, out = mixed_step(case, counts), torch.full_like(q, math.nan)
        operators.code_leaving_pages(step)
        operators.attend(0, q, k, values, out, step)
        outs.append((out, step.pool))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
