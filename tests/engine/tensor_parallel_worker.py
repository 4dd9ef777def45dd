"""Two tensor-parallel workers answer the prompts on stdin: tokens, logprobs and their counters on stdout as JSON."""

from __future__ import annotations

import json
import sys

import harness  # noqa: F401 - sets the engine's environment
from vllm import LLM, SamplingParams

from loopkv.reference import model_folder
from loopkv.vllm_plugin.metrics import counters_path, read_counters


def main() -> None:
    asked = json.load(sys.stdin)
    llm = LLM(
        str(model_folder()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        tensor_parallel_size=2,
        additional_config={"loopkv": {"plan": asked["plan"]}},
        disable_log_stats=True,
    )
    parameters = SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], logprobs=20, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], parameters, use_tqdm=False)
    instance = llm.llm_engine.vllm_config.instance_id
    completions = [output.outputs[0] for output in outputs]
    answer = {
        "tokens": [list(completion.token_ids) for completion in completions],
        "logprobs": [
            [[(token, value.logprob) for token, value in entry.items()] for entry in completion.logprobs]
            for completion in completions
        ],
        "counters": [read_counters(counters_path(instance, 0, rank)) for rank in (0, 1)],
    }
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
