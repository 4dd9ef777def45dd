"""Model, optimiser, export: shapes, names, a step that learns, decoding equal to the whole-sequence forward."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from training import model as m
from training.evaluate import generate
from training.export import export, load
from training.optim import build_optimisers, orthogonalise
from training.train import LOOP_WEIGHTS, Settings, lr_factor, step_losses

SMALL = m.Geometry(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, total_ut_steps=4, num_attention_heads=2
)


@pytest.fixture
def small() -> m.LoopedLM:
    torch.manual_seed(0)
    return m.LoopedLM(SMALL)


def test_reference_size_fits_the_package() -> None:
    with torch.device("meta"):
        model = m.LoopedLM.__new__(m.LoopedLM)
        m.LoopedLM.__init__(model, m.Geometry())
    assert m.parameter_count(model) == 8_067_841
    assert 2 * m.parameter_count(model) < 15.5 * 2**20


def test_a_few_steps_lower_the_loss(small: m.LoopedLM) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 96, (4, 33))
    ones = torch.ones(4 * 32)
    batch = {"tokens": ids[:, :-1].reshape(-1), "labels": ids[:, 1:].reshape(-1), "weights": ones, "answers": ones}
    optimisers = build_optimisers(small, 0.02, 0.01, 0.1, fused=False)
    seen = []
    for _ in range(12):
        losses = step_losses(small, batch, 32, 128, torch.float32, m.Pieces(), Settings())
        losses.total.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        seen.append(losses.per_loop)
    assert len(seen[0]) == len(LOOP_WEIGHTS)
    assert (seen[-1] < 0.9 * seen[0]).all()


def test_every_parameter_has_one_optimiser_and_a_gradient(small: m.LoopedLM) -> None:
    optimisers = build_optimisers(small, 0.02, 0.01, 0.1, fused=False)
    owned = [id(p) for o in optimisers for group in o.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in small.parameters())
    ids = torch.randint(0, 96, (64,))
    batch = {"tokens": ids, "labels": ids, "weights": torch.ones(64), "answers": torch.ones(64)}
    step_losses(small, batch, 32, 64, torch.float32, m.Pieces(), Settings()).total.backward()
    assert all(p.grad is not None for p in small.parameters())


def test_the_gate_does_not_move_the_model(small: m.LoopedLM) -> None:
    h = torch.randn(8, 32, requires_grad=True)
    gate = small.model.early_exit_gate
    m.gate_logit(h.detach(), gate.weight[0], gate.bias[0]).sum().backward()
    assert h.grad is None


def test_newton_schulz_flattens_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16), (1, 24, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.max() < 1.35
        assert values.median() > 0.6


def test_learning_rate_warms_up_holds_and_falls() -> None:
    s = Settings()
    assert lr_factor(0, 0.0, s) == pytest.approx(1 / 60)
    assert lr_factor(1000, 0.4, s) == 1
    assert lr_factor(1000, 1.0, s) == pytest.approx(s.last_lr)


def test_rope_turns_by_position() -> None:
    cos, sin = m.rope_table(SMALL, torch.tensor([0, 3]))
    x = torch.zeros(2, 1, 16)
    x[:, :, 0] = 1.0
    y = m.rotate(x, cos, sin)
    assert torch.allclose(y[0], x[0])
    expected = torch.tensor([3.0]).cos(), torch.tensor([3.0]).sin()
    assert torch.allclose(torch.stack([y[1, 0, 0], y[1, 0, 8]]), torch.cat(expected))


def test_rows_do_not_see_each_other(small: m.LoopedLM) -> None:
    ids = torch.randint(0, 96, (2, 24))
    together = m.loop_outputs(small, ids.reshape(-1), 24, torch.float32, m.Pieces())[-1].view(2, 24, -1)
    alone = m.loop_outputs(small, ids[1], 24, torch.float32, m.Pieces())[-1]
    assert torch.allclose(together[1], alone, atol=1e-5)


def test_export_then_load(small: m.LoopedLM, tmp_path: Path) -> None:
    folder = export(small, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    names = {"model.embed_tokens.weight", "model.norm.weight", "model.early_exit_gate.weight"}
    names |= {"model.early_exit_gate.bias"}
    for layer in range(2):
        at = f"model.layers.{layer}."
        names |= {f"{at}self_attn.{p}_proj.weight" for p in "qkvo"}
        names |= {f"{at}mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        names |= {f"{at}{norm}.weight" for norm in m.NORMS}
    assert set(state) == names
    assert all(t.dtype == torch.bfloat16 for t in state.values())
    assert state["model.layers.1.mlp.down_proj.weight"].shape == (32, 48)
    assert state["model.early_exit_gate.weight"].shape == (1, 32)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "ouro" and "auto_map" not in config and config["tie_word_embeddings"]
    again = load(folder)
    assert again.geometry == SMALL
    for (_, a), (_, b) in zip(small.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)


def test_decoding_equals_the_whole_forward(small: m.LoopedLM) -> None:
    """Greedy tokens from cached cells, for prompts of unequal length, are those of a forward without a cache."""
    torch.manual_seed(2)
    prompts = [torch.randint(1, 96, (n,)).tolist() for n in (5, 12, 9)]
    stop = torch.zeros(96, dtype=torch.bool)
    outputs = generate(small.eval(), prompts, stop, max_new=6)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(prompt)
        for _ in range(6):
            h = m.loop_outputs(small, torch.tensor(ids), len(ids), torch.float32, m.Pieces())[-1][-1]
            ids.append(int(functional.linear(h, small.model.embed_tokens.weight).argmax()))
        assert output == ids[len(prompt) :]
