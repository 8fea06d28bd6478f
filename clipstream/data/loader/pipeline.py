"""The pipeline of samples: a lane's next sample becomes pixels and ids in a slot of a batch buffer.

A Pipeline serves some lanes of a rank, in a worker or in the training process. It replaces a sample that cannot be used
by the next one of the same lane and source, or leaves its slot empty where slots are kept, and counts it. For stored
features it collects all captions of a sample and decodes several views of its image (`Pipeline.image_views`). A
SampleTrace prints what each stage made of one of the first samples (`--data.trace N`).
"""

from __future__ import annotations

import contextlib
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.captions import (
    CaptionExtractor,
    RawSample,
    SampleTransform,
    candidates,
    draw_several,
    image_bytes,
    split_keys,
)
from clipstream.data.decode.images import ImageTransform
from clipstream.data.decode.key_lists import LEFT_OUT, NOT_DRAWN, NOT_KEPT, SampleLists
from clipstream.data.decode.labels import GroupField, SampleProbability
from clipstream.data.decode.tokenizers import Ids, Tokenizer, readable
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferRing, BufferShape
from clipstream.data.loader.health import FIRST_SAMPLES, PROFILED, DroppedSample, Health, SampleTrace
from clipstream.data.loader.sampler import LaneSample, LaneSampler, OpenShards
from clipstream.data.loader.stage_timing import HAND_OVER, ORDER, StageIntervals, Stopwatch
from clipstream.data.loader.stored import StoredChoice, StoredData, StoredSamples
from clipstream.data.order.lanes import LaneState, Stream
from clipstream.data.order.rng import SampleRNG, is_drawn, mix
from clipstream.data.order.windows import NO_SAMPLE
from clipstream.data.sources import Source, with_file
from clipstream.errors import Dropped
from clipstream.features.manifest import IMAGE
from clipstream.storage.shard_cache import ShardCache

# A worker reports before its part of a batch is filled after so many dropped samples, or so many seconds.
INTERIM_DROPS = 200
INTERIM_SECONDS = 10.0
# Samples are read until their images have so many bytes, or for so many seconds, and then decoded.
READ_BYTES = 1 << 18
READ_SECONDS = 1.0


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes: how images and captions are prepared for it.

    Attributes:
        tokenizer: captions to ids.
        image: images to pixels.
        teacher_tokenizer: the same for a live teacher; None where it takes the model's ids.
        teacher_image: the same for a live teacher; None where it takes the model's pixels.
        features: stores of features. Batches have them, and no pixels or no ids where features take their place.
        groups: field with the group of a sample (see GroupField), for Batch.groups; None for none.
        text_lengths: the true lengths of texts, from ids on the CPU; None where they are not known.
    """

    tokenizer: Tokenizer
    image: ImageSpec
    teacher_tokenizer: Tokenizer | None = None
    teacher_image: ImageSpec | None = None
    features: StoredData | None = None
    groups: str | None = None
    text_lengths: Callable[[torch.Tensor], tuple[Any, ...] | None] | None = None
    texts: int = 1  # M, texts of a sample
    has_short: bool = False  # whether the last of them is its short one

    def shape(self, samples: int, views: int = 1) -> BufferShape:
        """Of the buffers of batches of `samples` samples with `views` views of an image."""
        teacher_size = (0, 0) if self.teacher_image is None else self.teacher_image.size
        teacher_width = 0 if self.teacher_tokenizer is None else self.teacher_tokenizer.context_length
        stored = {} if self.features is None else self.features.row_bytes()
        size = (0, 0) if IMAGE in stored else self.image.size
        width, roles = self.tokenizer.context_length * self.texts, self.texts if self.texts > 1 else 0
        return BufferShape(samples, *size, width, *teacher_size, teacher_width, tuple(stored.items()), views, roles)

    def lengths(self, ids: torch.Tensor) -> tuple[Any, ...] | None:
        """The true lengths of texts; counted before the copy to the device, where ids would be waited for."""
        return None if self.text_lengths is None else self.text_lengths(ids)


@dataclass(frozen=True)
class Reader:
    """How the samples of a source are read."""

    name: str  # of the source
    image_key: str  # suffixes of the image member
    caption: CaptionExtractor  # gives the caption
    image: ImageTransform  # gives the pixels
    transform: SampleTransform | None  # the user's own, before the caption; or None
    filter: SampleLists | None = None  # says which samples are used; None for all
    teacher_image: ImageTransform | None = None  # gives a live teacher's pixels of the same crop; None for none
    stored: StoredSamples | None = None  # precomputed features of the samples; None for none
    group: GroupField | None = None  # gives the label of a sample's group; None for none
    probability: SampleProbability | None = None  # with which a sample is drawn; None where all are

    @cached_property
    def members(self) -> tuple[str, ...] | None:
        """Suffixes of the members that are read; None for all."""
        if self.transform is not None or self.caption.members is None:
            return None
        return (*split_keys(self.image_key), *self.caption.members, *(self.group.members if self.group else ()))


@dataclass
class Lane:
    """A lane while it runs."""

    number: int  # of the lane
    samplers: list[LaneSampler]  # one per source
    drawn: int = 0  # number of slots that it has filled or left empty

    def state(self) -> LaneState:
        """A copy of its position."""
        return LaneState(self.drawn, [sampler.cursor.copy() for sampler in self.samplers])


@dataclass(slots=True)
class Slot:
    """A slot to fill, and its sample on the way through the stages."""

    lane: Lane  # that fills it
    index: int  # in the rank's batch
    source: int  # number of the source
    sampler: LaneSampler  # of the lane and source
    reader: Reader  # of the source
    name: str | None  # 'SHARD/KEY' of the sample that the slot got, '' for padding; None while it has none
    sample: LaneSample | None = None  # the sample being tried
    timed_as: int = -1  # its number among the samples that the stopwatch has the names of
    rng: SampleRNG | None = None  # its random numbers; None in evaluation
    trace: SampleTrace | None = None  # of it, if it is traced
    caption: str | None = None  # of it; None where the slot stays empty
    texts: dict[str, int] = field(default_factory=dict)  # of several: text -> role, as in Batch.roles
    short: str | None = None  # its short text
    candidates: list[list[str]] = field(default_factory=list)  # its texts by path, where all of them are collected
    data: bytes = b""  # the image file
    group: int = 0  # label of its group
    stored: StoredChoice | None = None  # the rows of a feature store that belong to it

    def load(self, *, damaged: bool = False) -> RawSample:
        """The raw sample: the members that the reader needs, or all that are readable if it is `damaged`."""
        assert self.sample is not None
        shard, ref, url = self.sample[:3]
        members = shard.look(ref) if damaged else shard.load(ref, self.reader.members)
        return {"__key__": ref.key, "__url__": url, **members}


@dataclass
class WorkerReport:
    """What a worker reports while it fills its part of a batch."""

    health: Health  # counts since the last report
    intervals: StageIntervals  # of the stages since then


@dataclass
class Candidates:
    """All captions of the samples of a batch part, and why samples were dropped."""

    texts: dict[int, list[list[str]]]  # slot -> texts of each path of the source's caption setting
    ids: np.ndarray[Any, np.dtype[np.int32]]  # [c, T], of all texts: slot by slot, path by path
    dropped: dict[int, str]  # slot -> reason
    shard_samples: int = 0  # of the whole shard that the samples are from
    keys: dict[int, str] = field(default_factory=dict)  # slot -> key of its sample in the shard


@dataclass
class FilledPart(WorkerReport, ABC):
    """What is reported when a part of a batch is filled; the loader makes `health` the counts of the whole part."""

    step: int  # number of the batch
    ended: bool = field(default=False, kw_only=True)  # whether all lanes have ended (evaluation)

    @abstractmethod
    def lane_states(self) -> dict[int, LaneState]:
        """Lane number -> position after this batch."""


@dataclass
class BatchPart(FilledPart):
    """The part of a worker."""

    # slot -> 'SHARD/KEY' of its sample, '' for padding; without the slots of lanes that have ended
    keys: dict[int, str]
    lanes: dict[int, LaneState]  # lane number -> position after this batch
    candidates: Candidates | None = None  # for stored features
    captions: dict[int, str] = field(default_factory=dict)  # slot -> caption, see Batch.captions

    def lane_states(self) -> dict[int, LaneState]:
        return self.lanes


@dataclass
class Pipeline:
    """Fills the slots of its lanes, batch by batch."""

    stream: Stream
    inputs: ModelInputs
    readers: Sequence[Reader]  # one per source, in the order of names
    ring: BufferRing  # the batch buffers
    health: Health  # counts since the last report
    report: Callable[[WorkerReport], None]  # called where a part takes long or much is dropped, before it is filled
    stopwatch: Stopwatch  # measures the stages, and names the current one in case of a stall
    traced: int = 0  # samples that are traced: the first, used or dropped
    # for stored features: augmented views of an image, 0 for evaluation's pixels; None in training and evaluation
    image_views: int | None = None
    lanes: list[Lane] = field(default_factory=list)  # that it serves
    _begun: int = 0  # traces
    _first: bool = True  # whether no batch was filled yet
    _reported: float = field(default_factory=lambda: time.monotonic())
    _captions: Counter[str] = field(default_factory=Counter)  # by source, captions that were counted
    _reasons: dict[int, str] = field(default_factory=dict)  # slot -> why a sample for it was dropped, in this batch

    def __call__(self, step: int) -> BatchPart:
        """Fill this pipeline's slots of a batch."""
        buffer, tokenizer, captions = self.ring[step], self.inputs.tokenizer, dict[int, str]()
        every = None if self.image_views is None else Candidates({}, np.empty((0, 0), np.int32), {})
        self._reasons = {} if every is None else every.dropped
        keys: dict[int, str] = {}
        shown: dict[int, str] = {}
        several: list[str] = []  # of the slots in `captions`
        wanted = [(lane, self.stream.slots.of(lane.number, step)) for lane in self.lanes]
        for turn in range(max((len(mine) for _, mine in wanted), default=0)):
            # One slot of each lane at a time, so that a lane's next sample can replace a dropped one.
            for slot in self._fill_slots([(lane, mine[turn]) for lane, mine in wanted if turn < len(mine)], buffer):
                if slot.name is None:
                    continue  # its lane has ended
                slot.lane.drawn += 1
                keys[slot.index] = slot.name
                if every is not None and slot.sample is not None:
                    every.shard_samples = len(slot.sample.shard.index.samples)
                    every.keys[slot.index] = slot.sample.ref.key
                buffer.sources[slot.index] = slot.source
                if slot.caption is None:
                    buffer.clear(slot.index)
                else:
                    buffer.weights[slot.index] = 1.0
                    captions[slot.index] = slot.caption
                    if self.inputs.texts > 1:
                        free = self.inputs.texts - len(slot.texts) - self.inputs.has_short
                        last = [(slot.short or slot.caption, 2 * (slot.short is not None))] * self.inputs.has_short
                        every_text = [*slot.texts.items(), *[(slot.caption, 0)] * free, *last]
                        several += [text for text, _ in every_text]
                        buffer.roles[slot.index] = [role for _, role in every_text]
                    if self._first or slot.rng is None:
                        shown[slot.index] = slot.caption
                    if every is not None:
                        every.texts[slot.index] = slot.candidates
        if captions:
            self.stopwatch.begin("tokenize")
            if every is not None:
                every.ids = tokenizer.encode([text for paths in every.texts.values() for x in paths for text in x])
            elif buffer.ids.shape[1]:  # else features take the place of texts
                ids = tokenizer.encode(several or list(captions.values()))
                buffer.ids[list(captions)] = ids.reshape(len(captions), -1)
                if several:
                    _leave_out_equal(ids, buffer.roles, list(captions))
            if (teacher := self.inputs.teacher_tokenizer) is not None:
                buffer.teacher_ids[list(captions)] = teacher.encode(list(captions.values()))
        lanes = {lane.number: lane.state() for lane in self.lanes}
        ended = not keys and any(mine for _, mine in wanted)
        self._reported, self._first = time.monotonic(), False
        self.stopwatch.begin(HAND_OVER)
        return BatchPart(self.health.take(), self.stopwatch.take(), step, keys, lanes, every, shown, ended=ended)

    def close(self) -> None:
        """The loader closes the shards, which outlive no worker."""

    def report_early(self, source: str) -> None:
        """Report now if much of a source is bad, or if the last report was long ago."""
        health, now = self.health.sources[source], time.monotonic()
        bad = health.read - health.used >= INTERIM_DROPS or bool(health.unopened)
        if bad or now - self._reported >= INTERIM_SECONDS:
            self._reported = now
            self.report(WorkerReport(self.health.take(), self.stopwatch.take()))

    def _fill_slots(self, wanted: Sequence[tuple[Lane, int]], buffer: BatchBuffer) -> list[Slot]:
        """Fill slots of different lanes.

        Each stage handles some samples before the next stage does, as the processor's caches hold the code of one.
        """
        lanes = np.array([lane.number for lane, _ in wanted], dtype=np.int64)
        sources = self.stream.mix.sources(lanes, np.array([lane.drawn for lane, _ in wanted], dtype=np.int64))
        slots: list[Slot] = []
        for (lane, index), source in zip(wanted, sources.tolist(), strict=True):
            name, number = (None, source) if source >= 0 else ("", 0)
            slots.append(Slot(lane, index, number, lane.samplers[number], self.readers[number], name))
        unfilled = [slot for slot in slots if slot.name is None]
        while unfilled:
            again: list[Slot] = []  # their samples were dropped, and are to be replaced
            remaining = iter(unfilled)
            while taken := self._take(remaining):
                unread = iter(taken)
                while read := self._read(unread, again):
                    self._decode(read, again, buffer)
            unfilled = again
        return slots

    def _take(self, slots: Iterator[Slot]) -> list[Slot]:
        """The next slots, with a sample each; without those whose lane has ended. Opening a shard may take long."""
        taken: list[Slot] = []
        names: list[str] = []
        began = time.monotonic()
        for slot in slots:
            if not taken:
                self.stopwatch.begin(ORDER)
            if (sample := slot.sampler.take()) is None:
                continue
            slot.sample, slot.timed_as = sample, len(taken)
            slot.rng = None if sample.rng_key is None else SampleRNG(sample.rng_key)
            slot.trace = None
            if self._begun < self.traced:
                self._begun += 1
                slot.trace = SampleTrace(f"trace {self._begun} of {self.traced}: {sample.ref.key} in {sample.url}")
            taken.append(slot)
            names.append(sample.name)
            if time.monotonic() - began > READ_SECONDS:
                break
        if taken:
            self.stopwatch.name(names)
        return taken

    def _read(self, slots: Iterator[Slot], again: list[Slot]) -> list[Slot]:
        """The next slots, with caption and image file; those that want another sample are added to `again`."""
        read: list[Slot] = []
        held, began = 0, time.monotonic()
        for slot in slots:
            reader, trace = slot.reader, slot.trace
            try:
                assert slot.sample is not None
                self.stopwatch.at("read", slot.timed_as)
                self._leave_out(slot)
                sample = slot.load()
                if trace:
                    trace.members("read", sample)
                if reader.transform is not None:
                    self.stopwatch.at("transform", slot.timed_as)
                    sample = reader.transform(sample)
                    if trace:
                        trace.members("transform", sample)
                    if reader.probability is not None and reader.probability.members:
                        _draw(slot, reader.probability, sample)
                if self.image_views is None:
                    slot.caption = self._caption(slot, sample)
                else:
                    slot.candidates = candidates(reader.caption, sample)
                    slot.caption = next((text for texts in slot.candidates for text in texts), None)
                    if slot.caption is None:
                        raise Dropped("no_caption")
                if trace:
                    ids = self.inputs.tokenizer.encode([slot.caption])[0].tolist()
                    trace.caption(slot.caption, ids, readable(self.inputs.tokenizer, ids))
                slot.data = image_bytes(sample, reader.image_key, slot.sample.ref.members)
                slot.group = 0 if reader.group is None else reader.group(slot.sample.name, sample)
            except Dropped as drop:
                self._drop(slot, drop, again)
                continue
            read.append(slot)
            held += len(slot.data)
            if held >= READ_BYTES or time.monotonic() - began > READ_SECONDS:
                break
        return read

    def _leave_out(self, slot: Slot) -> None:
        """Raise Dropped for a sample that lists or its probability leave out, before its image is read."""
        reader, sample = slot.reader, slot.sample
        assert sample is not None
        if sample.position == NO_SAMPLE:
            raise Dropped(NOT_DRAWN)
        if reader.filter is not None and not reader.filter(sample.name, sample.ref.key):
            raise Dropped(NOT_KEPT)
        if (one := reader.probability) is not None and (reader.transform is None or not one.members):
            members = sample.shard.load(sample.ref, one.members) if one.members else {}
            _draw(slot, one, {"__key__": sample.ref.key, **members})

    def _caption(self, slot: Slot, sample: RawSample) -> str:
        """The caption of a raw sample; with stored features one of theirs, and the image's view is drawn as well."""
        reader, stored = slot.reader, slot.reader.stored
        if stored is None and self.inputs.texts > 1 and slot.rng is not None:
            drawn = draw_several(reader.caption, sample, slot.rng)
            slot.texts, slot.short = dict.fromkeys(drawn.captions, 1), drawn.short
            if drawn.negative is not None:
                slot.texts.setdefault(drawn.negative, -1)
            return drawn.captions[0]
        if stored is None:
            return reader.caption(sample, slot.rng)
        assert slot.sample is not None and slot.rng is not None
        by_path = candidates(reader.caption, sample)
        where = slot.sample.shard_number, slot.sample.position
        slot.stored, slot.rng = stored.choose(*where, by_path, slot.rng)
        return [text for texts in by_path for text in texts][slot.stored.caption]

    def _decode(self, slots: list[Slot], again: list[Slot], buffer: BatchBuffer) -> None:
        """Write the pixels and stored features of the slots; those that want another sample are added to `again`."""
        decoded: dict[int, list[Slot]] = {}  # by source, those with stored features
        for slot in slots:
            assert slot.sample is not None
            self.stopwatch.at("decode", slot.timed_as)
            pixels = buffer.pixels[slot.index]
            teacher_image, rng = slot.reader.teacher_image, slot.rng
            again_rng = None if teacher_image is None or rng is None else rng.copy()
            try:
                if not self.image_views:
                    slot.reader.image(slot.data, rng, pixels)
                else:
                    assert slot.sample.rng_key is not None
                    for view, out in enumerate(pixels.reshape(self.image_views, *pixels.shape[-3:])):
                        slot.reader.image(slot.data, SampleRNG(mix(view, state=slot.sample.rng_key)), out)
                if teacher_image is not None:
                    teacher_image(slot.data, again_rng, buffer.teacher_pixels[slot.index])
            except Dropped as drop:
                self._drop(slot, drop, again)
                continue
            buffer.pictures[slot.index], buffer.groups[slot.index] = checksum(slot.data), slot.group
            if slot.stored is not None:
                decoded.setdefault(slot.source, []).append(slot)
            if slot.trace:
                slot.trace.image(slot.data, pixels.reshape(-1, *pixels.shape[-3:])[0])
                slot.trace.end("used", f"slot {slot.index} of this rank's batch")
            slot.name, slot.data = slot.sample.name, b""
            source = slot.reader.name
            health = self.health.sources[source]
            health.read += 1
            health.used += 1
            if self._captions[source] < FIRST_SAMPLES:
                self._captions[source] += 1
                if slot.reader.image.lost is not None:
                    health.lost[slot.name] = slot.reader.image.lost
                if slot.rng is not None:
                    health.captions.add(slot.name, slot.caption or "", pixels)
            self.report_early(source)
        for some in decoded.values():
            _gather(some, buffer)

    def _drop(self, slot: Slot, drop: Dropped, again: list[Slot]) -> None:
        """Count a sample that cannot be used; its slot wants another one, unless slots are kept."""
        assert slot.sample is not None
        if slot.trace:
            slot.trace.end("dropped", f"{drop.reason}: {drop.detail}")
        slot.caption = None
        self._reasons[slot.index] = drop.reason
        source = slot.reader.name
        health = self.health.sources[source]
        health.read += 1
        if drop.reason == NOT_DRAWN:
            health.dropped[NOT_DRAWN] += 1
        else:
            shard, ref, url = slot.sample[:3]
            detail = drop.detail if drop.reason in LEFT_OUT else with_file(shard, ref, drop.detail)
            health.drop(DroppedSample(source, url, ref.key, drop.reason, detail))
        if drop.reason not in LEFT_OUT and health.failed <= PROFILED:
            with contextlib.suppress(Dropped):  # its members may be unreadable
                health.profile.add(slot.load(damaged=True))
        self.report_early(source)
        if slot.sampler.keeps_slots:
            slot.name = slot.sample.name
        else:
            again.append(slot)


def _gather(slots: Sequence[Slot], buffer: BatchBuffer) -> None:
    """Copy stored rows of samples of a source, whose shards are open until their lanes take the next samples."""
    stored, index = slots[0].reader.stored, [slot.index for slot in slots]
    assert stored is not None
    numbers, captions, views = np.array([slot.stored for slot in slots], dtype=np.int64).T
    for name, rows in buffer.features.items():
        rows[index] = stored.gather(name, numbers, captions, views).view(torch.uint8).numpy()


def _draw(slot: Slot, probability: SampleProbability, sample: RawSample) -> None:
    """Raise Dropped for a sample that is not drawn: what a function of its key and its probability says."""
    assert slot.sample is not None and slot.sample.rng_key is not None
    keys = np.array([slot.sample.rng_key], dtype=np.uint64)
    if not is_drawn(keys, np.array([probability(slot.sample.name, sample)]))[0]:
        raise Dropped(NOT_DRAWN)


def _leave_out_equal(ids: Ids, roles: np.ndarray[Any, Any], rows: list[int]) -> None:
    """Set the role of a negative to 0 where a caption of its row has the same ids [n M, T]: other case, or cut off."""
    own = roles[rows]
    texts = ids.reshape(*own.shape, -1)
    negative = np.take_along_axis(texts, own.argmin(axis=1)[:, None, None], axis=1)  # at most one of a sample
    equal = ((texts == negative).all(axis=2) & (own > 0)).any(axis=1)
    own[(own < 0) & equal[:, None]] = 0
    roles[rows] = own


@dataclass
class SampleBatches:
    """The batches of a rank, of samples that are read from their shards; see loader.BatchSource."""

    stream: Stream
    inputs: ModelInputs
    sources: Sequence[Source]  # in the order of names
    readers: Sequence[Reader]  # likewise
    make_sampler: Callable[[int, int, OpenShards], LaneSampler]  # (source, lane, shards) -> sampler
    store: ShardCache
    slots: int  # of this rank in the largest batch
    workers: int = 0  # processes that share the rank's lanes; 0 for a thread that has them all
    traced: int = 0  # samples whose stages are printed
    image_views: int | None = None  # see Pipeline
    opened: list[OpenShards] = field(default_factory=list)  # by this process

    def __post_init__(self) -> None:
        for source in self.sources:
            _ = source.shard_names  # before workers are forked, which share it

    @property
    def shape(self) -> BufferShape:
        """Of the batch buffers."""
        return self.inputs.shape(self.slots, max(1, self.image_views or 1))

    def filler(
        self, worker: int, ring: BufferRing, report: Callable[[WorkerReport], None], stopwatch: Stopwatch
    ) -> Pipeline:
        """The pipeline of a worker: every `workers`-th lane of the rank."""
        self.store.alive = stopwatch.touch
        names, start = self.stream.names, self.stream.start.lanes
        pipeline = Pipeline(
            self.stream, self.inputs, self.readers, ring, Health(names), report, stopwatch,
            self.traced if worker == 0 else 0, self.image_views,
        )  # fmt: skip
        shards = [
            OpenShards(
                source,
                lambda name=name: pipeline.health.sources[name],  # type: ignore[misc]
                stopwatch.begin,
                partial(pipeline.report_early, name),
                reader.stored,
            )
            for name, source, reader in zip(names, self.sources, self.readers, strict=True)
        ]
        self.opened.extend(shards)
        for lane in self.stream.slots.lanes[worker :: max(1, self.workers)]:
            samplers = [self.make_sampler(i, lane, one) for i, one in enumerate(shards)]
            pipeline.lanes.append(Lane(lane, samplers, start[lane].drawn if lane in start else 0))
        return pipeline

    def batch(self, parts: Sequence[BatchPart], buffer: BatchBuffer) -> Batch:
        """The batch in a buffer, without the empty slots of a stream that ended."""
        step = parts[0].step
        keys = {slot: key for part in parts for slot, key in part.keys.items()}
        captions = {slot: caption for part in parts for slot, caption in part.captions.items()}
        order = sorted(keys)
        rows: Any = slice(len(order)) if order == list(range(len(order))) else order

        def pixels(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(values[rows]).flatten(0, -4).permute(0, 3, 1, 2)

        ids = torch.from_numpy(buffer.ids[rows])
        return Batch(
            pixels=pixels(buffer.pixels),
            ids=ids,
            weights=torch.from_numpy(buffer.weights[rows]),
            keys=tuple(keys[slot] for slot in order),
            sources=torch.from_numpy(buffer.sources[rows]),
            step=step,
            global_size=self.stream.slots.batch_size(step),
            features={} if (stored := self.inputs.features) is None else stored.typed(buffer.features, len(order)),
            pictures=torch.from_numpy(buffer.pictures[rows]),
            groups=None if self.inputs.groups is None else torch.from_numpy(buffer.groups[rows]),
            teacher_pixels=pixels(buffer.teacher_pixels) if self.inputs.teacher_image else None,
            teacher_ids=torch.from_numpy(buffer.teacher_ids[rows]) if self.inputs.teacher_tokenizer else None,
            lengths=self.inputs.lengths(ids),
            captions=tuple(captions.get(slot, "") for slot in order) if captions else None,
            roles=torch.from_numpy(buffer.roles[rows]) if self.inputs.texts > 1 else None,
            has_short=self.inputs.has_short,
        )

    def close(self) -> None:
        """Release what this process holds."""
        for shards in self.opened:
            shards.prefetcher.close()
        self.store.close()


def checksum(data: bytes) -> int:
    """Length and CRC-32 of an image file in one int64, equal for equal files; costs little beside decoding.

    Different files are equal by chance only if they have the same length, and then once in 2^32.
    """
    return (len(data) & 0x7FFFFFFF) << 32 | zlib.crc32(data)
