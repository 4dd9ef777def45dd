"""KL that is accurate where it is tiny, never negative and exactly 0 for equal logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_models import write_random_ouro

from loopkv.errors import ModelFormatError
from loopkv.models import load_model
from loopkv.profiler.divergence import centred_kl, divergence, exact_predictions


def _kl(exact: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return centred_kl(exact, torch.softmax(exact.double(), -1).to(exact.dtype), logits)


def _textbook(exact: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    a, b = torch.log_softmax(exact.double(), -1), torch.log_softmax(logits.double(), -1)
    return (a.exp() * (a - b)).sum(-1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([2, 64, 4096]),
    spread=st.floats(0.1, 20.0),
    size=st.floats(-2, 1.5).map(lambda e: 10.0**e),
)
def test_it_is_the_textbook_kl(seed, vocab, spread, size):
    generator = torch.Generator().manual_seed(seed)
    exact = spread * torch.randn(3, vocab, generator=generator)
    logits = exact + size * torch.randn(3, vocab, generator=generator)
    expected = _textbook(exact, logits)
    assert torch.allclose(_kl(exact, logits), expected, rtol=1e-4, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.floats(-6, 0).map(lambda e: 10.0**e))
def test_tiny_divergences_keep_their_digits(seed, size):
    """Second order: KL = Var_p[d] / 2 + O(d^3); textbook fp32 log-softmaxes are off by 1e-7 here."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(2, 512, generator=generator, dtype=torch.float64)
    d = size * torch.randn(2, 512, generator=generator, dtype=torch.float64)
    p = torch.softmax(exact, -1)
    variance = (p * d**2).sum(-1) - (p * d).sum(-1) ** 2
    kl = centred_kl(exact, p, exact + d)
    assert (kl > 0).all()
    if size <= 1e-3:
        assert torch.allclose(kl, variance / 2, rtol=2e-2, atol=0)


@given(seed=st.integers(0, 2**20), shift=st.floats(-100, 100))
def test_a_shift_of_all_logits_is_nothing(seed, shift):
    exact = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kl = _kl(exact, exact + shift)
    assert (kl >= 0).all() and (kl < 1e-24 + 1e-28 * shift**2).all()


def test_equal_logits_give_exactly_zero():
    exact = 10 * torch.randn(5, 4096, generator=torch.Generator().manual_seed(0))
    assert _kl(exact, exact.clone()).tolist() == [0.0] * 5


def test_a_prediction_turned_upside_down_is_finite():
    exact = torch.tensor([[100.0, 0.0, 0.0]])
    # p lies on token 1 but for 2 e^-100, and q gives it e^-100 of its mass: KL = -log q_1 = 100 to 1e-40.
    kl = _kl(exact, torch.tensor([[0.0, 100.0, 0.0]]))
    assert kl.item() == pytest.approx(100.0, rel=1e-9)
    assert _kl(10 * exact, torch.tensor([[0.0, 1000.0, 0.0]])).item() == pytest.approx(1000.0, rel=1e-9)
    # p = (1, e^-100), q = (1/2, 1/2): log 2, although a logit moves by 100.
    assert _kl(torch.tensor([[100.0, 0.0]]), torch.zeros(1, 2)).item() == pytest.approx(0.6931471805599453, rel=1e-9)


def test_models_are_compared_row_by_row(tmp_path):
    model = load_model(write_random_ouro(tmp_path / "m"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5000, 32, generator=generator)  # several chunks of rows
    other = hidden + 0.3 * torch.randn(5000, 32, generator=generator)
    exact = exact_predictions(model, hidden)
    kl, changed = divergence(model, exact, other)
    assert torch.allclose(kl, _textbook(model.logits(hidden), model.logits(other)), rtol=1e-4, atol=1e-9)
    assert torch.equal(changed, model.logits(hidden).argmax(-1) != model.logits(other).argmax(-1))
    kl, changed = divergence(model, exact, hidden.clone())
    assert kl.abs().sum() == 0 and not changed.any()


def test_logits_that_are_not_finite_are_refused(tmp_path):
    model = load_model(write_random_ouro(tmp_path / "m"))
    with pytest.raises(ModelFormatError, match="not finite"):
        exact_predictions(model, torch.full((2, 32), float("inf")))
