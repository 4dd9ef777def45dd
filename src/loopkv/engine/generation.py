"""``generate(model, tokenizer, prompts, plan)``: text from a compressed cache, several prompts at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from loopkv.artifacts import Fingerprint, Plan
from loopkv.engine.paged_cache import CachedRequest
from loopkv.engine.paged_engine import NewTokens, PagedEngine, pool_blocks
from loopkv.engine.text_stream import TextStream
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.layout import lay_out
from loopkv.models.base import LoopedModel
from loopkv.planner.named import named_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP_TOKENS = 1024
"""New tokens that prefill puts into one step, over all requests."""

Finish = Literal["end", "stop", "length"]
OnText = Callable[[int, str], None]
"""``on_text(prompt, text)``: text of a continuation that has become certain."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the most likely token.
        top_p: smallest set of most likely tokens to sample from, by its probability.
        seed: of the continuation of prompt 0; prompt i uses ``seed + i``, whatever runs beside it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UnsupportedError("temperature", got=self.temperature, wanted="a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise UnsupportedError("top_p", got=self.top_p, wanted="a number above 0 and at most 1")
        if not 0 <= self.seed < 1 << 63:
            raise UnsupportedError("seed", got=self.seed, wanted="a whole number from 0 to 2^63 - 1")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token id of logits [V]; drawn in fp64 on the host, so that a seed means the same everywhere."""
        if self.temperature == 0:
            return greedy(logits)
        _check_finite(logits)
        probabilities = torch.softmax(logits.double().cpu() / self.temperature, dim=-1)
        if self.top_p < 1:
            ranked, order = probabilities.sort(descending=True, stable=True)
            ranked[ranked.cumsum(0) - ranked >= self.top_p] = 0.0  # the token that crosses top_p stays
            probabilities = torch.zeros_like(probabilities).scatter(0, order, ranked)
        return int(torch.multinomial(probabilities, 1, generator=generator))


def greedy(logits: Tensor) -> int:
    """The most likely token of logits [V]."""
    _check_finite(logits)
    return int(logits.argmax())


def _check_finite(logits: Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise LoopKVError("logits", got="values that are not finite", wanted="finite logits")


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation and what its cache held when it ended.

    Args:
        text: without the stop string.
        token_ids: tokens generated, without an end token.
        prompt_tokens: length of the prompt.
        finish: why it ended: ``end`` (end token), ``stop`` (stop string) or ``length``.
        cached_tokens: tokens whose keys and values were held.
        stored_bytes: bytes of those: codes, scales, sink and window.
        held_bytes: the same with padding and unused places of its blocks.
        exact_bytes: what the same tokens take when nothing is coded, in the same dtype.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish: Finish
    cached_tokens: int
    stored_bytes: int
    held_bytes: int
    exact_bytes: int


OnEnd = Callable[[int, Completion], None]
"""``on_end(prompt, completion)``: a continuation has ended; all its text has been told."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Continuations in the order of the prompts, and how long they took.

    Args:
        completions: one per prompt.
        plan: the plan served.
        prefill_tokens, prefill_s: prompt tokens and the seconds they took.
        decode_tokens, decode_s: generated tokens that were fed back, and seconds.
        hot_share: share of int4 history reads of both value planes; None without V precision.
    """

    completions: tuple[Completion, ...]
    plan: Plan
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    hot_share: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of decoding, over all prompts together; None where nothing was decoded."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None


@dataclass(slots=True, eq=False)
class Continuation:
    """A text in progress.

    Args:
        prompt: its prompt's ids.
        request: where its keys and values lie.
        stream: its text.
        ends: token ids that end it.
        max_tokens: where it ends at the latest.
        tokens: ids written so far, without an end token.
        finish: why it has ended; None while it goes on.
    """

    prompt: list[int]
    request: CachedRequest
    stream: TextStream
    ends: frozenset[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, token: int) -> str:
        """Write one more token; returns the text that has become certain. Sets ``finish`` where the text ends."""
        if token in self.ends:
            text = self.stream.finish()
            self.finish = "end"
        else:
            self.tokens.append(token)
            text = self.stream.push(token)
            if not self.stream.stopped and len(self.tokens) == self.max_tokens:
                text += self.stream.finish()
                self.finish = "length"
        if self.stream.stopped:
            self.finish = "stop"
        return text


def generate(
    model: LoopedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    plan: Plan | None = None,
    *,
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    batch: int = 8,
    on_text: OnText | None = None,
    on_end: OnEnd | None = None,
) -> Generation:
    """Continue every prompt from a cache stored under ``plan``.

    A prompt's continuation does not depend on the others: at most ``batch`` run at once, and the next prompt takes
    the place of one that has ended.

    Args:
        model, tokenizer: the model and its tokenizer.
        prompts: texts to continue.
        plan: storage of the history; bf16 (everything exact) by default.
        max_tokens: longest continuation.
        sampling: greedy by default.
        stop: strings that end a continuation.
        batch: prompts that run at once.
        on_text: told about text as it becomes certain.
        on_end: told about each continuation that has ended.

    Raises:
        PlanMismatchError: a plan of another geometry.
        UnsupportedError: a prompt and continuation beyond the model's positions, or senseless options.
        LoopKVError: no prompts, or one without tokens.
    """
    sampling = sampling or Sampling()
    _check_options(prompts, max_tokens, stop, batch)
    plan = plan or named_plan("bf16", Fingerprint(name=model.name, geometry=model.geometry))
    encoded = [encode_prompt(model, tokenizer, prompt, max_tokens) for prompt in prompts]
    layout = lay_out(plan, exact_itemsize=model.dtype.itemsize)
    longest = sorted((len(ids) + max_tokens for ids in encoded), reverse=True)[:batch]
    engine = PagedEngine(
        model, plan, blocks=pool_blocks(layout, longest, plan.policy.max_exact_chunk_tokens), layout=layout
    )
    ends = end_tokens(model, tokenizer)
    waiting = [
        (index, Continuation(ids, engine.new_request(), TextStream(tokenizer, ids, stop), ends, max_tokens))
        for index, ids in enumerate(encoded)
    ]
    generators = [torch.Generator().manual_seed((sampling.seed + index) % (1 << 63)) for index in range(len(encoded))]
    running: list[tuple[int, Continuation, Tensor]] = []  # with the logits of the next token
    completions: dict[int, Completion] = {}
    prefill_s = decode_s = 0.0
    decode_tokens = 0
    while waiting or running:
        started = time.perf_counter()
        admitted, waiting = waiting[: batch - len(running)], waiting[batch - len(running) :]
        if admitted:
            logits = prefill(engine, [NewTokens(text.request, text.prompt) for _, text in admitted])
            running += [(index, text, its) for (index, text), its in zip(admitted, logits, strict=True)]
            prefill_s += time.perf_counter() - started
            started = time.perf_counter()
        writing: list[tuple[int, Continuation]] = []
        for index, text, its in running:
            piece = text.take(sampling.choose(its, generators[index]))
            if on_text is not None and piece:
                on_text(index, piece)
            if text.finish is None:
                writing.append((index, text))
                continue
            completions[index] = _complete(engine, text, text.finish)
            engine.release(text.request)
            if on_end is not None:
                on_end(index, completions[index])
        running = []
        if writing:
            logits = engine.step([NewTokens(text.request, text.tokens[-1:]) for _, text in writing])
            running = [(index, text, its) for (index, text), its in zip(writing, logits, strict=True)]
            decode_tokens += len(writing)
        decode_s += time.perf_counter() - started
    return Generation(
        completions=tuple(completions[index] for index in range(len(prompts))),
        plan=plan,
        prefill_tokens=sum(map(len, encoded)),
        prefill_s=prefill_s,
        decode_tokens=decode_tokens,
        decode_s=decode_s,
        hot_share=engine.hot.hot / engine.hot.total if engine.hot.total else None,
    )


def end_tokens(model: LoopedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a text, by the model's config or its tokenizer."""
    return frozenset(i for i in (*model.eos_token_ids, tokenizer.eos_token_id) if isinstance(i, int))


def encode_prompt(model: LoopedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_tokens: int) -> list[int]:
    """Token ids of a prompt that leaves room for ``max_tokens`` more.

    Raises:
        LoopKVError: no tokens, or tokens the model does not know.
        UnsupportedError: beyond the model's positions.
    """
    ids = [int(i) for i in tokenizer(prompt).input_ids]
    name = f"prompt {prompt[:40]!r}"
    if not ids:
        raise LoopKVError(name, got="no tokens", wanted="text")
    if max(ids) >= model.vocab_size:
        raise LoopKVError(
            name,
            got=f"token id {max(ids)}",
            wanted=f"ids below the model's vocabulary of {model.vocab_size}",
            hint="use the checkpoint's own tokenizer",
        )
    if len(ids) + max_tokens > model.max_positions:
        raise UnsupportedError(
            name,
            got=f"{len(ids)} tokens and up to {max_tokens} new ones",
            wanted=f"at most {model.max_positions} positions of model {model.name} in all",
            hint="shorten the prompt or ask for fewer tokens (--max-tokens)",
        )
    return ids


def prefill(engine: PagedEngine, rows: Sequence[NewTokens], step_tokens: int = STEP_TOKENS) -> list[Tensor]:
    """Feed each row's tokens in chunks of at most W tokens, several rows a step; returns each row's last logits [V].

    Chunks are the same whatever runs beside a row.
    """
    chunk = engine.policy.max_exact_chunk_tokens
    logits: list[Tensor | None] = [None] * len(rows)
    fed = [0] * len(rows)
    while True:
        step: list[tuple[int, int]] = []
        room = max(step_tokens, chunk)
        for index, (_, ids) in enumerate(rows):
            size = min(chunk, len(ids) - fed[index])
            if 0 < size <= room:
                step.append((index, size))
                room -= size
        if not step:
            break
        new = [NewTokens(rows[i].request, rows[i].ids[fed[i] : fed[i] + size]) for i, size in step]
        for (index, size), its in zip(step, engine.step(new), strict=True):
            fed[index] += size
            logits[index] = its
    return [its for its in logits if its is not None]


def _check_options(prompts: Sequence[str], max_tokens: int, stop: Sequence[str], batch: int) -> None:
    if not prompts:
        raise LoopKVError("prompts", got="none", wanted="at least one")
    if max_tokens < 1 or batch < 1:
        raise UnsupportedError("generate", got=f"max_tokens {max_tokens}, batch {batch}", wanted="both at least 1")
    if any(not text for text in stop):
        raise UnsupportedError("stop string", got="an empty one", wanted="text")


def _complete(engine: PagedEngine, text: Continuation, finish: Finish) -> Completion:
    cached = text.request.tokens
    return Completion(
        text=text.stream.text,
        token_ids=tuple(text.tokens),
        prompt_tokens=len(text.prompt),
        finish=finish,
        cached_tokens=cached,
        stored_bytes=engine.cache.stored_bytes(text.request),
        held_bytes=engine.cache.held_bytes(text.request),
        exact_bytes=cached * engine.layout.window_token_bytes,
    )
