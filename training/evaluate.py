"""Measures a checkpoint: perplexity of each loop on held-out documents, greedy accuracy on the tasks.

    python -m training.evaluate --model DIR --heldout FILE --tasks FILE --out results.json

Everything runs in fp32 (TF32 off) on the values of the BF16 file.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from .corpus import read_jsonl
from .export import load
from .model import (
    LoopedLM,
    Pieces,
    attention_input,
    attention_output,
    layer_weights,
    loop_outputs,
    rms_norm,
    rope_table,
)
from .tasks import score

MAX_NEW_TOKENS = 112


@torch.no_grad()
def perplexity(model: LoopedLM, tokenizer: Tokenizer, documents: list[dict], length: int, batch: int = 8) -> dict:
    """Per loop over the first ``length`` + 1 tokens of every document that has as many; also bits per character."""
    device = model.model.norm.weight.device
    rows, chars, sources = [], 0, defaultdict(int)
    for document in documents:
        encoding = tokenizer.encode(document["text"], add_special_tokens=False)
        if len(encoding.ids) > length:
            rows.append(encoding.ids[: length + 1])
            chars += encoding.offsets[length][1] - encoding.offsets[0][1]
            sources[document["source"]] += 1
    if not rows:
        raise ValueError(f"no document of more than {length} tokens")
    totals = torch.zeros(model.geometry.total_ut_steps, dtype=torch.float64, device=device)
    embedding = model.model.embed_tokens.weight
    for i in range(0, len(rows), batch):
        ids = torch.tensor(rows[i : i + batch], device=device)
        outputs = loop_outputs(model, ids[:, :-1].reshape(-1), length, torch.float32, Pieces())
        labels = ids[:, 1:].reshape(-1)
        for t, h in enumerate(outputs):
            losses = functional.cross_entropy(functional.linear(h, embedding), labels, reduction="none")
            totals[t] += losses.double().sum()
    nats = (totals / (len(rows) * length)).tolist()
    return {
        "documents": len(rows),
        "tokens_each": length,
        "sources": dict(sources),
        "cross_entropy_per_loop_nats": nats,
        "perplexity_per_loop": [math.exp(x) for x in nats],
        "bits_per_char": nats[-1] * len(rows) * length / math.log(2) / chars,
    }


class _Cells:
    """K and V of every (loop, layer) for a batch: [B, H, capacity, K] each, written at each row's own length."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []


@torch.no_grad()
def generate(model: LoopedLM, prompts: list[list[int]], stop: Tensor, max_new: int = MAX_NEW_TOKENS) -> list[list[int]]:
    """Greedy continuations of a batch, each up to and without its first token with ``stop[token]`` true.

    Prompts are padded on the right: causal attention never reads the padding, and new tokens overwrite it.
    """
    g = model.geometry
    device = model.model.norm.weight.device
    heads, eps, size = g.num_attention_heads, g.rms_norm_eps, len(prompts)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max())
    capacity = width + max_new
    ids = torch.zeros(size, width, dtype=torch.long, device=device)
    for r, prompt in enumerate(prompts):
        ids[r, : len(prompt)] = torch.tensor(prompt, device=device)
    layers = [layer_weights(layer, torch.float32) for layer in model.model.layers]
    embedding, final_norm = model.model.embed_tokens.weight, model.model.norm.weight
    cells = _Cells()

    def run(tokens: Tensor, positions: Tensor, attend) -> Tensor:
        cos, sin = rope_table(g, positions)
        h = functional.embedding(tokens, embedding)
        cell = 0
        for _ in range(g.total_ut_steps):
            for w in layers:
                n1, n2, n3, n4 = w.norms
                q, k, v = attention_input(h, n1, w.qkv, cos, sin, heads, eps)
                h = attention_output(h, attend(cell, q, k, v), w.o, w.gate_up, w.down, n2, n3, n4, eps)
                cell += 1
            h = rms_norm(h, final_norm, eps)
        return h

    def prefill(cell: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(size, width, heads, -1).transpose(1, 2) for t in (q, k, v))
        for store, new in ((cells.k, k), (cells.v, v)):
            full = new.new_zeros(size, heads, capacity, new.shape[-1])
            full[:, :, :width] = new
            store.append(full)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(size * width, -1)

    rows = torch.arange(size, device=device)
    place = torch.arange(capacity, device=device)

    def decode(cell: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cells.k[cell][rows, :, lengths] = k
        cells.v[cell][rows, :, lengths] = v
        mask = (place <= lengths[:, None])[:, None, None]
        out = functional.scaled_dot_product_attention(q[:, :, None], cells.k[cell], cells.v[cell], attn_mask=mask)
        return out.reshape(size, -1)

    h = run(ids.reshape(-1), torch.arange(width, device=device).repeat(size), prefill)
    h = h.view(size, width, -1)[rows, lengths - 1]
    outputs: list[list[int]] = [[] for _ in prompts]
    alive = [True] * size
    for _ in range(max_new):
        token = functional.linear(h, embedding).argmax(-1)
        for r, (t, ends) in enumerate(zip(token.tolist(), stop[token].tolist(), strict=True)):
            alive[r] = alive[r] and not ends
            if alive[r]:
                outputs[r].append(t)
        if not any(alive):
            break
        h = run(token, lengths, decode)
        lengths = lengths + 1
    return outputs


def stop_table(tokenizer: Tokenizer, device: torch.device | str) -> Tensor:
    """[vocab] bool: tokens whose text holds a newline, and end-of-text."""
    size = tokenizer.get_vocab_size()
    table = [i == 0 or "\n" in tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    return torch.tensor(table, device=device)


def task_accuracy(
    model: LoopedLM, tokenizer: Tokenizer, items: list[dict], batch: int, deadline: float = math.inf
) -> dict:
    """Mean score and share of full scores of each (task, length), with two samples; stops early at ``deadline``."""
    stop = stop_table(tokenizer, model.model.norm.weight.device)
    prompts = [e.ids for e in tokenizer.encode_batch([i["prompt"] for i in items], add_special_tokens=False)]
    scores: dict[tuple[str, int], list[float]] = defaultdict(list)
    tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
    samples: dict[str, list[dict]] = defaultdict(list)
    order = sorted(range(len(items)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), batch):
        if time.time() > deadline:
            break
        chosen = order[start : start + batch]
        for i, output in zip(chosen, generate(model, [prompts[i] for i in chosen], stop), strict=True):
            item, text = items[i], tokenizer.decode(output)
            key = (item["task"], item["length"])
            scores[key].append(score(item["score"], item["answer"], text))
            tokens[key].append(len(prompts[i]))
            if len(samples[f"{key[0]}-{key[1]}"]) < 2:
                samples[f"{key[0]}-{key[1]}"].append({"want": item["answer"].strip(), "got": text})
    table: dict[str, dict] = defaultdict(dict)
    for (task, length), values in sorted(scores.items()):
        table[task][str(length)] = {
            "items": len(values),
            "score": sum(values) / len(values),
            "full": sum(v == 1 for v in values) / len(values),
            "mean_prompt_tokens": sum(tokens[task, length]) / len(values),
        }
    return {"tasks": dict(table), "samples": dict(samples), "items": sum(map(len, scores.values()))}


def evaluate(
    folder: Path, heldout: Path, tasks: Path, device: str, batch: int, length: int = 2048, per_cell: int = 10**9,
    deadline: float = math.inf,
) -> dict:  # fmt: skip
    """All measurements of one checkpoint; ``per_cell`` limits the items of each (task, length)."""
    torch.set_float32_matmul_precision("highest")
    started = time.time()
    model = load(folder, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seen: dict[tuple[str, int], int] = defaultdict(int)
    items = []
    for item in read_jsonl(tasks):
        seen[item["task"], item["length"]] += 1
        if seen[item["task"], item["length"]] <= per_cell:
            items.append(item)
    result = {"heldout": perplexity(model, tokenizer, read_jsonl(heldout), length)}
    result |= task_accuracy(model, tokenizer, items, batch, deadline)
    result["seconds"] = time.time() - started
    return result


def summary(result: dict) -> str:
    """A short table of a result."""
    held = result["heldout"]
    lines = ["perplexity per loop " + " ".join(f"{p:.2f}" for p in held["perplexity_per_loop"])]
    lines[0] += f", {held['bits_per_char']:.4f} bits per character, {held['documents']} documents"
    for task, cells in result["tasks"].items():
        columns = [f"  {length}: {c['score']:6.1%} ({c['full']:6.1%} full)" for length, c in cells.items()]
        lines.append(f"{task:12s}" + "".join(columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--heldout", type=Path, required=True, help="JSON lines: source, text")
    parser.add_argument("--tasks", type=Path, required=True, help="JSON lines: the evaluation items")
    parser.add_argument("--out", type=Path, help="where results.json goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each held-out document")
    parser.add_argument("--per-cell", type=int, default=10**9, help="at most this many items of each task and length")
    args = parser.parse_args()
    result = evaluate(args.model, args.heldout, args.tasks, args.device, args.batch, args.length, args.per_cell)
    print(summary(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
