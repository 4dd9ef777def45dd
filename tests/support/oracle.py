"""The policy by its definition: token by token, building what each query reads from lists. Slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values
from loopkv.models.base import LoopedModel, run_cells
from loopkv.policy import Policy


@torch.inference_mode()
def oracle_logits(
    model: LoopedModel,
    ids: Sequence[int],
    reads: Sequence[tuple[int, int | None]],
    policy: Policy,
    tau: float | None = None,
) -> Tensor:
    """Logits [T, V] when cell c reads the history of cell ``reads[c][0]`` at ``reads[c][1]`` bits (None: exact).

    Every token runs alone through all cells, so a shared cell's source already holds every earlier token.
    """
    keys: list[list[Tensor]] = [[] for _ in model.geometry.cells]  # [H, D] per token
    values: list[list[Tensor]] = [[] for _ in model.geometry.cells]
    pages: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def page(holder: int, bits: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded keys, values and cold values [P, H, D] of a page, coded from the exact ones."""
        if (holder, bits, start) not in pages:
            place = slice(start, start + policy.page_tokens)
            coded_k = encode_keys(torch.stack(keys[holder][place]), bits)
            coded_v = encode_values(torch.stack(values[holder][place]), bits, policy.group)
            full = decode_values(coded_v, model.dtype)
            cold = full
            if bits == 4:
                cold = decode_values(coded_v, model.dtype, cold=torch.ones(full.shape[:2], dtype=torch.bool))
            pages[holder, bits, start] = decode_keys(coded_k, model.dtype), full, cold
        return pages[holder, bits, start]

    def attend(cell: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[cell].append(k[0, 0])
        values[cell].append(v[0, 0])
        n = len(keys[cell])
        end = policy.history_end(n)
        holder, bits = reads[cell]
        starts = range(policy.sink_tokens, end, policy.page_tokens)
        history_k = keys[holder][policy.sink_tokens : end]
        history_v = values[holder][policy.sink_tokens : end]
        cold_v = history_v
        if bits is not None:
            history_k = [row for start in starts for row in page(holder, bits, start)[0]]
            history_v = [row for start in starts for row in page(holder, bits, start)[1]]
            cold_v = [row for start in starts for row in page(holder, bits, start)[2]]
        sink = keys[cell][: policy.sink_tokens], values[cell][: policy.sink_tokens]
        recent = keys[cell][end:], values[cell][end:]
        k_all = torch.stack(sink[0] + history_k + recent[0])  # [N, H, D]
        v_all = torch.stack(sink[1] + history_v + recent[1])
        v_cold = torch.stack(sink[1] + cold_v + recent[1])
        heads = k_all.shape[1]
        group = q.shape[2] // heads
        out = torch.empty_like(q[0, 0])
        for head in range(heads):
            queries = q[0, 0, head * group : (head + 1) * group]
            scores = queries @ k_all[:, head].T * q.shape[-1] ** -0.5  # [G, N]
            v_head = v_all[:, head]
            if tau is not None and bits == 4 and end > policy.sink_tokens:
                is_cold = torch.zeros(n, dtype=torch.bool)
                is_cold[policy.sink_tokens : end] = True
                for row in scores:
                    is_cold &= _below(row, end, policy, n, tau)
                v_head = torch.where(is_cold[:, None], v_cold[:, head], v_head)
            out[head * group : (head + 1) * group] = torch.softmax(scores, dim=-1) @ v_head
        return out[None, None]

    logits = []
    for position, token in enumerate(ids):
        hidden = model.embed(torch.tensor([[token]]))
        rotary = model.rotary(torch.tensor([position]))
        logits.append(model.logits(run_cells(model, hidden, rotary, attend))[0, 0])
    return torch.stack(logits)


def _below(scores: Tensor, end: int, policy: Policy, n: int, tau: float) -> Tensor:
    """Which history tokens of one query lie below its running maximum minus tau ln 2."""
    sink, page = policy.sink_tokens, policy.page_tokens
    split = policy.split_pages(n) * page
    below = torch.zeros(n, dtype=torch.bool)
    for start in range(sink, end, page):
        first = sink + (start - sink) // split * split
        m = torch.cat([scores[:sink], scores[first : start + page]]).max()
        below[start : start + page] = scores[start : start + page] < m - tau * math.log(2)
    return below
