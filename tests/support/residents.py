"""How many requests vLLM's own scheduler keeps resident in decode on a fixed pool, beside what whole blocks predict.

``PYTHONPATH=tests python -m support.residents [GiB]`` prints the table of docs/serving.md (96 GiB by default).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.v1.request import RequestStatus

from loopkv.artifacts import Fingerprint, Plan
from loopkv.geometry import Geometry
from loopkv.layout import Layout, lay_out
from loopkv.policy import Policy
from support.engine_free import EngineFreeRun, EngineSettings

GIB = 1 << 30
GROWTH_TOKENS = 200  # of every request in decode, so that all are in decode when the first is done
OURO = Geometry(architecture="OuroForCausalLM", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
# Plans of the paper's storage: 215 KiB per token as LoopKV-R, 156 KiB with 26 shared cells as LoopKV-M.
PLANS: dict[str, tuple[str, ...]] = {
    "BF16": ("bf16",) * 96,
    "KIVI-4": ("int4",) * 96,
    "LoopKV-R": ("int2",) * 25 + ("int4",) * 71,
    "LoopKV-M": ("int4",) * 27 + ("int2",) * 19 + ("share",) * 26 + ("int4",) * 24,
}


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """One plan at one length.

    Args:
        plan: name.
        tokens: length of every request.
        stored_bytes: of one history token, what bytes alone would count.
        history_blocks, window_blocks: that one request holds in decode with steps overlapping.
        block_bytes: of a block; ``slack_share`` of the request's bytes is the part of blocks that no token uses by
            layout, ``partial_share`` the part of blocks that are not (or no longer) full of live tokens.
        predicted: pool blocks over the blocks of a request, a real number.
        measured: requests that decode together under vLLM's scheduler.
        predicted_there: the prediction for the lengths that the requests had at that step.
    """

    plan: str
    tokens: int
    stored_bytes: int
    history_blocks: int
    window_blocks: int
    block_bytes: int
    slack_share: float
    partial_share: float
    predicted: float
    measured: int
    predicted_there: float

    @property
    def request_bytes(self) -> int:
        """Pool bytes of one request."""
        return self.block_bytes * (self.history_blocks + self.window_blocks)


def ouro_layout(name: str) -> Layout:
    """Layout of one of ``PLANS``."""
    fingerprint = Fingerprint(name="Ouro-1.4B", geometry=OURO)
    return lay_out(Plan(name=name, fingerprint=fingerprint, policy=Policy(), options=PLANS[name]))


def resident_row(name: str, tokens: int, pool_bytes: int) -> ResidentRow:
    """Fill a pool with requests of ``tokens`` tokens and count those that decode together (overlapping steps)."""
    layout = ouro_layout(name)
    rule, blocks = layout.residency, pool_bytes // layout.block_bytes
    history, window = rule.history_blocks(tokens), rule.window_blocks(tokens, unprocessed=2)
    predicted = (blocks - 1) / (history + window)
    measured, there = _decode_together(layout, blocks, tokens, int(1.1 * predicted) + 3)
    held = layout.block_bytes * (history + window)
    slack = history * layout.slack_bytes[0] + window * layout.slack_bytes[1]
    coded = rule.policy.history_end(tokens) - rule.policy.sink_tokens
    exact = tokens - coded
    live = coded // rule.policy.page_tokens * layout.page_bytes + exact * layout.window_token_bytes
    return ResidentRow(
        plan=name,
        tokens=tokens,
        stored_bytes=layout.page_bytes // rule.policy.page_tokens,
        history_blocks=history,
        window_blocks=window,
        block_bytes=layout.block_bytes,
        slack_share=slack / held,
        partial_share=(held - slack - live) / held,
        predicted=predicted,
        measured=measured,
        predicted_there=there,
    )


def _decode_together(layout: Layout, blocks: int, tokens: int, requests: int) -> tuple[int, float]:
    """Requests of the last step that only decodes before one is done, and the prediction for their lengths then.

    More requests come than fit: growth preempts, and whoever lost its blocks waits.
    """
    rule = layout.residency
    run = EngineFreeRun(
        EngineSettings(
            rule,
            blocks,
            max_model_tokens=tokens + 1,
            batch_tokens=65536,
            max_requests=1024,
            overlap=True,
            caching=False,
            block_bytes=layout.block_bytes,
        )
    )
    run.device = SimpleNamespace(step=lambda rows: None, forget=lambda blocks: None)  # type: ignore[assignment]
    prompt = [1] * (tokens - GROWTH_TOKENS)
    for seed in range(requests):
        run.add(prompt, GROWTH_TOKENS + 1, seed=seed)
    last: tuple[int, float] = (0, 0.0)
    while not run.idle:
        run.step()
        if run.finished:
            break
        running = [work.request for work in run.work.values() if work.request.status == RequestStatus.RUNNING]
        if running and all(request.num_computed_tokens > request.num_prompt_tokens for request in running):
            lengths = [request.num_computed_tokens for request in running]
            needs = [rule.history_blocks(n) + rule.window_blocks(n, unprocessed=2) for n in lengths]
            last = len(running), (blocks - 1) * len(needs) / sum(needs)
    return last


def resident_table(pool_bytes: int = 96 * GIB, lengths: tuple[int, ...] = (2048, 8192, 16384)) -> list[ResidentRow]:
    """All plans at all lengths, for the docs."""
    return [resident_row(name, tokens, pool_bytes) for name in PLANS for tokens in lengths]


def as_markdown(rows: list[ResidentRow]) -> str:
    """The table of the docs."""
    lines = [
        "| plan | tokens | stored KiB/token | history + window blocks | block MiB | slack | partial blocks | "
        "MiB per request | pool / whole blocks | resident | away by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.plan} | {row.tokens} | {row.stored_bytes / 1024:.0f} | {row.history_blocks} + {row.window_blocks} "
            f"| {row.block_bytes / 2**20:.2f} | {row.slack_share:.1%} | {row.partial_share:.1%} "
            f"| {row.request_bytes / 2**20:.0f} | {row.predicted:.2f} | {row.measured} "
            f"| {abs(row.measured - int(row.predicted)) / row.predicted:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(resident_table(int(float(sys.argv[1]) * GIB) if len(sys.argv) > 1 else 96 * GIB)))
