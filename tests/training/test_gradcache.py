"""Automatic micro-batches, and steps that run out of memory, with towers that raise."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.settings import ClipLossSettings, DistillSettings
from clipstream.training import gradcache
from clipstream.training.gradcache import TRUSTED, is_out_of_memory
from tests.support.ranks import end_ranks, run_ranks
from tests.support.steps import (
    LOSSES,
    Features,
    TinyTowers,
    assert_close,
    make_batch,
    make_step,
    reference,
    taken,
)  # fmt: skip

AUTO: Any = {"micro_batch_size": "auto"}
AUTO64: Any = {**AUTO, "precision": "fp64"}


class _Full(torch.autograd.Function):
    """The identity, whose backward pass finds no memory for more than `limit` rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, limit: int) -> torch.Tensor:
        ctx.limit = limit
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if len(gradients[0]) > ctx.limit:
            raise torch.cuda.OutOfMemoryError("a stand-in: the backward pass needs more than there is")
        return gradients[0], None


class TightTowers(TinyTowers):
    """Towers on a device whose memory holds few samples: `without` a graph, `forward` with one, and `back`."""

    def __init__(
        self, kind: str = "clip", *, without: int = 99, forward: int = 99, back: int = 99, **more: Any
    ) -> None:
        super().__init__(kind, **more)
        self.limits = {False: without, True: forward}
        self.back = back
        self.passes = 0  # with a graph

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Features:
        """As Towers.forward, while there is memory."""
        if len(pixels) > self.limits[torch.is_grad_enabled()]:
            raise torch.cuda.OutOfMemoryError("a stand-in: the forward pass needs more than there is")
        self.passes += torch.is_grad_enabled()
        features = super().forward(pixels, ids)
        return features._replace(image=_Full.apply(features.image, self.back))  # type: ignore[no-untyped-call]


def tight_cases(world: World, cases: list[tuple[str, dict[str, int], dict[str, int]]]) -> list[Any]:
    """Of two steps from the same weights, the second with less memory: result, gradients, and what was found."""
    last, found = world.rank == world.size - 1, []
    for kind, first, then in cases:
        model = TightTowers(kind, **(first if last else {})).double()
        before = deepcopy(model.state_dict())
        step = make_step(model, world, kind, **AUTO64)
        found.append([])
        for number in range(2):
            if number and last:
                model.limits = {False: then.get("without", 99), True: then.get("forward", 99)}
                model.back = then.get("back", 99)
            model.load_state_dict(before)
            found[-1].append((*taken(step, make_batch(0, world.rank, world.size)), step.gradcache.size))
    return found


@pytest.mark.parametrize(("size", "sizes"), [(1, (4, 3, 2)), (3, (3, 1, 1))])
def test_auto_takes_what_fits_and_a_step_without_memory_is_repeated_with_less(
    size: int, sizes: tuple[int, int, int]
) -> None:
    start, less, least = sizes
    cases = [
        ("clip", {"forward": start}, {"forward": less}),
        ("siglip", {"back": start}, {"back": less}),
        ("clip", {}, {"without": least, "back": less}),
        ("siglip", {}, {"without": less, "forward": least}),
    ]
    expected = {kind: reference(kind, torch.ones(10)) for kind in LOSSES}
    for found in run_ranks(size, tight_cases, cases):
        for (kind, _, _), steps in zip(cases, found, strict=True):
            loss, truth = expected[kind]
            for result, gradients, _ in steps:
                assert result.loss == pytest.approx(float(loss), abs=1e-10)
                assert_close(gradients, truth)
        assert [[at_once for _, _, at_once in steps] for steps in found[:2]] == [[start, less]] * 2
        assert [steps[1][2] for steps in found[2:]] == [least] * 2


def overlapped_steps(world: World, first: dict[str, int], then: dict[str, int]) -> list[Any]:
    """Of steps from the same weights, with less memory in the last but one: loss, gradients, size and passes."""
    model, last = TightTowers().double(), world.rank == world.size - 1
    before = deepcopy(model.state_dict())
    step = make_step(model, world, **AUTO64)
    found = []
    for number in range(TRUSTED + 4):
        if last and number in (0, TRUSTED + 2):
            limits = then if number else first
            model.limits[True], model.back = limits.get("forward", 99), limits.get("back", 99)
        model.load_state_dict(before)
        model.passes = 0
        result, gradients = taken(step, make_batch(0, world.rank, world.size))
        found.append((result.loss, gradients, step.gradcache.size, model.passes))
    return found


@pytest.mark.parametrize(
    ("first", "then", "sizes"),
    [({}, {"forward": 2}, (None, 2)), ({"forward": 2}, {"back": 1}, (2, 1)), ({"back": 2}, {"forward": 1}, (2, 1))],
)
def test_steps_that_fitted_are_followed_by_sums_in_the_backward_pass(
    first: dict[str, int], then: dict[str, int], sizes: tuple[int | None, int]
) -> None:
    loss, truth = reference("clip", torch.ones(10))
    for found in run_ranks(2, overlapped_steps, first, then):
        for of_step, gradients, *_ in found:
            assert of_step == pytest.approx(float(loss), abs=1e-10)
            assert_close(gradients, truth)
        assert [size for *_, size, _ in found] == [sizes[0]] * (TRUSTED + 2) + [sizes[1]] * 2
        passes = [passes for *_, passes in found]
        assert passes[1:TRUSTED] == [passes[TRUSTED] + 1] * (TRUSTED - 1)  # a pass that only sums
        assert passes[TRUSTED] == passes[TRUSTED + 1] and passes[-1] > passes[TRUSTED]


def late(world: World) -> int:
    """The exit code of steps of which one runs out of memory, on one rank, in the pass that sums."""
    world.start()
    watch = FailureWatch(world)
    watch.start()
    model = TightTowers()
    step = make_step(model, world, **AUTO)
    try:
        for number in range(TRUSTED + 1):
            if number == TRUSTED and world.rank == 1:
                model.back = 2
            step(make_batch(0, world.rank, world.size), lr=0.0)
    except (SettingsError, RuntimeError) as error:
        return watch.report(error)
    return 0


def test_all_ranks_end_if_one_runs_out_of_memory_in_the_pass_that_sums() -> None:
    ends = end_ranks(2, late)
    assert [end.code for end in ends] == [2, 2]
    assert "backward pass that sums gradients, in which ranks wait for each other: set --train.micro-batch" in (
        ends[0].stderr
    )


def test_a_repeated_step_draws_the_same_dropout_as_one_of_that_size(capsys: pytest.CaptureFixture[str]) -> None:
    weights, drawn = [], []
    for tight in (True, False):
        model = TightTowers(dropout=0.5).double()
        step = make_step(model, precision="fp64", micro_batch_size="auto" if tight else 3)
        torch.manual_seed(1)
        if tight:
            step(make_batch(), lr=0.0)
            model.back = 3
        torch.manual_seed(5)
        step(make_batch(), lr=1.0)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        drawn.append(torch.rand(3))
    assert torch.equal(*weights) and torch.equal(*drawn)
    assert "out of memory with 10 samples at once; the step is repeated with 3" in capsys.readouterr().err


def test_a_batch_that_grows_is_tried_again_only_while_nothing_set_a_limit() -> None:
    model, batch = TightTowers(), make_batch()
    step = make_step(model, **AUTO)
    assert batch.pixels is not None
    parts = {key: getattr(batch, key)[:4] for key in ("pixels", "ids", "weights", "keys")}
    small = replace(batch, **parts, global_size=4)
    step(small, lr=0.1)
    assert step.gradcache.size is None
    model.back = 6
    step(batch, lr=0.1)
    assert step.gradcache.size == 6
    model.back = 9
    step(replace(batch, global_size=11), lr=0.1)
    assert step.gradcache.size == 6
    again = make_step(model, **AUTO)
    again.load_state(step.state())
    again(batch, lr=0.1)
    assert again.gradcache.size == 6
    fixed = make_step(model, micro_batch_size=2)
    fixed.load_state(step.state())
    assert fixed.gradcache.size == 2 and fixed.state().micro_batch is None


class Hungry:
    """The softmax loss, which finds no memory the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise torch.cuda.OutOfMemoryError("a stand-in: the loss needs more than there is")
        return LOSSES["clip"](features, batch, world)


def test_a_loss_that_runs_out_of_memory_is_repeated_where_no_rank_waits() -> None:
    loss = Hungry()
    step = make_step(TightTowers().double(), loss=loss, **AUTO64)
    result = step(make_batch(), lr=1.0)
    assert loss.calls == 2 and step.gradcache.size == 9
    assert result.loss == pytest.approx(float(reference("clip", torch.ones(10))[0]), abs=1e-10)


class NanOnZeros(TightTowers):
    """Towers whose mean over the words that are there divides by their number."""

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Features:
        features = super().forward(pixels, ids)
        words = (ids > 0).sum(dim=1, keepdim=True).to(features.text.dtype)
        return features._replace(text=features.text * (words / words))


def nan_on_zeros(world: World) -> float:
    return make_step(NanOnZeros().double(), world, **AUTO64)(make_batch(0, world.rank, world.size), lr=1.0).grad_norm


def test_the_pass_that_sums_over_ranks_adds_nothing() -> None:
    (alone,) = run_ranks(1, nan_on_zeros)
    assert run_ranks(2, nan_on_zeros) == [pytest.approx(alone)] * 2


def test_auto_goes_with_fp16() -> None:
    step = make_step(TightTowers(back=4), precision="fp16", **AUTO)
    results = [step(make_batch(i), lr=0.01) for i in range(30)]
    assert step.gradcache.size == 4 and not results[-1].overflow and results[-1].loss < 10


class Misshapen(TinyTowers):
    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Features:
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(
    ("model", "settings", "error", "said"),
    [
        (TightTowers(back=3), {}, SettingsError, r"with 10 samples at once: use --train\.micro-batch-size auto"),
        (TightTowers(back=0), AUTO, SettingsError, "a single sample"),
        (Misshapen(), AUTO, RuntimeError, "shapes do not fit"),  # no want of memory
    ],
)
def test_errors(model: TinyTowers, settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make_step(model, **settings)(make_batch(), lr=1.0)


def test_room_is_left_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(gradcache, "peak_bytes", lambda loss, *args: limits.append(loss.gather_gib) or 2**60)
    base = SoftmaxLoss(ClipLossSettings(gather_gib=4.0))
    for loss in (base, DistilledLoss(base, DistillSettings(weight=1.0), {"teacher": 10.0})):
        with pytest.raises(SettingsError, match="a single sample"):
            make_step(TinyTowers(), loss=loss, **AUTO)(make_batch(), lr=1.0)
    assert set(limits) == {4.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed a non-contiguous input.", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_that_say_that_memory_ran_out(text: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) is expected
