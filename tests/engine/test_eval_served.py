"""What ``loopkv eval served`` finds on the real engine, on the CPU: one start, tokens forced, bytes checked."""

from __future__ import annotations

import harness  # noqa: F401 - sets the engine's environment
import pytest

from loopkv.eval import served_worker
from loopkv.eval.served import evaluate_served, served_records
from loopkv.eval.served_bytes import PageChecker
from loopkv.models import fingerprint_model, load_tokenizer
from loopkv.profiler import load_documents
from loopkv.record_kinds import RECORD_KINDS
from loopkv.reference import heldout_path, model_folder

pytestmark = pytest.mark.engine

PROMPT, TOKENS = 319, 420


def test_forced_tokens_and_bytes(engines, reference, plans, monkeypatch):
    """Ratio to the policy in fp32, the bytes of pages, and that a wrong byte would be seen."""
    engines.close()
    plan, folder = plans["memory-tau"], model_folder()
    documents = load_documents(
        heldout_path(),
        load_tokenizer(folder),
        policy=plan.policy,
        vocab_size=reference.vocab_size,
        max_tokens=TOKENS,
        limit=2,
    ).documents
    found = []

    class Spoiling(PageChecker):
        """After each check looks again at the page with one byte of cell 0 flipped."""

        def _compare(self, document, first, window_blocks, block, inside):
            super()._compare(document, first, window_blocks, block, inside)
            kept = dict(self.__dict__)
            self.cache.pool[block, inside * self.layout.page_bytes + 5] ^= 1
            super()._compare(document, first, window_blocks, block, inside)
            self.cache.pool[block, inside * self.layout.page_bytes + 5] ^= 1
            found.append((self.differing, self.first_difference))
            self.__dict__.update(kept)

    monkeypatch.setattr(served_worker, "PageChecker", Spoiling)
    (result,) = evaluate_served(
        reference,
        folder,
        fingerprint_model(folder),
        [plan],
        documents,
        prompt_tokens=PROMPT,
        checked_pages=4,
        run=served_worker.serve,
    )
    assert result.positions == 2 * (TOKENS - PROMPT) and result.runner.endswith("CPUModelRunner")
    assert result.ratio == pytest.approx(1.0, abs=0.02) and result.policy_mean_nats > 1e-5
    assert result.top1 > 0.95 and result.worst_nats >= max(result.served_nats)
    assert PROMPT <= result.worst_position < TOKENS
    # decode steps that see 320, 352, 384 and 416 tokens push out pages at 32, 64, 96 and 128: four of eight are checked
    check = result.byte_check
    assert check.pages == 4 and check.differing_bytes == 0 and check.first_difference is None
    # codes of K and V, then fp16 scales and zeros: six heads of 64 channels, 32 tokens, groups of 32
    elements, scales = 32 * 6 * 64, 2 * 2 * (6 * 64 + 32 * 6 * 2)
    pages = {"int4": elements + scales, "int2": elements // 2 + scales, "share": 0}
    assert check.compared_bytes == 4 * sum(pages[option] for option in plan.options)
    assert len(found) == 4 and all(count == 1 and "cell 0 (int4), byte 5" in where for count, where in found)
    kinds = {record.what: record for record in served_records([result])}
    assert set(kinds) == {"quality.served_kl_nats", "quality.policy_kl_nats", "quality.byte_check"}
    for name, record in kinds.items():
        assert not RECORD_KINDS[name].missing(record) and record.unit == RECORD_KINDS[name].unit
