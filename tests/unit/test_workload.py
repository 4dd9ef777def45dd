"""Workload files and the traffic generator."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from loopkv.bench.prompts import FolderTokenizer, fill_prompts
from loopkv.bench.workload import (
    REASONING,
    SMALL,
    Request,
    decode_context_tokens,
    generate,
    poisson_arrivals,
    read_workload,
    with_arrivals,
    workload_sha256,
    write_workload,
)
from loopkv.cli.app import app
from loopkv.errors import LoopKVError
from loopkv.reference import model_folder


@pytest.mark.parametrize("seed", range(5))
def test_reasoning_traffic_has_the_stated_distribution(seed: int) -> None:
    requests = generate(REASONING, 60, seed)
    mean = sum(r.output_tokens for r in requests) / 60
    assert mean == pytest.approx(11_000, rel=0.01)
    assert max(r.length_tokens for r in requests) == 16_384
    # sigma 0.8 cut at about 16.2K with mean 11K: 33% of the answers are cut (1 - Phi((ln cap - mu) / sigma))
    assert sum(r.length_tokens == 16_384 for r in requests) / 60 == pytest.approx(0.33, abs=0.02)
    # The paper's workload: tau0 = 17.31 ms + 0.495 ms per 1K tokens = 20.69 ms, so a mean context of 6.83K.
    assert decode_context_tokens(requests) == pytest.approx(6830, rel=0.03)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 80))
@settings(max_examples=50, deadline=None)
def test_requests_fit_and_depend_on_the_seed_only(seed: int, count: int) -> None:
    requests = generate(SMALL, count, seed)
    assert requests == generate(SMALL, count, seed)
    assert len(requests) == count
    assert all(32 <= r.prompt_tokens <= 256 and r.output_tokens >= 1 and r.length_tokens <= 512 for r in requests)


def test_impossible_traffic_is_refused() -> None:
    import dataclasses

    with pytest.raises(LoopKVError, match="mean output"):
        generate(dataclasses.replace(SMALL, mean_output_tokens=600), 10, 0)
    with pytest.raises(LoopKVError, match="maximum length"):
        generate(dataclasses.replace(SMALL, max_length_tokens=40, mean_output_tokens=10), 10, 0)
    with pytest.raises(LoopKVError):
        generate(SMALL, 0, 0)


def test_arrivals_are_one_pattern_stretched() -> None:
    slow, fast = poisson_arrivals(60, 0.05, 101), poisson_arrivals(60, 0.1, 101)
    assert slow[-1] == pytest.approx(60 / 0.05)
    assert np.allclose(np.array(slow), 2 * np.array(fast))
    assert all(b >= a for a, b in itertools.pairwise(slow))
    assert poisson_arrivals(60, 0.05, 102) != slow


def test_arrivals_are_those_of_the_serving_client() -> None:
    """The client seeds numpy's global generator and draws one gamma(1, 1 / rate) per request, then rescales."""
    np.random.seed(101)
    gaps = [np.random.gamma(shape=1.0, scale=1.0 / 0.07) for _ in range(20)]
    times = np.cumsum(gaps)
    times *= (20 / 0.07) / times[-1]
    assert np.allclose(poisson_arrivals(20, 0.07, 101), times, rtol=1e-12)


def test_decode_context_counts_every_token_once() -> None:
    # Prompt 10, three tokens: contexts 11, 12, 13 -> 12; prompt 100, one token: 101. Mean (36 + 101) / 4.
    assert decode_context_tokens([Request(10, 3), Request(100, 1)]) == pytest.approx(137 / 4)


def test_file_round_trip(tmp_path: Path) -> None:
    requests = with_arrivals(generate(SMALL, 7, 3), 2.0, 5)
    write_workload(tmp_path / "w.jsonl", requests)
    assert read_workload(tmp_path / "w.jsonl") == requests
    assert workload_sha256(requests) != workload_sha256(requests[:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request"),
        ("{", "line 1, got broken JSON"),
        ("[1]", "JSON list"),
        ('{"prompt_tokens": 0, "output_tokens": 5}', "prompt_tokens, got 0"),
        ('{"prompt_tokens": true, "output_tokens": 5}', "prompt_tokens, got True"),
        ('{"prompt_tokens": 5}', "output_tokens, got None"),
        ('{"prompt": "abc", "output_tokens": 5}', "tokenizer"),
        ('{"prompt": 3, "output_tokens": 5}', "wanted text"),
        ('{"prompt_tokens": 5, "output_tokens": 5, "arrival_s": -1}', "arrival_s"),
        (
            '{"prompt_tokens": 5, "output_tokens": 5, "arrival_s": 1}\n{"prompt_tokens": 5, "output_tokens": 5}',
            "1 of 2",
        ),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.jsonl").write_text(text)
    with pytest.raises(LoopKVError, match=message):
        read_workload(tmp_path / "w.jsonl")


def test_missing_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.jsonl", "b.jsonl", "."):
        with pytest.raises(LoopKVError):
            read_workload(tmp_path / name)


def test_pipes_and_devices_do_not_hold_the_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(LoopKVError, match="workload"):
            read_workload(path)


@pytest.mark.parametrize("length", ["16777217", "9" * 320])
def test_workload_command_refuses_what_no_model_holds(tmp_path: Path, length: str) -> None:
    output = str(tmp_path / "w.jsonl")
    done = CliRunner().invoke(app, ["bench", "workload", "-o", output, "--max-length", length])
    assert done.exit_code == 1 and isinstance(done.exception, LoopKVError) and "maximum length" in str(done.exception)
    assert CliRunner().invoke(app, ["bench", "workload", "-o", output, "--seed", "-1"]).exit_code == 2


def test_prompts_have_the_length_asked_for_and_start_differently() -> None:
    tokenizer = FolderTokenizer(model_folder())
    requests = generate(SMALL, 12, 0)
    filled = fill_prompts(requests, tokenizer, 0)
    assert all(abs(f.prompt_tokens - r.prompt_tokens) <= 2 for f, r in zip(filled, requests, strict=True))
    assert all(f.prompt is not None and tokenizer.count(f.prompt) == f.prompt_tokens for f in filled)
    assert len({(f.prompt or "")[:12] for f in filled}) == 12
    assert fill_prompts(requests, tokenizer, 0) == filled
    kept = fill_prompts([Request(3, 1, prompt="kept")], tokenizer, 0)
    assert kept[0].prompt == "kept"
    assert math.isfinite(decode_context_tokens(filled))


def test_prompt_text_alone_is_counted(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt": "one two three", "output_tokens": 5}\n')
    (request,) = read_workload(tmp_path / "w.jsonl", FolderTokenizer(model_folder()).count)
    assert request.prompt_tokens == FolderTokenizer(model_folder()).count("one two three") > 0
