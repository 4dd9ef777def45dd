"""Block tables of the two cache groups, inside vLLM's own allocator and scheduler.

What differs from vLLM's full-attention and sliding-window managers:

* A block enters the prefix cache one step after the step that fills it. vLLM hashes at schedule time, so a second
  request of the same step could hit blocks that are not written yet; coding reads blocks at the *start* of a step, and
  shared cells read pages that a later loop writes, so here such a hit would be wrong, not merely early.
* The history table grows with ``history_end``, not with the tokens, and the window table keeps its sink.
* A request whose logits were NaN leaves the prefix cache with everything it holds, so that a fault of one step is
  not handed on to others (seen only under ``VLLM_COMPUTE_NANS_IN_LOGITS=1``, which makes vLLM look).
* A prefix-cache hit of L tokens needs the history below ``history_end(L)`` and the window above it, and is accepted
  only where the next page and the next token start blocks of their own: a hashed block is never written again.

vLLM asks every manager about every running request in every step, and in decode nearly every answer is "nothing": each
question is first compared with the number of tokens up to which nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from loopkv.residency import Residency
from loopkv.vllm_plugin.cache.specs import HistorySpec, WindowSpec

HitBlocks = tuple[tuple[list[KVCacheBlock], ...], int]


class LateHashingManager(SingleTypeKVCacheManager):
    """A manager whose blocks enter the prefix cache when the next step starts."""

    supports_fine_grained_hash_lookup: ClassVar[bool] = False

    def __init__(self, kv_cache_spec: HistorySpec | WindowSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        if self.block_size != kv_cache_spec.block_size:
            raise ValueError("LoopKV does not run with context parallelism")
        self.residency: Residency = kv_cache_spec.residency
        self._reach = 0  # tokens that a table holds beyond those of its entries, as long as it has any
        self._noted: dict[str, tuple[Request, int, int | None]] = {}
        self._hashed_tokens: dict[str, int] = {}
        self._corrupt: set[str] = set()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Pool blocks that ``num_tokens`` tokens take beyond those held, evictable hit blocks included.

        Exact for one step. At admission (``apply_admission_cap``) it is the most that the request takes from the free
        blocks at any moment of its prefill, when only its last tokens are held.
        """
        table = self.req_to_blocks.get(request_id)
        if not table:
            hit = self._hit_entries(new_computed_blocks, num_local_computed_tokens)
            return self._blocks_to_take([], hit, num_tokens, apply_admission_cap)
        if num_tokens <= len(table) * self.block_size + self._reach:
            return 0
        return self._blocks_to_take(table, (), num_tokens, apply_admission_cap)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Grow the table to ``num_tokens`` tokens; returns the new entries, null ones included."""
        table = self.req_to_blocks[request_id]
        if table and num_tokens <= len(table) * self.block_size + self._reach:
            return []
        held = len(table)
        self._grow(table, num_tokens)
        return table[held:]

    def _blocks_to_take(
        self, table: Sequence[KVCacheBlock], hit: Sequence[KVCacheBlock], num_tokens: int, apply_admission_cap: bool
    ) -> int:
        """See ``get_num_blocks_to_allocate``: for a table that is too short, or a hit that would become one."""
        raise NotImplementedError

    def _grow(self, table: list[KVCacheBlock], num_tokens: int) -> None:
        """Append the entries that ``num_tokens`` tokens need, if any."""
        raise NotImplementedError

    def _full_entries(self, tokens: int) -> int:
        """Leading table entries that are final once ``tokens`` tokens are computed."""
        raise NotImplementedError

    def _retained(self, request: Request, entries: range, retention_interval: int | None) -> list[bool] | None:
        """Which of ``entries`` a prefix-cache hit may need; None means all."""
        return None

    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Note that ``num_tokens`` tokens will be computed by the step now being scheduled; hash them later."""
        noted = self._noted.get(request.request_id)
        if noted is None or noted[1] < num_tokens:
            self._noted[request.request_id] = (request, num_tokens, retention_interval)

    def new_step_starts(self) -> None:
        """Hash what the steps before this one compute: the device runs them first."""
        hashed = self._hashed_tokens
        for name, (request, num_tokens, retention_interval) in self._noted.items():
            if request.num_nans_in_logits or num_tokens > hashed.get(name, -1):
                self._commit(request, num_tokens, retention_interval)

    def _commit(self, request: Request, num_tokens: int, retention_interval: int | None) -> None:
        if request.num_nans_in_logits:
            self._corrupt.add(request.request_id)
        if request.request_id in self._corrupt:  # and stays so: what it computes later has read the fault
            self._hashed_tokens.pop(request.request_id, None)
            held = self.req_to_blocks[request.request_id]
            self.block_pool.evict_blocks({block.block_id for block in held if not block.is_null})
            return
        # A request that is dropped in the pass that scheduled it has not been advanced yet: its num_computed_tokens
        # leaves out what will now never be computed.
        tokens = min(num_tokens, request.num_computed_tokens)
        self._hashed_tokens[request.request_id] = tokens
        full = self._full_entries(tokens)
        cached = self.num_cached_block.get(request.request_id, 0)
        if full <= cached:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=cached,
            num_full_blocks=full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=self._retained(request, range(cached, full), retention_interval),
        )
        self.num_cached_block[request.request_id] = full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand out the request's blocks for freeing, hashed as far as they are computed."""
        noted = self._noted.pop(request_id, None)
        if noted is not None:
            self._commit(*noted)
        self._hashed_tokens.pop(request_id, None)
        self._corrupt.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Cascade attention is not used: its readers know nothing of coded pages."""
        return 0

    def _hit_entries(self, blocks: Sequence[KVCacheBlock], tokens: int) -> Sequence[KVCacheBlock]:
        """The table of a request that resumes after a hit of ``tokens`` tokens."""
        raise NotImplementedError

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the request's table with the blocks of a prefix-cache hit."""
        if num_external_computed_tokens:
            raise ValueError("LoopKV does not run with KV connectors")
        table = self.req_to_blocks[request_id]
        assert not table, "a request takes prefix-cache hits only when it starts"
        hit = self._hit_entries(new_computed_blocks, num_local_computed_tokens)
        self.block_pool.touch([block for block in hit if not block.is_null])
        table.extend(hit)
        self.num_cached_block[request_id] = len(table)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Refused: blocks of a KV connector hold no coded pages."""
        raise ValueError("LoopKV does not run with KV connectors")


class HistoryManager(LateHashingManager):
    """Coded pages: ``ceil(history_end(n) / bh)`` entries, whole sink blocks null, nothing freed before the end."""

    def __init__(self, kv_cache_spec: HistorySpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        first = self.residency.null_history_entries + 1  # length of the shortest table
        self._reach = self.residency.tokens_within_history(first) - first * self.block_size

    def _full_entries(self, tokens: int) -> int:
        return self.residency.full_history_entries(tokens)

    def _hit_entries(self, blocks: Sequence[KVCacheBlock], tokens: int) -> Sequence[KVCacheBlock]:
        # The coordinator hands out ceil(tokens / bh) blocks when the window's hit is the shorter one.
        return blocks[: self.residency.history_entries(tokens)]

    def _blocks_to_take(
        self, table: Sequence[KVCacheBlock], hit: Sequence[KVCacheBlock], num_tokens: int, apply_admission_cap: bool
    ) -> int:
        held = max(len(table), len(hit), self.residency.null_history_entries)
        return max(0, self.residency.history_entries(num_tokens) - held) + self._get_num_evictable_blocks(hit)

    def _grow(self, table: list[KVCacheBlock], num_tokens: int) -> None:
        entries = self.residency.history_entries(num_tokens)
        if entries > len(table):
            table.extend([self._null_block] * (self.residency.null_history_entries - len(table)))
            table.extend(self.block_pool.get_new_blocks(entries - len(table)))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """History is read until the request ends."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> HitBlocks:
        """Longest resume point whose history is cached. Tokens inside the window need no history block."""
        assert isinstance(kv_cache_spec, HistorySpec) and not drop_eagle_block
        rule = kv_cache_spec.residency
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, rule.history_block_tokens)
        nulls = rule.null_history_entries
        found: list[list[KVCacheBlock]] = []
        for entry in range(nulls, rule.full_history_entries(max_length)):
            cached = block_pool.get_cached_block(hashes[entry], kv_cache_group_ids)
            if cached is None:
                break
            found.append(cached)
        hit = rule.last_resume_point(max_length, nulls + len(found), alignment_tokens)
        blocks = [[block_pool.null_block] * len(kv_cache_group_ids)] * nulls + found
        blocks = blocks[: rule.history_entries(hit)]
        return tuple([entry[group] for entry in blocks] for group in range(len(kv_cache_group_ids))), hit


class WindowManager(LateHashingManager):
    """Exact tokens: one entry per ``bw`` tokens; the sink stays, what left the window is freed once processed."""

    def __init__(self, kv_cache_spec: WindowSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._null_leaving = kv_cache_spec.null_leaving
        self._freed_until: dict[str, int] = {}
        self._nothing_to_free: dict[str, int] = {}  # up to so many processed tokens

    def _full_entries(self, tokens: int) -> int:
        return tokens // self.block_size

    def _hit_entries(self, blocks: Sequence[KVCacheBlock], tokens: int) -> Sequence[KVCacheBlock]:
        return blocks[: tokens // self.block_size]

    def _retained(self, request: Request, entries: range, retention_interval: int | None) -> list[bool] | None:
        """As vLLM's sliding windows under VLLM_PREFIX_CACHE_RETENTION_INTERVAL: keep what hits at few places need.

        Those are the multiples of the interval (none if 0), the end of the prompt and a prefix seen to be shared.
        """
        if retention_interval is None:
            return None
        rule = self.residency
        boundaries = [request.num_prompt_tokens - 1]
        if rule.history_entries(request.shared_prefix_boundary):
            # vLLM takes the history's longer hit for a proof of sharing. Without history any prompt "hits" that far.
            boundaries.append(request.shared_prefix_boundary)
        ends = [rule.last_resume_point(tokens, grid_tokens=self.scheduler_block_size) for tokens in boundaries]

        def needed(entry: int) -> bool:
            after = (entry + 1) * self.block_size
            hits = [tokens for tokens in ends if tokens >= after]
            if retention_interval:
                hits.append(-(-after // retention_interval) * retention_interval)
            return entry < rule.sink_window_entries or any(rule.first_live_window_entry(t) <= entry for t in hits)

        return [needed(entry) for entry in entries]

    def _null_entries(self, held: int, num_tokens: int) -> range:
        """Entries after ``held`` that get the null block: their tokens leave the window within their own chunk."""
        if not self._null_leaving:
            return range(0)
        return self.residency.null_window_entries(held, num_tokens, keep_resume_point=self.enable_caching)

    def _blocks_to_take(
        self, table: Sequence[KVCacheBlock], hit: Sequence[KVCacheBlock], num_tokens: int, apply_admission_cap: bool
    ) -> int:
        held, entries = max(len(table), len(hit)), self.residency.window_entries(num_tokens)
        if not apply_admission_cap or self._max_admission_blocks_per_request is None:
            new = max(0, entries - held) - len(self._null_entries(held, num_tokens))
            return new + self._get_num_evictable_blocks(hit)
        taken = [block for block in hit if not block.is_null]
        life = len(taken) + max(0, entries - held)
        if life > self._max_admission_blocks_per_request:
            # Blocks of the hit's window are given back while the prefill goes on; its sink stays.
            life = self._max_admission_blocks_per_request
            taken = taken[: self.residency.sink_window_entries]
        return life - (len(taken) - self._get_num_evictable_blocks(taken))

    def _grow(self, table: list[KVCacheBlock], num_tokens: int) -> None:
        held, entries = len(table), self.residency.window_entries(num_tokens)
        nulls = self._null_entries(held, num_tokens)
        new = iter(self.block_pool.get_new_blocks(entries - held - len(nulls)))
        table.extend(self._null_block if entry in nulls else next(new) for entry in range(held, entries))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free what no query after ``processed_computed_tokens`` tokens reads. It stays hittable until reused."""
        if processed_computed_tokens <= self._nothing_to_free.get(request_id, -1):
            return
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        first = self._freed_until.get(request_id, self.residency.sink_window_entries)
        stop = min(self.residency.first_live_window_entry(processed_computed_tokens), len(table))
        self._nothing_to_free[request_id] = self.residency.tokens_while_first_live(max(first, stop))
        if stop <= first:
            return
        # Not a backward scan to the first null entry, as vLLM's: chunks and hits leave null entries between live ones.
        freed = [block for block in reversed(table[first:stop]) if not block.is_null]
        table[first:stop] = [self._null_block] * (stop - first)
        self._freed_until[request_id] = stop
        self.block_pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand out the request's blocks for freeing, hashed as far as they are computed."""
        self._freed_until.pop(request_id, None)
        self._nothing_to_free.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> HitBlocks:
        """Longest resume point whose sink and window are cached; entries between them are null."""
        assert isinstance(kv_cache_spec, WindowSpec) and not drop_eagle_block
        rule = kv_cache_spec.residency
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, rule.window_block_tokens)
        groups = range(len(kv_cache_group_ids))
        blocks: dict[int, list[KVCacheBlock]] = {}

        def first_missing(entries: range) -> int | None:
            for entry in entries:
                if entry not in blocks:
                    cached = block_pool.get_cached_block(hashes[entry], kv_cache_group_ids)
                    if cached is None:
                        return entry
                    blocks[entry] = cached
            return None

        hit = rule.last_resume_point(max_length, grid_tokens=alignment_tokens)
        while hit:
            end = rule.window_entries(hit)
            sink = range(min(rule.sink_window_entries, end))
            window = range(end - 1, min(rule.first_live_window_entry(hit), end) - 1, -1)
            missing = first_missing(sink)
            if missing is None:
                missing = first_missing(window)
            if missing is None:
                null = [block_pool.null_block] * len(kv_cache_group_ids)
                kept = {*sink, *window}
                table = [blocks[entry] if entry in kept else null for entry in range(end)]
                return tuple([entry[group] for entry in table] for group in groups), hit
            hit = rule.last_resume_point(min(missing * rule.window_block_tokens, hit - 1), grid_tokens=alignment_tokens)
        return tuple([] for _ in groups), 0
