"""vLLM's real scheduler and cache manager under random traffic, every touch of the pool checked by a symbolic device.

A trace raises ``DeviceError`` on: a wrong or missing read; a code or append into the null block, or into a block that
is hashed or has another owner; a prediction of blocks that is not exact; a window longer than admission reserved; a
request that never finishes; a block that is not returned. Traces are 400 steps of arrivals, aborts and follow-ups, then
a drain.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="the CPU build of vLLM is not installed")

from support.cache_trace import (
    BLOCK_PAIRS,
    WINDOW_BLOCKS,
    TraceSettings,
    long_chunk_settings,
    run_trace,
    trace_settings,
)
from support.engine_free import EngineFreeRun
from support.symbolic_device import DeviceError

from loopkv.residency import Residency
from loopkv.vllm_plugin.cache.managers import HistoryManager, LateHashingManager, WindowManager
from loopkv.vllm_plugin.cache.specs import WindowSpec

TRACES, LONG_CHUNK_TRACES, BATCH = 64, 16, 8


def run_batch(make: Callable[[int], TraceSettings], seeds: range) -> list[EngineFreeRun]:
    runs = []
    for seed in seeds:
        try:
            runs.append(run_trace(make(seed)))
        except Exception as error:
            raise AssertionError(f"trace {seed}: {make(seed)}") from error
        assert len(runs[-1].finished) >= 20
        assert runs[-1].device.tally.coded_pages > 20
    return runs


@pytest.mark.parametrize("first", range(0, TRACES, BATCH))
def test_traces(first: int) -> None:
    runs = run_batch(trace_settings, range(first, first + BATCH))
    # The traces must have tried something: starved pools, hits (rare on the coarse grids of odd window blocks).
    hits, preemptions = sum(hit > 0 for run in runs for hit in run.hits), [run.preemptions for run in runs]
    print(f"traces {first} to {first + BATCH - 1}: {hits} hits, preemptions {preemptions}")
    assert sum(count >= 20 for count in preemptions) >= 2
    assert hits >= (5 if first + BATCH <= BLOCK_PAIRS else 1)


@pytest.mark.parametrize("first", range(0, LONG_CHUNK_TRACES, BATCH))
def test_traces_of_long_chunks(first: int) -> None:
    runs = run_batch(long_chunk_settings, range(first, first + BATCH))
    for run in runs:
        assert run.device.tally.null_appends > 0, "no token left the window within its own chunk"


def test_traces_cover_the_block_sizes_and_chunks() -> None:
    engines = [trace_settings(seed).engine for seed in range(TRACES)]
    assert all(trace_settings(seed).steps == 400 for seed in range(TRACES))
    pairs = {(engine.residency.history_block_tokens, engine.residency.window_block_tokens) for engine in engines}
    assert pairs >= set(itertools.product((32, 64, 128, 256), WINDOW_BLOCKS))
    assert {window for _, window in pairs} == set(range(4, 33))
    assert {engine.chunk_tokens for engine in engines} >= {16, 64, 128, 256}
    assert (
        min(sum(e.priority for e in engines), sum(e.overlap for e in engines), sum(e.runner_v2 for e in engines)) > 10
    )


# -- every rule is needed: without it the device notices --------------------------------------------------------------

Broken = list[tuple[type, str, Any]]


def hashed_at_once(manager: type[LateHashingManager]) -> Broken:
    """The manager hashes at schedule time, as vLLM's own do."""

    def cache_blocks(self: Any, request: Any, num_tokens: int, retention_interval: int | None = None) -> None:
        commit(self, request, num_tokens, num_tokens)

    return [(manager, "cache_blocks", cache_blocks)]


def commit(self: Any, request: Any, num_tokens: int, computed: int) -> None:
    full, cached = self._full_entries(min(num_tokens, computed)), self.num_cached_block.get(request.request_id, 0)
    if full > cached:
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=cached,
            num_full_blocks=full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request.request_id] = full


def freed_early(tokens: int) -> Broken:
    remove = WindowManager.remove_skipped_blocks

    def remove_skipped_blocks(self: Any, request_id: str, processed: int, prompt: int | None = None) -> None:
        remove(self, request_id, processed + tokens, prompt)

    return [(WindowManager, "remove_skipped_blocks", remove_skipped_blocks)]


def backward_scan() -> Broken:
    """Frees as vLLM's managers do: backwards, up to the first null entry."""

    def remove_skipped_blocks(self: Any, request_id: str, processed: int, prompt: int | None = None) -> None:
        rule, table = self.residency, self.req_to_blocks.get(request_id, [])
        stop = min(rule.first_live_window_entry(processed), len(table))
        self._remove_blocks_in_range(request_id, rule.sink_window_entries, stop)

    return [(WindowManager, "remove_skipped_blocks", remove_skipped_blocks)]


RULES: dict[str, Callable[[], Broken]] = {
    "history blocks are hashed a step late": lambda: hashed_at_once(HistoryManager),
    "window blocks are hashed a step late": lambda: hashed_at_once(WindowManager),
    "a hit's history is trimmed to its end": lambda: [(HistoryManager, "_hit_entries", lambda self, blocks, n: blocks)],
    "a hit ends where a history block begins": lambda: [(Residency, "can_resume_at", lambda self, n: True)],
    "a history block is complete when its pages are coded": lambda: [
        (HistoryManager, "_full_entries", lambda self, n: n // self.block_size)
    ],
    "window blocks live until history covers them": lambda: freed_early(32),
    "the sink stays": lambda: [(Residency, "sink_window_entries", property(lambda self: 0))],
    "freeing passes null entries": backward_scan,
    "admission reserves the prefill's window": lambda: [
        (
            WindowSpec,
            "max_admission_blocks_per_request",
            lambda self, *_, max_model_len, **__: resting(self, max_model_len),
        )
    ],
}


def resting(spec: WindowSpec, longest: int) -> int:
    return spec.residency.window_blocks(longest)


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[None]:
    patches = [mock.patch.object(*patch) for patch in RULES[request.param]()]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


@pytest.mark.parametrize("broken", RULES, indirect=True)
def test_a_broken_rule_is_noticed(broken: None) -> None:
    for seed in range(24):
        for settings in (trace_settings(seed), long_chunk_settings(seed)):
            try:
                run_trace(settings)
            except DeviceError:
                return
    pytest.fail("48 traces did not notice")
