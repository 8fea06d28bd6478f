"""Owns a lane's walk through one source: opens its shards, goes from sample to sample, knows where it stands.

It reads no member and decodes nothing: it gives out `Taken` samples, whose bytes the feeder loads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from clipstream.data.commands import end_command
from clipstream.data.health import SourceHealth
from clipstream.data.opening import Opener, OpenShard
from clipstream.data.order import Cursor, Order, mix
from clipstream.data.remote import ShardError
from clipstream.data.shards import redact
from clipstream.data.stages import OPEN, ORDER
from clipstream.data.tarstream import SampleRef, ShardIndex
from clipstream.errors import Dropped

LAST_SECONDS = 2.0  # for a transfer ahead to end by itself


class Taken(NamedTuple):
    """A sample that a lane stands at.

    Attributes:
        shard: the open shard that holds it.
        ref: its key and where its members are.
        url: the shard's name, without credentials.
        draws_key: key of its own generator; None in evaluation, where nothing is drawn.
        name: 'SHARD_BASENAME/KEY'.
    """

    shard: OpenShard
    ref: SampleRef
    url: str
    draws_key: int | None
    name: str

    @classmethod
    def of(cls, shard: OpenShard, ref: SampleRef, url: str, draws_key: int | None) -> Taken:
        """With its name."""
        return cls(shard, ref, url, draws_key, f"{url.rstrip('/').rpartition('/')[2]}/{ref.key}")


class AbsentShard:
    """Stands for a shard that could not be opened, and for samples that a shard should hold and does not."""

    index = ShardIndex([], None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """Raises Dropped: `unreadable_shard`."""
        raise Dropped("unreadable_shard", "an index tells of it, but its shard cannot be read, or does not hold it")

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """As `load`."""
        return self.load(ref)

    def close(self) -> None:
        """Nothing is open."""


_ABSENT = AbsentShard()


class OpenShards:
    """A worker's open shards of one source, shared by its lanes; a shard is closed when no lane holds it.

    Remote shards are fetched ahead by a thread, one after the other.
    """

    def __init__(
        self,
        opener: Opener,
        health: Callable[[], SourceHealth],
        trace: Callable[[str, str], None],
    ) -> None:
        self.opener = opener
        self._health = health
        self._trace = trace
        self._open: dict[int, tuple[OpenShard, int]] = {}
        self._ahead = Ahead(opener)

    def ahead(self, numbers: Iterable[int]) -> None:
        """Have shards fetched in the background that will be held soon."""
        self._ahead.want(
            name
            for name in (self.opener.names[number] for number in numbers if number not in self._open)
            if self.opener.is_remote(name)
        )

    def hold(self, number: int) -> OpenShard | None:
        """Open a shard, or take it once more. None, and counted, where it gives no sample."""
        if number in self._open:
            shard, holders = self._open[number]
            self._open[number] = (shard, holders + 1)
            return shard
        name = self.opener.names[number]
        shown = redact(name)
        self._trace(OPEN, shown)
        health = self._health()
        health.shards.add(number)
        try:
            shard = self.opener.open(name)
        except (ShardError, OSError) as error:
            health.faults[shown] = str(error)
            health.unopened.add(number)
            return None
        finally:
            self._ahead.taken(name)
            self._trace(ORDER, "")
        if shard.index.fault is not None:
            health.faults[shown] = str(shard.index.fault)
        if not shard.index.samples:
            health.faults.setdefault(shown, "empty: no sample in it")
            health.unopened.add(number)
            shard.close()
            self.opener.release(name, keep=False)  # an error page, say: it may be another next time
            return None
        if (told := self.opener.counts) is not None and told[number] != len(shard.index.samples):
            held = f"it holds {len(shard.index.samples):,} samples, its index tells of {told[number]:,}"
            health.faults.setdefault(shown, f"stale_index: {held}: run python -m clipstream.index again")
        self._open[number] = (shard, 1)
        return shard

    def release(self, number: int) -> None:
        """Give a shard back."""
        shard, holders = self._open[number]
        if holders > 1:
            self._open[number] = (shard, holders - 1)
            return
        del self._open[number]
        shard.close()
        self.opener.release(self.opener.names[number])

    def close(self) -> None:
        """Fetch no more ahead."""
        self._ahead.close()

    def title(self, number: int) -> str:
        """The shard's name for keys and messages."""
        return self.opener.title(self.opener.names[number])


class Ahead:
    """A thread that fetches remote shards before they are held, in the order in which they are wanted."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._state = threading.Condition()
        self._wanted: dict[str, bool] = {}  # name -> whether it is held here; until a lane holds it
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, names: Iterable[str]) -> None:
        """Fetch these, too."""
        with self._state:
            for name in names:
                self._wanted.setdefault(name, False)
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._state.notify()

    def taken(self, name: str) -> None:
        """A lane has it now, or has failed to get it."""
        with self._state:
            here = self._wanted.pop(name, False)
        if here:
            self._opener.release(name)

    def close(self) -> None:
        """Fetch no more."""
        with self._state:
            self._closed = True
            self._wanted.clear()
            self._state.notify()
        limit = time.monotonic() + LAST_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < limit:
            end_command(self._thread.ident)  # in the loop: it may just have started one
            self._thread.join(0.02)

    def _run(self) -> None:
        while True:
            with self._state:
                while (name := next((name for name, here in self._wanted.items() if not here), None)) is None:
                    if self._closed:
                        return
                    self._state.wait()
            try:
                held = self._opener.bring(name)
            except Exception:  # it is fetched again, and its failure counted, when a lane wants to hold it
                held = False
            with self._state:
                wanted = name in self._wanted
                if wanted and held:
                    self._wanted[name] = True
                else:
                    self._wanted.pop(name, None)
            if held and not wanted:
                self._opener.release(name)


class Walk(Protocol):
    """A lane's way through one source.

    Attributes:
        cursor: where it stands.
        keeps_places: as the order's.
    """

    cursor: Cursor
    keeps_places: bool

    def take(self) -> Taken | None:
        """The sample that the lane stands at, and one step on; None at the end of a walk that ends."""
        ...


class WindowWalk:
    """The endless walk of training: groups of shards, windows of a group, permuted samples of a window."""

    def __init__(self, order: Order, lane: int, cursor: Cursor, shards: OpenShards, pulse: Callable[[], None]) -> None:
        self.cursor = cursor
        self.keeps_places = order.keeps_places
        self._order = order
        self._lane = lane
        self._shards = shards
        self._pulse = pulse
        self._held: dict[int, OpenShard] = {}  # place in the group -> shard
        self._numbers: list[int] = []
        self._titles: list[str] = []  # of the group's shards
        self._sizes: list[int] | None = None  # None: the cursor's group is not open
        # Of the cursor's window, which is not laid out where it is None. A view, as that gives Python's integers.
        self._samples: memoryview | None = None
        self._key = 0  # of the window's draws

    def take(self) -> Taken:
        """The next sample; opens the next group or window where the last one is used up."""
        samples = self._samples
        while samples is None or self.cursor.position >= len(samples):
            samples = self._advance(samples is not None)
        position = self.cursor.position
        place, number = samples[position, 0], samples[position, 1]
        shard = self._held.get(place, _ABSENT)
        held = shard.index.samples
        if number < len(held):
            ref = held[number]
        else:
            shard, ref = _ABSENT, SampleRef(f"#{number}", {})
        self.cursor.position = position + 1
        return Taken.of(shard, ref, self._titles[place], mix(position, state=self._key))

    def _advance(self, window_done: bool) -> memoryview | None:
        """Lay out the cursor's window, or step to the next window or group. None: call again."""
        cursor = self.cursor
        if window_done:
            cursor.window += 1
            cursor.position = 0
            self._samples = None
        if self._sizes is None:
            self._open_group()
        assert self._sizes is not None
        if cursor.window >= self._order.windows(self._sizes):
            self._close_group()
            self.cursor = Cursor(group=self._following())
            self._pulse()  # a source without one readable shard must not spin here unseen
            return None
        places = self._order.walk(self._lane, cursor.group, cursor.window, self._sizes)
        self._samples = places.astype(np.int32).data  # a worker holds one of each of its lanes
        self._key = self._order.window_key(self._lane, cursor.group, cursor.window)
        if cursor.window == self._order.windows(self._sizes) - 1:  # sooner would take twice the disk
            self._shards.ahead(self._order.group(self._lane, self._following()))
        return self._samples

    def _following(self) -> int:
        return self._order.following(self._lane, self.cursor.group)

    def _open_group(self) -> None:
        self._numbers = self._order.group(self._lane, self.cursor.group)
        self._titles = [self._shards.title(number) for number in self._numbers]
        for place, number in enumerate(self._numbers):
            if place in self.cursor.skipped:
                continue
            shard = self._shards.hold(number)
            if shard is None:
                self.cursor.skipped.append(place)
            else:
                self._held[place] = shard
            self._pulse()
        found = [len(self._held.get(place, _ABSENT).index.samples) for place in range(len(self._numbers))]
        self._sizes = self._order.sizes(self._lane, self.cursor.group, found)

    def _close_group(self) -> None:
        for place in self._held:
            self._shards.release(self._numbers[place])
        self._held.clear()
        self._sizes = None


class OnceWalk:
    """The walk of evaluation: a lane takes its stretch of every shard, in order, once, and ends.

    Every lane looks into every shard, so that few shards still spread evenly over ranks and workers.
    """

    keeps_places = False

    def __init__(
        self, lane: int, lanes: int, shards: OpenShards, pulse: Callable[[], None], limit: int | None = None
    ) -> None:
        self.cursor = Cursor()
        self._stream = self._run(lane, lanes, shards, pulse, limit)

    def take(self) -> Taken | None:
        """The next sample, None after the last."""
        return next(self._stream, None)

    def _run(
        self, lane: int, lanes: int, shards: OpenShards, pulse: Callable[[], None], limit: int | None
    ) -> Iterator[Taken]:
        before = 0
        for number in range(len(shards.opener.names)):
            if limit is not None and before >= limit:
                return
            shard = shards.hold(number)
            pulse()
            if shard is None:
                continue
            samples, title = shard.index.samples, shards.title(number)
            size = len(samples) if limit is None else min(len(samples), limit - before)
            for i in range(lane * size // lanes, (lane + 1) * size // lanes):
                yield Taken.of(shard, samples[i], title, None)
            shards.release(number)
            before += size
