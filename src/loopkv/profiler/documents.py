"""Documents to measure on: token sequences long enough to have a history, read from a file as hostile input."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from loopkv.artifacts import DocumentInfo
from loopkv.artifacts.storage import digest
from loopkv.errors import DocumentError
from loopkv.paths import check_input_file
from loopkv.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEXT_BYTES = 256 << 20
SUFFIXES = (".jsonl", ".jsonl.xz", ".txt")


@dataclass(frozen=True)
class Document:
    """Token ids of one document and where they came from."""

    source: str
    ids: tuple[int, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of the ids (little-endian int64)."""
        return hashlib.sha256(np.asarray(self.ids, dtype="<i8").tobytes()).hexdigest()

    def info(self, policy: Policy) -> DocumentInfo:
        """What a profile says about the document."""
        scored = len(self.ids) - policy.first_coded_position
        return DocumentInfo(source=self.source[:512], sha256=self.sha256, tokens=len(self.ids), scored_positions=scored)


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents chosen from a source, and how many were passed over because no query of theirs has a history."""

    documents: tuple[Document, ...]
    too_short: int


def documents_sha256(documents: Sequence[Document]) -> str:
    """Identity of a list of documents, in order."""
    return digest([document.sha256 for document in documents])


def min_document_tokens(policy: Policy) -> int:
    """Fewest tokens with one scored position (320 with the default constants)."""
    return policy.first_coded_position + 1


def load_documents(
    path: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    policy: Policy,
    vocab_size: int,
    max_tokens: int,
    skip: int = 0,
    limit: int | None = None,
) -> Selection:
    """Tokenize documents ``[skip, skip + limit)`` of a file, each cut to ``max_tokens``.

    Args:
        path: JSON lines with a ``text`` field (``.jsonl``, ``.jsonl.xz``), or one document of plain text (``.txt``).
        tokenizer: of the model.
        policy: decides which documents are too short; they are passed over and not counted by ``skip`` and ``limit``.
        vocab_size: of the model; a larger id means another model's tokenizer.
        max_tokens: longest document.
        skip, limit: which of the long enough documents.

    Raises:
        DocumentError: an unreadable file, a line without text, no document that is long enough.
    """
    path = Path(path)
    wanted = min_document_tokens(policy)
    check_max_tokens(max_tokens, policy)
    if limit is not None and limit < 1:
        raise DocumentError("number of documents", got=limit, wanted=">= 1")
    kept: list[Document] = []
    too_short = passed = longest = 0
    for number, text in enumerate(_texts(path), start=1):
        ids = [int(i) for i in tokenizer(text).input_ids[:max_tokens]]
        if any(not 0 <= i < vocab_size for i in ids):
            raise DocumentError(
                f"document {number} of {path}",
                got=f"token id {max(ids)}",
                wanted=f"ids below the model's vocabulary of {vocab_size}",
                hint="the tokenizer belongs to another model",
            )
        longest = max(longest, len(ids))
        if len(ids) < wanted:
            too_short += 1
            continue
        passed += 1
        if passed > skip:
            kept.append(Document(f"{path.name}#{number}", tuple(ids)))
        if limit is not None and len(kept) == limit:
            break
    if not kept:
        short = f"the longest has {longest} tokens" if passed == 0 else f"only {passed} that are long enough"
        raise DocumentError(
            f"documents {path}",
            got=short,
            wanted=f"more than {skip} documents of at least {wanted} tokens (sink + window + one page)",
            hint="give longer documents",
        )
    return Selection(tuple(kept), too_short)


def check_max_tokens(max_tokens: int, policy: Policy) -> None:
    """Refuse a document length at which nothing would be coded (DocumentError)."""
    if max_tokens < min_document_tokens(policy):
        raise DocumentError(
            "document length",
            got=f"{max_tokens} tokens",
            wanted=f"at least {min_document_tokens(policy)}, below which nothing is coded",
        )


def _texts(path: Path) -> Iterator[str]:
    if not path.name.endswith(SUFFIXES):
        raise DocumentError(f"documents {path}", got=f"suffix {path.suffix!r}", wanted=" or ".join(SUFFIXES))
    size_bytes = check_input_file(path, "documents", DocumentError)
    if size_bytes > MAX_TEXT_BYTES:
        raise DocumentError(f"documents {path}", got=f"{size_bytes} bytes", wanted=f"<= {MAX_TEXT_BYTES}")
    try:
        if path.name.endswith(".txt"):
            yield path.read_text(encoding="utf-8")
            return
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            yield from _json_texts(_lines(file, path), path)
    except UnicodeDecodeError:
        raise DocumentError(f"documents {path}", got="bytes that are not UTF-8", wanted="UTF-8 text") from None
    except (OSError, lzma.LZMAError, EOFError) as problem:
        reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem) or "a broken file"
        raise DocumentError(f"documents {path}", got=reason, wanted="a readable file") from None


def _lines(file: IO[bytes], path: Path) -> Iterator[str]:
    """Lines of at most ``MAX_TEXT_BYTES`` in all: a few KiB of xz can unpack to any size, even in one line."""
    left_bytes = MAX_TEXT_BYTES
    while line := file.readline(left_bytes + 1):
        left_bytes -= len(line)
        if left_bytes < 0:
            raise DocumentError(
                f"documents {path}",
                got=f"more than {MAX_TEXT_BYTES} bytes of text",
                wanted="no more",
                hint="give fewer documents; --limit stops reading early",
            )
        yield line.decode("utf-8")


def _json_texts(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DocumentError(f"documents {path}, line {number}", got="broken JSON", wanted="a JSON object") from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise DocumentError(
                f"documents {path}, line {number}", got="no text", wanted="an object with a string 'text'"
            )
        yield text
