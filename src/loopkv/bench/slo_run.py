"""``run_slo``: tau0 from stock vLLM, then the rate ladder of every arm against a real server, resumable cell by cell.

Everything measured is appended to one Records file as it comes: ``slo.step_ms`` and ``slo.tau0_ms`` of the calibration,
one ``slo.cell`` per (arm, seed, rate) with every request in it. Scores are derived from those and written behind them,
also when the run is interrupted, so a file can be scored again without a server (``max_seconds`` 0), and a run that was
killed repeats no finished cell. A cell belongs to its workload, model, weights, server, plan, hardware and vLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TypeGuard

import numpy as np

from loopkv.artifacts import Fingerprint
from loopkv.bench.arms import EngineArm, file_name
from loopkv.bench.cores import slow_cores
from loopkv.bench.place import Place, measured_elsewhere, place_of, this_place
from loopkv.bench.prompts import Tokenizer, fill_prompts
from loopkv.bench.records_file import rewrite_records
from loopkv.bench.served_steps import windows_to_json
from loopkv.bench.serving_client import (
    SERVED_NAME,
    ClientRun,
    complete,
    preemptions,
    reset_prefix_cache,
    run_client,
    times_from_json,
    times_to_json,
)
from loopkv.bench.slo import (
    ATTAINMENT_RULE,
    OWN_RULE,
    SHORT_RULE,
    Bounds,
    RequestTimes,
    Score,
    capacity,
    capacity_ratio,
    score,
    tau0_context_tokens,
)
from loopkv.bench.workload import Request, workload_sha256
from loopkv.errors import LoopKVError
from loopkv.record_kinds import RECORD_KINDS, ignores_eos
from loopkv.records import Record, append_records, make_record, read_records
from loopkv.vllm_plugin.command import serve_command, vllm_executable
from loopkv.vllm_plugin.server import starting_server
from loopkv.vllm_plugin.settings import ServeSettings

CALIBRATION_SHARES = (0.05, 0.35, 0.65, 0.95)
CALIBRATION_OUTPUT_TOKENS = 64
CALIBRATION_REPEATS = 2
WARM_SHARES = (0.01, 0.1, 0.5)
WARM_OUTPUT_TOKENS = 8
TAIL_TAU0 = 1.5
MAX_NUMBER = 1e12
STOCK_LABEL = "stock"
FEW_SCORED = 20
"""The fewest scored requests of which 95% are fewer than all."""
MAIN_K = 3.0
"""The TPOT bound, in tau0, of the paper's objective: the other TTFT bounds are scored with it."""
SCORE_KINDS = ("slo.attainment", "slo.capacity", "slo.capacity_ratio")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SloSettings:
    """What a run measures.

    Args:
        model: model folder.
        identity: its geometry (and hashes where known), to check plans before a server starts.
        requests: the workload; prompts without text get some from ``tokenizer``.
        tokenizer: of the model folder.
        arms: caches to compare.
        rates_per_s: rungs of every arm that ``arm_rates`` does not name.
        seeds: of the arrivals.
        output: Records file.
        work: folder for logs and scratch files.
        arm_rates: rungs of single arms by label.
        ks, ttfts_s: bounds to score: TPOT in tau0, TTFT in seconds; which of them go together, ``bounds`` says.
        tau0_ms: given instead of measured.
        server_arguments: further arguments of ``vllm serve``, the same for every arm.
        environment: variables of server and client.
        ignore_eos: every request generates all its output tokens.
        climb_past_failure: run every rung, also above one at which all bounds fail.
        find_k: run only the rungs that find the capacity at this many tau0 and the first of ``ttfts_s``, by bisection.
        together: start the servers of all arms at once, which must fit the GPU; only one has traffic at a time.
        max_seconds: start no cell that would probably end later than this; 0 starts no server and scores what the file
            holds, on whatever hardware that was measured.
    """

    model: Path
    identity: Fingerprint
    requests: tuple[Request, ...]
    tokenizer: Tokenizer
    arms: tuple[EngineArm, ...]
    rates_per_s: tuple[float, ...]
    seeds: tuple[int, ...]
    output: Path
    work: Path
    arm_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ks: tuple[float, ...] = (2.0, 3.0, 5.0)
    ttfts_s: tuple[float, ...] = (10.0, 5.0, 20.0)
    tau0_ms: float | None = None
    server_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = True
    climb_past_failure: bool = False
    find_k: float | None = None
    together: bool = False
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        unknown = set(self.arm_rates) - {arm.label for arm in self.arms}
        if unknown:
            labels = ", ".join(arm.label for arm in self.arms)
            raise LoopKVError("bench slo: rates of an arm", got=", ".join(sorted(unknown)), wanted=labels)
        for name, values in (
            *(("rates", self.rates_of(arm)) for arm in self.arms),
            ("seeds", self.seeds),
            ("k", self.ks),
            ("ttft", self.ttfts_s),
        ):
            if not values:
                raise LoopKVError(f"bench slo: {name}", got="none", wanted="at least one")
        found = () if self.find_k is None else (self.find_k,)
        every = (rate for arm in self.arms for rate in self.rates_of(arm))
        if not all(math.isfinite(v) and v > 0 for v in (*every, *self.ks, *self.ttfts_s, *found)):
            raise LoopKVError("bench slo: rates, k and ttft", got="a value not above 0", wanted="numbers above 0")
        if self.tau0_ms is not None and not (math.isfinite(self.tau0_ms) and self.tau0_ms > 0):
            raise LoopKVError("bench slo: tau0", got=f"{self.tau0_ms:g} ms", wanted="milliseconds above 0")
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise LoopKVError("bench slo: max seconds", got=f"{self.max_seconds:g}", wanted="seconds, 0 or more")
        if self.find_k is not None and self.find_k not in self.ks:
            wanted = ", ".join(f"{k:g}" for k in self.ks)
            raise LoopKVError(
                "bench slo: find k", got=f"{self.find_k:g}", wanted=f"one of the k that are scored: {wanted}"
            )
        if not all(type(seed) is int and 0 <= seed < 1 << 32 for seed in self.seeds):
            got = ", ".join(map(str, self.seeds))
            raise LoopKVError("bench slo: seeds", got=got[:80], wanted="whole numbers from 0 to 2^32 - 1")
        if len(set(self.seeds)) != len(self.seeds):
            got = ", ".join(map(str, self.seeds))
            raise LoopKVError("bench slo: seeds", got=got[:80], wanted="each seed once")
        if len(self.requests) < 3:
            raise LoopKVError("bench slo: workload", got=f"{len(self.requests)} requests", wanted="at least 3")

    def rates_of(self, arm: EngineArm) -> tuple[float, ...]:
        """Rungs of one arm, slowest first."""
        return tuple(sorted(set(self.arm_rates.get(arm.label, self.rates_per_s))))

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Pairs of k and TTFT in seconds that are scored: one bound changes at a time.

        Every k under the first TTFT; the other TTFTs at the k of the bisection, or ``MAIN_K``, or else the first k.
        """
        main = self.find_k if self.find_k is not None else MAIN_K if MAIN_K in self.ks else self.ks[0]
        first, *others = self.ttfts_s
        return tuple(dict.fromkeys([*((k, first) for k in self.ks), *((main, ttft) for ttft in others)]))

    @property
    def rescoring(self) -> bool:
        """No server may start: the file is scored as it is."""
        return self.max_seconds == 0

    @property
    def workload(self) -> str:
        """Short identity of the workload."""
        return workload_sha256(self.requests)[:12]


@dataclass(frozen=True, slots=True)
class SloResult:
    """What a run ended with.

    Args:
        records: of the whole file.
        scores: those among them that this run derived.
        measured_cells: cells measured now.
        left: cells that another run would measure, by arm, rate and (of several) seed; of a bisection only the next.
        failures: what went wrong with the arms that did not come to their end, by label.
    """

    records: tuple[Record, ...]
    scores: tuple[Record, ...]
    measured_cells: int
    left: tuple[str, ...]
    failures: Mapping[str, LoopKVError]

    @property
    def cells_left(self) -> int:
        """How many cells another run would measure."""
        return len(self.left)


@dataclass(frozen=True, slots=True)
class _Cell:
    arm: EngineArm
    seed: int
    rate: float


@dataclass(frozen=True, slots=True)
class _Measured:
    record: Record
    times: tuple[RequestTimes, ...]


class _Run:
    def __init__(self, settings: SloSettings, say: Say) -> None:
        self.settings, self.say = settings, say
        self.started = time.monotonic()
        self.plans = {arm.label: arm.load_plan(settings.identity) for arm in settings.arms}
        self.arms = {arm.label: arm for arm in settings.arms}
        self.base = {
            "workload": settings.workload,
            "server": " ".join(settings.server_arguments),
        }
        self.records = list(read_records([settings.output])) if settings.output.exists() else []
        self.where = self.place()
        self.cells: dict[_Cell, _Measured] = {}
        self.measured_tau0: dict[str, Record] = {}
        for number, record in enumerate(self.records, 1):
            self.learn(record, f"{settings.output}, record {number}")
        self.tau0 = self.known_tau0()
        self.failures: dict[str, LoopKVError] = {}
        self.measured = 0
        self.client_start_s = 0.0
        starts = (cell.record.settings.get("server_start_s") for cell in self.cells.values())
        self.server_start_s = max((float(start) for start in starts if _is_number(start)), default=0.0)
        self.own_start_s: dict[str, float] = {}
        self.warned_of_few = False

    # -- records -------------------------------------------------------------------------------------------------------

    def place(self) -> Place:
        """Hardware and vLLM of the cells that count: this machine's; of a run that only scores, the file's newest."""
        if self.settings.rescoring:
            there = [r for r in self.records if r.what in ("slo.cell", "slo.tau0_ms") and self.same_model(r)]
            if there:
                return place_of(max(there, key=lambda record: record.date))
        return this_place()

    def say_where(self) -> None:
        """Name the machine where it is not this one that counts, and the cells of the file that do not count."""
        here = this_place()
        if self.where != here:
            self.say(f"scoring what {self.where} measured; this machine is {here}")
            return
        cells = (r for r in self.records if r.what == "slo.cell" and self.same_model(r))
        if (elsewhere := measured_elsewhere(cells, here, "cells")) is not None:
            self.say(elsewhere)

    def same_model(self, record: Record) -> bool:
        """Whether a record belongs to this workload, server, model and its weights."""
        same = all(record.settings.get(key) == value for key, value in self.base.items())
        identity = self.settings.identity
        return same and (record.model, record.weights_sha256) == (identity.name, identity.weights_sha256)

    def mine(self, record: Record) -> bool:
        """Whether a record was, besides, measured on the hardware and vLLM that count."""
        return self.same_model(record) and place_of(record) == self.where

    def learn(self, record: Record, where: str) -> None:
        """Take a cell or a tau0 of the file, if it is this run's; of several at one place the newest counts.

        Raises:
            LoopKVError: one of this run's that does not hold what such a Record holds.
        """
        if record.what == "slo.tau0_ms" and self.mine(record):
            rule = record.settings.get("tau0_rule")
            if rule not in (OWN_RULE, SHORT_RULE):
                raise LoopKVError(f"{where}: tau0_rule", got=repr(rule)[:80], wanted=f"{SHORT_RULE} or {OWN_RULE}")
            if record.value is None or not (math.isfinite(record.value) and record.value > 0):
                raise LoopKVError(f"{where}: tau0", got=f"{record.value} ms", wanted="milliseconds above 0")
            known = self.measured_tau0.get(rule)
            if known is None or record.date >= known.date:
                self.measured_tau0[rule] = record
        elif record.what == "slo.cell" and self.mine(record):
            cell = self.cell_of(record)
            if cell is None:
                return
            known_cell = self.cells.get(cell)
            if known_cell is None or record.date >= known_cell.record.date:
                self.cells[cell] = _Measured(record, self.times_of(record, f"{where} ({_cell_name(cell)})"))

    def cell_of(self, record: Record) -> _Cell | None:
        """The cell that a record of ``slo.cell`` measured, None where it is none of this run's."""
        s = record.settings
        label, rate = s.get("arm"), s.get("rate_per_s")
        arm = self.arms.get(label) if isinstance(label, str) else None
        if arm is None or record.seed is None or s.get("spec") != arm.spec or not _is_number(rate):
            return None
        plan = self.plans[arm.label]
        if record.plan_sha256 != (None if plan is None else plan.sha256):
            return None
        return _Cell(arm, record.seed, float(rate)) if ignores_eos(record) == self.settings.ignore_eos else None

    def times_of(self, record: Record, where: str) -> tuple[RequestTimes, ...]:
        """The requests of a cell, checked against the workload.

        Raises:
            LoopKVError: a time that is none, or requests that are not the workload's.
        """
        times = times_from_json(record.settings.get("requests"), where)
        duration = record.settings.get("duration_s")
        if not _is_number(duration):
            raise LoopKVError(f"{where}: duration_s", got=repr(duration)[:80], wanted="seconds, 0 or more")
        asked = self.settings.requests
        hint = "remove that line; the next run measures the cell again"
        if len(times) != len(asked):
            got = f"{len(times)} requests"
            raise LoopKVError(where, got=got, wanted=f"the {len(asked)} of the workload", hint=hint)
        for number, (one, request) in enumerate(zip(times, asked, strict=True), 1):
            least = request.output_tokens if self.settings.ignore_eos else 1
            if one.error is None and not least <= one.output_tokens <= request.output_tokens:
                raise LoopKVError(
                    f"{where}: requests, row {number}",
                    got=f"{one.output_tokens} output tokens and no error",
                    wanted=f"{request.output_tokens}, as in the workload",
                    hint=hint,
                )
        return times

    def keep(self, record: Record) -> None:
        append_records(self.settings.output, [record])
        self.records.append(record)
        self.learn(record, str(self.settings.output))

    def make(self, what: str, value: float | None, settings: Mapping[str, object], **fields: object) -> Record:
        unit = RECORD_KINDS[what].unit
        identity = self.settings.identity
        return make_record(
            what,
            value,
            unit,
            settings={**self.base, **settings},
            model=identity.name,
            weights_sha256=identity.weights_sha256,
            **fields,
        )

    # -- servers -------------------------------------------------------------------------------------------------------

    def command(self, arm: EngineArm) -> list[str]:
        arguments = ["--served-model-name", SERVED_NAME, *self.settings.server_arguments]
        if arm.plan is None:
            stock = [*vllm_executable(), "serve", str(self.settings.model), *arguments]
            stock += ["--kv-cache-dtype", arm.kv_cache_dtype] if arm.kv_cache_dtype != "auto" else []
            stock += ["--kv-cache-dtype-skip-layers", *map(str, arm.skip_layers)] if arm.skip_layers else []
            return stock
        given = arm.with_plan_file(self.settings.identity, self.settings.work / "plans")
        return serve_command(str(self.settings.model), ServeSettings(**given.additional_config()["loopkv"]), arguments)

    def environment(self) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", **self.settings.environment}

    def warm(self, url: str) -> None:
        """Prompts of several lengths before anything is measured: kernels compile at first use."""
        longest = max(r.length_tokens for r in self.settings.requests)
        output = max(1, min(WARM_OUTPUT_TOKENS, longest // 4))
        asked = [Request(max(1, round(share * (longest - output))), output) for share in WARM_SHARES]
        for request in fill_prompts(asked, self.settings.tokenizer, seed=1):
            assert request.prompt is not None
            complete(url, request.prompt, output)

    def client(self, *arguments: object, **options: object) -> ClientRun:
        """``run_client``, with the seconds kept that it needs beyond its traffic (it imports vLLM each time)."""
        started = time.monotonic()
        done = run_client(*arguments, **options)  # type: ignore[arg-type]
        self.client_start_s = max(self.client_start_s, time.monotonic() - started - done.duration_s)
        return done

    # -- calibration ---------------------------------------------------------------------------------------------------

    def known_tau0(self) -> dict[str, float]:
        """tau0 in milliseconds by rule, given or measured before; empty where it must be measured."""
        given = self.settings.tau0_ms
        if given is not None:
            return {"given": given}
        found = {rule: float(record.value or 0.0) for rule, record in self.measured_tau0.items()}
        return found if {OWN_RULE, SHORT_RULE} <= set(found) else {}

    def measure_tau0(self, arm: EngineArm, url: str | None) -> None:
        """Measure tau0 on vLLM's own cache, at ``url`` or on a server of its own."""
        self.say("calibrate tau0 on stock vLLM: single requests at several contexts")
        if url is None:
            with self.server(arm) as started:
                rows = self.calibrate(started, arm)
        else:
            rows = self.calibrate(url, arm)
        slope, start = fit_line(rows)
        for rule in (SHORT_RULE, OWN_RULE):
            context = tau0_context_tokens(self.settings.requests, rule)
            value = start + slope * context
            if not (math.isfinite(value) and value > 0):
                raise LoopKVError(
                    "tau0 calibration", got=f"{value:g} ms", wanted="milliseconds above 0", hint="run again"
                )
            settings = {"arm": arm.label, "tau0_rule": rule, "context_tokens": context}
            line = {"start_ms": start, "slope_ms_per_1k": slope * 1e3}
            self.keep(self.make("slo.tau0_ms", value, {**settings, **line}))
            self.say(f"tau0 ({rule} rule, {context:,.0f} tokens): {value:.2f} ms")
        self.tau0 = self.known_tau0()

    def calibrate(self, url: str, arm: EngineArm) -> list[tuple[float, float]]:
        """(mean context, step ms) of single requests; of each prompt length the first repeat warms up."""
        longest = max(r.length_tokens for r in self.settings.requests)
        output = max(2, min(CALIBRATION_OUTPUT_TOKENS, longest // 4))
        room = longest - output
        lengths = sorted({max(1, round(share * room)) for share in CALIBRATION_SHARES})
        each = 1 + CALIBRATION_REPEATS
        asked = [Request(n, output) for n in lengths for _ in range(each)]
        filled = fill_prompts(asked, self.settings.tokenizer, seed=0)
        folder = self.settings.work / "calibration"
        done = self.client(
            url,
            filled,
            folder,
            str(self.settings.model),
            rate_per_s=math.inf,
            seed=0,
            one_at_a_time=True,
            environment=self.environment(),
        )
        bad = next((r.error for r in done.requests if r.failed), None)
        if bad is not None:
            raise LoopKVError("tau0 calibration", got=f"a failed request: {bad}", hint=f"see {folder}")
        rows = []
        for i in range(0, len(filled), each):
            steps = tuple(1e3 * (r.tpot_s or 0.0) for r in done.requests[i + 1 : i + each])
            context = filled[i].prompt_tokens + (output + 1) / 2
            value = float(np.median(steps))
            place = {"arm": arm.label, "context_tokens": context}
            self.keep(self.make("slo.step_ms", value, place, samples=steps))
            rows.append((context, value))
        return rows

    # -- cells ---------------------------------------------------------------------------------------------------------

    def all(self) -> None:
        """Measure what is missing of tau0 and of every arm."""
        self.say_where()
        stock = next((a for a in self.settings.arms if a.stock and a.kv_cache_dtype == "auto"), None)
        if self.settings.rescoring:
            if not self.tau0 or not self.cells:
                what = "rung of these arms" if self.tau0 else "tau0"
                self.say(
                    f"nothing measured yet: no {what} with this workload, model and server; give it time to measure"
                )
            for cell in self.known():
                self.say(f"{_cell_name(cell)}: {self.met(cell)}")
            return
        missing = [cell for arm in self.settings.arms for cell in self.missing(arm)]
        if (missing or not self.tau0) and (warning := slow_cores()) is not None:
            self.say(warning)
        if self.settings.together:
            self.all_together(stock)
            return
        if not self.tau0 and stock is None:
            self.measure_tau0(EngineArm(STOCK_LABEL, "stock", None), None)
        ordered = sorted(self.settings.arms, key=lambda arm: arm is not stock)  # tau0 comes with the stock arm's server
        for arm in ordered:
            cells = self.missing(arm)
            if (self.tau0 and not cells) or self.no_time_for(cells):
                continue
            try:
                with self.server(arm) as url:
                    if not self.tau0:
                        self.measure_tau0(arm, url)
                    self.ladders({arm: url})
            except LoopKVError as error:
                if not self.tau0:
                    raise self.of_arm(arm, error) from None
                self.fail(arm, error)

    def all_together(self, stock: EngineArm | None) -> None:
        """As ``all``, with every server up from the start: the rungs of the arms take turns."""
        cells = {arm: self.missing(arm) for arm in self.settings.arms}
        arms = [arm for arm, every in cells.items() if every and not self.no_time_for(every)]
        calibrated = None if self.tau0 else stock or EngineArm(STOCK_LABEL, "stock", None)
        started = arms if calibrated is None or calibrated in arms else [calibrated, *arms]
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            # Each answer is waited for on its own, or a server would seem to start as slowly as those before it. The
            # threads end last: when the servers have been stopped, there is nothing to wait for.
            threads = stack.enter_context(ThreadPoolExecutor(max(1, len(started))))
            servers = {arm: stack.enter_context(self.starting(arm)) for arm in started}
            answers = {arm: threads.submit(_answered, answer) for arm, answer in servers.items()}
            urls = {}
            for arm, answer in answers.items():
                try:
                    urls[arm] = self.ready(arm, *answer.result(), began)
                except LoopKVError as error:
                    if arm is calibrated:
                        raise self.of_arm(arm, error) from None
                    self.fail(arm, error)
            if calibrated is not None:
                self.measure_tau0(calibrated, urls[calibrated])
            self.ladders({arm: urls[arm] for arm in arms if arm in urls})

    def of_arm(self, arm: EngineArm, error: LoopKVError) -> LoopKVError:
        """The same error with its arm and the log of its server."""
        log = str(self.log(arm))
        hint = error.hint if error.hint and log in error.hint else f"{error.hint + '; ' if error.hint else ''}see {log}"
        return LoopKVError(f"arm {arm.label}: {error.what}", got=error.got, wanted=error.wanted, hint=hint)

    def fail(self, arm: EngineArm, error: LoopKVError) -> None:
        """Note that an arm ends here; the others go on."""
        self.failures[arm.label] = self.of_arm(arm, error)
        self.say(str(self.failures[arm.label]))

    @contextlib.contextmanager
    def server(self, arm: EngineArm) -> Iterator[str]:
        """A server of one arm, warm."""
        began = time.monotonic()
        with self.starting(arm) as answer:
            yield self.ready(arm, *_answered(answer), began)

    def starting(self, arm: EngineArm) -> contextlib.AbstractContextManager[Callable[[], str]]:
        """A server of one arm on its way up."""
        self.say(f"starting server for {arm.label}")
        return starting_server(self.command(arm), self.log(arm), self.environment())

    def log(self, arm: EngineArm) -> Path:
        """Where the server of an arm writes."""
        return self.settings.work / f"server-{file_name(arm.label)}.log"

    def ready(self, arm: EngineArm, url: str, answered: float, began: float) -> str:
        """Warm the server of an arm, started at ``began`` and up at ``answered``; its own time to start is kept."""
        start = time.monotonic()
        self.warm(url)
        end = time.monotonic()
        self.own_start_s[arm.label] = answered - began + end - start
        self.server_start_s = max(self.server_start_s, end - began)
        return url

    def missing(self, arm: EngineArm) -> list[_Cell]:
        """Cells of one arm still to be measured, slowest rate of each seed first; of a bisection only the next."""
        if self.settings.find_k is not None and self.tau0:
            found = (self.next_rate(arm, seed, min(self.tau0.values())) for seed in self.settings.seeds)
            return [_Cell(arm, s, r) for s, r in zip(self.settings.seeds, found, strict=True) if r is not None]
        cells = []
        for seed in self.settings.seeds:
            top = self.lowest_failing(arm, seed)
            every = (_Cell(arm, seed, rate) for rate in self.settings.rates_of(arm) if rate < top)
            cells += [cell for cell in every if cell not in self.cells]
        return cells

    def next_rate(self, arm: EngineArm, seed: int, tau0_ms: float) -> float | None:
        """The rung that a bisection measures next; None where the capacity is known."""
        assert self.settings.find_k is not None
        bounds = Bounds(self.settings.ttfts_s[0], self.settings.find_k, tau0_ms / 1e3)
        met = {
            rate: score(times, bounds).attainment >= ATTAINMENT_RULE
            for rate, times in self.ladder_times(arm, seed).items()
        }
        return next_rung(self.settings.rates_of(arm), met)

    def ladders(self, urls: Mapping[EngineArm, str]) -> None:
        """Run the missing cells of some arms, one of each in turn, as far as the time allows.

        An arm whose server or client fails ends there, and the others go on.
        """
        left: set[_Cell] = set()
        ran = True
        while ran:
            ran = False
            for arm, url in urls.items():
                if arm.label in self.failures:
                    continue
                cell = next((cell for cell in self.missing(arm) if cell not in left), None)
                if cell is None:
                    continue
                ran = True
                if self.out_of_time(cell.rate):
                    left.add(cell)
                    continue
                try:
                    self.run_cell(url, cell)
                except LoopKVError as error:
                    self.fail(arm, error)

    def left(self) -> tuple[str, ...]:
        """Names of the cells that another run would measure."""
        several = len(self.settings.seeds) > 1
        return tuple(
            f"{cell.arm.label} {cell.rate:g}" + (f" (seed {cell.seed})" if several else "")
            for arm in self.settings.arms
            for cell in self.missing(arm)
        )

    def known(self) -> list[_Cell]:
        """Measured cells of these arms, seeds and rates."""
        every = (
            _Cell(arm, seed, rate)
            for arm in self.settings.arms
            for seed in self.settings.seeds
            for rate in self.settings.rates_of(arm)
        )
        return [cell for cell in every if cell in self.cells]

    def met(self, cell: _Cell) -> str:
        """How many scored requests of a measured cell met each TPOT bound and the first TTFT bound.

        Under the shortest tau0 known, which is what a bisection looks at. The first cell with so few scored requests
        that none of them may miss is followed by a warning.
        """
        if not self.tau0:
            return "not scored: no tau0"
        rule, tau0_ms = min(self.tau0.items(), key=lambda item: item[1])
        ttft, ks = self.settings.ttfts_s[0], self.settings.ks
        scores = [score(self.cells[cell].times, Bounds(ttft, k, tau0_ms / 1e3)) for k in ks]
        scored = scores[0].scored
        self.warn_of_few(scored)
        counts = "/".join(str(sum(one.met)) for one in scores)
        at = "/".join(f"{k:g}" for k in ks)
        return f"met {counts} of {scored} at {at} tau0 ({rule}, {tau0_ms:.2f} ms), TTFT <= {ttft:g} s"

    def warn_of_few(self, scored: int) -> None:
        """Say once that a share of 95% leaves no request to miss."""
        if scored < FEW_SCORED and not self.warned_of_few:
            self.warned_of_few = True
            self.say(
                f"warning: only {scored} requests of a rung are scored (the middle 80% of its arrivals); of fewer than "
                f"{FEW_SCORED}, {ATTAINMENT_RULE:.0%} means all of them: one late request fails a rung"
            )

    def lowest_failing(self, arm: EngineArm, seed: int) -> float:
        """The lowest measured rate that fails every bound, above which no rung can change a capacity; else infinite."""
        bounds = [Bounds(ttft, k, ms / 1e3) for ms in self.tau0.values() for k, ttft in self.settings.bounds]
        if self.settings.climb_past_failure or not bounds:
            return math.inf
        failing = (
            rate
            for rate, times in self.ladder_times(arm, seed).items()
            if all(score(times, one).attainment < ATTAINMENT_RULE for one in bounds)
        )
        return min(failing, default=math.inf)

    def ladder_times(self, arm: EngineArm, seed: int) -> dict[float, tuple[RequestTimes, ...]]:
        """Measured rungs of one arm and seed, by rate."""
        cells = (_Cell(arm, seed, rate) for rate in self.settings.rates_of(arm))
        return {cell.rate: self.cells[cell].times for cell in cells if cell in self.cells}

    def no_time_for(self, cells: Sequence[_Cell]) -> bool:
        """Whether no server need start: tau0 is known and not even the fastest rung would end in time.

        A server takes as long to start as the slowest of the file did.
        """
        return bool(self.tau0) and self.out_of_time(max(cell.rate for cell in cells), self.server_start_s)

    def out_of_time(self, rate: float, start_s: float = 0.0) -> bool:
        limit = self.settings.max_seconds
        if limit is None:
            return False
        needed = start_s + self.client_start_s + len(self.settings.requests) / rate + self.tail_s()
        return time.monotonic() - self.started + needed > limit

    def tail_s(self) -> float:
        """Seconds from the last arrival to the last token: the longest seen of this workload, else the longest request
        at one and a half times the shortest tau0 known.
        """
        seen = [
            float(cell.record.settings["duration_s"]) - max(one.arrival_s for one in cell.times)
            for cell in self.cells.values()
        ]
        if seen:
            return max(seen)
        step_s = min(self.tau0.values(), default=0.0) / 1e3
        return max(request.output_tokens for request in self.settings.requests) * TAIL_TAU0 * step_s

    def run_cell(self, url: str, cell: _Cell) -> None:
        settings = self.settings
        requests = fill_prompts(settings.requests, settings.tokenizer, seed=cell.seed)
        reset_prefix_cache(url)
        before = preemptions(url)
        done = self.client(
            url,
            requests,
            settings.work / f"{file_name(cell.arm.label)}-{cell.seed}-{cell.rate:g}",
            str(settings.model),
            rate_per_s=cell.rate,
            seed=cell.seed,
            ignore_eos=settings.ignore_eos,
            environment=self.environment(),
        )
        plan = self.plans[cell.arm.label]
        failed = sum(r.failed for r in done.requests)
        gone: LoopKVError | None = None
        preempted: int | None = None
        try:
            preempted = preemptions(url) - before
        except LoopKVError as error:  # the server died: its requests have failed, and count
            gone = error
        details: dict[str, object] = {
            "arm": cell.arm.label,
            "spec": cell.arm.spec,
            "rate_per_s": cell.rate,
            "preemptions": preempted,
            "ignore_eos": settings.ignore_eos,
            "duration_s": done.duration_s,
            "server_start_s": round(self.own_start_s[cell.arm.label], 1),
            "requests": times_to_json(done.requests),
            "steps": windows_to_json(done.steps),
        }
        self.keep(
            self.make(
                "slo.cell",
                float(len(done.requests)),
                details,
                seed=cell.seed,
                plan_sha256=None if plan is None else plan.sha256,
            )
        )
        self.measured += 1
        self.say(
            f"{cell.arm.label}, seed {cell.seed}, {cell.rate:g} req/s: {len(done.requests)} requests in "
            f"{done.duration_s:.0f} s, {failed} failed, "
            + (f"{preempted} preemptions" if gone is None else "and no server any more")
            + f"; {self.met(cell)}"
        )
        if gone is not None:
            raise gone

    # -- scores --------------------------------------------------------------------------------------------------------

    def write_scores(self) -> tuple[Record, ...]:
        """Score the file and write it with the new scores in place of the old ones that they replace."""
        scores = self.scores()
        if scores:
            replaced = {_score_place(r): r.plan_sha256 for r in scores}
            plans = {place[0]: plan for place, plan in replaced.items()}
            self.records = [
                record
                for record in self.records
                if record.what not in SCORE_KINDS
                or not (
                    (place := _score_place(record)) in replaced
                    or (place[0] in plans and plans[place[0]] != record.plan_sha256)  # of another plan, by this label
                )
            ]
            self.records += scores
            rewrite_records(self.settings.output, self.records)
        return scores

    def scores(self) -> tuple[Record, ...]:
        """Attainment of every rung, capacities, and ratios of every arm to each arm before it."""
        records: list[Record] = []
        for (rule, tau0_ms), (k, ttft), seed in itertools.product(
            self.tau0.items(), self.settings.bounds, self.settings.seeds
        ):
            bounds = Bounds(ttft, k, tau0_ms / 1e3)
            place = {
                "tau0_rule": rule,
                "tau0_ms": tau0_ms,
                "k": k,
                "ttft_s": ttft,
                "ignore_eos": self.settings.ignore_eos,
            }
            met: dict[EngineArm, dict[float, tuple[bool, ...]]] = {}
            for arm in self.settings.arms:
                rungs = {rate: score(times, bounds) for rate, times in self.ladder_times(arm, seed).items()}
                if not rungs:
                    continue
                records += self.arm_scores(arm, seed, rungs, place)
                met[arm] = {rate: one.met for rate, one in rungs.items()}
            for base, other in itertools.combinations(met, 2):
                ratio = capacity_ratio(
                    met[other],
                    met[base],
                    seed=seed,
                    arm_rates=self.settings.rates_of(other),
                    baseline_rates=self.settings.rates_of(base),
                )
                settings: dict[str, object] = {**place, "arm": other.label, "baseline": base.label}
                if ratio.ratio is not None:  # of bounds there is no ratio, nor an interval of one
                    settings["ci95"] = list(ratio.ci95)
                    settings["share_at_least"] = ratio.share_at_least
                    settings["draws"] = ratio.draws
                made = self.make("slo.capacity_ratio", ratio.ratio, settings, seed=seed)
                records.append(_measured_on(made, self.cells[_Cell(other, seed, max(met[other]))].record))
        return tuple(records)

    def arm_scores(
        self, arm: EngineArm, seed: int, rungs: Mapping[float, Score], place: Mapping[str, object]
    ) -> list[Record]:
        plan = self.plans[arm.label]
        shared = {"seed": seed, "plan_sha256": None if plan is None else plan.sha256}
        records = []
        for rate, one in rungs.items():
            cell = self.cells[_Cell(arm, seed, rate)].record
            settings = {
                **place,
                "arm": arm.label,
                "rate_per_s": rate,
                "scored": one.scored,
                "missed_ttft": one.missed_ttft,
                "missed_tpot": one.missed_tpot,
                "missed_both": one.missed_both,
                "failed": one.failed,
                "preemptions": cell.settings.get("preemptions"),
            }
            flags = tuple(float(flag) for flag in one.met)
            made = self.make("slo.attainment", one.attainment, settings, samples=flags, **shared)
            records.append(_measured_on(made, cell))
        found = capacity({rate: one.attainment for rate, one in rungs.items()}, self.settings.rates_of(arm))
        settings = {
            **place,
            "arm": arm.label,
            "lowest_rate": found.lowest_rate,
            "highest_rate": found.highest_rate,
            "no_rung_failed": found.no_rung_failed,
            "bound": found.bound,
            "fails_at": found.fails_at,
        }
        last = self.cells[_Cell(arm, seed, found.highest_rate)].record
        records.append(_measured_on(self.make("slo.capacity", found.rate_per_s, settings, **shared), last))
        return records


def _measured_on(score_record: Record, cell: Record) -> Record:
    """A score with the hardware, versions and commit of the run it was scored from."""
    return score_record.model_copy(
        update={
            "hardware": cell.hardware,
            "driver": cell.driver,
            "versions": cell.versions,
            "commit": cell.commit,
            "command": cell.command,
        }
    )


def run_slo(settings: SloSettings, say: Say, interrupted: Callable[[SloResult], None] | None = None) -> SloResult:
    """Calibrate, run every missing cell of every arm, and score the file, also where the run is interrupted.

    An arm whose server or client fails is among the result's ``failures``; the others are measured all the same.

    Args:
        settings: what is measured.
        say: takes lines about the progress.
        interrupted: takes what an interrupted run has come to, before its exception goes on.

    Raises:
        LoopKVError: a bad plan, setting or Records file (before a server starts), or no tau0.
    """
    run = _Run(settings, say)
    settings.work.mkdir(parents=True, exist_ok=True)
    try:
        run.all()
    except BaseException:
        say(f"ended early: {settings.output} keeps {len(run.cells)} cells and their scores")
        with contextlib.suppress(LoopKVError):  # the error that is on its way says more
            scores = run.write_scores()
            if interrupted is not None:
                interrupted(SloResult(tuple(run.records), scores, run.measured, run.left(), run.failures))
        raise
    scores = run.write_scores()
    return SloResult(tuple(run.records), scores, run.measured, run.left(), run.failures)


def next_rung(rates: Sequence[float], met: Mapping[float, bool]) -> float | None:
    """The rate that a bisection of a ladder measures next, or None where no further rung would tell more.

    It starts in the middle of ``rates``, goes on by doubled steps until one rung meets the objective and one fails it,
    and then halves the rungs between.

    Args:
        rates: every rung of the ladder.
        met: whether the rungs measured so far met the objective.
    """
    ladder = sorted(set(rates))
    known = {ladder.index(rate): ok for rate, ok in met.items() if rate in ladder}
    if not known:
        return ladder[len(ladder) // 2]
    fails = min((i for i, ok in known.items() if not ok), default=len(ladder))
    holds = max((i for i, ok in known.items() if ok and i < fails), default=-1)
    if fails - holds == 1:
        return None
    if fails == len(ladder):
        return ladder[min(holds + max(2, 2 * (holds - min(known))), fails - 1)]
    if holds == -1:
        return ladder[max(fails - max(2, 2 * (max(known) - fails)), 0)]
    return ladder[(holds + fails) // 2]


def fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and start of step time over context by least squares; one row alone gives a flat line.

    Raises:
        LoopKVError: no row.
    """
    if not rows:
        raise LoopKVError("tau0 fit", got="no row", wanted="at least one")
    contexts, steps = np.array(rows).T
    if np.ptp(contexts) == 0:
        return 0.0, float(steps.mean())
    slope, start = np.polyfit(contexts, steps, 1)
    return float(slope), float(start)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a Record is a number that can be seconds or a rate."""
    return isinstance(value, int | float) and 0 <= value <= MAX_NUMBER


def _answered(answer: Callable[[], str]) -> tuple[str, float]:
    """URL of a server that answers, and when it did."""
    return answer(), time.monotonic()


def _score_place(record: Record) -> tuple[str, str | None]:
    """What a score is a score of: its ladder, and its rung. A tau0 that is given is part of it, one measured is not."""
    s = record.settings
    keys = ["workload", "server", "arm", "baseline", "tau0_rule", "k", "ttft_s"]
    keys += ["tau0_ms"] if s.get("tau0_rule") == "given" else []
    ladder = [
        record.what,
        record.model,
        record.weights_sha256,
        *astuple(place_of(record)),
        record.seed,
        ignores_eos(record),
    ]
    rung = s.get("rate_per_s")
    return json.dumps([*ladder, *map(s.get, keys)]), None if rung is None else json.dumps(rung)


def _cell_name(cell: _Cell) -> str:
    return f"{cell.arm.label}, seed {cell.seed}, {cell.rate:g} req/s"
