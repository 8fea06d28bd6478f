"""Samplers: the way of a lane through the shards of one source. They open shards and look up samples;
a sample's bytes are read later.

Reading ahead: the shards of the next group are downloaded in the background while the last window of this one is used.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from clipstream.data.decode.key_lists import SampleLists
from clipstream.data.loader.health import SourceHealth
from clipstream.data.loader.stage_timing import OPEN, ORDER
from clipstream.data.loader.stored import StoredSamples
from clipstream.data.order.lanes import Cursor, share_of
from clipstream.data.order.rng import mix
from clipstream.data.order.windows import Order, WindowSamples
from clipstream.data.sources import OpenShard, Source
from clipstream.errors import DataError, Dropped
from clipstream.storage.download import ShardError, fault_of
from clipstream.storage.schemes import end_command
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


class Shards(Protocol):
    """The shards of a source, as lanes walk through them."""

    report: Callable[[], None]  # reports counts now if they may end the run

    def hold(self, number: int) -> int:
        """Keep a shard open until `release`; returns its number of samples, 0 where it cannot be read."""
        ...

    def release(self, number: int) -> None:
        """Undo one `hold`."""

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Fetch shards in the background that will be held soon."""

    def faults(self, numbers: Iterable[int]) -> list[str]:
        """Why shards gave no sample when they were held last."""
        ...

    def title(self, number: int) -> str:
        """The shard's name for keys and messages."""
        ...


class AbsentShard(OpenShard):
    """Stands for a shard that could not be opened, and for samples that a shard lacks although an index lists them."""

    index = ShardIndex([], None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """Raises Dropped: `unreadable_shard`."""
        raise Dropped("unreadable_shard", "in the index, but its shard cannot be read or does not contain it")


_ABSENT = AbsentShard()


class OpenShards(Shards):
    """The shards of one source that a worker has open, shared by its lanes; closed when no lane holds them.

    Args:
        source: opens the shards.
        health: gives the counts to add to.
        begin_stage: called with the stage and the shard's name when a shard is opened.
        report: to be called after each shard that was opened or failed to open.
        stored: precomputed features of the samples, held as long as their shards; None for none.
    """

    def __init__(
        self,
        source: Source,
        health: Callable[[], SourceHealth],
        begin_stage: Callable[[str, str], None],
        report: Callable[[], None],
        stored: StoredSamples | None = None,
    ) -> None:
        self.source, self.report, self.stored = source, report, stored
        self._health = health
        self._begin_stage = begin_stage
        self._open: dict[int, tuple[OpenShard, int]] = {}  # number -> shard, lanes that hold it
        self._failed: dict[int, str] = {}  # number -> why it could not be opened
        self.prefetcher = ShardPrefetcher(source)

    def prefetch(self, numbers: Iterable[int]) -> None:
        names = (self.source.names[number] for number in numbers if number not in self._open)
        self.prefetcher.add(name for name in names if self.source.types[name].is_remote(name))

    def __getitem__(self, number: int) -> OpenShard:
        """A shard that is held."""
        return self._open[number][0]

    def hold(self, number: int) -> int:
        if number in self._open:
            shard, holders = self._open[number]
            self._open[number] = (shard, holders + 1)
            return len(shard.index.samples)
        name = self.source.names[number]
        shown = redact(name)
        self._begin_stage(OPEN, shown)
        health = self._health()
        health.shards.add(number)
        try:
            shard = self.source.open(name)
        except DataError:  # of a file that has changed
            raise
        except (ShardError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                raise DataError(
                    f"cannot open {shown}: too many open files: raise the limit (ulimit -n), or use fewer"
                    " --data.lanes, --data.shuffle.shards or, where several ranks share a node, --workers"
                ) from error
            health.faults[shown] = self._failed[number] = fault_of(error)
            health.unopened.add(number)
            return 0
        finally:
            self.prefetcher.remove(name)
            self._begin_stage(ORDER, "")
        if shard.index.fault is not None:
            health.faults[shown] = str(shard.index.fault)
        if not shard.index.samples:
            health.faults.setdefault(shown, "empty: no samples")
            health.unopened.add(number)
            self._failed[number] = health.faults[shown]
            shard.close()
            self.source.types[name].release(name, keep=False)  # perhaps an error page: download it anew
            return 0
        if (counts := self.source.counts) is not None and counts[number] != len(shard.index.samples):
            held = f"{len(shard.index.samples):,} samples, but {counts[number]:,} in its index"
            health.faults.setdefault(shown, f"stale_index: {held}: run clipstream index again")
        if self.stored is not None:
            self.stored.check_keys(number, [ref.key for ref in shard.index.samples])
            self.stored.hold(number)
        self._open[number] = (shard, 1)
        return len(shard.index.samples)

    def faults(self, numbers: Iterable[int]) -> list[str]:
        return [self._failed[number] for number in numbers if number in self._failed]

    def release(self, number: int) -> None:
        shard, holders = self._open[number]
        if holders > 1:
            self._open[number] = (shard, holders - 1)
            return
        del self._open[number]
        if self.stored is not None:
            self.stored.release(number)
        shard.close()
        name = self.source.names[number]
        self.source.types[name].release(name)

    def title(self, number: int) -> str:
        name = self.source.names[number]
        return self.source.types[name].title(name)

    def title_and_name(self, number: int) -> tuple[str, str]:
        """A shard's title, and its name in the names of its samples."""
        return self.title(number), self.source.shard_names[self.source.names[number]]


class ShardPrefetcher:
    """A thread that downloads remote shards before they are held, one after the other, in the order of `add`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._state = threading.Condition()
        self._wanted: dict[str, bool] = {}  # name -> whether it is downloaded; until a lane holds it
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, names: Iterable[str]) -> None:
        """Add shards to the queue."""
        with self._state:
            for name in names:
                self._wanted.setdefault(name, False)
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._state.notify()

    def remove(self, name: str) -> None:
        """Remove a shard that a lane has opened or failed to open."""
        with self._state:
            downloaded = self._wanted.pop(name, False)
        if downloaded:
            self._source.types[name].release(name)

    def close(self) -> None:
        """End the thread and the command that it may be running."""
        with self._state:
            self._closed = True
            self._wanted.clear()
            self._state.notify()
        limit = time.monotonic() + CLOSE_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < limit:
            end_command(self._thread.ident)  # repeatedly: it may just have started one
            self._thread.join(0.02)

    def _run(self) -> None:
        while True:
            with self._state:
                while (name := next((name for name, here in self._wanted.items() if not here), None)) is None:
                    if self._closed:
                        return
                    self._state.wait()
            try:
                held = self._source.types[name].prefetch(name)
            except Exception:  # tried again, and counted if it fails, when a lane opens the shard
                held = False
            with self._state:
                wanted = name in self._wanted
                if wanted and held:
                    self._wanted[name] = True
                else:
                    self._wanted.pop(name, None)
            if held and not wanted:
                self._source.types[name].release(name)


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

    def __init__(self, order: Order, lane: int, cursor: Cursor, shards: Shards) -> None:
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


class OnceSampler:
    """The sampler of evaluation: a lane takes its stretch of every shard, in stored order, once.

    Every lane reads every shard, so that few shards still spread evenly over ranks and workers.

    Args:
        limit: samples to take at most.
        used: says which samples are taken, by name and key; None for all.
    """

    keeps_slots = False

    def __init__(
        self, lane: int, lanes: int, shards: OpenShards, limit: int | None = None, used: SampleLists | None = None
    ) -> None:
        self.cursor = Cursor()
        self._used = used
        self._samples = self._iterate(lane, lanes, shards, limit)

    def take(self) -> LaneSample | None:
        """The next sample; None after the last one."""
        return next(self._samples, None)

    def _iterate(self, lane: int, lanes: int, shards: OpenShards, limit: int | None) -> Iterator[LaneSample]:
        before = 0
        for number in range(len(shards.source.names)):
            if limit is not None and before >= limit:
                return
            size = shards.hold(number)
            shards.report()
            if not size:
                continue
            shard, (title, begin) = shards[number], shards.title_and_name(number)
            refs: Sequence[SampleRef] = shard.index.samples
            if self._used is not None:
                refs = [ref for ref in refs if self._used(f"{begin}/{ref.key}", ref.key)]
            size = len(refs) if limit is None else min(len(refs), limit - before)
            first, count = share_of(lane, lanes, size)
            for i in range(first, first + count):
                yield LaneSample(shard, refs[i], title, f"{begin}/{refs[i].key}", None)
            shards.release(number)
            before += size


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a source that a rank computes features of, and how they are cut into batches."""

    shards: Sequence[int]  # numbers of the shards, in order
    wanted: Callable[[int, int], bool]  # (shard, chunk) -> whether the rank computes this chunk
    chunk_rows: int  # samples of a chunk
    batch_size: int  # samples of a batch; the last one of a chunk has fewer
    lanes: int  # of the rank; at most one for each sample of a batch
    depth: int  # batches that a worker may be ahead of another
    # key of the random numbers of a shard's samples; None where the pixels are those of evaluation
    key: Callable[[int], int] | None


class ChunkSampler:
    """The sampler of features that are computed in advance: a lane's share of batches that walk chunks in stored order.

    The rank's batches hold consecutive samples of one chunk, in the order of the shard, and a lane takes the slots that
    are its own. After each batch the cursor tells which batch that was: `group` is the shard's number, `window` the
    first sample and `position` the number of samples, 0 after the last batch. All lanes of the rank tell the same.
    """

    keeps_slots = True

    def __init__(self, lane: int, plan: ChunkPlan, shards: OpenShards) -> None:
        self.cursor = Cursor()
        self._first, self._count = share_of(lane, plan.lanes, plan.batch_size)
        assert self._count, "more lanes than samples in a batch"
        self._plan, self._shards = plan, shards
        self._batches = self._iterate()
        self._shard: OpenShard | None = None
        self._title, self._begin, self._key = "", "", 0
        self._asked = 0  # samples that were asked for

    def take(self) -> LaneSample | None:
        """The sample for the lane's next slot; None where the batch is smaller, and after the last batch."""
        slot = self._first + self._asked % self._count
        if self._asked % self._count == 0:
            self.cursor = next(self._batches, Cursor())
        self._asked += 1
        if slot >= self.cursor.position:
            return None
        assert self._shard is not None
        number = self.cursor.window + slot
        key = None if self._plan.key is None else mix(number, state=self._key)
        ref = self._shard.index.samples[number]
        return LaneSample(self._shard, ref, self._title, f"{self._begin}/{ref.key}", key)

    def _iterate(self) -> Iterator[Cursor]:
        plan, shards, batches = self._plan, self._shards, 0
        used: deque[tuple[int, int]] = deque()  # (last batch, shard) of shards that slower workers may need still
        for place, number in enumerate(plan.shards):
            size = shards.hold(number)
            shards.prefetch(plan.shards[place + 1 : place + 2])
            shards.report()
            if not size:
                continue
            self._shard, (self._title, self._begin) = shards[number], shards.title_and_name(number)
            self._key = 0 if plan.key is None else plan.key(number)
            for chunk in range(-(-size // plan.chunk_rows)):
                if not plan.wanted(number, chunk):
                    continue
                end = min(size, (chunk + 1) * plan.chunk_rows)
                for first in range(chunk * plan.chunk_rows, end, plan.batch_size):
                    yield Cursor(number, first, min(plan.batch_size, end - first))
                    batches += 1
                    while used and used[0][0] + plan.depth < batches:
                        shards.release(used.popleft()[1])
            used.append((batches, number))
        while used:
            shards.release(used.popleft()[1])
