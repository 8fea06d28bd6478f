"""The losses against single-process references: open_clip's in value, the full batch in gradients on 1 to 4 ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clipstream.batch import Batch
from clipstream.errors import SettingsError
from clipstream.model import tiles
from clipstream.model.losses import ContrastiveLoss, build_loss
from clipstream.model.settings import ClipLossSettings, LossSettings, SiglipLossSettings, chosen_loss_type
from clipstream.model.towers import Features
from clipstream.world import World
from tests.ranks import run_ranks

KINDS = ("clip", "siglip")
TILES = ((1024, 1024), (2, 1))  # many on a rank, and a part of one
DUPLICATES = ("negatives", "mask", "positives")
CAPTIONS = torch.tensor([0, 1, 0, 2, 1, 3, 4, 5, 0])  # of 9 samples; two of them are there several times
COUNTS = {1: [9], 2: [6, 3], 3: [4, 1, 4], 4: [2, 5, 0, 2]}


def make_loss(kind: str, duplicates: str = "negatives") -> ContrastiveLoss:
    return build_loss(LossSettings.model_validate({"type": kind, "duplicates": duplicates}), kind)


def make_batch(weights: torch.Tensor, ids: torch.Tensor | None = None, global_size: int | None = None) -> Batch:
    """What a loss sees of a batch: captions that differ unless given."""
    n = len(weights)
    ids = torch.arange(n, dtype=torch.int32)[:, None] if ids is None else ids
    return Batch(None, ids, weights, ("0.tar/0",) * n, torch.zeros(n), 0, n if global_size is None else global_size)


def make_inputs(n: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Pictures, texts, two linear towers and the scalars: leaves of the graph, the same in every process."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"pixels": (n, 6), "ids": (n, 6), "visual": (6, 5), "text": (6, 5)}
    made = {name: torch.randn(*shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}
    made |= {"scale": torch.tensor(1.9, dtype=dtype), "bias": torch.tensor(-3.0, dtype=dtype)}
    return made


def loss_and_gradients(
    kind: str,
    inputs: dict[str, torch.Tensor],
    weights: torch.Tensor,
    rows: slice,
    world: World,
    captions: torch.Tensor | None = None,
    duplicates: str = "negatives",
) -> dict[str, torch.Tensor]:
    """This rank's share and its gradients of tower weights, scale and bias."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    features = Features(
        image=F.normalize(inputs["pixels"][rows] @ leaves["visual"], dim=-1),
        text=F.normalize(inputs["ids"][rows] @ leaves["text"], dim=-1),
        logit_scale=leaves["scale"].exp(),
        logit_bias=leaves["bias"] if kind == "siglip" else None,
    )
    captions = torch.arange(len(weights)) if captions is None else captions
    batch = make_batch(weights[rows], captions[rows, None], len(weights))
    loss = make_loss(kind, duplicates)(features, batch, world)
    loss.backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": loss.detach(), **found}


def play_rank(world: World, counts: list[int], tile: tuple[int, int]) -> dict[tuple[str, str, str], Any]:
    """This rank's share and gradients summed over the ranks, by loss, duplicates and name."""
    tiles.ROWS, tiles.COLUMNS = tile
    start = sum(counts[: world.rank])
    rows = slice(start, start + counts[world.rank])
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    return {
        (kind, duplicates, name): world.all_reduce_sum(tensor).numpy()
        for kind in KINDS
        for duplicates in DUPLICATES
        for name, tensor in loss_and_gradients(kind, inputs, weights, rows, world, CAPTIONS, duplicates).items()
    }


def make_weights(n: int) -> torch.Tensor:
    weights = torch.ones(n, dtype=torch.float64)
    weights[1], weights[n - 1] = 0.0, 0.5
    return weights


@pytest.mark.parametrize("size", sorted(COUNTS))
def test_shares_of_uneven_ranks_sum_to_the_full_batch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiles, name, getattr(tiles, name))  # one rank plays in this process
    counts = COUNTS[size]
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    for found in itertools.chain(*(run_ranks(size, play_rank, counts, tile) for tile in TILES)):
        for kind, duplicates in itertools.product(KINDS, DUPLICATES):
            whole = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
            for name, wanted in whole.items():
                share = torch.as_tensor(found[kind, duplicates, name])
                torch.testing.assert_close(share, wanted, rtol=0, atol=1e-10)


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
        loss = make_loss(kind)(features, make_batch(torch.ones(16)), World())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, plain)


def test_the_model_decides_and_a_contradiction_is_an_error() -> None:
    auto = LossSettings.model_validate({"duplicates": "mask"})
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
        make_loss("siglip")(biasless, make_batch(torch.ones(2)), World())


class Margin:
    """A user's own loss with a setting of its own."""

    class Settings(LossSettings):
        margin: float = 0.2

    def __init__(self, settings: Settings) -> None:
        self.margin, self.max_logit_scale = settings.margin, None

    def __call__(self, features: Features, batch: Batch, world: World) -> torch.Tensor:
        return F.relu(self.margin - (features.image * features.text).sum(dim=1)).sum() / batch.global_size


def test_a_users_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LossSettings.model_validate({"type": f"{__name__}:Margin", "margin": 0.5})
    loss = build_loss(settings, "clip")
    features = Features(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(()), None)
    assert loss(features, make_batch(torch.ones(4)), World()) == pytest.approx(0.5)
    (tmp_path / "no_loss.py").write_text("class Bare:\n    def __init__(self, settings): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="max_logit_scale"):
        build_loss(LossSettings.model_validate({"type": "no_loss:Bare"}), "clip")


def test_limits_belong_to_the_settings() -> None:
    assert build_loss(ClipLossSettings.model_validate({"max_logit_scale": None}), "clip").max_logit_scale is None


def by_formula(kind: str, duplicates: str, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The loss over the present samples, as the formulas have it, with the whole matrix."""
    keep = weights > 0
    logits, captions, weights = logits[keep][:, keep], CAPTIONS[keep], weights[keep] / weights.sum()
    same, eye = captions[:, None] == captions, torch.eye(len(captions), dtype=torch.bool)
    targets = same if duplicates == "positives" else eye
    left_out = same & ~eye if duplicates == "mask" else torch.zeros_like(eye)
    if kind == "clip":
        share = targets.double() / targets.sum(dim=1)
        each = torch.zeros(len(weights), dtype=logits.dtype)
        for some in (logits, logits.T):
            logs = some.masked_fill(left_out, -torch.inf).log_softmax(dim=1).masked_fill(left_out, 0)
            each = each - (share * logs).sum(dim=1) / 2
        return (weights * each).sum()
    each = -F.logsigmoid(torch.where(targets, logits, -logits)).masked_fill(left_out, 0)
    return (weights[:, None] * (each + each.T)).sum() / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_duplicates_are_what_the_settings_say(kind: str, duplicates: str) -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    found = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    image = F.normalize(inputs["pixels"] @ leaves["visual"], dim=-1)
    text = F.normalize(inputs["ids"] @ leaves["text"], dim=-1)
    logits = leaves["scale"].exp() * image @ text.T + (leaves["bias"] if kind == "siglip" else 0)
    wanted = by_formula(kind, duplicates, logits, weights)
    wanted.backward()
    torch.testing.assert_close(found["loss"], wanted.detach(), rtol=0, atol=1e-12)
    for name in ("visual", "text", "scale") + (("bias",) if kind == "siglip" else ()):
        torch.testing.assert_close(found[name], leaves[name].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_tiles_of_any_size_give_the_same(kind: str, duplicates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    whole = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
    for rows, columns in ((1, 1), (2, 3), (4, 2), (5, 9)):
        monkeypatch.setattr(tiles, "ROWS", rows)
        monkeypatch.setattr(tiles, "COLUMNS", columns)
        found = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
        for name in whole:
            torch.testing.assert_close(found[name], whole[name], rtol=0, atol=1e-12)


def test_duplicates_by_pictures() -> None:
    settings = LossSettings.model_validate({"type": "clip", "duplicates": "mask", "duplicates_by": "pictures"})
    inputs = make_inputs(6)
    features = Features(
        F.normalize(inputs["pixels"] @ inputs["visual"], dim=-1),
        F.normalize(inputs["ids"] @ inputs["text"], dim=-1),
        torch.tensor(5.0),
        None,
    )
    batch = make_batch(torch.ones(6))
    differing = replace(batch, pictures=torch.arange(6))
    alike = replace(batch, pictures=torch.tensor([7, 1, 7, 2, 3, 4]))
    plain = make_loss("clip")(features, batch, World())
    loss = build_loss(settings, "clip")
    assert torch.equal(loss(features, differing, World()), plain)
    assert loss(features, alike, World()) < plain


def test_a_loss_can_run_backward_once() -> None:
    image, text = (torch.eye(3)[:2].clone().requires_grad_() for _ in range(2))
    share = make_loss("clip")(Features(image, text, torch.tensor(2.0), None), make_batch(torch.ones(2)), World())
    share.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run once"):
        share.backward()


def logit_flops(world: World, n: int) -> int:
    """Operations of the products that give logits (torch counts those alone: sums into a tensor are others)."""
    from torch.utils.flop_counter import FlopCounterMode

    features = Features(torch.rand(n, 8), torch.rand(n, 8), torch.tensor(2.0), torch.tensor(-1.0))
    for leaf in features[:2]:
        leaf.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        for kind in KINDS:
            make_loss(kind)(features, make_batch(torch.ones(n), global_size=n * world.size), world).backward()
    return counter.get_total_flops()


def test_a_rank_of_four_makes_a_quarter_of_the_logits() -> None:
    (whole,) = run_ranks(1, logit_flops, 64)
    assert whole == 3 * 2 * 64 * 64 * 8  # the softmax makes them twice
    assert run_ranks(4, logit_flops, 16) == [whole // 4] * 4
