"""Parameter groups, learning rate schedules, gradient clipping, the length of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import open_clip
import pytest
import torch
from open_clip_train.params import get_default_params
from open_clip_train.scheduler import const_lr_cooldown, cosine_lr
from torch import nn

from clipstream.errors import SettingsError
from clipstream.models.model_config import builtin
from clipstream.training.optim import (
    AdamW,
    OptimSettings,
    ScheduleSettings,
    parameter_groups,
)
from clipstream.training.settings import TrainSettings
from clipstream.training.step import clip_gradients, gradient_norm


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


COMPARABLE = sorted(open_clip.list_models())
REPRESENTATIVE = ["RN50", "ViT-B-32", "ViT-B-16-SigLIP", "EVA02-B-16", "convnext_base", "swin_base_patch4_window7_224"]


def test_betas_and_eps_are_open_clips_for_every_model() -> None:
    for name in (*COMPARABLE, "hf-hub:timm/ViT-B-16-SigLIP", "hf-hub:apple/MobileCLIP-S1-OpenCLIP", "vit/RN50.json"):
        theirs = get_default_params("RN50" if name.endswith(".json") else name)
        group = AdamW.Settings().build(Small(), name).param_groups[0]
        assert (*group["betas"], group["eps"]) == (theirs["beta1"], theirs["beta2"], theirs["eps"]), name


def test_betas_and_eps_that_are_set() -> None:
    assert AdamW.Settings(betas=(0.8, None)).defaults("ViT-B-32") == ((0.8, 0.98), 1e-6)
    assert AdamW.Settings(betas=(None, 0.95)).defaults("RN50") == ((0.9, 0.95), 1e-8)
    group = AdamW.Settings(betas=(0.8, 0.95), eps=1e-4, lr=0.1).build(Small(), "RN50").param_groups[0]
    assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.95), 1e-4, 0.1)


def undecayed_by_open_clip(name: str, p: nn.Parameter) -> bool:
    """`exclude` of open_clip_train.main."""
    return p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name


def check_decay(name: str) -> int:
    """Compare the groups of a named model with open_clip's; how many matrices or tables have no weight decay."""
    cfg = builtin(name)
    custom = cfg.pop("custom_text", False)
    cfg["vision_cfg"]["timm_model_pretrained"] = False
    towers = nn.Module()
    with torch.device("meta"):
        towers.clip = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**cfg)
    groups = parameter_groups(towers, 0.2)
    ours = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    theirs = [(key, p) for key, p in towers.clip.named_parameters() if undecayed_by_open_clip(key, p)]
    assert ours == {id(p) for _, p in theirs}, name
    assert sum(len(group["params"]) for group in groups) == len(list(towers.parameters()))
    return sum(p.ndim >= 2 for _, p in theirs)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_what_has_no_weight_decay_is_open_clips(name: str) -> None:
    assert check_decay(name) == (24 if name.startswith("swin") else 0)  # relative_position_bias_table


@pytest.mark.slow
def test_what_has_no_weight_decay_is_open_clips_for_every_model() -> None:
    checked = 0
    for name in COMPARABLE:
        cfg = open_clip.get_model_config(name)
        if "multimodal_cfg" not in cfg and "hf_model_name" not in cfg["text_cfg"]:  # whose text tower is on the Hub
            check_decay(name)
            checked += 1
    assert checked >= 131


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_the_published_one(fused: bool) -> None:
    """Two steps against the update of arXiv:1711.05101, algorithm 2, in float64."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    optimizer = AdamW.Settings(lr=0.1, wd=0.5, betas=(0.9, 0.98), eps=1e-6, fused=fused).build(model, "ViT")
    assert optimizer.param_groups[0]["fused"] is fused
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
    optimizer = AdamW.Settings(lr=0.0).build(model, "ViT")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_nothing_to_train() -> None:
    with pytest.raises(SettingsError, match="lock_image"):
        AdamW.Settings().build(Small().requires_grad_(False), "ViT")


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule(kind: str) -> None:
    settings = ScheduleSettings.model_validate({"type": kind, "warmup": 10, "min_lr": 0.1})
    lr = settings.build(peak=1.0, total_steps=110)
    rates = [lr(step) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    middle, end = {"cosine": (0.55, 0.1), "linear": (0.55, 0.1), "constant": (1.0, 1.0)}[kind]
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(end, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_cosine_is_open_clips() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0)
    theirs = cosine_lr(optimizer, 3e-4, 7, 50)
    settings = ScheduleSettings.model_validate({"type": "cosine", "warmup": 7})
    ours = settings.build(peak=3e-4, total_steps=50)
    for step in range(50):
        assert math.isclose(ours(step), float(theirs(step)), rel_tol=1e-12)


@pytest.mark.parametrize("cooldown", [0, 1, 20, 45, 60])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_const_cooldown_is_open_clips(cooldown: int, power: float, end: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0)
    theirs = const_lr_cooldown(optimizer, 3e-4, 7, 50, cooldown, power, end)
    settings = {"type": "const-cooldown", "warmup": 7, "min_lr": end, "cooldown": cooldown, "cooldown_power": power}
    ours = ScheduleSettings.model_validate(settings).build(peak=3e-4, total_steps=50)
    for step in range(50):
        assert math.isclose(ours(step), theirs(step), rel_tol=1e-12), step


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

    assert TrainSettings(steps=7).total_steps(steps_for) == 7
    assert TrainSettings(samples=101).total_steps(steps_for) == 11
    assert TrainSettings(epochs=2, epoch_samples=55).total_steps(steps_for) == 11
    with pytest.raises(SettingsError, match="--steps"):
        TrainSettings(epochs=2).total_steps(steps_for)


class Kept(torch.optim.SGD):
    """Keeps a value in its state, beside a tensor."""

    def __init__(self, groups: Any, kept: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept


class Own:
    """A user's optimizer; `made` makes it."""

    made: Callable[[nn.Module], Any]

    def __init__(self, settings: Any) -> None:
        pass

    def __call__(self, towers: nn.Module, model: str) -> Any:
        return Own.made(towers)


def own(monkeypatch: pytest.MonkeyPatch, made: Callable[[nn.Module], Any]) -> torch.optim.Optimizer:
    monkeypatch.setattr(Own, "made", staticmethod(made), raising=False)
    model = Small()
    optimizer = OptimSettings.model_validate({"type": f"{__name__}:Own"}).build(model, "ViT")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return optimizer


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([1, 2], "the state 'kept' of .*:Own is list"),
        ("x", "is str"),
        (lambda: 0, "is function"),
        (None, "is NoneType"),
    ],
)
def test_a_state_that_no_checkpoint_can_store_is_told_at_the_first_step(
    kept: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = own(monkeypatch, lambda towers: Kept(parameter_groups(towers, 0.1), kept))
    with pytest.raises(SettingsError, match=message):
        optimizer.step()


def test_parameter_groups_that_no_checkpoint_can_store_are_told_at_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = own(monkeypatch, lambda towers: torch.optim.SGD(list(towers.parameters())))
    optimizer.param_groups[0]["scale"] = torch.ones(2)
    with pytest.raises(SettingsError, match=r"parameter groups of .*:Own cannot be stored .*Tensor"):
        optimizer.step()


def test_a_state_of_tensors_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = own(monkeypatch, lambda towers: Kept(parameter_groups(towers, 0.1), torch.zeros(3)))
    optimizer.step()
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    assert len(states) == sum(len(group["params"]) for group in optimizer.param_groups) > 1
    assert all(torch.equal(state["kept"], torch.zeros(3)) for state in states)


def test_parameters_that_are_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r":Own leaves out \d+ of the trainable parameters, such as \w+"):
        own(monkeypatch, lambda towers: torch.optim.SGD(list(towers.parameters())[:1]))
