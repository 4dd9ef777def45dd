"""One rung of traffic against a running server, sent by vLLM's own benchmark client, read back per request."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopkv.artifacts.storage import read_json
from loopkv.bench.served_steps import StepWindow, TokenTimes, step_windows
from loopkv.bench.slo import RequestTimes
from loopkv.bench.workload import Request, write_workload
from loopkv.errors import LoopKVError
from loopkv.vllm_plugin.server import ends_with_this_process

SERVED_NAME = "loopkv-bench"
PREEMPTIONS_METRIC = "vllm:num_preemptions_total"
COMPLETE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What the client measured: every request sent, in the order sent, the whole run's seconds, and step times."""

    requests: tuple[RequestTimes, ...]
    duration_s: float
    steps: tuple[StepWindow, ...] = ()


def client_command(
    url: str,
    workload: Path,
    result: Path,
    tokenizer: str,
    *,
    count: int,
    rate_per_s: float,
    seed: int,
    one_at_a_time: bool,
    ignore_eos: bool,
) -> list[str]:
    """The ``vllm bench serve`` command line of one rung (Poisson arrivals at ``rate_per_s``)."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    command += ["--model", SERVED_NAME, "--tokenizer", tokenizer]
    command += ["--dataset-name", "custom", "--dataset-path", str(workload), "--custom-output-len", "-1"]
    command += ["--skip-chat-template", "--disable-shuffle", "--num-prompts", str(count), "--seed", str(seed)]
    command += ["--request-rate", "inf" if math.isinf(rate_per_s) else repr(rate_per_s), "--temperature", "0"]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    command += ["--max-concurrency", "1"] if one_at_a_time else []
    command += ["--ignore-eos"] if ignore_eos else []
    return command


def run_client(
    url: str,
    requests: Sequence[Request],
    folder: Path,
    tokenizer: str,
    *,
    rate_per_s: float,
    seed: int,
    one_at_a_time: bool = False,
    ignore_eos: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ClientRun:
    """Send ``requests`` (each with prompt text) and read every one's times back.

    Args:
        url: base URL of the server.
        folder: scratch folder for the workload, the client's log and its result file.
        tokenizer: model folder whose tokenizer the client counts with.
        rate_per_s: arrival rate; infinite sends at once.
        seed: of the arrivals.
        one_at_a_time: send the next request when the one before has ended.
        ignore_eos: every request generates all its output tokens.

    Raises:
        LoopKVError: the client failed, or what it saved does not cover every request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workload, result, log = folder / "workload.jsonl", folder / "result.json", folder / "client.log"
    write_workload(workload, requests)
    result.unlink(missing_ok=True)
    command = client_command(
        url,
        workload,
        result,
        tokenizer,
        count=len(requests),
        rate_per_s=rate_per_s,
        seed=seed,
        one_at_a_time=one_at_a_time,
        ignore_eos=ignore_eos,
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        try:
            with ends_with_this_process(process.pid, group=False):
                try:
                    status = process.wait(timeout_s)
                finally:
                    process.kill()
                    process.wait()
        except subprocess.TimeoutExpired:
            raise LoopKVError("benchmark client", got=f"no end within {timeout_s:.0f} s", hint=f"see {log}") from None
        finally:
            process.kill()
            process.wait()
    if status != 0 or not result.exists():
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise LoopKVError("benchmark client", got=f"exit status {status}: {lines[-1][-300:]}", hint=f"see {log}")
    return parse_result(read_json(result, LoopKVError, "benchmark result"), requests, ignore_eos=ignore_eos)


def parse_result(data: Mapping[str, Any], requests: Sequence[Request], *, ignore_eos: bool = True) -> ClientRun:
    """Times per request from the client's saved result; a request without all its tokens has failed.

    Raises:
        LoopKVError: a result that does not hold one row per request sent.
    """
    columns = {name: data.get(name) for name in ("start_times", "ttfts", "itls", "output_lens", "errors")}
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != len(requests):
            got = "nothing" if column is None else f"{len(column)} rows" if isinstance(column, list) else "no list"
            raise LoopKVError(f"benchmark result: {name}", got=got, wanted=f"{len(requests)} rows, one per request")
    starts, ttfts, itls = columns["start_times"], columns["ttfts"], columns["itls"]
    lengths, errors = columns["output_lens"], columns["errors"]
    assert starts and ttfts is not None and itls is not None and lengths is not None and errors is not None
    first = min(starts)
    rows = []
    tokens_came = []
    for i, asked in enumerate(requests):
        arrival, tokens = float(starts[i]) - first, int(lengths[i] or 0)
        if tokens > 1 and itls[i]:
            chunks = np.cumsum((arrival + float(ttfts[i]), *itls[i])).tolist()
            tokens_came.append(TokenTimes(asked.prompt_tokens, tokens, chunks))
        error = str(errors[i]).strip()[-300:] or None
        if error is None and tokens == 0:
            error = "no token came"
        if error is None and ignore_eos and tokens != asked.output_tokens:
            error = f"{tokens} of {asked.output_tokens} tokens came"
        ttft = tpot = 0.0
        if error is None:
            ttft, tpot = float(ttfts[i]), math.fsum(itls[i]) / (tokens - 1) if tokens > 1 else 0.0
            if not all(math.isfinite(one) and one >= 0 for one in (ttft, tpot)):
                error = f"impossible times: first token after {ttft:g} s, {tpot:g} s per token"
        if error is not None:
            rows.append(RequestTimes(arrival, None, None, tokens, error))
            continue
        rows.append(RequestTimes(arrival, ttft, tpot, tokens))
    return ClientRun(tuple(rows), float(data.get("duration") or 0.0), step_windows(tokens_came))


def preemptions(url: str) -> int:
    """Preemptions since the server started, from its metrics.

    Raises:
        LoopKVError: metrics that cannot be read or lack the counter.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, OSError, UnicodeDecodeError) as error:
        raise LoopKVError("server metrics", got=str(error)[:120]) from None
    return parse_preemptions(text)


def parse_preemptions(text: str) -> int:
    """Sum of the preemption counter over engines in a Prometheus text.

    Raises:
        LoopKVError: the counter is missing.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREEMPTIONS_METRIC
    ]
    if not found:
        raise LoopKVError("server metrics", got=f"no {PREEMPTIONS_METRIC}", wanted="vLLM 0.26's counter")
    return round(sum(found))


def complete(url: str, prompt: str, output_tokens: int) -> None:
    """Have one prompt answered, so that what compiles at first use has compiled.

    Raises:
        LoopKVError: the server did not answer it.
    """
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    call = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(call, timeout=COMPLETE_TIMEOUT_S) as reply:
            reply.read()
    except (urllib.error.URLError, OSError) as error:
        raise LoopKVError("server: a first request", got=str(error)[:120], hint="see the server's log") from None


def reset_prefix_cache(url: str) -> None:
    """Forget cached prefixes, so that a rung does not find the prompts of the one before (development mode)."""
    call = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    try:
        with urllib.request.urlopen(call, timeout=60):
            return
    except (urllib.error.URLError, OSError) as error:
        raise LoopKVError(
            "reset_prefix_cache", got=str(error)[:120], wanted="a server started with VLLM_SERVER_DEV_MODE=1"
        ) from None


def times_to_json(requests: Sequence[RequestTimes]) -> list[dict[str, Any]]:
    """Requests as they are kept in ``slo.cell`` Records."""
    return [
        {
            "arrival_s": round(r.arrival_s, 6),
            "ttft_s": None if r.ttft_s is None else round(r.ttft_s, 6),
            "tpot_ms": None if r.tpot_s is None else round(r.tpot_s * 1e3, 6),
            "output_tokens": r.output_tokens,
            "error": r.error,
        }
        for r in requests
    ]


def times_from_json(rows: object, where: str = "slo.cell record") -> tuple[RequestTimes, ...]:
    """The requests of a ``slo.cell`` Record.

    Args:
        rows: ``settings["requests"]``.
        where: names the Record in the error.

    Raises:
        LoopKVError: rows that are not what ``times_to_json`` writes, or times that are not finite or below 0.
    """
    if not isinstance(rows, list):
        got = "nothing" if rows is None else type(rows).__name__
        raise LoopKVError(f"{where}: requests", got=got, wanted="one row per request")
    times = []
    for number, row in enumerate(rows, 1):
        try:
            read = RequestTimes(
                _seconds(row["arrival_s"]),
                None if row["ttft_s"] is None else _seconds(row["ttft_s"]),
                None if row["tpot_ms"] is None else _seconds(row["tpot_ms"]) / 1e3,
                int(row["output_tokens"]),
                None if row["error"] is None else str(row["error"]),
            )
            if read.output_tokens < 0:
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise LoopKVError(
                f"{where}: requests, row {number}",
                got=repr(row)[:120],
                wanted="arrival_s, ttft_s, tpot_ms (finite, at least 0), output_tokens and error of one request",
            ) from None
        times.append(read)
    return tuple(times)


def _seconds(value: object) -> float:
    """A finite time of at least 0.

    Raises:
        TypeError, ValueError, OverflowError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return float(value)
