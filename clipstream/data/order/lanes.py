"""Lanes: the fixed number of parallel streams of samples that make up a run, whatever its ranks and workers.

A run has L lanes. Lane l fills slots ⌊lB/L⌋ … ⌊(l+1)B/L⌋ - 1 of each global batch of B samples and reads its samples in
an order that depends on the seed and l alone. Ranks own contiguous runs of lanes and workers share their rank's lanes,
so the number of ranks and workers decides who reads a sample, and never which samples make up a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIN_LANES, MAX_LANES = 192, 3072


def lanes_for(batch: int) -> int:
    """The default number of lanes for global batches of `batch` samples; it depends on nothing else.

    192·2^k, about 3 lanes for 16 samples of a large batch: large batches come with many ranks and workers, which divide
    192·2^k evenly. Each lane has one shard open then. The number of pairs of samples from one shard in a batch,
    relative to independent draws, is about 1 + S (1/L - 1/B) for S shards, L lanes and batches of B: 4.3 at 1,000
    shards and 512 samples, 2.1 at 4,096.
    """
    lanes = MIN_LANES
    while lanes < MAX_LANES and 32 * lanes <= 3 * batch:
        lanes *= 2
    return min(lanes, batch)


def lanes_of_rank(rank: int, ranks: int, lanes: int) -> range:
    """The contiguous run of lanes that a rank owns."""
    return range(rank * lanes // ranks, (rank + 1) * lanes // ranks)


@dataclass(frozen=True)
class LaneSlots:
    """Which slots of its rank's batch each lane fills.

    Attributes:
        lanes: of the rank.
        total: number of lanes of all ranks.
        batch_size: step -> samples of the global batch.
    """

    lanes: range
    total: int
    batch_size: Callable[[int], int]

    def of(self, lane: int, step: int) -> range:
        """The slots of one of the rank's lanes in batch number `step`."""
        size, total = self.batch_size(step), self.total
        first = self.lanes.start * size // total
        return range(lane * size // total - first, (lane + 1) * size // total - first)

    def count(self, step: int) -> int:
        """Number of slots of the rank in batch number `step`; its lanes fill 0 to count - 1."""
        return self.of(self.lanes[-1], step).stop if self.lanes else 0
