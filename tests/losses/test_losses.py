"""Losses against dense references, open_clip's, and themselves on several ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.features.manifest import encode_rows
from clipstream.losses import contrastive as losses
from clipstream.losses import settings as loss_settings
from clipstream.losses import tiled
from clipstream.losses.contrastive import build_loss
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import ClipLossSettings, DistillSettings, LossSettings, SiglipLossSettings
from tests.support.losses import (
    feature_loss,
    principal,
    relational_loss,
    several_loss,
    sigmoid_loss,
    softmax_loss,
    within_loss,
)
from tests.support.peak_memory import PeakMemory
from tests.support.ranks import run_ranks
from tests.support.steps import Features, assert_close

KINDS = ("clip", "siglip")
DUPLICATES = ("negatives", "mask", "positives")
TYPES = ("logits", "affinity", "relational")
SCALES = {"large": 20.0, "small": 7.5}  # of the logits of two teachers, of which the large one has other widths
LEAVES = ("image", "text", "scale", "bias")
Tensors = dict[str, torch.Tensor]


def make_loss(
    kind: str = "clip",
    scales: dict[str, float] | None = None,
    *,
    duplicates: str = "negatives",
    gather_gib: float | None = None,
    terms: tuple[float, float] = (0, 0),
    short: float = 1.0,
    **distill: Any,
) -> Any:
    """A contrastive loss; with `scales` of teachers, one of distillation."""
    given = {"type": kind, "duplicates": duplicates, "gather_gib": gather_gib, "short": short}
    if duplicates == "positives":
        given |= {"image_image": terms[0], "text_text": terms[1]}
    base = build_loss(LossSettings.model_validate(given), kind)
    return base if scales is None else DistilledLoss(base, DistillSettings.model_validate(distill), scales)


def make_inputs(n: int, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    """Features of a student and two teachers, and the scalars of the logits; the same in every process."""
    draw = torch.Generator().manual_seed(seed)
    widths = {"image": width, "text": width, "small.image": width, "small.text": width, "large.image": 8}
    made = {
        name: F.normalize(torch.randn(n, size, generator=draw, dtype=dtype), dim=-1)
        for name, size in {**widths, "large.text": 8}.items()
    }
    return made | {"scale": torch.tensor(9.0, dtype=dtype), "bias": torch.tensor(-3.0, dtype=dtype)}


def make_weights(n: int) -> torch.Tensor:
    weights = torch.ones(n, dtype=torch.float64)
    weights[1::4], weights[2::5] = 0.0, 0.5
    return weights


def make_batch(n: int, inputs: Tensors | None = None, ids: torch.Tensor | None = None, **fields: Any) -> Batch:
    """What a loss sees of a batch: captions that differ unless given."""
    ids = torch.arange(n, dtype=torch.int32) if ids is None else ids
    teachers = {name: value for name, value in (inputs or {}).items() if "." in name}
    batch = Batch(None, ids[:, None], torch.ones(n), ("0.tar/0",) * n, torch.zeros(n), 0, n, features=teachers)
    return replace(batch, **fields)


def loss_and_gradients(
    loss: Any,
    inputs: Tensors,
    weights: torch.Tensor,
    rows: slice = slice(None),
    world: World | None = None,
    *,
    captions: torch.Tensor | None = None,
    biased: bool = False,
) -> Tensors:
    """This rank's share, and its gradients; those of features in all rows, zeros in the other ranks'."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    bias = leaves["bias"] if biased else None
    features = Features(leaves["image"][rows], leaves["text"][rows], leaves["scale"], bias)
    part = {name: value[rows] for name, value in inputs.items() if "." in name}
    captions = torch.arange(len(weights)) if captions is None else captions
    own = weights[rows]
    batch = make_batch(len(own), part, captions[rows], weights=own, global_size=len(weights))
    share = loss(features, batch, world or World())
    share.backward()
    return {"loss": share.detach(), **grads(leaves)}


def grads(leaves: Tensors) -> Tensors:
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def wanted_of(
    inputs: Tensors,
    weights: torch.Tensor,
    kind: str = "clip",
    scales: dict[str, float] | None = None,
    *,
    captions: torch.Tensor | None = None,
    duplicates: Any = "negatives",
    terms: tuple[float, float] = (0, 0),
    **distill: Any,
) -> Tensors:
    """The same by the dense references and autograd."""
    chosen = DistillSettings.model_validate(distill)
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    image, text, scale, bias = leaves.values()
    cosines, labels = image @ text.T, torch.arange(len(weights)) if captions is None else captions
    logits = scale * cosines + (bias if kind == "siglip" else 0)
    total = (softmax_loss if kind == "clip" else sigmoid_loss)(logits, weights, labels, duplicates)
    for term, rows in zip(terms, (image, text), strict=True):
        if duplicates == "positives":
            total = total + term * within_loss(rows, scale, bias, weights, labels, softmax=kind == "clip")
    if scales is not None:
        total = chosen.contrastive * total
    for name, its_scale in (scales or {}).items():
        teacher = inputs[f"{name}.image"], inputs[f"{name}.text"]
        own = scale if chosen.temperature is None else 1 / chosen.temperature
        theirs = its_scale if chosen.teacher_temperature is None else 1 / chosen.teacher_temperature
        relational = relational_loss(
            own * cosines, theirs * teacher[0] @ teacher[1].T, weights, divergence=chosen.type != "logits"
        )
        total = total + chosen.weight * relational / len(scales or {})
        if chosen.features:
            total = total + chosen.features * feature_loss(image, text, teacher, weights) / len(scales or {})
    total.backward()
    return {"loss": total.detach(), **grads(leaves)}


def set_tiles(tile: tuple[int, int]) -> None:
    tiled.ROWS, tiled.COLUMNS = tile


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the sizes of tiles back."""
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiled, name, getattr(tiled, name))


@settings(max_examples=100)
@given(
    n=st.integers(1, 13),
    width=st.integers(1, 6),
    seed=st.integers(0, 99),
    tile=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    kind=st.sampled_from(KINDS),
    duplicates=st.sampled_from(DUPLICATES),
    terms=st.tuples(*[st.sampled_from([0.0, 0.2, 1.5])] * 2),
    scales=st.sampled_from([None, {"small": 7.5}, SCALES]),
    distill=st.fixed_dictionaries(
        {
            "type": st.sampled_from(TYPES),
            "weight": st.sampled_from([0.7, 1.0]),
            "features": st.sampled_from([0.0, 0.8]),
            "contrastive": st.sampled_from([0.0, 0.3, 1.0]),
            "temperature": st.sampled_from([None, 0.2]),
            "teacher_temperature": st.sampled_from([None, 0.1]),
        }
    ),
    draws=st.data(),
)
def test_tiles_equal_the_dense_reference(
    n: int, width: int, seed: int, tile: tuple[int, int], kind: str, duplicates: str, terms: Any, scales: Any,
    distill: Any, draws: st.DataObject,
) -> None:  # fmt: skip
    set_tiles(tile)
    inputs = make_inputs(n, width, seed)
    numbers = draws.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n).filter(any))
    weights = torch.tensor(numbers, dtype=torch.float64)
    captions = torch.tensor(draws.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    distill |= {"features": 0.0} if scales == SCALES and width != 8 else {}
    loss = make_loss(kind, scales, duplicates=duplicates, terms=terms, **distill)
    found = loss_and_gradients(loss, inputs, weights, captions=captions, biased=kind == "siglip")
    given = {"captions": captions, "duplicates": duplicates, "terms": terms, **distill}
    assert_close(found, wanted_of(inputs, weights, kind, scales, **given))


CAPTIONS = torch.tensor([0, 1, 0, 2, 1, 3, 4, 5, 0])  # of 9 samples; two of them are there several times
GIVEN: list[dict[str, Any]] = [
    *({"kind": kind, "duplicates": duplicates} for kind in KINDS for duplicates in DUPLICATES),
    *({"kind": kind, "duplicates": "positives", "terms": (0.2, 1.5)} for kind in KINDS),
    *({"scales": {"small": 7.5}, "type": kind, "features": 0.4} for kind in TYPES),
]


def play_rank(world: World, counts: list[int]) -> list[Tensors]:
    """This rank's share and gradients summed over the ranks, of each loss."""
    start, found = sum(counts[: world.rank]), []
    rows, inputs, weights = slice(start, start + counts[world.rank]), make_inputs(9), make_weights(9)
    for tile, gib, one in itertools.product(((1024, 1024), (2, 1)), (0.0, 1.0), GIVEN):
        set_tiles(tile)
        loss, biased = make_loss(**one, gather_gib=gib), one.get("kind") == "siglip"
        made = loss_and_gradients(loss, inputs, weights, rows, world, captions=CAPTIONS, biased=biased)
        found.append({name: world.all_reduce_sum(tensor) for name, tensor in made.items()})
    return found


@pytest.mark.parametrize("counts", [[6, 3], [2, 5, 0, 2]], ids=len)
def test_shares_of_uneven_ranks_sum_to_the_full_batch(counts: list[int]) -> None:
    wanted = [wanted_of(make_inputs(9), make_weights(9), **given, captions=CAPTIONS) for given in GIVEN]
    for ranks in run_ranks(len(counts), play_rank, counts):
        for found, one in zip(ranks, itertools.cycle(wanted)):
            assert_close(found, one)


def test_distillation_equals_open_clip() -> None:
    import open_clip.loss  # here, so that ranks do not import it

    inputs = make_inputs(12)
    found = loss_and_gradients(make_loss(scales={"large": 20.0}), inputs, torch.ones(12))
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    theirs = sum(
        open_clip.loss.DistillClipLoss()(
            leaves["image"], leaves["text"], leaves["scale"], inputs["large.image"], inputs["large.text"],
            torch.tensor(20.0, dtype=torch.float64),
        )
    )  # fmt: skip
    theirs.backward()
    assert_close(found, {"loss": theirs.detach(), **grads(leaves)}, 1e-12)


@pytest.mark.parametrize("weights", [{"type": "relational", "features": 2000.0}, {"features": 2000.0, "weight": 0.0}])
def test_weights_of_clip_kd_carry_over(weights: dict[str, Any]) -> None:
    """`task + 1 ckd + 2000 fd`, written as KDClipLoss of winycg/CLIP-KD computes it on one process."""
    inputs = make_inputs(12)
    found = loss_and_gradients(make_loss(scales={"small": 20.0}, **weights), inputs, torch.ones(12))
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    image, text, scale, _ = leaves.values()
    t_image, t_text = inputs["small.image"], inputs["small.text"]
    student, teacher, own = scale * image @ text.T, 20.0 * t_image @ t_text.T, torch.arange(12)
    pairs = ((student, teacher), (student.T, teacher.T))
    task = sum(F.cross_entropy(s, own) for s, _ in pairs) / 2
    ckd = sum(F.kl_div(s.log_softmax(1), t.softmax(1), reduction="batchmean") for s, t in pairs) / 2
    fd = F.mse_loss(image, t_image) + F.mse_loss(text, t_text)
    total = task + (ckd if weights.get("weight", 1) else 0) + 2000 * fd
    total.backward()
    assert_close(found, {"loss": total.detach(), **grads(leaves)}, 1e-9)


def test_a_student_equal_to_its_teacher_and_a_batch_without_weights_learn_nothing() -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    alike = inputs | {"small.image": inputs["image"], "small.text": inputs["text"]}
    equal = make_loss(scales={"small": 9.0}, type="affinity", contrastive=0.0, features=1.0)
    found = loss_and_gradients(equal, alike, weights)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    assert_close(found, zeros, 1e-13)
    for loss in (make_loss(scales=SCALES), make_loss("clip"), make_loss("siglip")):
        assert_close(loss_and_gradients(loss, inputs, 0 * weights, biased=True), zeros, 0)  # and not nan


@pytest.mark.parametrize(
    "loss", [make_loss("clip"), make_loss("siglip"), make_loss(scales={"small": 20.0}, type="affinity", features=1.0)]
)
def test_sums_are_float32_under_autocast(loss: Any) -> None:
    inputs, weights = make_inputs(16, dtype=torch.float32), torch.ones(16)
    plain = loss_and_gradients(loss, inputs, weights, biased=True)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(loss, inputs, weights, biased=True)["loss"]
    assert found.dtype == torch.float32 and torch.equal(found, plain)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1e-2), ("int8", 1e-2)])
def test_stored_rows_of_a_teacher(dtype: str, off: float) -> None:
    inputs, weights, loss = make_inputs(9), make_weights(9), make_loss(scales=SCALES, type="affinity")
    stored = {name: encode_rows(rows.float(), dtype) if "." in name else rows for name, rows in inputs.items()}
    exact = loss_and_gradients(loss, inputs, weights)
    assert_close(loss_and_gradients(loss, stored, weights), exact, off)


def test_settings_of_distillation() -> None:
    with pytest.raises(SettingsError, match=r"teacher large have 8 numbers, those of the model 5.*affinity"):
        loss_and_gradients(make_loss(scales=SCALES, features=1.0), make_inputs(4), make_weights(4))
    loss = make_loss(scales=SCALES)
    assert (loss.max_logit_scale, loss.min_logit_scale) == (100.0, 1.0)


def test_the_model_decides_and_a_contradiction_is_an_error() -> None:
    auto = LossSettings.model_validate({"duplicates": "mask"})
    assert loss_settings.chosen_loss_type(auto) is None
    limits = [(loss.min_logit_scale, loss.max_logit_scale) for loss in (build_loss(auto, kind) for kind in KINDS)]
    assert limits == [(1.0, 100.0), (None, None)]
    assert build_loss(ClipLossSettings.model_validate({"max_logit_scale": None}), "clip").max_logit_scale is None
    with pytest.raises(ValueError, match="max_logit_scale"):
        LossSettings.model_validate({"type": "clip", "max_logit_scale": 0.5})  # below the lower limit
    named = LossSettings.model_validate({"type": "siglip", "max_logit_scale": 50})
    assert isinstance(named, SiglipLossSettings) and loss_settings.chosen_loss_type(named) == "siglip"
    assert build_loss(named, "siglip").max_logit_scale == 50
    with pytest.raises(SettingsError, match="built for 'clip'"):
        build_loss(named, "clip")
    with pytest.raises(SettingsError, match="logit bias"):
        make_loss("siglip")(Features(torch.ones(2, 3), torch.ones(2, 3), torch.ones(()), None), make_batch(2), World())


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
    features = Features(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(()), None)
    assert build_loss(settings, "clip")(features, make_batch(4), World()) == pytest.approx(0.5)
    (tmp_path / "no_loss.py").write_text("class Bare:\n    def __init__(self, settings): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="max_logit_scale"):
        build_loss(LossSettings.model_validate({"type": "no_loss:Bare"}), "clip")


def play_small_losses(world: World) -> list[tuple[Any, Any]]:
    """Values in float32 over the ranks beside those in float64, for scales and biases as SigLIP has them at the end.

    Images and texts of a pair have about a cosine, all others are nearly orthogonal. Without duplicates, and with the
    last two as duplicates that are right pairs.
    """
    found = []
    set_tiles((16, 16))
    rows, captions = slice(world.rank * 48 // world.size, (world.rank + 1) * 48 // world.size), torch.arange(48)
    for (scale, bias, cosine), seed in itertools.product(((112.0, -30.0, 0.5), (112.0, -16.5, 0.2)), range(10)):
        draw = torch.Generator().manual_seed(seed)
        image, noise = (F.normalize(torch.randn(48, 512, generator=draw), dim=-1) for _ in range(2))
        text = F.normalize(cosine * image + math.sqrt(1 - cosine**2) * noise, dim=-1)
        single = {"image": image, "text": text, "scale": torch.tensor(scale), "bias": torch.tensor(bias)}
        double = {name: tensor.double() for name, tensor in single.items()}
        for duplicates in ("negatives", "positives"):
            loss = make_loss("siglip", duplicates=duplicates)
            given: Any = {"captions": captions.clamp(max=46), "biased": True}
            share = loss_and_gradients(loss, single, torch.ones(48), rows, world, **given)["loss"]
            exact = loss_and_gradients(loss, double, torch.ones(48).double(), **given)["loss"]
            found.append((float(world.all_reduce_sum(share)), float(exact)))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_small_sigmoid_loss_is_as_exact_as_a_large_one(size: int) -> None:
    for rank in run_ranks(size, play_small_losses):
        assert min(exact for _, exact in rank) < 1e-6  # some are small, indeed
        for found, exact in rank:
            assert found >= 0 and found == pytest.approx(exact, rel=1e-4)


def test_duplicates_by_pictures() -> None:
    settings = LossSettings.model_validate({"type": "clip", "duplicates": "mask", "duplicates_by": "pictures"})
    inputs, loss = make_inputs(6), build_loss(settings, "clip")
    features = Features(inputs["image"], inputs["text"], inputs["scale"], None)
    plain = make_loss("clip")(features, make_batch(6), World())
    assert torch.equal(loss(features, make_batch(6, checksums=torch.arange(6)), World()), plain)
    assert loss(features, make_batch(6, checksums=torch.tensor([7, 1, 7, 2, 3, 4])), World()) < plain


SEVERAL = list(itertools.product(KINDS, ("negatives", "positives")))
ROLES = torch.tensor(
    [[1, 1, -1], [1, 0, -1], [1, 1, 0], [1, 1, 1], [1, -1, 0], [1, 0, 0], [1, 1, -1], [1, 1, -1], [1, -1, -1]]
)


def several_leaves(texts: int = 3) -> Tensors:
    inputs = make_inputs(9)
    inputs["text"] = torch.cat([make_inputs(9, seed=seed)["text"] for seed in range(texts)], dim=1)
    return {name: inputs[name].requires_grad_() for name in LEAVES}


def roles_of(texts: int, kept: int | None) -> torch.Tensor:
    """Roles of so many texts; if components are kept, the last one is a short one, of all samples but two."""
    if kept is None:
        return ROLES[:, :texts]
    return torch.cat([ROLES[:, : texts - 1], torch.tensor([2, 2, 0, 2, 2, 2, 2, 0, 2])[:, None]], dim=1)


def play_several(world: World, counts: list[int], texts: int, kept: int | None) -> list[Tensors]:
    """The shares and gradients, summed over the ranks, of 9 images with several texts, maybe a short one."""
    start, found, losses.COMPONENTS = sum(counts[: world.rank]), [], kept or losses.COMPONENTS
    rows = slice(start, start + counts[world.rank])
    for tile, gib, (kind, duplicates) in itertools.product(((1024, 1024), (2, 5)), (0.0, 1.0), SEVERAL):
        set_tiles(tile)
        given: dict[str, Any] = {"duplicates": duplicates, "gather_gib": gib, "terms": (0.2, 1.5), "short": 0.7}
        loss, leaves = make_loss(kind, **given), several_leaves(texts)
        features = Features(leaves["image"][rows], leaves["text"][rows], leaves["scale"], leaves["bias"])
        batch = make_batch(counts[world.rank], ids=CAPTIONS[rows].int(), weights=make_weights(9)[rows])
        batch = replace(batch, roles=roles_of(texts, kept)[rows].int(), has_short=kept is not None)
        share = loss(features, batch, world)
        share.backward()
        assert kept is None or set(loss.parts) >= {"image_text", "short"}
        made = {"loss": share.detach(), **grads(leaves)}
        found.append({name: world.all_reduce_sum(tensor) for name, tensor in made.items()})
    return found


@pytest.mark.parametrize(
    ("counts", "texts", "kept"),
    [
        *((counts, 3, None) for counts in ([9], [6, 3], [4, 3, 2], [2, 5, 0, 2])),
        *(([9], 3, 3), ([6, 3], 2, 2), ([5, 0, 4], 3, 3), ([9], 2, 32)),
    ],
    ids=str,
)
def test_several_texts_of_a_sample_equal_the_dense_reference(counts: list[int], texts: int, kept: int | None) -> None:
    """Of a short text, that of the image's principal components."""
    wanted, weights, roles = [], make_weights(9), roles_of(texts, kept)
    long = texts if kept is None else texts - 1
    for kind, duplicates in SEVERAL:
        leaves = several_leaves(texts)
        image, text, scale, bias = leaves.values()
        labels = CAPTIONS if duplicates == "positives" else torch.arange(9)
        kwargs = {"softmax": kind == "clip"}
        rows = text[:, : long * image.shape[1]]
        total = several_loss(image, rows, (scale, bias), weights, labels, roles[:, :long], **kwargs)
        if kept is not None:
            reference = softmax_loss if kind == "clip" else sigmoid_loss
            short = text[:, long * image.shape[1] :]
            logits = scale * principal(image, weights, kept) @ short.T + (0 if kind == "clip" else bias)
            total = total + 0.7 * reference(logits, weights * (roles[:, -1] == 2), labels, duplicates)
        if duplicates == "positives":
            own = roles[:, :long] > 0
            shares = own / own.sum(dim=1, keepdim=True)
            of_texts = (weights[:, None] * shares).flatten(), labels.repeat_interleave(long)
            total = total + 0.2 * within_loss(image, scale, bias, weights, labels, **kwargs)
            total = total + 1.5 * within_loss(rows.reshape(9 * long, -1), scale, bias, *of_texts, **kwargs)
        total.backward()
        wanted.append({"loss": total.detach(), **grads(leaves)})
    for ranks in run_ranks(len(counts), play_several, counts, texts, kept):
        for found, one in zip(ranks, itertools.cycle(wanted)):
            assert_close(found, one, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_terms_within_images_are_told_and_need_positives(kind: str) -> None:
    features = Features(*(make_inputs(9)[name] for name in LEAVES))
    loss = make_loss(kind, duplicates="positives", terms=(0.2, 0))
    apart = loss(features, make_batch(9), World())
    assert apart == pytest.approx(float(make_loss(kind)(features, make_batch(9), World())), abs=1e-12)
    found = loss(features, make_batch(9, ids=CAPTIONS.int()), World())
    assert found == pytest.approx(float(loss.parts["image_text"] + 0.2 * loss.parts["image_image"]))
    with pytest.raises(ValueError, match=r"loss.image_image requires positives: set loss.duplicates positives"):
        LossSettings.model_validate({"type": kind, "image_image": 0.2})


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_positives(kind: str) -> None:
    """As captions of the same labels are; an evaluation, whose batches have no groups, has the plain loss."""
    loss = build_loss(LossSettings.model_validate({"type": kind, "positives": {"by": "sku"}}), kind)
    inputs, labels = make_inputs(6), torch.tensor([4, 2, 4, 7, 9, 4])
    features = Features(inputs["image"], inputs["text"], inputs["scale"], torch.tensor(-1.0).double())
    alike = make_loss(kind, duplicates="positives")(features, make_batch(6, ids=labels), World())
    assert torch.equal(loss(features, make_batch(6, groups=labels), World()), alike)
    assert torch.equal(loss(features, make_batch(6), World()), make_loss(kind)(features, make_batch(6), World()))


def test_a_loss_can_run_backward_once() -> None:
    image, text = (torch.eye(3)[:2].clone().requires_grad_() for _ in range(2))
    share = make_loss("clip")(Features(image, text, torch.tensor(2.0), None), make_batch(2), World())
    share.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run once"):
        share.backward()


def logit_flops(world: World, n: int) -> int:
    """Operations of the products that give logits (torch counts those alone: sums into a tensor are others)."""
    from torch.utils.flop_counter import FlopCounterMode

    image, text = (torch.rand(n, 8, requires_grad=True) for _ in range(2))
    features = Features(image, text, torch.tensor(2.0), torch.tensor(-1.0))
    with FlopCounterMode(display=False) as counter:
        for kind in KINDS:
            make_loss(kind)(features, make_batch(n, global_size=n * world.size), world).backward()
    return counter.get_total_flops()


def test_a_rank_of_four_makes_a_quarter_of_the_logits() -> None:
    (whole,) = run_ranks(1, logit_flops, 64)
    assert whole == 3 * 2 * 64 * 64 * 8  # the softmax makes them twice
    assert run_ranks(4, logit_flops, 16) == [whole // 4] * 4


GROWING: list[dict[str, Any]] = [
    {"scales": {"large": 9.0}, "type": "affinity", "features": 0.0},
    *({"kind": kind, "duplicates": "positives", "terms": (0.2, 0.2)} for kind in KINDS),
]


@pytest.mark.parametrize("given", GROWING)
def test_memory_grows_linearly(given: dict[str, Any]) -> None:
    set_tiles((128, 128))
    loss, biased, most = make_loss(**given), given.get("kind") == "siglip", []
    for n in (1024, 3072):
        inputs, weights, captions = make_inputs(n, dtype=torch.float32), torch.ones(n), torch.arange(n) // 2
        with PeakMemory() as peak:
            loss_and_gradients(loss, inputs, weights, captions=captions, biased=biased)
        most.append(peak.most)
    assert most[1] < 3 * most[0]
    assert most[1] < 3072 * 3072 * 4 / 20  # a matrix of logits has as many bytes
