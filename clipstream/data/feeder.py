"""Owns the way of one sample: a lane's next reference becomes pixels and a caption in a slot of a slab.

A Feeder serves some lanes of a rank, in a worker process or in the training process alike. It replaces a bad sample by
the next one of the same lane and source, or leaves its slot empty where samples keep their places, and counts it. It
knows nothing of processes and queues.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from clipstream.data.fields import CaptionExtractor, SampleTransform, image_bytes, split_keys
from clipstream.data.health import PROFILED, Health, Loss
from clipstream.data.order import Draws, Mix, Slots
from clipstream.data.slab import Slab
from clipstream.data.stages import HAND_OVER, ORDER, Laps, Stopwatch
from clipstream.data.text import Tokenizer, readable
from clipstream.data.tracing import Trace, Tracer
from clipstream.data.walk import Taken, Walk
from clipstream.errors import Dropped

# When a feeder reports before its part is full: so many samples were dropped since, or so many seconds have passed.
INTERIM_DROPS = 200
INTERIM_SECONDS = 10.0
# When what was read is decoded: so many bytes of pictures are held, or so many seconds have passed.
AHEAD = 1 << 18
SOON = 1.0


class ImageTransform(Protocol):
    """Bytes of a picture to pixels."""

    def __call__(
        self, data: bytes, draws: Draws | None, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """uint8 [H, W, 3], written into `out` where that is given. Raises Dropped."""
        ...


@dataclass(frozen=True)
class Reader:
    """How a source's samples are read: members, the user's transform, caption, picture.

    Attributes:
        name: the source's name.
        image_key: suffixes of the image member.
        caption: gives the caption.
        image: gives the pixels.
        transform: the user's own, or None.
    """

    name: str
    image_key: str
    caption: CaptionExtractor
    image: ImageTransform
    transform: SampleTransform | None

    @cached_property
    def members(self) -> tuple[str, ...] | None:
        """Suffixes of the members that are read; None for all."""
        if self.transform is not None or self.caption.members is None:
            return None
        return (*split_keys(self.image_key), *self.caption.members)


@dataclass
class Lane:
    """A lane on its way: its walks by source, and how many of its places (samples, or empty ones) it has filled."""

    number: int
    walks: list[Walk]
    drawn: int = 0

    def save(self) -> dict[str, Any]:
        """The lane's state for JSON."""
        return {"drawn": self.drawn, "cursors": [walk.cursor.save() for walk in self.walks]}


@dataclass(slots=True)
class Place:
    """A slot that is to be filled by a lane, and how far its sample is.

    Attributes:
        lane: of the feeder.
        slot: of the rank's batch.
        source: number of the source.
        walk: the lane's, in that source.
        reader: of the source.
        name: 'SHARD/KEY' of what the slot got, '' of padding; None where it has got nothing.
        taken: the sample.
        which: of the samples that the stopwatch knows by name it is.
        draws: its own; None in evaluation.
        traced: takes the words on it, where it is traced.
        caption: of it; None where the slot stays empty.
        data: the picture's file.
    """

    lane: Lane
    slot: int
    source: int
    walk: Walk
    reader: Reader
    name: str | None
    taken: Taken | None = None
    which: int = -1
    draws: Draws | None = None
    traced: Trace | None = None
    caption: str | None = None
    data: bytes = b""


@dataclass
class Report:
    """What a feeder says while it fills a part of a batch.

    Attributes:
        health: what was counted since the last report.
        laps: of the stages, since then.
    """

    health: Health
    laps: Laps


@dataclass
class Part(Report):
    """What a feeder says of a filled part of a batch.

    Attributes:
        step: number of the batch.
        keys: slot -> 'SHARD/KEY' of the sample in it, '' of padding; a slot that is missing is no part of the batch.
        lanes: lane number -> state after this batch.
        ended: whether all lanes are at their end (evaluation).
    """

    step: int
    keys: dict[int, str]
    lanes: dict[int, dict[str, Any]]
    ended: bool


@dataclass
class Feeder:
    """Fills the slots of its lanes, batch by batch.

    Attributes:
        lanes: the lanes it serves.
        slots: where their samples go.
        readers: one per source, in the order of the sources' names.
        mix: chooses the source of each sample.
        tokenizer: captions to ids.
        health: counts since the last report.
        report: called where a part takes long or much is dropped, before it is full.
        watch: takes the stages, for their times, and so that a stall can be named.
        tracer: prints what the stages made of the first samples.
    """

    lanes: list[Lane]
    slots: Slots
    readers: Sequence[Reader]
    mix: Mix
    tokenizer: Tokenizer
    health: Health
    report: Callable[[Report], None]
    watch: Stopwatch
    tracer: Tracer = field(default_factory=lambda: Tracer(0))
    _reported: float = field(default_factory=time.monotonic)

    def fill(self, step: int, slab: Slab) -> Part:
        """Fill this feeder's slots of a batch; a slot is no part of it where its lane has ended."""
        captions: dict[int, str] = {}
        keys: dict[int, str] = {}
        slots = [(lane, self.slots.of(lane.number, step)) for lane in self.lanes]
        for turn in range(max((len(mine) for _, mine in slots), default=0)):
            for place in self._filled([(lane, mine[turn]) for lane, mine in slots if turn < len(mine)], slab):
                if place.name is None:
                    continue  # its lane is at its end
                place.lane.drawn += 1
                keys[place.slot] = place.name
                slab.sources[place.slot] = place.source
                if place.caption is None:
                    slab.clear(place.slot)
                else:
                    slab.weights[place.slot] = 1.0
                    captions[place.slot] = place.caption
        if captions:
            self.watch.begin("tokenize")
            slab.ids[list(captions)] = self.tokenizer.encode(list(captions.values()))
        lanes = {lane.number: lane.save() for lane in self.lanes}
        ended = not keys and any(mine for _, mine in slots)
        self._reported = time.monotonic()
        self.watch.begin(HAND_OVER)
        return Part(self.health.take(), self.watch.take(), step, keys, lanes, ended)

    def pulse(self, source: str) -> None:
        """Report early where much of a source is bad, or where nothing was said for long."""
        health, now = self.health.sources[source], time.monotonic()
        bad = health.read - health.used >= INTERIM_DROPS or bool(health.unopened)
        if bad or now - self._reported >= INTERIM_SECONDS:
            self._reported = now
            self.report(Report(self.health.take(), self.watch.take()))

    def _filled(self, slots: Sequence[tuple[Lane, int]], slab: Slab) -> list[Place]:
        """Fill slots of different lanes. As a lane has but one of them, its next sample can take a dropped one's place.

        Each step is done for some samples before the next step is, as the processor's caches hold the code of one.
        """
        places: list[Place] = []
        for lane, slot in slots:
            source = self.mix.source(lane.number, lane.drawn)
            number = source or 0
            name = "" if source is None else None
            places.append(Place(lane, slot, number, lane.walks[number], self.readers[number], name))
        unfilled = [place for place in places if place.name is None]
        while unfilled:
            unfilled = self._tried(unfilled, slab)
        return places

    def _tried(self, places: list[Place], slab: Slab) -> list[Place]:
        """Fill places with their lanes' next samples; those whose sample was dropped, and which want another."""
        again: list[Place] = []
        open_places = iter(places)
        while taken := self._some_taken(open_places):
            unread = iter(taken)
            while read := self._some_read(unread, again):
                again += self._decoded(read, slab)
        return again

    def _some_taken(self, places: Iterator[Place]) -> list[Place]:
        """The next places whose lanes are not at their end, with a sample each. Opening a shard may take long."""
        taken: list[Place] = []
        names: list[str] = []
        began = time.monotonic()
        for place in places:
            if not taken:
                self.watch.begin(ORDER)
            if (sample := self._take(place)) is not None:
                place.which = len(taken)
                taken.append(place)
                names.append(sample.name)
                if time.monotonic() - began > SOON:
                    break
        if taken:
            self.watch.name(names)
        return taken

    def _some_read(self, places: Iterator[Place], dropped: list[Place]) -> list[Place]:
        """The next places whose samples could be read; adds to `dropped` the others, if they want another sample."""
        read: list[Place] = []
        held, began = 0, time.monotonic()
        for place in places:
            try:
                self._read(place)
            except Dropped as drop:
                dropped += self._dropped(place, drop)
                continue
            read.append(place)
            held += len(place.data)
            if held >= AHEAD or time.monotonic() - began > SOON:
                break
        return read

    def _take(self, place: Place) -> Taken | None:
        """Give the place its lane's next sample, if there is one."""
        taken = place.taken = place.walk.take()
        if taken is not None:
            place.draws = None if taken.draws_key is None else Draws(taken.draws_key)
            place.traced = self.tracer.begin(taken.url, taken.ref.key)
        return taken

    def _read(self, place: Place) -> None:
        """Caption and picture of the place's sample. Raises Dropped."""
        taken, reader, traced = place.taken, place.reader, place.traced
        assert taken is not None
        self.watch.at("read", place.which)
        sample: Mapping[str, Any] = _sample(taken, reader.members)
        if traced:
            traced.members("read", sample)
        if reader.transform is not None:
            self.watch.at("transform", place.which)
            sample = reader.transform(sample)
            if traced:
                traced.members("transform", sample)
        place.caption = reader.caption(sample, place.draws)
        if traced:
            ids = self.tokenizer.encode([place.caption])[0].tolist()
            traced.caption(place.caption, ids, readable(self.tokenizer, ids))
        place.data = image_bytes(sample, reader.image_key)

    def _decoded(self, places: list[Place], slab: Slab) -> list[Place]:
        """Write the pixels of the places' samples; the places that want another."""
        again: list[Place] = []
        for place in places:
            assert place.taken is not None
            self.watch.at("decode", place.which)
            pixels = slab.pixels[place.slot]
            try:
                place.reader.image(place.data, place.draws, pixels)
            except Dropped as drop:
                again += self._dropped(place, drop)
                continue
            slab.pictures[place.slot] = checksum(place.data)
            if place.traced:
                place.traced.picture(place.data, pixels)
                place.traced.end("used", f"slot {place.slot} of this rank's batch")
            place.name, place.data = place.taken.name, b""
            health = self.health.sources[place.reader.name]
            health.read += 1
            health.used += 1
            self.pulse(place.reader.name)
        return again

    def _dropped(self, place: Place, drop: Dropped) -> list[Place]:
        """Count a sample that cannot be used; its place, if it wants another: not where samples keep theirs."""
        taken, name = place.taken, place.reader.name
        assert taken is not None
        if place.traced:
            place.traced.end("dropped", f"{drop.reason}: {drop.detail}")
        place.caption = None
        health = self.health.sources[name]
        health.read += 1
        health.drop(Loss(name, taken.url, taken.ref.key, drop.reason, drop.detail))
        if sum(health.dropped.values()) <= PROFILED:
            with contextlib.suppress(Dropped):  # its members may be unreadable, too
                health.profile.add(_whole(taken))
        self.pulse(name)
        if not place.walk.keeps_places:
            return [place]
        place.name = taken.name
        return []


def checksum(data: bytes) -> int:
    """The length of a picture file and its CRC-32 in one number, which takes little beside decoding: two files that
    differ share it by chance only where they are equally long, and then once in 2^32.
    """
    return (len(data) & 0x7FFFFFFF) << 32 | zlib.crc32(data)


def _sample(taken: Taken, members: tuple[str, ...] | None) -> dict[str, Any]:
    """The sample as users' own code sees it: `__key__`, `__url__` and the members by suffix."""
    return {"__key__": taken.ref.key, "__url__": taken.url, **taken.shard.load(taken.ref, members)}


def _whole(taken: Taken) -> dict[str, Any]:
    """All of the sample that can be read, for the advice."""
    return {"__key__": taken.ref.key, "__url__": taken.url, **taken.shard.look(taken.ref)}
