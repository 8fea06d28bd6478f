"""Owns the plan of exact epochs: how many steps, which places of a lane hold which source, what the tail does.

Pure arithmetic on numbers of samples; never opens a shard. Which samples come is the work of `indexed`.

An epoch is a line of references to samples. A source with n samples and weight w has round(w n) of them: each sample
⌊w⌋ times, and some once more. With T references in all and global batches of B, an epoch has S = ⌊T/B⌋ steps (`drop`)
or ⌈T/B⌉ (`pad`, `wrap`). So many of the line are taken as there are places; with `pad`, the last places of the last
batch stay empty. Lane l's places make up one stretch of the line, as long as the lane has places in S steps: lanes are
cut between samples, not between shards, and all ranks take equally many steps.

The line merges the sources evenly: of its first x references, every source has its share of x, but for a rounding. The
merge halves the sources again and again, and each half's share of a prefix is rounded; so what stands at any x is
found at once, with nothing to replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from clipstream.data.order import mix
from clipstream.errors import SettingsError


@dataclass(frozen=True)
class EpochPlan:
    """The epochs of a run; its `source` is the mix of sources.

    Attributes:
        seed: the run's seed.
        names: of the sources, sorted.
        samples: of each source.
        weights: of each source: how often a sample comes in an epoch.
        batch: B, samples of a global batch.
        lanes: L.
        tail: 'drop', 'pad' or 'wrap'.

    Raises:
        SettingsError: a source without samples; or `drop`, and an epoch is less than one batch.
    """

    seed: int
    names: tuple[str, ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...]
    batch: int
    lanes: int
    tail: str

    def __post_init__(self) -> None:
        for name, samples in zip(self.names, self.samples, strict=True):
            if not samples:
                raise SettingsError(f"data.sources.{name}.shards: there is no sample in them")
        if not self.steps:
            raise SettingsError(
                f"data.sampling.tail: an epoch has {self.references:,} samples, less than one batch of {self.batch}, "
                "and drop leaves all of them out: use --data.sampling.tail pad or wrap, or a smaller batch"
            )

    @cached_property
    def wanted(self) -> list[int]:
        """References of each source in an epoch, before its tail is seen to."""
        return [max(1, round(n * w)) for n, w in zip(self.samples, self.weights, strict=True)]

    @property
    def references(self) -> int:
        """T, of all sources."""
        return sum(self.wanted)

    @cached_property
    def steps(self) -> int:
        """S, of an epoch."""
        return self.references // self.batch if self.tail == "drop" else -(-self.references // self.batch)

    @cached_property
    def taken(self) -> list[int]:
        """References of each source that an epoch takes."""
        return self.wanted if self.tail == "pad" else _shared(self.steps * self.batch, self.wanted)

    def source(self, lane: int, drawn: int) -> int | None:
        """See clipstream.data.order.Mix; `drawn` counts a lane's places from the run's beginning."""
        low, high = self._share(lane)
        place = drawn % (self.steps * (high - low))
        first, end = self._bounds[lane], self._bounds[lane + 1]
        if place >= end - first:
            return None
        # Each lane begins somewhere else in its stretch, or all lanes would take the same source in a step.
        x = first + (place + mix(self.seed, 9, lane)) % (end - first)
        low, high = 0, len(self.names)
        while high - low > 1:
            middle = (low + high) // 2
            left = self._left(low, middle, high, x)
            if self._left(low, middle, high, x + 1) > left:
                high, x = middle, left
            else:
                low, x = middle, x - left
        return low

    def stretch(self, source: int, lane: int) -> range:
        """Which of a source's references belong to a lane."""
        return range(self._before[lane][source], self._before[lane + 1][source])

    def tails(self) -> list[dict[str, int]]:
        """By source, what an epoch's tail does: how many samples are `left_out`, or `repeated`, or how many places of
        the source's share are `padded`.
        """
        places = _shared(self.steps * self.batch, self.wanted)
        words = {"drop": "left_out", "pad": "padded", "wrap": "repeated"}[self.tail]
        counts = [abs(place - wanted) for place, wanted in zip(places, self.wanted, strict=True)]
        return [{words: count} if count else {} for count in counts]

    def summary(self) -> str:
        """The epoch in words."""
        rows = zip(self.names, self.samples, self.weights, strict=True)
        held = ", ".join(f"{name} {n:,}{'' if w == 1 else f' x {w:g}'}" for name, n, w in rows)
        count = abs(self.steps * self.batch - self.references)
        words = {"drop": "samples are left out", "pad": "places are padding", "wrap": "samples come again"}[self.tail]
        return (
            f"{self.steps:,} steps for {self.references:,} samples ({held}); tail {self.tail}: "
            f"{count:,} {words} each time"
        )

    def _share(self, lane: int) -> tuple[int, int]:
        """The lane's places in a global batch."""
        return lane * self.batch // self.lanes, (lane + 1) * self.batch // self.lanes

    @cached_property
    def _bounds(self) -> list[int]:
        """Where each lane's stretch of the line begins, and the line's end."""
        last = self.batch - (self.steps * self.batch - sum(self.taken))  # places of the last batch that are taken
        lengths = []
        for lane in range(self.lanes):
            low, high = self._share(lane)
            lengths.append((self.steps - 1) * (high - low) + max(0, min(last, high) - low))
        return [0, *accumulate(lengths)]

    @cached_property
    def _before(self) -> list[list[int]]:
        """By lane, how many references of each source lie before its stretch."""
        return [self._split(0, len(self.names), x) for x in self._bounds]

    @cached_property
    def _sums(self) -> list[int]:
        return [0, *accumulate(self.taken)]

    def _left(self, low: int, middle: int, high: int, x: int) -> int:
        """Of the first x references of the sources low … high - 1, those of low … middle - 1."""
        whole = max(1, self._sums[high] - self._sums[low])
        return (2 * x * (self._sums[middle] - self._sums[low]) + whole) // (2 * whole)

    def _split(self, low: int, high: int, x: int) -> list[int]:
        """The first x references of some sources, by source."""
        if high - low == 1:
            return [x]
        middle = (low + high) // 2
        left = self._left(low, middle, high, x)
        return [*self._split(low, middle, left), *self._split(middle, high, x - left)]


def _shared(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts after `weights`: by the largest remainders."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_rest[: total - sum(parts)]:
        parts[i] += 1
    return parts
