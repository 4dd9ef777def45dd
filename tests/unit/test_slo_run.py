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
    # 3 rungs x 2 arms x 2 rules x 3 k x 3 TTFT; 11 requests, of which 9 arrive in the middle 80%
    assert len(by_kind["slo.attainment"]) == 3 * 2 * 2 * 3 * 3
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
    moved = run_slo(settings(tmp_path), quiet)
    assert cells and {r.hardware for r in moved.records} == {"NVIDIA H200"}
    run_slo(settings(tmp_path), quiet)
    assert numbers(list(read_records([tmp_path / "slo.jsonl"]))) == numbers(first.records)


def test_a_killed_run_goes_on_where_it_was(bench: Bench, tmp_path: Path) -> None:
    bench.fail_at = 1.0
    with pytest.raises(LoopKVError, match="killed"):
        run_slo(settings(tmp_path), quiet)
    with (tmp_path / "slo.jsonl").open("a") as file:
        file.write('{"what": "slo.cell", "val')  # torn by the kill
    bench.fail_at = None
    run_slo(settings(tmp_path), quiet)
    assert bench.cells == [(0.5, 101), (1.0, 101), (2.0, 101), (0.5, 101), (1.0, 101), (2.0, 101)]


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


def test_one_server_of_several_that_fails_stops_the_others(bench: Bench, tmp_path: Path) -> None:
    bench.refuse = "kivi2"
    with pytest.raises(LoopKVError, match="refused"):
        run_slo(settings(tmp_path, ("kivi4", "kivi2"), together=True, tau0_ms=2.0), quiet)
    assert bench.running_now == 0 and bench.cells == []


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
