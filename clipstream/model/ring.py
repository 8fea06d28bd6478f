"""Owns the way of rows around the ranks: each rank sees every rank's rows once, and adds to what comes home with them.

Never knows what the rows are. The next rows are under way while this rank works on those it has, and so are the sums:
a rank holds its own rows, two ranks' that come by, and three ranks' sums. It sends on what comes: fewer than B rows and
B sums, those of the global batch, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clipstream.world import World

Work = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Ring:
    """The ranks in a circle.

    Attributes:
        world: this rank among the others.
        counts: rows of each rank.
    """

    world: World
    counts: tuple[int, ...]

    @classmethod
    def of(cls, count: int, world: World, device: torch.device) -> Ring:
        """The ring in which this rank has `count` rows. Collective."""
        if world.size == 1:
            return cls(world, (count,))
        counts = torch.zeros(world.size, dtype=torch.int64, device=device)
        counts[world.rank] = count
        return cls(world, tuple(world.all_reduce_sum(counts).tolist()))

    @property
    def start(self) -> int:
        """Number of this rank's first row among all."""
        return self.start_of(self.world.rank)

    @property
    def own(self) -> slice:
        """This rank's rows among all."""
        return slice(self.start, self.start + self.counts[self.world.rank])

    def start_of(self, rank: int) -> int:
        """Number of a rank's first row among all."""
        return sum(self.counts[:rank])

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's rows [n_r, ...] as one [B, ...] in rank order, without gradient. Collective."""
        return self.world.gather_rows(values, self.counts)

    def around(self, rows: torch.Tensor, work: Work) -> torch.Tensor | None:
        """Take every rank's rows past this one. Collective.

        Args:
            rows: this rank's, [n_r, K].
            work: called with the number of the first row and the rows [m, K] of each rank, this rank's first; gives
                what is to be added for them, [m, J], or on all ranks alike None.

        Returns:
            What all ranks' work gave for this rank's rows, summed, [n_r, J]; None where it gave None.
        """
        size, rank = self.world.size, self.world.rank
        coming: _Exchange | None = None
        block = rows.contiguous()
        for hop in range(size):
            owner, following = (rank - hop) % size, (rank - hop - 1) % size
            ahead = self._exchange(block, self.counts[following], 2 * hop) if hop + 1 < size else None
            found = work(self.start_of(owner), block)
            if found is not None and size > 1:
                if coming is not None:
                    found += coming.wait()
                coming = self._exchange(found, self.counts[following], 2 * hop + 1)
            if ahead is not None:
                block = ahead.wait()
        return found if coming is None else coming.wait()

    def _exchange(self, block: torch.Tensor, count: int, tag: int) -> _Exchange:
        """Begin to send a block to the next rank, and to receive one of `count` rows from the rank before."""
        size, rank = self.world.size, self.world.rank
        arriving = block.new_empty((count, *block.shape[1:]))
        steps = []
        if block.numel():
            steps.append(dist.P2POp(dist.isend, block, (rank + 1) % size, tag=tag))
        if arriving.numel():
            steps.append(dist.P2POp(dist.irecv, arriving, (rank - 1) % size, tag=tag))
        return _Exchange(block, arriving, dist.batch_isend_irecv(steps) if steps else [])


@dataclass(frozen=True)
class _Exchange:
    """A block on its way; both are kept alive until they are through."""

    leaving: torch.Tensor
    arriving: torch.Tensor
    requests: list[Any]

    def wait(self) -> torch.Tensor:
        """What has come."""
        for request in self.requests:
            request.wait()
        return self.arriving
