"""The losses against single-process references: open_clip's values, full-batch gradients on 1 to 4 ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses import tiled
from clipstream.losses.contrastive import ContrastiveLoss, build_loss
from clipstream.losses.settings import ClipLossSettings, LossSettings, SiglipLossSettings, chosen_loss_type
from clipstream.models.towers import Features
from tests.support.losses import sigmoid_loss, softmax_loss
from tests.support.ranks import run_ranks

KINDS = ("clip", "siglip")
REFERENCES: dict[str, Any] = {"clip": softmax_loss, "siglip": sigmoid_loss}
TILES = ((1024, 1024), (2, 1))  # many on a rank, and a part of one
DUPLICATES = ("negatives", "mask", "positives")
CAPTIONS = torch.tensor([0, 1, 0, 2, 1, 3, 4, 5, 0])  # of 9 samples; two of them are there several times
GATHER_GIB = (0.0, 1.0)  # texts go around the ranks, or are gathered
COUNTS = {1: [9], 2: [6, 3], 3: [4, 1, 4], 4: [2, 5, 0, 2]}


def make_loss(kind: str, duplicates: str = "negatives", gather_gib: float | None = None) -> ContrastiveLoss:
    given = {"type": kind, "duplicates": duplicates, "gather_gib": gather_gib}
    return build_loss(LossSettings.model_validate(given), kind)


def make_batch(weights: torch.Tensor, ids: torch.Tensor | None = None, global_size: int | None = None) -> Batch:
    """What a loss sees of a batch: captions that differ unless given."""
    n = len(weights)
    ids = torch.arange(n, dtype=torch.int32)[:, None] if ids is None else ids
    return Batch(None, ids, weights, ("0.tar/0",) * n, torch.zeros(n), 0, n if global_size is None else global_size)


def make_inputs(n: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Images, texts, two linear towers and the scalars: leaves of the graph, the same in every process."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"pixels": (n, 6), "ids": (n, 6), "visual": (6, 5), "text": (6, 5)}
    made = {name: torch.randn(*shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}
    made |= {"scale": torch.tensor(1.9, dtype=dtype), "bias": torch.tensor(-3.0, dtype=dtype)}
    return made


def features_of(kind: str, inputs: dict[str, torch.Tensor], rows: slice = slice(None)) -> Features:
    """The features of some rows, and the scalars of the logits."""
    return Features(
        image=F.normalize(inputs["pixels"][rows] @ inputs["visual"], dim=-1),
        text=F.normalize(inputs["ids"][rows] @ inputs["text"], dim=-1),
        logit_scale=inputs["scale"].exp(),
        logit_bias=inputs["bias"] if kind == "siglip" else None,
    )


def loss_and_gradients(
    kind: str,
    inputs: dict[str, torch.Tensor],
    weights: torch.Tensor,
    rows: slice,
    world: World,
    captions: torch.Tensor | None = None,
    duplicates: str = "negatives",
    gather_gib: float | None = None,
) -> dict[str, torch.Tensor]:
    """This rank's share and its gradients of tower weights, scale and bias."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    features = features_of(kind, inputs | leaves, rows)
    captions = torch.arange(len(weights)) if captions is None else captions
    batch = make_batch(weights[rows], captions[rows, None], len(weights))
    loss = make_loss(kind, duplicates, gather_gib)(features, batch, world)
    loss.backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": loss.detach(), **found}


def play_rank(world: World, counts: list[int], tile: tuple[int, int]) -> dict[tuple[str, str, float, str], Any]:
    """This rank's share and gradients summed over the ranks, by loss, duplicates, GiB to gather and name."""
    tiled.ROWS, tiled.COLUMNS = tile
    start = sum(counts[: world.rank])
    rows = slice(start, start + counts[world.rank])
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    return {
        (kind, duplicates, gib, name): world.all_reduce_sum(tensor).numpy()
        for kind in KINDS
        for duplicates in DUPLICATES
        for gib in GATHER_GIB
        for name, tensor in loss_and_gradients(kind, inputs, weights, rows, world, CAPTIONS, duplicates, gib).items()
    }


def make_weights(n: int) -> torch.Tensor:
    weights = torch.ones(n, dtype=torch.float64)
    weights[1], weights[n - 1] = 0.0, 0.5
    return weights


@pytest.mark.parametrize("size", sorted(COUNTS))
def test_shares_of_uneven_ranks_sum_to_the_full_batch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiled, name, getattr(tiled, name))  # one rank plays in this process
    counts = COUNTS[size]
    inputs, weights = make_inputs(sum(counts)), make_weights(sum(counts))
    for found in itertools.chain(*(run_ranks(size, play_rank, counts, tile) for tile in TILES)):
        for kind, duplicates in itertools.product(KINDS, DUPLICATES):
            whole = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
            for (name, wanted), gib in itertools.product(whole.items(), GATHER_GIB):
                share = torch.as_tensor(found[kind, duplicates, gib, name])
                torch.testing.assert_close(share, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_weight_0_is_absent(kind: str) -> None:
    inputs = make_inputs(8)
    keep = torch.tensor([True, False, True, True, False, True, True, True])
    fewer = inputs | {name: inputs[name][keep] for name in ("pixels", "ids")}
    found = loss_and_gradients(kind, inputs, keep.double(), slice(None), World())
    wanted = loss_and_gradients(kind, fewer, torch.ones(6), slice(None), World())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)
    nothing = loss_and_gradients(kind, inputs, torch.zeros(8), slice(None), World())
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in nothing.values())  # and not nan


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_float32_under_autocast(kind: str) -> None:
    inputs = make_inputs(16, torch.float32)
    plain = loss_and_gradients(kind, inputs, torch.ones(16), slice(None), World())["loss"]
    features = features_of(kind, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = make_loss(kind)(features, make_batch(torch.ones(16)), World())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, plain)


def test_the_model_decides_and_a_contradiction_is_an_error() -> None:
    auto = LossSettings.model_validate({"duplicates": "mask"})
    assert chosen_loss_type(auto) is None
    assert build_loss(auto, "clip").max_logit_scale == 100.0
    assert build_loss(auto, "siglip").max_logit_scale is None
    assert build_loss(ClipLossSettings.model_validate({"max_logit_scale": None}), "clip").max_logit_scale is None
    limits = [build_loss(auto, kind).min_logit_scale for kind in KINDS]
    assert limits == [1.0, None]
    with pytest.raises(ValueError, match="60 is greater than max_logit_scale 50"):
        LossSettings.model_validate({"type": "clip", "max_logit_scale": 50, "min_logit_scale": 60})
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_tiles_of_any_size_equal_the_reference(kind: str, duplicates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("visual", "text", "scale", "bias")}
    image, text, scale, bias = features_of("siglip", inputs | leaves)
    logits = scale * image @ text.T + (bias if kind == "siglip" else 0)
    wanted = REFERENCES[kind](logits, weights, CAPTIONS, duplicates)
    wanted.backward()
    for rows, columns in ((1024, 1024), (1, 1), (2, 3), (4, 2), (5, 9)):
        monkeypatch.setattr(tiled, "ROWS", rows)
        monkeypatch.setattr(tiled, "COLUMNS", columns)
        found = loss_and_gradients(kind, inputs, weights, slice(None), World(), CAPTIONS, duplicates)
        torch.testing.assert_close(found["loss"], wanted.detach(), rtol=0, atol=1e-12)
        for name in ("visual", "text", "scale") + (("bias",) if kind == "siglip" else ()):
            torch.testing.assert_close(found[name], leaves[name].grad, rtol=0, atol=1e-12)


def near_cosines(n: int, cosine: float, seed: int) -> dict[str, torch.Tensor]:
    """Unit vectors, float32: those of a pair have about this cosine, all others are nearly orthogonal."""
    draw = torch.Generator().manual_seed(seed)
    image, noise = (F.normalize(torch.randn(n, 512, generator=draw), dim=-1) for _ in range(2))
    return {"image": image, "text": F.normalize(cosine * image + math.sqrt(1 - cosine**2) * noise, dim=-1)}


def value(found: dict[str, torch.Tensor], kind: str, scale: float, bias: float, rows: slice, world: World) -> Any:
    """This rank's share of the loss without duplicates, and with duplicates as right pairs (of the last two)."""
    dtype, n = found["image"].dtype, len(found["image"])
    numbers = torch.tensor(scale, dtype=dtype), torch.tensor(bias, dtype=dtype)
    features = Features(found["image"][rows], found["text"][rows], *numbers)
    captions = torch.arange(n, dtype=torch.int32)[:, None].clamp(max=n - 2)
    batch = make_batch(torch.ones(n, dtype=dtype)[rows], captions[rows], n)
    return torch.stack([make_loss(kind, wanted)(features, batch, world) for wanted in ("negatives", "positives")])


def play_small_losses(world: World) -> list[tuple[Any, Any]]:
    """Values in float32 over the ranks beside those in float64, for scales and biases as SigLIP has them at the end."""
    found = []
    tiled.ROWS, tiled.COLUMNS = 16, 16
    for (scale, bias, cosine), seed in itertools.product(((112.0, -30.0, 0.5), (112.0, -16.5, 0.2)), range(20)):
        single = near_cosines(48, cosine, seed)
        double = {name: vectors.double() for name, vectors in single.items()}
        rows = slice(world.rank * 48 // world.size, (world.rank + 1) * 48 // world.size)
        share = world.all_reduce_sum(value(single, "siglip", scale, bias, rows, world))
        found.append((share.numpy(), value(double, "siglip", scale, bias, slice(None), World()).numpy()))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_small_sigmoid_loss_is_as_exact_as_a_large_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiled, name, getattr(tiled, name))  # one rank plays in this process
    for rank in run_ranks(size, play_small_losses):
        assert min(exact[0] for _, exact in rank) < 1e-6  # some are small, indeed
        for found, exact in rank:
            assert (found >= 0).all()
            assert found == pytest.approx(exact, rel=1e-4)


def test_duplicates_by_pictures() -> None:
    settings = LossSettings.model_validate({"type": "clip", "duplicates": "mask", "duplicates_by": "pictures"})
    inputs = make_inputs(6)
    features = features_of("clip", inputs)
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
