"""Owns which samples an exact epoch takes, and in which order: shards are permuted, and lanes cut between samples.

Pure arithmetic on the shards' numbers of samples; never opens a shard. How many a lane takes is `epochs`' work.

A source's references are passes over all of its samples, one after the other. `shared`: each pass goes through the
shards in a permutation that is anew for each epoch, and a lane takes its stretch of that: pieces of shards. `split`:
the shards stand in their own order for ever, so that a lane always takes from the same neighbours; of a pass that is
not whole, each lane has its part of all samples, and takes as many as it needs of other ones each epoch. In both, a
lane's pieces are its shards: groups and windows are made of them as in the other modes.

A piece begins somewhere in its shard and goes round, so that one which is cut leaves out late samples no oftener than
early ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from clipstream.data.epochs import EpochPlan
from clipstream.data.order import Places, Windowed, mix, permutation

_EPOCH = 1 << 32  # a group's number is its epoch times this, and its number in the epoch
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Piece(NamedTuple):
    """Some samples of a shard: `size` of the `span` that begin at `first`, from the `start`th of them on, and round.

    Attributes:
        shard: its number.
        first: number of a sample in it.
        span: samples.
        start: below `span`.
        size: at most `span`.
    """

    shard: int
    first: int
    span: int
    start: int
    size: int

    def samples(self, numbers: Numbers) -> Numbers:
        """The numbers in the shard of samples of the piece, int64 [n]."""
        return self.first + (self.start + numbers) % self.span


class _Pass(NamedTuple):
    """The shards of a pass in their order, and where each ends in it."""

    shards: Numbers
    ends: Numbers


class IndexedOrder(Windowed):
    """The order of one source with known numbers of samples.

    Args:
        plan: of the epochs.
        source: the source's place in the sorted list of names.
        counts: samples of each shard.
        split: whether each lane has samples of its own, always the same.
        open_shards: pieces of a group.
        window: samples of a window, about.
    """

    keeps_places = True

    def __init__(
        self, plan: EpochPlan, source: int, counts: Sequence[int], *, split: bool, open_shards: int, window: int
    ) -> None:
        self.seed, self.source, self.window = plan.seed, source, window
        self._plan, self._split, self._open_shards = plan, split, open_shards
        self._counts = np.asarray(counts, dtype=np.int64)
        self._total = int(self._counts.sum())
        # A lane needs this epoch's pieces, and the next one's ahead.
        self._pass = lru_cache(maxsize=4)(self._make_pass)
        self._pieces = lru_cache(maxsize=2 * plan.lanes)(self._make_pieces)

    def group(self, lane: int, group: int) -> list[int]:
        """See Order."""
        return [piece.shard for piece in self._group(lane, group)]

    def following(self, lane: int, group: int) -> int:
        """See Order."""
        epoch, number = divmod(group, _EPOCH)
        groups = -(-len(self._pieces(lane, epoch)) // self._open_shards)
        return group + 1 if number + 1 < groups else (epoch + 1) * _EPOCH

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        """See Order: what the plan says, whatever was found."""
        return [piece.size for piece in self._group(lane, group)]

    def walk(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> Places:
        """See Order."""
        samples = super().walk(lane, group, window, sizes)
        for place, piece in enumerate(self._group(lane, group)):
            of = samples[:, 0] == place
            samples[of, 1] = piece.samples(samples[of, 1])
        return samples

    def _group(self, lane: int, group: int) -> list[Piece]:
        epoch, number = divmod(group, _EPOCH)
        first = number * self._open_shards
        return self._pieces(lane, epoch)[first : first + self._open_shards]

    def _make_pieces(self, lane: int, epoch: int) -> list[Piece]:
        """A lane's pieces in an epoch, in their order."""
        stretch = self._plan.stretch(self.source, lane)
        if not self._split:
            return list(self._cut(epoch, stretch.start, stretch.stop))
        pieces = self._own(lane, epoch, stretch)
        return [pieces[i] for i in permutation(len(pieces), mix(self.seed, 10, self.source, lane, epoch))]

    def _own(self, lane: int, epoch: int, stretch: range) -> list[Piece]:
        """A lane's pieces where it always has the same: its stretch of the whole passes, and some of its part of one
        more.
        """
        taken = self._plan.taken[self.source]
        passes, rest = divmod(taken, self._total)
        first, stop = (x * passes * self._total // taken for x in (stretch.start, stretch.stop))
        pieces = list(self._cut(None, first, stop))
        missing = len(stretch) - (stop - first)
        if missing:
            low, high = (
                (x - whole) * self._total // rest for x, whole in ((stretch.start, first), (stretch.stop, stop))
            )
            part = list(self._cut(None, low, high))
            for i in permutation(len(part), mix(self.seed, 11, self.source, lane, epoch)):
                piece = part[i]
                count = min(missing, piece.size)
                start = mix(self.seed, 12, self.source, lane, epoch, int(i)) % piece.size
                pieces += [piece._replace(start=start, size=count)] if count else []
                missing -= count
        return pieces

    def _cut(self, epoch: int | None, start: int, stop: int) -> Iterator[Piece]:
        """The references start … stop - 1 of an epoch's passes; None: of shards in their own order, in whole spans."""
        for number in range(start // self._total, -(-stop // self._total)):
            shards, ends = self._pass(epoch, number)
            low = max(0, start - number * self._total)
            high = min(self._total, stop - number * self._total)
            for i in range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1):
                shard, end = int(shards[i]), int(ends[i])
                size = int(self._counts[shard])
                first, count = max(low, end - size) - (end - size), min(high, end) - max(low, end - size)
                if not count:
                    continue
                if epoch is None:
                    yield Piece(shard, first, count, 0, count)
                else:
                    turn = mix(self.seed, 13, self.source, epoch, number, shard)
                    yield Piece(shard, 0, size, (first + turn) % size, count)

    def _make_pass(self, epoch: int | None, number: int) -> _Pass:
        if epoch is None:
            shards: Numbers = np.arange(len(self._counts))
        else:
            shards = permutation(len(self._counts), mix(self.seed, 14, self.source, epoch, number))
        return _Pass(shards, np.cumsum(self._counts[shards]))
