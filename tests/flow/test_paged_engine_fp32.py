"""In fp32 the paged engine stays within the stated bounds of the whole-sequence policy, on the trained model."""

import pytest
import torch
from support.code_boundaries import CodeDifference, compare_codes
from support.plans import make_plan

from loopkv import reference
from loopkv.codec import encode_keys, encode_values
from loopkv.codec.pages import pack_page, unpack_page
from loopkv.engine.paged_cache import PagedCache
from loopkv.engine.paged_engine import NewTokens, PagedEngine, pool_blocks
from loopkv.engine.whole_sequence import SequenceRun, plan_reads, sequence_logits
from loopkv.layout import lay_out
from loopkv.models import load_model, load_tokenizer

TOKENS = 640
MIXED = ("int4",) * 4 + ("int4", "int2", "bf16", "int4") + ("share", "share", "int2", "share") + ("int4",) * 4


class InjectingCache(PagedCache):
    """Stores another run's codes and compares them with what it would have coded itself."""

    codes: dict[tuple[int, int], torch.Tensor]  # (cell, first token of a page) -> page bytes
    difference: CodeDifference

    def code_leaving(self, request, start, stop, cells=None):
        self.start = start
        super().code_leaving(request, start, stop, cells)

    def encode_pages(self, cell, struct, pages, keys, values):
        own = super().encode_pages(cell, struct, pages, keys, values)
        tokens = range(self.start, self.start + len(pages) * self.policy.page_tokens, self.policy.page_tokens)
        given = torch.stack([self.codes[cell, token] for token in tokens])
        for x, mine, theirs in zip((keys, values), unpack_page(struct, own), unpack_page(struct, given), strict=True):
            sums = zip(self.difference, compare_codes(x, mine, theirs), strict=True)
            self.difference = CodeDifference(*(a + b for a, b in sums))
        return given


@pytest.fixture(scope="module")
def model():
    return load_model(reference.model_folder(), torch.float32)


@pytest.fixture(scope="module")
def ids():
    tokenizer = load_tokenizer(reference.model_folder())
    return tokenizer(reference.heldout_documents()[0]).input_ids[:TOKENS]


def whole_sequence(model, plan, ids, engine):
    """Logits [T, V] of the whole-sequence policy and the bytes of every page it coded."""
    run = SequenceRun(model, plan_reads(model.geometry, plan.cell_options), plan.policy, 1, len(ids))
    hidden = model.embed(torch.tensor([ids]))
    with torch.inference_mode():
        logits = torch.cat([model.logits(run.run_block(hidden[:, a : a + 256], a)) for a in range(0, len(ids), 256)], 1)
    codes = {}
    for cell in engine.cache.owners:
        if not engine.cache.codes_history(cell):
            continue
        struct = engine.cache.struct(cell)
        for start in range(plan.policy.sink_tokens, plan.policy.history_end(len(ids)), plan.policy.page_tokens):
            k, v = (x[0, start : start + plan.policy.page_tokens] for x in run.kv(cell))
            page = pack_page(struct, encode_keys(k, struct.bits), encode_values(v, struct.bits, struct.group))
            codes[cell, start] = page
    return logits[0], codes


@pytest.mark.parametrize(
    ("options", "chunks"),
    [(MIXED, [256, 256, 128]), (MIXED, [64] * 10), ("int2", [16] * 40), ("int4", [256, 128] + [1] * 40)],
)
def test_fp32_codes_and_logits_stay_within_their_bounds(model, ids, options, chunks):
    plan = make_plan(model.geometry, options)
    ids = ids[: sum(chunks)]
    layout = lay_out(plan, exact_itemsize=4)

    def run(cache_class, codes=None):
        blocks = pool_blocks(layout, [TOKENS], 256)
        engine = PagedEngine(model, plan, blocks=blocks, layout=layout, fill_byte=0xFF, cache_class=cache_class)
        if codes is not None:
            engine.cache.codes, engine.cache.difference = codes, CodeDifference(0, 0, 0)
        request, at, logits = engine.new_request(), 0, []
        for size in chunks:
            logits += engine.step([NewTokens(request, ids[at : at + size])], every_position=True)
            at += size
        return engine, torch.cat(logits)

    engine, own = run(PagedCache)
    expected, codes = whole_sequence(model, plan, ids, engine)
    assert torch.equal(expected, sequence_logits(model, torch.tensor([ids]), plan.cell_options)[0])
    injected_engine, injected = run(InjectingCache, codes)
    difference = injected_engine.cache.difference
    assert difference.total > 1_000_000
    assert difference.unexplained == 0
    assert difference.differing <= 1e-4 * difference.total
    assert float((injected.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 1e-4
    assert float((own.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 1e-2
