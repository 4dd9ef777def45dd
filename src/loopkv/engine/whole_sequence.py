"""The reference policy for whole sequences: what every query of a known text reads, without pages or a scheduler.

A sequence runs in blocks of at most W tokens through all loops, because a shared cell reads pages of the final loop of
the same run, and within such a block no query needs a page that the block itself completes
(``Policy.max_exact_chunk_tokens``). Keys and values of all cells stay exact in buffers; a page is coded the moment it
leaves the window of the block's last query, from the value as the model's dtype holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values
from loopkv.engine.attention import KV, cold_attention, exact_attention, policy_attention, work_dtype
from loopkv.geometry import Geometry
from loopkv.models.base import LoopedModel
from loopkv.options import Option, check_codable
from loopkv.policy import DEFAULT_POLICY, Policy


class HistoryRead(NamedTuple):
    """Whose history a cell reads and how it is coded: ``bits`` per code, None where it is exact."""

    holder: int
    bits: int | None


def plan_reads(geometry: Geometry, options: Sequence[Option]) -> tuple[HistoryRead, ...]:
    """What every cell reads under one option per cell (a checked plan's): shared cells read their source's codes."""
    reads = []
    for index, option in enumerate(options):
        source = geometry.source_of(index) if option.shares else None
        reads.append(HistoryRead(index, option.bits) if source is None else HistoryRead(source, options[source].bits))
    return tuple(reads)


def exact_reads(geometry: Geometry) -> tuple[HistoryRead, ...]:
    """Every cell reads its own exact history."""
    return tuple(HistoryRead(index, None) for index in range(len(geometry.cells)))


class HotCount(NamedTuple):
    """How many of a cell's (query, kv head, history token) triples read both value planes: [B] int64 per sequence."""

    hot: Tensor
    total: Tensor


@dataclass(slots=True)
class _Decoded:
    """Decoded history of one (holder, bits): tokens [S, S + N), the first ``done - S`` of them filled."""

    k: Tensor
    v: Tensor
    cold: Tensor | None
    done: int


class SequenceRun:
    """A batch of equally long sequences on its way through the cells ``first_cell`` and later.

    Args:
        model: a looped model.
        reads: what every cell reads; cells before ``first_cell`` do not run.
        policy: constants.
        batch, tokens: shape of the sequences.
        first_cell: hidden states are given as they enter this cell.
        tau: V-precision threshold in bits for int4 histories, every query taken as a decode row; None reads both
            value planes.
        prefix: exact keys and values of the cells from ``first_cell`` on for the tokens before the first block.
        lengths: tokens of each sequence that count (the rest is padding on the right); all by default.
    """

    def __init__(
        self,
        model: LoopedModel,
        reads: Sequence[HistoryRead],
        policy: Policy,
        batch: int,
        tokens: int,
        *,
        first_cell: int = 0,
        tau: float | None = None,
        prefix: Sequence[KV] = (),
        lengths: Sequence[int] | None = None,
    ) -> None:
        geometry = model.geometry
        if any(read.bits is not None for read in reads):
            check_codable(geometry.head_dim, policy)
        self._model, self._reads, self._policy, self._tau = model, tuple(reads), policy, tau
        self._first_cell, self._tokens = first_cell, tokens
        shape = (batch, tokens, geometry.kv_heads, geometry.head_dim)
        self._cache = {
            cell: KV(*(torch.empty(shape, dtype=model.dtype, device=model.device) for _ in "kv"))
            for cell in range(first_cell, len(geometry.cells))
        }
        for cell, kv in enumerate(prefix, start=first_cell):
            self._cache[cell].k[:, : kv.k.shape[1]] = kv.k
            self._cache[cell].v[:, : kv.v.shape[1]] = kv.v
        self._decoded: dict[HistoryRead, _Decoded] = {}
        self._first = 0
        self._lengths = torch.tensor(lengths or [tokens] * batch, device=model.device)
        self.hot: dict[int, HotCount] = {}
        """Hot counts of the cells that read an int4 history with tau, as far as blocks have run."""

    @property
    def max_block_tokens(self) -> int:
        """Largest block this run may take: W where a cell reads another's history, else the whole sequence."""
        shares = any(read.holder != cell for cell, read in enumerate(self._reads))
        return self._policy.max_exact_chunk_tokens if shares else self._tokens

    def kv(self, cell: int) -> KV:
        """Exact keys and values of a cell [B, T, H, D] (filled as far as blocks have run)."""
        return self._cache[cell]

    def run_block(self, hidden: Tensor, first: int, on_enter: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Run tokens ``first ..`` through the remaining cells; blocks come in order and leave no gap.

        Args:
            hidden: [B, N, E] as it enters ``first_cell``.
            first: position of the first token.
            on_enter: called with every cell and the hidden states that enter it.

        Returns:
            Hidden states [B, N, E] that ``model.logits`` takes.
        """
        self._first = first
        rotary = self._model.rotary(torch.arange(first, first + hidden.shape[1], device=hidden.device))
        for cell in self._cache:
            if on_enter is not None:
                on_enter(cell, hidden)
            hidden = self._model.run_cell(cell, hidden, rotary, self._attend)
        return hidden

    def _attend(self, cell: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, end = self._first, self._first + q.shape[1]
        cache, read, policy = self._cache[cell], self._reads[cell], self._policy
        cache.k[:, first:end] = k
        cache.v[:, first:end] = v
        history_end = policy.history_end(end)
        if read == (cell, None) or history_end <= policy.sink_tokens:
            return exact_attention(q, cache, first)
        outputs = []
        # A block longer than W (own codes only) is cut again: the mask of one piece stays small.
        for start in range(first, end, policy.max_exact_chunk_tokens):
            stop = min(end, start + policy.max_exact_chunk_tokens)
            rows = q[:, start - first : stop - first]
            sink = _slice(cache, 0, min(policy.sink_tokens, stop))
            recent = _slice(cache, policy.history_end(start + 1), stop)
            history, cold = self._history(read, policy.history_end(stop))
            if self._tau is None or cold is None:
                outputs.append(policy_attention(rows, start, sink, history, recent, policy))
                continue
            o, hot = cold_attention(rows, start, sink, history, cold, recent, policy, self._tau)
            outputs.append(o)
            self._count_hot(cell, hot, start)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _count_hot(self, cell: int, hot: Tensor, first: int) -> None:
        """Add the hot tokens [B, T, H] of queries at positions ``first ..``, padding left out."""
        positions = torch.arange(first, first + hot.shape[1], device=hot.device)
        counts = positions < self._lengths[:, None]  # [B, T]
        ends = [self._policy.history_end(first + 1 + row) for row in range(hot.shape[1])]
        readable = (torch.tensor(ends, device=hot.device) - self._policy.sink_tokens) * hot.shape[2]
        count = HotCount((hot.sum(-1) * counts).sum(-1), (readable * counts).sum(-1))
        before = self.hot.get(cell)
        self.hot[cell] = count if before is None else HotCount(before.hot + count.hot, before.total + count.total)

    def _history(self, read: HistoryRead, end: int) -> tuple[KV, Tensor | None]:
        """Tokens [S, end) of a history as they are read, and the values of its cold reading (int4 with tau only)."""
        sink, source = self._policy.sink_tokens, self._cache[read.holder]
        if read.bits is None:
            return _slice(source, sink, end), None
        decoded = self._decoded.get(read)
        if decoded is None:
            shape = (source.k.shape[0], max(0, self._tokens - sink), *source.k.shape[2:])
            work = work_dtype(source.k.dtype)
            k, v, cold = (torch.empty(shape, dtype=work, device=source.k.device) for _ in range(3))
            keep = self._tau is not None and read.bits == 4
            decoded = self._decoded[read] = _Decoded(k, v, cold if keep else None, sink)
        if decoded.done < end:
            self._code(source, read.bits, decoded, end)
        kv = KV(decoded.k[:, : end - sink], decoded.v[:, : end - sink])
        return kv, None if decoded.cold is None else decoded.cold[:, : end - sink]

    def _code(self, source: KV, bits: int, decoded: _Decoded, end: int) -> None:
        """Code and decode the pages [done, end) of ``source``."""
        policy, begin = self._policy, decoded.done
        pages = (-1, policy.page_tokens)
        keys = encode_keys(source.k[:, begin:end].unflatten(1, pages), bits)
        values = encode_values(source.v[:, begin:end].unflatten(1, pages), bits, policy.group)
        place = slice(begin - policy.sink_tokens, end - policy.sink_tokens)
        decoded.k[:, place] = decode_keys(keys, decoded.k.dtype).flatten(1, 2)
        decoded.v[:, place] = decode_values(values, decoded.v.dtype).flatten(1, 2)
        if decoded.cold is not None:
            everywhere = torch.ones(values.q.shape[:-1], dtype=torch.bool, device=values.q.device)
            decoded.cold[:, place] = decode_values(values, decoded.cold.dtype, cold=everywhere).flatten(1, 2)
        decoded.done = end


@dataclass(frozen=True, slots=True)
class ExactRun:
    """The unperturbed run of a batch, kept so that perturbed runs resume at their first perturbed cell.

    Nothing before ``first_position`` (the first query with a history) depends on any plan.

    Args:
        first_position: position of the first kept token, 319 with the default constants.
        tokens: length of the sequences.
        hidden: states [B, T - first_position, E] that enter a cell, for the cells kept.
        prefix: keys and values [B, first_position, H, D] of every cell.
        final: states [B, T - first_position, E] that ``model.logits`` takes.
    """

    first_position: int
    tokens: int
    hidden: dict[int, Tensor] = field(repr=False)
    prefix: tuple[KV, ...] = field(repr=False)
    final: Tensor = field(repr=False)


@torch.inference_mode()
def run_exact(model: LoopedModel, ids: Tensor, policy: Policy = DEFAULT_POLICY, keep: Iterable[int] = ()) -> ExactRun:
    """Run ids [B, T] without any policy and keep what ``run_perturbed`` resumes from.

    Args:
        model: a looped model.
        ids: token ids; T must exceed ``policy.first_coded_position``.
        policy: constants.
        keep: cells at whose entry hidden states are kept.
    """
    first = policy.first_coded_position
    batch, tokens = ids.shape
    if tokens <= first:
        raise ValueError(f"sequences of {tokens} tokens have no history; wanted more than {first}")
    embedded = model.embed(ids)
    run = SequenceRun(model, exact_reads(model.geometry), policy, batch, tokens)
    shape = (batch, tokens - first, embedded.shape[2])
    hidden = {cell: torch.empty(shape, dtype=embedded.dtype, device=embedded.device) for cell in set(keep)}
    final = torch.empty(shape, dtype=embedded.dtype, device=embedded.device)
    run.run_block(embedded[:, :first], 0)
    for start, end in blocks(first, tokens, policy.max_exact_chunk_tokens):
        place = slice(start - first, end - first)

        def keep_hidden(cell: int, states: Tensor, place: slice = place) -> None:
            if cell in hidden:
                hidden[cell][:, place] = states

        final[:, place] = run.run_block(embedded[:, start:end], start, keep_hidden)
    prefix = tuple(
        KV(run.kv(cell).k[:, :first].clone(), run.kv(cell).v[:, :first].clone())
        for cell in range(len(model.geometry.cells))
    )
    return ExactRun(first, tokens, hidden, prefix, final)


@torch.inference_mode()
def run_perturbed(
    model: LoopedModel,
    exact: ExactRun,
    reads: Sequence[HistoryRead],
    policy: Policy = DEFAULT_POLICY,
    *,
    tau: float | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, dict[int, HotCount]]:
    """Final hidden states [B, T - first_position, E] under ``reads``, resumed at the first cell that reads otherwise.

    The blocks are those of the exact run, so cells that read exact repeat it bit for bit. Also returns the hot counts
    of the cells that read an int4 history (empty without tau), padding beyond ``lengths`` left out.
    """
    differing = [cell for cell, read in enumerate(reads) if read != (cell, None)]
    if not differing:
        return exact.final, {}
    cell = differing[0]
    entering = exact.hidden[cell]
    run = SequenceRun(
        model,
        reads,
        policy,
        entering.shape[0],
        exact.tokens,
        first_cell=cell,
        tau=tau,
        prefix=exact.prefix[cell:],
        lengths=lengths,
    )
    final = torch.empty_like(exact.final)
    first = exact.first_position
    for start, end in blocks(first, exact.tokens, policy.max_exact_chunk_tokens):
        place = slice(start - first, end - first)
        final[:, place] = run.run_block(entering[:, place], start)
    return final, run.hot


@torch.inference_mode()
def sequence_logits(
    model: LoopedModel,
    ids: Tensor,
    options: Sequence[Option],
    policy: Policy = DEFAULT_POLICY,
    *,
    tau: float | None = None,
    block_tokens: int | None = None,
) -> Tensor:
    """Next-token logits [B, T, V] of ids [B, T] under one option per cell: the reference for every engine.

    Args:
        model: a looped model.
        ids: token ids, any T >= 1.
        options: one per cell, as in a plan.
        policy: constants.
        tau: V-precision threshold in bits; every position is then read as a decode row.
        block_tokens: tokens per block; the largest allowed by default, never more than W where a cell shares.
    """
    batch, tokens = ids.shape
    run = SequenceRun(model, plan_reads(model.geometry, options), policy, batch, tokens, tau=tau)
    size = min(block_tokens or policy.max_exact_chunk_tokens, run.max_block_tokens)
    embedded = model.embed(ids)
    parts = [model.logits(run.run_block(embedded[:, a:b], a)) for a, b in blocks(0, tokens, size)]
    return torch.cat(parts, dim=1)


def blocks(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Consecutive [a, b) of at most ``size`` tokens that cover [start, end)."""
    for a in range(start, end, size):
        yield a, min(end, a + size)


def _slice(kv: KV, start: int, end: int) -> KV:
    return KV(kv.k[:, start:end], kv.v[:, start:end])
