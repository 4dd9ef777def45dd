"""``loopkv bench workload`` to ``loopkv simulate`` to ``loopkv report``, as a user runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopkv.cli.app import app
from loopkv.errors import LoopKVError
from loopkv.records import append_records, read_records

RUN = CliRunner()


def run(*arguments: object) -> str:
    done = RUN.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_workload_is_simulated_and_reported(tmp_path: Path) -> None:
    work, records, page = tmp_path / "work.jsonl", tmp_path / "r.jsonl", tmp_path / "r.html"
    told = run("bench", "workload", "-o", work, "--requests", 60)
    assert "mean 11,000 after the cut" in told and "60 requests" in told
    told = run(
        *("simulate", work, "--geometry", "ouro-1.4b", "--gpu", "RTX-PRO-6000"),
        *("--arm", "bf16=stock", "--arm", "kivi4", "-o", records, "--seeds", "101,102", "--k", "3"),
    )
    assert "not a measurement" in told and "kivi4" in told
    # 60 requests at the paper's size: an answer of 10,000 tokens takes minutes, and so do their arrivals.
    warned = [line for line in told.splitlines() if line.startswith("Warning: ")]
    assert [line.split(":")[1] for line in warned] == [" bf16", " kivi4"]
    assert all("requests would do, the workload has 60" in line for line in warned)
    found = {(r.settings["arm"], r.seed): r.value for r in read_records([records]) if r.what == "simulate.capacity"}
    assert set(found) == {(arm, seed) for arm in ("bf16", "kivi4") for seed in (101, 102)}
    for seed in (101, 102):
        # The paper's measured ladders on this GPU (Table 9): BF16 0.0119 and KIVI-4 0.0595 to 0.0833 requests/s.
        assert 0.008 < (found["bf16", seed] or 0) < 0.02
        assert 0.04 < (found["kivi4", seed] or 0) < 0.12
    run("report", records, "-o", page)
    assert "simulated RTX-PRO-6000" in page.read_text()


def test_step_times_fitted_to_records(tmp_path: Path) -> None:
    from support.record_data import decode_records

    work, measured = tmp_path / "work.jsonl", tmp_path / "m.jsonl"
    run("bench", "workload", "-o", work, "--requests", 20, "--seed", 1)
    append_records(measured, decode_records(noise=0.0))
    told = run(
        *("simulate", work, "--geometry", "ouro-1.4b", "--gpu", "RTX-PRO-6000", "--fit", measured),
        *("--arm", "bf16=stock", "--arm", "kivi4", "--rates", "0.01,0.02", "--tau0", "18.6", "--pool", "80"),
    )
    assert "fitted to m.jsonl" in told and "tau0 18.60 ms" in told


def test_a_file_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    work, empty, fifo = tmp_path / "work.jsonl", tmp_path / "empty.jsonl", tmp_path / "fifo"
    work.write_text('{"prompt_tokens": 1000, "output_tokens": 200}\n')
    empty.touch()
    os.mkfifo(fifo)
    tail = ("--geometry", "ouro-1.4b", "--arm", "stock", "--rates", "1")
    for arguments, words in (
        ((work, *tail, "--fit", empty), r"of its 0 Records none"),
        ((work, *tail, "--fit", fifo), "a named pipe"),
        ((fifo, *tail), "workload .*a named pipe"),
        (("/dev/zero", *tail), "a device"),
        ((tmp_path / "none.jsonl", *tail), r"workload .*none\.jsonl, got No such file or directory, wanted a readable"),
    ):
        with pytest.raises(LoopKVError, match=words):
            run("simulate", *arguments)


def test_a_model_cut_to_four_layers(tmp_path: Path) -> None:
    work, records = tmp_path / "work.jsonl", tmp_path / "r.jsonl"
    run("bench", "workload", "-o", work, "--requests", 20)
    whole = ("simulate", work, "--geometry", "ouro-1.4b", "--arm", "m=paper-loopkv-m", "--rates", "0.1", "--tau0", "5")
    told = run(*whole, "--layers", 4, "--pool", 5, "-o", records)
    assert "5.0" in told
    assert {r.model for r in read_records([records])} == {"ouro-1.4b, 4 layers (dummy)"}  # as bench slo names it
    with pytest.raises(LoopKVError, match="--layers"):
        run("simulate", work, "--model", tmp_path, "--layers", 4, "--arm", "stock")


def test_every_command_takes_the_same_geometries(tmp_path: Path) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt_tokens": 1000, "output_tokens": 200}\n')
    tiny = ("--geometry", "tiny")
    assert "kivi4" in run("simulate", work, *tiny, "--arm", "kivi4", "--rates", "1")
    told = run("capacity", "--plan", "kivi4", *tiny)
    assert "this model has 6)" in " ".join(told.split())  # 3 loops of 2 layers


def test_what_cannot_be_simulated_is_one_sentence(tmp_path: Path) -> None:
    work = tmp_path / "work.jsonl"
    run("bench", "workload", "-o", work, "--requests", 5)
    for wrong in (
        ("--arm", "kivi5"),
        ("--arm", "kivi4", "--rates", "a,b"),
        ("--arm", "kivi4", "--tau0-rule", "long"),
        ("--arm", "kivi4", "--fit", tmp_path / "none.jsonl"),
        ("--arm", "kivi4", "--gpu", "H2000"),
    ):
        done = RUN.invoke(app, ["simulate", str(work), "--geometry", "ouro-1.4b", *map(str, wrong)])
        assert done.exit_code != 0 and type(done.exception).__mro__[1].__name__ in ("LoopKVError", "Exception"), wrong


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--pool", value) for value in ("nan", "1e300", "-1")),
        *(("--tau0", value) for value in ("nan", "0", "-1", "inf")),
        *(("--hot-share", value) for value in ("5", "nan")),
        *(("--seeds", value) for value in ("1.5", "1e11", "-1", "4294967296", "")),
        ("--utilization", "0"),
        ("--model", "folder"),
    ],
)
def test_values_without_a_meaning_are_refused(tmp_path: Path, option: str, value: str) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt_tokens": 1000, "output_tokens": 200}\n')
    arguments = ["simulate", str(work), "--arm", "stock", "--geometry", "ouro-1.4b", option, value]
    error = RUN.invoke(app, arguments).exception
    assert isinstance(error, LoopKVError) and option.lstrip("-") in str(error)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("6", "0.06 for 6%"),
        ("6%", "0.06 for 6%"),
        ("0.5%", "0.005 for 0.5%"),
        ("12.5 %", "0.125 for 12.5%"),
        ("1", "0.01 for 1%"),
        *((value, None) for value in ("100", "-1", "nan", "inf", "", "a", "%", "1e", "--1")),
    ],
)
def test_a_watermark_in_percent_is_refused_with_the_share_it_means(
    tmp_path: Path, value: str, hint: str | None
) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt_tokens": 1000, "output_tokens": 200}\n')
    with pytest.raises(LoopKVError, match=r"--watermark.*wanted a share from 0 to below 1") as error:
        run("simulate", work, "--arm", "stock", "--geometry", "ouro-1.4b", f"--watermark={value}")
    assert error.value.hint == hint


def test_a_gpu_of_ones_own_is_called_custom_and_names_only_what_it_has_of_another(tmp_path: Path) -> None:
    work, records = tmp_path / "work.jsonl", tmp_path / "r.jsonl"
    run("bench", "workload", "-o", work, "--requests", 20)
    base = ("simulate", work, "--geometry", "ouro-1.4b", "--arm", "kivi4", "--rates", "0.01", "-o", records)
    for arguments, gpu, source in (
        (("--bandwidth", 3, "--t-fix", 5, "--pool", 9), "custom", "bandwidth, t_fix given; prefill"),
        (
            ("--bandwidth", 3, "--t-fix", 5),
            "custom (memory of the H200)",
            "bandwidth, t_fix given; memory of the H200; prefill",
        ),
        (
            ("--memory", 60, "--gpu", "NVIDIA L40S"),
            "custom (bandwidth and t_fix of the L40S)",
            "memory given; bandwidth and t_fix of the L40S (not fitted: 0.864 TB/s (datasheet)",
        ),
        (("--memory", 60, "--bandwidth", 3, "--t-fix", 5), "custom", "memory, bandwidth, t_fix given; prefill"),
        (("--gpu", "nvidia h200", "--watermark", 0.06), "H200", "fitted to decode steps of stock vLLM"),
    ):
        records.unlink(missing_ok=True)
        told = " ".join(run(*base, *arguments).split())
        assert f"not a measurement: {gpu}; {source}" in told
        for record in read_records([records]):
            assert record.settings["gpu"] == gpu and record.settings["constants"].startswith(source)
            assert record.settings.get("watermark") == (0.06 if gpu == "H200" else None)


def test_help_lists_every_gpu() -> None:
    from loopkv.capacity import GPUS

    for verb in ("simulate", "capacity"):
        said = run(verb, "--help")
        assert all(name in said for name in GPUS), verb
