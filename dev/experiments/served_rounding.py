"""How far served log-probabilities are from the policy in fp64, beside PyTorch's own fp32 runs of the policy.

Beyond position 319, over the 20 tokens that serving finds likeliest, on documents the reference model never saw. Prints
the table of docs/serving.md: mean, 99% and most in nats, mean and largest KL.

    VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH=tests:tests/engine python dev/experiments/served_rounding.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness  # sets the engine's environment before vLLM is imported
import torch

from loopkv.artifacts import Plan
from loopkv.engine.whole_sequence import sequence_logits
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.planner import named_plan
from loopkv.reference import heldout_documents, model_folder

TOKENS, DOCUMENTS, FIRST_CODED, LIKELIEST = 2000, 3, 319, 20
RUNS = {
    "PyTorch fp32, blocks of 256": (torch.float32, 256),
    "PyTorch fp32, blocks of 64": (torch.float32, 64),
    "fp64": (torch.float64, 256),
}


def serve(plan: Plan, documents: list[list[int]], folder: Path) -> list[torch.Tensor]:
    """Log-probabilities [T - 1, V] of every document as one prompt."""
    plan.save(folder / "plan.json")
    found = []
    with harness.serve(str(folder / "plan.json")) as engine:
        model = engine.runner.model
        compute, logits = model.compute_logits, []
        model.compute_logits = lambda hidden: logits.append(compute(hidden)) or logits[-1]
        for ids in documents:
            logits.clear()
            engine.forget()
            engine.generate([ids], prompt_logprobs=1)
            prompt = torch.cat([part for part in logits if len(part) > 1])  # single rows are the sampled positions
            found.append(torch.log_softmax(prompt.double(), dim=-1)[: len(ids) - 1])
    return found


def main() -> None:
    fingerprint, tokenizer = fingerprint_model(model_folder()), load_tokenizer(model_folder())
    documents = [tokenizer(text)["input_ids"][:TOKENS] for text in heldout_documents()[:DOCUMENTS]]
    plans = [named_plan(name, fingerprint) for name in ("bf16", "kivi4", "kivi2")]
    plans.append(Plan.load(Path(__file__).parents[2] / "results" / "reference" / "loopkv-m.json"))
    models = {dtype: load_model(model_folder(), dtype) for dtype in (torch.float32, torch.float64)}
    for plan in plans:
        with tempfile.TemporaryDirectory() as folder:
            found = {"served": serve(plan, documents, Path(folder))}
        for what, (dtype, block) in RUNS.items():
            found[what] = [
                torch.log_softmax(
                    sequence_logits(
                        models[dtype], torch.tensor([ids]), plan.cell_options, plan.policy, block_tokens=block
                    )[0, :-1].double(),
                    dim=-1,
                )
                for ids in documents
            ]
        exact = [x[FIRST_CODED:] for x in found.pop("fp64")]
        likeliest = [x[FIRST_CODED:].topk(LIKELIEST, -1).indices for x in found["served"]]
        for what, runs in found.items():
            runs = [x[FIRST_CODED:] for x in runs]
            away = torch.cat(
                [(x - y).gather(1, top).abs().flatten() for x, y, top in zip(runs, exact, likeliest, strict=True)]
            )
            kl = torch.cat([(y.exp() * (y - x)).sum(-1) for x, y in zip(runs, exact, strict=True)])
            rank = int(0.99 * away.numel())
            print(
                f"{plan.name}, {what}: mean {away.mean():.1e}, 99% {away.kthvalue(rank)[0]:.1e}, "
                f"most {away.max():.1e}, KL mean {kl.mean():.1e}, most {kl.max():.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
