"""The samplers of all lanes of a rank in one source, as arrays.

They take the samples that `sampler.WindowSampler` takes for one lane, without Python for each sample.
Samples are known from feature stores, so that those that were dropped are left out of a window when it is opened.
Python runs for a lane when it opens a window, and for each dropped sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clipstream.data.loader.health import SourceHealth
from clipstream.data.loader.sampler import MOST_EMPTY_GROUPS
from clipstream.data.loader.stored import Flags, StoredSamples
from clipstream.data.order.lanes import Cursor, Numbers
from clipstream.data.order.rng import Keys, mix_all
from clipstream.data.order.windows import Order
from clipstream.errors import DataError
from clipstream.text import printable


class Taken(NamedTuple):
    """Samples that lanes took, in the order of their slots."""

    numbers: Numbers  # int64 [n], see StoredSamples
    keys: Keys  # of their random numbers, uint64 [n]
    used: Flags  # [n]; False where a slot stays empty

    def only_used(self) -> Taken:
        """Without the samples whose slots stay empty."""
        return Taken(self.numbers[self.used], self.keys[self.used], self.used[self.used])


@dataclass(frozen=True)
class Positions:
    """The cursors of all lanes at one moment."""

    group: Numbers
    window: Numbers
    position: Numbers
    skipped: Mapping[int, tuple[int, ...]]  # by lane, where there are any

    def cursors(self) -> list[Cursor]:
        """One by lane."""
        columns = zip(self.group.tolist(), self.window.tolist(), self.position.tolist(), strict=True)
        return [Cursor(*row, list(self.skipped.get(lane, ()))) for lane, row in enumerate(columns)]


class LaneWindows:
    """The samplers of a rank's lanes in one source.

    Lanes are counted from 0 within the rank.

    Args:
        order: of the source's samples.
        lanes: of the rank.
        cursors: where each lane begins.
        samples: of the source.
        health: gives the counts to add to.
        report: to be called after each group of shards that was opened.
        threads: hold the shards of a lane's next group while the last window of this one is used.

    Attributes:
        retired: shards to release when the rows of all samples that were taken have been read.
    """

    def __init__(
        self,
        order: Order,
        lanes: Sequence[int],
        cursors: Sequence[Cursor],
        samples: StoredSamples,
        health: Callable[[], SourceHealth],
        report: Callable[[], None],
        threads: Executor,
    ) -> None:
        count = len(lanes)
        self._order, self._lanes, self._samples = order, lanes, samples
        self._health, self._report, self._threads = health, report, threads
        self._group: Numbers = np.array([cursor.group for cursor in cursors], dtype=np.int64)
        self._window: Numbers = np.array([cursor.window for cursor in cursors], dtype=np.int64)
        self._position: Numbers = np.array([cursor.position for cursor in cursors], dtype=np.int64)
        self._skipped = {lane: tuple(cursor.skipped) for lane, cursor in enumerate(cursors) if cursor.skipped}
        # The open windows: by lane the samples that can be taken, the next of them, how many there are, and the length
        # of the window with dropped ones.
        self._numbers: Numbers = np.zeros((count, 0), dtype=np.int64)
        self._places: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((count, 0), dtype=np.int32)
        self._used: Flags = np.zeros((count, 0), dtype=bool)
        self._next: Numbers = np.zeros(count, dtype=np.int64)
        self._count: Numbers = np.zeros(count, dtype=np.int64)
        self._size: Numbers = np.full(count, -1, dtype=np.int64)  # -1: no window is open
        self._keys: Keys = np.zeros(count, dtype=np.uint64)
        self._dropped: list[tuple[Numbers, Numbers]] = [(self._next, self._next)] * count  # places and numbers
        self._sizes: list[list[int] | None] = [None] * count  # None: the group is not open
        self._shards: list[Numbers] = [self._next] * count  # of the group
        self._held: list[list[int]] = [[] for _ in lanes]  # those of them that are held
        self._ahead: dict[int, list[tuple[int, Future[None]]]] = {}  # by lane, shards of its next group
        self.retired: list[int] = []

    def positions(self) -> Positions:
        """The cursors of all lanes."""
        return Positions(self._group.copy(), self._window.copy(), self._position.copy(), self._skipped)

    def take(self, lanes: Numbers) -> Taken:
        """The next sample of each of `lanes`, which are in order; a lane that occurs m times gives m samples."""
        n, count = len(lanes), len(self._lanes)
        numbers: Numbers = np.empty(n, dtype=np.int64)
        places: Numbers = np.empty(n, dtype=np.int64)
        keys: Keys = np.empty(n, dtype=np.uint64)
        used = np.ones(n, dtype=bool)
        health = self._health()
        rows: Any = slice(None)  # of the result, that are not taken yet
        while True:
            wanted = np.bincount(lanes, minlength=count)
            first = np.cumsum(wanted) - wanted
            at = np.arange(len(lanes)) + (self._next - first)[lanes]
            there = at < self._count[lanes]
            all_there = bool(there.all())
            if not all_there:
                here = np.flatnonzero(there) if isinstance(rows, slice) else rows[there]
                left, lanes_here, at = (
                    (np.flatnonzero(~there) if isinstance(rows, slice) else rows[~there]),
                    lanes,
                    at[there],
                )
                lanes, lanes_left = lanes_here[there], lanes_here[~there]
            else:
                here, lanes_left = rows, lanes[:0]
            numbers[here] = self._numbers[lanes, at]
            places[here] = self._places[lanes, at]
            keys[here] = self._keys[lanes]
            if self._order.keeps_slots:
                used[here] = self._used[lanes, at]
            self._step(np.minimum(wanted, self._count - self._next), health)
            if all_there:
                break
            for lane in np.unique(lanes_left).tolist():
                self._advance(lane)
                health = self._health()  # it may have been reported
            rows, lanes = left, lanes_left
        if self._order.keeps_slots:
            health.used += int(used.sum())
            self._samples.count_dropped(numbers[~used], health)
        else:
            health.used += n
        return Taken(numbers, mix_all(places, keys), used)

    def _step(self, taken: Numbers, health: SourceHealth) -> None:
        """Move the cursors behind the samples that were taken, `taken` of each lane."""
        (moved,) = taken.nonzero()
        self._next[moved] += taken[moved]
        position = self._places[moved, self._next[moved] - 1].astype(np.int64) + 1
        read = position - self._position[moved]
        health.read += int(read.sum())
        for index in np.flatnonzero(read > taken[moved]).tolist():
            self._count_dropped(int(moved[index]), int(position[index]), health)
        self._position[moved] = position

    def _count_dropped(self, lane: int, position: int, health: SourceHealth) -> None:
        """Count the dropped samples of a lane's window between its cursor and `position`."""
        places, numbers = self._dropped[lane]
        low, high = np.searchsorted(places, (self._position[lane], position))
        self._samples.count_dropped(numbers[low:high], health)

    def _advance(self, lane: int) -> None:
        """Open the lane's next window that has a sample to take."""
        empty_groups = 0
        while True:
            if self._size[lane] >= 0:  # what is left of the window was dropped
                size, health = int(self._size[lane]), self._health()
                if size > self._position[lane]:
                    health.read += size - int(self._position[lane])
                    self._count_dropped(lane, size, health)
                    self._report()
                self._window[lane] += 1
                self._position[lane], self._size[lane] = 0, -1
            sizes = self._sizes[lane]
            if sizes is None:
                sizes = self._sizes[lane] = self._open_group(lane)
            if self._window[lane] < self._order.windows(sizes):
                self._open_window(lane, sizes)
                if self._next[lane] < self._count[lane]:
                    return
                continue
            empty_groups = 0 if any(sizes) else empty_groups + 1
            if empty_groups == MOST_EMPTY_GROUPS:
                self._raise_empty(lane)
            self._next_group(lane)
            self._report()  # a source without a readable shard must not loop here unnoticed

    def _next_group(self, lane: int) -> None:
        self.retired += self._held[lane]
        self._held[lane], self._sizes[lane] = [], None
        self._group[lane] = self._order.next_group(self._lanes[lane], int(self._group[lane]))
        self._window[lane] = self._position[lane] = 0
        if lane in self._skipped:
            self._skipped = {other: some for other, some in self._skipped.items() if other != lane}

    def _open_group(self, lane: int) -> list[int]:
        """Hold the shards of the cursor's group; how many samples the lane takes from each."""
        numbers = self._order.group(self._lanes[lane], int(self._group[lane]))
        self._shards[lane] = np.asarray(numbers, dtype=np.int64)
        skipped, health = list(self._skipped.get(lane, ())), self._health()
        found = []
        for index, shard in enumerate(numbers):
            held = 0 if index in skipped else int(self._samples.counts[shard])
            if index not in skipped:
                health.shards.add(shard)
            if held:
                self._samples.hold(shard)
                self._held[lane].append(shard)
            elif index not in skipped:
                skipped.append(index)
                health.faults[self._samples.shown[shard]] = self._samples.fault(shard)
                health.unopened.add(shard)
            found.append(held)
        for shard, future in self._ahead.pop(lane, ()):
            future.result()
            self.retired.append(shard)
        if skipped:
            self._skipped = {**self._skipped, lane: tuple(skipped)}
        self._report()
        return self._order.sizes(self._lanes[lane], int(self._group[lane]), found)

    def _open_window(self, lane: int, sizes: Sequence[int]) -> None:
        """Compute the samples of the cursor's window."""
        order, number = self._order, self._lanes[lane]
        group, window = int(self._group[lane]), int(self._window[lane])
        drawn = order.samples(number, group, window, sizes)
        shards = self._shards[lane][drawn[:, 0]]
        skipped: Flags | None = np.isin(drawn[:, 0], self._skipped[lane]) if lane in self._skipped else None
        numbers = self._samples.numbers(shards, drawn[:, 1], skipped)
        used = self._samples.used(numbers)
        places = np.arange(len(numbers))
        if not order.keeps_slots and not used.all():
            self._dropped[lane] = places[~used], numbers[~used]
            places, numbers = places[used], numbers[used]
        else:
            self._dropped[lane] = places[:0], numbers[:0]
        if len(places) > self._numbers.shape[1]:
            self._widen(len(places))
        self._numbers[lane, : len(places)] = numbers
        self._places[lane, : len(places)] = places
        if order.keeps_slots:
            self._used[lane, : len(places)] = used
        self._next[lane] = np.searchsorted(places, self._position[lane])
        self._count[lane], self._size[lane] = len(places), len(drawn)
        self._keys[lane] = order.window_key(number, group, window)
        if window == order.windows(sizes) - 1:
            following = order.group(number, order.next_group(number, group))
            self._ahead[lane] = [
                (shard, self._threads.submit(self._samples.hold, shard))
                for shard in following
                if self._samples.counts[shard] and not self._samples.is_held(shard)
            ]

    def _widen(self, width: int) -> None:
        def wider(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.pad(values, ((0, 0), (0, width - values.shape[1])))

        self._numbers, self._places = wider(self._numbers), wider(self._places)
        if self._order.keeps_slots:
            self._used = wider(self._used)

    def _raise_empty(self, lane: int) -> None:
        shards = self._shards[lane].tolist()
        titles = ", ".join(self._samples.shown[shard] for shard in shards)
        faults = "; ".join(dict.fromkeys(self._samples.fault(shard) for shard in shards))
        raise DataError(
            f"lane {self._lanes[lane]} found no sample in {MOST_EMPTY_GROUPS:,} groups of shards in a row, "
            f"the last one {printable(titles, 500)}: {faults}"
        )

    def close(self) -> None:
        """Release all shards."""
        for held in self._held:
            self.retired += held
            held.clear()
        for ahead in self._ahead.values():
            for shard, future in ahead:
                if not future.cancel() and future.exception() is None:
                    self.retired.append(shard)
        self._ahead.clear()
        self.release_retired()

    def release_retired(self) -> None:
        """Release the shards in `retired`."""
        for shard in self.retired:
            self._samples.release(shard)
        self.retired.clear()
