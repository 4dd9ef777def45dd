"""``loopkv generate``: continue prompts from a compressed cache."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.model import ModelArgument
from loopkv.errors import LoopKVError

if TYPE_CHECKING:
    from loopkv.engine.generation import Completion, Generation

MAX_PROMPT_BYTES = 64 << 20


class Dtype(StrEnum):
    """What the reference engine computes and stores in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def generate(
        model: ModelArgument,
        plan: Annotated[str, typer.Option("--plan", help="Plan file, or a name such as kivi4.")] = "bf16",
        prompt: Annotated[list[str] | None, typer.Option("--prompt", help="Text to continue; may be repeated.")] = None,
        prompt_file: Annotated[
            list[str] | None, typer.Option("--prompt-file", help="File with one prompt, or - for standard input.")
        ] = None,
        max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest continuation.")] = 128,
        temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
        top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this probability.")] = 1.0,
        seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
        stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends a continuation.")] = None,
        batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts that run at once.")] = 8,
        dtype: Annotated[Dtype, typer.Option(help="Of weights, activations and whatever stays exact.")] = Dtype.float32,
        device: Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda.")] = "cpu",
        accept_weights: Annotated[
            bool, typer.Option("--accept-weights", help="Allow a plan made for a sibling checkpoint.")
        ] = False,
    ) -> None:
        """Continue prompts with the reference engine, which really stores coded pages.

        Text goes to standard output as it comes, one prompt after the other; what the cache held to standard error.

        Example: [bold]loopkv generate Ouro-1.4B --plan plan.json --prompt "The capital of France is"[/bold]
        """
        import torch

        from loopkv.engine.generation import Sampling
        from loopkv.engine.generation import generate as continue_prompts
        from loopkv.models import fingerprint_model, load_model, load_tokenizer, resolve_device
        from loopkv.planner.lookup import load_or_name

        sampling = Sampling(temperature, top_p, seed)
        prompts = [*(prompt or []), *(read_prompt(name) for name in prompt_file or [])]
        for number, text in enumerate(prompts, 1):
            if any("\ud800" <= character <= "\udfff" for character in text):  # bytes of an argument
                raise LoopKVError(f"prompt {number}", got="bytes that are not UTF-8", wanted="UTF-8 text")
        if not prompts:
            raise LoopKVError("loopkv generate", got="no prompt", wanted="--prompt TEXT or --prompt-file FILE")
        fingerprint = fingerprint_model(model)
        chosen, _ = load_or_name(plan, fingerprint)
        chosen.check_serves(fingerprint, accept_weights=accept_weights)
        output = OrderedOutput(len(prompts))
        result = continue_prompts(
            load_model(model, getattr(torch, dtype.value), resolve_device(device)),
            load_tokenizer(model),
            prompts,
            chosen,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop or (),
            batch=batch,
            on_text=output.text,
            on_end=output.end,
        )
        typer.echo(describe(result), err=True)


def read_prompt(name: str) -> str:
    """The text of a prompt file, or of standard input for ``-``.

    Raises:
        LoopKVError: unreadable, empty, too large or not UTF-8.
    """
    what = "prompt from standard input" if name == "-" else f"prompt file {name}"
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as problem:
        raise LoopKVError(what, got=problem.strerror, wanted="a readable text file") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise LoopKVError(what, got=f"more than {MAX_PROMPT_BYTES} bytes", wanted="a prompt")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise LoopKVError(what, got="bytes that are not UTF-8", wanted="UTF-8 text") from None
    if not text:
        raise LoopKVError(what, got="nothing", wanted="text")
    return text


class OrderedOutput:
    """Writes continuations that grow at the same time to standard output, one after the other."""

    def __init__(self, prompts: int) -> None:
        self._pending = [""] * prompts
        self._ended = [False] * prompts
        self._current = 0
        self._begin()

    def text(self, index: int, text: str) -> None:
        """More text of one continuation."""
        if index == self._current:
            self._write(text)
        else:
            self._pending[index] += text

    def end(self, index: int, _: Completion) -> None:
        """One continuation has ended."""
        self._ended[index] = True
        while self._current < len(self._ended) and self._ended[self._current]:
            self._write("\n")
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        if self._current < len(self._pending):
            if len(self._pending) > 1:
                self._write(f"== prompt {self._current + 1}\n")
            self._write(self._pending[self._current])

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def describe(result: Generation) -> str:
    """What the cache held when each continuation ended, and how fast it went."""
    lines = []
    for index, done in enumerate(result.completions, 1):
        stored, exact, held = (f"{n / 2**20:.2f} MiB" for n in (done.stored_bytes, done.exact_bytes, done.held_bytes))
        lines.append(
            f"prompt {index}: {done.prompt_tokens} + {len(done.token_ids)} tokens ({done.finish}); plan "
            f"{result.plan.name} keeps {done.cached_tokens} tokens in {stored} ({held} of blocks), exact {exact} "
            f"({done.exact_bytes / done.stored_bytes:.2f}x)"
        )
    speed = f"prefill {result.prefill_tokens} tokens in {result.prefill_s:.1f} s"
    if result.tokens_per_s is not None:
        speed += f", decode {result.decode_tokens} tokens at {result.tokens_per_s:.1f} tokens/s"
    if result.hot_share is not None:
        speed += f", {result.hot_share:.1%} of int4 history values read in full"
    return "\n".join([*lines, speed])
