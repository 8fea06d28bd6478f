"""Owns the order of samples: hashes, draws, lanes and windows. Pure arithmetic; never opens a shard.

A run has L lanes. Lane l gives ⌊(l+1)B/L⌋ - ⌊lB/L⌋ samples to each global batch of B, and a global batch is the lanes'
parts in lane order, so it does not depend on how lanes are spread over ranks and workers. In each source a lane goes
from group to group: a group is `shuffle.shards` shards that are open together. It is cut into windows of about
`shuffle.window` samples, each a stretch of every shard of the group, walked in a permutation. The windows of a group
come in a permuted order of their own, so that a short run sees late samples of a shard as often as early ones.
Everything drawn is a hash of (seed, source, lane, group, window, position); nothing is drawn from a stream of random
numbers, so a lane resumes anywhere at once.

Trade-off: consecutive windows of a lane come from the same shards, because a remote shard is fetched whole and should
be used whole; mixing across shards comes from the number of lanes (48 lanes x 4 shards are open together).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# Samples of a group, int64 [n, 2]: the shard's place in the group, the sample's number in the shard.
Places = np.ndarray[Any, np.dtype[np.int64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def _scramble(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix(*values: int, state: int = 0) -> int:
    """A 64-bit hash of integers, in order; each step is a bijection of its state, so no linear collisions.

    With the hash of others as `state`, it is that of all of them.
    """
    for value in values:
        state = _scramble((state * 0xD1342543DE82EF95 + (value & _MASK) + _GOLDEN) & _MASK)
    return state


class Draws:
    """A small generator of a sample's own: augmentation and caption choice draw from it, never from global state."""

    __slots__ = ("_state",)

    def __init__(self, key: int) -> None:
        self._state = key & _MASK

    def _next(self) -> int:
        self._state = (self._state + _GOLDEN) & _MASK
        return _scramble(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A number of [low, high)."""
        return low + (high - low) * ((self._next() >> 11) * 2.0**-53)

    def integer(self, n: int) -> int:
        """A whole number of 0 … n - 1."""
        return (self._next() * n) >> 64

    def normal(self) -> float:
        """A number of the standard normal distribution (Box and Muller's method)."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())


def permutation(n: int, key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation of 0 … n - 1 as int64 [n], a function of `key` alone on every platform and version of numpy."""
    with np.errstate(over="ignore"):
        x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")


def lanes_of_rank(rank: int, ranks: int, lanes: int) -> range:
    """The contiguous run of lanes that a rank owns."""
    return range(rank * lanes // ranks, (rank + 1) * lanes // ranks)


@dataclass(frozen=True)
class Slots:
    """Which slots of its rank's batch a lane fills.

    Attributes:
        lanes: of the rank.
        total: lanes of all ranks.
        batch_size: step -> samples of the global batch.
    """

    lanes: range
    total: int
    batch_size: Callable[[int], int]

    def of(self, lane: int, step: int) -> range:
        """The slots of a lane of the rank in batch number `step`."""
        size, total = self.batch_size(step), self.total
        first = self.lanes.start * size // total
        return range(lane * size // total - first, (lane + 1) * size // total - first)

    def count(self, step: int) -> int:
        """Slots of the rank in batch number `step`; its lanes fill 0 to count - 1."""
        return self.of(self.lanes[-1], step).stop if self.lanes else 0


@dataclass
class Cursor:
    """Where a lane stands in one source: the next sample is `position` of `window` of `group`.

    `skipped` are the group's shards (their places in it) that could not be opened, so that a resumed run skips them.
    """

    group: int = 0
    window: int = 0
    position: int = 0
    skipped: list[int] = field(default_factory=list)

    def save(self) -> list[Any]:
        """The cursor as a list for JSON."""
        return [self.group, self.window, self.position, list(self.skipped)]

    @classmethod
    def load(cls, saved: Sequence[Any]) -> Cursor:
        """The cursor that `save` gave."""
        group, window, position, skipped = saved
        return cls(int(group), int(window), int(position), [int(i) for i in skipped])


class Order(Protocol):
    """The order of one source's samples in each lane.

    Attributes:
        keeps_places: whether a sample that cannot be used keeps its place, empty, or the lane's next one takes it.
    """

    keeps_places: bool

    def group(self, lane: int, group: int) -> list[int]:
        """Numbers of the shards of a lane's group."""
        ...

    def following(self, lane: int, group: int) -> int:
        """The number of the lane's group that comes after this one."""
        ...

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        """How many samples each shard of the group gives, where opening them has found so many."""
        ...

    def windows(self, sizes: Sequence[int]) -> int:
        """Number of windows of a group whose shards give `sizes` samples."""
        ...

    def walk(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> Places:
        """A window's samples, permuted."""
        ...

    def window_key(self, lane: int, group: int, window: int) -> int:
        """Hash of a window; with a position in it, `mix(position, state=…)`, it is the key of that sample's draws."""
        ...


class Windowed:
    """What all orders share: how a group is cut into windows, and how these are walked.

    Attributes:
        seed: the run's seed.
        source: the source's place in the sorted list of names.
        window: samples of a window, about.
    """

    seed: int
    source: int
    window: int

    def windows(self, sizes: Sequence[int]) -> int:
        """Number of windows of a group whose shards hold `sizes` samples."""
        return -(-sum(sizes) // self.window)

    def walk(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> Places:
        """See Order."""
        count = self.windows(sizes)
        stretch = int(permutation(count, mix(self.seed, 6, self.source, lane, group))[window])
        numbers = [np.arange(stretch * size // count, (stretch + 1) * size // count) for size in sizes]
        places = np.repeat(np.arange(len(sizes)), [len(some) for some in numbers])
        order = permutation(len(places), mix(self.seed, 3, self.source, lane, group, window))
        return np.stack((places[order], np.concatenate(numbers)[order]), axis=1)

    def window_key(self, lane: int, group: int, window: int) -> int:
        """See Order."""
        return mix(self.seed, 4, self.source, lane, group, window)


@dataclass(frozen=True)
class SourceOrder(Windowed):
    """The order of one source's shards: which shards a lane's group holds, how a window is walked.

    Attributes:
        seed: the run's seed.
        source: the source's place in the sorted list of names.
        shards: number of shards of the source.
        lanes: L, all lanes of the run.
        mode: 'resampled' or 'epoch'.
        open_shards: shards of a group.
        window: samples of a window, about.
        split: whether each lane has shards of its own; at least one each then.
        replacement: whether `resampled` may draw a shard again before the lane has seen all.
    """

    seed: int
    source: int
    shards: int
    lanes: int
    mode: str
    open_shards: int
    window: int
    split: bool = False
    replacement: bool = True
    keeps_places = False

    def group(self, lane: int, group: int) -> list[int]:
        """Numbers of the shards of a lane's group."""
        if self.mode == "epoch" or not self.replacement:
            return self._dealt(lane, group)
        own = self._own(lane)
        count = min(self.open_shards, len(own))
        draws = Draws(mix(self.seed, 1, self.source, lane, group))
        chosen: list[int] = []
        while len(chosen) < count:  # within a group without replacement: a window never shows a picture twice
            shard = own[draws.integer(len(own))]
            if shard not in chosen:
                chosen.append(shard)
        return chosen

    def following(self, lane: int, group: int) -> int:
        """See Order."""
        return group + 1

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        """See Order: all that was found."""
        return list(found)

    def _own(self, lane: int) -> range:
        """The shards that a lane draws from. Split ones are neighbours, and so are those of a node's lanes."""
        if not self.split:
            return range(self.shards)
        return range(lane * self.shards // self.lanes, (lane + 1) * self.shards // self.lanes)

    def _dealt(self, lane: int, group: int) -> list[int]:
        """The group's shards where the lane goes through hands of shards, one after the other."""
        own = self._own(lane)
        over_lanes = self.mode == "epoch" and not self.split  # each pass deals every shard once over the lanes
        hand = len(range(lane, self.shards, self.lanes)) if over_lanes else len(own)
        groups_a_hand = -(-hand // self.open_shards)
        number, part = divmod(group, groups_a_hand)
        if over_lanes:
            dealt = permutation(self.shards, mix(self.seed, 2, self.source, number))[lane :: self.lanes]
        else:
            dealt = permutation(hand, mix(self.seed, 7, self.source, lane, number)) + own.start
        return [int(i) for i in dealt[part * self.open_shards : (part + 1) * self.open_shards]]


class Mix(Protocol):
    """Which source each of a lane's samples comes from."""

    def source(self, lane: int, drawn: int) -> int | None:
        """Place of the source of sample `drawn` (from 0) of a lane; None where the place stays empty."""
        ...


@dataclass(frozen=True)
class SourceMix:
    """Which source each of a lane's samples comes from: a golden-ratio sequence over the weights.

    Sample k of a lane takes the source at frac(offset + k·φ), so over any stretch the shares stay within O(log k / k)
    of the weights (Weyl's equidistribution), much closer than independent draws would.
    """

    seed: int
    weights: tuple[float, ...]

    def source(self, lane: int, drawn: int) -> int:
        """Place of the source of sample `drawn` (from 0) of a lane."""
        if len(self.weights) == 1:
            return 0
        offset = mix(self.seed, 5, lane) * 2.0**-64
        point = (offset + drawn * _GOLDEN_RATIO) % 1.0 * sum(self.weights)
        for place, weight in enumerate(self.weights):
            point -= weight
            if point < 0:
                return place
        return len(self.weights) - 1
