"""Losses of distillation against dense references, open_clip's, and themselves on several ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
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
from clipstream.losses import tiled
from clipstream.losses.contrastive import SigmoidLoss, SoftmaxLoss
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import ClipLossSettings, DistillSettings, SiglipLossSettings
from clipstream.training.gradcache import GradCache
from clipstream.training.parallel import finish_gradients, full_tensor, is_sharded, parallelize, wrap
from clipstream.training.settings import TrainSettings
from tests.support.losses import feature_loss, relational_loss, sigmoid_loss, softmax_loss
from tests.support.peak_memory import PeakMemory
from tests.support.ranks import run_ranks
from tests.support.steps import CUTS, Features, TinyTowers, make_batch

TYPES = ("logits", "affinity", "relational")
SCALES = {"large": 20.0, "small": 7.5}  # of the logits of two teachers
LEAVES = ("image", "text", "scale", "bias")


def make_loss(
    kind: str = "clip", scales: dict[str, float] | None = None, gather_gib: float | None = None, **given: Any
) -> DistilledLoss:
    base = SoftmaxLoss(ClipLossSettings(gather_gib=gather_gib)) if kind == "clip" else SigmoidLoss(SiglipLossSettings())
    return DistilledLoss(base, DistillSettings.model_validate(given), SCALES if scales is None else scales)


def make_inputs(n: int, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Features of a student and two teachers, one of another width, and scalars; the same in every process."""
    draw = torch.Generator().manual_seed(seed)
    widths = {"image": width, "text": width, "small.image": width, "small.text": width, "large.image": 8}
    widths |= {"large.text": 8}
    made = {
        name: F.normalize(torch.randn(n, size, generator=draw, dtype=dtype), dim=-1) for name, size in widths.items()
    }
    return made | {"scale": torch.tensor(9.0, dtype=dtype), "bias": torch.tensor(-3.0, dtype=dtype)}


def make_weights(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    weights = torch.ones(n, dtype=dtype)
    weights[1::4], weights[2::5] = 0.0, 0.5
    return weights


def batch_of(inputs: dict[str, torch.Tensor], weights: torch.Tensor, rows: slice) -> Batch:
    part = {name: value[rows] for name, value in inputs.items() if "." in name}
    n = len(weights[rows])
    ids = torch.arange(len(weights), dtype=torch.int32)[rows, None]
    return Batch(None, ids, weights[rows], ("0.tar/0",) * n, torch.zeros(n), 0, len(weights), features=part)


def loss_and_gradients(
    loss: DistilledLoss,
    inputs: dict[str, torch.Tensor],
    weights: torch.Tensor,
    rows: slice = slice(None),
    world: World | None = None,
    *,
    biased: bool = False,
) -> dict[str, torch.Tensor]:
    """This rank's share, and its gradients; those of features in all rows, zeros in the other ranks'."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    features = Features(
        leaves["image"][rows], leaves["text"][rows], leaves["scale"], leaves["bias"] if biased else None
    )
    share = loss(features, batch_of(inputs, weights, rows), world or World())
    share.backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": share.detach(), **found}


def wanted_of(
    inputs: dict[str, torch.Tensor], weights: torch.Tensor, given: dict[str, Any], scales: dict[str, float], kind: str
) -> dict[str, torch.Tensor]:
    """The same by the dense references and autograd."""
    chosen = DistillSettings.model_validate(given)
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    image, text, scale, bias = leaves.values()
    cosines, labels = image @ text.T, torch.arange(len(weights))
    base = softmax_loss(scale * cosines, weights, labels)
    if kind == "siglip":
        base = sigmoid_loss(scale * cosines + bias, weights, labels)
    total = chosen.contrastive * base
    own = scale if chosen.temperature is None else 1 / chosen.temperature
    for name, its_scale in scales.items():
        teacher = inputs[f"{name}.image"], inputs[f"{name}.text"]
        theirs = its_scale if chosen.teacher_temperature is None else 1 / chosen.teacher_temperature
        found = relational_loss(
            own * cosines, theirs * teacher[0] @ teacher[1].T, weights, divergence=chosen.type != "logits"
        )
        total = total + chosen.weight * found / len(scales)
        if chosen.features:
            total = total + chosen.features * feature_loss(image, text, teacher, weights) / len(scales)
    total.backward()  # type: ignore[no-untyped-call]
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": total.detach(), **grads}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 1e-10) -> None:
    for name in wanted:
        torch.testing.assert_close(torch.as_tensor(found[name]), wanted[name], rtol=0, atol=atol, msg=name)


@settings(max_examples=60)
@given(
    n=st.integers(1, 13),
    width=st.integers(1, 6),
    tile=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    kind=st.sampled_from(["clip", "siglip"]),
    chosen=st.fixed_dictionaries(
        {
            "type": st.sampled_from(TYPES),
            "weight": st.sampled_from([0.7, 1.0]),
            "contrastive": st.sampled_from([0.0, 0.3, 1.0]),
            "temperature": st.sampled_from([None, 0.2]),
            "teacher_temperature": st.sampled_from([None, 0.1]),
        }
    ),
    seed=st.integers(0, 99),
    draws=st.data(),
)
def test_tiles_equal_the_dense_reference(
    n: int, width: int, tile: tuple[int, int], kind: str, chosen: dict[str, Any], seed: int, draws: st.DataObject
) -> None:
    inputs = make_inputs(n, width, seed)
    numbers = draws.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n).filter(any))
    weights = torch.tensor(numbers, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "ROWS", tile[0])
        patch.setattr(tiled, "COLUMNS", tile[1])
        found = loss_and_gradients(make_loss(kind, **chosen), inputs, weights, biased=kind == "siglip")
    assert_equal(found, wanted_of(inputs, weights, chosen, SCALES, kind))


@given(n=st.integers(1, 9), width=st.integers(1, 6), seed=st.integers(0, 99))
def test_distance_of_features(n: int, width: int, seed: int) -> None:
    inputs, weights = make_inputs(n, width, seed), make_weights(n)
    chosen = {"features": 0.8, "weight": 0.0, "contrastive": 0.5}
    scales = {"small": 1.0}
    found = loss_and_gradients(make_loss("clip", scales, **chosen), inputs, weights)
    assert_equal(found, wanted_of(inputs, weights, chosen, scales, "clip"))


def play_rank(world: World, counts: list[int], tile: tuple[int, int]) -> dict[tuple[str, float], dict[str, Any]]:
    """This rank's share and gradients summed over the ranks, by type of loss, GiB to gather and name."""
    tiled.ROWS, tiled.COLUMNS = tile
    n, start = sum(counts), sum(counts[: world.rank])
    rows = slice(start, start + counts[world.rank])
    found = {}
    for kind, gib in itertools.product(TYPES, (0.0, 1.0)):
        loss = make_loss(scales={"small": 7.5}, gather_gib=gib, type=kind, features=0.4)
        made = loss_and_gradients(loss, make_inputs(n), make_weights(n), rows, world)
        found[kind, gib] = {name: world.all_reduce_sum(tensor).numpy() for name, tensor in made.items()}
    return found


@pytest.mark.parametrize("counts", [[9], [6, 3], [4, 0, 5]], ids=len)
def test_shares_of_uneven_ranks_sum_to_the_full_batch(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiled, name, getattr(tiled, name))  # one rank plays in this process
    for ranks in (run_ranks(len(counts), play_rank, counts, tile) for tile in ((1024, 1024), (2, 1))):
        for found, kind, gib in itertools.product(ranks, TYPES, (0.0, 1.0)):
            chosen = {"type": kind, "features": 0.4}
            assert_equal(found[kind, gib], wanted_of(make_inputs(9), make_weights(9), chosen, {"small": 7.5}, "clip"))


def test_equals_open_clip() -> None:
    import open_clip.loss  # here, so that ranks do not import it

    inputs = make_inputs(12)
    found = loss_and_gradients(make_loss(scales={"large": 20.0}), inputs, torch.ones(12))
    image, text, scale = (inputs[name].clone().requires_grad_() for name in LEAVES[:3])
    theirs = open_clip.loss.DistillClipLoss()(
        image, text, scale, inputs["large.image"], inputs["large.text"], torch.tensor(20.0, dtype=torch.float64)
    )
    sum(theirs).backward()
    wanted = {"loss": sum(theirs).detach(), "image": image.grad, "text": text.grad, "scale": scale.grad}
    assert_equal(found, wanted, atol=1e-12)


@pytest.mark.parametrize("weights", [{"type": "relational", "features": 2000.0}, {"features": 2000.0, "weight": 0.0}])
def test_weights_of_clip_kd_carry_over(weights: dict[str, Any]) -> None:
    """`task + 1 ckd + 2000 fd`, written as KDClipLoss of winycg/CLIP-KD computes it on one process."""
    inputs = make_inputs(12)
    found = loss_and_gradients(make_loss(scales={"small": 20.0}, **weights), inputs, torch.ones(12))
    image, text, scale = (inputs[name].clone().requires_grad_() for name in LEAVES[:3])
    t_image, t_text = inputs["small.image"], inputs["small.text"]
    student, teacher, own = scale * image @ text.T, 20.0 * t_image @ t_text.T, torch.arange(12)
    pairs = ((student, teacher), (student.T, teacher.T))
    task = sum(F.cross_entropy(s, own) for s, _ in pairs) / 2
    ckd = sum(F.kl_div(s.log_softmax(1), t.softmax(1), reduction="batchmean") for s, t in pairs) / 2
    fd = F.mse_loss(image, t_image) + F.mse_loss(text, t_text)
    total = task + (ckd if weights.get("weight", 1) else 0) + 2000 * fd
    total.backward()
    wanted = {"loss": total.detach(), "image": image.grad, "text": text.grad, "scale": scale.grad}
    assert_equal(found, wanted, atol=1e-9)


def test_a_student_equal_to_its_teacher_has_no_divergence() -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    inputs |= {"small.image": inputs["image"], "small.text": inputs["text"]}
    found = loss_and_gradients(
        make_loss(scales={"small": 9.0}, type="affinity", contrastive=0.0, features=1.0), inputs, weights
    )
    zeros = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    assert_equal(found, zeros, atol=1e-13)
    without_weights = loss_and_gradients(make_loss(features=0.0), inputs, torch.zeros(9, dtype=torch.float64))
    assert_equal(without_weights, zeros, atol=0)  # and not nan


def test_sums_are_float32_under_autocast() -> None:
    inputs, weights = make_inputs(16, dtype=torch.float32), torch.ones(16)
    loss = make_loss(scales={"small": 20.0}, type="affinity", features=1.0)
    plain = loss_and_gradients(loss, inputs, weights)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(loss, inputs, weights)["loss"]
    assert found.dtype == torch.float32 and torch.equal(found, plain)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1e-2), ("int8", 1e-2)])
def test_stored_rows_of_a_teacher(dtype: str, off: float) -> None:
    inputs, weights = make_inputs(9), make_weights(9)
    loss = make_loss(type="affinity")
    exact = loss_and_gradients(loss, inputs, weights)
    stored = {name: encode_rows(rows.float(), dtype) if "." in name else rows for name, rows in inputs.items()}
    assert_equal(loss_and_gradients(loss, stored, weights), exact, atol=off)


def test_widths_that_differ() -> None:
    with pytest.raises(SettingsError, match=r"teacher large have 8 numbers, those of the model 5.*affinity"):
        loss_and_gradients(make_loss(features=1.0), make_inputs(4), make_weights(4))


def test_settings() -> None:
    with pytest.raises(ValueError, match="both 0"):
        DistillSettings.model_validate({"weight": 0})
    with pytest.raises(ValueError, match="requires --distill-model"):
        DistillSettings.model_validate({"pretrained": "openai"})
    loss = make_loss("clip")
    assert (loss.max_logit_scale, loss.min_logit_scale) == (100.0, 1.0)


def test_memory_grows_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(tiled, name, 128)
    loss = make_loss(scales={"large": 9.0}, type="affinity", features=0.0)
    most = []
    for n in (1024, 3072):
        inputs, weights = make_inputs(n, dtype=torch.float32), torch.ones(n)
        with PeakMemory() as peak:
            loss_and_gradients(loss, inputs, weights)
        most.append(peak.most)
    assert most[1] < 3 * most[0]
    assert most[1] < 3072 * 3072 * 4 / 20  # a matrix of logits has as many bytes


def gradients_of(world: World, *, sharded: bool, size: int | None) -> dict[str, Any]:
    """The gradients of the whole batch of make_batch, distilled from a fixed teacher, and the loss."""
    model = TinyTowers().double()
    if sharded:
        parallelize(model, world, TrainSettings(parallel="fsdp", precision="fp64"))
        assert is_sharded(model)
    batch = make_batch(0, world.rank, world.size)
    n, start = sum(CUTS[1]), sum(CUTS[world.size][: world.rank])
    rows = slice(start, start + len(batch))
    teacher = {f"small.{kind}": make_inputs(n)[f"small.{kind}"][rows] for kind in ("image", "text")}
    batch = replace(batch, features=teacher, weights=make_weights(n)[rows])
    loss = make_loss(scales={"small": 9.0}, type="affinity")
    step = GradCache(model, wrap(model, world), loss, world, "fp64", lambda share: share, size)
    share, _ = step(batch)
    finish_gradients(model, world)
    found = {"loss": world.all_reduce_sum(share).numpy()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = full_tensor(parameter.grad).numpy()
    return found


def play_sharded(world: World) -> dict[str, Any]:
    return gradients_of(world, sharded=True, size=3)


def test_micro_batches_and_sharded_ranks_give_the_same_gradients() -> None:
    wanted = gradients_of(World(), sharded=False, size=None)
    alone = [gradients_of(World(), sharded=False, size=size) for size in (3, 1)]
    for found in (*alone, *run_ranks(2, play_sharded)):
        assert_equal(found, {name: torch.as_tensor(value) for name, value in wanted.items()}, atol=1e-12)
