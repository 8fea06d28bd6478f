"""One rank that communicates as several do, by NCCL: each collective, a step with DDP, and one with FSDP2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clipstream.distributed.world import World
from clipstream.losses.tiled import Ring
from clipstream.training.parallel import parallelize
from clipstream.training.settings import TrainSettings
from tests.support.gpu_steps import make_batch, make_step, make_towers


class Several(int):
    """1, which is not 1 and is more than 1 to whoever asks for other ranks."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


def to_itself(operations: list[Any]) -> list[Any]:
    """`batch_isend_irecv` of a rank with itself, which gloo, unlike NCCL, does not have."""
    sent, received = ([one.tensor for one in operations if one.op is way] for way in (dist.isend, dist.irecv))
    for tensor, into in zip(sent, received, strict=True):
        into.copy_(tensor)
    return []


@pytest.fixture
def world(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A rank in a process group of its own."""
    if device == "cpu":
        monkeypatch.setattr(dist, "batch_isend_irecv", to_itself)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = World(size=Several(1), device=device, address=f"127.0.0.1:{port}")
    alone.start()
    yield alone
    dist.destroy_process_group()


def test_each_collective(device: str, world: World) -> None:
    rows = torch.arange(6.0, device=device).view(3, 2)
    assert torch.equal(world.all_reduce_sum(rows.clone()), rows)
    assert torch.equal(world.gather_rows(rows), rows) and torch.equal(world.gather_rows(rows, [3]), rows)
    assert torch.equal(world.all_reduce_sum(torch.ones(2)), torch.ones(2)), "on the CPU beside it"
    assert world.gather_objects("a") == ["a"] and world.broadcast_object({"b": 1}) == {"b": 1}
    assert world.any(True, False) == [True, False] and world.on_main(lambda: 3) == 3
    world.barrier()


@pytest.mark.parametrize("gather_gib", [0.0, 1.0], ids=["ring", "gathered"])
def test_rows_are_seen_and_their_sums_come_back(device: str, world: World, gather_gib: float) -> None:
    rows = torch.arange(6.0, device=device).view(3, 2)
    ring = Ring.of(3, world, 8, gather_gib)
    found = ring.around(ring.collect([rows], torch.ones(3, device=device))[0], lambda start, block: 2 * block + start)
    assert found is not None and torch.equal(found, 2 * rows)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("precision", "options"), [("fp32", {}), ("bf16", {}), ("fp32", {"micro_batch_size": 4})])
def test_a_step_is_that_of_a_rank_alone(
    device: str, world: World, parallel: str, precision: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    alone = make_step(make_towers(tmp_path, device), device, precision=precision, **options)
    towers = make_towers(tmp_path, device)
    parallelize(towers, world, TrainSettings(parallel=parallel, precision=precision))
    step = make_step(towers, device, precision=precision, world=world, **options)
    for number in range(3):
        found, wanted = (one(make_batch(seed=number), lr=1e-3) for one in (step, alone))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-4 if precision == "fp32" else 0.02)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3 if precision == "fp32" else 0.1)
