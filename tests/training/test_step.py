"""The gradients of a step are those of the global batch, for any number of ranks and micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.training.parallel import parallelize
from clipstream.training.precision import prepare
from clipstream.training.settings import Precision, TrainSettings
from clipstream.training.step import SMALLEST_SCALE, StepResult, TrainStep, WeightAverages
from tests.support.ranks import run_ranks
from tests.support.steps import (
    LOSSES,
    TinyTowers,
    make_batch,
    reference,
    sgd,
)


def step_gradients(world: World, kind: str, micro: int | None, weights: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """What one step says, and the gradient that it went along, in float64."""
    model = TinyTowers(kind).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = TrainStep(model, LOSSES[kind], sgd(model), world, TrainSettings(precision="fp64", micro_batch_size=micro))
    result = step(make_batch(0, world.rank, world.size, weights), lr=1.0)
    return result, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def all_gradients(world: World, weights: torch.Tensor) -> dict[tuple[str, int | None], Any]:
    """Both losses, with and without micro-batches."""
    torch.set_num_threads(1)
    cases = [(kind, micro) for kind in LOSSES for micro in (None, 2, 3)]
    return {case: step_gradients(world, *case, weights) for case in cases}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_the_full_batchs(size: int) -> None:
    weights = torch.ones(10)
    if size == 2:
        weights[4], weights[8] = 0.0, 0.5
    expected = {kind: reference(kind, weights) for kind in LOSSES}
    for found in run_ranks(size, all_gradients, weights):
        for (kind, _), (result, gradients) in found.items():
            loss, truth = expected[kind]
            assert result.loss == pytest.approx(float(loss), abs=1e-10)
            assert result.n == 10
            assert result.logit_scale == pytest.approx(10.0)
            norm = math.sqrt(sum(float((g**2).sum()) for g in truth.values()))
            assert result.grad_norm == pytest.approx(norm, abs=1e-10)
            for name, gradient in truth.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("size", "kept", "sizes"),
    [(4, 0, [3, 3, 4]), (4, 1, [3, 3, 4]), (4, 2, [3, 7]), (4, 9, [3, 7]), (2, 2, [2, 4, 4]), (1, 4, [2, 4, 4])],
)
def test_micro_batches_replay_dropout(size: int, kept: int, sizes: list[int]) -> None:
    model, batch = TinyTowers(dropout=0.5).double(), make_batch()
    assert batch.pixels is not None
    torch.manual_seed(5)
    parts = [model(p, i) for p, i in zip(batch.pixels.split(sizes), batch.ids.split(sizes), strict=True)]
    whole = parts[-1]._replace(image=torch.cat([p.image for p in parts]), text=torch.cat([p.text for p in parts]))
    LOSSES["clip"](whole, batch, World()).backward()  # type: ignore[arg-type]
    truth, drawn = [p.grad for p in model.parameters()], torch.rand(3)

    model = TinyTowers(dropout=0.5).double()
    before = [p.detach().clone() for p in model.parameters()]
    step = TrainStep(
        model,
        LOSSES["clip"],
        sgd(model),
        World(),
        TrainSettings(precision="fp64", micro_batch_size=size, kept_micro_batches=kept),
    )
    torch.manual_seed(5)
    step(batch, lr=1.0)
    assert torch.equal(torch.rand(3), drawn)
    for old, p, gradient in zip(before, model.parameters(), truth, strict=True):
        assert gradient is not None
        torch.testing.assert_close(old - p.detach(), gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("micro", [2, "auto"])
def test_batch_norm_refuses_micro_batches(micro: Any) -> None:
    model = TinyTowers(batch_norm=True)
    with pytest.raises(SettingsError, match="micro_batch_size"):
        TrainStep(model, LOSSES["clip"], sgd(model), World(), TrainSettings(precision="fp32", micro_batch_size=micro))


@pytest.mark.parametrize("frozen", ["visual", "text"])
def test_a_frozen_tower_stays(frozen: str) -> None:
    for micro in (None, 4):
        model = TinyTowers()
        model.clip.get_submodule(frozen).requires_grad_(False)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        TrainStep(model, LOSSES["clip"], sgd(model), World(), TrainSettings(precision="fp32", micro_batch_size=micro))(
            make_batch(), lr=1.0
        )
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (not p.requires_grad), name


@pytest.mark.parametrize(
    ("start", "lr", "limit", "expected"),
    [
        (150.0, 0.0, 100.0, 150.0),  # lr 0 leaves a loaded scale where it is
        (99.0, 1.0, 100.0, 100.0),  # a scale that wants to rise stops at the limit
        (150.0, 1.0, 100.0, 150.0),  # also one that was loaded above it
        (99.0, 1.0, None, 120.0),
    ],
)
def test_the_scales_limit(start: float, lr: float, limit: float | None, expected: float) -> None:
    class Rising:
        """A loss that pulls the scale up to 120."""

        max_logit_scale = limit

        def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
            wish = math.log(features.logit_scale.item()) - max(math.log(120.0), math.log(start) + 0.1)
            return features.logit_scale.log() * wish + 0 * features.image.sum()

    model = TinyTowers()
    model.clip.logit_scale.data.fill_(math.log(start))
    TrainStep(model, Rising(), sgd(model), World())(make_batch(), lr=lr)
    assert model.clip.logit_scale.exp().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("start", "lr", "limits", "expected"),
    [
        (1.2, 1.0, (1.0, 100.0), 1.0),  # a scale that wants to fall stops at the limit
        (0.5, 0.0, (1.0, 100.0), 0.5),  # lr 0 leaves a loaded scale where it is
        (0.5, 1.0, (1.0, 100.0), 0.5),
        (1.2, 1.0, (None, 100.0), 0.3),
        (1.2, 1.0, (2.0, None), 1.2),
    ],
)
def test_the_scales_lower_limit(
    start: float, lr: float, limits: tuple[float | None, float | None], expected: float
) -> None:
    class Falling:
        """A loss that pulls the scale down to 0.3."""

        min_logit_scale, max_logit_scale = limits

        def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
            wish = math.log(features.logit_scale.item()) - math.log(0.3)
            return features.logit_scale.log() * wish + 0 * features.image.sum()

    model = TinyTowers()
    model.clip.logit_scale.data.fill_(math.log(start))
    TrainStep(model, Falling(), sgd(model), World())(make_batch(), lr=lr)
    assert model.clip.logit_scale.exp().item() == pytest.approx(expected, rel=1e-5)


class BreaksOnRank1:
    """The softmax loss, but not a number on the last rank (`loss`), or one whose gradient is none (`gradient`)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        share = LOSSES["clip"](features, batch, world)
        if batch.step != 7 or world.rank < world.size - 1:
            return share
        none = (features.image - features.image.detach()).sum()  # 0
        return share * math.nan if self.kind == "loss" else share + none.sqrt()


def left_out(
    world: World, kind: str, precision: Precision, fsdp: bool, make: type[torch.optim.Optimizer], fused: bool
) -> tuple[StepResult, bool, bool]:
    """A step that breaks on the last rank, whether it changed nothing, and whether the next one is as without it."""
    ends = []
    for number in (7, 3):
        model = TinyTowers(batch_norm=not fsdp)
        settings = TrainSettings(parallel="fsdp" if fsdp else "ddp", precision=precision, ema=0.9, ema_warmup=True)
        parallelize(model, world, settings)
        options: Any = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), weight_decay=0.2, fused=fused, **options)
        step = TrainStep(model, BreaksOnRank1(kind), optimizer, world, settings)
        averages = step.averages
        assert averages is not None
        if step.scaler.is_enabled():
            step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 256.0})
        step(make_batch(1, world.rank, world.size), lr=0.1)
        before = everything(model, optimizer, averages)
        if number == 7:
            broken = step(make_batch(7, world.rank, world.size), lr=0.1)
            kept = all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer, averages), strict=True))
        after = step(make_batch(3, world.rank, world.size), lr=0.1)
        ends.append([after, *everything(model, optimizer, averages)])
    same = ends[0][0] == ends[1][0] and all(torch.equal(a, b) for a, b in zip(ends[0][1:], ends[1][1:], strict=True))
    return broken, kept, same


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, averages: WeightAverages) -> list[torch.Tensor]:
    """Copies of all tensors that a step may change, this rank's part."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *moments, *averages.tensors.values()]
    tensors.append(torch.tensor(averages.updates))
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


@pytest.mark.parametrize(
    ("size", "kind", "precision", "fsdp", "make", "fused"),
    [
        (1, "loss", "fp32", False, torch.optim.AdamW, False),
        (1, "loss", "fp32", False, torch.optim.AdamW, True),
        (1, "gradient", "fp64", False, torch.optim.SGD, True),
        (1, "loss", "fp16", False, torch.optim.AdamW, False),
        (1, "loss", "fp16", False, torch.optim.AdamW, True),
        (2, "loss", "fp32", False, torch.optim.AdamW, True),
        (2, "gradient", "fp32", False, torch.optim.AdamW, False),
        (2, "loss", "bf16", True, torch.optim.AdamW, True),
        (2, "gradient", "fp32", True, torch.optim.AdamW, True),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    size: int, kind: str, precision: Precision, fsdp: bool, make: type[torch.optim.Optimizer], fused: bool
) -> None:
    for broken, kept, same in run_ranks(size, left_out, kind, precision, fsdp, make, fused):
        assert broken.skipped and not broken.overflow and kept and same
        assert math.isfinite(broken.loss) == (kind == "gradient") and not math.isfinite(broken.grad_norm)
        assert broken.loss_scale == (256.0 if precision == "fp16" else None)  # its factor is for overflows


def warmed_up(world: World) -> bool:
    """Whether the warm-up left no trace."""
    torch.manual_seed(3)
    model = TinyTowers(batch_norm=True)
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    TrainStep(model, LOSSES["clip"], sgd(model), world)
    same = all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))
    drawn = torch.rand(4)
    torch.manual_seed(3)
    return same and torch.equal(drawn, torch.rand(4))


def test_the_warm_up_leaves_no_trace() -> None:
    assert run_ranks(2, warmed_up) == [True] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_computes_in_16_bits_over_float32_weights(precision: Precision) -> None:
    losses, weights = [], []
    for one in ("fp32", precision):
        model = TinyTowers()
        step = TrainStep(model, LOSSES["clip"], sgd(model), World(), TrainSettings(precision=one))  # type: ignore[arg-type]
        if step.scaler.is_enabled():
            step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 256.0})
        losses.append(step(make_batch(), lr=1.0).loss)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert weights[-1].dtype == torch.float32
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.03)
    torch.testing.assert_close(weights[0], weights[1], rtol=0.05, atol=0.05)  # the loss's factor is taken out again


@pytest.mark.parametrize("fused", [False, True])  # the fused one is told of overflows in another way
def test_fp16_leaves_out_a_step_whose_gradients_overflow_and_lowers_their_factor(fused: bool) -> None:
    model = TinyTowers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if fused else sgd(model)
    step = TrainStep(model, LOSSES["clip"], optimizer, World(), TrainSettings(precision="fp16"), clip_norm=0.5)
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**40})
    before = [p.detach().clone() for p in model.parameters()]
    first = step(make_batch(), lr=0.1)
    assert first.overflow and first.loss_scale == 2.0**39 and not math.isfinite(first.grad_norm)
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    results = [step(make_batch(i), lr=0.1) for i in range(40)]
    done = [result for result in results if not result.overflow]
    assert len(done) > 5 and results[-1] is done[-1] and math.isfinite(done[0].grad_norm)
    assert not all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_left_out_leaves_no_state(fused: bool) -> None:
    model = TinyTowers()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)  # whose fused momentum begins unfilled
    step = TrainStep(model, BreaksOnRank1("loss"), optimizer, World())
    assert step(make_batch(7), lr=0.1).skipped and not optimizer.state
    assert not step(make_batch(3), lr=0.1).skipped and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_leaves_out_a_step_whose_finite_gradients_have_no_finite_norm(fused: bool) -> None:
    class Steep:
        """The softmax loss, with a slope whose square is above the largest number in float32."""

        def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
            slope = 1e22 if batch.step == 7 else 0.0
            return LOSSES["clip"](features, batch, world) + slope * features.logit_scale

    model = TinyTowers(batch_norm=True)
    optimizer, settings = torch.optim.AdamW(model.parameters(), fused=fused), TrainSettings(precision="fp16", ema=0.9)
    step = TrainStep(model, Steep(), optimizer, World(), settings, clip_norm=1.0)
    averages = step.averages
    assert averages is not None
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 256.0})
    step(make_batch(1), lr=0.1)
    before = everything(model, optimizer, averages)
    result = step(make_batch(7), lr=0.1)
    assert result.overflow and result.loss_scale == 128.0 and math.isinf(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer, averages), strict=True))


def test_fp16_gives_up_where_no_factor_helps() -> None:
    class Endless:
        """A loss whose value is a number and whose gradients are none."""

        def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
            return (features.image - features.image.detach()).sum().sqrt() + features.logit_scale

    model = TinyTowers()
    step = TrainStep(model, Endless(), sgd(model), World(), TrainSettings(precision="fp16"))
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2 * SMALLEST_SCALE})
    first, second = step(make_batch(), lr=0.1), step(make_batch(), lr=0.1)
    assert first.overflow and not first.skipped and second.skipped and not second.overflow


def test_pure_bf16_holds_weights_and_moments_in_bf16_but_not_the_scale() -> None:
    model = prepare(TinyTowers("siglip"), "pure_bf16")
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == {
        "clip.logit_scale",
        "clip.logit_bias",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = TrainStep(model, LOSSES["siglip"], optimizer, World(), TrainSettings(precision="pure_bf16"), clip_norm=1.0)
    losses = [step(make_batch(), lr=0.01).loss for _ in range(30)]
    assert losses[-1] < losses[0] * 0.9
    moments = {state["exp_avg"].dtype for state in optimizer.state.values()}
    assert moments == {torch.bfloat16, torch.float32}
