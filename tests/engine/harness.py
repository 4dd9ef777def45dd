"""A real vLLM engine on the CPU, in this process, with everything inside reachable.

Chunk sizes change between requests of one engine (the scheduler reads its cap every step), so one start serves many
cases. Fresh pools are filled with NaN: nothing unwritten may ever be read.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # read once a process; what it makes vLLM see is tested
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles its sampler even when eager: 25 s that test nothing of ours

import torch
from vllm import LLM, SamplingParams

from loopkv.reference import model_folder

NAN_BYTE = 0xFF
TIE_MARGIN_NATS = 1e-2


@dataclass(frozen=True, slots=True)
class Output:
    """What one request gave: token ids, and per generated token the logprobs {token: nats} the engine reported."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None
    cached_tokens: int


class ServedEngine:
    """A started engine."""

    def __init__(self, plan: str | None, **options):
        settings = dict(options.pop("settings", {}))
        if plan is not None:
            settings["plan"] = str(plan)
        arguments = {
            "model": str(model_folder()),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2304,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "seed": 0,
            "max_logprobs": 20,
            "disable_log_stats": True,
            **options,
        }
        if settings:
            arguments["additional_config"] = {"loopkv": settings}
        self.llm = LLM(**arguments)
        if plan is not None:
            self.cache.history.kv_cache.view(torch.uint8).fill_(NAN_BYTE)

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def cache(self):
        """The ``CellCache`` of the model."""
        return self.runner.model.cache

    @property
    def block_pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def block_table(self, layer: str, request_id: str) -> torch.Tensor:
        """Block ids of a live request in the group of ``layer``."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        group = next(i for i, group in enumerate(groups) if layer in group.layer_names)
        batch = self.runner.input_batch
        row = next(i for i, name in enumerate(batch.req_ids) if name.startswith(request_id))
        return batch.block_table[group].block_table.cpu[row].clone()

    def count_preemptions(self) -> None:
        """Count from now on in ``preemptions``."""
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def set_chunk(self, tokens: int) -> None:
        """Most new tokens of one request a step, from now on."""
        self.scheduler.scheduler_config.long_prefill_token_threshold = tokens

    def forget(self) -> None:
        """Drop the prefix cache (and poison the whole pool again): the next requests start cold."""
        assert self.llm.reset_prefix_cache()
        self.cache.history.kv_cache.view(torch.uint8).fill_(NAN_BYTE)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 1,
        *,
        logprobs: int | None = 20,
        prompt_logprobs: int | None = None,
        priority: list[int] | None = None,
        lora=None,
        **sampling,
    ) -> list[Output]:
        """Greedy outputs of token prompts, all submitted at once; requests with n > 1 give several outputs."""
        parameters = SamplingParams(
            temperature=sampling.pop("temperature", 0.0),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self.llm.generate(requests, parameters, use_tqdm=False, priority=priority, lora_request=lora)
        outputs = []
        for result in results:
            for completion in result.outputs:
                outputs.append(
                    Output(
                        tokens=tuple(completion.token_ids),
                        logprobs=tuple(plain(entry) for entry in completion.logprobs or ()),
                        prompt_logprobs=None
                        if result.prompt_logprobs is None
                        else tuple(None if entry is None else plain(entry) for entry in result.prompt_logprobs),
                        cached_tokens=result.num_cached_tokens or 0,
                    )
                )
        return outputs

    def check_idle(self) -> None:
        """No request is left and every block is back in the pool."""
        assert not self.scheduler.requests, "requests are left"
        pool = self.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"

    def close(self) -> None:
        """Stop the engine so that another can start in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def plain(entry) -> dict[int, float]:
    return {token: value.logprob for token, value in entry.items()}


@contextmanager
def serve(plan: str | None, **options):
    """A started engine that is stopped on the way out."""
    engine = ServedEngine(plan, **options)
    try:
        yield engine
    finally:
        engine.close()


def same_tokens(a: Output, b: Output) -> bool:
    """Whether two greedy outputs agree up to a tie (margin below 1e-2 nats), after which they may part."""
    for step, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        if x != y:
            margins = [_margin(output.logprobs[step]) for output in (a, b)]
            return min(margins) < TIE_MARGIN_NATS
    return True


def _margin(logprobs: dict[int, float]) -> float:
    best = sorted(logprobs.values(), reverse=True)
    return best[0] - best[1]
