"""The model's own long generations: the documents a profile is measured on when the user gives none.

A cache is read while the model writes, so its own text is what the profile should weigh (paper section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopkv.engine.whole_sequence import SequenceRun, exact_reads
from loopkv.errors import DocumentError
from loopkv.models.base import LoopedModel
from loopkv.paths import check_input_file
from loopkv.policy import DEFAULT_POLICY, Policy
from loopkv.profiler.documents import MAX_TEXT_BYTES, Document, Selection, check_max_tokens, min_document_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnGenerated = Callable[[int, int, int], None]
"""``on_generated(tokens, total, attempt)``: positions of the running batch written so far, of at most ``total``."""


def read_prompts(path: Path | str) -> list[str]:
    """Lines of a prompts file that are not blank (DocumentError for anything else)."""
    path = Path(path)
    size_bytes = check_input_file(path, "prompts", DocumentError, "a readable text file")
    if size_bytes > MAX_TEXT_BYTES:
        raise DocumentError(f"prompts {path}", got=f"{size_bytes} bytes", wanted=f"<= {MAX_TEXT_BYTES}")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise DocumentError(f"prompts {path}", got="bytes that are not UTF-8", wanted="UTF-8 text") from None
    except OSError as problem:
        raise DocumentError(f"prompts {path}", got=problem.strerror, wanted="a readable text file") from None
    if not lines:
        raise DocumentError(f"prompts {path}", got="no line of text", wanted="one prompt a line")
    return lines


def own_documents(
    model: LoopedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 16,
    tokens: int = 1536,
    prompts: Sequence[str] = (),
    temperature: float = 1.0,
    seed: int = 0,
    attempts: int = 3,
    policy: Policy = DEFAULT_POLICY,
    on_generated: OnGenerated | None = None,
) -> Selection:
    """Let the model write ``count`` documents of up to ``tokens`` tokens, prompts included.

    A generation that ends before it has a history is passed over and tried again with fresh samples.

    Args:
        model, tokenizer: the model and its tokenizer.
        count: documents wanted.
        tokens: longest document; cut to the model's own limit.
        prompts: texts to continue, used in turn; the beginning-of-text token alone by default.
        temperature: of sampling; 1 samples the model's own distribution.
        seed: of sampling.
        attempts: batches of ``count`` generations before giving up on the missing ones.
        policy: decides what is too short.
        on_generated: told about progress.

    Raises:
        DocumentError: no generation is long enough to leave the window, or a prompt leaves no room to write.
    """
    tokens = min(tokens, model.max_positions)
    check_max_tokens(tokens, policy)
    if count < 1 or not temperature > 0:
        raise DocumentError("own documents", got=f"count {count}, temperature {temperature}", wanted="both above 0")
    if not 0 <= seed < 1 << 63:
        raise DocumentError("seed", got=seed, wanted="a whole number from 0 to 2^63 - 1")
    starts = [_prompt_ids(model, tokenizer, prompt, tokens) for prompt in prompts] or [_begin(model, tokenizer)]
    generator = torch.Generator().manual_seed(seed)
    kept: list[Document] = []
    written = longest = 0
    for attempt in range(attempts):
        batch = [starts[(written + row) % len(starts)] for row in range(count - len(kept))]

        def report(position: int, attempt: int = attempt) -> None:
            if on_generated is not None:
                on_generated(position, tokens, attempt + 1)

        for ids in _generate(model, batch, tokens, temperature, generator, report):
            written += 1
            longest = max(longest, len(ids))
            if len(ids) >= min_document_tokens(policy):
                kept.append(Document(f"own#{written}:seed{seed}", tuple(ids)))
        if len(kept) == count:
            break
    if not kept:
        raise DocumentError(
            f"generations of {model.name} are too short to leave the window",
            got=f"at most {longest} tokens in {written} generations",
            wanted=f"at least {min_document_tokens(policy)}",
            hint="give texts with --documents, or prompts that ask for long answers with --prompts",
        )
    return Selection(tuple(kept), written - len(kept))


def _begin(model: LoopedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, *model.eos_token_ids):
        if isinstance(token, int) and 0 <= token < model.vocab_size:
            return [token]
    raise DocumentError("tokenizer", got="no beginning-of-text token", wanted="prompts", hint="give --prompts")


def _prompt_ids(model: LoopedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> list[int]:
    ids = [int(i) for i in tokenizer(prompt).input_ids]
    if not ids or any(not 0 <= i < model.vocab_size for i in ids):
        raise DocumentError(f"prompt {prompt[:40]!r}", got="no ids of the model's vocabulary", wanted="text")
    if len(ids) >= tokens:
        raise DocumentError(f"prompt {prompt[:40]!r}", got=f"{len(ids)} tokens", wanted=f"fewer than {tokens}")
    return ids


@torch.inference_mode()
def _generate(
    model: LoopedModel,
    prompts: Sequence[list[int]],
    tokens: int,
    temperature: float,
    generator: torch.Generator,
    report: Callable[[int], None],
) -> list[list[int]]:
    """Continue prompts together, exactly, up to ``tokens`` tokens or an end token (which is left out).

    Rows advance in step: a row whose prompt is longer is fed its own tokens while shorter ones already write.
    """
    shortest = min(len(prompt) for prompt in prompts)
    rows = [list(prompt) for prompt in prompts]
    running = [True] * len(rows)
    run = SequenceRun(model, exact_reads(model.geometry), DEFAULT_POLICY, len(rows), tokens)
    hidden = run.run_block(model.embed(_ids(model, [row[:shortest] for row in rows])), 0)
    for position in range(shortest, tokens):
        sampled = _sample(model.logits(hidden[:, -1]), temperature, generator)
        step = []
        for i, row in enumerate(rows):
            if position < len(row):
                step.append(row[position])
                continue
            running[i] = running[i] and sampled[i] not in model.eos_token_ids
            if running[i]:
                row.append(sampled[i])
            step.append(sampled[i])
        report(position)
        if not any(running) or position == tokens - 1:
            break
        hidden = run.run_block(model.embed(_ids(model, [[token] for token in step])), position)
    return rows


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    """One token a row; drawn on the host so that a seed gives the same numbers on every device."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1).cpu()
    return [int(i) for i in torch.multinomial(probabilities, 1, generator=generator)[:, 0]]


def _ids(model: LoopedModel, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=model.device)


__all__ = ["OnGenerated", "own_documents", "read_prompts"]
