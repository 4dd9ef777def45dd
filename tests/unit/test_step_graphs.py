"""Which steps a prefill graph holds, and the integers that it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopkv.kernels.prefill_plan import GroupArrays, Room, boundaries, fixed_arrays, group_arrays
from loopkv.policy import DEFAULT_POLICY
from loopkv.vllm_plugin.step import Step
from loopkv.vllm_plugin.step_graphs import Fit, Shape, Shapes, step_arrays

SHAPES = Shapes(DEFAULT_POLICY, max_rows=100, max_tokens=8192, coded_tokens=65_536)


def fit(rows: list[tuple[int, int]], shapes: Shapes = SHAPES) -> Fit | None:
    """Of rows given as (tokens before, new tokens)."""
    before, new = np.array(rows, dtype=np.int32).T
    starts = torch.from_numpy(np.concatenate([[0], new.cumsum()]).astype(np.int32))
    empty = torch.zeros(0, dtype=torch.int32)
    return shapes.fit(
        Step(
            pool=empty,
            history_table=empty,
            window_table=empty,
            seq_lens=empty,
            query_start=empty,
            query_start_cpu=starts,
            max_query_tokens=int(new.max()),
            max_seq_tokens=int((before + new).max()),
            tokens=int(new.sum()),
            seq_lens_cpu=torch.from_numpy(before + new),
        )
    )


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(0, 256)], (0, 4, 256, 2048)),
        ([(2271, 2)], (0, 4, 256, 2048)),  # 2,273 + 1 - 256 - 32 tokens, and a page: 2,018
        ([(2048, 256)], (0, 4, 256, 2048)),  # 2,017 and a page: 2,049, the next room
        ([(8000, 256)], (0, 4, 256, 8192)),  # 7,969 + 32
        ([(7000, 200), (300, 57)], (0, 8, 512, 8192)),  # 257 new tokens
        ([(0, 52)] * 5, (0, 8, 512, 2048)),  # more rows than 256 / 64
        ([(5000, 1), (9000, 1), (100, 256)], (8, 4, 256, 2048)),
        ([(5000, 1)] * 96 + [(100, 256)], (96, 4, 256, 2048)),  # of 100 requests 4 are left
        ([(100, 256), (0, 0)], (0, 4, 256, 2048)),  # a padded row
        ([(5000, 1)], None),
        ([(100, 256), (5000, 1)], None),  # rows of one token come first, or not into a graph
        ([(0, 257)], None),  # pages leave inside the chunk
        ([(4096, 256)] * 5, None),  # 1,280 new tokens
        ([(30_000, 256)] * 3, None),  # 90,000 history tokens
    ],
)
def test_a_step_takes_the_smallest_shape_that_holds_it(rows: list[tuple[int, int]], shape: tuple[int, ...]) -> None:
    found = fit(rows)
    if rows == [(2048, 256)]:
        shape = (0, 4, 256, 8192)
    wanted = None if shape is None else Shape(shape[0], Room(*shape[1:]))
    assert (None if found is None else found.shape) == wanted


def test_a_worker_of_few_requests_has_smaller_shapes() -> None:
    found = fit([(700, 256)], Shapes(DEFAULT_POLICY, max_rows=2, max_tokens=8192, coded_tokens=1000))
    assert found is not None
    assert found.shape == Shape(0, Room(2, 256, 1000))
    assert fit([(700, 256)], Shapes(DEFAULT_POLICY, max_rows=2, max_tokens=255, coded_tokens=1000)) is None
    assert fit([(1000, 256)], Shapes(DEFAULT_POLICY, max_rows=2, max_tokens=256, coded_tokens=1000)) is None


def test_padding_between_decode_rows_and_the_others_belongs_to_rows_without_length() -> None:
    found = fit([(5000, 1), (9000, 1), (100, 200), (0, 50)])
    assert found is not None and (found.decode, found.new_tokens) == (2, 250)
    shape = Shape(4, Room(3, 256, 2048))
    rows = boundaries(DEFAULT_POLICY, *(np.array(x, np.int32) for x in ((4, 5), (4, 204), (100, 0), (200, 50))))
    lens, starts, *group = step_arrays(DEFAULT_POLICY, shape, rows, found.decode)
    assert lens.tolist() == [0, 0, 0, 0, 300, 50, 0]
    assert starts.tolist() == [0, 1, 2, 2, 4, 204, 254, 254]
    assert [x.shape for x in group] == shape.room.shapes(DEFAULT_POLICY)
    assert GroupArrays(*group).cu_new.tolist() == [0, 200, 250, 250]


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(2, 256)), min_size=1, max_size=8))
def test_no_step_that_a_room_holds_has_more_tasks_than_its_arrays(rows: list[tuple[int, int]]) -> None:
    before, new = np.array(rows, dtype=np.int32).T
    start = (np.cumsum(new) - new).astype(np.int32)
    each = boundaries(DEFAULT_POLICY, np.arange(len(new), dtype=np.int32), start, before, new)
    tight = Room(len(new), int(new.sum()), each.scratch_tokens(DEFAULT_POLICY))
    assert tight.holds(DEFAULT_POLICY, each)
    real, padded = group_arrays(DEFAULT_POLICY, each, copies=True), fixed_arrays(DEFAULT_POLICY, each, tight)
    for name, array, whole in zip(GroupArrays._fields, real, padded, strict=True):
        if name.endswith("_tasks"):
            assert whole[whole[:, 0] >= 0].tolist() == array.tolist()
        else:
            assert whole[: len(array)].tolist() == array.tolist()
    exact = padded.expand_tasks[tight.history_tasks(DEFAULT_POLICY) :]
    assert bool((exact[exact[:, 0] >= 0][:, 1] < 0).all()), "exact tokens have a part of their own"
