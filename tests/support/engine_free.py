"""vLLM's own scheduler and KV-cache manager without a model: real admission, preemption, hits; a symbolic device.

Only the model's configuration is a stand-in. ``EngineFreeRun.step`` does what the engine core does in one step, with
steps overlapping as under async scheduling when asked to.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from loopkv.residency import Residency
from loopkv.vllm_plugin.cache import HistorySpec, WindowSpec, register_cache_specs, request_in_flight_tokens
from support.symbolic_device import Content, DeviceError, Row, SymbolicDevice

VOCABULARY = 4096
_MASK = (1 << 62) - 1
_BLOCK_BYTES = 4096


def _hash(parts: tuple[bytes, tuple[int, ...], Any]) -> bytes:
    """A block hash that costs little and is the same in every process (no adapters or salts here)."""
    parent, tokens, extra = parts
    assert extra is None
    return (hash((int.from_bytes(parent[:8], "little"), *tokens)) & _MASK).to_bytes(8, "little")


def mix(state: int, token: int) -> int:
    """Content of a token after the prefix whose content is ``state``; never 0."""
    state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93) & _MASK
    return (state ^ (state >> 29)) | 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine. Sizes in tokens; ``blocks`` counts the null block."""

    residency: Residency
    blocks: int
    max_model_tokens: int
    batch_tokens: int = 1024
    chunk_tokens: int = 256
    max_requests: int = 16
    priority: bool = False
    overlap: bool = False
    caching: bool = True
    null_leaving: bool = False
    runner_v2: bool = False
    watermark: float = 0.0
    block_bytes: int = _BLOCK_BYTES


def make_vllm_config(settings: EngineSettings) -> Any:
    """What the scheduler reads of a ``VllmConfig``: vLLM's own config objects around a model that is only a length."""
    scheduler = SchedulerConfig(
        max_model_len=settings.max_model_tokens,
        is_encoder_decoder=False,
        max_num_batched_tokens=max(settings.batch_tokens, settings.max_requests),
        max_num_seqs=settings.max_requests,
        long_prefill_token_threshold=settings.chunk_tokens if settings.chunk_tokens < settings.batch_tokens else 0,
        policy="priority" if settings.priority else "fcfs",
        async_scheduling=settings.overlap,
        disable_hybrid_kv_cache_manager=False,
        watermark=settings.watermark,
    )
    batches = 2 if settings.overlap else 1
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=CacheConfig(enable_prefix_caching=settings.caching),
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            is_diffusion=False,
            enable_return_routed_experts=False,
            max_model_len=settings.max_model_tokens,
            original_max_model_len=settings.max_model_tokens,
        ),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
        use_v2_model_runner=settings.runner_v2,
        max_concurrent_batches=batches,
        max_in_flight_tokens=batches * scheduler.max_num_batched_tokens,
    )


def make_specs(settings: EngineSettings, vllm_config: Any) -> dict[str, HistorySpec | WindowSpec]:
    """The two specs under their layer names, as the workers report them."""
    register_cache_specs()
    rule, size = settings.residency, {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    return {
        "loopkv.0.history": HistorySpec(
            block_size=rule.history_block_tokens, residency=rule, block_bytes=settings.block_bytes, **size
        ),
        "loopkv.1.window": WindowSpec(
            block_size=rule.window_block_tokens,
            residency=rule,
            block_bytes=settings.block_bytes,
            sliding_window=rule.policy.window_tokens,
            in_flight_tokens=request_in_flight_tokens(vllm_config),
            null_leaving=settings.null_leaving,
            **size,
        ),
    }


class _NoGrammars:
    def should_advance(self, request: Request) -> bool:
        return False


class _NoImages:
    def supports_multimodal_inputs(self, model_config: Any) -> bool:
        return False


@dataclass(slots=True)
class _Work:
    """A request as the worker and the test know it."""

    request: Request
    seed: int
    tokens: list[int]
    content: Content
    history_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)

    def push(self, token: int) -> None:
        n = len(self.tokens)
        self.content[n] = mix(int(self.content[n - 1]) if n else 1, token)
        self.tokens.append(token)


class EngineFreeRun:
    """A scheduler, its manager and a symbolic device, stepped together."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        config = make_vllm_config(settings)
        specs = make_specs(settings, config)
        (self.cache_config,) = get_kv_cache_configs(config, [specs], [settings.blocks * settings.block_bytes])
        assert self.cache_config.num_blocks == settings.blocks
        config.cache_config.num_gpu_blocks = settings.blocks
        block, hash_block = resolve_kv_cache_block_sizes(self.cache_config, config)
        init_none_hash(_hash)
        self._hasher = get_request_block_hasher(hash_block, _hash) if settings.caching else None
        self.scheduler = (AsyncScheduler if settings.overlap else Scheduler)(
            vllm_config=config,
            kv_cache_config=self.cache_config,
            structured_output_manager=_NoGrammars(),
            block_size=block,
            hash_block_size=hash_block,
            mm_registry=_NoImages(),
            log_stats=False,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        groups = self.manager.coordinator.single_type_managers
        order = [type(group.kv_cache_spec) for group in self.cache_config.kv_cache_groups]
        self.history_group, self.window_group = order.index(HistorySpec), order.index(WindowSpec)
        self.history, self.window = groups[self.history_group], groups[self.window_group]
        self.device = SymbolicDevice(settings.residency, settings.blocks, reads_activations=settings.null_leaving)
        self.work: dict[str, _Work] = {}
        self.finished: dict[str, _Work] = {}
        self.hits: list[int] = []
        self.preemptions = 0
        self.same_pass_preemptions = 0
        self.max_window_blocks = 0
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._handed_out: list[int] = []
        self._allocated: set[str] = set()
        self._numbers = itertools.count()
        self._watch()

    def _watch(self) -> None:
        """Note which blocks are handed out and who is preempted in its own pass; check that predictions are exact."""
        get_new_blocks, allocate_slots = self.pool.get_new_blocks, self.manager.allocate_slots
        preempt, predict = self.scheduler._preempt_request, self.manager.coordinator.get_num_blocks_to_allocate
        predicted: list[int] = [0, 0]  # free blocks then, blocks that the allocation will take

        def watched_get_new_blocks(count: int) -> Any:
            blocks = get_new_blocks(count)
            self._handed_out.extend(block.block_id for block in blocks)
            return blocks

        def watched_allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate_slots(request, *args, **kwargs)
            if blocks is not None:
                self._allocated.add(request.request_id)
                free, taken = predicted
                if free - self.pool.get_num_free_blocks() != taken:
                    raise DeviceError(
                        f"{request.request_id}: took {free - self.pool.get_num_free_blocks()}, said {taken}"
                    )
            return blocks

        def watched_predict(*args: Any, apply_admission_cap: bool = False, **kwargs: Any) -> int:
            blocks = predict(*args, apply_admission_cap=apply_admission_cap, **kwargs)
            if not apply_admission_cap:
                predicted[:] = self.pool.get_num_free_blocks(), blocks
            return blocks

        def watched_preempt(request: Request, timestamp: float) -> None:
            self.preemptions += 1
            self.same_pass_preemptions += request.request_id in self._allocated
            self._allocated.discard(request.request_id)
            preempt(request, timestamp)

        self.pool.get_new_blocks = watched_get_new_blocks
        self.manager.allocate_slots = watched_allocate_slots
        self.scheduler._preempt_request = watched_preempt
        self.manager.coordinator.get_num_blocks_to_allocate = watched_predict

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(
        self, prompt: list[int], max_tokens: int, *, seed: int = 0, priority: int = 0, stop: tuple[int, ...] = ()
    ) -> str:
        """Queue a request; returns its name. ``stop`` lists stop tokens."""
        number = next(self._numbers)
        name = f"r{number}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, stop_token_ids=list(stop), ignore_eos=True),
            pooling_params=None,
            arrival_time=float(number),
            priority=priority,
            block_hasher=self._hasher,
        )
        work = _Work(request, seed, [], np.zeros(self.settings.max_model_tokens + 8, np.int64))
        for token in prompt:
            work.push(token)
        self.work[name] = work
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """End a request from outside."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = self.work.pop(name)

    @property
    def idle(self) -> bool:
        """Nothing left to schedule and nothing in flight."""
        return not self.scheduler.has_unfinished_requests() and not self._queue

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One step of the engine core; returns the tokens it scheduled."""
        tokens = 0
        if self.scheduler.has_requests():
            self._allocated.clear()
            scheduled = self.scheduler.schedule()
            tokens = scheduled.total_num_scheduled_tokens
            self._queue.append((scheduled, self._execute(scheduled)))
            if tokens and len(self._queue) < (2 if self.settings.overlap else 1):
                return tokens  # the next step is scheduled before this one's output is looked at
        if self._queue:
            self._settle()
        return tokens

    def _settle(self) -> None:
        output, result = self._queue.popleft()
        self.scheduler.update_from_output(output, result)
        for name in [name for name, work in self.work.items() if work.request.is_finished()]:
            self.finished[name] = self.work.pop(name)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What the worker does with a scheduled step. The device runs steps in the order they are scheduled."""
        self._update_tables(output)
        rows = []
        for name, new in output.num_scheduled_tokens.items():
            work = self.work[name]
            computed = work.request.num_computed_tokens - new
            rows.append(Row(name, computed, new, work.history_table, work.window_table, work.content))
            self._check_ownership(rows[-1])
        self.device.forget(self._handed_out)
        self._handed_out = []
        self.device.step(rows)
        sampled = []
        for row in rows:
            work = self.work[row.name]
            done = row.computed + row.new == len(work.tokens)
            if done:
                work.push(mix(int(work.content[len(work.tokens) - 1]), work.seed) % VOCABULARY)
            sampled.append([work.tokens[-1]] if done else [])
        names = [row.name for row in rows]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _update_tables(self, output: SchedulerOutput) -> None:
        """Block tables as a worker keeps them: new ids are appended, freed ones are never told."""
        for new in output.scheduled_new_reqs:
            work = self.work[new.req_id]
            work.history_table = list(new.block_ids[self.history_group])
            work.window_table = list(new.block_ids[self.window_group])
            self.hits.append(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            work = self.work[name]
            if name in cached.resumed_req_ids:
                assert ids is not None
                work.history_table, work.window_table = [], []
                self.hits.append(work.request.num_computed_tokens - output.num_scheduled_tokens[name])
            if ids is not None:
                work.history_table.extend(ids[self.history_group])
                work.window_table.extend(ids[self.window_group])
        assert not output.kv_cache_block_copies, "no block is ever copied"

    def _check_ownership(self, row: Row) -> None:
        """Whatever the step touches is the request's by the manager's books; whatever it writes is its alone."""
        rule, policy = self.settings.residency, self.settings.residency.policy
        history, window = self.history.req_to_blocks[row.name], self.window.req_to_blocks[row.name]
        end = row.computed + row.new
        bw, bh, page = rule.window_block_tokens, rule.history_block_tokens, policy.page_tokens
        held = sum(not block.is_null for block in window)
        self.max_window_blocks = max(self.max_window_blocks, held)
        cap = self.window._max_admission_blocks_per_request
        if held > cap:
            raise DeviceError(f"{row.name} holds {held} window blocks, admission reserved {cap}")

        processed = max(0, row.computed - (self.work[row.name].request.num_in_flight_tokens - row.new))
        for entry in range(rule.sink_window_entries, min(rule.first_live_window_entry(processed), len(window))):
            if not window[entry].is_null:
                raise DeviceError(f"{row.name} at {row.computed} + {row.new}: still holds window entry {entry}")

        def check(table: list[int], blocks: list[Any], entries: range, what: str, *, written: bool) -> None:
            for entry in entries:
                if entry >= len(blocks) or table[entry] != blocks[entry].block_id:
                    raise DeviceError(f"{row.name} at {row.computed} + {row.new}: {what} {entry} is not its own")
                block = blocks[entry]
                if written and not block.is_null and (block.block_hash is not None or block.ref_cnt != 1):
                    raise DeviceError(
                        f"{row.name} at {row.computed} + {row.new}: would write {what} {entry} (block "
                        f"{block.block_id}, hashed {block.block_hash is not None}, owners {block.ref_cnt})"
                    )

        def upto(tokens: int, size: int) -> int:
            return -(-tokens // size)

        sink = range(upto(min(policy.sink_tokens, end), bw))
        live = range(min(policy.history_end(row.computed), row.computed) // bw, upto(end, bw))
        check(row.window_table, window, sink, "window entry", written=False)
        check(row.window_table, window, live, "window entry", written=False)
        check(row.window_table, window, range(row.computed // bw, upto(end, bw)), "window entry", written=True)
        entries = rule.history_entries(end)
        if len(history) < entries or len(row.history_table) != len(history):
            raise DeviceError(f"{row.name}: history table of {len(row.history_table)}, wanted {entries} entries")
        check(row.history_table, history, range(entries), "history entry", written=False)
        leaving = rule.leaving_pages(row.computed, row.new)
        if leaving:
            touched = range(leaving.start * page // bh, (leaving.stop - 1) * page // bh + 1)
            check(row.history_table, history, touched, "history entry", written=True)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self, limit: int = 20_000) -> None:
        """Run until every request has finished, then check that every block is back."""
        for _ in range(limit):
            if self.idle:
                break
            self.step()
        else:
            raise DeviceError(f"requests {sorted(self.work)} never finish")
        self.check_empty()

    def check_empty(self) -> None:
        """No request holds anything: no block leaked, no bookkeeping left."""
        free = self.pool.get_num_free_blocks()
        if free != self.settings.blocks - 1:
            raise DeviceError(f"{self.settings.blocks - 1 - free} blocks leaked")
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == 0, f"block {block.block_id} has {block.ref_cnt} owners"
        for group in (self.history, self.window):
            own = ("_noted", "_hashed_tokens", "_freed_until", "_nothing_to_free")
            for name in ("req_to_blocks", "num_cached_block", *own):
                left = getattr(group, name, None)
                assert not left, f"{type(group).__name__}.{name} keeps {left}"
