"""``loopkv bench kernel``: the grid it makes and what it refuses, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loopkv.cli.app import app
from loopkv.cli.bench_kernel import grid
from loopkv.errors import LoopKVError
from loopkv.kernels.descriptor import SeedMode


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "kernel", *arguments])


def test_every_combination_once_and_thresholds_for_int4_alone() -> None:
    cells = grid(["int4", "int2", "share"], [1, 32], [8192], [None, 14.0], head_dim=64, seed_mode=SeedMode.TIMED)
    # per batch: int4 and share with and without tau, int2 without
    assert len(cells) == 2 * 5 and len(set(cells)) == 10
    assert {(c.option, c.tau) for c in cells} == {
        ("int4", None),
        ("int4", 14.0),
        ("share", None),
        ("share", 14.0),
        ("int2", None),
    }
    assert all(c.head_dim == 64 and c.kv_heads == 16 and c.seed_mode is SeedMode.TIMED for c in cells)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--options", "int3"], ("--options", "int3", "int4")),
        (["--batches", "0"], ("--batches", "1 to 1024")),
        (["--contexts", "8k"], ("--contexts", "8k")),
        (["--tau", "nan"], ("--tau", "none")),
        (["--hot-share", "2"], ("--hot-share",)),
        (["--seed-mode", "late"], ("--seed-mode", "sink")),
        (["--group-queries", "17"], ("--group-queries", "1 to 16")),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "k.jsonl"
    done = run("-o", str(output), *arguments)
    assert isinstance(done.exception, LoopKVError | SystemExit) and done.exit_code != 0 and not output.exists()
    told = done.output + str(done.exception)
    assert all(word in told for word in words), told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "k.jsonl"))
    assert done.exit_code != 0 and "no CUDA device" in done.output + str(done.exception)
    assert not (tmp_path / "k.jsonl").exists()
