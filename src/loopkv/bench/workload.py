"""Workload files: what arrives, how long its prompt is and how many tokens it generates.

One JSON object a line: ``prompt`` (text) and/or ``prompt_tokens``, ``output_tokens`` and, where the trace fixes it,
``arrival_s``. vLLM's own benchmark client reads the same file as its custom dataset (``prompt``, ``output_tokens``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from loopkv.artifacts.storage import write_atomically
from loopkv.errors import LoopKVError
from loopkv.paths import check_input_file

MAX_WORKLOAD_BYTES = 256 << 20
MAX_LENGTH_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload. ``arrival_s`` counts from the start of the trace, None where a rate decides it."""

    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None
    arrival_s: float | None = None

    @property
    def length_tokens(self) -> int:
        """Tokens of the request when it ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Decode-heavy, reasoning-like traffic.

    Output lengths are lognormal with shape ``output_sigma``, cut (not redrawn) where the request reaches
    ``max_length_tokens``, as an engine cuts them; the scale is solved so that the mean after the cut is
    ``mean_output_tokens``. Prompt lengths are lognormal around ``prompt_median_tokens``, clipped to
    ``[prompt_min_tokens, prompt_max_tokens]`` and to half the maximum length.
    """

    name: str
    mean_output_tokens: float
    max_length_tokens: int
    output_sigma: float
    prompt_median_tokens: float
    prompt_sigma: float
    prompt_min_tokens: int
    prompt_max_tokens: int

    def describe(self) -> str:
        """The distribution in one sentence."""
        return (
            f"{self.name}: outputs lognormal (sigma {self.output_sigma:g}) cut at a total length of "
            f"{self.max_length_tokens:,} tokens, mean {self.mean_output_tokens:,.0f} after the cut; prompts lognormal "
            f"(median {self.prompt_median_tokens:g}, sigma {self.prompt_sigma:g}) in "
            f"[{self.prompt_min_tokens}, {self.prompt_max_tokens}] tokens; lengths drawn one from each of N equally "
            "likely strata, then shuffled"
        )


REASONING = Traffic("reasoning", 11_000, 16_384, 0.8, 160, 0.4, 64, 640)
"""Lengths like AIME problems answered by a thinking model: mean output 11K, a third of the answers cut at 16K, mean
context while decoding about 6.7K (the paper's SLO workload: mean output 10,999, maximum length 16K, context 6.8K)."""

SMALL = Traffic("small", 110, 512, 0.8, 96, 0.4, 32, 256)
"""The same shape two orders shorter, for a CPU and the reference model."""

TRAFFICS: dict[str, Traffic] = {traffic.name: traffic for traffic in (REASONING, SMALL)}


def generate(traffic: Traffic, requests: int, seed: int) -> tuple[Request, ...]:
    """Draw ``requests`` requests without prompt text and without arrival times.

    Lengths are stratified (one draw from each of N equally likely strata, shuffled), so that a workload of 60 requests
    has the stated mean whatever its seed.
    """
    if requests < 1:
        raise LoopKVError("workload", got=f"{requests} requests", wanted="at least 1")
    if traffic.max_length_tokens > MAX_LENGTH_TOKENS:
        got = f"{traffic.max_length_tokens:.3g} tokens" if traffic.max_length_tokens < 10**300 else "more"
        raise LoopKVError("workload: maximum length", got=got, wanted=f"at most {MAX_LENGTH_TOKENS:,} tokens")
    longest_prompt = min(traffic.prompt_max_tokens, traffic.max_length_tokens // 2)
    if longest_prompt < traffic.prompt_min_tokens:
        raise LoopKVError(
            "workload: maximum length",
            got=f"{traffic.max_length_tokens} tokens",
            wanted=f"at least {2 * traffic.prompt_min_tokens}, twice the shortest prompt",
        )
    rng = np.random.default_rng(seed)
    prompts = np.exp(math.log(traffic.prompt_median_tokens) + traffic.prompt_sigma * norm.ppf(_strata(requests, rng)))
    prompts = np.clip(np.rint(prompts), traffic.prompt_min_tokens, longest_prompt).astype(int)
    caps = traffic.max_length_tokens - prompts
    location = _solve_location(traffic.mean_output_tokens, traffic.output_sigma, float(caps.mean()))
    outputs = np.exp(location + traffic.output_sigma * norm.ppf(_strata(requests, rng)))
    outputs = np.clip(np.rint(outputs), 1, caps).astype(int)
    return tuple(Request(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True))


def _strata(count: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    return rng.permutation((np.arange(count) + rng.uniform(1e-9, 1.0, count)) / count)


def _solve_location(mean: float, sigma: float, cap: float) -> float:
    """mu of the lognormal whose mean is ``mean`` after cutting at ``cap``."""
    if not 1 <= mean < cap:
        raise LoopKVError("workload: mean output", got=f"{mean:g} tokens", wanted=f"between 1 and {cap:g} (the cut)")

    def cut_mean(mu: float) -> float:
        edge = (math.log(cap) - mu) / sigma
        return float(math.exp(mu + sigma**2 / 2) * norm.cdf(edge - sigma) + cap * norm.sf(edge))

    return float(brentq(lambda mu: cut_mean(mu) - mean, math.log(mean) - 1, math.log(cap) + 20 * sigma))


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds: the very draws of ``vllm bench serve --request-rate --seed`` (0.26).

    Exponential gaps, rescaled so that the last request arrives at ``count / rate``: a ladder's rungs therefore see one
    pattern of arrivals, stretched.
    """
    if count < 1 or not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise LoopKVError("arrivals", got=f"{count} requests at {rate_per_s}/s", wanted="a count and a rate above 0")
    gaps = np.random.RandomState(seed).gamma(shape=1.0, scale=1.0 / rate_per_s, size=count)
    times = np.cumsum(gaps)
    return tuple(float(t) for t in times * (count / rate_per_s / times[-1]))


def with_arrivals(requests: Sequence[Request], rate_per_s: float, seed: int) -> tuple[Request, ...]:
    """The same requests arriving as a Poisson process."""
    times = poisson_arrivals(len(requests), rate_per_s, seed)
    return tuple(dataclasses.replace(request, arrival_s=t) for request, t in zip(requests, times, strict=True))


def decode_context_tokens(requests: Sequence[Request]) -> float:
    """Mean context of a decode step over the whole workload: every generated token counts once."""
    total = math.fsum(r.output_tokens * (r.prompt_tokens + (r.output_tokens + 1) / 2) for r in requests)
    return total / math.fsum(r.output_tokens for r in requests)


def workload_sha256(requests: Sequence[Request]) -> str:
    """Identity of a workload (lengths, prompts and arrivals)."""
    return hashlib.sha256(_to_jsonl(requests)).hexdigest()


def _to_jsonl(requests: Sequence[Request]) -> bytes:
    lines = []
    for request in requests:
        fields = {key: value for key, value in dataclasses.asdict(request).items() if value is not None}
        lines.append(json.dumps(fields, ensure_ascii=False))
    return ("\n".join(lines) + "\n").encode()


def write_workload(path: Path | str, requests: Sequence[Request]) -> None:
    """Write a workload file (whole or not at all)."""
    write_atomically(Path(path), _to_jsonl(requests))


def read_workload(path: Path | str, count_tokens: Callable[[str], int] | None = None) -> tuple[Request, ...]:
    """Read a workload file.

    Args:
        path: JSON lines.
        count_tokens: length of a prompt in tokens, for files that give only its text.

    Raises:
        LoopKVError: unreadable, empty, or a line that is not a request (named by its number).
    """
    path = Path(path)
    size_bytes = check_input_file(path, "workload", LoopKVError, "a readable JSON-lines file")
    if size_bytes > MAX_WORKLOAD_BYTES:
        raise LoopKVError(f"workload {path}", got=f"{size_bytes} bytes", wanted=f"<= {MAX_WORKLOAD_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else str(error)[:120]
        raise LoopKVError(f"workload {path}", got=got, wanted="a readable JSON-lines file") from None
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            requests.append(_parse_line(line, f"workload {path}, line {number}", count_tokens))
    if not requests:
        raise LoopKVError(f"workload {path}", got="no request", wanted="at least one line")
    timed = sum(request.arrival_s is not None for request in requests)
    if timed not in (0, len(requests)):
        raise LoopKVError(
            f"workload {path}", got=f"{timed} of {len(requests)} lines with arrival_s", wanted="all or none"
        )
    return tuple(requests)


def _parse_line(line: str, where: str, count_tokens: Callable[[str], int] | None) -> Request:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LoopKVError(where, got=f"broken JSON ({str(error)[:80]})", wanted="a JSON object") from None
    if not isinstance(data, dict):
        raise LoopKVError(where, got=f"a JSON {type(data).__name__}", wanted="a JSON object")
    prompt = data.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise LoopKVError(f"{where}: prompt", got=repr(prompt)[:80], wanted="text")
    if data.get("prompt_tokens") is None and prompt is not None and count_tokens is not None:
        data = {**data, "prompt_tokens": count_tokens(prompt)}
    for name in ("prompt_tokens", "output_tokens"):
        value = data.get(name)
        if type(value) is not int or not 1 <= value <= MAX_LENGTH_TOKENS:
            raise LoopKVError(
                f"{where}: {name}",
                got=repr(value)[:80],
                wanted="a whole number of tokens >= 1",
                hint="give a tokenizer to count prompts" if value is None and name == "prompt_tokens" else None,
            )
    arrival = data.get("arrival_s")
    if arrival is not None and not (type(arrival) in (int, float) and math.isfinite(arrival) and arrival >= 0):
        raise LoopKVError(f"{where}: arrival_s", got=repr(arrival)[:80], wanted="seconds >= 0")
    return Request(data["prompt_tokens"], data["output_tokens"], prompt, None if arrival is None else float(arrival))
