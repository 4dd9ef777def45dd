"""One engine of ``loopkv eval served``: documents forced through decode, every step's logits kept.

``python -m loopkv.eval.served_worker JOB.json``; started by ``loopkv.eval.served``. Tokens are forced the public way:
a custom logits processor reads them from each request's ``extra_args``, and keeps the logits before it changes them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from loopkv.errors import LoopKVError
from loopkv.eval.served import ServedJob, ServedRun, read_run
from loopkv.eval.served_bytes import PageChecker
from loopkv.records import make_record

FORCED_KEY = "loopkv_forced"
LARGEST_REPORTED_NATS = 1e-3


class Recorder:
    """Logits by (document, decode step), one row each."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Tensor] = {}


def forcing_processor(recorder: Recorder) -> type[LogitsProcessor]:
    """A logits processor class that keeps the logits of forced requests in ``recorder`` and forces their tokens."""

    class ForcedTokens(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._requests: dict[int, tuple[int, list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            process_dict_updates(self._requests, batch_update, self._forced)

        @staticmethod
        def _forced(
            params: SamplingParams, _prompt: list[int] | None, output: list[int]
        ) -> tuple[int, list[int], list[int]] | None:
            forced = (params.extra_args or {}).get(FORCED_KEY)
            return None if forced is None else (int(forced["document"]), forced["tokens"], output)

        def apply(self, logits: Tensor) -> Tensor:
            if not self._requests:
                return logits
            rows = sorted(self._requests)
            states = [self._requests[row] for row in rows]
            at = torch.tensor(rows, device=logits.device)
            kept = logits[at].float().cpu()
            steps = [min(len(output), len(tokens) - 1) for _, tokens, output in states]
            # A prompt in several chunks comes here before its end too; the last call with no output yet counts.
            for row, step, (document, _, _) in zip(kept, steps, states, strict=True):
                recorder.rows[document, step] = row
            wanted = torch.tensor([s[1][step] for s, step in zip(states, steps, strict=True)], device=logits.device)
            logits[at] = float("-inf")
            logits[at, wanted] = 0.0
            return logits

    return ForcedTokens


def serve(job: ServedJob) -> ServedRun:
    """Run the job in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0`` must be set) and stop the engine.

    Raises:
        LoopKVError: a request was preempted, or the engine reported other probabilities than those of the logits kept.
    """
    recorder = Recorder()
    cuda = torch.cuda.is_available()
    longest = max(map(len, job.documents))
    options: dict[str, Any] = {
        "model": job.model,
        "dtype": job.dtype,
        "max_model_len": longest + 1,
        "max_num_seqs": max(2, len(job.documents)),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "async_scheduling": False,
        "kv_cache_memory_bytes": job.pool_bytes,
        "logits_processors": [forcing_processor(recorder)],
        "seed": job.seed,
    }
    if cuda:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    else:
        options["enforce_eager"] = True
    if job.plan is not None:
        options["additional_config"] = {"loopkv": {"plan": job.plan}}
    llm = LLM(**{**options, **job.engine})
    try:
        return _force(job, llm, recorder)
    finally:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def _force(job: ServedJob, llm: LLM, recorder: Recorder) -> ServedRun:
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
    checker = None
    if job.plan is not None:
        cache = worker.model_runner.get_model().cache
        lengths = [len(ids) for ids in job.documents]
        checker = PageChecker(cache, scheduler, lengths, job.prompt_tokens, job.checked_pages, job.seed)
    for document, ids in enumerate(job.documents):
        # The last forced token is never fed back: any id does.
        forced = [*ids[job.prompt_tokens :], 0]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(forced),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args={FORCED_KEY: {"document": document, "tokens": forced}},
        )
        engine.add_request(f"document-{document}", {"prompt_token_ids": list(ids[: job.prompt_tokens])}, params)
    outputs: dict[int, Any] = {}
    preempted = 0
    while engine.has_unfinished_requests():
        if checker is not None:
            checker.before_step(_document_of)
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id.split("-")[1])] = output.outputs[0]
        if checker is not None:
            checker.after_step()
        preempted = max([preempted, *(request.num_preemptions for request in scheduler.requests.values())])
    if preempted:
        raise LoopKVError("eval served", got="a preempted request", wanted="a pool for all documents at once")
    folder = Path(job.output)
    folder.mkdir(parents=True, exist_ok=True)
    reported = 0.0
    for document, ids in enumerate(job.documents):
        forced = list(ids[job.prompt_tokens :])
        given = list(outputs[document].token_ids)
        if given[:-1] != forced:
            raise LoopKVError(f"document {document}", got="tokens that were not forced", wanted="the document's")
        logits = torch.stack([recorder.rows[document, step] for step in range(len(forced) + 1)])
        mine = torch.log_softmax(logits.double(), dim=-1)
        told = [entry[token].logprob for token, entry in zip(given, outputs[document].logprobs, strict=True)]
        gap = (mine[torch.arange(len(given)), torch.tensor(given)] - torch.tensor(told, dtype=torch.float64)).abs()
        reported = max(reported, float(gap.max()))
        np.save(folder / f"{document}.npy", logits[1:].numpy(), allow_pickle=False)
    if not reported <= LARGEST_REPORTED_NATS:
        raise LoopKVError(
            "eval served",
            got=f"log-probabilities that differ by {reported:.1e} nats from those of the logits kept",
            wanted=f"at most {LARGEST_REPORTED_NATS:g}",
        )
    summary = {
        "byte_check": None if checker is None else asdict(checker.result()),
        "reported_nats": reported,
        "runner": f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__name__}",
        "hardware": make_record("quality.served_kl_nats", None, "nats").hardware,
    }
    (folder / "run.json").write_text(json.dumps(summary))
    return read_run(folder)


def _document_of(request: Any) -> int:
    return int(request.sampling_params.extra_args[FORCED_KEY]["document"])


def main(path: str) -> None:
    """Run one job."""
    serve(ServedJob.load(Path(path)))


if __name__ == "__main__":
    main(sys.argv[1])
