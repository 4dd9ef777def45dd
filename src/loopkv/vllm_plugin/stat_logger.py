"""LoopKV's metrics in the server: Prometheus beside vLLM's own, and one line beside vLLM's periodic log line.

vLLM loads this class through the entry point ``vllm.stat_logger_plugins`` in the server process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from loopkv.vllm_plugin.metrics import COUNTERS, counters_path, read_counters
from loopkv.vllm_plugin.served import ServedPlan, get_served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.loopkv")

_GAUGES = ("history_pages", "pool_blocks")


class ServedEngine:
    """One engine of this server and the counters of its workers.

    Args:
        served: the plan.
        instance_id: of the server.
        ranks: workers of the engine.
        engine: its index, the label of its metrics.
        exact_itemsize: bytes of the engine's exact dtype.
    """

    def __init__(self, served: ServedPlan, instance_id: str, ranks: int, engine: int, exact_itemsize: int = 2) -> None:
        self.served, self.instance_id, self.ranks, self.engine = served, instance_id, ranks, engine
        self.footprint = served.plan.footprint_at(exact_itemsize)
        self.running = True

    def read(self) -> dict[int, dict[str, int]]:
        """Counters of every worker that has published any."""
        paths = {rank: counters_path(self.instance_id, self.engine, rank) for rank in range(self.ranks)}
        found = {rank: read_counters(path) for rank, path in paths.items()}
        workers = {rank: counters for rank, counters in found.items() if counters is not None}
        if not self.running:  # the workers only know the step before
            for counters in workers.values():
                counters["history_pages"] = 0
        return workers


class LoopKVCollector(Collector):
    """Reads the workers' counters of every engine of this process whenever Prometheus asks.

    One collector serves all engines, told apart by a label: a registry takes each name of a metric once.
    """

    def __init__(self) -> None:
        self.engines: dict[int, ServedEngine] = {}

    def add(self, engine: ServedEngine) -> None:
        """Show ``engine``; it takes the place of one with its index and of those of a server that was here before."""
        kept = {i: e for i, e in self.engines.items() if e.instance_id == engine.instance_id}
        self.engines = {**kept, engine.engine: engine}

    def collect(self) -> Iterator[Metric]:
        """The metrics, all prefixed ``loopkv_``."""
        workers = {engine: engine.read() for engine in self.engines.values()}
        for name, text in COUNTERS.items():
            kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = kind(f"loopkv_{name}", text, labels=["engine", "rank"])
            for engine, counted in workers.items():
                for rank, counters in counted.items():
                    family.add_metric([str(engine.engine), str(rank)], counters[name])
            yield family
        share = GaugeMetricFamily(
            "loopkv_hot_share", "hot part of the tokens V precision decided on", labels=["engine"]
        )
        info = GaugeMetricFamily(
            "loopkv_plan_info", "the plan being served", labels=["engine", "plan", "sha256", "prefill", "seed_mode"]
        )
        sizes = {
            what: GaugeMetricFamily(
                f"loopkv_{what}_bytes_per_token", f"history bytes {what} per token, all cells", labels=["engine"]
            )
            for what in ("stored", "read")
        }
        for engine, counted in workers.items():
            label, served = str(engine.engine), engine.served
            if (value := hot_share(counted)) is not None:
                share.add_metric([label], value)
            info.add_metric([label, served.plan.name, served.plan.sha256, served.prefill, served.seed], 1)
            sizes["stored"].add_metric([label], engine.footprint.stored_bytes)
            sizes["read"].add_metric([label], engine.footprint.read_bytes)
        yield from (share, info, *sizes.values())


def hot_share(workers: dict[int, dict[str, int]]) -> float | None:
    """Hot part of all decided tokens, or None before the first decode step under V precision."""
    decided = sum(counters["decode_values"] for counters in workers.values())
    return sum(counters["hot_values"] for counters in workers.values()) / decided if decided else None


class LoopKVStatLogger(StatLoggerBase):
    """One per engine; without a plan it does nothing."""

    _collector: LoopKVCollector | None = None  # of this process: shared by all engines

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        served = get_served(vllm_config)
        self.engine: ServedEngine | None = None
        if served is None:
            return
        ranks = vllm_config.parallel_config.world_size
        dtype: Any = vllm_config.model_config.dtype
        self.engine = ServedEngine(served, vllm_config.instance_id, ranks, engine_index, dtype.itemsize)
        if LoopKVStatLogger._collector is None:
            collector = LoopKVCollector()
            REGISTRY.register(collector)
            LoopKVStatLogger._collector = collector
        LoopKVStatLogger._collector.add(self.engine)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Of vLLM's own statistics only whether anything runs is needed: the workers count the rest."""
        if self.engine is not None and scheduler_stats is not None:
            self.engine.running = scheduler_stats.num_running_reqs > 0

    def log_engine_initialized(self) -> None:
        """The start-up line comes from the worker, which knows the pool."""

    def log(self) -> None:
        """One line beside vLLM's."""
        if self.engine is None:
            return
        workers = self.engine.read()
        if not workers:
            return
        first = workers[min(workers)]
        share = hot_share(workers)
        logger.info(
            "Engine %03d: LoopKV plan %s, history pages in use: %d, pages coded: %d, hot share: %s, clamped values: %d",
            self.engine.engine,
            self.engine.served.plan.name,
            first["history_pages"],
            first["pages_coded"],
            "-" if share is None else f"{share:.1%}",
            sum(counters["clamped_values"] for counters in workers.values()),
        )
