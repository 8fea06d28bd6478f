"""The optimiser's groups, the learning rate over the steps, gradient clipping, the length of a run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clipstream.errors import SettingsError
from clipstream.training.optim import build_optimizer, clip_gradients, gradient_norm, lr_at, parameter_groups
from clipstream.training.settings import OptimSettings, ScheduleSettings, TrainSettings


class Small(nn.Module):
    """Matrices, a gain, biases and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


def test_matrices_decay_and_the_rest_does_not() -> None:
    model = Small()
    model.layers[2].requires_grad_(False)
    decayed, vectors, numbers = parameter_groups(model, 0.2)
    assert decayed["weight_decay"] == 0.2 and vectors["weight_decay"] == numbers["weight_decay"] == 0
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert [[p.ndim for p in group["params"]] for group in (vectors, numbers)] == [[1, 1, 1], [0]]


@pytest.mark.parametrize(("batch_norm", "betas", "eps"), [(False, (0.9, 0.98), 1e-6), (True, (0.9, 0.999), 1e-8)])
def test_defaults_follow_the_kind_of_model(batch_norm: bool, betas: tuple[float, float], eps: float) -> None:
    group = build_optimizer(Small(), OptimSettings(), batch_norm=batch_norm).param_groups[0]
    assert (group["betas"], group["eps"], group["lr"]) == (betas, eps, 5e-4)
    half = build_optimizer(Small(), OptimSettings(betas=(0.8, None)), batch_norm=batch_norm).param_groups[0]
    assert half["betas"] == (0.8, betas[1])
    own = build_optimizer(Small(), OptimSettings(betas=(0.8, 0.95), eps=1e-4), batch_norm=batch_norm).param_groups[0]
    assert (own["betas"], own["eps"]) == ((0.8, 0.95), 1e-4)


def test_adamw_is_the_published_one() -> None:
    """Two steps against the update of arXiv:1711.05101, algorithm 2, in float64."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    optimizer = build_optimizer(model, OptimSettings(lr=0.1, wd=0.5, betas=(0.9, 0.98), eps=1e-6), batch_norm=False)
    expected, m, v = weight.detach().clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for t in (1, 2):
        gradient = torch.tensor([[0.3, -0.1 * t]], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.98 * v + 0.02 * gradient**2
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + 1e-6)
        expected = expected - 0.1 * 0.5 * expected - 0.1 * update
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


def test_lr_0_changes_nothing() -> None:
    model = Small()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, OptimSettings(lr=0.0), batch_norm=False)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_nothing_to_train() -> None:
    with pytest.raises(SettingsError, match="lock_image"):
        build_optimizer(Small().requires_grad_(False), OptimSettings(), batch_norm=False)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule(kind: str) -> None:
    schedule = ScheduleSettings(type=kind, warmup=10, min_lr=0.1)
    rates = [lr_at(step, peak=1.0, schedule=schedule, total_steps=110) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    middle, end = {"cosine": (0.55, 0.1), "linear": (0.55, 0.1), "constant": (1.0, 1.0)}[kind]
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(end, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_cosine_is_open_clips() -> None:
    from open_clip_train.scheduler import cosine_lr

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0)
    theirs = cosine_lr(optimizer, 3e-4, 7, 50)
    schedule = ScheduleSettings(type="cosine", warmup=7)
    for step in range(50):
        assert math.isclose(
            lr_at(step, peak=3e-4, schedule=schedule, total_steps=50), float(theirs(step)), rel_tol=1e-12
        )


@pytest.mark.parametrize(("limit", "expected"), [(None, 5.0), (0.01, 0.01), (1.0, 1.0), (10.0, 5.0)])
def test_clipping(limit: float | None, expected: float) -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    norm = gradient_norm(parameters)
    assert float(norm) == 5.0
    clip_gradients(parameters, norm, limit)
    assert float(gradient_norm(parameters)) == pytest.approx(expected, rel=1e-3)


def test_length_of_a_run() -> None:
    def steps_for(samples: int) -> int:
        return -(-samples // 10)

    assert TrainSettings(steps=7, samples=100).total_steps(steps_for) == 7
    assert TrainSettings(samples=101).total_steps(steps_for) == 11
    assert TrainSettings(epochs=2, epoch_samples=55).total_steps(steps_for) == 11
    with pytest.raises(SettingsError, match="--steps"):
        TrainSettings(epochs=2).total_steps(steps_for)
