"""The documents of a command: a file of texts, or the model's own generations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopkv.cli.progress import progress
from loopkv.errors import DocumentError
from loopkv.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from loopkv.models import LoopedModel
    from loopkv.profiler import Document

DEFAULT_LIMIT = 16
DEFAULT_TOKENS = 1536


def check_documents_file(path: Path | None) -> Path | None:
    """``path`` if something is there; the error comes before a model is loaded (DocumentError)."""
    if path is not None and not path.exists():
        raise DocumentError(f"documents {path}", got="no such file", wanted="a file of texts", hint="check the path")
    return path


DocumentsOption = Annotated[
    Path | None,
    typer.Option(
        "--documents",
        help="Texts to measure on: .jsonl or .jsonl.xz with a 'text' field, or .txt. Default: the model's own text.",
    ),
]
PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="Prompts for the model's own text, one a line (without --documents).")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Number of documents.")]
SkipOption = Annotated[int, typer.Option("--skip", min=0, help="Pass over this many documents of the file first.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Cut documents to this many tokens.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling and of the bootstrap.")]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Documents that run together. Default: as many as fit, at most 8."),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: see the options above."""

    documents: Path | None
    prompts: Path | None = None
    skip: int = 0
    limit: int = DEFAULT_LIMIT
    max_tokens: int = DEFAULT_TOKENS
    seed: int = 0


def collect(
    request: Request, model: LoopedModel, tokenizer: PreTrainedTokenizerBase, policy: Policy
) -> tuple[Document, ...]:
    """The documents of ``request``; says how many were too short.

    Raises:
        DocumentError: none is usable, or options that exclude each other.
    """
    from loopkv.profiler import load_documents, own_documents, read_prompts
    from loopkv.profiler.documents import min_document_tokens

    if request.documents is not None:
        if request.prompts is not None:
            raise DocumentError("--prompts", got="--documents too", wanted="one of them")
        selection = load_documents(
            request.documents,
            tokenizer,
            policy=policy,
            vocab_size=model.vocab_size,
            max_tokens=min(request.max_tokens, model.max_positions),
            skip=request.skip,
            limit=request.limit,
        )
        source = str(request.documents)
    else:
        if request.skip:
            raise DocumentError("--skip", got="no --documents", wanted="a file of documents")
        prompts = () if request.prompts is None else read_prompts(request.prompts)
        with progress("own documents") as report:
            selection = own_documents(
                model,
                tokenizer,
                count=request.limit,
                tokens=request.max_tokens,
                prompts=prompts,
                seed=request.seed,
                policy=policy,
                on_generated=lambda done, total, attempt: report(done, total, f"tokens, batch {attempt}"),
            )
        source = f"{model.name}'s own text (seed {request.seed})"
    from loopkv.cli._render import counted

    tokens = sum(len(document.ids) for document in selection.documents)
    typer.echo(f"{counted(len(selection.documents), 'document')}, {tokens:,} tokens, from {source}", err=True)
    if selection.too_short:
        typer.echo(
            f"warning: {selection.too_short} were passed over: shorter than {min_document_tokens(policy)} tokens, "
            "below which nothing is coded",
            err=True,
        )
    if len(selection.documents) < request.limit:
        typer.echo(
            f"warning: {counted(len(selection.documents), 'document')} where {request.limit} were asked for", err=True
        )
    return selection.documents
