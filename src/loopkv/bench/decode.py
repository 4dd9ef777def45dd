"""``run_decode``: decode throughput of several arms, each in a process of its own with a time budget.

A row is B requests of one context that decode together. The child appends Records as rows end, so a run that is cut
keeps what it has, and the next one measures only what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loopkv.artifacts import Fingerprint
from loopkv.artifacts.hashing import handed_on
from loopkv.artifacts.storage import write_atomically
from loopkv.bench.arms import EngineArm, file_name
from loopkv.bench.cores import slow_cores
from loopkv.bench.place import Place, measured_elsewhere, place_of, this_place
from loopkv.bench.records_file import rewrite_records
from loopkv.errors import LoopKVError
from loopkv.records import Record, append_records, make_record, read_records

DEFAULT_BATCHES = ("1", "peak/8", "peak/4", "peak/2", "3peak/4", "peak")
DECODE_STEPS = 128
OTHER_STEPS = 32
TTFT_SLOT = "ttft"
ALL_SLOTS = "all"
ENGINE_SLOT = "engine"
ROW_KINDS = ("decode.step_ms", "decode.refused", "decode.prefill_tok_s")
"""Kinds of Record that end a row."""
START_FAILED = 3
"""Exit status of a child whose engine did not start; its Record names the slot ``engine`` and no context."""
WORKER = "loopkv.bench.decode_worker"
HINT = "hint: "
MAX_REASON = 300
_EXCEPTION = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?:Error|Exception)\b: .*")
_SLOT = re.compile(r"(?:(\d+)|(\d*)peak(?:/(\d+))?)", re.ASCII)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What a run measures.

    Args:
        model: model folder.
        dummy: its weights are made up by the engine.
        identity: geometry (and hashes where known).
        step_parameters: weights that a decode step reads, every loop counted.
        arms: caches to compare.
        contexts: tokens of every request.
        batches: rows of the sweep: numbers, ``peak`` (as many as stay resident), ``peak/2``, ``3peak/4``.
        output: Records file.
        work: folder for job files and logs.
        engine: options of ``vllm.LLM`` on top of the defaults.
        arm_seconds: time budget of one arm's process.
        decode_steps: steps timed at the peak; other rows take at most 32.
        components: also record GPU time by component and host launches at the peak (needs CUDA).
        ttft: also record the time to the first token of one request, and the prefill rate of several at once.
        ttft_prompts: how many at once (fewer where fewer fit).
        prefill: really prefill the requests whose decode steps are timed, instead of generating their caches.
        hot_share: of the history in generated caches: within 14 bits of the running maximum (dummy weights alone).
        seed: of prompts, weights and caches.
    """

    model: Path
    dummy: bool
    identity: Fingerprint
    step_parameters: int
    arms: tuple[EngineArm, ...]
    contexts: tuple[int, ...]
    output: Path
    work: Path
    batches: tuple[str, ...] = DEFAULT_BATCHES
    engine: Mapping[str, Any] = field(default_factory=dict)
    arm_seconds: float = 600.0
    decode_steps: int = DECODE_STEPS
    components: bool = False
    ttft: bool = False
    ttft_prompts: int = 16
    prefill: bool = False
    hot_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.contexts or not all(c >= 1 for c in self.contexts):
            raise LoopKVError("bench decode: contexts", got=self.contexts, wanted="tokens >= 1")
        if self.decode_steps < 1 or not self.arm_seconds > 0:
            raise LoopKVError("bench decode", got="no steps or no time", wanted="both above 0")
        if self.ttft_prompts < 1:
            raise LoopKVError("bench decode: prompts at once", got=self.ttft_prompts, wanted="at least 1")
        if not 0.01 <= self.hot_share <= 0.9:
            raise LoopKVError("bench decode: hot share", got=self.hot_share, wanted="0.01 to 0.9")
        for slot in self.batches:
            batch_of(slot, 8)

    @property
    def contents(self) -> str:
        """What the caches hold, as it is kept in Records."""
        return f"generated, hot share {self.hot_share:g}" if self.dummy and not self.prefill else "prefilled"


@dataclass(frozen=True, slots=True)
class Job:
    """What one child process does: one arm, the rows that are missing."""

    arm: EngineArm
    model: str
    dummy: bool
    identity: dict[str, Any]
    step_parameters: int
    rows: tuple[tuple[int, str], ...]
    output: str
    engine: dict[str, Any]
    settings: dict[str, Any]
    decode_steps: int
    components: bool
    ttft_prompts: int
    prefill: bool
    hot_share: float
    seed: int
    command: str

    @property
    def fingerprint(self) -> Fingerprint:
        """The model's identity."""
        return Fingerprint.model_validate_json(json.dumps(self.identity))

    def save(self, path: Path) -> None:
        """Write the job file."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job file that ``save`` wrote."""
        data = json.loads(path.read_text())
        arm = data.pop("arm")
        arm["skip_layers"] = tuple(arm["skip_layers"])
        arm["settings"] = tuple(tuple(pair) for pair in arm["settings"])
        data["rows"] = tuple((int(context), str(slot)) for context, slot in data["rows"])
        return cls(arm=EngineArm(**arm), **data)


def batch_of(slot: str, peak: int) -> int:
    """Batch of a row: a number, or a share of the resident peak (at least 1, never above the peak).

    Raises:
        LoopKVError: anything else.
    """
    match = _SLOT.fullmatch(slot.strip())
    if match is None:
        raise LoopKVError("batch", got=repr(slot)[:40], wanted="a number, peak, peak/2 or 3peak/4")
    number, times, divisor = match.groups()
    batch = int(number) if number else peak * int(times or 1) // max(1, int(divisor or 1))
    if number and batch < 1:
        raise LoopKVError("batch", got=batch, wanted="at least 1")
    return max(1, min(batch, peak))


def missing_rows(settings: DecodeSettings, arm: EngineArm, records: Sequence[Record]) -> tuple[tuple[int, str], ...]:
    """Rows (context, slot) of one arm without a Record of these settings, measured on this hardware and vLLM.

    A slot counts as measured where any slot gave its batch: ``64`` and ``peak`` are one row where 50 fit.
    """
    here = this_place()
    mine = [r for r in _of_arm(settings, arm, records) if place_of(r) == here]
    done = {(r.settings.get("context_tokens"), r.settings.get("slot")) for r in mine if r.what in ROW_KINDS}
    timed = [r.settings for r in mine if r.what == "decode.step_ms" and r.settings.get("peak_batch")]
    peaks = {s["context_tokens"]: int(s["peak_batch"]) for s in timed}
    batches = {(s["context_tokens"], s["batch"]) for s in timed}

    def missing(context: int, slot: str) -> bool:
        if (context, slot) in done or (context, ALL_SLOTS) in done:
            return False
        return slot == TTFT_SLOT or context not in peaks or (context, batch_of(slot, peaks[context])) not in batches

    slots = ((TTFT_SLOT,) if settings.ttft else ()) + settings.batches
    return tuple((context, slot) for context in settings.contexts for slot in slots if missing(context, slot))


def _of_arm(settings: DecodeSettings, arm: EngineArm, records: Sequence[Record]) -> list[Record]:
    """The Records of this arm under these settings, wherever they were measured."""
    identity = settings.identity
    plan = arm.load_plan(identity)
    model = identity.name, identity.weights_sha256, None if plan is None else plan.sha256
    wanted = {"arm": arm.label, "spec": arm.spec, "engine": engine_text(settings), "contents": settings.contents}
    return [
        record
        for record in records
        if (record.model, record.weights_sha256, record.plan_sha256) == model
        and all(record.settings.get(key) == value for key, value in wanted.items())
    ]


def _forget_failures(settings: DecodeSettings, arm: EngineArm, here: Place) -> None:
    """Drop what earlier engines of this arm failed with here: the run that follows says how it is now."""
    if not settings.output.exists():
        return
    known = list(read_records([settings.output]))
    failed = [
        r
        for r in _of_arm(settings, arm, known)
        if r.what == "decode.refused" and r.settings.get("slot") in (None, ENGINE_SLOT) and place_of(r) == here
    ]
    if failed:
        kept = [r for r in known if all(r is not one for one in failed)]
        rewrite_records(settings.output, kept)


def engine_text(settings: DecodeSettings) -> str:
    """The engine options as they are kept in Records."""
    return json.dumps(dict(settings.engine), sort_keys=True)


def run_decode(settings: DecodeSettings, say: Say) -> tuple[Record, ...]:
    """Measure every missing row of every arm; returns all Records of the file.

    An arm that the engine refuses, or that runs out of time, leaves a ``decode.refused`` Record or missing rows; the
    others still run. An arm that is tried again loses the Record of its engine's earlier failure. Rows of other
    hardware or another vLLM stay in the file, and are measured here all the same.

    Raises:
        LoopKVError: a bad plan (before anything starts) or an unreadable Records file.
    """
    for arm in settings.arms:
        arm.load_plan(settings.identity)
    known = list(read_records([settings.output])) if settings.output.exists() else []
    if known:  # drops a torn last line
        rewrite_records(settings.output, known)
    settings.work.mkdir(parents=True, exist_ok=True)
    here = this_place()
    rows_known = [r for arm in settings.arms for r in _of_arm(settings, arm, known) if r.what in ROW_KINDS]
    if (elsewhere := measured_elsewhere(rows_known, here, "rows")) is not None:
        say(elsewhere)
    missing = [(arm, missing_rows(settings, arm, known)) for arm in settings.arms]
    if any(rows for _, rows in missing) and (warning := slow_cores()) is not None:
        say(warning)
    for arm, rows in missing:
        if not rows:
            say(f"{arm.label}: nothing missing")
            continue
        _forget_failures(settings, arm, here)
        say(f"{arm.label}: {len(rows)} rows, at most {settings.arm_seconds:.0f} s")
        _run_arm(settings, arm, rows, say)
    return tuple(read_records([settings.output])) if settings.output.exists() else ()


def _run_arm(settings: DecodeSettings, arm: EngineArm, rows: tuple[tuple[int, str], ...], say: Say) -> None:
    name = file_name(arm.label)
    job_file, log = settings.work / f"{name}.job.json", settings.work / f"{name}.log"
    place = {
        "arm": arm.label,
        "spec": arm.spec,
        "engine": engine_text(settings),
        "contents": settings.contents,
    }
    job = Job(
        arm=arm.with_plan_file(settings.identity, settings.work),
        model=str(settings.model),
        dummy=settings.dummy,
        identity=settings.identity.model_dump(mode="json"),
        step_parameters=settings.step_parameters,
        rows=rows,
        output=str(settings.output),
        engine=dict(settings.engine),
        settings=place,
        decode_steps=settings.decode_steps,
        components=settings.components,
        ttft_prompts=settings.ttft_prompts,
        prefill=settings.prefill or not settings.dummy,
        hot_share=settings.hot_share,
        seed=settings.seed,
        command=make_record("decode.step_ms", None, "ms").command,
    )
    job.save(job_file)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(job_file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **handed_on(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            start_new_session=True,
        )
        try:
            status = process.wait(settings.arm_seconds)
        except subprocess.TimeoutExpired:
            say(f"{arm.label}: out of time after {settings.arm_seconds:.0f} s; run again for the rows that are missing")
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    taken = time.monotonic() - started
    if status == 0:
        say(f"{arm.label}: done in {taken:.0f} s")
        return
    reason = _reason(log, status)
    say(f"{arm.label}: {reason} (see {log})")
    # No slot of a row: an engine that failed is tried again by the next run.
    where = {"slot": ENGINE_SLOT} if status == START_FAILED else {"context_tokens": rows[0][0]}
    refused = {**place, "reason": reason, **where}
    identity, plan = settings.identity, arm.load_plan(settings.identity)
    made = make_record(
        "decode.refused",
        None,
        "",
        settings=refused,
        model=identity.name,
        weights_sha256=identity.weights_sha256,
        plan_sha256=None if plan is None else plan.sha256,
    )
    append_records(settings.output, [made])


def _reason(log: Path, status: int) -> str:
    """The last exception of a child's log from its name on (else the last line), and the hint below it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [match[0] for line in lines if (match := _EXCEPTION.search(line))]
    reason = (raised or [line for line in lines if not line.startswith(HINT)] or ["no output"])[-1]
    reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."
    hints = [line for line in lines if line.startswith(HINT)]
    said = "the engine did not start" if status == START_FAILED else f"exit status {status}"
    return f"{said}: {reason}" + (f" ({hints[-1]})" if hints else "")
