"""Gives each rank the rows of all ranks, and the sums that all ranks computed for its own: gathered, or around a ring.

Each rank sees every rank's rows, and sums what all ranks return for its own, in one of two ways by the memory that the
rows of all ranks take:

- Up to a limit they are gathered in one exchange, and the sums are scattered in another: each rank holds the B rows and
  B sums of the global batch. Zeros follow the rows of a rank that has fewer than another one.
- Beyond it, blocks of rows and of sums travel around a ring. Transfers overlap with computation. A rank holds its own
  rows, two blocks of rows in transit and three blocks of sums, for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clipstream.distributed.world import World, complete

Work = Callable[[int, torch.Tensor], torch.Tensor | None]
GIB = 2**30


def is_gathered(world: World, size: int, gather_gib: float | None) -> bool:
    """Whether rows of `size` bytes of all ranks are gathered."""
    limit = float(world.device.startswith("cuda")) if gather_gib is None else gather_gib
    return world.size == 1 or size < limit * GIB


@dataclass(frozen=True)
class Ring:
    """The ranks, and how many rows each of them has."""

    world: World  # this rank among the others
    counts: tuple[int, ...]  # number of rows of each rank
    gathers: bool = False  # whether `around` takes the rows of all ranks; else it passes them around

    @classmethod
    def of(cls, count: int, world: World, row_bytes: int, gather_gib: float | None = None) -> Ring:
        """The ranks, of which this one has `count` rows. Collective, without a synchronization of the GPU.

        Args:
            row_bytes: size of a row for `around`.
            gather_gib: GiB which the rows of all ranks may take to be gathered; None for 1 on a GPU and 0 on the CPU.
        """
        counts = world.gather_counts(count)
        return cls(world, counts, is_gathered(world, max(counts) * world.size * row_bytes, gather_gib))

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
        return rank * max(self.counts) if self.gathers else sum(self.counts[:rank])

    def collect(self, rows: Sequence[torch.Tensor], *values: torch.Tensor | None) -> list[Any]:
        """Rows as `around` takes them, then the values [n_r, ...] of all ranks as [B, ...] in rank order.

        One exchange, without gradient; None stays None. Dtypes have 4 or 8 bytes. If `gathers`, zeros follow the rows
        and values of each rank up to the number of the longest one.
        """
        if self.world.size == 1:
            return [*rows, *values]
        wanted = [*rows, *values] if self.gathers else [*values]
        count = self.counts[self.world.rank]
        given = [value for value in wanted if value is not None]
        parts = [value.reshape(count, math.prod(value.shape[1:])).view(torch.int32) for value in given]
        packed = torch.cat(parts, dim=1)
        counts = (max(self.counts),) * len(self.counts) if self.gathers else self.counts
        packed = self.world.gather_rows(packed, counts)
        split = torch.split(packed, [part.shape[1] for part in parts], dim=1)
        whole = iter([part.clone(memory_format=torch.contiguous_format) for part in split])
        found = [
            None if value is None else next(whole).view(value.dtype).view(len(packed), *value.shape[1:])
            for value in wanted
        ]
        return found if self.gathers else [*rows, *found]

    def around(self, rows: torch.Tensor, work: Work) -> torch.Tensor | None:
        """Apply `work` to the rows of every rank. Collective.

        Args:
            rows: this rank's, [n_r, K]; if `gathers`, those of all ranks, as `collect` returns them.
            work: called for each block of rows, this rank's first, with the index of its first row and the rows [m, K];
                returns values to add for them, [m, J], or None on all ranks.

        Returns:
            The values of all ranks for this rank's rows, summed, [n_r, J]; None if `work` returned None.
        """
        size, rank = self.world.size, self.world.rank
        if self.gathers:
            found = work(0, rows)
            if found is None or size == 1:
                return found
            mine = found.new_empty((max(self.counts), *found.shape[1:]))
            complete(dist.reduce_scatter_tensor(mine, found, async_op=True), mine)
            return mine[: self.counts[rank]]
        coming: _Exchange | None = None
        block = rows.contiguous()
        for hop in range(size):
            owner, following = (rank - hop) % size, (rank - hop - 1) % size
            ahead = self._exchange(block, self.counts[following], 2 * hop) if hop + 1 < size else None
            found = work(self.start_of(owner), block)
            if found is not None:
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
