"""The names of Records: what each one measures, its unit and the settings that place it in tables and plots.

One table owns the names; writers take them from here, ``loopkv report`` draws from them and ``docs/records.md`` is
checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopkv.records import Record


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One quantity.

    Args:
        name: ``Record.what``.
        unit: ``Record.unit``.
        settings: keys of ``Record.settings`` without which the record cannot be placed.
        optional: keys that are shown where present.
        meaning: one sentence: what ``value`` and ``samples`` are.
    """

    name: str
    unit: str
    settings: tuple[str, ...]
    optional: tuple[str, ...]
    meaning: str

    def missing(self, record: Record) -> tuple[str, ...]:
        """Required settings that ``record`` lacks."""
        return tuple(key for key in self.settings if record.settings.get(key) is None)


_DECODE = ("arm", "context_tokens", "batch")
_DECODE_BYTES = (
    "mean_context_tokens",
    "peak_batch",
    "stored_bytes",
    "read_bytes",
    "read_bytes_per_request",
    "weight_bytes",
    "resident",
    "hot_share",
    "score_bits",
    "contents",
    "generated",
    "spec",
    "engine",
    "slot",
    "session",
)
_SLO = ("arm", "rate_per_s", "tau0_ms", "k", "ttft_s")
_SLO_COUNTS = ("scored", "missed_ttft", "missed_tpot", "missed_both", "failed", "preemptions", "tau0_rule", "workload")
_CAPACITY = ("lowest_rate", "highest_rate", "no_rung_failed", "bound", "fails_at", "tau0_rule", "workload")

_KINDS = (
    RecordKind(
        "decode.step_ms",
        "ms",
        _DECODE,
        _DECODE_BYTES,
        "median time of a decode step of `batch` requests at `context_tokens` (grown to `mean_context_tokens` by the "
        "rows "
        "timed before); samples are the single steps",
    ),
    RecordKind(
        "decode.tok_s",
        "tok/s",
        _DECODE,
        _DECODE_BYTES,
        "`batch` divided by the median step, in files of earlier versions: now left to the reader of `decode.step_ms`",
    ),
    RecordKind(
        "decode.ttft_ms",
        "ms",
        ("arm", "context_tokens"),
        ("batch", "spec", "engine", "session"),
        "time from submitting one prompt of `context_tokens` to an idle engine to its first token, median; samples are "
        "single requests",
    ),
    RecordKind(
        "decode.prefill_tok_s",
        "tok/s",
        _DECODE,
        ("spec", "engine", "session"),
        "prompt tokens per second while `batch` prompts that were submitted together get their first tokens",
    ),
    RecordKind(
        "decode.launches",
        "launches",
        _DECODE,
        ("spec", "engine", "slot", "contents", "session"),
        "host launches of one decode step; its bytes are those of the step's `decode.step_ms`",
    ),
    RecordKind(
        "decode.component_us",
        "us",
        (*_DECODE, "component"),
        ("spec", "engine", "slot", "contents", "session"),
        "GPU time of one component (history reader, sink + window, matrix products, ...) in one decode step; its bytes "
        "are those of the step's `decode.step_ms`",
    ),
    RecordKind(
        "decode.refused",
        "",
        ("arm", "reason"),
        ("context_tokens", "batch", "slot", "session"),
        "a row that the engine could not run, with its reason; the value is null",
    ),
    RecordKind(
        "kernel.us",
        "us",
        ("kernel", "batch", "context_tokens"),
        ("option", "head_dim", "kv_heads", "group_queries", "hot_share", "bytes", "tau", "seed_mode", "variant"),
        "median time of one launch; samples are single launches",
    ),
    RecordKind(
        "kernel.bandwidth_share",
        "share",
        ("kernel", "batch", "context_tokens"),
        (
            "option",
            "head_dim",
            "kv_heads",
            "group_queries",
            "hot_share",
            "bytes",
            "tau",
            "seed_mode",
            "variant",
            "copy_bytes_s",
        ),
        "bytes moved per second as a share of the copy bandwidth measured in the same run",
    ),
    RecordKind(
        "slo.step_ms",
        "ms",
        ("arm", "context_tokens"),
        ("workload",),
        "calibration: mean time per output token of one request alone, whose mean context is `context_tokens`",
    ),
    RecordKind(
        "slo.tau0_ms",
        "ms",
        ("arm", "tau0_rule", "context_tokens"),
        ("workload",),
        "the fitted step time of stock vLLM for one request at `context_tokens`: the unit of the TPOT bound",
    ),
    RecordKind(
        "slo.cell",
        "requests",
        ("arm", "rate_per_s", "requests"),
        ("spec", "preemptions", "workload", "server", "ignore_eos", "duration_s", "server_start_s", "steps"),
        "one rung: `requests` holds arrival_s, ttft_s, tpot_ms, output_tokens and error of every request sent; `steps` "
        "start_s, mean number and mean context of the requests that decode, and step_ms of windows of two seconds; "
        "`server_start_s` is the start of its own server (the slowest of its run in older files)",
    ),
    RecordKind(
        "slo.attainment",
        "share",
        _SLO,
        _SLO_COUNTS,
        "share of the scored requests that met both bounds; samples are 1 (met) or 0 per scored request",
    ),
    RecordKind(
        "slo.capacity",
        "req/s",
        ("arm", "tau0_ms", "k", "ttft_s"),
        _CAPACITY,
        "highest rate tested with >= 95% attainment before the first failing rung (`fails_at`), null where the lowest "
        "rung fails; a `bound` (at_least, below) where the next rate of the ladder was not tested",
    ),
    RecordKind(
        "slo.capacity_ratio",
        "x",
        ("arm", "baseline", "tau0_ms", "k", "ttft_s"),
        ("ci95", "share_at_least", "draws", "tau0_rule", "workload"),
        "capacity of `arm` over that of `baseline` on the same trace, null where one is a bound; interval and shares "
        "from request bootstrap",
    ),
    RecordKind(
        "simulate.attainment",
        "share",
        _SLO,
        (*_SLO_COUNTS, "gpu", "pool_bytes", "constants", "watermark"),
        "as slo.attainment, replayed through the step-time model",
    ),
    RecordKind(
        "simulate.capacity",
        "req/s",
        ("arm", "tau0_ms", "k", "ttft_s"),
        (*_CAPACITY, "gpu", "pool_bytes", "constants", "watermark"),
        "as slo.capacity, replayed through the step-time model",
    ),
    RecordKind(
        "quality.kl_nats",
        "nats",
        ("arm",),
        ("ci95", "top1", "predicted_nats", "stored_bytes", "read_bytes", "documents", "activations"),
        "mean KL of the plan against the exact model per token; samples are documents; `activations` is fp32 or served",
    ),
    RecordKind(
        "quality.kl_share_nats",
        "nats",
        (),
        ("documents",),
        "KL_share, the unit of damage: the last-but-one loop reads the final loop's exact history",
    ),
    RecordKind(
        "quality.served_kl_nats",
        "nats",
        ("arm", "dtype", "prompt_tokens"),
        (
            "policy_nats",
            "ratio",
            "ci95",
            "top1",
            "worst_nats",
            "worst_document",
            "worst_position",
            "documents",
            "positions",
            "tau",
            "runner",
            "engine",
        ),
        "mean KL per token of the exact fp32 model against what an engine serves, tokens forced through decode steps "
        "after a prompt of `prompt_tokens`; samples are documents; `ratio` is over `policy_nats`, and the arm `stock` "
        "is the floor of the dtype",
    ),
    RecordKind(
        "quality.policy_kl_nats",
        "nats",
        ("arm", "prompt_tokens"),
        ("dtype", "documents", "positions", "tau"),
        "the same of the fp32 reference policy at the same positions; samples are documents",
    ),
    RecordKind(
        "quality.byte_check",
        "B",
        ("arm", "dtype", "pages"),
        ("compared_bytes", "first_difference", "tau"),
        "bytes that differ between `pages` sampled history pages (all cells) as the engine stored them while serving "
        "and the same tokens re-encoded by the reference codec at that moment",
    ),
    RecordKind(
        "demo.wall_s",
        "s",
        ("cores",),
        ("profile_s", "peak_bytes", "serve"),
        "wall time of `make demo` from a clean clone with downloaded packages, serving included",
    ),
    RecordKind(
        "tests.gpu",
        "tests",
        ("failed", "skipped"),
        ("seconds",),
        "GPU tests that passed in one run of `make test-gpu`",
    ),
    RecordKind(
        "tasks.accuracy",
        "share",
        ("arm", "suite", "task"),
        ("items", "ci95", "difference", "difference_ci95", "flips_down", "flips_up"),
        "mean score of a task under one arm; difference is to bf16 on the same items, with a paired interval",
    ),
    RecordKind(
        "additivity.plan",
        "nats",
        ("arm", "predicted_nats"),
        ("documents", "shares"),
        "measured KL of one plan beside the sum of its cells' damages; `documents` is profiled or unseen",
    ),
    RecordKind(
        "additivity.correlation",
        "r",
        ("documents",),
        ("plans",),
        "log-log Pearson correlation of predicted and measured KL over plans",
    ),
    RecordKind(
        "additivity.budget",
        "x",
        ("arm", "baseline", "stored_bytes", "read_bytes"),
        ("documents", "family", "planner_nats", "baseline_nats"),
        "measured KL of the planner's plan within a budget over that of the best hand-made plan that fits",
    ),
)

RECORD_KINDS: dict[str, RecordKind] = {kind.name: kind for kind in _KINDS}


def markdown_table() -> str:
    """The table of ``docs/records.md``."""
    lines = ["| what | unit | settings | also shown | meaning |", "| --- | --- | --- | --- | --- |"]
    for kind in _KINDS:
        required = ", ".join(f"`{key}`" for key in kind.settings) or "-"
        optional = ", ".join(f"`{key}`" for key in kind.optional) or "-"
        lines.append(f"| `{kind.name}` | {kind.unit or '-'} | {required} | {optional} | {kind.meaning} |")
    return "\n".join(lines)


def ignores_eos(record: Record) -> bool:
    """Whether a ladder's answers ran to their full length: as its Record says, or where it does not, its command."""
    said = record.settings.get("ignore_eos")
    return said if isinstance(said, bool) else "--natural-end" not in record.command.split()
