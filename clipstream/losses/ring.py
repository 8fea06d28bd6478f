"""Passes rows around the ranks: each rank sees every rank's rows once, and adds to sums that travel with them.

Transfers overlap with computation. A rank holds its own rows, two blocks of rows in transit and three blocks of sums:
fewer than B rows and B sums of the global batch, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clipstream.distributed.world import World

Work = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Ring:
    """The ranks in a ring."""

    world: World  # this rank among the others
    counts: tuple[int, ...]  # number of rows of each rank

    @classmethod
    def of(cls, count: int, world: World, device: torch.device) -> Ring:
        """A ring in which this rank has `count` rows. Collective."""
        if world.size == 1:
            return cls(world, (count,))
        counts = torch.zeros(world.size, dtype=torch.int64, device=device)
        counts[world.rank] = count
        return cls(world, tuple(world.all_reduce_sum(counts).tolist()))

    @property
    def start(self) -> int:
        """Index of this rank's first row among all."""
        return self.start_of(self.world.rank)

    @property
    def own(self) -> slice:
        """This rank's rows among all."""
        return slice(self.start, self.start + self.counts[self.world.rank])

    def start_of(self, rank: int) -> int:
        """Index of a rank's first row among all."""
        return sum(self.counts[:rank])

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the rows [n_r, ...] of all ranks to [B, ...] in rank order, without gradient. Collective."""
        return self.world.gather_rows(values, self.counts)

    def around(self, rows: torch.Tensor, work: Work) -> torch.Tensor | None:
        """Apply `work` to the rows of every rank. Collective.

        Args:
            rows: this rank's, [n_r, K].
            work: called for each rank, this one first, with the index of its first row and its rows [m, K]; returns
                values to add for them, [m, J], or None on all ranks.

        Returns:
            The values of all ranks for this rank's rows, summed, [n_r, J]; None if `work` returned None.
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
        """Start to send a block to the next rank, and to receive one of `count` rows from the previous rank."""
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
    """A transfer in progress; keeps both blocks alive until it is complete."""

    leaving: torch.Tensor
    arriving: torch.Tensor
    requests: list[Any]

    def wait(self) -> torch.Tensor:
        """The block received."""
        for request in self.requests:
            request.wait()
        return self.arriving
