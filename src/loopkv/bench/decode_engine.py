"""The engine of one arm of ``loopkv bench decode``: its options, its weights, and the parts that a benchmark reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopkv.bench.decode import Job
from loopkv.bench.generated_cache import draw_weights
from loopkv.geometry import Geometry

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

MAX_RUNNING = 256


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """vLLM's engine in this process.

    Args:
        llm: takes requests and steps.
        scheduler: its running and waiting requests.
        worker: its model and caches.
        cuda: whether it runs on a GPU.
    """

    llm: LLMEngine
    scheduler: Any
    worker: Any
    cuda: bool

    @property
    def pool(self) -> Any:
        """Blocks of the cache."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def model(self) -> Any:
        """The model that the worker runs."""
        return self.worker.model_runner.get_model()

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def itemsize(self) -> int:
        """Bytes of an exact element."""
        import torch

        dtype = self.llm.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize


def start_engine(job: Job, max_model_tokens: int) -> DecodeEngine:
    """Start the engine of a job's arm.

    Args:
        job: the arm, and the options on top of the defaults.
        max_model_tokens: most tokens of a request.
    """
    import torch
    from vllm import LLM

    cuda = torch.cuda.is_available()
    if job.dummy:
        draw_dummy_weights(job.fingerprint.geometry, job.seed)
    llm = LLM(**engine_options(job, max_model_tokens, cuda=cuda)).llm_engine
    core: Any = llm.engine_core.engine_core  # type: ignore[attr-defined]
    return DecodeEngine(llm, core.scheduler, core.model_executor.driver_worker.worker, cuda)


def engine_options(job: Job, max_model_tokens: int, *, cuda: bool) -> dict[str, Any]:
    """Options of ``vllm.LLM`` for a job's arm; the job's own come last."""
    options: dict[str, Any] = {
        "model": job.model,
        "max_model_len": max_model_tokens,
        "max_num_seqs": MAX_RUNNING,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": job.seed,
    }
    if job.dummy:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if cuda:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    else:
        options["enforce_eager"] = True
    if job.arm.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = job.arm.kv_cache_dtype
    if job.arm.skip_layers:
        options["kv_cache_dtype_skip_layers"] = [str(layer) for layer in job.arm.skip_layers]
    if not job.arm.stock:
        options["additional_config"] = job.arm.additional_config()
    return {**options, **job.engine}


def draw_dummy_weights(geometry: Geometry, seed: int) -> None:
    """From now on ``load_format="dummy"`` loads weights of ``draw_weights`` in this process.

    They must be there before the engine prepares weights for its matrix products, so this is a loader of its own.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class DrawnWeightsLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw_weights(model, geometry.query_heads, geometry.kv_heads, seed)

    register_model_loader("dummy")(DrawnWeightsLoader)
