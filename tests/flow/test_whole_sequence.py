"""The reference policy for whole sequences against the token-by-token oracle, at every edge of its boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.oracle import oracle_logits
from support.random_models import write_random_ouro

from loopkv.engine.attention import KV
from loopkv.engine.whole_sequence import (
    HistoryRead,
    SequenceRun,
    blocks,
    exact_reads,
    plan_reads,
    run_exact,
    run_perturbed,
    sequence_logits,
)
from loopkv.models import LoopedModel, load_model
from loopkv.options import BF16, INT2, INT4, SHARE, Option
from loopkv.policy import DEFAULT_POLICY, Policy

EDGES = (1, 2, 31, 32, 33, 255, 256, 257, 287, 288, 289, 318, 319, 320, 321, 351, 352, 353, 575, 576, 700)
SMALL = Policy(sink_tokens=8, window_tokens=16, page_tokens=8)
SMALL_EDGES = (1, 7, 8, 9, 16, 17, 24, 31, 32, 33, 39, 40, 41, 48, 63, 64, 100)
IDS = torch.randint(0, 64, (700,), generator=torch.Generator().manual_seed(1))

# Three loops of two layers; the third is the final one, whose cells are the sources.
PLANS: dict[str, tuple[Option, ...]] = {
    "int4": (INT4,) * 6,
    "int2": (INT2,) * 6,
    "shares": (INT4, INT2, SHARE, SHARE, INT4, INT4),
    "mixed": (BF16, SHARE, INT2, SHARE, INT2, BF16),
    "source exact": (SHARE, SHARE, SHARE, SHARE, BF16, INT4),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    def make(dtype: torch.dtype = torch.float64, **shape: int) -> LoopedModel:
        folder: Path = tmp_path_factory.mktemp("ouro")
        return load_model(write_random_ouro(folder, **shape), dtype)

    return make


def assert_equals_oracle(model, options, policy, edges, tau=None, block_tokens=None):
    longest = max(edges)
    expected = oracle_logits(model, IDS[:longest].tolist(), plan_reads(model.geometry, options), policy, tau)
    for tokens in edges:
        found = sequence_logits(model, IDS[None, :tokens], options, policy, tau=tau, block_tokens=block_tokens)
        assert torch.allclose(found[0], expected[:tokens], rtol=0, atol=1e-9), tokens


@pytest.mark.parametrize("name", PLANS)
def test_every_edge_equals_the_oracle(build, name):
    assert_equals_oracle(build(), PLANS[name], DEFAULT_POLICY, EDGES)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_blocks_of_any_size_equal_the_oracle(build, name, block_tokens):
    assert_equals_oracle(build(), PLANS[name], SMALL, SMALL_EDGES, block_tokens=block_tokens)


@pytest.mark.parametrize("block_tokens", [33, 100])
def test_own_codes_allow_blocks_longer_than_the_window(build, block_tokens):
    assert_equals_oracle(build(), PLANS["int4"], SMALL, SMALL_EDGES, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 96), (2, 2, 128), (2, 1, 256), (16, 1, 32)]
)
def test_head_shapes(build, heads, kv_heads, head_dim):
    model = build(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert_equals_oracle(model, PLANS["shares"], DEFAULT_POLICY, (319, 320, 360))
    assert_equals_oracle(model, PLANS["shares"], SMALL, SMALL_EDGES)


@pytest.mark.parametrize(("loops", "layers"), [(1, 3), (2, 1), (5, 2)])
def test_loop_counts(build, loops, layers):
    model = build(loops=loops, layers=layers)
    options = [SHARE if loop < loops - 1 else INT4 for loop in range(loops) for _ in range(layers)]
    assert_equals_oracle(model, options, SMALL, SMALL_EDGES)


@pytest.mark.parametrize("tau", [0.0, 2.0, 6.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_v_precision_takes_every_position_as_a_decode_row(build, tau, heads, kv_heads):
    model = build(heads=heads, kv_heads=kv_heads)
    assert_equals_oracle(model, PLANS["shares"], DEFAULT_POLICY, (320, 353, 420), tau=tau)
    assert_equals_oracle(model, PLANS["shares"], SMALL, SMALL_EDGES, tau=tau)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(sink_tokens=0, window_tokens=16, page_tokens=8),
        Policy(sink_tokens=32, window_tokens=8, page_tokens=16, group=16),
        Policy(sink_tokens=4, window_tokens=1, page_tokens=4, group=8),
    ],
)
@pytest.mark.parametrize("tau", [None, 1.0])
def test_other_constants(build, policy, tau):
    """No sink (V precision then compares with a split's own pages alone), a window below a page, a window of 1."""
    assert_equals_oracle(build(), PLANS["shares"], policy, SMALL_EDGES, tau=tau)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_tau_the_plain_reader_runs_bit_for_bit(build, dtype):
    """A tau that no score reaches decides nothing: within rounding of the plain reader; None is the plain reader."""
    model = build(dtype)
    ids = IDS[None, :400]
    plain = sequence_logits(model, ids, PLANS["shares"])
    assert torch.equal(plain, sequence_logits(model, ids, PLANS["shares"], tau=None))
    far = sequence_logits(model, ids, PLANS["shares"], tau=1000.0)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 1.0}[dtype]
    assert torch.allclose(plain.double(), far.double(), rtol=0, atol=tolerance)
    coarse = sequence_logits(model, ids, PLANS["shares"], tau=0.0)
    assert not torch.equal(plain[:, 319:], coarse[:, 319:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_positions_below_the_first_history_do_not_depend_on_the_plan(build, dtype, tolerance):
    """Up to the order of sums within a block that also holds later positions."""
    model = build(dtype)
    ids = IDS[None, :400]
    exact = sequence_logits(model, ids, (BF16,) * 6)
    for options in PLANS.values():
        perturbed = sequence_logits(model, ids, options)
        assert torch.equal(perturbed[:, :256], exact[:, :256])  # their block has no history at all
        assert torch.allclose(perturbed[:, :319], exact[:, :319], rtol=0, atol=tolerance)
        assert not torch.allclose(perturbed[:, 319], exact[:, 319], rtol=0, atol=tolerance)


def test_a_cell_that_reads_exact_resumes_bit_for_bit(build):
    """What makes the damage of bf16 exactly 0: a run resumed at any cell repeats the exact run."""
    model = build(torch.float32)
    ids = torch.stack([IDS[:420], IDS[200:620]])
    exact = run_exact(model, ids, keep=range(6))
    for cell in range(6):
        run = SequenceRun(
            model, exact_reads(model.geometry), DEFAULT_POLICY, 2, 420, first_cell=cell, prefix=exact.prefix[cell:]
        )
        with torch.inference_mode():
            for start, end in blocks(319, 420, 256):
                hidden = exact.hidden[cell][:, start - 319 : end - 319]
                assert torch.equal(run.run_block(hidden, start), exact.final[:, start - 319 : end - 319])
    assert torch.equal(run_perturbed(model, exact, exact_reads(model.geometry))[0], exact.final)


OWN = [(cell, cell, bits) for cell in range(6) for bits in (4, 2)]
SHARED = [(cell, 4 + cell % 2, bits) for cell in range(4) for bits in (4, None)]


@pytest.mark.parametrize(("cell", "holder", "bits"), OWN + SHARED)
def test_one_perturbed_cell_resumed_equals_the_oracle(build, cell, holder, bits):
    """The runs of a profile: one cell alone; under share its source is read coded while it reads itself exact."""
    model = build()
    reads = list(exact_reads(model.geometry))
    reads[cell] = HistoryRead(holder, bits)
    exact = run_exact(model, IDS[None, :100], SMALL, keep=[cell])
    final, _ = run_perturbed(model, exact, reads, SMALL)
    expected = oracle_logits(model, IDS[:100].tolist(), reads, SMALL)
    first = SMALL.first_coded_position
    assert torch.allclose(model.logits(final)[0], expected[first:], rtol=0, atol=1e-9)


def test_sharing_reads_the_final_loop_of_the_same_run(build):
    """The source's keys follow the perturbation of loop 1; those of the exact run would give other logits."""
    model = build()
    reads = [HistoryRead(4, 4), *exact_reads(model.geometry)[1:]]
    perturbed = oracle_logits(model, IDS[:100].tolist(), reads, SMALL)
    exact = run_exact(model, IDS[None, :100], SMALL, keep=[0])
    final, _ = run_perturbed(model, exact, reads, SMALL)
    assert torch.allclose(model.logits(final)[0], perturbed[SMALL.first_coded_position :], rtol=0, atol=1e-9)


def test_padding_on_the_right_changes_nothing_before_it(build):
    model = build()
    ids = torch.stack([IDS[:420], torch.cat([IDS[:360], torch.zeros(60, dtype=torch.int64)])])
    options = PLANS["shares"]
    found = sequence_logits(model, ids, options)
    alone = sequence_logits(model, ids[1:, :360], options)
    assert torch.allclose(found[1, :360], alone[0], rtol=0, atol=1e-9)


def test_hot_counts_are_per_sequence_and_leave_padding_out(build):
    model = build(heads=4, kv_heads=2)
    options = PLANS["shares"]
    ids = torch.stack([IDS[:60], torch.cat([IDS[:45], torch.zeros(15, dtype=torch.int64)])])
    exact = run_exact(model, ids, SMALL, keep=[0])
    _, hot = run_perturbed(model, exact, plan_reads(model.geometry, options), SMALL, tau=2.0, lengths=[60, 45])
    alone = run_exact(model, ids[1:, :45], SMALL, keep=[0])
    _, hot_alone = run_perturbed(model, alone, plan_reads(model.geometry, options), SMALL, tau=2.0)
    assert sorted(hot) == [0, 2, 3, 4, 5]  # cell 1 is int2: it has no low plane
    for cell, count in hot.items():
        totals = [2 * sum(SMALL.history_end(n) - 8 for n in range(32, length + 1)) for length in (60, 45)]
        assert count.total.tolist() == totals
        assert count.hot[1] == hot_alone[cell].hot[0]
        assert 0 < count.hot[0] < count.total[0]


def test_prefix_and_cache_hold_the_exact_keys(build):
    model = build()
    exact = run_exact(model, IDS[None, :60], SMALL, keep=[])
    run = SequenceRun(model, exact_reads(model.geometry), SMALL, 1, 60)
    with torch.inference_mode():
        run.run_block(model.embed(IDS[None, :60]), 0)
    for cell, prefix in enumerate(exact.prefix):
        kv = run.kv(cell)
        expected = KV(kv.k[:, : SMALL.first_coded_position], kv.v[:, : SMALL.first_coded_position])
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(prefix, expected, strict=True))


def test_sequences_without_history_are_no_exact_run(build):
    with pytest.raises(ValueError, match="no history"):
        run_exact(build(), IDS[None, :319])
