"""The order of one source's samples in each lane: groups of shards, cut into windows of permuted samples.

A lane goes from group to group. A group is a few shards that are open together. It is cut into windows of about
`shuffle.window` samples, each a stretch of every shard of the group, whose samples are permuted. The windows of a group
are permuted as well, so that a short run sees late samples of a shard as often as early ones. Everything drawn is a
hash of (seed, source, lane, group, window, position), so a lane can resume anywhere at once.

Trade-off: consecutive windows of a lane come from the same shards, because a remote shard is downloaded completely and
should be used completely. Mixing across shards comes from the number of shards that are open together, lanes times
`shuffle.shards`. With the same number of open shards, more lanes of fewer shards mix a batch better
(`default_lanes`).

Exact epochs: each sample a given number of times per epoch, on any number of ranks. An epoch is a line of references to
samples. A source with n samples and weight w has round(w n) references: each sample ⌊w⌋ times, and some once more. With
T references in all and global batches of B, an epoch has S = ⌊T/B⌋ steps (`drop`) or ⌈T/B⌉ (`pad`, `wrap`) and takes as
many references as these have slots; with `pad`, the last slots of the last batch stay empty. Lane l reads one stretch
of the line, as long as the lane has slots in S steps: lanes are cut between samples, not between shards, and all ranks
take the same number of steps.

The line merges the sources evenly: each source has its share of the first x references, up to rounding. The merge
halves the list of sources recursively and rounds each half's share of a prefix, so the reference at any x is found
directly, without a replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from clipstream.data.order import MIN_LANES
from clipstream.data.order.lanes import Numbers, share_of
from clipstream.data.order.rng import SampleRNG, mix, permutation
from clipstream.errors import SettingsError

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


@dataclass(frozen=True)
class EpochPlan:
    """The epochs of a run; also the mix of its sources (see lanes.Mix).

    Raises SettingsError: a source has no samples, or an epoch is less than one batch with `drop`.
    """

    seed: int  # the run's seed
    names: tuple[str, ...]  # of the sources, sorted
    samples: tuple[int, ...]  # of each source
    weights: tuple[float, ...]  # of each source: how often an epoch has each sample
    batch: int  # B, samples of a global batch
    lanes: int  # L
    remainder: str  # 'drop', 'pad' or 'wrap'

    def __post_init__(self) -> None:
        for name, samples in zip(self.names, self.samples, strict=True):
            if not samples:
                raise SettingsError(f"data.sources.{name}.shards: no samples")
        if not self.steps:
            raise SettingsError(
                f"data.sampling.remainder: an epoch of {self.references:,} samples is smaller than a batch of "
                f"{self.batch}: use --data.sampling.remainder pad or wrap, or a smaller batch"
            )

    @cached_property
    def wanted(self) -> list[int]:
        """Number of references of each source in an epoch, before the remainder is dropped or filled."""
        return [max(1, round(n * w)) for n, w in zip(self.samples, self.weights, strict=True)]

    @property
    def references(self) -> int:
        """T, number of references of all sources."""
        return sum(self.wanted)

    @cached_property
    def steps(self) -> int:
        """S, number of steps of an epoch."""
        return self.references // self.batch if self.remainder == "drop" else -(-self.references // self.batch)

    @cached_property
    def _shares(self) -> list[int]:
        """Slots of an epoch by source, in proportion to `wanted`, by the largest remainder method."""
        slots = [self.steps * self.batch * wanted for wanted in self.wanted]
        parts = [share // self.references for share in slots]
        by_rest = sorted(range(len(slots)), key=lambda i: -(slots[i] % self.references))  # equal ones in order
        for i in by_rest[: self.steps * self.batch - sum(parts)]:
            parts[i] += 1
        return parts

    @cached_property
    def taken(self) -> list[int]:
        """Number of references of each source that an epoch takes."""
        return self.wanted if self.remainder == "pad" else self._shares

    def sources(self, lanes: Numbers, drawn: Numbers) -> Numbers:
        _, share = share_of(lanes, self.lanes, self.batch)
        slot = drawn % np.maximum(self.steps * share, 1)
        bounds = np.asarray(self._bounds)
        first, length = bounds[lanes], np.maximum(bounds[lanes + 1] - bounds[lanes], 1)
        padding = slot >= bounds[lanes + 1] - first
        # Each lane starts at another offset in its stretch, or all lanes would take the same source in a step.
        offset = mix(lanes.astype(np.uint64), state=mix(self.seed, 9)) % length.astype(np.uint64)
        found = np.where(padding, -1, 0)
        # Products of the merge exceed 64 bits where an epoch has more than 2^30 references.
        exact = object if self._sums[-1] > 1 << 30 else np.int64
        x = (first + (slot + offset.astype(np.int64)) % length).astype(exact)
        self._merge(0, len(self.names), x, np.flatnonzero(~padding), found)
        return found

    def _merge(self, low: int, high: int, x: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], found: Numbers) -> None:
        """Write the sources of `rows`, whose references of the sources low … high - 1 are numbers `x[rows]`.

        `x` is rewritten for each half: there it has numbers among the references of that half.
        """
        if not len(rows) or high - low == 1:
            found[rows] = low
            return
        middle = (low + high) // 2
        left = self._count_left(low, middle, high, x[rows])
        # Reference x is of the left half if x + 1 references have one more of it than x have.
        is_left = (self._count_left(low, middle, high, x[rows] + 1) > left).astype(bool)
        x[rows] = np.where(is_left, left, x[rows] - left)
        self._merge(low, middle, x, rows[is_left], found)
        self._merge(middle, high, x, rows[~is_left], found)

    def stretch(self, source: int, lane: int) -> range:
        """The lane's references of a source."""
        return range(self._before[lane][source], self._before[lane + 1][source])

    def remainders(self) -> list[dict[str, int]]:
        """By source, how many samples the end of an epoch leaves out (`left_out`) or takes again (`repeated`), or how
        many slots of the source's share stay empty (`padded`); only counts above 0.
        """
        key = {"drop": "left_out", "pad": "padded", "wrap": "repeated"}[self.remainder]
        counts = [abs(have - wanted) for have, wanted in zip(self._shares, self.wanted, strict=True)]
        return [{key: count} if count else {} for count in counts]

    def summary(self) -> str:
        """The length of an epoch and what becomes of its remainder, for people."""
        rows = zip(self.names, self.samples, self.weights, strict=True)
        held = ", ".join(f"{name} {n:,}{'' if w == 1 else f' x {w:g}'}" for name, n, w in rows)
        count = abs(self.steps * self.batch - self.references)
        words = {"drop": "samples are left out", "pad": "places are padding", "wrap": "samples come again"}
        return (
            f"{self.steps:,} steps for {self.references:,} samples ({held}); remainder {self.remainder}: "
            f"{count:,} {words[self.remainder]} each time"
        )

    @cached_property
    def _bounds(self) -> list[int]:
        """Where each lane's stretch of the line begins; last, the end of the line."""
        last = self.batch - (self.steps * self.batch - sum(self.taken))  # slots of the last batch that are filled
        low, share = share_of(np.arange(self.lanes), self.lanes, self.batch)
        lengths = (self.steps - 1) * share + np.clip(last - low, 0, share)
        return [0, *accumulate(lengths.tolist())]

    @cached_property
    def _before(self) -> list[list[int]]:
        """By lane, the number of references of each source before its stretch."""
        return [self._split(0, len(self.names), x) for x in self._bounds]

    @cached_property
    def _sums(self) -> list[int]:
        return [0, *accumulate(self.taken)]

    def _count_left(self, low: int, middle: int, high: int, x: Any) -> Any:
        """How many of the first x references (an integer or an array) of the sources low … high - 1 belong to low …
        middle - 1.
        """
        whole = max(1, self._sums[high] - self._sums[low])
        return (2 * x * (self._sums[middle] - self._sums[low]) + whole) // (2 * whole)

    def _split(self, low: int, high: int, x: int) -> list[int]:
        """How many of the first x references of the sources low … high - 1 belong to each."""
        if high - low == 1:
            return [x]
        middle = (low + high) // 2
        left = self._count_left(low, middle, high, x)
        return [*self._split(low, middle, left), *self._split(middle, high, x - left)]


_EPOCH = 1 << 32  # the number of a group is its epoch times this plus its number in the epoch


class Piece(NamedTuple):
    """Some samples of a shard: `size` of the `span` ones from `first` on, beginning at `start` and wrapping around.

    Where samples have probabilities, these are numbers among those that the pass has drawn.
    """

    shard: int  # number of the shard
    first: int  # number of a sample in it
    span: int  # number of samples
    start: int  # below `span`
    size: int  # at most `span`
    drawn: tuple[int, int] | None = None  # the epoch and pass whose samples these are, with probabilities


class IndexedOrder(Order):
    """The order of one source in the mode `indexed`, which knows how many samples each shard holds.

    A lane's stretch of references is a list of pieces of permuted shards; a group is a few pieces in a row.

    Args:
        plan: of the epochs.
        source: its number, in the order of names.
        counts: samples of each shard.
        split: whether each lane has the same samples in every epoch.
        open_shards: pieces of a group.
        window: samples of a window, about.
        draws: which samples a pass has, where they have probabilities; not with `split`.
    """

    keeps_slots = True

    def __init__(
        self, plan: EpochPlan, source: int, counts: Sequence[int], *, split: bool, open_shards: int, window: int,
        draws: SystematicDraws | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.source, self.window = plan.seed, source, window
        self._plan, self._split, self._open_shards = plan, split, open_shards
        self._counts = np.asarray(counts, dtype=np.int64)
        self._total = int(self._counts.sum()) if draws is None else draws.size
        self._draws = None if draws is None else lru_cache(maxsize=4)(partial(self._draw, draws))
        # A lane needs the pieces of this epoch and, for prefetching, of the next.
        self._pass = lru_cache(maxsize=4)(self._make_pass)
        self._pieces = lru_cache(maxsize=2 * plan.lanes)(self._make_pieces)

    def group(self, lane: int, group: int) -> list[int]:
        return [piece.shard for piece in self._group(lane, group)]

    def next_group(self, lane: int, group: int) -> int:
        epoch, number = divmod(group, _EPOCH)
        groups = -(-len(self._pieces(lane, epoch)) // self._open_shards)
        return group + 1 if number + 1 < groups else (epoch + 1) * _EPOCH

    def sizes(self, lane: int, group: int, found: Sequence[int]) -> list[int]:
        return [piece.size for piece in self._group(lane, group)]  # as the index says, whatever was found

    def samples(self, lane: int, group: int, window: int, sizes: Sequence[int]) -> WindowSamples:
        samples = super().samples(lane, group, window, sizes)
        for index, piece in enumerate(self._group(lane, group)):
            rows = samples[:, 0] == index
            samples[rows, 1] = piece.first + (piece.start + samples[rows, 1]) % piece.span
            if self._draws is not None and piece.drawn is not None:
                numbers, ends = self._draws(*piece.drawn)
                samples[rows, 1] += ends[piece.shard - 1] if piece.shard else 0
                samples[rows, 1] = numbers[samples[rows, 1]]
        return samples

    def _draw(self, draws: SystematicDraws, epoch: int, number: int) -> tuple[Numbers, Numbers]:
        """The samples of a pass by their numbers in their shards, shard by shard, and where each shard's end."""
        return draws(mix(self.seed, 19, self.source, epoch, number), self._counts)

    def _group(self, lane: int, group: int) -> list[Piece]:
        epoch, number = divmod(group, _EPOCH)
        first = number * self._open_shards
        return self._pieces(lane, epoch)[first : first + self._open_shards]

    def _make_pieces(self, lane: int, epoch: int) -> list[Piece]:
        """A lane's pieces in an epoch, in their order."""
        stretch = self._plan.stretch(self.source, lane)
        if not self._split:
            return list(self._cut(epoch, stretch.start, stretch.stop))
        # Always the same: the lane's part of the complete passes, and some samples of its part of one more.
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
                count = min(missing, part[i].size)
                start = mix(self.seed, 12, self.source, lane, epoch, int(i)) % part[i].size
                pieces += [part[i]._replace(start=start, size=count)] if count else []
                missing -= count
        return [pieces[i] for i in permutation(len(pieces), mix(self.seed, 10, self.source, lane, epoch))]

    def _cut(self, epoch: int | None, start: int, stop: int) -> Iterator[Piece]:
        """References start … stop - 1 of the passes of an epoch; with None, of shards in their stored order."""
        for number in range(start // self._total, -(-stop // self._total)):
            shards, ends, sizes = self._pass(epoch, number)
            low = max(0, start - number * self._total)
            high = min(self._total, stop - number * self._total)
            for i in range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1):
                shard, end = int(shards[i]), int(ends[i])
                size = int(sizes[shard])
                first, count = max(low, end - size) - (end - size), min(high, end) - max(low, end - size)
                if not count:
                    continue
                if epoch is None:
                    yield Piece(shard, first, count, 0, count)
                else:
                    turn = mix(self.seed, 13, self.source, epoch, number, shard)
                    drawn = None if self._draws is None else (epoch, number)
                    yield Piece(shard, 0, size, (first + turn) % size, count, drawn)

    def _make_pass(self, epoch: int | None, number: int) -> tuple[Numbers, Numbers, Numbers]:
        """The shards of a pass in their order, the cumulative number of their samples, and by shard their number."""
        shards: Numbers = np.arange(len(self._counts))
        sizes = self._counts
        if epoch is not None:
            shards = permutation(len(self._counts), mix(self.seed, 14, self.source, epoch, number))
            if self._draws is not None:
                sizes = np.diff(self._draws(epoch, number)[1], prepend=0)
        return shards, np.cumsum(sizes[shards]), sizes


NO_SAMPLE = (1 << 31) - 1  # number of a sample in its shard, of a slot that stays empty


class SystematicDraws:
    """The samples of passes in which each sample comes with its own probability: systematic sampling in a random order
    (Madow, On the theory of systematic sampling II, Ann. Math. Statist. 20, 1949).

    The probabilities are laid end to end in the order of the pass, and a sample is taken where one of the points u,
    u + 1, u + 2, … falls on it, with one uniform u. They are integers in units of 2^-32, so that this is exact.

    Args:
        probabilities: of each sample, 0 to 1; NaN for never.

    Attributes:
        size: N, slots of a pass: the sum of the probabilities, rounded up. What is missing to N is the probability of
            a slot that stays empty, NO_SAMPLE in the last shard that has samples.
    """

    def __init__(self, probabilities: np.ndarray[Any, Any]) -> None:
        self._units = np.rint(np.nan_to_num(probabilities) * (1 << 32)).astype(np.int64)
        self.size = -(-int(self._units.sum()) >> 32)

    def __call__(self, key: int, counts: Numbers) -> tuple[Numbers, Numbers]:
        """The samples of a pass by their numbers in their shards, shard by shard, and the cumulative number of them.

        Args:
            key: of the pass.
            counts: samples of each shard.
        """
        order = permutation(len(self._units), key)
        ends = np.cumsum(self._units[order]) + (mix(1, state=key) & 0xFFFFFFFF)
        taken = np.sort(order[np.diff(ends >> 32, prepend=0) > 0])
        shards = np.searchsorted(np.cumsum(counts), taken, "right")
        numbers = taken - (np.cumsum(counts) - counts)[shards]
        sizes = np.bincount(shards, minlength=len(counts))
        empty = self.size - len(taken)  # 0 or 1
        sizes[np.flatnonzero(counts)[-1]] += empty
        return np.append(numbers, [NO_SAMPLE] * empty).astype(np.int64), np.cumsum(sizes)
