"""Batches of stored features: a thread draws the samples of a batch and gathers their rows into a buffer.

numpy copies the rows without the interpreter's lock. Order, positions and counts are those of a run that reads the
images, so a run may resume from either with the other. The lanes of a rank are walked as arrays: Python runs for a lane
when it opens a window, and for each dropped sample. Samples that were dropped when the features were computed are known
and are left out of a window when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.key_lists import build_filter, check_lists
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.groups import group_labels, probabilities
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferRing, BufferShape
from clipstream.data.loader.health import INTERIM_DROPS, FilledPart, Health, WorkerReport
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.loader.sampler import LaneWalk, OpenShards
from clipstream.data.loader.stage_timing import IDLE, ORDER, READ, Stopwatch
from clipstream.data.loader.stored import Flags, StoredData, StoredSamples
from clipstream.data.order.lanes import Cursor, LaneState, Numbers, Stream, share_of
from clipstream.data.order.rng import Keys, mix
from clipstream.data.order.windows import Order
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import JsonCaption
from clipstream.data.sources import Source
from clipstream.data.sources.indexes import count_samples
from clipstream.errors import SettingsError, ShardError
from clipstream.features.manifest import IDS


class Taken(NamedTuple):
    """Samples that lanes took, in the order of their slots."""

    numbers: Numbers  # int64 [n], see StoredSamples
    keys: Keys  # of their random numbers, uint64 [n]
    used: Flags  # [n]; False where a slot stays empty


@dataclass(frozen=True)
class Positions:
    """The cursors of all lanes at one moment."""

    places: Numbers  # group, window and position, int64 [lanes, 3]
    skipped: Mapping[int, tuple[int, ...]]  # by lane, where there are any

    def cursors(self) -> list[Cursor]:
        return [
            Cursor(group, window, position, list(self.skipped.get(lane, ())))
            for lane, (group, window, position) in enumerate(self.places.tolist())
        ]


@dataclass
class DrawnBatch(FilledPart):
    """A batch in its buffer."""

    sources: Numbers  # of the slots, int64 [n]; -1 for padding
    numbers: Numbers  # of the samples, int64 [n], see StoredSamples
    lanes: range  # of the rank
    drawn: Numbers  # by lane, slots filled or left empty after this batch
    positions: list[Positions]  # by source, after this batch

    def lane_states(self) -> dict[int, LaneState]:
        cursors = zip(*(positions.cursors() for positions in self.positions), strict=True)
        states = map(LaneState, self.drawn.tolist(), map(list, cursors))
        return dict(zip(self.lanes, states, strict=True))


class StoredKeys(Sequence[str]):
    """Names of a batch's samples as Batch.keys has them, read from the store when they are asked for.

    Args:
        samples: by source.
        sources: number of each sample's source, int [n]; -1 for padding.
        numbers: of the samples, int64 [n].
    """

    def __init__(self, samples: Sequence[StoredSamples], sources: Numbers, numbers: Numbers) -> None:
        self._samples, self._sources, self._numbers = samples, sources, numbers

    @cached_property
    def _names(self) -> tuple[str, ...]:
        found = [""] * len(self._numbers)
        for source, samples in enumerate(self._samples):
            (rows,) = np.nonzero(self._sources == source)
            for row, title in zip(rows.tolist(), samples.titles(self._numbers[rows]), strict=True):
                found[row] = title
        return tuple(found)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __eq__(self, other: object) -> bool:
        return self._names == (other._names if isinstance(other, StoredKeys) else other)

    __hash__ = None  # type: ignore[assignment]  # names are read when they are asked for

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._names,)  # other ranks have other mappings of the store


class LaneWindows:
    """The lanes of a rank in one source: what `sampler.WindowSampler` takes for one lane, as arrays over the lanes.

    Args:
        order: of the source's samples.
        lanes: of the rank; here they are counted from 0.
        cursors: where each lane begins.
        shards, samples: of the source.
    """

    def __init__(
        self,
        order: Order,
        lanes: Sequence[int],
        cursors: Sequence[Cursor],
        shards: OpenShards,
        samples: StoredSamples,
    ) -> None:
        count = len(lanes)
        self._keeps_slots, self._shards, self._samples = order.keeps_slots, shards, samples
        self._walks = [LaneWalk(order, lane, cursor, shards) for lane, cursor in zip(lanes, cursors, strict=True)]
        places = [(one.group, one.window, one.position) for one in cursors]
        self._cursors: Numbers = np.array(places, dtype=np.int64).reshape(-1, 3)
        self._position = self._cursors[:, 2]
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
        # Of dropped samples, the places and numbers.
        self._dropped: list[tuple[Numbers, Numbers]] = [(self._next, self._next)] * count

    def positions(self) -> Positions:
        return Positions(self._cursors.copy(), self._skipped)

    def take(self, lanes: Numbers) -> Taken:
        """The next sample of each of `lanes`, which are in order; a lane that occurs m times gives m samples."""
        n, count = len(lanes), len(self._walks)
        numbers: Numbers = np.empty(n, dtype=np.int64)
        places: Numbers = np.empty(n, dtype=np.int64)
        keys: Keys = np.empty(n, dtype=np.uint64)
        used = np.ones(n, dtype=bool)
        rows: Any = slice(None)  # of the result, that are not taken yet
        # In each round `lanes` are those of `rows`: each takes what its window has left, and those that want more open
        # their next window. So both shrink to what is missing.
        while True:
            # Lanes are in order: the first of a lane's samples has as many before it as the lanes before it want, and
            # the m-th is `_next + m` in the lane's window.
            wanted = np.bincount(lanes, minlength=count)
            first = np.cumsum(wanted) - wanted
            at = np.arange(len(lanes)) + (self._next - first)[lanes]
            there = at < self._count[lanes]
            here, absent, missing = rows, lanes[:0], rows
            if not there.all():
                rows = np.arange(n)[rows]
                here, missing, absent = rows[there], rows[~there], lanes[~there]
                lanes, at = lanes[there], at[there]
            numbers[here] = self._numbers[lanes, at]
            places[here] = self._places[lanes, at]
            keys[here] = self._keys[lanes]
            if self._keeps_slots:
                used[here] = self._used[lanes, at]
            self._step(np.minimum(wanted, self._count - self._next))
            if not len(absent):
                break
            for lane in np.unique(absent).tolist():
                self._advance(lane)
            rows, lanes = missing, absent
        health = self._shards.health()
        health.used += int(used.sum())
        if self._keeps_slots:
            self._samples.count_dropped(numbers[~used], health)
        return Taken(numbers, mix(places.astype(np.uint64), state=keys), used)

    def _step(self, taken: Numbers) -> None:
        """Move the cursors behind the samples that were taken, `taken` of each lane."""
        (moved,) = taken.nonzero()
        self._next[moved] += taken[moved]
        position = self._places[moved, self._next[moved] - 1].astype(np.int64) + 1
        read = position - self._position[moved]
        self._shards.health().read += int(read.sum())
        for index in np.flatnonzero(read > taken[moved]).tolist():
            self._count_dropped(int(moved[index]), int(position[index]))
        self._position[moved] = position

    def _count_dropped(self, lane: int, position: int) -> None:
        """Count the dropped samples of a lane's window between its cursor and `position`."""
        places, numbers = self._dropped[lane]
        low, high = np.searchsorted(places, (self._position[lane], position))
        self._samples.count_dropped(numbers[low:high], self._shards.health())

    def _advance(self, lane: int) -> None:
        """Open the lane's next window that has a sample to take."""
        walk, cursor = self._walks[lane], self._walks[lane].cursor
        while True:
            if (size := int(self._size[lane])) >= 0:  # what is left of the window was dropped
                if size > self._position[lane]:
                    self._shards.health().read += size - int(self._position[lane])
                    self._count_dropped(lane, size)
                    self._shards.report()
                cursor.window, cursor.position = cursor.window + 1, 0
            self._open_window(lane, walk)
            if self._next[lane] < self._count[lane]:
                return

    def _open_window(self, lane: int, walk: LaneWalk) -> None:
        """Compute the samples of the cursor's window."""
        drawn, self._keys[lane] = walk.window()
        cursor = walk.cursor
        self._cursors[lane] = cursor.group, cursor.window, cursor.position
        if self._skipped.get(lane, ()) != tuple(cursor.skipped):
            self._skipped = {**self._skipped, lane: tuple(cursor.skipped)}
        skipped: Flags | None = np.isin(drawn[:, 0], cursor.skipped) if cursor.skipped else None
        shards = np.asarray(walk.numbers, dtype=np.int64)[drawn[:, 0]]
        numbers = self._samples.numbers(shards, drawn[:, 1], skipped)
        used, numbers = self._samples.take_part(numbers, int(self._keys[lane]))
        places = np.arange(len(numbers))
        self._dropped[lane] = places[:0], numbers[:0]
        # Where slots are filled by the next sample, dropped ones leave the window now, and are counted when passed.
        if not self._keeps_slots and not used.all():
            self._dropped[lane] = places[~used], numbers[~used]
            places, numbers = places[used], numbers[used]
        # All lanes share one array: it is as wide as the longest window so far.
        if (more := len(places) - self._numbers.shape[1]) > 0:
            self._numbers, self._places = (np.pad(rows, ((0, 0), (0, more))) for rows in (self._numbers, self._places))
            self._used = np.pad(self._used, ((0, 0), (0, more))) if self._keeps_slots else self._used
        self._numbers[lane, : len(places)] = numbers
        self._places[lane, : len(places)] = places
        if self._keeps_slots:
            self._used[lane, : len(places)] = used
        self._next[lane] = np.searchsorted(places, cursor.position)
        self._count[lane], self._size[lane] = len(places), len(drawn)

    def close(self) -> None:
        for walk in self._walks:
            walk.close()
        self._shards.close()


@dataclass
class FeatureBatches:
    """The batches of a rank, of stored features; see loader.BatchSource."""

    stream: Stream  # which samples
    inputs: ModelInputs  # of the model, with the stores
    stored: StoredData  # these stores
    samples: Sequence[StoredSamples]  # by source, in the order of names
    orders: Sequence[Order]  # likewise
    slots: int  # of the rank, in the largest batch
    sources: Sequence[Source] = ()  # no shards are read

    @property
    def shape(self) -> BufferShape:
        return self.inputs.shape(self.slots)

    def filler(
        self, worker: int, ring: BufferRing, report: Callable[[WorkerReport], None], stopwatch: Stopwatch
    ) -> _Drawer:
        return _Drawer(self, ring, report, stopwatch)

    def batch(self, parts: Sequence[DrawnBatch], buffer: BatchBuffer) -> Batch:
        (part,) = parts
        count = len(part.numbers)
        keys = StoredKeys(self.samples, part.sources, part.numbers)
        return self.inputs.batch(buffer, slice(count), keys, part.step, self.stream.slots.batch_size(part.step))

    def close(self) -> None:
        """Nothing is open in the loader itself."""


class _Drawer:
    """Draws and gathers batches, one after the other."""

    def __init__(
        self, batches: FeatureBatches, ring: BufferRing, report: Callable[[WorkerReport], None], stopwatch: Stopwatch
    ) -> None:
        stream = self._stream = batches.stream
        self._stored, self._samples = batches.stored, batches.samples
        self._ring, self._report, self._stopwatch = ring, report, stopwatch
        self._health = Health(stream.names)
        self._lanes: Numbers = np.asarray(stream.slots.lanes, dtype=np.int64)
        start = [stream.start.lanes.get(lane) for lane in stream.slots.lanes]
        self._drawn: Numbers = np.array([0 if one is None else one.drawn for one in start], dtype=np.int64)
        self._shards, self._windows = list[OpenShards](), list[LaneWindows]()
        for source, (samples, order) in enumerate(zip(batches.samples, batches.orders, strict=True)):
            health = lambda name=samples.name: self._health.sources[name]  # noqa: E731
            shards = OpenShards(samples.source, health, stopwatch.begin, self._report_early, samples, reads=False)
            cursors = [Cursor() if one is None else one.cursors[source].copy() for one in start]
            self._shards.append(shards)
            self._windows.append(LaneWindows(order, stream.slots.lanes, cursors, shards, samples))
        self._slots = lru_cache(maxsize=4)(self._make_slots)

    def _report_early(self) -> None:
        """Report now if much of a source is bad, as the loader ends the run then."""
        if any(one.read - one.used >= INTERIM_DROPS or one.unopened for one in self._health.sources.values()):
            self._report(WorkerReport(self._health.take(), self._stopwatch.take()))

    def _make_slots(self, batch_size: int) -> tuple[Numbers, Numbers, Numbers]:
        """Of each slot, its lane in the rank and its number among the lane's slots; of each lane, its slots."""
        _, counts = share_of(self._lanes, self._stream.slots.total, batch_size)
        lanes = np.repeat(np.arange(len(counts)), counts)
        return lanes, np.arange(len(lanes)) - (np.cumsum(counts) - counts)[lanes], counts

    def __call__(self, step: int) -> DrawnBatch:
        self._stopwatch.begin(ORDER)
        lanes, turns, counts = self._slots(self._stream.slots.batch_size(step))
        count, buffer = len(lanes), self._ring[step]
        sources = self._stream.mix.sources(self._lanes[lanes], self._drawn[lanes] + turns)
        self._drawn += counts
        buffer.sources[:count] = np.maximum(sources, 0)
        numbers: Numbers = np.zeros(count, dtype=np.int64)
        empty = sources < 0
        taken = []
        for source, windows in enumerate(self._windows):
            (slots,) = np.nonzero(sources == source)
            if not len(slots):
                continue
            found = windows.take(lanes[slots])
            numbers[slots] = found.numbers
            if not found.used.all():
                used = found.used
                empty[slots[~used]] = True
                found, slots = Taken(found.numbers[used], found.keys[used], used[used]), slots[used]
            taken.append((self._samples[source], slots, found))
        self._stopwatch.begin(READ)
        buffer.weights[:count] = ~empty
        for samples, slots, found in taken:
            whole = slice(0, count) if len(slots) == count else None
            self._gather(samples, slots if whole is None else whole, found, buffer)
        if empty.any():
            buffer.clear(np.flatnonzero(empty))
        for shards in self._shards:
            shards.release_retired()
        positions = [windows.positions() for windows in self._windows]
        self._stopwatch.begin(IDLE)
        where = step, sources, numbers, self._stream.slots.lanes, self._drawn.copy(), positions
        return DrawnBatch(self._health.take(), self._stopwatch.take(), *where)

    def _gather(self, samples: StoredSamples, slots: Any, found: Taken, buffer: BatchBuffer) -> None:
        """Write the samples of one source to its slots; a slice are those of a whole batch."""
        buffer.checksums[slots], choices, views = samples.draw(found.numbers, found.keys)
        if samples.groups is not None:
            buffer.groups[slots] = samples.groups[found.numbers]
        whole = self._stored.view_as_stored(buffer.stored, slots.stop) if isinstance(slots, slice) else {}
        for name, rows in buffer.stored.items():
            if name in whole:
                samples.gather(name, found.numbers, choices, views, whole[name])
            else:
                rows[slots] = samples.gather(name, found.numbers, choices, views).view(torch.uint8).numpy()
        if self._stored.ids is not None:
            buffer.ids[slots] = samples.gather(IDS, found.numbers, choices, views).numpy()

    def close(self) -> None:
        for windows in self._windows:
            windows.close()


def join_stores(
    stores: StoredData,
    settings: DataSettings,
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    groups: str | None = None,
) -> dict[str, StoredSamples]:
    """The samples of each source in the stores; sets the counts of sources that cannot be counted without.

    Args:
        groups: field with the group of a sample, see ModelInputs.

    Raises SettingsError: the stores lack a source, or have other tokens than the model takes.
    """
    if stores.replaces_loader and settings.trace:
        raise SettingsError("data.trace is not supported with data.image_features: remove it")
    if stores.ids is not None:
        width = stores.ids.manifest.parts[IDS].width
        if width != tokenizer.context_length:
            raise SettingsError(
                f"the feature store {stores.ids.shown} has {width} token ids per caption, but the model takes "
                f"{tokenizer.context_length}: precompute it with the same model and tokenizer"
            )
    found = {}
    for name, source in sources.items():
        section = settings.sources[name]
        weights = section.caption.weights if isinstance(section.caption, JsonCaption) else None
        own = build_filter(section, f"data.sources.{name}", source) if stores.replaces_loader else None
        samples = found[name] = StoredSamples(stores, name, source, weights, own)
        if not stores.replaces_loader:
            continue
        _check_first_shard(source, samples)
        if settings.sampling.mode == "indexed":
            try:
                count_samples(source)
            except SettingsError:  # the shards themselves need not be there
                source.counts = samples.counts.tolist()
                source.empty = {i: samples.fault(i) for i, count in enumerate(source.counts) if not count}
        elif section.probability is not None:
            samples.probabilities = samples.by_number(probabilities(source, settings))
        if groups is not None:
            samples.groups = samples.by_number(group_labels(source, groups, settings, "loss.positives.by"))
    check_lists([samples.filter for samples in found.values()])
    return found


def _check_first_shard(source: Source, samples: StoredSamples) -> None:
    """Compare the keys of the first local shard, if it is there, with those in the stores, as no shard is read later.

    Raises DataError: they differ: the stores are of other shards, whose files have the same names.
    """
    for number, shard in enumerate(source.names):
        if source.types[shard].is_remote(shard) or not samples.counts[number]:
            continue
        try:
            opened = source.open(shard)
        except (ShardError, OSError):
            continue
        try:
            samples.check_keys(number, [ref.key for ref in opened.index.samples])
        finally:
            opened.close()
            source.types[shard].release(shard)
        return
