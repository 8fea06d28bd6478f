"""The order of one source's samples in each lane: groups of shards, cut into windows of permuted samples.

A lane goes from group to group. A group is a few shards that are open together. It is cut into windows of about
`shuffle.window` samples, each a stretch of every shard of the group, whose samples are permuted. The windows of a group
are permuted as well, so that a short run sees late samples of a shard as often as early ones. Everything drawn is a
hash of (seed, source, lane, group, window, position), so a lane can resume anywhere at once.

Trade-off: consecutive windows of a lane come from the same shards, because a remote shard is downloaded completely and
should be used completely. Mixing across shards comes from the number of shards that are open together, lanes times
`shuffle.shards`. With the same number of open shards, more lanes of fewer shards mix a batch better
(`default_lanes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from clipstream.data.order import MIN_LANES
from clipstream.data.order.rng import SampleRNG, mix, permutation

MAX_GROUP = 4  # shards that a lane has open where there are few lanes or few shards
SHARDS_PER_FAMILY = 10  # that a family of lanes has in a pass of `epoch`, at least
# Samples of a window, int64 [n, 2]: the shard's index in its group, the sample's number in that shard.
WindowSamples = np.ndarray[Any, np.dtype[np.int64]]


class Order(ABC):
    """The order of one source's samples in each lane: groups of shards, cut into windows, and these permuted."""

    seed: int  # the run's seed
    source: int  # number of the source, in the order of names
    window: int  # samples of a window, about
    keeps_slots = False  # whether the slot of a dropped sample stays empty; else the lane's next sample fills it

    @abstractmethod
    def group(self, lane: int, group: int) -> list[int]:
        """Numbers of the shards of a lane's group."""

    @abstractmethod
    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        """How many samples the lane takes from each shard of the group, where these hold `found` samples."""

    def next_group(self, lane: int, group: int) -> int:
        """The number of the lane's group after this one."""
        return group + 1

    def windows(self, sizes: Sequence[int]) -> int:
        """Number of windows of a group that gives `sizes` samples."""
        return -(-sum(sizes) // self.window)

    def samples(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> WindowSamples:
        """A window's samples, permuted."""
        count = self.windows(sizes)
        stretch = int(permutation(count, mix(self.seed, 6, self.source, lane, group))[window])
        numbers = [np.arange(stretch * size // count, (stretch + 1) * size // count) for size in sizes]
        shards = np.repeat(np.arange(len(sizes)), [len(some) for some in numbers])
        order = permutation(len(shards), mix(self.seed, 3, self.source, lane, group, window))
        return np.stack((shards[order], np.concatenate(numbers)[order]), axis=1)

    def window_key(self, lane: int, group: int, window: int) -> int:
        """Hash of a window; `mix(position, state=window_key)` is the key of the random numbers of its samples."""
        return mix(self.seed, 4, self.source, lane, group, window)


def group_size_for(lanes: int, shards: int) -> int:
    """The default number of shards of a group, such that at least 192 shards are open in the run.

    Where there are few shards, all are open in any case; each lane then draws several, so that all come equally often.
    """
    wanted = max(MIN_LANES, lanes)
    return MAX_GROUP if 2 * shards <= wanted else min(MAX_GROUP, -(-wanted // lanes))


@dataclass(frozen=True)
class SourceOrder(Order):
    """The order of the modes `resampled` and `epoch`, which need not know how many samples a shard holds.

    In `epoch` a pass deals every shard to a family of neighbouring lanes, and each of the m lanes of a family takes
    every m-th sample of it. A family has several shards in a pass, so that its lanes differ little in their number of
    samples: else lanes with small shards would be through sooner and begin the next pass.
    """

    seed: int
    source: int
    shards: int  # number of shards of the source
    lanes: int  # L, all lanes of the run
    mode: str  # 'resampled' or 'epoch'
    open_shards: int | None  # shards of a group; None for the default
    window: int
    # whether each family of lanes has fixed shards; there are as many families as shards then, at most L
    split: bool = False
    replacement: bool = True  # whether `resampled` may draw a shard again before the lane has seen all
    factors: tuple[float, ...] | None = None  # by shard, how often `resampled` draws it; None: equally often

    def group(self, lane: int, group: int) -> list[int]:
        own = self._shards_of(lane)
        if self.mode == "resampled" and self.replacement:
            rng = SampleRNG(mix(self.seed, 1, self.source, lane, group))
            if self._bounds is not None:  # also twice in a group, or two shards would always come equally often
                points = [rng.uniform() * self._bounds[-1] for _ in range(self.group_size)]
                return [int(i) for i in np.searchsorted(self._bounds[:-1], points, "right")]
            drawn: list[int] = []
            while len(drawn) < min(self.group_size, len(own)):  # without replacement: a window has no sample twice
                shard = own[rng.integer(len(own))]
                if shard not in drawn:
                    drawn.append(shard)
            return drawn
        # The lane goes through all its shards, one permutation after the other.
        family = self._family(lane)
        turn, part = divmod(group, self.groups_per_pass(lane))
        if self.mode == "epoch" and not self.split:
            dealt = permutation(self.shards, mix(self.seed, 2, self.source, turn))[family :: self.families]
        else:
            who = family if self.mode == "epoch" else lane
            dealt = permutation(len(own), mix(self.seed, 7, self.source, who, turn)) + own.start
        return [int(i) for i in dealt[part * self.group_size : (part + 1) * self.group_size]]

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        first, step = self._stride(lane, group)
        return [len(range(first, size, step)) for size in found]

    def samples(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> WindowSamples:
        samples = super().samples(lane, group, window, sizes)
        first, step = self._stride(lane, group)
        samples[:, 1] = samples[:, 1] * step + first
        return samples

    @cached_property
    def families(self) -> int:
        """Number of families of lanes that share their shards; L, where each lane is alone."""
        if self.split:
            return min(self.lanes, self.shards)
        return min(self.lanes, max(1, self.shards // SHARDS_PER_FAMILY)) if self.mode == "epoch" else self.lanes

    @cached_property
    def group_size(self) -> int:
        """Shards of a group, at most."""
        if self.open_shards is not None:
            return self.open_shards
        if self.mode == "epoch":
            return -(-max(MIN_LANES, self.lanes) // self.families)
        return group_size_for(self.lanes, self.shards)

    def groups_per_pass(self, lane: int) -> int:
        """Number of groups in which the lane reads all its shards once."""
        shards = len(self._shards_of(lane))
        if self.mode == "epoch" and not self.split:  # each pass deals all shards over the families
            shards = len(range(self._family(lane), self.shards, self.families))
        return -(-shards // self.group_size)

    def max_open(self, lanes: int) -> int:
        """Number of shards that so many neighbouring lanes have open together, at most."""
        readers = -(-lanes * self.families // self.lanes) if self.mode == "epoch" else lanes
        return min(self.shards, readers * self.group_size)

    @cached_property
    def _bounds(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """The factors of the shards laid end to end."""
        return None if self.factors is None else np.cumsum(self.factors)

    def _family(self, lane: int) -> int:
        return lane * self.families // self.lanes

    def _shards_of(self, lane: int) -> range:
        """The shards that a lane draws from. Where they are split, neighbouring lanes have neighbouring shards."""
        if not self.split:
            return range(self.shards)
        family = self._family(lane)
        return range(family * self.shards // self.families, (family + 1) * self.shards // self.families)

    def _stride(self, lane: int, group: int) -> tuple[int, int]:
        """(first, step): the lane takes samples first, first + step, … of each shard of the group.

        `first` rotates with the pass, so that each lane gets samples where a shard has fewer than its family has lanes.
        """
        if self.mode != "epoch" or self.families == self.lanes:
            return 0, 1
        family = self._family(lane)
        low, high = (-(-i * self.lanes // self.families) for i in (family, family + 1))
        turn = mix(self.seed, 15, self.source, family, group // self.groups_per_pass(lane))
        return (lane - low + turn) % (high - low), high - low
