"""Caches with generated contents, so that a decode benchmark neither prefills nor reads degenerate attention.

What vLLM calls dummy weights are so small that every score is 0: attention is flat, and V precision finds every value
hot. Here all weights are drawn anew, the same in every arm, so that activations stay of order one, and the history is
drawn with keys whose scores spread by a stated number of bits. Requests are admitted as always, their blocks come from
the scheduler, but their prompts run through a forward pass that computes nothing; what they would have stored is
written into their blocks: Gaussian keys and values, in a LoopKV cache through the reference codec.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopkv.codec import encode_keys, encode_values
from loopkv.codec.pages import pack_page, page_struct
from loopkv.layout import Layout
from loopkv.policy import DEFAULT_POLICY, Policy

HOT_BITS = 14.0
"""Tokens within so many bits of the running maximum are hot: the paper's tau for Ouro."""
QUERY_STD = 2.25
"""Standard deviation of queries and of new keys under the weights drawn here."""
GENERATED_DTYPES = {"auto": None, "bfloat16": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Stock cache dtypes whose bytes can be generated, and the torch dtype of their elements (None: the tensor's own)."""
_TEMPLATE_BYTES = 2 << 30
_TEMPLATE_PAGES = 256
_FILL_BYTES = 64 << 20
_SIMULATED_ROWS = 32


def hot_share_of(score_bits: float, tokens: int, policy: Policy = DEFAULT_POLICY, tau: float = HOT_BITS) -> float:
    """Share of a history of ``tokens`` tokens that is hot when scores are Gaussian with ``score_bits`` bits.

    Follows the decision of semantics: maxima over the sink, and over a split's pages up to a token's own.
    """
    rng = np.random.default_rng(0)
    history = policy.history_end(tokens) - policy.sink_tokens
    if history <= 0:
        return 1.0
    seeds = rng.normal(0.0, score_bits, (_SIMULATED_ROWS, policy.sink_tokens)).max(1)
    scores = rng.normal(0.0, score_bits, (_SIMULATED_ROWS, history))
    split = policy.split_pages(tokens) * policy.page_tokens
    hot = 0
    for start in range(0, history, split):
        pages = scores[:, start : start + split].reshape(_SIMULATED_ROWS, -1, policy.page_tokens)
        best = np.maximum(np.maximum.accumulate(pages.max(2), axis=1), seeds[:, None])
        hot += int((pages >= best[:, :, None] - tau).sum())
    return hot / scores.size


def score_bits_for(hot_share: float, tokens: int, policy: Policy = DEFAULT_POLICY) -> float:
    """Spread of Gaussian scores in bits at which ``hot_share`` of a history of ``tokens`` tokens is hot at 14 bits."""
    low, high = 0.5, 64.0
    for _ in range(24):
        middle = math.sqrt(low * high)
        if hot_share_of(middle, tokens, policy) > hot_share:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def key_std(score_bits: float) -> float:
    """Standard deviation of keys at which queries of ``QUERY_STD`` give scores that spread by ``score_bits`` bits.

    A score is ``q . k / sqrt(D)`` nats, of standard deviation ``std(q) std(k)`` whatever D.
    """
    return score_bits * math.log(2) / QUERY_STD


@torch.no_grad()
def draw_weights(model: nn.Module, query_heads: int, kv_heads: int, seed: int = 0) -> None:
    """Draw all weights anew, by name: norms 1, everything else Gaussian with outputs of order one.

    The rows of queries and keys in ``qkv_proj`` give outputs of ``QUERY_STD``. Buffers stay as they are.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            continue  # codes of a quantised weight
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(zlib.crc32(name.encode()) + seed)
        if parameter.dim() < 2:
            parameter.fill_(1.0 if "norm" in name else 0.0)
            continue
        wide = "embed_tokens" in name
        parameter.normal_(0.0, 1.0 if wide else parameter.shape[-1] ** -0.5, generator=generator)
        if name.endswith("qkv_proj.weight"):
            scored = parameter.shape[0] * (query_heads + kv_heads) // (query_heads + 2 * kv_heads)
            parameter[:scored] *= QUERY_STD


@contextlib.contextmanager
def no_forward(model: nn.Module) -> Iterator[None]:
    """The model's forward returns zeros [T, E] inside; CUDA graphs that were captured before run as they are."""
    hidden_size = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    weight = next(p for p in model.parameters() if p.is_floating_point())

    def nothing(
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        shaped = input_ids if input_ids is not None else positions if inputs_embeds is None else inputs_embeds
        assert shaped is not None
        return torch.zeros(shaped.shape[0], hidden_size, dtype=weight.dtype, device=shaped.device)

    model.forward = nothing
    try:
        yield
    finally:
        del model.forward


@torch.no_grad()
def fill_stock(caches: list[Tensor], kv_cache_dtype: str, std: float, seed: int = 0) -> None:
    """Fill vLLM's own cache tensors with Gaussian elements (keys and values alike), every byte of every block."""
    element = GENERATED_DTYPES[kv_cache_dtype]
    seen = set()
    for cache in caches:
        storage = cache.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        dtype = cache.dtype if element is None else getattr(torch, element)
        count = min(_FILL_BYTES, storage.nbytes()) // dtype.itemsize
        generator = torch.Generator(device=cache.device)
        generator.manual_seed(seed + len(seen))
        values = torch.randn(count, generator=generator, device=cache.device).mul_(std).to(dtype)
        template = values.view(torch.uint8)
        flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        for start in range(0, len(flat), len(template)):
            part = flat[start : start + len(template)]
            part.copy_(template[: len(part)])


@torch.no_grad()
def fill_blocks(
    layout: Layout, pool: Tensor, history: list[int], window: list[int], dtype: torch.dtype, std: float, seed: int = 0
) -> None:
    """Write generated pages and exact tokens into blocks of a LoopKV pool.

    Args:
        layout: of the plan.
        pool: [blocks, block_bytes] uint8.
        history, window: block ids in the order of the requests' tables; neither holds the null block.
        dtype: exact dtype of the cache.
        std: of keys.
        seed: of the contents.
    """
    generator = torch.Generator(device=pool.device)
    generator.manual_seed(seed)
    heads, dim, policy = layout.geometry.kv_heads, layout.geometry.head_dim, layout.policy
    per_block = layout.pages_per_block
    most = max(8, min(_TEMPLATE_PAGES // per_block, _TEMPLATE_BYTES // layout.block_bytes))
    blocks = max(1, min(most, len(history)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=pool.device)

    template = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=pool.device)
    pages = template[:, : per_block * layout.page_bytes].unflatten(1, (per_block, layout.page_bytes))
    for place in layout.cells:
        if place.option.shares:
            continue
        shape = (blocks, per_block, policy.page_tokens, heads, dim)
        keys, values = (normal(*shape) * std).to(dtype), normal(*shape).to(dtype)
        if place.option.coded:
            struct = page_struct(place.option, heads, dim, policy)
            coded = encode_values(values, struct.bits, policy.group)
            data = pack_page(struct, encode_keys(keys, struct.bits), coded)
        else:
            data = torch.stack([keys, values], dim=2).flatten(2).contiguous().view(torch.uint8)
        pages[..., place.history_offset : place.history_offset + data.shape[-1]] = data
    exact = normal(8, layout.block_bytes // dtype.itemsize).mul_(std).to(dtype).view(torch.uint8)
    _write(pool, history, template)
    _write(pool, window, exact)


def _write(pool: Tensor, ids: list[int], template: Tensor) -> None:
    for start in range(0, len(ids), len(template)):
        part = torch.tensor(ids[start : start + len(template)], device=pool.device)
        pool[part, : template.shape[1]] = template[: len(part)]
