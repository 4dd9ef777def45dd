"""Metrics of a server with several engines: one collector, told apart by a label."""

from __future__ import annotations

import harness  # noqa: F401 - sets the environment before vLLM is imported
import pytest
from prometheus_client import REGISTRY
from vllm import EngineArgs

from loopkv.reference import model_folder
from loopkv.vllm_plugin.metrics import Counters, counters_path
from loopkv.vllm_plugin.stat_logger import LoopKVStatLogger

pytestmark = pytest.mark.engine


def config(**options):
    return EngineArgs(
        model=str(model_folder()), dtype="float32", max_model_len=1024, data_parallel_size=2, **options
    ).create_engine_config()


def test_the_engines_of_one_server_share_a_collector():
    served = config(additional_config={"loopkv": {"plan": "kivi4"}})
    loggers = [LoopKVStatLogger(served, engine) for engine in (0, 1)]
    workers = [Counters(counters_path(served.instance_id, engine, 0)) for engine in (0, 1)]

    def shown(name: str, **labels: str) -> list[float | None]:
        return [REGISTRY.get_sample_value(name, {"engine": str(engine), **labels}) for engine in (0, 1)]

    try:
        for worker, pages in zip(workers, (3, 5), strict=True):
            worker.set("pages_coded", pages)
            worker.set("history_pages", 1)
            worker.flush()
        assert shown("loopkv_pages_coded_total", rank="0") == [3, 5]
        assert shown("loopkv_history_pages", rank="0") == [1, 1]
        loggers[1].engine.running = False
        assert shown("loopkv_history_pages", rank="0") == [1, 0]
        again = config(additional_config={"loopkv": {"plan": "kivi4"}})
        LoopKVStatLogger(again, 0)  # a server started anew in this process
        assert shown("loopkv_pages_coded_total", rank="0") == [None, None]
        stored = shown("loopkv_stored_bytes_per_token")
        assert stored[0] is not None and stored[0] > 0 and stored[1] is None
    finally:
        for worker in workers:
            worker.close()


def test_an_engine_without_a_plan_shows_nothing():
    assert LoopKVStatLogger(config(), 7).engine is None
    assert REGISTRY.get_sample_value("loopkv_stored_bytes_per_token", {"engine": "7"}) is None
