"""Kernels and exchanges of the losses on a GPU, counted with fake tensors of one rank among many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import Kind, SoftmaxLoss, loss_share
from clipstream.losses.distillation import DistilledLoss
from clipstream.losses.ring import Ring
from clipstream.losses.settings import ClipLossSettings, DistillSettings, Duplicates
from clipstream.losses.tiled import peak_bytes
from clipstream.models.towers import Features
from tests.support.peak_memory import PeakMemory

RANKS = {8: 4096, 128: 256}  # and the samples of each
NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::promote_types")


class Launches(TorchDispatchMode):
    """Notes the operators that launch kernels, and those of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.exchanges = list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it, unless it is a view or only allocates."""
        name = func.name()
        if name.startswith("c10d::"):
            self.exchanges.append(name)
        elif name.startswith("aten::") and not func.is_view and not name.startswith(NO_KERNEL):
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


class EvenWorld(World):
    """A rank among ranks with as many samples each; fake process groups do not tell theirs."""

    def gather_counts(self, count: int) -> tuple[int, ...]:
        return (count,) * self.size


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[World]:
    """Rank 1 of so many ranks, each with a GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=request.param)
    yield EvenWorld(rank=1, size=request.param, device="cuda:0")
    dist.destroy_process_group()


def launches(
    kind: Kind, world: World, n: int, duplicates: Duplicates = "negatives", gather_gib: float | None = None
) -> Launches:
    """Of a loss and its gradients. An operator that waits for the GPU raises: fake tensors have no values."""
    with FakeTensorMode():
        image, text = (torch.rand(n, 512, device="cuda:0", requires_grad=True) for _ in range(2))
        features = Features(image, text, *(torch.rand((), device="cuda:0", requires_grad=True) for _ in range(2)))
        weights, labels = torch.rand(n, device="cuda:0"), torch.zeros(n, dtype=torch.int64, device="cuda:0")
        factor = torch.rand((), device="cuda:0")
        with Launches() as found:
            some = None if duplicates == "negatives" else labels
            share: Any = loss_share(kind, features, weights, world, some, duplicates, gather_gib)
            share.grad_fn.apply(factor)  # what backward() does; autograd's threads need a real GPU
    return found


@pytest.mark.parametrize("fake_group", RANKS, indirect=True)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("duplicates", ["negatives", "mask", "positives"])
def test_a_step_launches_few_kernels_and_exchanges(kind: Kind, duplicates: Duplicates, fake_group: World) -> None:
    found = launches(kind, fake_group, RANKS[fake_group.size], duplicates)
    assert 20 < len(found.kernels) <= 250
    sums = ["c10d::allreduce_"] * 2 if kind == "softmax" else []
    assert found.exchanges == ["c10d::_allgather_base_", *sums, "c10d::_reduce_scatter_base_"]


@pytest.mark.parametrize("fake_group", [8], indirect=True)
def test_the_memory_told_to_others_is_enough(fake_group: World) -> None:
    n, size = RANKS[fake_group.size], fake_group.size
    every: tuple[Duplicates, ...] = ("negatives", "mask", "positives")
    for kind, duplicates, gib in itertools.product(("softmax", "sigmoid"), every, (0.0, 1.0)):
        with PeakMemory() as peak:
            launches(kind, fake_group, n, duplicates, gib)
        told = peak_bytes(SimpleNamespace(gather_gib=gib), n, n * size, 512, fake_group)
        assert peak.most <= told <= 3 * peak.most


@pytest.mark.parametrize("fake_group", [8], indirect=True)
def test_distillation_has_more_tiles(fake_group: World) -> None:
    n, total = RANKS[fake_group.size], RANKS[fake_group.size] * fake_group.size
    base = SoftmaxLoss(ClipLossSettings(gather_gib=0.0))
    loss = DistilledLoss(base, DistillSettings(contrastive=0.0), {"teacher": 10.0})
    with FakeTensorMode():
        rows = [torch.rand(n, 512, device="cuda:0", requires_grad=number < 2) for number in range(4)]
        features = Features(rows[0], rows[1], torch.rand((), device="cuda:0", requires_grad=True), None)
        teacher = {"teacher.image": rows[2], "teacher.text": rows[3]}
        batch = Batch(None, rows[0], torch.rand(n, device="cuda:0"), ("",) * n, rows[0], 0, total, features=teacher)
        with PeakMemory() as peak:
            loss(features, batch, fake_group)
    assert peak.most <= peak_bytes(loss, n, total, 512, fake_group) <= 3 * peak.most
    assert peak.most > peak_bytes(base, n, total, 512, fake_group)


@pytest.mark.parametrize("fake_group", [8], indirect=True)
def test_texts_beyond_the_limit_go_around(fake_group: World) -> None:
    sends = launches("sigmoid", fake_group, 16, gather_gib=0).exchanges.count("c10d::send")
    assert sends == 7 + 8  # texts, and their gradients, which return
    assert "c10d::send" not in launches("sigmoid", fake_group, 16).exchanges


def test_the_limit_is_1_gib_of_texts_on_a_gpu_and_none_on_the_cpu() -> None:
    gpu, cpu = EvenWorld(size=8, device="cuda:0"), EvenWorld(size=8)
    assert Ring.of(2**16 - 1, gpu, row_bytes=2048).gathers and not Ring.of(2**16, gpu, row_bytes=2048).gathers
    assert not Ring.of(1, cpu, row_bytes=4).gathers and Ring.of(1, cpu, row_bytes=4, gather_gib=1).gathers
    assert not Ring.of(2**14, gpu, row_bytes=2048, gather_gib=0.25).gathers


@pytest.mark.parametrize("fake_group", [8], indirect=True)
def test_counts_are_exchanged_on_the_cpu(fake_group: World) -> None:
    world = World(rank=1, size=8, device="meta")  # whose tensors have no values
    assert world.gather_counts(5) == (0, 5, 0, 0, 0, 0, 0, 0)  # fake groups add nothing
