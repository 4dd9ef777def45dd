"""Checks of the prefill kernels under Triton's interpreter, on the CPU: ``python -m support.prefill_interpreted``.

The interpreter is chosen when a kernel is decorated, so this runs in a process of its own (TRITON_INTERPRET=1). Plain
attention stands in for the library's: what is checked is which keys meet which queries, and every byte address. In
fp32, so that an index that is off by one cannot hide behind rounding.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from torch import Tensor

from loopkv.engine.attention import KV, policy_attention
from loopkv.kernels import prefill_plan
from loopkv.kernels.cases import Case, CaseSpec, coded_pages, make_case
from loopkv.kernels.int_arrays import FixedArrays
from loopkv.kernels.norms import SandwichNorm
from loopkv.kernels.operators import StepView
from loopkv.kernels.prefill import Prefill, PrefillPlan
from loopkv.kernels.prefill_plan import Room, boundaries, fixed_arrays
from loopkv.policy import Policy

TOLERANCE = 1e-5
SHORT = Policy(window_tokens=64)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    window: int | None,
    splits: int,
    out: Tensor,
) -> Tensor:
    """See ``VarlenAttention``; a query that sees nothing gets NaN, which must not be used."""
    lse = torch.full((q.shape[1], q.shape[0]), math.nan)
    group = q.shape[1] // k.shape[1]
    for row in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[row]), int(cu_q[row + 1])), slice(int(cu_k[row]), int(cu_k[row + 1]))
        count, seen = queries.stop - queries.start, keys.stop - keys.start
        assert count <= max_q and seen <= max_k and splits >= 1
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        query, key = torch.arange(count)[:, None] + seen - count, torch.arange(seen)
        hidden = (key > query) | (False if window is None else key <= query - window)
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys].repeat_interleave(group, 1))
    return lse


def reference(case: Case, cell: int, row: int, q: Tensor) -> Tensor:
    """The policy's result for the last queries of a row."""
    policy, tokens = case.layout.policy, case.spec.tokens[row]
    recent = policy.history_end(tokens - q.shape[0] + 1)
    sink = case.exact_kv(cell, row, range(min(policy.sink_tokens, tokens)))
    coded = policy.history_end(tokens) > policy.sink_tokens
    history = case.history_kv(cell, row) if coded else (sink[0][:0], sink[1][:0])
    exact = case.exact_kv(cell, row, range(min(recent, tokens), tokens))
    segments = [KV(k[None], v[None]) for k, v in (sink, history, exact)]
    return policy_attention(q[None], tokens - q.shape[0], segments[0], segments[1], segments[2], policy)[0]


def planned(case: Case, counts: list[int], coded_tokens: int) -> tuple[Prefill, PrefillPlan, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    prefill = Prefill(
        case.layout,
        case.spec.dtype,
        plain_attention,
        max_tokens=sum(counts),
        coded_tokens=coded_tokens,
        device=torch.device("cpu"),
    )
    scratch = prefill.scratch
    for buffer in (scratch.coded_k, scratch.coded_v, scratch.exact_k, scratch.exact_v, scratch.coded_o):
        buffer.fill_(math.nan)  # nothing unwritten may be read
    plan = prefill.plan(np.array(case.spec.tokens, np.int32), starts)
    assert plan is not None
    return prefill, plan, starts


def check(spec: CaseSpec, counts: list[int], *, groups: int, coded_tokens: int = 4096) -> None:
    """Every query of every row that is taken; pages that leave inside their chunk, byte for byte."""
    case = make_case(spec)
    prefill, plan, starts = planned(case, counts, coded_tokens)
    assert len(plan.groups) == groups, len(plan.groups)
    layout, policy = case.layout, case.layout.policy
    pool, window_table = case.pool.clone(), case.window_table.clone()
    view = pool[:, : layout.pages_per_block * layout.page_bytes].unflatten(
        1, (layout.pages_per_block, layout.page_bytes)
    )
    late = [(int(group.info[record, 0]), page) for group in plan.groups for record, page in group.encode_tasks.tolist()]
    places = [(case.history_table[row, page // layout.pages_per_block], page) for row, page in late]
    for block, page in places:
        view[block, page % layout.pages_per_block] = 255
    for row, count in enumerate(counts):  # tokens that leave inside their chunk have no window block
        first, last = -(-(spec.tokens[row] - count) // layout.window_block_tokens), policy.history_end(spec.tokens[row])
        first = max(first, -(-policy.sink_tokens // layout.window_block_tokens))
        window_table[row, first : max(first, last // layout.window_block_tokens)] = 0
    step = StepView(pool, case.history_table, window_table, case.seq_lens, torch.from_numpy(starts), len(counts))
    taken = sorted(int(row) for group in plan.groups for row in group.info[:, 0])
    others = [row for begin, end in plan.others for row in range(begin, end)]
    assert sorted([*taken, *others]) == [row for row, count in enumerate(counts) if count]
    for cell in range(len(layout.cells)):
        inputs = [
            case.exact_kv(cell, row, range(spec.tokens[row] - n, spec.tokens[row])) for row, n in enumerate(counts)
        ]
        kv = torch.cat([torch.cat([k, v], 1) for k, v in inputs])  # one buffer: tokens are further apart than heads
        noise = 1 + 0.3 * torch.randn(sum(counts), 1, 1, generator=torch.Generator().manual_seed(cell))
        q = torch.cat([case.q[cell, row].expand(n, -1, -1) for row, n in enumerate(counts)]) * noise
        out = torch.full_like(q, math.nan)
        prefill.attend(cell, q, kv[:, : spec.kv_heads], kv[:, spec.kv_heads :], out, step, plan)
        for row, count in enumerate(counts):
            span = slice(int(starts[row]), int(starts[row]) + count)
            if row in taken:
                wanted = reference(case, cell, row, q[span])
                error = (out[span] - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
                assert float(error.max()) < TOLERANCE, (spec, cell, row, int(error.argmax()), float(error.max()))
            else:
                assert bool(out[span].isnan().all()), (spec, cell, row)
    used = case.layout.page_bytes
    for block, page in places:
        inside = page % layout.pages_per_block
        assert torch.equal(view[block, inside, :used], case.history_view()[block, inside, :used]), page
    print("ok", spec.tokens, counts, spec.options, f"{len(late)} late pages")


def check_fixed_arrays(spec: CaseSpec, counts: list[int], room: Room) -> None:
    """A group in the arrays of a graph gives the same results, and no padded row or token is read or written.

    The rows of the case come after a gap of rows and tokens, as padded decode rows leave it.
    """
    gap_rows, gap = 3, 5
    case = make_case(spec)
    policy, group = case.layout.policy, spec.group_queries
    prefill, _, _ = planned(case, counts, room.coded_tokens)
    new, lens = np.array(counts, np.int32), np.array(spec.tokens, np.int32)
    start = (gap + np.cumsum(new) - new).astype(np.int32)
    rows = boundaries(policy, gap_rows + np.arange(len(new), dtype=np.int32), start, lens - new, new)
    assert room.holds(policy, rows)
    arrays = FixedArrays(room.shapes(policy), torch.device("cpu"))
    fixed = prefill.fixed_group(room, gap, arrays.views)
    none = np.zeros(0, np.int32)
    pool = case.pool.clone()
    width = [case.history_table.shape[1], case.window_table.shape[1]]
    tables = [torch.full((gap_rows + room.rows, n), 1 << 30, dtype=torch.int32) for n in width]  # no such block
    for table, source in zip(tables, (case.history_table, case.window_table), strict=True):
        table[gap_rows : gap_rows + len(new)] = source
    step = StepView(pool, *tables, case.seq_lens, None, gap_rows + room.rows)
    tokens = gap + room.new_tokens
    for cell in range(len(case.layout.cells)):
        kv = torch.full((tokens, 2 * spec.kv_heads, spec.head_dim), math.nan)
        q = torch.full((tokens, spec.kv_heads * group, spec.head_dim), math.nan)
        for row, count in enumerate(counts):
            span = slice(int(start[row]), int(start[row]) + count)
            kv[span] = torch.cat(case.exact_kv(cell, row, range(spec.tokens[row] - count, spec.tokens[row])), 1)
            noise = 1 + 0.3 * torch.randn(count, 1, 1, generator=torch.Generator().manual_seed(row))
            q[span] = case.q[cell, row].expand(count, -1, -1) * noise
        k, v = kv[:, : spec.kv_heads], kv[:, spec.kv_heads :]
        for these in (boundaries(policy, none, none, none, none), rows):
            arrays.fill(fixed_arrays(policy, these, room))
            out = torch.full_like(q, math.nan)
            prefill.attend(cell, q, k, v, out, step, PrefillPlan((fixed,), (), False))
            assert len(these.row) or bool(out.isnan().all())
        done = torch.zeros(tokens, dtype=torch.bool)
        for row, count in enumerate(counts):
            span = slice(int(start[row]), int(start[row]) + count)
            wanted = reference(case, cell, row, q[span])
            error = (out[span] - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
            assert float(error.max()) < TOLERANCE, (spec, cell, row, int(error.argmax()), float(error.max()))
            done[span] = True
        assert bool(out[~done].isnan().all())
    assert torch.equal(pool, case.pool)
    print("ok fixed", spec.tokens, counts, room)


def check_hostile_values(dim: int, options: tuple[str, str]) -> None:
    """Codes of NaN, infinities, zeros of either sign, constants, subnormals and values beyond fp16."""
    tokens, heads = 128 + 32, 2
    spec = CaseSpec((tokens,), heads, 1, dim, options, dtype=torch.float32, policy=SHORT, keep_exact=True)
    case = make_case(spec)
    prefill, plan, starts = planned(case, [tokens], 4096)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, heads, dim, generator=generator) * torch.rand(2, 1, heads, dim, generator=generator)
    for x in (k, v):
        x[33, 0, 3], x[40, 1, 7], x[35, 0, 9], x[50, 1, 2], x[60, 0, 5] = math.nan, math.inf, -math.inf, 7e4, -0.0
        x[32:64, 1, dim // 2] = 0.37
        x[32:64, 0, dim - 1] *= 1e-7
        x[32:64, 1, dim - 2] = -0.0
        x[70] = 1.5  # a token whose groups are constant
        x[64:96, 0, 1] = 1000 + x[64:96, 0, 1] * 1e-3
    step = StepView(
        case.pool.clone(), case.history_table, case.window_table, case.seq_lens, torch.from_numpy(starts), 1
    )
    layout = case.layout
    view = step.pool[:, : layout.pages_per_block * layout.page_bytes].unflatten(
        1, (layout.pages_per_block, layout.page_bytes)
    )
    sink, end = SHORT.sink_tokens, SHORT.history_end(tokens)
    for cell in range(2):
        prefill.attend(cell, torch.randn(tokens, heads, dim), k, v, torch.empty(tokens, heads, dim), step, plan)
        wanted = coded_pages(layout, cell, k[sink:end], v[sink:end])
        offset = layout.cells[cell].history_offset
        for index, page in enumerate(range(sink // 32, end // 32)):
            block = case.history_table[0, page // layout.pages_per_block]
            got = view[block, page % layout.pages_per_block, offset : offset + wanted.shape[1]]
            assert torch.equal(got, wanted[index]), (options[cell], page, (got != wanted[index]).nonzero().flatten())
    assert prefill.counters.tolist() == [0, 2 * 2 * 4], prefill.counters  # 4 of k and of v in either cell
    print("ok hostile", dim, options)


def check_norms(dtype: torch.dtype, flips: float) -> None:
    """Both norms around a residual, the rows wider than a power of two below them: fp32, rounded once."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 200, generator=generator).to(dtype) for _ in range(2))
    inner, outer = ((torch.rand(200, generator=generator) + 0.5).to(dtype) for _ in range(2))

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight.float()

    stream = residual.float() + norm(x.float(), inner, 0.5)
    wanted = norm(stream, outer, 0.25)
    got = SandwichNorm(200)(x, residual, inner, outer, 0.5, 0.25)
    for ours, theirs in ((residual, stream), (got, wanted)):
        assert bool(((ours.float() - theirs).abs() <= torch.finfo(dtype).eps * theirs.abs() + 1e-6).all())
        assert float((ours != theirs.to(dtype)).float().mean()) <= flips  # ties that the order of a sum decides
    print("ok norms", dtype)


def main() -> int:
    prefill_plan.MIN_NEW_TOKENS = 2
    prefill_plan.WORTH_OPERATIONS = 0.0
    exact = {"dtype": torch.float32, "keep_exact": True}
    check(
        CaseSpec((150, 20, 190, 0, 97), 1, 1, 128, ("share", "int4"), window_block_tokens=10, policy=SHORT, **exact),
        [40, 20, 64, 0, 1],
        groups=1,
    )
    check(CaseSpec((170, 95), 2, 2, 64, ("int2", "bf16"), policy=SHORT, **exact), [170, 95], groups=1)
    check(
        CaseSpec((200, 161), 1, 1, 96, ("int4", "int2"), history_block_tokens=64, policy=SHORT, **exact),
        [110, 161],
        groups=2,
        coded_tokens=224,
    )
    check(
        CaseSpec((180,), 1, 1, 256, ("int4", "int2"), policy=Policy(sink_tokens=64, window_tokens=50), **exact),
        [130],
        groups=1,
    )
    check_fixed_arrays(
        CaseSpec((150, 20, 190), 1, 2, 64, ("share", "int4"), window_block_tokens=10, policy=SHORT, **exact),
        [40, 20, 64],
        Room(5, 128, 512),
    )
    check_fixed_arrays(CaseSpec((600,), 1, 1, 64, ("int2", "bf16"), policy=SHORT, **exact), [64], Room(1, 64, 640))
    check_norms(torch.float16, 0.002)
    check_norms(torch.float32, 1.0)
    check_hostile_values(128, ("int4", "int2"))
    check_hostile_values(96, ("int2", "int4"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
