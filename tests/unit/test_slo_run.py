"""The SLO run without a server: what is measured once, scored again, and never dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loopkv.artifacts import Fingerprint
from loopkv.bench import slo_run
from loopkv.bench.arms import parse_arms
from loopkv.bench.dummy_model import dummy_shape, write_dummy_model
from loopkv.bench.serving_client import (
    ClientRun,
    client_command,
    parse_preemptions,
    parse_result,
    times_from_json,
    times_to_json,
)
from loopkv.bench.slo import RequestTimes
from loopkv.bench.slo_run import SloSettings, fit_line, next_rung, run_slo
from loopkv.bench.workload import Request
from loopkv.errors import LoopKVError
from loopkv.geometry import Geometry
from loopkv.record_kinds import RECORD_KINDS
from loopkv.records import read_records

TINY = Geometry(architecture="ouro", loops=3, layers=2, query_heads=2, kv_heads=2, head_dim=32)
"""Of ``dummy_shape("tiny")``."""


class Letters:
    """One token per letter."""

    def count(self, text: str) -> int:
        return len(text)

    def cut(self, text: str, tokens: int) -> str:
        return text[:tokens]


class Bench:
    """Stands where server and client stand; answers as a server that saturates at ``capacity`` requests/s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capacity = 1.0
        self.started: list[str] = []
        self.cells: list[tuple[float, int]] = []
        self.lost: dict[int, str] = {}
        self.fail_at: float | None = None
        self.refuse: str | None = None
        self.running_now = 0
        self.tail_s = 0.0
        self.start_s: dict[str, float] = {}
        self.slow_cores: str | None = None
        monkeypatch.setattr(slo_run, "slow_cores", lambda: self.slow_cores)
        monkeypatch.setattr(slo_run, "starting_server", self.running)
        monkeypatch.setattr(slo_run, "run_client", self.client)
        monkeypatch.setattr(slo_run, "preemptions", lambda url: 7 * len(self.cells))
        monkeypatch.setattr(slo_run, "reset_prefix_cache", lambda url: None)
        monkeypatch.setattr(slo_run, "complete", lambda url, prompt, tokens: None)

    @contextlib.contextmanager
    def running(self, command: Sequence[str], log: Path, environment: Any = None) -> Iterator[Callable[[], str]]:
        self.started.append(" ".join(command))
        own = self.started[-1]

        def answer() -> str:
            time.sleep(next((seconds for part, seconds in self.start_s.items() if part in own), 0.0))
            if self.refuse is not None and self.refuse in own:
                raise LoopKVError("vllm serve", got="refused")
            return "http://server"

        self.running_now += 1
        try:
            yield answer
        finally:
            self.running_now -= 1

    def client(
        self, url: str, requests: Sequence[Request], *_: Any, rate_per_s: float, seed: int, **__: Any
    ) -> ClientRun:
        if math.isinf(rate_per_s):  # calibration: 2 ms + 1 ms per 100 tokens of context
            return ClientRun(
                tuple(
                    RequestTimes(
                        0.0, 0.1, 1e-3 * (2 + (r.prompt_tokens + (r.output_tokens + 1) / 2) / 100), r.output_tokens
                    )
                    for r in requests
                ),
                1.0,
            )
        if self.fail_at == rate_per_s:
            raise LoopKVError("benchmark client", got="killed")
        self.cells.append((rate_per_s, seed))
        late = 30.0 if rate_per_s > self.capacity else 1.0
        return ClientRun(
            tuple(
                RequestTimes(i / rate_per_s, None, None, 0, self.lost[i])
                if i in self.lost
                else RequestTimes(i / rate_per_s, late, 0.001, r.output_tokens)
                for i, r in enumerate(requests)
            ),
            len(requests) / rate_per_s + self.tail_s,
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def settings(tmp_path: Path, arms: Sequence[str] = ("stock", "kivi4"), **changes: Any) -> SloSettings:
    fields: dict[str, Any] = {
        "model": write_dummy_model(tmp_path / "model", dummy_shape("tiny")),
        "identity": Fingerprint(name="tiny", geometry=TINY),
        "requests": tuple(Request(20, 80) for _ in range(11)),
        "tokenizer": Letters(),
        "arms": parse_arms(arms),
        "rates_per_s": (0.5, 1.0, 2.0, 4.0),
        "seeds": (101,),
        "output": tmp_path / "slo.jsonl",
        "work": tmp_path / "work",
        **changes,
    }
    return SloSettings(**fields)


def quiet(line: str) -> None:
    pass


def test_one_bound_changes_at_a_time(tmp_path: Path) -> None:
    """The k that the other TTFT bounds go with: that of a bisection, 3, or the first."""
    base = settings(tmp_path)
    for ks, find, main in (((2.0, 3.0, 5.0), None, 3.0), ((2.0, 5.0), None, 2.0), ((2.0, 3.0, 5.0), 5.0, 5.0)):
        changed = dataclasses.replace(base, ks=ks, find_k=find, ttfts_s=(10.0, 5.0, 10.0))
        assert changed.bounds == (*((k, 10.0) for k in ks), (main, 5.0))


def test_ladder_calibration_and_scores(bench: Bench, tmp_path: Path) -> None:
    result = run_slo(settings(tmp_path), quiet)
    by_kind: dict[str, list[Any]] = {}
    for record in result.records:
        by_kind.setdefault(record.what, []).append(record)
        assert not RECORD_KINDS[record.what].missing(record) and record.unit == RECORD_KINDS[record.what].unit
    # tau0 = 2 ms + context / 100: decode contexts of prompt 20 and output 80 have mean 20 + 40.5 = 60.5
    own = next(r for r in by_kind["slo.tau0_ms"] if r.settings["tau0_rule"] == "own")
    assert own.value == pytest.approx(2 + 0.605)
    # Both arms climb to 2.0, the first rung that fails every bound; one server each, tau0 measured on the first.
    assert bench.cells == [(r, 101) for r in (0.5, 1.0, 2.0)] * 2
    assert len(bench.started) == 2 and "--additional-config" not in bench.started[0] and "kivi4" in bench.started[1]
    assert {r.value for r in by_kind["slo.capacity"]} == {1.0}
    assert {r.value for r in by_kind["slo.capacity_ratio"]} == {1.0}
    # 3 rungs x 2 arms x 2 rules x (3 k at 10 s, 2 other TTFT at 3 tau0); 11 requests, 9 arrive in the middle 80%
    assert len(by_kind["slo.attainment"]) == 3 * 2 * 2 * (3 + 2)
    scored = {(r.settings["k"], r.settings["ttft_s"]) for r in by_kind["slo.attainment"]}
    assert scored == {(2.0, 10.0), (3.0, 10.0), (5.0, 10.0), (3.0, 5.0), (3.0, 20.0)}
    assert {r.settings["scored"] for r in by_kind["slo.attainment"]} == {9}
    assert {r.settings["preemptions"] for r in by_kind["slo.cell"]} == {7}
    assert result.measured_cells == 6 and result.cells_left == 0


def test_a_second_run_measures_nothing_and_scores_the_same(bench: Bench, tmp_path: Path) -> None:
    first = run_slo(settings(tmp_path), quiet)
    cells, started = len(bench.cells), len(bench.started)
    second = run_slo(settings(tmp_path), quiet)
    assert (len(bench.cells), len(bench.started)) == (cells, started) and second.measured_cells == 0

    def numbers(records: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(r.what, r.value, json.dumps(r.settings, sort_keys=True), r.seed) for r in records]

    assert numbers(second.records) == numbers(first.records)
    # Scored again on another machine, every score says where its cells were measured.
    cells = [r for r in second.records if r.what == "slo.cell"]
    lines = [r.model_copy(update={"hardware": "NVIDIA H200"}).model_dump_json() for r in second.records]
    (tmp_path / "slo.jsonl").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    moved = run_slo(settings(tmp_path, max_seconds=0.0), said.append)
    assert (
        said[0].startswith("scoring what NVIDIA H200, vLLM ")
        and f"this machine is {first.records[0].hardware}" in (said[0])
    )
    assert cells and {r.hardware for r in moved.records} == {"NVIDIA H200"}
    assert len(bench.started) == started
    run_slo(settings(tmp_path, max_seconds=0.0), quiet)
    assert numbers(list(read_records([tmp_path / "slo.jsonl"]))) == numbers(first.records)
    # Measured here, the cells and the tau0 of another machine are another's.
    assert run_slo(settings(tmp_path), said.append).measured_cells == 6 and len(bench.started) == started + 2
    assert any(line.startswith("6 cells of NVIDIA H200, vLLM ") for line in said)
    assert {r.hardware for r in run_slo(settings(tmp_path), quiet).scores} != {"NVIDIA H200"}


def test_a_killed_run_goes_on_where_it_was(bench: Bench, tmp_path: Path) -> None:
    bench.fail_at = 1.0
    broken = run_slo(settings(tmp_path), quiet)
    assert list(broken.failures) == ["stock", "kivi4"] and broken.cells_left == 6  # 1.0, 2.0 and 4.0 of each
    for label, error in broken.failures.items():
        assert "killed" in str(error) and f"arm {label}" in str(error) and f"server-{label}.log" in str(error)
    with (tmp_path / "slo.jsonl").open("a") as file:
        file.write('{"what": "slo.cell", "val')  # torn by the kill
    bench.fail_at = None
    run_slo(settings(tmp_path), quiet)
    assert bench.cells == [(0.5, 101), (0.5, 101), (1.0, 101), (2.0, 101), (1.0, 101), (2.0, 101)]


@pytest.mark.parametrize("blocked", ["calibration", "0.5", "1.0", "2.0"])
def test_a_run_killed_with_traffic_on_its_way_goes_on(bench: Bench, tmp_path: Path, blocked: str) -> None:
    """SIGKILL while the client of the calibration or of a rung runs: every cell that had ended is there, once."""
    reached = tmp_path / "reached"

    def child() -> None:
        answer = bench.client

        def client(*arguments: Any, rate_per_s: float, **options: Any) -> ClientRun:
            if blocked == ("calibration" if math.isinf(rate_per_s) else str(rate_per_s)):
                reached.touch()
                time.sleep(600)
            return answer(*arguments, rate_per_s=rate_per_s, **options)

        slo_run.run_client = client
        run_slo(settings(tmp_path, ("stock",)), quiet)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    while not reached.exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ended = (
        [0.5, 1.0, 2.0][: ["calibration", "0.5", "1.0", "2.0"].index(blocked) - 1] if blocked != "calibration" else []
    )
    assert [rate for rate, _ in cells_of(tmp_path)] == ended
    result = run_slo(settings(tmp_path, ("stock",)), quiet)
    assert [rate for rate, _ in bench.cells] == [0.5, 1.0, 2.0][len(ended) :]  # counted in this process alone
    assert result.cells_left == 0 and cells_of(tmp_path) == [(0.5, 101), (1.0, 101), (2.0, 101)]


def test_a_file_torn_anywhere_loses_no_cell_before_the_tear(bench: Bench, tmp_path: Path) -> None:
    """A kill in the middle of a write: at any length of the file, what was whole is kept and only the rest repeated."""
    whole = run_slo(settings(tmp_path, ("stock",)), quiet)
    path = tmp_path / "slo.jsonl"
    text = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    scores = [(r.what, r.value, r.seed) for r in whole.records]
    for end in ends[:9]:  # calibration, tau0, the three cells
        for tear in (end - 1, end, end + 1, end + 40):
            path.write_bytes(text[:tear])
            known = sum(b'"slo.cell"' in line for line in text[:tear].splitlines() if is_json(line))
            bench.cells.clear()
            again = run_slo(settings(tmp_path, ("stock",)), quiet)
            assert len(bench.cells) == 3 - known, tear
            assert [r.value for r in again.records if r.what == "slo.capacity"] == [
                value for what, value, _ in scores if what == "slo.capacity"
            ]
            assert cells_of(tmp_path) == [(0.5, 101), (1.0, 101), (2.0, 101)]


def is_json(line: bytes) -> bool:
    """Whether a line is whole; its newline may be missing."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def cells_of(folder: Path) -> list[tuple[float, int | None]]:
    """Rate and seed of every cell in the Records file, in its order."""
    path = folder / "slo.jsonl"
    records = read_records([path]) if path.exists() else []
    return [(float(r.settings["rate_per_s"]), r.seed) for r in records if r.what == "slo.cell"]


def test_failed_requests_are_counted(bench: Bench, tmp_path: Path) -> None:
    bench.lost = {5: "connection reset", 6: ""}
    result = run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    attained = [r for r in result.records if r.what == "slo.attainment"]
    assert {(r.settings["scored"], r.settings["failed"]) for r in attained} == {(9, 2)}
    assert {r.value for r in attained} == {7 / 9}


def test_another_workload_plan_or_server_is_measured_anew(bench: Bench, tmp_path: Path) -> None:
    run_slo(settings(tmp_path, rates_per_s=(0.5,)), quiet)
    before = len(bench.cells)
    run_slo(settings(tmp_path, rates_per_s=(0.5,), requests=tuple(Request(20, 81) for _ in range(11))), quiet)
    assert len(bench.cells) == before + 2
    run_slo(settings(tmp_path, rates_per_s=(0.5,), server_arguments=("--enforce-eager",)), quiet)
    assert len(bench.cells) == before + 4
    run_slo(settings(tmp_path, ("stock", "kivi4=kivi2"), rates_per_s=(0.5,)), quiet)
    assert len(bench.cells) == before + 5  # the stock cell is known, the plan behind the label is not


def test_the_time_budget_leaves_cells_for_another_run(bench: Bench, tmp_path: Path) -> None:
    # 11 requests at 0.5/s need 22 s: only rungs of 2/s and more fit into 10 s.
    some = run_slo(settings(tmp_path, max_seconds=10.0, climb_past_failure=True), quiet)
    assert [rate for rate, _ in bench.cells] == [2.0, 4.0, 2.0, 4.0] and some.cells_left == 4
    rest = run_slo(settings(tmp_path, climb_past_failure=True), quiet)
    assert rest.cells_left == 0
    assert sorted(set(bench.cells)) == [(rate, 101) for rate in (0.5, 1.0, 2.0, 4.0)]
    assert len(bench.cells) == 8


def test_the_time_budget_counts_what_follows_the_last_arrival(bench: Bench, tmp_path: Path) -> None:
    bench.tail_s = 7.0
    some = run_slo(
        settings(tmp_path, ("stock",), rates_per_s=(2.0, 4.0), max_seconds=10.0, climb_past_failure=True), quiet
    )
    # The first rung, 5.5 s and a tail guessed from tau0 (80 tokens at 1.5 tau0), took 7 s more than its arrivals:
    # 2.75 s and 7.5 s (one gap of 0.5 s is the client's) no longer fit.
    assert [rate for rate, _ in bench.cells] == [2.0] and some.cells_left == 1


def test_no_server_starts_that_would_be_up_too_late(bench: Bench, tmp_path: Path) -> None:
    run_slo(settings(tmp_path, ("stock",), rates_per_s=(4.0,)), quiet)
    path = tmp_path / "slo.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["what"] == "slo.cell":
            line["settings"]["server_start_s"] = 60.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # 11 requests at 2/s need 5.5 s: in time for a server that stands, too late for one that takes 60 s to start.
    rest = run_slo(settings(tmp_path, ("stock",), rates_per_s=(2.0, 4.0), max_seconds=30.0), quiet)
    assert len(bench.started) == 1 and rest.cells_left == 1
    rest = run_slo(settings(tmp_path, ("stock",), rates_per_s=(2.0, 4.0), max_seconds=90.0), quiet)
    assert len(bench.started) == 2 and rest.cells_left == 0


@pytest.mark.parametrize("together", [False, True])
def test_a_cell_keeps_how_long_its_own_server_took(bench: Bench, tmp_path: Path, together: bool) -> None:
    bench.start_s = {"kivi4": 0.6, "kivi2": 0.2}
    asked = settings(tmp_path, ("kivi4", "kivi2", "stock"), rates_per_s=(0.5,), tau0_ms=2.0, together=together)
    found = {
        r.settings["arm"]: r.settings["server_start_s"]
        for r in run_slo(asked, quiet).records
        if "arm" in r.settings and r.what == "slo.cell"
    }
    assert found["stock"] < 0.2 <= found["kivi2"] < 0.6 <= found["kivi4"]


def test_servers_that_run_together_take_turns(bench: Bench, tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        ("kivi4", "kivi2"),
        together=True,
        rates_per_s=(),
        arm_rates={
            "kivi4": (0.25, 0.5, 1.0, 2.0, 4.0),
            "kivi2": (0.5, 1.0),
        },
        find_k=3.0,
    )
    result = run_slo(found, quiet)
    assert len(bench.started) == 3  # and stock, for tau0
    # Bisections from the middle rung: kivi4 1.0 holds, 4.0 fails, 2.0 fails; kivi2 1.0 holds and is its highest.
    assert bench.cells == [(1.0, 101), (1.0, 101), (4.0, 101), (2.0, 101)]
    capacities = {(r.settings["arm"], r.value) for r in result.records if r.what == "slo.capacity"}
    assert capacities == {("kivi4", 1.0), ("kivi2", 1.0)} and result.cells_left == 0
    run_slo(found, quiet)
    assert len(bench.started) == 3 and len(bench.cells) == 4
    # More rungs, no time: scored as it is, and no server starts.
    more = dataclasses.replace(found, arm_rates={"kivi4": (1.0, 1.5, 2.0), "kivi2": (1.0, 2.0)}, max_seconds=0.0)
    assert run_slo(more, quiet).cells_left == 2 and len(bench.started) == 3


def test_an_arm_whose_server_fails_leaves_the_others_alone(bench: Bench, tmp_path: Path) -> None:
    bench.refuse = "kivi2"
    for together in (True, False):
        result = run_slo(settings(tmp_path, ("kivi2", "kivi4"), together=together, tau0_ms=2.0), quiet)
        assert bench.running_now == 0 and bench.cells == [(0.5, 101), (1.0, 101), (2.0, 101)]
        assert list(result.failures) == ["kivi2"] and "refused" in str(result.failures["kivi2"])
        assert result.cells_left == 4
        assert {(r.settings["arm"], r.value) for r in result.records if r.what == "slo.capacity"} == {("kivi4", 1.0)}
    bench.refuse = "serve"  # without tau0 there is nothing to go on with
    with pytest.raises(LoopKVError, match="arm stock: vllm serve, got refused"):
        run_slo(settings(tmp_path, ("stock", "kivi4")), quiet)


def test_a_server_that_dies_keeps_its_failed_requests(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client ends with failed requests and nothing answers afterwards: the cell counts, the arm ends there."""

    def counter(url: str) -> int:
        if bench.lost:
            raise LoopKVError("server metrics", got="connection refused")
        return 0

    answer = bench.client

    def client(*arguments: Any, rate_per_s: float, **options: Any) -> ClientRun:
        bench.lost = {5: "reset", 6: "refused"} if rate_per_s == 1.0 else {}
        return answer(*arguments, rate_per_s=rate_per_s, **options)

    monkeypatch.setattr(slo_run, "preemptions", counter)
    monkeypatch.setattr(slo_run, "run_client", client)

    @contextlib.contextmanager
    def starting(*arguments: Any) -> Iterator[Callable[[], str]]:
        bench.lost = {}  # a server that is new
        with bench.running(*arguments) as url:
            yield url

    monkeypatch.setattr(slo_run, "starting_server", starting)
    result = run_slo(settings(tmp_path), quiet)
    assert cells_of(tmp_path) == [(0.5, 101), (1.0, 101)] * 2 and list(result.failures) == ["stock", "kivi4"]
    failed = {
        r.settings["failed"] for r in result.scores if r.what == "slo.attainment" and r.settings["rate_per_s"] == 1
    }
    assert failed == {2}
    assert [r.settings["preemptions"] for r in result.records if r.what == "slo.cell"] == [0, None] * 2


def test_rungs_below_a_failing_one_are_measured(bench: Bench, tmp_path: Path) -> None:
    def capacities(result: Any) -> set[Any]:
        return {(r.value, r.settings["bound"]) for r in result.scores if r.what == "slo.capacity"}

    only = run_slo(settings(tmp_path, ("stock",), rates_per_s=(2.0,)), quiet)
    assert capacities(only) == {(None, "below")}
    more = run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.25, 0.5, 1.0, 2.0, 4.0)), quiet)
    assert [rate for rate, _ in bench.cells] == [2.0, 0.25, 0.5, 1.0] and capacities(more) == {(1.0, None)}


def test_rungs_left_for_want_of_time_are_measured_later(bench: Bench, tmp_path: Path) -> None:
    bench.capacity = 0.1
    rates = (0.01, 0.5, 1.0, 2.0, 4.0)  # 11 requests at 0.01/s need 1,100 s
    some = run_slo(settings(tmp_path, ("stock",), rates_per_s=rates, max_seconds=100.0), quiet)
    assert [rate for rate, _ in bench.cells] == [0.5] and some.cells_left == 1
    rest = run_slo(settings(tmp_path, ("stock",), rates_per_s=rates), quiet)
    assert [rate for rate, _ in bench.cells] == [0.5, 0.01] and rest.cells_left == 0
    assert {r.value for r in rest.scores if r.what == "slo.capacity"} == {0.01}


def test_a_capacity_stands_only_between_neighbouring_rungs(bench: Bench, tmp_path: Path) -> None:
    """A bisection at 3 tau0 brackets the capacity at 3 tau0; what the same rungs say of other bounds is a bound."""
    answer = bench.client

    def client(*arguments: Any, rate_per_s: float, **options: Any) -> ClientRun:
        done = answer(*arguments, rate_per_s=rate_per_s, **options)
        if math.isinf(rate_per_s):
            return done
        rows = tuple(  # 2 ms and 1 ms more per request/s: 2 tau0 up to 3/s, 3 tau0 up to 5.5/s, 5 tau0 up to 10.5/s
            dataclasses.replace(one, ttft_s=1.0, tpot_s=(2 + rate_per_s) / 1e3) for one in done.requests
        )
        return dataclasses.replace(done, requests=rows)

    slo_run.run_client = client  # type: ignore[assignment]  # undone with the fixture's own
    rates = tuple(float(rate) for rate in range(1, 15))
    found = settings(tmp_path, ("kivi4", "kivi2"), rates_per_s=rates, find_k=3.0, tau0_ms=2.5)
    result = run_slo(found, quiet)
    measured = sorted({rate for rate, _ in bench.cells})
    assert measured == [2.0, 4.0, 5.0, 6.0, 8.0]  # 8, 6 and 2, then 4 and 5: 6.0 fails and 5.0 holds
    at = {r.settings["k"]: (r.value, r.settings["bound"]) for r in result.scores if r.what == "slo.capacity"}
    assert at == {2.0: (2.0, "at_least"), 3.0: (5.0, None), 5.0: (8.0, "at_least")}
    ratios = {(r.settings["k"], r.value, "ci95" in r.settings) for r in result.scores if r.what == "slo.capacity_ratio"}
    assert ratios == {(2.0, None, False), (3.0, 1.0, True), (5.0, None, False)}
    with pytest.raises(LoopKVError, match="find k"):
        dataclasses.replace(found, find_k=4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_times_that_are_none_are_refused(bench: Bench, tmp_path: Path, bad: float) -> None:
    with pytest.raises(LoopKVError, match="tau0"):
        settings(tmp_path, tau0_ms=bad)
    run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    path = tmp_path / "slo.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = next(i for i, line in enumerate(lines) if line["what"] == "slo.cell")
    for change in ({"ttft_s": bad}, {"tpot_ms": bad}, {"arrival_s": bad}):
        broken = json.loads(json.dumps(lines))
        broken[number]["settings"]["requests"][3].update(change)
        path.write_text("".join(json.dumps(line) + "\n" for line in broken))
        with pytest.raises(LoopKVError, match=rf"record {number + 1} .*row 4"):
            run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    tau0 = next(i for i, line in enumerate(lines) if line["what"] == "slo.tau0_ms")
    lines[tau0]["value"] = bad
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LoopKVError, match=f"record {tau0 + 1}: tau0"):
        run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)


@pytest.mark.parametrize(
    ("what", "change", "message"),
    [
        ("slo.tau0_ms", {"tau0_rule": None}, "tau0_rule"),
        ("slo.cell", {"requests": None}, "requests, got nothing"),
        ("slo.cell", {"duration_s": 1e999}, "duration_s"),
        ("slo.cell", {"duration_s": 10**400}, "duration_s"),
        ("slo.cell", {"note": "\ud800"}, "cannot write"),
        ("slo.cell", {"requests": [{"arrival_s": 10**400}]}, "row 1"),
        ("slo.cell", {"requests": []}, "got 0 requests, wanted the 11"),
    ],
)
def test_hostile_records_are_one_sentence(
    bench: Bench, tmp_path: Path, what: str, change: dict[str, Any], message: str
) -> None:
    run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    path = tmp_path / "slo.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["what"] == what:
            line["settings"].update(change)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LoopKVError, match=message):
        run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)


def test_a_truncated_cell_is_refused_and_the_newest_cell_counts(bench: Bench, tmp_path: Path) -> None:
    run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    path = tmp_path / "slo.jsonl"
    text = path.read_text()
    cell = next(json.loads(line) for line in text.splitlines() if '"slo.cell"' in line)
    failing = json.loads(json.dumps(cell))
    for row in failing["settings"]["requests"]:
        row.update(ttft_s=None, tpot_ms=None, output_tokens=0, error="lost")

    def attained(date: str) -> set[float | None]:
        path.write_text(text + json.dumps({**failing, "date": date}) + "\n")
        found = run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,), max_seconds=0.0), quiet)
        return {r.value for r in found.scores if r.what == "slo.attainment"}

    assert attained("2000-01-01T00:00:00+00:00") == {1.0}
    assert attained("2999-01-01T00:00:00+00:00") == {0.0}
    cell["settings"]["requests"][2].update(output_tokens=0)
    path.write_text(text + json.dumps(cell) + "\n")
    with pytest.raises(LoopKVError, match="row 3, got 0 output tokens and no error, wanted 80"):
        run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)


def test_only_scores_that_are_derived_again_are_replaced(bench: Bench, tmp_path: Path) -> None:
    def scores() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for r in read_records([tmp_path / "slo.jsonl"]):
            if r.what == "slo.capacity":
                found.setdefault(f"{r.settings['arm']} {r.settings['workload'][:4]}", []).append(r.value)
        return found

    other = tuple(Request(20, 81) for _ in range(11))
    run_slo(settings(tmp_path), quiet)
    first = scores()
    run_slo(settings(tmp_path, ("stock",), requests=other), quiet)
    assert scores().items() > first.items() and len(scores()) == 3
    run_slo(settings(tmp_path, ("stock",)), quiet)
    run_slo(settings(tmp_path, ("kivi2",), rates_per_s=(0.5,)), quiet)
    assert {label: len(values) for label, values in scores().items()} == dict.fromkeys(scores(), 2 * 5)
    assert len(scores()) == 4


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_is_scored(bench: Bench, tmp_path: Path, end: type[BaseException]) -> None:
    answer = bench.client
    said: list[str] = []

    def client(*arguments: Any, rate_per_s: float, **options: Any) -> ClientRun:
        if rate_per_s == 2.0:
            raise end
        return answer(*arguments, rate_per_s=rate_per_s, **options)

    slo_run.run_client = client  # type: ignore[assignment]  # undone with the fixture's own
    came_to: list[slo_run.SloResult] = []
    with pytest.raises(end):
        run_slo(settings(tmp_path, ("stock", "kivi4")), said.append, came_to.append)
    found = [r for r in read_records([tmp_path / "slo.jsonl"]) if r.what == "slo.capacity"]
    assert {(r.value, r.settings["bound"]) for r in found} == {(1.0, "at_least")} and len(found) == 2 * 5
    assert "keeps 2 cells" in said[-1] and bench.running_now == 0
    (result,) = came_to
    assert [r.value for r in result.scores if r.what == "slo.capacity"] == [r.value for r in found]
    assert result.left == ("stock 2", "stock 4", "kivi4 0.5", "kivi4 1", "kivi4 2", "kivi4 4")


def test_a_rung_says_how_many_requests_met_the_bounds(bench: Bench, tmp_path: Path) -> None:
    """Of 25 scored, each TPOT bound keeps those below it; the first TTFT bound alone counts."""
    answer = bench.client

    def client(*arguments: Any, rate_per_s: float, **options: Any) -> ClientRun:
        done = answer(*arguments, rate_per_s=rate_per_s, **options)
        if math.isinf(rate_per_s):
            return done
        slow = {10: (1.0, 0.0045), 11: (1.0, 0.009), 12: (12.0, 0.001)}  # 2.25 tau0, 4.5 tau0, late
        rows = [
            dataclasses.replace(one, ttft_s=slow[i][0], tpot_s=slow[i][1]) if i in slow else one
            for i, one in enumerate(done.requests)
        ]
        return dataclasses.replace(done, requests=tuple(rows))

    slo_run.run_client = client  # type: ignore[assignment]  # undone with the fixture's own
    said: list[str] = []
    many = tuple(Request(20, 80) for _ in range(31))  # arrivals 3 to 27 of 0 to 30 are scored
    asked = settings(tmp_path, ("stock",), rates_per_s=(0.5,), requests=many, tau0_ms=2.0)
    run_slo(asked, said.append)
    told = "met 22/23/24 of 25 at 2/3/5 tau0 (given, 2.00 ms), TTFT <= 10 s"
    assert said[-1].endswith(f"7 preemptions; {told}") and not any("warning" in line for line in said)
    said.clear()
    run_slo(dataclasses.replace(asked, max_seconds=0.0), said.append)
    assert said == [f"stock, seed 101, 0.5 req/s: {told}"]


def test_few_scored_requests_are_warned_of_once(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    for limit in (None, 0.0):
        said.clear()
        run_slo(settings(tmp_path, max_seconds=limit), said.append)
        (warning,) = (line for line in said if line.startswith("warning"))
        assert "only 9 requests of a rung are scored" in warning and "95% means all" in warning
        assert sum("; met " in line or ": met " in line for line in said) == 6


def test_slow_cores_are_warned_of_where_something_is_measured(bench: Bench, tmp_path: Path) -> None:
    bench.slow_cores = "warning: slow"
    said: list[str] = []
    asked = settings(tmp_path, ("stock",))
    for limit in (0.0, None, None):  # nothing may start, everything is missing, nothing is
        run_slo(dataclasses.replace(asked, max_seconds=limit), said.append)
    assert said.count("warning: slow") == 1 and said.index("warning: slow") < said.index("starting server for stock")


def test_what_is_left_is_named(bench: Bench, tmp_path: Path) -> None:
    # 11 requests at 0.5/s and 1/s need 22 s and 11 s
    asked = settings(tmp_path, arm_rates={"kivi4": (0.47, 2.0)}, rates_per_s=(0.5, 1.0, 2.0), max_seconds=10.0)
    assert run_slo(asked, quiet).left == ("stock 0.5", "stock 1", "kivi4 0.47")
    again = run_slo(dataclasses.replace(asked, max_seconds=0.0, seeds=(101, 102)), quiet)
    assert again.left[:4] == (
        "stock 0.5 (seed 101)",
        "stock 1 (seed 101)",
        "stock 0.5 (seed 102)",
        "stock 1 (seed 102)",
    )


def test_what_a_cell_belongs_to(bench: Bench, tmp_path: Path) -> None:
    """Weights, natural ends, hardware and vLLM: cells and tau0 of another are not this run's."""
    run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet)
    assert run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,), ignore_eos=False), quiet).measured_cells == 1
    assert len(bench.started) == 2
    weights = Fingerprint(name="tiny", geometry=TINY, weights_sha256="a" * 64)
    done = run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,), identity=weights), quiet)
    assert done.measured_cells == 1 and sum(r.what == "slo.tau0_ms" for r in done.records) == 4
    path = tmp_path / "slo.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["versions"] = {**line["versions"], "vllm": "0.1"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_slo(settings(tmp_path, ("stock",), rates_per_s=(0.5,)), quiet).measured_cells == 1


def test_scoring_alone_starts_nothing(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    result = run_slo(settings(tmp_path, max_seconds=0.0), said.append)
    assert not bench.started and result.cells_left == 8 and "nothing measured yet" in said[0]
    assert not (tmp_path / "slo.jsonl").exists()
    run_slo(settings(tmp_path, tau0_ms=2.0, max_seconds=0.0), said.append)
    assert not bench.started and "no rung" in said[1]
    run_slo(settings(tmp_path, ("stock",)), said.append)
    assert "starting server for stock" in said
    with pytest.raises(LoopKVError, match="max seconds"):
        settings(tmp_path, max_seconds=math.nan)


def test_rates_of_an_arm_that_does_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopKVError, match="rates of an arm"):
        settings(tmp_path, arm_rates={"kivi3": (1.0,)})
    with pytest.raises(LoopKVError, match="rates"):
        settings(tmp_path, rates_per_s=(), arm_rates={"kivi4": (1.0,)})  # none for stock


@pytest.mark.parametrize(
    ("capacity", "measured"),
    [
        (0.0, [5, 3, 0, 1]),
        (1.5, [5, 3, 0, 1, 2]),
        (4.0, [5, 3, 4]),
        (6.0, [5, 7, 6]),
        (9.0, [5, 7, 9]),
    ],
)
def test_bisection_of_a_ladder(capacity: float, measured: list[int]) -> None:
    ladder = [float(i) for i in range(10)]
    met: dict[float, bool] = {}
    while (rate := next_rung(ladder, met)) is not None:
        assert rate not in met
        met[rate] = rate <= capacity
    assert list(met) == measured


def test_given_tau0_starts_no_calibration(bench: Bench, tmp_path: Path) -> None:
    result = run_slo(settings(tmp_path, ("kivi4",), tau0_ms=18.6, rates_per_s=(0.5,)), quiet)
    assert len(bench.started) == 1
    assert {r.settings["tau0_rule"] for r in result.records if r.what == "slo.capacity"} == {"given"}
    run_slo(settings(tmp_path, ("kivi4",), rates_per_s=(0.5,)), quiet)
    assert len(bench.started) == 2  # no stock arm: a server of its own for tau0, none for the known cell


def test_bad_settings_are_refused_before_a_server_starts(bench: Bench, tmp_path: Path) -> None:
    for changes in (
        {"rates_per_s": ()},
        {"rates_per_s": (0.0,)},
        {"seeds": ()},
        {"ks": (math.inf,)},
        {"seeds": (101, 101)},
        {"seeds": (-1,)},
        {"seeds": (1 << 32,)},
        {"requests": (Request(1, 1),)},
    ):
        with pytest.raises(LoopKVError):
            settings(tmp_path, **changes)
    with pytest.raises(LoopKVError):
        run_slo(settings(tmp_path, ("kivi5",)), quiet)
    assert not bench.started


def test_line_fit() -> None:
    # The paper's line: 17.31 ms + 0.495 ms per 1K tokens
    slope, start = fit_line([(1000.0, 17.805), (8000.0, 21.27), (16000.0, 25.23)])
    assert slope == pytest.approx(0.495e-3) and start == pytest.approx(17.31)
    assert fit_line([(5.0, 2.0), (5.0, 4.0)]) == (0.0, 3.0)
    with pytest.raises(LoopKVError):
        fit_line([])


RESULT = {
    "duration": 9.0,
    "start_times": [100.0, 101.5, 103.0, 104.0],
    "ttfts": [0.5, 0.0, 0.25, 0.1],
    "itls": [[0.1, 0.2, 0.3], [], [], [0.2]],
    "output_lens": [4, 0, 1, 2],
    "errors": ["", "Service Unavailable", "", ""],
}
ASKED = [Request(3, 4), Request(3, 4), Request(3, 1), Request(3, 5)]


def test_client_results_are_read_per_request() -> None:
    done = parse_result(RESULT, ASKED)
    assert done.duration_s == 9.0
    first, second, third, fourth = done.requests
    assert (first.arrival_s, first.ttft_s, first.tpot_s) == (0.0, 0.5, pytest.approx(0.2))
    assert second.failed and second.error == "Service Unavailable" and second.arrival_s == 1.5
    assert (third.ttft_s, third.tpot_s) == (0.25, 0.0)
    assert fourth.failed and fourth.error == "2 of 5 tokens came"
    assert not parse_result(RESULT, ASKED, ignore_eos=False).requests[3].failed
    kept = times_to_json(done.requests)
    assert times_to_json(times_from_json(json.loads(json.dumps(kept)))) == kept


@pytest.mark.parametrize(
    "broken", [{}, {**RESULT, "errors": ["", ""]}, {**RESULT, "ttfts": None}, {**RESULT, "itls": 3}]
)
def test_results_that_do_not_cover_every_request_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(LoopKVError):
        parse_result(broken, ASKED)


@pytest.mark.parametrize("rows", [None, [{}], [{"arrival_s": "x"}], "text"])
def test_broken_cells_are_refused(rows: object) -> None:
    with pytest.raises(LoopKVError):
        times_from_json(rows)


def test_preemption_counter_is_summed_over_engines() -> None:
    text = (
        "# TYPE vllm:num_preemptions counter\n"
        'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="m"} 4.0\n'
    )
    assert parse_preemptions(text) == 7
    with pytest.raises(LoopKVError):
        parse_preemptions("# TYPE other counter\nother_total 1.0\n")


def test_client_command_sends_the_workload_as_it_is(tmp_path: Path) -> None:
    line = " ".join(
        client_command(
            "http://x",
            tmp_path / "w.jsonl",
            tmp_path / "r.json",
            "tok",
            count=60,
            rate_per_s=0.07,
            seed=3,
            one_at_a_time=False,
            ignore_eos=True,
        )
    )
    for part in ("--request-rate 0.07", "--seed 3", "--num-prompts 60", "--disable-shuffle", "--custom-output-len -1"):
        assert part in line
    assert "--ignore-eos" in line and "--max-concurrency" not in line
