"""The way of a lane through the shards of one source: `OpenShards` opens them, `LaneWalk` goes from window to window,
and a sampler looks up the samples of a window, whose bytes are read later.

Reading ahead: the shards of the next group are fetched in the background while the last window of this one is used.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from clipstream.data.loader.health import SourceHealth
from clipstream.data.loader.stage_timing import OPEN, ORDER
from clipstream.data.loader.stored import StoredSamples
from clipstream.data.order.lanes import Cursor
from clipstream.data.order.rng import mix
from clipstream.data.order.windows import Order, WindowSamples
from clipstream.data.sources import OpenShard, Source
from clipstream.errors import DataError, Dropped, ShardError
from clipstream.storage.backends import end_command
from clipstream.storage.download import fault_of
from clipstream.storage.shard_url import redact
from clipstream.storage.tar import SampleRef, ShardIndex
from clipstream.text import printable

CLOSE_SECONDS = 2.0  # to wait for a background download to end
MOST_EMPTY_GROUPS = 1000  # in a row, of one lane: if half of the shards are broken, chance gives 1e-301


class LaneSample(NamedTuple):
    """The next sample of a lane."""

    shard: OpenShard  # the open shard that holds it
    ref: SampleRef  # its key and the location of its members
    url: str  # the shard's title
    name: str  # SHARD/KEY, see `shard_url.shard_names`
    rng_key: int | None  # key of its random numbers; None in evaluation, which draws nothing
    shard_number: int = -1  # number of its shard in the source, of training
    position: int = -1  # of it in the shard, of training


class AbsentShard(OpenShard):
    """Stands for a shard that could not be opened, and for samples that a shard lacks although an index lists them."""

    index = ShardIndex([], None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """Raises Dropped: `unreadable_shard`."""
        raise Dropped("unreadable_shard", "in the index, but its shard cannot be read or does not contain it")


_ABSENT = AbsentShard()


class OpenShards:
    """The shards of one source that a worker has open, shared by its lanes; closed when no lane holds them.

    Args:
        source: opens the shards.
        health: gives the counts to add to.
        begin_stage: called with the stage and the shard's name when a shard is opened.
        report: reports counts now if they may end the run; called after each shard that was opened or failed to open.
        stored: precomputed features of the samples, held as long as their shards; None for none.
        reads: whether samples are read from the shards. Else their stored rows are, and no shard is opened; the rows of
            a shard are held until `release_retired`, as those of samples that were taken are copied later.
    """

    def __init__(
        self,
        source: Source,
        health: Callable[[], SourceHealth],
        begin_stage: Callable[[str, str], None],
        report: Callable[[], None],
        stored: StoredSamples | None = None,
        reads: bool = True,
    ) -> None:
        self.source, self.health, self.report, self._begin_stage = source, health, report, begin_stage
        self._stored, self._rows = stored if reads else None, None if reads else stored
        self._open: dict[int, tuple[OpenShard | None, int, int]] = {}  # number -> shard, samples, lanes that hold it
        self._failed: dict[int, str] = {}  # number -> why it could not be opened
        self._retired: list[int] = []  # without a holder, whose rows are still to be copied
        self._ahead = Ahead(self._fetch, self._drop)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Fetch shards in the background that will be held soon."""
        self._ahead.add(number for number in numbers if number not in self._open and self._takes_long(number))

    def __getitem__(self, number: int) -> OpenShard:
        """A shard that is held."""
        shard = self._open[number][0]
        assert shard is not None, "stored rows take the place of the shard"
        return shard

    def hold(self, number: int) -> int:
        """Keep a shard open until `release`; returns its number of samples, 0 where it cannot be read.

        Raises DataError: a file has changed, a chunk of a store is damaged, or too many files are open.
        """
        if number in self._open:
            shard, size, holders = self._open[number]
            self._open[number] = shard, size, holders + 1
            return size
        shown, health = redact(self.source.names[number]), self.health()
        self._begin_stage(OPEN, shown)
        health.shards.add(number)
        try:
            shard, size, fault = self._hold_file(number) if self._rows is None else self._hold_rows(self._rows, number)
        finally:
            self._begin_stage(ORDER, "")
        if fault:
            health.faults[shown] = fault
        if not size:
            health.unopened.add(number)
            self._failed[number] = fault
            return 0
        if self._stored is not None and shard is not None:
            self._stored.check_keys(number, [ref.key for ref in shard.index.samples])
            self._stored.hold(number)
        self._open[number] = shard, size, 1
        return size

    def _hold_file(self, number: int) -> tuple[OpenShard | None, int, str]:
        """The shard, its number of samples, and its fault, '' for none; no shard where there is no sample."""
        name = self.source.names[number]
        try:
            shard = self.source.open(name)
        except DataError:  # of a file that has changed
            raise
        except (ShardError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                raise DataError(
                    f"cannot open {redact(name)}: too many open files: raise the limit (ulimit -n), or use fewer"
                    " --data.lanes, --data.shuffle.shards or, where several ranks share a node, --workers"
                ) from error
            return None, 0, fault_of(error)
        finally:
            if self._ahead.take(number):
                self._drop(number)
        size, fault = len(shard.index.samples), str(shard.index.fault or "")
        if not size:
            shard.close()
            self.source.types[name].release(name, keep=False)  # perhaps an error page: download it anew
            return None, 0, fault or "empty: no samples"
        if (counts := self.source.counts) is not None and counts[number] != size and not fault:
            held = f"{size:,} samples, but {counts[number]:,} in its index"
            fault = f"stale_index: {held}: run clipstream index again"
        return shard, size, fault

    def _hold_rows(self, rows: StoredSamples, number: int) -> tuple[None, int, str]:
        """The same of a shard whose stored rows are read in its place."""
        if not (size := int(rows.counts[number])):
            return None, 0, rows.fault(number)
        if not self._ahead.take(number):
            rows.hold(number)
        return None, size, ""

    def faults(self, numbers: Iterable[int]) -> list[str]:
        """Why shards gave no sample when they were held last."""
        return [self._failed[number] for number in numbers if number in self._failed]

    def release(self, number: int) -> None:
        """Undo one `hold`."""
        shard, size, holders = self._open[number]
        if holders > 1:
            self._open[number] = shard, size, holders - 1
            return
        del self._open[number]
        if shard is None:
            self._retired.append(number)
            return
        if self._stored is not None:
            self._stored.release(number)
        shard.close()
        self._drop(number)

    def release_retired(self) -> None:
        """Release the rows that have been copied."""
        while self._retired:
            self._drop(self._retired.pop())

    def close(self) -> None:
        """End the thread that fetches shards, and release the rows that no lane holds."""
        self._ahead.close()
        self.release_retired()

    def title(self, number: int) -> str:
        """The shard's name for keys and messages."""
        name = self.source.names[number]
        return self.source.types[name].title(name)

    def title_and_name(self, number: int) -> tuple[str, str]:
        """A shard's title, and its name in the names of its samples."""
        return self.title(number), self.source.shard_names[self.source.names[number]]

    def _takes_long(self, number: int) -> bool:
        """Whether a shard is worth a thread that fetches it."""
        if self._rows is not None:
            return bool(self._rows.counts[number])
        name = self.source.names[number]
        return self.source.types[name].is_remote(name)

    def _fetch(self, number: int) -> bool:
        """Download a shard, or map its stored rows; whether it must be dropped. In the thread."""
        if self._rows is not None:
            self._rows.hold(number)
            return True
        name = self.source.names[number]
        return self.source.types[name].prefetch(name)

    def _drop(self, number: int) -> None:
        """Undo one `_fetch` or `hold`."""
        name = self.source.names[number]
        if self._rows is not None:
            self._rows.release(number)
        else:
            self.source.types[name].release(name)


class Ahead:
    """A thread that fetches shards before they are held, one after the other, in the order of `add`.

    Args:
        fetch: fetches a shard by its number; returns whether `drop` is to be called for it.
        drop: releases it.
    """

    def __init__(self, fetch: Callable[[int], bool], drop: Callable[[int], None]) -> None:
        self._fetch, self._drop = fetch, drop
        self._state = threading.Condition()
        self._wanted: dict[int, bool] = {}  # number -> whether it is fetched; until a lane holds it
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, numbers: Iterable[int]) -> None:
        """Add shards to the queue."""
        with self._state:
            for number in numbers:
                self._wanted.setdefault(number, False)
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._state.notify()

    def take(self, number: int) -> bool:
        """Forget a shard that a lane opens; whether it is fetched, and so to be dropped by the caller."""
        with self._state:
            return self._wanted.pop(number, False)

    def close(self) -> None:
        """End the thread and the command that it may be running; drop what no lane has opened."""
        with self._state:
            self._closed = True
            fetched = [number for number, here in self._wanted.items() if here]
            self._wanted.clear()
            self._state.notify()
        for number in fetched:
            self._drop(number)
        limit = time.monotonic() + CLOSE_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < limit:
            end_command(self._thread.ident)  # repeatedly: it may just have started one
            self._thread.join(0.02)

    def _run(self) -> None:
        while True:
            with self._state:
                while (number := next((one for one, here in self._wanted.items() if not here), None)) is None:
                    if self._closed:
                        return
                    self._state.wait()
            try:
                held = self._fetch(number)
            except Exception:  # tried again, and counted if it fails, when a lane opens the shard
                held = False
            with self._state:
                wanted = number in self._wanted
                if wanted and held:
                    self._wanted[number] = True
                else:
                    self._wanted.pop(number, None)
            if held and not wanted:
                self._drop(number)


class LaneSampler(Protocol):
    """Gives the samples of one lane and source, one after the other."""

    cursor: Cursor  # the current position
    keeps_slots: bool  # whether the slot of a dropped sample stays empty; else the lane's next sample fills it

    def take(self) -> LaneSample | None:
        """The next sample; None after the last one."""
        ...


class LaneWalk:
    """The endless way of a lane through the shards of a source: groups of shards, and windows of a group.

    Attributes:
        cursor: the position, as it was given; the owner sets `window` and `position`.
        numbers: of the shards of the cursor's group.
    """

    def __init__(self, order: Order, lane: int, cursor: Cursor, shards: OpenShards) -> None:
        self.cursor, self.numbers = cursor, list[int]()
        self._order, self._lane, self._shards = order, lane, shards
        self._held: list[int] = []  # those of `numbers` that could be opened
        self._sizes: list[int] | None = None  # None: the group is not open

    def window(self) -> tuple[WindowSamples, int]:
        """The samples of the cursor's window, and the key of their random numbers; where the group has no such window,
        those of the first window of a later group, to which the cursor moves.

        Raises DataError: no group of many has a sample.
        """
        order, lane, cursor, empty_groups = self._order, self._lane, self.cursor, 0
        while True:
            if self._sizes is None:
                self._sizes = self._open_group()
            if cursor.window < (windows := order.windows(self._sizes)):
                break
            empty_groups = 0 if any(self._sizes) else empty_groups + 1
            if empty_groups == MOST_EMPTY_GROUPS:
                titles = ", ".join(map(self._shards.title, self.numbers))
                faults = "; ".join(dict.fromkeys(self._shards.faults(self.numbers))) or "no sample in it"
                raise DataError(
                    f"lane {lane}: no samples in {MOST_EMPTY_GROUPS:,} consecutive groups of shards, the last "
                    f"{printable(titles, 500)}: {faults}"
                )
            self.close()
            cursor.group, cursor.window, cursor.position = order.next_group(lane, cursor.group), 0, 0
            cursor.skipped = []
            self._shards.report()  # a source without a readable shard must not loop here unnoticed
        if cursor.window == windows - 1:  # earlier would take twice the disk
            self._shards.prefetch(order.group(lane, order.next_group(lane, cursor.group)))
        samples = order.samples(lane, cursor.group, cursor.window, self._sizes)
        return samples, order.window_key(lane, cursor.group, cursor.window)

    def close(self) -> None:
        """Release the shards of the group."""
        for number in self._held:
            self._shards.release(number)
        self._held, self._sizes = [], None

    def _open_group(self) -> list[int]:
        """Hold the shards of the cursor's group; how many samples the lane takes from each."""
        self.numbers = self._order.group(self._lane, self.cursor.group)
        found = []
        for index, number in enumerate(self.numbers):
            size = 0 if index in self.cursor.skipped else self._shards.hold(number)
            if size:
                self._held.append(number)
            elif index not in self.cursor.skipped:
                self.cursor.skipped.append(index)
            found.append(size)
            self._shards.report()
        return self._order.sizes(self._lane, self.cursor.group, found)


class WindowSampler:
    """The endless sampler of training, from `cursor` on."""

    def __init__(self, order: Order, lane: int, cursor: Cursor, shards: OpenShards) -> None:
        self.cursor = cursor
        self.keeps_slots = order.keeps_slots
        self._walk, self._shards = LaneWalk(order, lane, cursor, shards), shards
        self._group: list[tuple[OpenShard, str, str]] = []  # the group's shards, their titles, their names
        self._samples: memoryview | None = None  # of the cursor's window; a memoryview gives Python's integers
        self._key = 0  # of the window's random numbers

    def take(self) -> LaneSample:
        """The next sample; opens the next group or window where this one is used up."""
        cursor = self.cursor
        while (samples := self._samples) is None or cursor.position >= len(samples):
            if samples is not None:
                cursor.window, cursor.position = cursor.window + 1, 0
            drawn, self._key = self._walk.window()
            self._samples = drawn.astype(np.int32).data  # half the memory: a worker has a window for each of its lanes
            self._group = [
                (_ABSENT if index in cursor.skipped else self._shards[number], *self._shards.title_and_name(number))
                for index, number in enumerate(self._walk.numbers)
            ]
        position = cursor.position
        index, number = samples[position, 0], samples[position, 1]
        shard, title, begin = self._group[index]
        held = shard.index.samples
        if number < len(held):
            ref = held[number]
        else:
            shard, ref = _ABSENT, SampleRef(f"#{number}", {})
        cursor.position = position + 1
        key, where = mix(position, state=self._key), self._walk.numbers[index]
        return LaneSample(shard, ref, title, f"{begin}/{ref.key}", key, where, number)
