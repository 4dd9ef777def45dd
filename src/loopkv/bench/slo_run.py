"""``run_slo``: tau0 from stock vLLM, then the rate ladder of every arm against a real server, resumable cell by cell.

Everything measured is appended to one Records file as it comes: ``slo.step_ms`` and ``slo.tau0_ms`` of the calibration,
one ``slo.cell`` per (arm, seed, rate) with every request in it. Scores are derived from those and written behind them,
so a file can be scored again without a server, and a run that was killed repeats no finished cell.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loopkv.artifacts import Fingerprint
from loopkv.artifacts.storage import write_atomically
from loopkv.bench.arms import EngineArm
from loopkv.bench.prompts import Tokenizer, fill_prompts
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
from loopkv.record_kinds import RECORD_KINDS
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
STOCK_LABEL = "stock"
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
        ks, ttfts_s: bounds to score: TPOT in tau0, TTFT in seconds.
        tau0_ms: given instead of measured.
        server_arguments: further arguments of ``vllm serve``, the same for every arm.
        environment: variables of server and client.
        ignore_eos: every request generates all its output tokens.
        climb_past_failure: run every rung, also above one at which all bounds fail.
        find_k: run only the rungs that find the capacity at this many tau0 and the first of ``ttfts_s``, by bisection.
        together: start the servers of all arms at once, which must fit the GPU; only one has traffic at a time.
        max_seconds: start no cell that would probably end later than this.
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
        if len(self.requests) < 3:
            raise LoopKVError("bench slo: workload", got=f"{len(self.requests)} requests", wanted="at least 3")

    def rates_of(self, arm: EngineArm) -> tuple[float, ...]:
        """Rungs of one arm, slowest first."""
        return tuple(sorted(set(self.arm_rates.get(arm.label, self.rates_per_s))))

    @property
    def workload(self) -> str:
        """Short identity of the workload."""
        return workload_sha256(self.requests)[:12]


@dataclass(frozen=True, slots=True)
class SloResult:
    """What a run ended with: all Records of the file, cells measured now, and cells left for another run."""

    records: tuple[Record, ...]
    measured_cells: int
    cells_left: int


@dataclass(frozen=True, slots=True)
class _Cell:
    arm: EngineArm
    seed: int
    rate: float


class _Run:
    def __init__(self, settings: SloSettings, say: Say) -> None:
        self.settings, self.say = settings, say
        self.started = time.monotonic()
        self.plans = {arm.label: arm.load_plan(settings.identity) for arm in settings.arms}
        self.records = [r for r in _existing(settings.output) if r.what not in SCORE_KINDS]
        if settings.output.exists():  # drops a torn last line and the scores, which are derived again
            _rewrite(settings.output, self.records)
        self.base = {
            "workload": settings.workload,
            "server": " ".join(settings.server_arguments),
        }
        self.measured = 0
        self.client_start_s = 0.0

    # -- records -------------------------------------------------------------------------------------------------------

    def keep(self, record: Record) -> None:
        append_records(self.settings.output, [record])
        self.records.append(record)

    def make(self, what: str, value: float | None, settings: Mapping[str, object], **fields: object) -> Record:
        unit = RECORD_KINDS[what].unit
        merged = {**self.base, **settings}
        return make_record(what, value, unit, settings=merged, model=self.settings.identity.name, **fields)

    def mine(self, record: Record) -> bool:
        """Whether a record belongs to this workload, model and server."""
        same = all(record.settings.get(key) == value for key, value in self.base.items())
        return same and record.model == self.settings.identity.name

    def cell_record(self, cell: _Cell) -> Record | None:
        for record in self.records:
            if record.what != "slo.cell" or record.seed != cell.seed or not self.mine(record):
                continue
            s = record.settings
            if s.get("arm") == cell.arm.label and s.get("spec") == cell.arm.spec and s.get("rate_per_s") == cell.rate:
                plan = self.plans[cell.arm.label]
                if record.plan_sha256 == (None if plan is None else plan.sha256):
                    return record
        return None

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
        found = {
            str(r.settings["tau0_rule"]): float(r.value)
            for r in self.records
            if r.what == "slo.tau0_ms" and r.value is not None and self.mine(r)
        }
        return found if {OWN_RULE, SHORT_RULE} <= set(found) else {}

    def measure_tau0(self, arm: EngineArm, url: str | None) -> dict[str, float]:
        """Measure tau0 on vLLM's own cache, at ``url`` or on a server of its own."""
        found: dict[str, float] = {}
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
            settings = {"arm": arm.label, "tau0_rule": rule, "context_tokens": context}
            line = {"start_ms": start, "slope_ms_per_1k": slope * 1e3}
            self.keep(self.make("slo.tau0_ms", value, {**settings, **line}))
            found[rule] = value
            self.say(f"tau0 ({rule} rule, {context:,.0f} tokens): {value:.2f} ms")
        return found

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

    def all(self) -> tuple[dict[str, float], int]:
        """Measure what is missing of tau0 and of every arm; returns tau0 and the cells left for want of time."""
        tau0 = self.known_tau0()
        stock = next((a for a in self.settings.arms if a.stock and a.kv_cache_dtype == "auto"), None)
        if self.settings.together:
            return self.all_together(tau0, stock)
        if not tau0 and stock is None:
            tau0 = self.measure_tau0(EngineArm(STOCK_LABEL, "stock", None), None)
        ordered = sorted(self.settings.arms, key=lambda arm: arm is not stock)  # tau0 comes with the stock arm's server
        left = 0
        for arm in ordered:
            cells = self.missing(arm, tau0)
            if tau0 and not cells:
                continue
            if self.no_time_for(cells, tau0):
                left += len(cells)
                continue
            with self.server(arm) as url:
                tau0 = tau0 or self.measure_tau0(arm, url)
                left += self.ladders({arm: url}, tau0)
        return tau0, left

    def all_together(self, tau0: dict[str, float], stock: EngineArm | None) -> tuple[dict[str, float], int]:
        """As ``all``, with every server up from the start: the rungs of the arms take turns."""
        cells = {arm: self.missing(arm, tau0) for arm in self.settings.arms}
        arms = [arm for arm, every in cells.items() if every and not self.no_time_for(every, tau0)]
        left = sum(len(every) for arm, every in cells.items() if arm not in arms)
        calibrated = None if tau0 else stock or EngineArm(STOCK_LABEL, "stock", None)
        started = arms if calibrated is None or calibrated in arms else [calibrated, *arms]
        with contextlib.ExitStack() as stack:
            answers = {arm: stack.enter_context(self.starting(arm)) for arm in started}
            urls = {arm: self.ready(answer) for arm, answer in answers.items()}
            if calibrated is not None:
                tau0 = self.measure_tau0(calibrated, urls[calibrated])
            return tau0, left + self.ladders({arm: urls[arm] for arm in arms}, tau0)

    @contextlib.contextmanager
    def server(self, arm: EngineArm) -> Iterator[str]:
        """A server of one arm, warm."""
        with self.starting(arm) as answer:
            yield self.ready(answer)

    def starting(self, arm: EngineArm) -> contextlib.AbstractContextManager[Callable[[], str]]:
        """A server of one arm on its way up."""
        log = self.settings.work / f"server-{_file_name(arm.label)}.log"
        return starting_server(self.command(arm), log, self.environment())

    def ready(self, answer: Callable[[], str]) -> str:
        """Wait for a server, and warm it."""
        know_hardware()
        url = answer()
        self.warm(url)
        return url

    def loosest(self, tau0: Mapping[str, float]) -> list[Bounds]:
        """The widest bounds that are scored, under each tau0."""
        return [Bounds(max(self.settings.ttfts_s), max(self.settings.ks), ms / 1e3) for ms in tau0.values()]

    def missing(self, arm: EngineArm, tau0: Mapping[str, float]) -> list[_Cell]:
        """Cells of one arm still to be measured, slowest rate of each seed first; of a bisection only the next."""
        if self.settings.find_k is not None and tau0:
            found = (self.next_rate(arm, seed, min(tau0.values())) for seed in self.settings.seeds)
            return [_Cell(arm, s, r) for s, r in zip(self.settings.seeds, found, strict=True) if r is not None]
        cells = []
        for seed in self.settings.seeds:
            if not self.passed_top(arm, seed, self.loosest(tau0)):
                every = (_Cell(arm, seed, rate) for rate in self.settings.rates_of(arm))
                cells += [cell for cell in every if self.cell_record(cell) is None]
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

    def ladders(self, urls: Mapping[EngineArm, str], tau0: Mapping[str, float]) -> int:
        """Run the missing cells of some arms, one of each in turn; returns how many are left for want of time."""
        left: set[_Cell] = set()
        ran = True
        while ran:
            ran = False
            for arm, url in urls.items():
                cell = next((cell for cell in self.missing(arm, tau0) if cell not in left), None)
                if cell is None:
                    continue
                ran = True
                if self.out_of_time(cell.rate):
                    left.add(cell)
                else:
                    self.run_cell(url, cell)
        return len(left)

    def passed_top(self, arm: EngineArm, seed: int, bounds: Sequence[Bounds]) -> bool:
        """Whether a measured rung fails every bound: no higher rung can change a capacity."""
        if self.settings.climb_past_failure or not bounds:
            return False
        return any(
            all(score(times, one).attainment < ATTAINMENT_RULE for one in bounds)
            for times in self.ladder_times(arm, seed).values()
        )

    def ladder_times(self, arm: EngineArm, seed: int) -> dict[float, tuple[RequestTimes, ...]]:
        """Measured rungs of one arm and seed, by rate."""
        found = {}
        for rate in self.settings.rates_of(arm):
            record = self.cell_record(_Cell(arm, seed, rate))
            if record is not None:
                found[rate] = times_from_json(record.settings["requests"])
        return found

    def no_time_for(self, cells: Sequence[_Cell], tau0: Mapping[str, float]) -> bool:
        """Whether no server need start: tau0 is known and not even the fastest rung would end in time."""
        return bool(tau0) and self.out_of_time(max(cell.rate for cell in cells))

    def out_of_time(self, rate: float) -> bool:
        limit = self.settings.max_seconds
        if limit is None:
            return False
        needed = self.client_start_s + len(self.settings.requests) / rate + self.tail_s()
        return time.monotonic() - self.started + needed > limit

    def tail_s(self) -> float:
        """Seconds from the last arrival to the last token: the longest seen of this workload, else the longest request
        at one and a half times the shortest tau0 known.
        """
        seen = []
        for record in self.records:
            if record.what == "slo.cell" and self.mine(record):
                times = times_from_json(record.settings["requests"])
                seen.append(float(record.settings["duration_s"]) - max(one.arrival_s for one in times))
        if seen:
            return max(seen)
        step_s = min(self.known_tau0().values(), default=0.0) / 1e3
        return max(request.output_tokens for request in self.settings.requests) * TAIL_TAU0 * step_s

    def run_cell(self, url: str, cell: _Cell) -> None:
        settings = self.settings
        requests = fill_prompts(settings.requests, settings.tokenizer, seed=cell.seed)
        reset_prefix_cache(url)
        before = preemptions(url)
        done = self.client(
            url,
            requests,
            settings.work / f"{_file_name(cell.arm.label)}-{cell.seed}-{cell.rate:g}",
            str(settings.model),
            rate_per_s=cell.rate,
            seed=cell.seed,
            ignore_eos=settings.ignore_eos,
            environment=self.environment(),
        )
        plan = self.plans[cell.arm.label]
        failed = sum(r.failed for r in done.requests)
        details: dict[str, object] = {
            "arm": cell.arm.label,
            "spec": cell.arm.spec,
            "rate_per_s": cell.rate,
            "preemptions": preemptions(url) - before,
            "duration_s": done.duration_s,
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
            f"{done.duration_s:.0f} s, {failed} failed, {details['preemptions']} preemptions"
        )

    # -- scores --------------------------------------------------------------------------------------------------------

    def scores(self, tau0: Mapping[str, float]) -> list[Record]:
        """Attainment of every rung, capacities, and ratios of every arm to each arm before it."""
        records = []
        for (rule, tau0_ms), k, ttft, seed in itertools.product(
            tau0.items(), self.settings.ks, self.settings.ttfts_s, self.settings.seeds
        ):
            bounds = Bounds(ttft, k, tau0_ms / 1e3)
            place = {"tau0_rule": rule, "tau0_ms": tau0_ms, "k": k, "ttft_s": ttft}
            met: dict[str, dict[float, tuple[bool, ...]]] = {}
            measured: dict[str, Record] = {}
            for arm in self.settings.arms:
                rungs = {rate: score(times, bounds) for rate, times in self.ladder_times(arm, seed).items()}
                if not rungs:
                    continue
                records += self.arm_scores(arm, seed, rungs, place)
                met[arm.label] = {rate: one.met for rate, one in rungs.items()}
                cell = self.cell_record(_Cell(arm, seed, max(rungs)))
                assert cell is not None
                measured[arm.label] = cell
            for base, other in itertools.combinations(met, 2):
                ratio = capacity_ratio(met[other], met[base], seed=seed)
                settings = {
                    **place,
                    "arm": other,
                    "baseline": base,
                    "ci95": list(ratio.ci95),
                    "share_at_least": ratio.share_at_least,
                    "draws": ratio.draws,
                }
                made = self.make("slo.capacity_ratio", ratio.ratio, settings, seed=seed)
                records.append(_measured_on(made, measured[other]))
        return records

    def arm_scores(
        self, arm: EngineArm, seed: int, rungs: Mapping[float, Score], place: Mapping[str, object]
    ) -> list[Record]:
        plan = self.plans[arm.label]
        shared = {"seed": seed, "plan_sha256": None if plan is None else plan.sha256}
        records = []
        for rate, one in rungs.items():
            cell = self.cell_record(_Cell(arm, seed, rate))
            assert cell is not None
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
        found = capacity({rate: one.attainment for rate, one in rungs.items()})
        settings = {
            **place,
            "arm": arm.label,
            "lowest_rate": found.lowest_rate,
            "highest_rate": found.highest_rate,
            "no_rung_failed": found.no_rung_failed,
        }
        last = self.cell_record(_Cell(arm, seed, found.highest_rate))
        assert last is not None
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


def run_slo(settings: SloSettings, say: Say) -> SloResult:
    """Calibrate, run every missing cell of every arm, and score the file.

    Raises:
        LoopKVError: a bad plan or setting (before a server starts), a server or client that fails.
    """
    run = _Run(settings, say)
    settings.work.mkdir(parents=True, exist_ok=True)
    tau0, left = run.all()
    scores = run.scores(tau0)
    append_records(settings.output, scores)
    return SloResult((*run.records, *scores), run.measured, left)


def know_hardware() -> None:
    """Import torch, which is how a Record knows the GPU; nothing else needs it in this process."""
    importlib.import_module("torch")


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


def _existing(path: Path) -> list[Record]:
    return list(read_records([path])) if path.exists() else []


def _rewrite(path: Path, records: Sequence[Record]) -> None:
    write_atomically(path, "".join(record.model_dump_json() + "\n" for record in records).encode())


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in label)
