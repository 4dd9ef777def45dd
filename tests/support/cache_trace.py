"""Random traffic for the engine-free run: arrivals, shared prefixes, turns, pairs, aborts, on a starved pool."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from loopkv.policy import Policy
from loopkv.residency import Residency
from support.engine_free import VOCABULARY, EngineFreeRun, EngineSettings, make_specs, make_vllm_config

POLICIES = (
    Policy(),
    Policy(),
    Policy(sink_tokens=32, window_tokens=64, page_tokens=32),
    Policy(sink_tokens=0, window_tokens=96, page_tokens=32),
    Policy(sink_tokens=64, window_tokens=160, page_tokens=32),  # the window is no multiple of most history blocks
    Policy(sink_tokens=32, window_tokens=100, page_tokens=16),
)
HISTORY_BLOCKS = (32, 64, 128, 256)
WINDOW_BLOCKS = (10, 8, 5, 4, 12, 16, 32, 6, 7)  # what layouts choose, mostly
OTHER_WINDOW_BLOCKS = tuple(tokens for tokens in range(4, 33) if tokens not in WINDOW_BLOCKS)
BLOCK_PAIRS = len(HISTORY_BLOCKS) * len(WINDOW_BLOCKS)  # both numbers are coprime: so many seeds take every pair
CHUNKS = (256, 16, 64, 128, 100)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """A trace: an engine and the traffic that it gets."""

    seed: int
    engine: EngineSettings
    steps: int = 400
    arrival_rate: float = 0.13
    abort_rate: float = 0.03
    longest_prompt: int = 1000
    longest_answer: int = 300


@dataclass(slots=True)
class Traffic:
    """Draws requests. The same few documents come again and again, so that prefixes are shared."""

    settings: TraceSettings
    rng: random.Random
    documents: list[list[int]] = field(default_factory=list)
    aborted: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        longest = self.settings.longest_prompt
        self.documents = [self._tokens(self.rng.randrange(longest // 8, longest)) for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def prompt(self, run: EngineFreeRun) -> list[int]:
        """A part of a document and some words; or the next turn of a finished request; or an aborted prompt again."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.3 and run.finished:
            prompt = rng.choice(list(run.finished.values())).tokens + self._tokens(rng.randrange(1, 150))
        elif kind < 0.4 and self.aborted:
            prompt = rng.choice(self.aborted)
        else:
            document = rng.choice(self.documents)
            prompt = document[: rng.randrange(1, len(document) + 1)] + self._tokens(rng.randrange(120))
        return prompt[: self.settings.engine.max_model_tokens - 2] or [1]

    def act(self, run: EngineFreeRun) -> None:
        """What users do before the next step."""
        rng, settings = self.rng, self.settings
        if rng.random() < settings.arrival_rate and len(run.work) < 24:
            prompt, answer = self.prompt(run), rng.randrange(1, settings.longest_answer)
            priority, stop = rng.randrange(3), (rng.randrange(VOCABULARY), rng.randrange(VOCABULARY))
            for seed in range(2 if rng.random() < 0.3 else 1):  # a pair is one prompt with n = 2
                run.add(prompt, answer, seed=seed, priority=priority, stop=stop)
        if rng.random() < settings.abort_rate and run.work:
            name = rng.choice(sorted(run.work))
            self.aborted.append(list(run.work[name].request.prompt_token_ids or []))
            run.abort(name)


def smallest_pool(engine: EngineSettings) -> int:
    """Blocks with which vLLM agrees to start: one request of the greatest length, and the null block."""
    config = make_vllm_config(engine)
    specs = make_specs(engine, config)
    return sum(spec.max_memory_usage_bytes(config) for spec in specs.values()) // engine.block_bytes


def window_block(seed: int) -> int:
    """Window block of a trace: every pair with a history block first, then every other size from 4 to 32 tokens."""
    if seed < BLOCK_PAIRS:
        return WINDOW_BLOCKS[seed % len(WINDOW_BLOCKS)]
    return OTHER_WINDOW_BLOCKS[seed % len(OTHER_WINDOW_BLOCKS)]


def trace_settings(seed: int) -> TraceSettings:
    """Trace number ``seed``: history and window blocks, chunk and policy take all their values in turn."""
    rng = random.Random(seed)
    policy = POLICIES[seed // 4 % len(POLICIES)]
    residency = Residency(policy, HISTORY_BLOCKS[seed % 4], window_block(seed))
    chunk = min(CHUNKS[seed % len(CHUNKS)], policy.max_exact_chunk_tokens)
    engine = EngineSettings(
        residency,
        blocks=1,
        max_model_tokens=1536,
        batch_tokens=rng.choice((128, 512, 1024)),
        chunk_tokens=chunk,
        max_requests=rng.choice((4, 16)),
        priority=rng.random() < 0.4,
        overlap=rng.random() < 0.5,
        caching=rng.random() < 0.9,
        runner_v2=rng.random() < 0.3,
        watermark=rng.choice((0.0, 0.0, 0.05)),
    )
    # From the smallest pool that vLLM starts with to one that holds a few requests.
    smallest = smallest_pool(engine)
    engine = dataclasses.replace(engine, blocks=smallest + rng.choice((0, 1, smallest // 4, smallest)))
    return TraceSettings(seed, engine)


def long_chunk_settings(seed: int) -> TraceSettings:
    """Chunks of up to 2,048 tokens, whose leaving tokens have null window blocks: plans without shared cells."""
    rng = random.Random(seed)
    policy = POLICIES[seed % len(POLICIES)]
    residency = Residency(policy, HISTORY_BLOCKS[seed % 4], WINDOW_BLOCKS[seed % len(WINDOW_BLOCKS)])
    engine = EngineSettings(
        residency,
        blocks=1,
        max_model_tokens=4096,
        batch_tokens=rng.choice((2048, 3000)),
        chunk_tokens=2048,
        priority=rng.random() < 0.4,
        overlap=rng.random() < 0.5,
        caching=rng.random() < 0.9,
        null_leaving=True,
        runner_v2=rng.random() < 0.3,
    )
    smallest = smallest_pool(engine)
    engine = dataclasses.replace(engine, blocks=smallest + rng.choice((0, 1, smallest // 4, smallest)))
    return TraceSettings(seed, engine, longest_prompt=3600, longest_answer=400)


def run_trace(settings: TraceSettings) -> EngineFreeRun:
    """Run a trace to its end; anything wrong raises ``DeviceError``."""
    run = EngineFreeRun(settings.engine)
    traffic = Traffic(settings, random.Random(settings.seed + 1))
    for _ in range(settings.steps):
        traffic.act(run)
        run.step()
    run.drain()
    return run
