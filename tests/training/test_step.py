"""The gradients of a step are those of the global batch, for any number of ranks and micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.models.precision import prepare
from clipstream.models.settings import Precision
from clipstream.training.parallel import local_tensor, parallelize
from clipstream.training.settings import TrainSettings
from clipstream.training.step import SMALLEST_SCALE, StepResult, TrainStep
from tests.support.ranks import run_ranks
from tests.support.steps import LOSSES, TinyTowers, assert_close, make_batch, make_step, reference, taken


def all_gradients(world: World, weights: torch.Tensor) -> dict[tuple[str, int | None], Any]:
    """Result and gradients of both losses, with and without micro-batches."""
    batch, found = make_batch(0, world.rank, world.size, weights), {}
    for kind in LOSSES:
        for micro in (None, 2, 3):
            step = make_step(TinyTowers(kind).double(), world, kind, precision="fp64", micro_batch_size=micro)
            found[kind, micro] = taken(step, batch)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_the_full_batchs(size: int) -> None:
    weights = torch.ones(10)
    if size == 2:
        weights[4], weights[8] = 0.0, 0.5
    expected = {kind: reference(kind, weights) for kind in LOSSES}
    for found in run_ranks(size, all_gradients, weights):
        for (kind, _), (result, gradients) in found.items():
            loss, truth = expected[kind]
            norm = math.sqrt(sum(float((g**2).sum()) for g in truth.values()))
            assert (result.loss, result.grad_norm) == pytest.approx((float(loss), norm), abs=1e-10)
            assert (result.n, result.logit_scale) == (10, pytest.approx(10.0))
            assert_close(gradients, truth)


@pytest.mark.parametrize(
    ("size", "kept", "sizes"), [(4, 0, [3, 3, 4]), (4, 1, [3, 3, 4]), (4, 2, [3, 7]), (2, 2, [2, 4, 4])]
)
def test_micro_batches_replay_dropout(size: int, kept: int, sizes: list[int]) -> None:
    model, batch = TinyTowers(dropout=0.5).double(), make_batch()
    assert batch.pixels is not None
    torch.manual_seed(5)
    parts = [model(p, i) for p, i in zip(batch.pixels.split(sizes), batch.ids.split(sizes), strict=True)]
    whole = parts[-1]._replace(image=torch.cat([p.image for p in parts]), text=torch.cat([p.text for p in parts]))
    LOSSES["clip"](whole, batch, World()).backward()
    truth, drawn = {name: p.grad for name, p in model.named_parameters()}, torch.rand(3)

    again = TinyTowers(dropout=0.5).double()
    step = make_step(again, precision="fp64", micro_batch_size=size, kept_micro_batches=kept)
    torch.manual_seed(5)
    _, found = taken(step, batch)
    assert torch.equal(torch.rand(3), drawn)
    assert_close(found, truth, 1e-12)


class Pulling:
    """A loss that pulls the scale to another one."""

    def __init__(self, goal: float, limits: tuple[float | None, float | None]) -> None:
        self.goal, (self.min_logit_scale, self.max_logit_scale) = goal, limits

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        wish = math.log(features.logit_scale.item()) - math.log(self.goal)
        return features.logit_scale.log() * wish + 0 * features.image.sum()


@pytest.mark.parametrize(
    ("start", "goal", "lr", "limits", "expected"),
    [
        (99, 120, 1, (None, 100), 100),  # a scale that wants to rise stops at the limit
        (150, 166, 1, (None, 100), 150),  # also one that was loaded above it
        (150, 166, 0, (None, 100), 150),  # lr 0 leaves it where it is
        (99, 120, 1, (None, None), 120),
        (1.2, 0.3, 1, (1, 100), 1),
        (0.5, 0.3, 1, (1, 100), 0.5),
        (0.5, 0.3, 0, (1, 100), 0.5),
        (1.2, 0.3, 1, (None, 100), 0.3),
        (1.2, 0.3, 1, (2, None), 1.2),
    ],
)
def test_the_limits_of_the_scale(start: float, goal: float, lr: float, limits: Any, expected: float) -> None:
    model = TinyTowers()
    model.clip.logit_scale.data.fill_(math.log(start))
    make_step(model, loss=Pulling(goal, limits))(make_batch(), lr=lr)
    assert model.clip.logit_scale.exp().item() == pytest.approx(expected, rel=1e-5)


class Breaks:
    """The softmax loss, which in batch 7 is spoilt on the last rank.

    Args:
        kind: it is no number (`loss`), its gradient is none (`gradient`), or its slope's square is infinite (`steep`).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        share = LOSSES["clip"](features, batch, world)
        if batch.step != 7 or world.rank < world.size - 1:
            return share
        if self.kind == "steep":
            return share + 1e22 * features.logit_scale
        none = (features.image - features.image.detach()).sum()  # 0
        return share * math.nan if self.kind == "loss" else share + none.sqrt()


def set_scale(step: TrainStep, scale: float) -> None:
    """The factor of the loss in fp16."""
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": scale})


def everything(step: TrainStep) -> list[torch.Tensor]:
    """Copies of all tensors that a step may change, this rank's part."""
    assert step.averages is not None
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = [*step.towers.parameters(), *step.towers.buffers(), *moments, *step.averages.tensors.values()]
    return [local_tensor(t).detach().clone() for t in (*tensors, torch.tensor(step.averages.updates))]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def left_out(
    world: World, kind: str, precision: Precision, fsdp: bool, make: type[torch.optim.Optimizer], fused: bool
) -> tuple[StepResult, bool, bool]:
    """A step that breaks on the last rank, whether it changed nothing, and whether the next one is as without it."""
    ends: list[Any] = []
    for number in (7, 3):
        model = TinyTowers(batch_norm=not fsdp)
        settings: Any = {"precision": precision, "ema": 0.9, "ema_warmup": True}
        parallelize(model, world, TrainSettings(parallel="fsdp" if fsdp else "ddp", **settings))
        options: Any = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), weight_decay=0.2, fused=fused, **options)
        step = make_step(model, world, Breaks(kind), optimizer, **settings)
        if step.scaler.is_enabled():
            set_scale(step, 256.0)
        step(make_batch(1, world.rank, world.size), lr=0.1)
        before = everything(step)
        if number == 7:
            broken = step(make_batch(7, world.rank, world.size), lr=0.1)
            kept = same(before, everything(step))
            if broken.overflow:
                return broken, kept, True  # the next step has another factor
        ends.append((step(make_batch(3, world.rank, world.size), lr=0.1), everything(step)))
    return broken, kept, ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])


@pytest.mark.parametrize(
    ("size", "kind", "precision", "fsdp", "make", "fused"),
    [
        (1, "loss", "fp32", False, torch.optim.AdamW, False),
        (1, "gradient", "fp64", False, torch.optim.SGD, True),
        (1, "loss", "fp16", False, torch.optim.AdamW, True),
        (1, "steep", "fp16", False, torch.optim.AdamW, False),
        (1, "steep", "fp16", False, torch.optim.AdamW, True),
        (2, "gradient", "fp32", False, torch.optim.AdamW, False),
        (2, "loss", "bf16", True, torch.optim.AdamW, True),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    size: int, kind: str, precision: Precision, fsdp: bool, make: type[torch.optim.Optimizer], fused: bool
) -> None:
    for broken, kept, as_without in run_ranks(size, left_out, kind, precision, fsdp, make, fused):
        assert kept and as_without and (broken.skipped, broken.overflow) == (kind != "steep", kind == "steep")
        assert math.isfinite(broken.loss) == (kind != "loss") and not math.isfinite(broken.grad_norm)
        # The factor of the loss is lowered for overflows alone.
        assert broken.loss_scale == (None if precision != "fp16" else 128.0 if kind == "steep" else 256.0)


def warmed_up(world: World) -> bool:
    """Whether the warm-up left no trace."""
    torch.manual_seed(3)
    model = TinyTowers(batch_norm=True)
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    make_step(model, world)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    return same(before, [*model.parameters(), *model.buffers()]) and torch.equal(drawn, torch.rand(4))


def test_the_warm_up_leaves_no_trace() -> None:
    assert run_ranks(2, warmed_up) == [True] * 2


@pytest.mark.parametrize("fused", [False, True])  # the fused one is told of overflows in another way
def test_fp16_lowers_the_factor_until_gradients_do_not_overflow(fused: bool) -> None:
    model = TinyTowers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if fused else None
    step = make_step(model, optimizer=optimizer, precision="fp16", clip_norm=0.5)
    set_scale(step, 2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    first = step(make_batch(), lr=0.1)
    assert first.overflow and first.loss_scale == 2.0**39 and same(before, list(model.parameters()))
    results = [step(make_batch(i), lr=0.1) for i in range(40)]
    done = [result for result in results if not result.overflow]
    assert len(done) > 5 and results[-1] is done[-1] and math.isfinite(done[0].grad_norm)
    assert not same(before, list(model.parameters()))


def test_fp16_gives_up_where_no_factor_helps() -> None:
    class Endless:
        """A loss whose value is a number and whose gradients are none."""

        def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
            return (features.image - features.image.detach()).sum().sqrt() + features.logit_scale

    step = make_step(TinyTowers(), loss=Endless(), precision="fp16")
    set_scale(step, 2 * SMALLEST_SCALE)
    first, second = step(make_batch(), lr=0.1), step(make_batch(), lr=0.1)
    assert first.overflow and not first.skipped and second.skipped and not second.overflow


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_left_out_leaves_no_state(fused: bool) -> None:
    model = TinyTowers()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)  # whose fused momentum begins unfilled
    step = make_step(model, loss=Breaks("loss"), optimizer=optimizer)
    assert step(make_batch(7), lr=0.1).skipped and not optimizer.state
    assert not step(make_batch(3), lr=0.1).skipped and all(p.isfinite().all() for p in model.parameters())


def test_pure_bf16_holds_weights_and_moments_in_bf16_but_not_the_scalars() -> None:
    model: nn.Module = prepare(TinyTowers("siglip"), "pure_bf16")
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"clip.logit_scale", "clip.logit_bias"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = make_step(model, loss="siglip", optimizer=optimizer, precision="pure_bf16", clip_norm=1.0)
    losses = [step(make_batch(), lr=0.01).loss for _ in range(30)]
    assert losses[-1] < losses[0] * 0.9
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16, torch.float32}
