"""Lanes: the fixed number of parallel streams of samples that make up a run, whatever its ranks and workers.

A run has L lanes. Lane l fills slots ⌊lB/L⌋ … ⌊(l+1)B/L⌋ - 1 of each global batch of B samples and reads its samples in
an order that depends on the seed and l alone. Ranks own contiguous runs of lanes and workers share their rank's lanes,
so the number of ranks and workers decides who reads a sample, and never which samples make up a batch.

The mix of sources is a golden-ratio sequence over their weights, so that every stretch of a run holds each source in
proportion to its weight; independent draws would need long stretches for that. Exact epochs have a mix of their own
(`windows.EpochPlan`).

`DataState` is the position of all lanes, as a checkpoint keeps it. The loader gives one of its rank's lanes after each
batch; the checkpoint writer merges the ranks' parts into `TrainState.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from clipstream.data.order.rng import GOLDEN, mix
from clipstream.utils.section import Count

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Fingerprint = dict[str, object]  # setting or shards -> JSON value, of all that fixes the order; see order_plan


def share_of(part: Any, parts: int, size: Any) -> tuple[Any, Any]:
    """(first, number) of the items that a part gets of `size`; integers, or arrays of them."""
    first = part * size // parts
    return first, (part + 1) * size // parts - first


def lanes_of_rank(rank: int, ranks: int, lanes: int) -> range:
    """The contiguous run of lanes that a rank owns."""
    first, count = share_of(rank, ranks, lanes)
    return range(first, first + count)


@dataclass(frozen=True)
class LaneSlots:
    """Which slots of its rank's batch each lane fills."""

    lanes: range  # of the rank
    total: int  # number of lanes of all ranks
    batch_size: Callable[[int], int]  # step -> samples of the global batch

    def of(self, lane: int, step: int) -> range:
        """The slots of one of the rank's lanes in batch number `step`."""
        size = self.batch_size(step)
        first, count = share_of(lane, self.total, size)
        first -= share_of(self.lanes.start, self.total, size)[0]
        return range(first, first + count)

    def count(self, step: int) -> int:
        """Number of slots of the rank in batch number `step`; its lanes fill 0 to count - 1."""
        return self.of(self.lanes[-1], step).stop if self.lanes else 0


class Mix(Protocol):
    """Chooses the source of each sample of a lane."""

    def sources(self, lanes: Numbers, drawn: Numbers) -> Numbers:
        """Number of the source, in the order of names, of each pair of a lane and the number of a sample in it, both
        int64 [n] from 0; -1 for padding.
        """
        ...


@dataclass(frozen=True)
class SourceMix:
    """Sources in proportion to their weights.

    Sample n of the run, counted through the global batches, takes the source at frac(offset + n·φ) of the weights laid
    end to end. So after any batch each source is within O(log n) samples of its share (Weyl's equidistribution;
    `tests/data/order/test_lanes.py` asserts 5), whatever its weight, and within a batch for each rank.
    """

    seed: int  # the run's seed
    weights: tuple[float, ...]  # of the sources
    lanes: int = 1  # L
    # (step, samples): sizes of the global batch, each from its step on; the first from step 0
    batches: tuple[tuple[int, int], ...] = ((0, 1),)

    def sources(self, lanes: Numbers, drawn: Numbers) -> Numbers:
        found = np.zeros(len(lanes), dtype=np.int64)
        if len(self.weights) == 1:
            return found
        number = np.zeros(len(lanes), dtype=np.int64)
        left, here = drawn, np.ones(len(lanes), dtype=bool)  # here: those under this size of the batch or a later one
        before = 0
        for i, (start, size) in enumerate(self.batches):
            first, share = share_of(lanes, self.lanes, size)
            slots = np.maximum(share, 1)  # a lane without slots in batches of this size has no samples there
            number = np.where(here, before + left // slots * size + first + left % slots, number)
            if i + 1 < len(self.batches):
                steps = self.batches[i + 1][0] - start
                here &= left >= steps * share
                left = left - steps * share
                before += steps * size
        scrambled = number.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(mix(self.seed, 5))
        point = scrambled * 2.0**-64 * sum(self.weights)
        found -= 1
        for source, weight in enumerate(self.weights):
            point -= weight
            found[(found < 0) & (point < 0)] = source
        found[found < 0] = len(self.weights) - 1
        return found


@dataclass
class Cursor:
    """Position of a lane in one source: its next sample."""

    group: Count = 0  # number of the lane's group of shards
    window: Count = 0  # number of the window in the group
    position: Count = 0  # number of the sample in the window
    # the group's shards, by their index in it, that could not be opened; a resumed run skips them too
    skipped: list[Count] = field(default_factory=list)

    def copy(self) -> Cursor:
        return replace(self, skipped=list(self.skipped))


@dataclass
class LaneState:
    """Position of a lane."""

    drawn: Count  # number of slots that the lane has filled or left empty
    cursors: list[Cursor]  # one per source, in the order of names


@dataclass(frozen=True)
class DataState:
    """Position of the data after a batch."""

    step: Count = 0  # number of the next batch
    lanes_total: Count = 0  # L, lanes of all ranks
    fingerprint: Fingerprint = field(default_factory=dict)  # all that fixes the order of samples
    salt: Count = 0  # how often the order was restarted under other settings (--resume-approximate)
    restarted_at: Count = 0  # number of the first batch of the present order
    lanes: dict[Count, LaneState] = field(default_factory=dict)  # by number; those of one rank, or of all after `merge`

    @classmethod
    def merge(cls, parts: Sequence[DataState]) -> DataState:
        """The state of the run, from the states of all ranks."""
        lanes = {lane: state for part in parts for lane, state in part.lanes.items()}
        return replace(parts[0], lanes=dict(sorted(lanes.items())))


@dataclass(frozen=True)
class Stream:
    """Which samples a rank's batches have."""

    names: list[str]  # of the sources, sorted
    mix: Mix
    slots: LaneSlots  # of this rank's lanes, with the sizes of the global batch
    start: DataState  # position of the first batch, with this rank's lanes
    ends: bool = False  # whether the stream ends (evaluation)
    # by source, what the end of an epoch with batch number `step` of the order left out, repeated or padded; given to
    # one rank only, which counts it
    remainder: Callable[[int], dict[str, dict[str, int]]] | None = None

    def remainder_of(self, step: int) -> dict[str, dict[str, int]]:
        """By source, the remainder of the exact epoch that ends with a batch; {} if none does, and on other ranks."""
        return {} if self.remainder is None else self.remainder(step - self.start.restarted_at)
