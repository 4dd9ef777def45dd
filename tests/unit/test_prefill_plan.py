"""Which rows of a step go through a library's attention: those of enough new tokens, if the step is worth its launches.

An Ouro-1.4B cell has 16 heads of 128: 8,192 operations for a query and a key.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.plans import make_plan

from loopkv.geometry import Geometry
from loopkv.kernels.prefill import Prefill, PrefillPlan
from loopkv.kernels.prefill_plan import splits
from loopkv.layout import lay_out

OURO_LAYER = Geometry(architecture="ouro", loops=2, layers=1, query_heads=16, kv_heads=16, head_dim=128)


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    def attention(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("planning attends to nothing")

    layout = lay_out(make_plan(OURO_LAYER, ("int4", "int4")))
    return Prefill(layout, torch.bfloat16, attention, max_tokens=8192, coded_tokens=20_000, device=torch.device("cpu"))


def plan_of(prefill: Prefill, rows: list[tuple[int, int]]) -> PrefillPlan | None:
    """Of rows given as (tokens before, new tokens)."""
    before, new = np.array(rows, dtype=np.int32).T
    return prefill.plan(before + new, np.concatenate([[0], new.cumsum()]).astype(np.int32))


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([(0, 8192)], True),  # 33.6M pairs
        ([(7936, 256)], False),  # 2.06M pairs, 1.7e10 operations
        ([(14_000, 256)], False),  # 3.62M pairs, 2.96e10
        ([(14_400, 256)], True),  # 3.72M pairs, 3.05e10
        ([(4096, 256)] * 16, True),  # 17.3M pairs
        ([(0, 1024)], False),  # 0.52M pairs
        ([(12_000, 127)] * 4, False),  # too few new tokens of each row, whatever the work
    ],
)
def test_a_step_is_divided_where_that_saves_time(prefill: Prefill, rows: list[tuple[int, int]], taken: bool) -> None:
    assert (plan_of(prefill, rows) is not None) == taken


@pytest.mark.parametrize(
    ("tiles", "coded_tokens", "pieces"),
    [
        (32, 1000, 2),  # a room of 2,048: pieces of 1,024
        (32, 5000, 3),  # 132 multiprocessors, 32 for the window: 100 hold three times 32
        (32, 8193, 4),  # longer than the window takes
        (16, 30_000, 8),
        (32, 200_000, 4),
        (67, 5000, 1),
        (256, 30_000, 1),
    ],
)
def test_keys_are_divided_so_that_few_queries_fill_the_device(tiles: int, coded_tokens: int, pieces: int) -> None:
    assert splits(tiles, coded_tokens, 132) == pieces


def test_rows_that_are_not_taken_stay_with_the_other_kernels(prefill: Prefill) -> None:
    plan = plan_of(prefill, [(500, 1), (700, 1), (9000, 2048), (100, 60), (30_000, 300), (12_000, 256)])
    assert plan is not None
    assert plan.others == ((0, 2), (3, 5))  # few new tokens; a history beyond the scratch
    assert plan.others_leave  # 300 new tokens: pages leave inside the chunk
