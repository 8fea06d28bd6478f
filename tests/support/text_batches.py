"""A batch of pictures with texts of different lengths, on ranks."""

from __future__ import annotations

import torch

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from tests.support.steps import CUTS

TOKENS = 20


def part_of_batch(world: World) -> Batch:
    """A rank's part of a batch of ten samples, with texts of 2 to 20 tokens."""
    draw = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8, generator=draw)
    ids = torch.zeros(10, TOKENS, dtype=torch.int32)
    for row, length in zip(ids, (2, 9, 3, 20, 8, 2, 17, 5, 12, 4), strict=True):
        row[:length] = torch.randint(1, 60, (length,), generator=draw)
        row[length - 1] = 63
    start, stop = sum(CUTS[world.size][: world.rank]), sum(CUTS[world.size][: world.rank + 1])
    part = slice(start, stop)
    return Batch(pixels[part], ids[part], torch.ones(10)[part], ("",) * (stop - start), torch.zeros(10)[part], 0, 10)
