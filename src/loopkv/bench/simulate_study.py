"""``loopkv simulate``: ladders of several arms through the simulator, as results and as Records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loopkv.bench.cache_arms import CacheArm
from loopkv.bench.simulate import EngineModel, Replay, replay
from loopkv.bench.slo import ATTAINMENT_RULE, Bounds, LadderCapacity, Score, capacity, score
from loopkv.bench.workload import Request, with_arrivals, workload_sha256
from loopkv.errors import LoopKVError
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import Record, make_record

GRID_STEP = 1.1
MAX_RUNGS = 80
STEADY_STAYS = 10
"""Arrivals must last this many times the mean stay of a request: below, the start and the end of the trace, when the
engine is not full, are a large part of what is scored."""


@dataclass(frozen=True, slots=True)
class ArmLadder:
    """One arm and seed: replays and scores by rate, capacities by bounds (in the order of ``bounds``)."""

    arm: CacheArm
    engine: EngineModel
    seed: int | None
    bounds: tuple[Bounds, ...]
    replays: Mapping[float, Replay]
    scores: Mapping[float, tuple[Score, ...]]

    def capacities(self) -> tuple[LadderCapacity, ...]:
        """Capacity under each of ``bounds``."""
        return tuple(
            capacity({rate: scores[i].attainment for rate, scores in self.scores.items()})
            for i in range(len(self.bounds))
        )


@dataclass(frozen=True, slots=True)
class ShortTrace:
    """A capacity found on too few requests for a steady state.

    Args:
        rate_per_s: where.
        window_s: from the first arrival to the last.
        stay_s: mean time from a request's arrival to its last token.
        requests: there are.
        all_at_once: every request was running at one time.
        wanted: requests that would do, by that rate and stay.
    """

    rate_per_s: float
    window_s: float
    stay_s: float
    requests: int
    all_at_once: bool
    wanted: int

    def describe(self) -> str:
        """One sentence."""
        at_once = f", all {self.requests:,} requests running at once" if self.all_at_once else ""
        return (
            f"at {self.rate_per_s:.3g} requests/s arrivals last {_seconds(self.window_s)} and a request stays "
            f"{_seconds(self.stay_s)} on average{at_once}: no steady state, and a capacity that may be too high; "
            f"about {self.wanted:,} requests would do, the workload has {self.requests:,}"
        )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def short_trace(ladder: ArmLadder) -> ShortTrace | None:
    """What is wrong with the highest capacity of a ladder: arrivals of less than ``STEADY_STAYS`` mean stays, or all
    requests running at once. None where nothing is, or no rate met a bound."""
    met = [found.rate_per_s for found in ladder.capacities() if found.rate_per_s is not None]
    if not met:
        return None
    rate = max(met)
    done = ladder.replays[rate]
    stays = [
        one.ttft_s + one.tpot_s * max(0, one.output_tokens - 1)
        for one in done.requests
        if one.ttft_s is not None and one.tpot_s is not None
    ]
    arrivals = [one.arrival_s for one in done.requests]
    count, stay, window = len(arrivals), math.fsum(stays) / len(stays), max(arrivals) - min(arrivals)
    at_once = done.peak_running == count
    if window >= STEADY_STAYS * stay and not at_once:
        return None
    # The window of n arrivals is about (n - 1) / rate. Where all run at once, that rate is none that could be kept up:
    # the rate at which requests ended is.
    kept_up = min(rate, count / done.duration_s) if at_once else rate
    wanted = 1 + math.ceil(STEADY_STAYS * stay * kept_up)
    return ShortTrace(rate, window, stay, count, at_once, max(wanted, 2 * count if at_once else count + 1))


@dataclass(frozen=True, slots=True)
class SimulationStudy:
    """All ladders of a simulation, with what they ran on (for print and Records)."""

    workload: str
    gpu: str
    constants: str
    ladders: tuple[ArmLadder, ...]

    def warnings(self) -> list[str]:
        """One sentence per arm whose capacity rests on too short a trace: of several seeds, the shortest."""
        worst: dict[str, ShortTrace] = {}
        for ladder in self.ladders:
            found = short_trace(ladder)
            if found is not None and (ladder.arm.name not in worst or found.wanted > worst[ladder.arm.name].wanted):
                worst[ladder.arm.name] = found
        return [f"{arm}: {found.describe()}" for arm, found in worst.items()]


def simulate_study(
    requests: Sequence[Request],
    arms: Sequence[tuple[CacheArm, EngineModel]],
    bounds: Sequence[Bounds],
    *,
    rates_per_s: Sequence[float] | None = None,
    seeds: Sequence[int] = (101,),
    gpu: str,
    constants: str,
) -> SimulationStudy:
    """Replay a workload under every arm and score it.

    Args:
        requests: the workload. With arrival times of its own and no rates it is replayed as it is.
        arms: caches, each with the engine it runs in.
        bounds: objectives to score.
        rates_per_s: rungs; None climbs a grid of 10% steps, the same for every arm, from the last rung that meets every
            bound to the first that meets none, or to the first that holds all requests at once.
        seeds: of the arrivals.
        gpu, constants: for Records: what is simulated, and where its constants come from.
    """
    if not arms or not bounds:
        raise LoopKVError("simulator", got=f"{len(arms)} arms, {len(bounds)} bounds", wanted="at least one of each")
    timed = rates_per_s is None and all(request.arrival_s is not None for request in requests)
    ladders = []
    for arm, engine in arms:
        for seed in seeds if not timed else (None,):
            if timed:
                done = replay(requests, arm, engine)
                rates = {own_rate(requests): done}
            elif rates_per_s is None:
                rates = _climb(requests, arm, engine, bounds, int(seed or 0))
            else:
                rates = {r: replay(with_arrivals(requests, r, int(seed or 0)), arm, engine) for r in rates_per_s}
            scores = {r: tuple(score(done.requests, b) for b in bounds) for r, done in sorted(rates.items())}
            ladders.append(ArmLadder(arm, engine, seed, tuple(bounds), rates, scores))
    return SimulationStudy(workload_sha256(requests)[:12], gpu, constants, tuple(ladders))


def own_rate(requests: Sequence[Request]) -> float:
    """Mean arrival rate of a trace that has its own arrival times."""
    last = max(request.arrival_s or 0.0 for request in requests)
    return len(requests) / last if last > 0 else float(len(requests))


def _climb(
    requests: Sequence[Request], arm: CacheArm, engine: EngineModel, bounds: Sequence[Bounds], seed: int
) -> dict[float, Replay]:
    """Contiguous rungs of the grid around the arm's capacities, found from an estimate of its throughput."""
    mean_output = sum(r.output_tokens for r in requests) / len(requests)
    mean_tokens = min(
        arm.max_tokens, round(sum(r.prompt_tokens + r.output_tokens / 2 for r in requests) / len(requests))
    )
    resident = max(1, engine.pool_blocks(arm) // max(1, int(arm.held_blocks[mean_tokens])))
    resident = min(resident, engine.max_running)
    throughput = engine.step_time.tokens_per_s(resident, float(arm.read_bytes[mean_tokens]))
    place = round(math.log(throughput / mean_output / 2, GRID_STEP))
    done: dict[float, Replay] = {}

    def attained(index: int) -> list[float]:
        rate = GRID_STEP**index
        if rate not in done:
            done[rate] = replay(with_arrivals(requests, rate, seed), arm, engine)
        return [score(done[rate].requests, one).attainment for one in bounds]

    low = high = place
    while min(attained(low)) < ATTAINMENT_RULE and len(done) < MAX_RUNGS:
        low -= 1
    # Once every request is resident together, a faster trace loads the engine no more: the workload is too small.
    while max(attained(high)) >= ATTAINMENT_RULE and len(done) < MAX_RUNGS:
        if done[GRID_STEP**high].peak_running == len(requests):
            break
        high += 1
    return done


def study_records(study: SimulationStudy, *, tau0_rule: str, model: str | None = None) -> list[Record]:
    """``simulate.attainment`` and ``simulate.capacity`` of every arm, seed and bound."""
    records = []
    for ladder in study.ladders:
        shared: dict[str, object] = {
            "arm": ladder.arm.name,
            "gpu": study.gpu,
            "constants": study.constants,
            "pool_bytes": ladder.engine.pool_bytes,
            "workload": study.workload,
            "tau0_rule": tau0_rule,
        }
        if ladder.engine.watermark:
            shared["watermark"] = ladder.engine.watermark
        provenance = {"plan_sha256": ladder.arm.plan_sha256, "model": model, "seed": ladder.seed}
        found = ladder.capacities()
        for i, one in enumerate(ladder.bounds):
            place = {**shared, "tau0_ms": one.tau0_s * 1e3, "k": one.k, "ttft_s": one.ttft_s}
            for rate, scores in ladder.scores.items():
                result = scores[i]
                settings = {
                    **place,
                    "rate_per_s": rate,
                    "scored": result.scored,
                    "missed_ttft": result.missed_ttft,
                    "missed_tpot": result.missed_tpot,
                    "missed_both": result.missed_both,
                    "failed": result.failed,
                    "preemptions": ladder.replays[rate].preemptions,
                }
                records.append(_record("simulate.attainment", result.attainment, settings, provenance, result.met))
            limits = {
                "lowest_rate": found[i].lowest_rate,
                "highest_rate": found[i].highest_rate,
                "no_rung_failed": found[i].no_rung_failed,
            }
            records.append(_record("simulate.capacity", found[i].rate_per_s, {**place, **limits}, provenance, ()))
    return records


def _record(
    what: str,
    value: float | None,
    settings: Mapping[str, object],
    provenance: Mapping[str, object],
    samples: Sequence[bool],
) -> Record:
    flags = tuple(float(flag) for flag in samples)
    return make_record(what, value, RECORD_KINDS[what].unit, settings=dict(settings), samples=flags, **provenance)
