"""Trains the reference model on one GPU within a time limit, then measures it.

    python -m training.train --data DIR --out DIR --minutes 8

DIR is what ``training.tokenizer`` wrote. ``--minutes`` is wall time from start to the end of training, compilation
included; schedules follow the clock, so a slower device sees fewer steps of the same shape. The checkpoint under
``OUT/looped-open`` is rewritten during the run and is always loadable. ``--device cpu --geometry toy`` runs the whole
path in a minute.
"""

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import model as m
from .corpus import read_jsonl
from .data import Batch, Loader, Recipe, load_tokens
from .evaluate import evaluate, summary
from .export import export
from .optim import build_optimisers
from .tasks import Pools

LOOP_WEIGHTS = (0.1, 0.2, 0.3, 1.0)
TOY = m.Geometry(hidden_size=64, intermediate_size=128, num_hidden_layers=2, total_ut_steps=4, num_attention_heads=2)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the run optimises. Learning rates are peaks; ``decay_from`` is the fraction of the run where decay starts."""

    muon_lr: float = 0.012
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 60
    decay_from: float = 0.45
    last_lr: float = 0.01
    gate_weight: float = 0.05
    gate_entropy: float = 0.1


def lr_factor(step: int, progress: float, s: Settings) -> float:
    """Linear warm-up by steps, constant, then linear in progress to ``last_lr`` at the end."""
    decay = 1.0 if progress < s.decay_from else 1 - (1 - s.last_lr) * (progress - s.decay_from) / (1 - s.decay_from)
    return min(1.0, (step + 1) / s.warmup_steps) * max(s.last_lr, decay)


@dataclass(slots=True)
class Losses:
    """One step's results: ``total`` to differentiate; detached means for the log."""

    total: Tensor
    per_loop: Tensor  # [T] weighted cross-entropy
    answers: Tensor  # last loop's cross-entropy on answer tokens
    text: Tensor  # last loop's cross-entropy on corpus rows


def exit_loss(gates: list[Tensor], losses: list[Tensor], weights: Tensor, entropy_weight: float) -> Tensor:
    """Expected cross-entropy under the exit distribution, less its entropy; trains the gate only.

    gates, losses: T tensors [N]. Exit at loop t has probability lambda_t prod_{j<t} (1 - lambda_j); the last loop takes
    the rest (Ouro).
    """
    left = torch.zeros_like(losses[0])
    expected = torch.zeros_like(losses[0])
    entropy = torch.zeros_like(losses[0])
    for t, loss in enumerate(losses):
        log_p = left + functional.logsigmoid(gates[t]) if t + 1 < len(losses) else left
        left = left + functional.logsigmoid(-gates[t])
        p = log_p.exp()
        expected = expected + p * loss.detach()
        entropy = entropy - p * log_p
    return (weights * (expected - entropy_weight * entropy)).sum() / weights.sum()


def step_losses(
    model: m.LoopedLM, batch: dict[str, Tensor], row: int, text_tokens: int, dtype: torch.dtype, pieces: m.Pieces,
    settings: Settings,
) -> Losses:  # fmt: skip
    """Weighted cross-entropy of every loop's logits, combined by LOOP_WEIGHTS, plus the gate's loss."""
    tokens, labels, weights = batch["tokens"], batch["labels"], batch["weights"]
    outputs = m.loop_outputs(model, tokens, row, dtype, pieces)
    embedding = model.model.embed_tokens.weight.to(dtype)
    gate = model.model.early_exit_gate
    losses = [pieces.loop_loss(h, embedding, labels) for h in outputs]
    gates = [pieces.gate_logit(h.detach(), gate.weight[0], gate.bias[0]) for h in outputs]
    normaliser = weights.sum()
    per_loop = torch.stack([(weights * x).sum() for x in losses]) / normaliser
    loop_weights = torch.tensor(LOOP_WEIGHTS, device=tokens.device)
    total = (loop_weights * per_loop).sum()
    total = total + settings.gate_weight * exit_loss(gates, losses, weights, settings.gate_entropy)
    last, answers = losses[-1].detach(), batch["answers"]
    return Losses(
        total=total,
        per_loop=per_loop.detach(),
        answers=(last * answers).sum() / answers.sum().clamp(min=1),
        text=last[:text_tokens].mean() if text_tokens else last.new_zeros(()),
    )


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch as tensors: tokens, labels int64, weights, answers fp32."""
    arrays = {
        "tokens": batch.tokens.astype(np.int32),
        "labels": batch.labels.astype(np.int32),
        "weights": batch.weights,
        "answers": batch.answers,
    }
    out = {}
    for name, array in arrays.items():
        t = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            t = t.pin_memory().to(device, non_blocking=True)
        out[name] = t.long() if name in ("tokens", "labels") else t.float()
    return out


def pick_attention(geometry: m.Geometry, tokens: int, row: int, device: torch.device) -> Callable:
    """The fastest backend whose output and gradients agree with the default's, by timing forward and backward."""
    if device.type != "cuda":
        return m.causal_attention
    shape = (tokens, geometry.num_attention_heads, geometry.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    best, fastest = m.causal_attention, math.inf
    reference = m.causal_attention(q, k, v, row)
    expected = [reference, *torch.autograd.grad(reference, (q, k, v), torch.ones_like(reference))]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(q: Tensor, k: Tensor, v: Tensor, row: int, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return m.causal_attention(q, k, v, row)

        try:
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                out = attend(q, k, v, row)
                got = [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
            pairs = zip((t.detach().float() for t in got), (t.detach().float() for t in expected), strict=True)
            error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        except RuntimeError as e:
            print(f"attention {backend.name}: {str(e).splitlines()[0]}", flush=True)
            continue
        print(f"attention {backend.name}: {seconds * 1e3:.2f} ms, relative error {error:.1e}", flush=True)
        if error < 2e-2 and seconds < fastest:
            best, fastest = attend, seconds
    return best


def compiled_pieces(attend: Callable) -> m.Pieces:
    """Every piece but attention through torch.compile; shapes never change, since activations are flat."""
    compile_ = lambda f: torch.compile(f, dynamic=False, fullgraph=True)  # noqa: E731
    return m.Pieces(
        attention_input=compile_(m.attention_input),
        attention_output=compile_(m.attention_output),
        loop_loss=compile_(m.loop_loss),
        rms_norm=compile_(m.rms_norm),
        gate_logit=compile_(m.gate_logit),
        attend=attend,
    )


def pick_pieces(
    model: m.LoopedLM, recipe: Recipe, attend: Callable, compile_: bool, dtype: torch.dtype, settings: Settings
) -> m.Pieces:
    """Compiled pieces if they compile and agree with eager ones on a random batch; eager pieces otherwise."""
    eager = m.Pieces(attend=attend)
    if not compile_:
        return eager
    device = model.model.norm.weight.device
    n = recipe.batch_tokens
    ids = torch.randint(0, model.geometry.vocab_size, (2, n), device=device)
    ones = torch.ones(n, device=device)
    batch = {"tokens": ids[0], "labels": ids[1], "weights": ones, "answers": ones}
    try:
        results = []
        for pieces in (eager, compiled := compiled_pieces(attend)):
            losses = step_losses(model, batch, recipe.row, n, dtype, pieces, settings)
            losses.total.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            model.zero_grad(set_to_none=True)
            results.append((float(losses.total.detach()), float(norm)))
        (a, b), (c, d) = results
        print(f"eager loss {a:.5f} gradient {b:.5f}, compiled loss {c:.5f} gradient {d:.5f}", flush=True)
        if abs(a - c) < 0.01 * abs(a) and abs(b - d) < 0.05 * b:
            return compiled
        print("compiled and eager pieces disagree: training runs eager", flush=True)
    except Exception:
        traceback.print_exc()
        print("torch.compile failed: training runs eager", flush=True)
        model.zero_grad(set_to_none=True)
    return eager


@torch.no_grad()
def validation(model: m.LoopedLM, rows: Tensor, dtype: torch.dtype, pieces: m.Pieces) -> list[float]:
    """Cross-entropy per loop (nats) on held-out rows [R, row + 1], in training precision."""
    row = rows.shape[1] - 1
    outputs = m.loop_outputs(model, rows[:, :-1].reshape(-1), row, dtype, pieces)
    embedding = model.model.embed_tokens.weight.to(dtype)
    return [float(pieces.loop_loss(h, embedding, rows[:, 1:].reshape(-1)).mean()) for h in outputs]


def heldout_rows(data: Path, recipe: Recipe, device: torch.device) -> Tensor:
    """A batch of held-out rows [rows, row + 1]; each document gives at most two rows' worth of tokens."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([d["text"] for d in read_jsonl(data / "heldout.jsonl.xz")]):
        ids += encoding.ids[: 2 * recipe.row]
    stream = torch.tensor(ids, device=device)
    rows = recipe.batch_tokens // recipe.row
    repeats = math.ceil((rows * recipe.row + 1) / len(stream))
    return stream.repeat(repeats).unfold(0, recipe.row + 1, recipe.row)[:rows].contiguous()


def train(args: argparse.Namespace) -> dict:
    """The run. Returns its record: settings, steps, tokens, seconds and the log."""
    started = time.time()
    deadline = started + 60 * args.minutes
    device = torch.device(args.device)
    geometry = TOY if args.geometry == "toy" else m.Geometry()
    recipe = Recipe(batch_tokens=args.batch_tokens, row=args.row, long_row=2 * args.row, last_length=args.row)
    settings = Settings()
    dtype = torch.bfloat16
    tokens, pools = load_tokens(args.data), Pools.load(args.data, "train")
    print(f"{time.time() - started:6.1f} s: {len(tokens) / 1e6:.1f}M corpus tokens", flush=True)
    loader = Loader(recipe, tokens, pools, args.seed, args.workers)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = m.LoopedLM(geometry).to(device)
    optimisers = build_optimisers(
        model, settings.muon_lr, settings.adam_lr, settings.weight_decay, fused=device.type == "cuda"
    )
    attend = pick_attention(geometry, recipe.batch_tokens, recipe.row, device)
    pieces = pick_pieces(model, recipe, attend, args.compile, dtype, settings)
    held = heldout_rows(args.data, recipe, device)
    folder = args.out / "looped-open"
    first = logged = saved = validated = time.time()
    print(f"{first - started:6.1f} s: {m.parameter_count(model):,} parameters, training starts", flush=True)
    history: list[dict] = []
    eager = m.Pieces(attend=attend)  # without gradients the compiled pieces would compile a second time
    held_losses = validation(model, held, dtype, eager)
    step = seen = 0
    while (now := time.time()) < deadline and step < args.max_steps:
        progress = max((now - first) / max(deadline - first, 1e-9), step / args.max_steps)
        loader.progress.value = progress
        batch = loader.get()
        losses = step_losses(model, to_device(batch, device), batch.row, batch.text_tokens, dtype, pieces, settings)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        factor = lr_factor(step, progress, settings)
        for optimiser, peak in zip(optimisers, (settings.muon_lr, settings.adam_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        seen += recipe.batch_tokens
        if step % 8 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest: the schedule follows finished work
        if step == 1 or now - logged >= args.log_seconds:
            if now - validated >= 6 * args.log_seconds:
                held_losses, validated = validation(model, held, dtype, eager), now
            record = {
                "seconds": round(now - started, 1), "progress": round(progress, 4), "step": step, "tokens": seen,
                "row": batch.row, "lr_factor": round(factor, 4), "loss_per_loop": losses.per_loop.tolist(),
                "answers": float(losses.answers), "text": float(losses.text), "heldout_per_loop": held_losses,
                "waiting_batches": loader.waiting(),
            }  # fmt: skip
            history.append(record)
            logged = now
            print(
                f"{record['seconds']:6.1f} s {progress:6.1%} step {step} row {batch.row} lr {factor:.3f} "
                f"loss {' '.join(f'{x:.3f}' for x in record['loss_per_loop'])} answers {record['answers']:.4f} "
                f"text {record['text']:.4f} held out {held_losses[-1]:.4f} queue {record['waiting_batches']}",
                flush=True,
            )
            if not math.isfinite(record["loss_per_loop"][-1]):
                raise FloatingPointError(f"loss is not finite at step {step}; the last checkpoint stands")
        if now - saved >= args.save_seconds:
            export(model, folder, args.data)
            saved = now
    export(model, folder, args.data)
    loader.close()
    ended = time.time()
    print(f"{ended - started:6.1f} s: {step} steps, {seen / 1e6:.1f}M tokens, saved {folder}", flush=True)
    return {
        "arguments": vars(args),
        "recipe": asdict(recipe),
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": pieces.loop_loss is not m.loop_loss,
        "parameters": m.parameter_count(model),
        "steps": step,
        "tokens": seen,
        "train_seconds": ended - first,
        "history": history,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time from start to the end of training")
    parser.add_argument("--eval-minutes", type=float, default=2.0, help="limit for the measurement that follows")
    parser.add_argument("--tasks", type=Path, action="append", default=[], help="evaluation items to measure on")
    parser.add_argument("--eval-length", type=int, default=2048, help="tokens of each held-out document")
    parser.add_argument("--eval-batch", type=int, default=128)
    parser.add_argument("--eval-per-cell", type=int, default=10**9, help="items of each task and length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--geometry", choices=("reference", "toy"), default="reference")
    parser.add_argument("--batch-tokens", type=int, default=Recipe().batch_tokens)
    parser.add_argument("--row", type=int, default=Recipe().row)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--log-seconds", type=float, default=10.0)
    parser.add_argument("--save-seconds", type=float, default=90.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record = train(args)
    (args.out / "results.json").write_text(json.dumps(record, default=str) + "\n")
    deadline = time.time() + 60 * args.eval_minutes
    for tasks in args.tasks:
        try:
            result = evaluate(
                args.out / "looped-open", args.data / "heldout.jsonl.xz", tasks, args.device, args.eval_batch,
                args.eval_length, args.eval_per_cell, deadline,
            )  # fmt: skip
        except Exception:
            traceback.print_exc()
            continue
        record.setdefault("evaluation", {})[tasks.name] = result
        (args.out / "results.json").write_text(json.dumps(record, default=str) + "\n")
        print(f"{tasks.name}, {result['seconds']:.1f} s\n{summary(result)}", flush=True)


if __name__ == "__main__":
    main()
