"""Owns the way of one sample: a lane's next reference becomes pixels and a caption in a slot of a slab.

A Feeder serves some lanes of a rank, in a worker process or in the training process alike. It replaces a bad sample by
the next one of the same lane and source, or leaves its slot empty where samples keep their places, and counts it. It
knows nothing of processes and queues.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from clipstream.data.fields import CaptionExtractor, SampleTransform, image_bytes, split_keys
from clipstream.data.health import PROFILED, Health, Loss
from clipstream.data.order import Draws, Mix, Slots
from clipstream.data.slab import Slab
from clipstream.data.stages import HAND_OVER, Laps, Stopwatch
from clipstream.data.text import Tokenizer, readable
from clipstream.data.tracing import Tracer
from clipstream.data.walk import Taken, Walk
from clipstream.errors import Dropped

# When a feeder reports before its part is full: so many samples were dropped since, or so many seconds have passed.
INTERIM_DROPS = 200
INTERIM_SECONDS = 10.0


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


class Found(NamedTuple):
    """What a slot gets: a sample's name 'SHARD/KEY' and caption; no caption where the slot stays empty."""

    name: str
    caption: str | None


PADDING = Found("", None)


@dataclass
class Lane:
    """A lane on its way: its walks by source, and how many of its places (samples, or empty ones) it has filled."""

    number: int
    walks: list[Walk]
    drawn: int = 0

    def save(self) -> dict[str, Any]:
        """The lane's state for JSON."""
        return {"drawn": self.drawn, "cursors": [walk.cursor.save() for walk in self.walks]}


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
        for lane in self.lanes:
            for slot in self.slots.of(lane.number, step):
                source = self.mix.source(lane.number, lane.drawn)
                found = PADDING if source is None else self._next(lane.walks[source], self.readers[source], slab, slot)
                if found is None:
                    continue
                lane.drawn += 1
                keys[slot] = found.name
                slab.sources[slot] = source or 0
                if found.caption is None:
                    slab.clear(slot)
                else:
                    slab.weights[slot] = 1.0
                    captions[slot] = found.caption
        if captions:
            self.watch.begin("tokenize", "")
            slab.ids[list(captions)] = self.tokenizer.encode(list(captions.values()))
        lanes = {lane.number: lane.save() for lane in self.lanes}
        ended = not keys and any(self.slots.of(lane.number, step) for lane in self.lanes)
        self._reported = time.monotonic()
        self.watch.begin(HAND_OVER, "")
        return Part(self.health.take(), self.watch.take(), step, keys, lanes, ended)

    def pulse(self, source: str) -> None:
        """Report early where much of a source is bad, or where nothing was said for long."""
        health, now = self.health.sources[source], time.monotonic()
        bad = health.read - health.used >= INTERIM_DROPS or bool(health.unopened)
        if bad or now - self._reported >= INTERIM_SECONDS:
            self._reported = now
            self.report(Report(self.health.take(), self.watch.take()))

    def _next(self, walk: Walk, reader: Reader, slab: Slab, slot: int) -> Found | None:
        """Write the next sample's pixels to its slot: the next usable one's, where places are not kept. None at the end
        of the walk.
        """
        self.watch.begin("order", "")
        while (taken := walk.take()) is not None:
            health = self.health.sources[reader.name]
            health.read += 1
            draws = None if taken.draws_key is None else Draws(taken.draws_key)
            traced = self.tracer.begin(taken.url, taken.ref.key)
            try:
                caption = self._read(taken, reader, draws, slab, slot, traced)
            except Dropped as drop:
                if traced:
                    traced.end("dropped", f"{drop.reason}: {drop.detail}")
                health.drop(Loss(reader.name, taken.url, taken.ref.key, drop.reason, drop.detail))
                if sum(health.dropped.values()) <= PROFILED:
                    with contextlib.suppress(Dropped):  # its members may be unreadable, too
                        health.profile.add(_whole(taken))
                self.pulse(reader.name)
                if walk.keeps_places:
                    return Found(taken.name, None)
                self.watch.begin("order", "")
                continue
            if traced:
                traced.end("used", f"slot {slot} of this rank's batch")
            health.used += 1
            self.pulse(reader.name)
            return Found(taken.name, caption)
        return None

    def _read(
        self, taken: Taken, reader: Reader, draws: Draws | None, slab: Slab, slot: int, traced: Tracer | None
    ) -> str:
        self.watch.begin("read", taken.name)
        sample: Mapping[str, Any] = _sample(taken, reader.members)
        if traced:
            traced.members("read", sample)
        if reader.transform is not None:
            self.watch.begin("transform", taken.name)
            sample = reader.transform(sample)
            if traced:
                traced.members("transform", sample)
        caption = reader.caption(sample, draws)
        if traced:
            ids = self.tokenizer.encode([caption])[0].tolist()
            traced.caption(caption, ids, readable(self.tokenizer, ids))
        self.watch.begin("decode", taken.name)
        data = image_bytes(sample, reader.image_key)
        reader.image(data, draws, slab.pixels[slot])
        if traced:
            traced.picture(data, slab.pixels[slot])
        slab.pictures[slot] = checksum(data)
        return caption


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
