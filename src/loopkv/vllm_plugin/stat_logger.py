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


class LoopKVCollector(Collector):
    """Reads the workers' counters whenever Prometheus asks.

    Args:
        served: the plan.
        instance_id: of the engine.
        ranks: workers of the engine.
        engine: label of the metrics.
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

    def collect(self) -> Iterator[Metric]:
        """The metrics, all prefixed ``loopkv_``."""
        workers, engine = self.read(), str(self.engine)
        for name, text in COUNTERS.items():
            kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = kind(f"loopkv_{name}", text, labels=["engine", "rank"])
            for rank, counters in workers.items():
                family.add_metric([engine, str(rank)], counters[name])
            yield family
        share = GaugeMetricFamily(
            "loopkv_hot_share", "hot part of the tokens V precision decided on", labels=["engine"]
        )
        if (value := hot_share(workers)) is not None:
            share.add_metric([engine], value)
        yield share
        plan = self.served.plan
        info = GaugeMetricFamily(
            "loopkv_plan_info", "the plan being served", labels=["engine", "plan", "sha256", "prefill", "seed"]
        )
        info.add_metric([engine, plan.name, plan.sha256, self.served.prefill, self.served.seed], 1)
        yield info
        for what, value in (("stored", self.footprint.stored_bytes), ("read", self.footprint.read_bytes)):
            gauge = GaugeMetricFamily(
                f"loopkv_{what}_bytes_per_token", f"history bytes {what} per token, all cells", labels=["engine"]
            )
            gauge.add_metric([engine], value)
            yield gauge


def hot_share(workers: dict[int, dict[str, int]]) -> float | None:
    """Hot part of all decided tokens, or None before the first decode step under V precision."""
    decided = sum(counters["decode_values"] for counters in workers.values())
    return sum(counters["hot_values"] for counters in workers.values()) / decided if decided else None


class LoopKVStatLogger(StatLoggerBase):
    """One per engine; without a plan it does nothing."""

    _registered: dict[int, LoopKVCollector] = {}  # noqa: RUF012 - shared on purpose: one collector per engine label

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        served = get_served(vllm_config)
        self.collector: LoopKVCollector | None = None
        if served is None:
            return
        ranks = vllm_config.parallel_config.world_size
        dtype: Any = vllm_config.model_config.dtype
        self.collector = LoopKVCollector(served, vllm_config.instance_id, ranks, engine_index, dtype.itemsize)
        previous = self._registered.pop(engine_index, None)
        if previous is not None:  # an engine started anew in this process
            REGISTRY.unregister(previous)
        REGISTRY.register(self.collector)
        self._registered[engine_index] = self.collector

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Of vLLM's own statistics only whether anything runs is needed: the workers count the rest."""
        if self.collector is not None and scheduler_stats is not None:
            self.collector.running = scheduler_stats.num_running_reqs > 0

    def log_engine_initialized(self) -> None:
        """The start-up line comes from the worker, which knows the pool."""

    def log(self) -> None:
        """One line beside vLLM's."""
        if self.collector is None:
            return
        workers = self.collector.read()
        if not workers:
            return
        first = workers[min(workers)]
        share = hot_share(workers)
        logger.info(
            "Engine %03d: LoopKV plan %s, history pages in use: %d, pages coded: %d, hot share: %s, clamped values: %d",
            self.collector.engine,
            self.collector.served.plan.name,
            first["history_pages"],
            first["pages_coded"],
            "-" if share is None else f"{share:.1%}",
            sum(counters["clamped_values"] for counters in workers.values()),
        )
