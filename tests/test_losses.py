"""The losses against single-process references: open_clip's in value, the full batch in gradients on 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.model.losses import ContrastiveLoss, build_loss
from clipstream.model.settings import ClipLossSettings, LossSettings, SiglipLossSettings, chosen_loss_type
from clipstream.model.towers import Features
from clipstream.world import World
from tests.ranks import run_ranks

KINDS = ("clip", "siglip")
COUNTS = {1: [9], 2: [6, 3], 3: [4, 1, 5], 4: [2, 5, 0, 3]}


def make_loss(kind: str) -> ContrastiveLoss:
    return build_loss(LossSettings.model_validate({"type": kind}), kind)


def make_inputs(n: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Pictures, texts, two linear towers and the scalars: leaves of the graph, the same in every process."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"pixels": (n, 6), "ids": (n, 6), "visual": (6, 5), "text": (6, 5)}
    made = {name: torch.randn(*shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}
    made |= {"scale": torch.tensor(1.9, dtype=dtype), "bias": torch.tensor(-3.0, dtype=dtype)}
    return made


def loss_and_gradients(
    kind: str, inputs: dict[str, torch.Tensor], weights: torch.Tensor, rows: slice, world: World
) -> dict[str, torch.Tensor]:
    """This rank's share and its gradients of tower weights, scale and bias."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    features = Features(
        image=F.normalize(inputs["pixels"][rows] @ leaves["visual"], dim=-1),
        text=F.normalize(inputs["ids"][rows] @ leaves["text"], dim=-1),
        logit_scale=leaves["scale"].exp(),
        logit_bias=leaves["bias"] if kind == "siglip" else None,
    )
    loss = make_loss(kind)(features, weights[rows], world, len(weights))
    loss.backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": loss.detach(), **found}


def play_rank(world: World, counts: list[int]) -> dict[tuple[str, str], Any]:
    """This rank's share and gradients summed over the ranks, by loss and name."""
    start = sum(counts[: world.rank])
    rows = slice(start, start + counts[world.rank])
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    return {
        (kind, name): world.all_reduce_sum(tensor).numpy()
        for kind in KINDS
        for name, tensor in loss_and_gradients(kind, inputs, weights, rows, world).items()
    }


def make_weights(n: int) -> torch.Tensor:
    weights = torch.ones(n, dtype=torch.float64)
    weights[1], weights[n - 1] = 0.0, 0.5
    return weights


@pytest.mark.parametrize("size", sorted(COUNTS))
def test_shares_of_uneven_ranks_sum_to_the_full_batch(size: int) -> None:
    counts = COUNTS[size]
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    for found in run_ranks(size, play_rank, counts):
        for kind in KINDS:
            for name, wanted in loss_and_gradients(kind, inputs, weights, slice(None), World()).items():
                torch.testing.assert_close(torch.as_tensor(found[kind, name]), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_open_clip(kind: str) -> None:
    import open_clip.loss  # here, so that ranks do not import it

    inputs, n = make_inputs(12), 12
    found = loss_and_gradients(kind, inputs, torch.ones(n), slice(None), World())
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    image = F.normalize(inputs["pixels"] @ leaves["visual"], dim=-1)
    text = F.normalize(inputs["ids"] @ leaves["text"], dim=-1)
    if kind == "clip":
        wanted = open_clip.loss.ClipLoss()(image, text, leaves["scale"].exp())
    else:
        wanted = open_clip.loss.SigLipLoss()(image, text, leaves["scale"].exp(), leaves["bias"])
    wanted.backward()
    torch.testing.assert_close(found["loss"], wanted.detach(), rtol=0, atol=1e-12)
    for name in ("visual", "text", "scale") + (("bias",) if kind == "siglip" else ()):
        torch.testing.assert_close(found[name], leaves[name].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_weight_0_is_not_there(kind: str) -> None:
    inputs = make_inputs(8)
    keep = torch.tensor([True, False, True, True, False, True, True, True])
    fewer = inputs | {name: inputs[name][keep] for name in ("pixels", "ids")}
    found = loss_and_gradients(kind, inputs, keep.double(), slice(None), World())
    wanted = loss_and_gradients(kind, fewer, torch.ones(6), slice(None), World())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_at_all_gives_zero_and_not_nan(kind: str) -> None:
    found = loss_and_gradients(kind, make_inputs(4), torch.zeros(4), slice(None), World())
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_float32_under_autocast(kind: str) -> None:
    inputs = make_inputs(16, torch.float32)
    plain = loss_and_gradients(kind, inputs, torch.ones(16), slice(None), World())["loss"]
    features = Features(
        image=F.normalize(inputs["pixels"] @ inputs["visual"], dim=-1),
        text=F.normalize(inputs["ids"] @ inputs["text"], dim=-1),
        logit_scale=inputs["scale"].exp(),
        logit_bias=inputs["bias"] if kind == "siglip" else None,
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = make_loss(kind)(features, torch.ones(16), World(), 16)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, plain)


def test_the_model_decides_and_a_contradiction_is_an_error() -> None:
    auto = LossSettings.model_validate({})
    assert chosen_loss_type(auto) is None
    assert build_loss(auto, "clip").max_logit_scale == 100.0
    assert build_loss(auto, "siglip").max_logit_scale is None
    named = LossSettings.model_validate({"type": "siglip", "max_logit_scale": 50})
    assert isinstance(named, SiglipLossSettings) and chosen_loss_type(named) == "siglip"
    assert build_loss(named, "siglip").max_logit_scale == 50
    with pytest.raises(SettingsError, match="built for 'clip'"):
        build_loss(named, "clip")
    with pytest.raises(SettingsError, match="logit bias"):
        biasless = Features(torch.ones(2, 3), torch.ones(2, 3), torch.ones(()), None)
        make_loss("siglip")(biasless, torch.ones(2), World(), 2)


class Margin:
    """A user's own loss with a setting of its own."""

    class Settings(LossSettings):
        margin: float = 0.2

    def __init__(self, settings: Settings) -> None:
        self.margin, self.max_logit_scale = settings.margin, None

    def __call__(self, features: Features, weights: torch.Tensor, world: World, global_size: int) -> torch.Tensor:
        return F.relu(self.margin - (features.image * features.text).sum(dim=1)).sum() / global_size


def test_a_users_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LossSettings.model_validate({"type": f"{__name__}:Margin", "margin": 0.5})
    loss = build_loss(settings, "clip")
    features = Features(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(()), None)
    assert loss(features, torch.ones(4), World(), 4) == pytest.approx(0.5)
    (tmp_path / "no_loss.py").write_text("class Bare:\n    def __init__(self, settings): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="max_logit_scale"):
        build_loss(LossSettings.model_validate({"type": "no_loss:Bare"}), "clip")


def test_limits_belong_to_the_settings() -> None:
    assert build_loss(ClipLossSettings.model_validate({"max_logit_scale": None}), "clip").max_logit_scale is None
