"""Batch norm over ranks with unequal parts equals that of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipstream.distributed.world import World
from clipstream.training.parallel import synchronize_batch_norm
from tests.support.ranks import run_ranks

CUTS = {2: [0, 3, 8], 3: [0, 1, 4, 8]}
Tensors = dict[str, torch.Tensor]


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    pictures = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=None), nn.GELU(), nn.Flatten()
    return nn.Sequential(*pictures, nn.Linear(80, 4), nn.BatchNorm1d(4)).double()


def passes(world: World) -> Tensors:
    """Two passes over this rank's part of a batch of 8: features, gradients (summed), buffers."""
    module = tower()
    synchronize_batch_norm(module, world)
    first, end = (0, 8) if world.size == 1 else CUTS[world.size][world.rank : world.rank + 2]
    pixels = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = (pixels[first:end] * 3 + 2).requires_grad_()
    for _ in range(2):
        features = module(mine)
    aim = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (features * aim[first:end]).sum().backward()
    assert mine.grad is not None
    found = {"features": world.gather_rows(features.detach()), "pixels": world.gather_rows(mine.grad)}
    found |= {name: world.all_reduce_sum(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    module.eval()
    return {**found, "evaluated": module(pixels).detach()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_and_gradients_are_those_of_the_whole_batch(ranks: int) -> None:
    (whole,) = run_ranks(1, passes)
    for found in run_ranks(ranks, passes):
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.allclose(found[name], tensor, rtol=1e-10, atol=1e-10), name


def kept(world: World) -> tuple[bool, torch.dtype]:
    """Whether a synchronised module has the names it had; and the type that it gives under autocast."""
    module = tower().float()
    names = list(module.state_dict())
    synchronize_batch_norm(module, world)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(torch.randn(4, 3, 6, 6))
    return names == list(module.state_dict()), out.dtype


def test_names_stay_and_autocast_is_left_alone() -> None:
    assert run_ranks(2, kept) == [(True, torch.bfloat16)] * 2
