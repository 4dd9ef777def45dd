"""Caches and weights that a decode benchmark generates: what is written where, and how the scores spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from loopkv.artifacts import Fingerprint
from loopkv.bench.dummy_model import dummy_shape, shape_size
from loopkv.bench.generated_cache import (
    QUERY_STD,
    draw_weights,
    fill_blocks,
    fill_stock,
    hot_share_of,
    key_std,
    no_forward,
    score_bits_for,
)
from loopkv.codec import decode_keys, decode_values
from loopkv.codec.pages import page_struct, unpack_page
from loopkv.errors import UnsupportedError
from loopkv.layout import lay_out
from loopkv.planner import named_plan
from loopkv.planner.named import PAPER_PLANS
from loopkv.planner.paper_plans import paper_plan

GEOMETRY = shape_size(dummy_shape("tiny")).geometry


def test_the_hot_share_asked_for_is_found() -> None:
    for tokens in (8192, 32768):
        bits = score_bits_for(0.2, tokens)
        assert hot_share_of(bits, tokens) == pytest.approx(0.2, abs=1e-3)
    # all within 14 bits of their maximum where scores spread by one bit; longer splits have larger maxima
    assert hot_share_of(1.0, 8192) == 1.0 and hot_share_of(8.0, 32768) < hot_share_of(8.0, 8192) < 0.3
    assert hot_share_of(8.0, 300) == 1.0  # no history


def test_scores_of_generated_keys_spread_as_stated() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(0, QUERY_STD, (64, 128)), rng.normal(0, key_std(8.0), (4096, 128))
    bits = q @ k.T / math.sqrt(128) / math.log(2)
    assert bits.std() == pytest.approx(8.0, rel=0.02)


def test_blocks_hold_pages_and_exact_tokens() -> None:
    plan = named_plan("per-loop:int4,share,int2", Fingerprint(name="tiny", geometry=GEOMETRY))
    layout = lay_out(plan)
    pool = torch.full((40, layout.block_bytes), 0xFF, dtype=torch.uint8)
    history, window = list(range(3, 17)), [1, 20, 21, 22, 23, 24, 25, 26, 27, 28]
    fill_blocks(layout, pool, history, window, torch.bfloat16, std=2.0)
    untouched = sorted(set(range(40)) - set(history) - set(window))
    assert bool((pool[untouched] == 0xFF).all())
    pages = pool[history][:, : layout.pages_per_block * layout.page_bytes]
    pages = pages.unflatten(1, (layout.pages_per_block, layout.page_bytes))
    for place in layout.cells:
        if place.option.shares:
            continue
        struct = page_struct(place.option, GEOMETRY.kv_heads, GEOMETRY.head_dim, plan.policy)
        keys, values = unpack_page(struct, pages[..., place.history_offset : place.history_offset + struct.nbytes])
        assert float(decode_keys(keys).std()) == pytest.approx(2.0, rel=0.15)
        assert float(decode_values(values).std()) == pytest.approx(1.0, rel=0.15)
    used = layout.window_block_tokens * layout.window_token_bytes
    exact = pool[window][:, :used].contiguous().view(torch.bfloat16).float()
    assert bool(exact.isfinite().all()) and float(exact.std()) == pytest.approx(2.0, rel=0.05)


def test_stock_caches_are_filled_whole_and_once_per_storage() -> None:
    cache = torch.full((2, 7, 16, 2, 32), float("nan"), dtype=torch.bfloat16)
    fill_stock([cache, cache.transpose(0, 1)], "auto", std=3.0)
    assert bool(cache.isfinite().all()) and float(cache.float().std()) == pytest.approx(3.0, rel=0.05)
    codes = torch.full((2, 7, 16, 2, 32), 0x7F, dtype=torch.uint8)  # NaN of e4m3
    fill_stock([codes], "fp8", std=3.0)
    values = codes.view(torch.float8_e4m3fn).float()
    assert bool(values.isfinite().all()) and float(values.std()) == pytest.approx(3.0, rel=0.05)


class Small(nn.Module):
    """Names and shapes as in vLLM's Ouro: four query heads, two KV heads of 32 channels, 64 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 64})()
        self.embed_tokens = nn.Embedding(100, 64)
        self.qkv_proj = nn.Linear(64, (4 + 2 + 2) * 32, bias=False)
        self.input_layernorm = nn.LayerNorm(64, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.qkv_proj(self.input_layernorm(self.embed_tokens(input_ids)))


def test_weights_are_the_same_everywhere_and_of_order_one() -> None:
    models = [Small(), Small()]
    for model in models:
        draw_weights(model, query_heads=4, kv_heads=2)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    ids = torch.arange(100)
    qkv = models[0](ids, ids).detach()
    # queries and keys of QUERY_STD, values of 1
    assert float(qkv[:, :192].std()) == pytest.approx(QUERY_STD, rel=0.05)
    assert float(qkv[:, 192:].std()) == pytest.approx(1.0, rel=0.05)


def test_without_forward_nothing_is_computed_and_then_it_is_again() -> None:
    model, ids = Small(), torch.arange(5)
    wanted = model(ids, ids)
    with no_forward(model):
        assert torch.equal(model(input_ids=ids, positions=ids), torch.zeros(5, 64))
    assert torch.equal(model(ids, ids), wanted)


@pytest.mark.parametrize(("layers", "memory", "read"), [(24, (155, 220), (215, 215)), (4, (26, 36), (37, 37))])
def test_paper_plans_have_the_papers_bytes(layers: int, memory: tuple[int, int], read: tuple[int, int]) -> None:
    identity = Fingerprint(name="ouro", geometry=shape_size(dummy_shape("ouro-1.4b", layers)).geometry)
    for name, kib in zip(PAPER_PLANS, (memory, read), strict=True):
        footprint = paper_plan(name, identity).footprint
        assert (footprint.stored_bytes, footprint.read_bytes) == (kib[0] * 1024, kib[1] * 1024)
    if layers == 24:
        options = paper_plan("paper-loopkv-m", identity).options
        assert [options.count(option) for option in ("share", "int2", "int4")] == [26, 20, 50]
        assert paper_plan("paper-loopkv-r", identity, tau=14.0).options.count("int2") == 25


def test_paper_plans_are_for_four_loops() -> None:
    with pytest.raises(UnsupportedError, match="four loops"):
        paper_plan("paper-loopkv-m", Fingerprint(name="tiny", geometry=GEOMETRY))
    with pytest.raises(UnsupportedError, match="paper-loopkv-r"):
        paper_plan("paper-x", Fingerprint(name="tiny", geometry=GEOMETRY))


@pytest.mark.parametrize("name", PAPER_PLANS)
def test_where_a_paper_plan_is_not_taken_the_error_says_who_takes_it(name: str) -> None:
    """``serve`` and ``plan --named`` ask ``named_plan``: no other name is suggested instead."""
    with pytest.raises(UnsupportedError, match="only `loopkv bench`, `simulate` and `capacity` take it") as caught:
        named_plan(name, Fingerprint(name="ouro", geometry=shape_size(dummy_shape("ouro-1.4b")).geometry))
    assert "did you mean" not in str(caught.value)


def test_capacity_takes_a_paper_plan() -> None:
    import typer
    from typer.testing import CliRunner

    from loopkv.cli.capacity import register

    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    out = CliRunner().invoke(app, ["capacity", "--plan", "paper-loopkv-m", "--geometry", "ouro-1.4b"])
    assert out.exit_code == 0, out.output
    (row,) = (line.split() for line in out.output.splitlines() if line.strip().startswith("paper-loopkv-m"))
    assert row[1:3] == ["155", "220"]  # KiB per token stored and read (section 4 of the paper)
