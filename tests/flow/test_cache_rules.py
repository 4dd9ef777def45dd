"""One rule of the cache at a time, on vLLM's real scheduler: who may hit what and when, who fits, who never hangs."""

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="the CPU build of vLLM is not installed")

import torch
from support.cache_trace import smallest_pool
from support.engine_free import EngineFreeRun, EngineSettings, make_specs, make_vllm_config
from support.symbolic_device import DeviceError
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpecKind, SlidingWindowSpec, get_kv_cache_spec_kind
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from loopkv.artifacts import Fingerprint, Plan
from loopkv.geometry import Geometry
from loopkv.layout import lay_out
from loopkv.policy import Policy
from loopkv.residency import Residency
from loopkv.vllm_plugin.cache import (
    HistoryManager,
    HistorySpec,
    WindowManager,
    history_spec,
    register_cache_specs,
    window_spec,
)
from loopkv.vllm_plugin.cache.managers import LateHashingManager

RULE = Residency(Policy(), history_block_tokens=32, window_block_tokens=8)


def engine(rule: Residency = RULE, *, more_blocks: int = 0, **settings: Any) -> EngineSettings:
    """The smallest pool that vLLM starts with, and ``more_blocks``."""
    made = EngineSettings(rule, blocks=1, **{"max_model_tokens": 1024, **settings})
    return dataclasses.replace(made, blocks=smallest_pool(made) + more_blocks)


def words(count: int, first: int = 0) -> list[int]:
    return [(first + 37 * i) % 4093 for i in range(count)]


def hashed_blocks(run: EngineFreeRun) -> set[int]:
    return {block.block_id for block in run.pool.blocks if block.block_hash is not None}


# -- the prefix cache holds computed blocks only ----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_is_hittable_only_after_the_step_that_fills_it(overlap: bool) -> None:
    run = EngineFreeRun(engine(more_blocks=200, overlap=overlap))
    name = run.add(words(900), 4)
    for _ in range(4):
        before = run.work[name].request.num_computed_tokens
        run.step()
        tables = [(run.window, 8, run.window.req_to_blocks[name]), (run.history, 32, run.history.req_to_blocks[name])]
        hashed = hashed_blocks(run)
        for manager, size, table in tables:
            done = RULE.full_history_entries(before) if manager is run.history else before // size
            # Hits land on the grid, so the engine hashes in grid steps; nothing beyond what was computed before.
            assert not {block.block_id for block in table[done:]} & hashed
            grid = before // RULE.grid_tokens * RULE.grid_tokens
            done = RULE.full_history_entries(grid) if manager is run.history else grid // size
            assert all(block.block_id in hashed for block in table[:done] if not block.is_null)
    run.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [64, 256])
def test_many_requests_with_one_prompt_in_one_step(overlap: bool, chunk: int) -> None:
    """Siblings of one step compute for themselves; whoever comes later shares; copies are never made."""
    run = EngineFreeRun(engine(more_blocks=800, overlap=overlap, chunk_tokens=chunk))
    prompt = words(700)
    for seed in range(4):
        run.add(prompt, 40, seed=seed)
    for _ in range(16):
        run.step()
    assert run.hits == [0, 0, 0, 0]
    run.add(prompt, 5, seed=9)
    run.step()
    assert run.hits[4] == 672  # 21 * 32: the last grid point below the 699 tokens that a hit may have
    run.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_aborted_prefill_leaves_only_what_it_computed(overlap: bool, steps: int) -> None:
    run = EngineFreeRun(engine(more_blocks=200, overlap=overlap))
    prompt = words(1000)
    first = run.add(prompt, 5)
    for _ in range(steps):
        run.step()
    run.abort(first)
    for seed in range(3):
        run.add(prompt, 5, seed=seed)
    run.step()
    assert run.hits[1:] == [256 * steps] * 3
    run.drain()


def crowd_out(more_blocks: int) -> EngineFreeRun:
    """A long prompt of low priority is scheduled first in a pass and dropped by its betters in the same pass."""
    run = EngineFreeRun(engine(more_blocks=more_blocks, priority=True))
    prompt = words(900)
    run.add(prompt, 50, priority=5)
    run.step()
    betters = [run.add(words(300, first=k), 200, priority=0) for k in (1, 2, 3)]
    for _ in range(60):
        dropped = run.same_pass_preemptions
        run.step()
        if run.same_pass_preemptions > dropped:
            run.abort(betters[0])
            run.add(prompt, 5, seed=1, priority=-1)
    run.drain()
    return run


def test_a_request_dropped_in_its_own_pass_leaves_only_what_it_computed() -> None:
    runs = [crowd_out(more) for more in range(18, 26)]
    assert sum(run.same_pass_preemptions for run in runs) >= 4

    def everything(self: Any, request: Any, num_tokens: int, retention_interval: int | None) -> None:
        with mock.patch.object(request, "num_computed_tokens", num_tokens):
            commit(self, request, num_tokens, retention_interval)

    commit = LateHashingManager._commit
    with (
        mock.patch.object(LateHashingManager, "_commit", everything),
        pytest.raises(DeviceError, match="holds nothing"),
    ):
        for more in range(18, 26):
            crowd_out(more)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("faulty_step", [0, 2, 5])
def test_a_request_whose_logits_were_nan_leaves_nothing_to_hit(overlap: bool, faulty_step: int) -> None:
    """Found in the first chunk, in the middle or in decode: nothing that it holds is hit, not even once it recovers."""
    run = EngineFreeRun(engine(more_blocks=400, overlap=overlap))
    prompt = words(900)
    name = run.add(prompt, 60)
    for step in range(12):
        run.step()
        run.work[name].request.num_nans_in_logits = int(step == faulty_step)
    held = [*run.history.req_to_blocks[name], *run.window.req_to_blocks[name]]
    assert not {block.block_id for block in held} & hashed_blocks(run)
    run.add(prompt, 5, seed=1)  # beside the faulty request, and again when both are gone
    run.step()
    run.drain()
    # Blocks that had left its window before stay: 32 * floor((n - 256) / 32) tokens of the n before the fault.
    assert run.hits[0] == 0 and run.hits[1] <= max(0, 256 * min(faulty_step, 3) - 256)
    assert not (run.history._corrupt or run.window._corrupt)
    run.add(prompt, 5, seed=2)  # the sound computation of the same prompt is hit as ever
    run.drain()
    assert run.hits[2] == 896


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "window", "hit"),
    # First turn: 600 + 50 tokens, of which 649 were computed. Grid lcm(bh, bw); the hit is its last multiple <= 649.
    [(32, 10, 640), (32, 8, 640), (64, 8, 640), (128, 16, 640), (256, 4, 512), (32, 12, 576)],
)
def test_the_next_turn_resumes_at_the_grid(history: int, window: int, hit: int) -> None:
    run = EngineFreeRun(engine(Residency(Policy(), history, window), more_blocks=200))
    name = run.add(words(600), 50)
    run.drain()
    run.add(run.finished[name].tokens + words(100, first=5), 20)
    run.step()
    assert run.hits == [0, hit]
    run.drain()


def test_a_hit_needs_the_window_before_it() -> None:
    """Freed window blocks serve hits until they are reused: afterwards the history alone is worth nothing."""
    run = EngineFreeRun(engine(more_blocks=0, max_model_tokens=1024))
    prompt = words(600)
    run.add(prompt, 2)
    run.drain()
    run.add(prompt + words(50, first=3), 2)
    run.drain()
    assert run.hits[-1] == 576  # 18 * 32 <= 599
    while run.hits[-1]:
        run.add(words(900, first=len(run.hits)), 2)
        run.drain()
        run.add(prompt + words(50, first=3), 2)
        run.drain()
        assert len(run.hits) < 20
    assert run.hits[-1] == 0


def test_chunks_longer_than_the_window_leave_one_place_to_hit() -> None:
    settings = engine(max_model_tokens=4096, batch_tokens=2048, chunk_tokens=2048, null_leaving=True, more_blocks=400)
    run = EngineFreeRun(settings)
    name = run.add(words(3000), 4)
    run.step()
    # 2,048 tokens: 4 sink entries, and from E(2048) = 1792 (also the resume point's) to the end 256 / 8 blocks.
    assert sum(not block.is_null for block in run.window.req_to_blocks[name]) == 4 + 32
    run.drain()
    for length, hit in ((2100, 2048), (3001, 2976), (1500, 32)):  # 32: the sink, of which no block is ever null
        run.add(words(length), 2, seed=length)
        run.drain()
        assert run.hits[-1] == hit
    with_nulls = run.window._max_admission_blocks_per_request
    without = EngineFreeRun(dataclasses.replace(settings, null_leaving=False)).window._max_admission_blocks_per_request
    # Sink 4; a window of up to 287 tokens touches ceil(286 / 8) + 1 = 37; the tail of each of two steps in flight, up
    # to 287 + 31 tokens back to its resume point, 41. Without null entries: 2048 tokens and what is live before them.
    assert (with_nulls, without) == (4 + 37 + 2 * 41, 296)


def test_sparse_retention_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0 only the end of the prompt (and the sink) serves hits."""
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    run = EngineFreeRun(engine(more_blocks=300))
    prompt = words(900)
    name = run.add(prompt, 60)
    run.drain()
    window = sum(
        block.block_hash is not None and block.block_hash[-4:] == (1).to_bytes(4, "big") for block in run.pool.blocks
    )
    assert run.window_group == 1
    assert window == 4 + 32  # sink, and [E(896), 896) = 256 tokens
    for turn, hit in ((prompt + words(5, first=9), 896), (run.finished[name].tokens, 896), (words(500), 32)):
        run.add(turn, 2)
        run.drain()
        assert run.hits[-1] == hit


# -- who fits ---------------------------------------------------------------------------------------------------------

SIZES = [(32, 10), (32, 5), (64, 8), (128, 12), (256, 16), (32, 32)]


@pytest.mark.parametrize("null_leaving", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("history", "window"), SIZES)
def test_the_longest_request_runs_on_the_smallest_pool(
    history: int, window: int, overlap: bool, null_leaving: bool
) -> None:
    """vLLM starts when the longest request fits; such a request must then run, alone and again after a hit."""
    longest, chunk = (1500, 256) if not null_leaving else (4000, 2048)
    settings = engine(
        Residency(Policy(), history, window),
        max_model_tokens=longest,
        chunk_tokens=chunk,
        batch_tokens=chunk,
        overlap=overlap,
        null_leaving=null_leaving,
    )
    run = EngineFreeRun(settings)
    for prompt in (longest - 1, longest - 40, longest - 1, longest // 2):
        run.add(words(prompt), longest)
    run.drain()
    assert all(len(work.tokens) == longest for work in run.finished.values())
    assert run.preemptions == 0


def test_a_pool_too_small_for_the_longest_request_is_refused_with_the_length_that_fits() -> None:
    settings = engine(max_model_tokens=1500)
    config = make_vllm_config(settings)
    available = (settings.blocks - 1) * settings.block_bytes
    with pytest.raises(ValueError, match="estimated maximum model length is ") as refused:
        get_kv_cache_configs(config, [make_specs(settings, config)], [available])
    fits = int(str(refused.value).split("estimated maximum model length is ")[1].split(".")[0])
    assert 1400 < fits < 1500
    run = EngineFreeRun(dataclasses.replace(settings, blocks=settings.blocks - 1, max_model_tokens=fits))
    run.add(words(fits - 1), 5)
    run.drain()


def test_without_the_null_block_in_the_sum_a_request_would_wait_for_ever() -> None:
    """Why the history spec asks for one block more: vLLM compares with the pool, of which block 0 is never given."""

    def without(self: HistorySpec, vllm_config: Any) -> int:
        return self.residency.history_blocks(vllm_config.model_config.max_model_len) * self.block_bytes

    hangs = 0
    with mock.patch.object(HistorySpec, "max_memory_usage_bytes", without):
        for longest in range(1000, 1064, 8):
            run = EngineFreeRun(engine(max_model_tokens=longest))
            run.add(words(longest - 1), 5)
            try:
                run.drain(limit=60)
            except DeviceError:
                hangs += 1
    assert hangs > 0


@pytest.mark.parametrize("priority", [False, True])
def test_a_starved_pool_changes_no_token(priority: bool) -> None:
    def tokens(more_blocks: int) -> tuple[list[list[int]], int]:
        run = EngineFreeRun(engine(more_blocks=more_blocks, priority=priority, overlap=True))
        for i in range(12):
            run.add(words(200 + 13 * i, first=i // 2), 250, seed=i, priority=i % 3)
        run.drain()
        return [run.finished[f"r{i}"].tokens for i in range(12)], run.preemptions

    starved, preemptions = tokens(0)
    roomy, none = tokens(2000)
    assert preemptions >= 20
    assert none == 0
    assert starved == roomy


def test_a_request_that_must_wait_is_served_when_blocks_come_back() -> None:
    run = EngineFreeRun(engine(max_model_tokens=1024))
    first = run.add(words(1000), 20)
    second = run.add(words(1000, first=1), 20)
    waited = 0
    while first in run.work:
        run.step()
        waited += run.work[second].request.num_computed_tokens == 0
    assert waited >= 15
    run.drain()
    assert len(run.finished[second].tokens) == 1020


@pytest.mark.parametrize("overlap", [False, True])
def test_a_watermark_counts_the_blocks_of_both_groups(overlap: bool) -> None:
    """vLLM's own: admitted beside others is who leaves that many blocks free, alone everybody who fits."""

    def run_until_second_is_added(watermark: float) -> tuple[EngineFreeRun, str, str]:
        run = EngineFreeRun(engine(more_blocks=40, watermark=watermark, overlap=overlap))
        first = run.add(words(600), 60)
        for _ in range(6):  # three chunks, then decode: no table of the first one grows in the next step
            run.step()
        return run, first, run.add(words(400, first=1), 20)

    run, _, second = run_until_second_is_added(0.0)
    free, blocks = run.pool.get_num_free_blocks(), run.settings.blocks
    run.step()
    assert second in run.window.req_to_blocks
    # 400 tokens: exact blocks of 8 and pages up to E(400) = 128, of which the first holds the sink.
    spare = free - (400 // 8 + 128 // 32 - 1)
    assert spare > 0
    for kept, waits in ((spare, False), (spare + 1, True)):
        run, first, second = run_until_second_is_added((kept + 0.5) / blocks)
        assert run.manager.watermark_blocks == kept and run.pool.get_num_free_blocks() == free
        run.step()
        assert (second not in run.window.req_to_blocks) == waits
        run.drain()
        assert len(run.finished[first].tokens) == 660 and len(run.finished[second].tokens) == 420
    # All of the pool but one block: nobody ever runs beside another, and nobody waits for ever.
    run, first, second = run_until_second_is_added(0.99)
    while first in run.work:
        run.step()
        assert second not in run.window.req_to_blocks or first not in run.work
    run.drain()
    assert len(run.finished[second].tokens) == 420


def test_a_watermark_preempts_less_often() -> None:
    def preemptions(watermark: float) -> int:
        run = EngineFreeRun(engine(more_blocks=60, watermark=watermark, overlap=True))
        for i in range(12):
            run.add(words(200 + 13 * i, first=i), 500, seed=i)
        run.drain()
        return run.preemptions

    assert preemptions(0.3) < preemptions(0.0) / 2


# -- specs in vLLM's machinery ----------------------------------------------------------------------------------------


def mixed_plan() -> Plan:
    geometry = Geometry(architecture="Tiny", loops=3, layers=2, query_heads=4, kv_heads=2, head_dim=64)
    options = ("int4", "int2", "share", "bf16", "int4", "int4")
    return Plan(
        name="mixed",
        fingerprint=Fingerprint(name="tiny", geometry=geometry),
        policy=Policy(),
        options=options,
    )


def test_mixed_cells_make_one_tensor_of_equal_blocks() -> None:
    register_cache_specs()
    layout = lay_out(mixed_plan())
    specs = {
        "loopkv.0.history": history_spec(layout, torch.bfloat16),
        "loopkv.1.window": window_spec(layout, torch.bfloat16, in_flight_tokens=512),
    }
    config = make_vllm_config(engine())
    (made,) = get_kv_cache_configs(config, [specs], [1000 * layout.block_bytes + 7])
    assert made.num_blocks == 1000
    (tensor,) = made.kv_cache_tensors
    assert tensor.size == 1000 * layout.block_bytes
    assert sorted(tensor.shared_by) == sorted(specs)
    assert [len(group.layer_names) for group in made.kv_cache_groups] == [1, 1]
    for spec in specs.values():
        assert spec.page_size_bytes == layout.block_bytes
        with pytest.raises(ValueError, match="cannot be resized"):
            spec.copy_with_new_block_size(spec.block_size * 2)
        with pytest.raises(ValueError, match="cannot be padded"):
            dataclasses.replace(spec, page_size_padded=2 * layout.block_bytes)


def test_specs_travel_between_processes() -> None:
    layout = lay_out(mixed_plan())
    for spec in (
        history_spec(layout, torch.float32),
        window_spec(layout, torch.float32, in_flight_tokens=512, null_leaving=True),
    ):
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec
        assert hash(again) == hash(spec)
        assert dataclasses.replace(spec) == spec
        assert type(spec).merge([spec, again]) == spec
        with pytest.raises(AssertionError):
            type(spec).merge([spec, dataclasses.replace(spec, block_bytes=1)])
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.block_bytes = 1  # type: ignore[misc]


def test_registration_is_idempotent_and_keeps_the_built_in_specs() -> None:
    register_cache_specs()
    register_all_kvcache_specs(None)  # the engine core does this after the plugin was loaded
    register_cache_specs()
    layout = lay_out(mixed_plan())
    history, window = history_spec(layout, torch.float32), window_spec(layout, torch.float32, in_flight_tokens=1)
    assert KVCacheSpecRegistry.get_manager_class(history) is HistoryManager
    assert KVCacheSpecRegistry.get_manager_class(window) is WindowManager
    assert get_kv_cache_spec_kind(history) is KVCacheSpecKind.FULL_ATTENTION
    assert get_kv_cache_spec_kind(window) is KVCacheSpecKind.SLIDING_WINDOW
    plain = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32, "block_size": 16}
    for spec in (FullAttentionSpec(**plain), SlidingWindowSpec(sliding_window=64, **plain)):
        assert not issubclass(KVCacheSpecRegistry.get_manager_class(spec), LateHashingManager)


@pytest.fixture(autouse=True)
def _no_leftover_patches() -> Iterator[None]:
    yield
    mock.patch.stopall()
