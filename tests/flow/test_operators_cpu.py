"""The CPU operators on paged memory read what the whole-sequence policy reads, from the same keys and values.

Keys, values and queries are given, so both sides code the same values: the codes agree and the outputs must too.
"""

from __future__ import annotations

import pytest
import torch
from support.plans import make_plan

from loopkv.engine.whole_sequence import SequenceRun, plan_reads
from loopkv.geometry import Geometry
from loopkv.layout import lay_out
from loopkv.policy import Policy
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.operators_cpu import CpuOperators
from loopkv.vllm_plugin.step import Step

HEADS, GROUP, DIM = 2, 3, 64
GEOMETRY = Geometry(architecture="ouro", loops=3, layers=1, query_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM)
OPTIONS = {
    "own": ("int4", "int2", "int4"),
    "shares": ("share", "share", "int4"),
    "shares int2": ("int4", "share", "int2"),
    "exact": ("bf16", "share", "bf16"),
}
LAYOUTS = [(32, 5), (64, 10), (128, 7), (256, 16)]
SHORT = Policy(window_tokens=64)
NAN_BYTE = 0xFF


class Replay:
    """A looped model whose queries, keys and values are given: [C, 1, T, heads, D]; it keeps what attention returns."""

    def __init__(self, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        cells = len(GEOMETRY.cells)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(cells, 1, tokens, heads, DIM, generator=generator).to(dtype)

        self.geometry, self.dtype, self.device = GEOMETRY, dtype, torch.device("cpu")
        self.q, self.k, self.v = draw(HEADS * GROUP), draw(HEADS), draw(HEADS)
        self.out = torch.full_like(self.q, float("nan"))
        self.first = 0

    def rotary(self, positions):
        self.first = int(positions[0])

    def run_cell(self, cell, hidden, rotary, attend):
        place = slice(self.first, self.first + hidden.shape[1])
        self.out[cell][:, place] = attend(cell, *(x[cell][:, place] for x in (self.q, self.k, self.v)))
        return hidden

    def expected(self, plan, tau=None) -> torch.Tensor:
        """[C, T, Hq, D] of the whole-sequence policy."""
        tokens = self.q.shape[2]
        run = SequenceRun(self, plan_reads(GEOMETRY, plan.cell_options), plan.policy, 1, tokens, tau=tau)
        step = plan.policy.max_exact_chunk_tokens
        for first in range(0, tokens, step):
            run.run_block(torch.zeros(1, min(step, tokens - first), 1), first)
        return self.out[:, 0]


class Tables:
    """A pool of scattered blocks, filled with NaN, and the tables of some requests in it."""

    def __init__(self, layout, requests: int, null_leaving: bool, seed: int = 0) -> None:
        self.layout, self.rule, self.null_leaving = layout, layout.residency, null_leaving
        self.free = torch.randperm(999, generator=torch.Generator().manual_seed(seed)).add(1).tolist()
        self.pool = torch.full((1000, layout.block_bytes), NAN_BYTE, dtype=torch.uint8)
        self.history, self.window = ([[] for _ in range(requests)] for _ in "hw")

    def grow(self, request: int, computed: int, new: int) -> None:
        history, window, last = self.history[request], self.window[request], computed + new
        while len(history) < self.rule.history_entries(last):
            history.append(0 if len(history) < self.rule.null_history_entries else self.free.pop())
        leaves_before = self.layout.policy.history_end(last) // self.layout.window_block_tokens
        while len(window) < self.rule.window_entries(last):
            null = self.null_leaving and self.rule.sink_window_entries <= len(window) < leaves_before
            window.append(0 if null else self.free.pop())

    def settle(self, request: int, computed: int) -> None:
        window = self.window[request]
        for entry in range(self.rule.sink_window_entries, self.rule.first_live_window_entry(computed)):
            if entry < len(window) and window[entry]:
                self.pool[window[entry]] = NAN_BYTE
                self.free.insert(0, window[entry])
                window[entry] = 0

    def step(self, rows, padding: int) -> Step:
        """``rows``: (request, computed, new)."""
        starts, lengths = [0], []
        tables = {"history": [], "window": []}
        for request, computed, new in rows:
            starts.append(starts[-1] + new)
            lengths.append(computed + new)
            tables["history"].append(self.history[request])
            tables["window"].append(self.window[request])
        starts += [starts[-1]] * padding
        lengths += [0] * padding
        width = max(len(row) for table in tables.values() for row in table)
        made = {
            name: torch.tensor([row + [0] * (width - len(row)) for row in [*table, *[[]] * padding]], dtype=torch.int32)
            for name, table in tables.items()
        }
        query_start = torch.tensor(starts, dtype=torch.int32)
        return Step(
            pool=self.pool,
            history_table=made["history"],
            window_table=made["window"],
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_start=query_start,
            query_start_cpu=query_start,
            max_query_tokens=max(new for _, _, new in rows),
            max_seq_tokens=max(lengths),
            tokens=starts[-1],
        )


def run(plan, models, chunks, layout, *, null_leaving=False, seed="sink"):
    """Outputs [C, T, Hq, D] per model when all advance together, each in chunks drawn from ``chunks``."""
    operators = CpuOperators(layout, models[0].dtype, seed=seed, counters=Counters())
    tables = Tables(layout, len(models), null_leaving)
    generator = torch.Generator().manual_seed(7)
    computed = [0] * len(models)
    outputs = [torch.full_like(model.q[:, 0], float("nan")) for model in models]
    while any(done < model.q.shape[2] for done, model in zip(computed, models, strict=True)):
        rows = []
        for request, model in enumerate(models):
            pick = chunks[int(torch.randint(len(chunks), (1,), generator=generator))]
            new = min(pick, model.q.shape[2] - computed[request])
            if new:
                tables.grow(request, computed[request], new)
                rows.append((request, computed[request], new))
        step = tables.step(rows, padding=2)
        operators.code_leaving_pages(step)
        for cell in range(len(GEOMETRY.cells)):
            q, k, v = (
                torch.cat([getattr(models[r], name)[cell, 0, c : c + n] for r, c, n in rows])
                for name in ("q", "k", "v")
            )
            padded = torch.full((1, *q.shape[1:]), 7.0)
            out = torch.cat([torch.full_like(q, float("nan")), padded.to(q.dtype)])
            operators.attend(cell, torch.cat([q, q[:1]]), torch.cat([k, k[:1]]), torch.cat([v, v[:1]]), out, step)
            assert torch.equal(out[-1:].float(), padded), "a padded token was written"
            at = 0
            for r, c, n in rows:
                outputs[r][cell, c : c + n] = out[at : at + n]
                at += n
        for r, c, n in rows:
            computed[r] = c + n
            tables.settle(r, c + n)
    return outputs, operators


@pytest.mark.parametrize("blocks", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_any_chunking_read_the_policy(name, blocks):
    plan = make_plan(GEOMETRY, OPTIONS[name], policy=SHORT)
    layout = lay_out(plan, exact_itemsize=4, history_block_tokens=blocks[0], window_block_tokens=blocks[1])
    models = [Replay(tokens, seed) for seed, tokens in enumerate((400, 333, 97, 31))]
    outputs, _ = run(plan, models, (1, 1, 16, 33, 64), layout)
    for model, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, model.expected(plan), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", LAYOUTS[:2], ids=str)
def test_default_constants(blocks):
    plan = make_plan(GEOMETRY, OPTIONS["shares"])
    layout = lay_out(plan, exact_itemsize=4, history_block_tokens=blocks[0], window_block_tokens=blocks[1])
    models = [Replay(700, 1), Replay(321, 2)]
    outputs, operators = run(plan, models, (256, 100, 31), layout)
    for model, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, model.expected(plan), rtol=1e-4, atol=1e-5)
    # E(700) = 416 and E(321) = 64: 12 and 1 pages beyond the sink, each coded once
    assert operators.counters.values["pages_coded"] == 13


@pytest.mark.parametrize("null_leaving", [False, True])
def test_chunks_longer_than_the_window_code_their_own_pages(null_leaving):
    plan = make_plan(GEOMETRY, OPTIONS["own"], policy=SHORT)
    layout = lay_out(plan, exact_itemsize=4, history_block_tokens=64, window_block_tokens=6)
    models = [Replay(tokens, seed) for seed, tokens in enumerate((500, 290, 150))]
    outputs, operators = run(plan, models, (300, 129, 1, 70), layout, null_leaving=null_leaving)
    for model, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, model.expected(plan), rtol=1e-4, atol=1e-5)
    ends = [SHORT.history_end(tokens) for tokens in (500, 290, 150)]
    assert operators.counters.values["pages_coded"] == sum((end - 32) // 32 for end in ends)


def test_a_row_reads_the_same_bits_alone_and_in_a_batch():
    plan = make_plan(GEOMETRY, OPTIONS["shares"], policy=SHORT, tau=8.0)
    layout = lay_out(plan, exact_itemsize=4)
    alone, _ = run(plan, [Replay(300, 3)], (64,), layout)
    together, _ = run(plan, [Replay(300, 3), Replay(222, 4), Replay(45, 5)], (64,), layout)
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("tau", [0.0, 2.0, 6.0])
def test_decode_rows_under_v_precision(tau):
    plan = make_plan(GEOMETRY, OPTIONS["shares"], policy=SHORT, tau=tau)
    layout = lay_out(plan, exact_itemsize=4)
    model = Replay(260, 6)
    (output,), operators = run(plan, [model], (1,), layout)
    torch.testing.assert_close(output, model.expected(plan, tau=tau), rtol=1e-4, atol=1e-5)
    values = operators.counters.values
    assert 0 < values["hot_values"] < values["decode_values"]
    _, unseeded = run(plan, [Replay(260, 6)], (1,), layout, seed="none")
    assert unseeded.counters.values["decode_values"] == values["decode_values"]
    assert unseeded.counters.values["hot_values"] > values["hot_values"]


def test_bf16_values_are_coded_as_the_cache_holds_them():
    plan = make_plan(GEOMETRY, OPTIONS["shares int2"], policy=SHORT)
    layout = lay_out(plan, exact_itemsize=2, history_block_tokens=64, window_block_tokens=6)
    model = Replay(300, 8, torch.bfloat16)
    (output,), _ = run(plan, [model], (40, 64), layout)
    torch.testing.assert_close(output, model.expected(plan), rtol=2**-7, atol=1e-3)


def test_values_that_cannot_be_coded_are_counted_and_never_stored():
    plan = make_plan(GEOMETRY, OPTIONS["own"], policy=SHORT)
    layout = lay_out(plan, exact_itemsize=4)
    model = Replay(200, 9)
    model.k[0, 0, 40, 0, 3], model.v[2, 0, 50, 1, 7] = float("inf"), 1e6
    _, operators = run(plan, [model], (64,), layout)
    assert operators.counters.values["clamped_values"] == 2
