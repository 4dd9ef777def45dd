"""Re-encode pages while an engine serves and compare them, byte for byte, with what its operators stored.

A page is coded in the step whose token pushes it out of the window; its exact tokens stay in the window blocks until
the step after. So between the two steps both forms lie in the pool, whatever ran the step (eager, a CUDA graph, any
model runner): the check looks at the pool through the scheduler's own block tables and hooks nothing of the operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopkv.codec import encode_keys, encode_values
from loopkv.codec.pages import pack_page, page_struct
from loopkv.eval.served import ByteCheck
from loopkv.layout import Layout


class PageChecker:
    """Checks chosen pages of an engine in this process.

    Args:
        cache: the model's ``CellCache``.
        scheduler: the engine's scheduler.
        document_tokens: tokens of each document.
        prompt_tokens: tokens that are prefilled; pages that leave the window later are checked.
        pages: how many to check (fewer where fewer leave).
        seed: chooses them.
    """

    def __init__(
        self, cache: Any, scheduler: Any, document_tokens: list[int], prompt_tokens: int, pages: int, seed: int
    ) -> None:
        from loopkv.vllm_plugin.cache.specs import HistorySpec, WindowSpec

        self.cache, self.scheduler = cache, scheduler
        self.layout: Layout = cache.layout
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.history = next(m for m in managers if isinstance(m.kv_cache_spec, HistorySpec))
        self.window = next(m for m in managers if isinstance(m.kv_cache_spec, WindowSpec))
        policy = self.layout.policy
        leaving = [
            (document, first)
            for document, tokens in enumerate(document_tokens)
            # a request is gone after its last step, so the page that leaves with the last token is left out
            for first in range(policy.history_end(prompt_tokens), policy.history_end(tokens - 1), policy.page_tokens)
        ]
        chosen = np.random.default_rng(seed).permutation(len(leaving))[:pages]
        self.wanted = {leaving[i] for i in chosen}
        self.checked = self.compared = self.differing = 0
        self.first_difference: str | None = None
        self._due: list[tuple[str, int, int, int, list[int]]] = []

    def before_step(self, document_of: Any) -> None:
        """Note the window blocks of pages that the coming step will code."""
        policy, size = self.layout.policy, self.layout.window_block_tokens
        self._due = []
        for request in self.scheduler.running:
            computed = request.num_computed_tokens
            first = policy.history_end(computed)
            if computed < request.num_prompt_tokens or policy.history_end(computed + 1) == first:
                continue
            document = document_of(request)
            if (document, first) not in self.wanted:
                continue
            table = self.window.req_to_blocks[request.request_id]
            blocks = [table[token // size].block_id for token in range(first, first + policy.page_tokens)]
            self._due.append((request.request_id, document, first, computed, blocks))

    def after_step(self) -> None:
        """Compare the pages that the step has coded."""
        policy = self.layout.policy
        for name, document, first, computed, blocks in self._due:
            request = self.scheduler.requests.get(name)
            if request is None or request.num_computed_tokens <= computed:
                continue  # not scheduled in this step
            self.wanted.discard((document, first))
            table = self.history.req_to_blocks[name]
            page = first // policy.page_tokens
            block = table[page // self.layout.pages_per_block].block_id
            self._compare(document, first, blocks, block, page % self.layout.pages_per_block)
        self._due = []

    def _compare(self, document: int, first: int, window_blocks: list[int], block: int, inside: int) -> None:
        layout, policy, pool = self.layout, self.layout.policy, self.cache.pool
        heads, dim, dtype = layout.geometry.kv_heads, layout.geometry.head_dim, self.cache.dtype
        at = torch.tensor(window_blocks, device=pool.device)
        place = torch.arange(first, first + policy.page_tokens, device=pool.device) % layout.window_block_tokens
        part_bytes = layout.window_block_tokens * heads * dim * layout.exact_itemsize
        stored_page = pool[block, inside * layout.page_bytes : (inside + 1) * layout.page_bytes].cpu()
        rows = pool[at]  # [S, block_bytes]
        for cell, cell_place in enumerate(layout.cells):
            if cell_place.option.shares:
                continue

            def exact(part: int, offset: int = cell_place.window_offset) -> Tensor:
                begin = offset + part * part_bytes
                tokens = rows[:, begin : begin + part_bytes].contiguous().view(dtype)
                tokens = tokens.unflatten(1, (layout.window_block_tokens, heads, dim))
                return tokens[torch.arange(len(place), device=place.device), place].cpu()

            keys, values = exact(0), exact(1)
            if cell_place.option.coded:
                struct = page_struct(cell_place.option, heads, dim, policy)
                data = pack_page(
                    struct, encode_keys(keys, struct.bits), encode_values(values, struct.bits, policy.group)
                )
            else:
                data = torch.stack([keys, values]).contiguous().flatten().view(torch.uint8)
            offset = cell_place.history_offset
            stored = stored_page[offset : offset + len(data)]
            wrong = torch.nonzero(stored != data).flatten()
            self.compared += len(data)
            self.differing += len(wrong)
            if len(wrong) and self.first_difference is None:
                self.first_difference = (
                    f"document {document}, tokens {first} to {first + policy.page_tokens - 1}, cell {cell} "
                    f"({cell_place.option.name}), byte {int(wrong[0])}: {int(stored[wrong[0]])} stored, "
                    f"{int(data[wrong[0]])} re-encoded"
                )
        self.checked += 1

    def result(self) -> ByteCheck:
        """What was found so far."""
        return ByteCheck(self.checked, self.compared, self.differing, self.first_difference)
