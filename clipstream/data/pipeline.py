"""The way of a sample of training, stage after stage: from names of shards to a batch on the device.

    names     `sources.list_sources`: the setting `shards` becomes names of shards, without opening tars; a run
              does this once, in `config.plan.survey`
    order     `order_plan.order_plan`: an object for each source that says which sample of which shard comes when
    take      `sampler.WindowSampler`: the lane's next sample by that order, as a place in an open shard
    open      `sampler.OpenShards`: the shards that it comes to are downloaded to `storage.shard_cache` ahead of use,
              opened and listed
    read      `sources.OpenShard.load`, of a tar `storage.tar.Shard.load`: the members of the sample, as bytes; lists of
              keys leave samples out before
    caption   `decode.captions`: the text, or texts, drawn with the sample's own random numbers
    decode    `decode.train_transform`: crop, decode and resize, into the sample's slot of a shared buffer; or, for the
              decoder gpu, the file of a JPEG in place of its pixels, which `decode.gpu_jpeg` decodes with its batch
    tokenize  `decode.tokenizers`: the captions of a worker's part of a batch, into the same buffer
    hand over `loader.Loader`: the batch is complete when every worker has reported its part
    batch     `reading_recipe.ModelInputs.batch`: tensors over the buffer
    device    `batch_buffers.CudaPrefetch`: copied to the GPU during the step before

`training_loader` does the first two. `SampleBatches` opens the shards of a worker, whose `Pipeline` goes from take to
tokenize: it replaces a sample that cannot be used by the next one of the same lane and source, or leaves its slot empty
where slots are kept, and counts it. `sequential_loader` has the loaders of evaluation and of features that are computed
in advance: the same pipeline with another sampler. A SampleTrace prints what each stage made of a sample
(`--data.trace N`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from clipstream.data.batch import Batch, checksum
from clipstream.data.decode.captions import RawSample, candidates, draw_several, image_bytes
from clipstream.data.decode.key_lists import LEFT_OUT, NOT_DRAWN, NOT_KEPT
from clipstream.data.decode.labels import SampleProbability
from clipstream.data.decode.tokenizers import Ids, readable
from clipstream.data.groups import look_up
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferRing, BufferShape
from clipstream.data.loader.features import FeatureBatches, join_stores
from clipstream.data.loader.health import (
    FIRST_SAMPLES,
    INTERIM_DROPS,
    PROFILED,
    BatchPart,
    Budget,
    Candidates,
    DroppedSample,
    Health,
    SampleTrace,
    WorkerReport,
    empty_shards,
)
from clipstream.data.loader.loader import Hosting, Loader
from clipstream.data.loader.reading_recipe import ModelInputs, ReadingRecipe, build_recipe, check_recipes
from clipstream.data.loader.sampler import LaneSample, LaneSampler, OpenShards, WindowSampler
from clipstream.data.loader.stage_timing import HAND_OVER, ORDER, Stopwatch
from clipstream.data.loader.stored import StoredChoice
from clipstream.data.order.lanes import Cursor, DataState, LaneState, Stream
from clipstream.data.order.rng import SampleRNG, is_drawn, mix
from clipstream.data.order.windows import NO_SAMPLE
from clipstream.data.order_plan import fingerprint_of, order_plan, remote_shards_in_use, resume_at, slots_of_rank
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source, list_sources, with_file
from clipstream.distributed.world import World
from clipstream.errors import Dropped
from clipstream.storage.download import GIB
from clipstream.storage.shard_cache import ShardCache
from clipstream.utils.logs import logger
from clipstream.utils.torch_state import spinning_notice

SALT = 7  # hashed with the seed where an order is restarted
INTERIM_SECONDS = 10.0  # after which a worker reports before its part of a batch is filled
# Samples are read until their images have so many bytes, or for so many seconds, and then decoded.
READ_BYTES = 1 << 18
READ_SECONDS = 1.0


def training_loader(
    settings: DataSettings,
    inputs: ModelInputs,
    *,
    sources: Mapping[str, Source] | None = None,
    world: World,
    seed: int,
    start: DataState | None = None,
    approximate: bool | Literal["stage"] = False,
    zero_copy: bool = False,
    interrupt: Callable[[], bool] = lambda: False,
) -> Loader:
    """The endless stream of this rank's parts of the global batches.

    Args:
        settings: with `lanes` and `workers` resolved.
        sources: of the settings by name, sorted, where they are listed already.
        inputs: of the model; with a live teacher's, images have the same random crop, mirroring and colours for both.
        start: the run's position (all ranks' lanes) to resume from.
        approximate: where `start` belongs to another order of samples, restart the order at its step, with a warning
            but where a stage of the run begins.
        zero_copy: see Hosting; for callers that have finished with a batch when they ask for the next one.
        interrupt: see Loader.

    Raises SettingsError: no sample for this rank, a `start` of another order, or a store of other sources or tokens.
    """
    lanes, workers, depth, stores = settings.lanes, settings.workers, settings.prefetch, inputs.stores
    assert isinstance(lanes, int) and isinstance(workers, int), "resolve the settings first"
    if notice := spinning_notice(world.device, workers if world.is_main else 0):
        logger.info(notice)
    # Slots of this rank in each batch: a rank without any is told before something is downloaded.
    slots = slots_of_rank(settings, world)

    # Names; the cache takes shards in from here on, and has to know how many are open at once.
    names, sources = sorted(settings.sources), list_sources(settings) if sources is None else sources
    cache = shard_cache(settings, wanted=remote_shards_in_use(settings, sources, world))
    for source in sources.values():
        source.begin(cache)
    stored = {} if stores is None else join_stores(stores, settings, sources, inputs.tokenizer, inputs.groups)

    # Order. What it needs of each sample is looked up before; it sets the sources' counts, which the fingerprint has.
    every = list(sources.values())
    if settings.sampling.mode == "indexed":
        for source in every:
            look_up(source, settings, told=world.is_main)
    order = order_plan(settings, every, seed)
    fingerprint = fingerprint_of(settings, seed, inputs.tokenizer, every)

    # Position. An order that is restarted has a salt, and is computed again; other ranks' lanes are left out last.
    start = resume_at(start or DataState(), fingerprint, lanes, approximate, world)
    order = order_plan(settings, every, mix(seed, SALT, start.salt)) if start.salt else order
    start = replace(start, lanes={lane: start.lanes[lane] for lane in slots.lanes if lane in start.lanes})
    stream = Stream(names, order.mix, slots, start, remainder=order.remainder if world.is_main else None)

    # Batches: of samples that are read, or of stored features, which a thread gathers.
    most = max(slots.count(step) for step, _ in settings.batches)
    hosting = Hosting(min(workers, len(slots.lanes)), depth, world.device, zero_copy, settings.stall_timeout)
    batches: SampleBatches | FeatureBatches
    if stores is not None and stores.replaces_loader:
        hosting = replace(hosting, workers=0, depth=depth + 1)  # one is in use while the others are filled
        batches = FeatureBatches(stream, inputs, stores, list(stored.values()), order.sources, most)
    else:
        inputs = replace(inputs, jpegs=settings.decoder == "gpu" and settings.augment.enabled)
        recipes = [
            build_recipe(name, settings.sources[name], inputs, settings, stored=stored.get(name), listed=source)
            for name, source in sources.items()
        ]
        check_recipes(recipes, told=world.is_main)

        def make_sampler(source: int, lane: int, shards: OpenShards) -> LaneSampler:
            cursor = start.lanes[lane].cursors[source].copy() if lane in start.lanes else Cursor()
            return WindowSampler(order.sources[source], lane, cursor, shards)

        batches = SampleBatches(
            stream, inputs, every, recipes, make_sampler, cache, most, hosting.workers,
            traced=settings.trace if world.is_main else 0,
        )  # fmt: skip
        hosting = hosting if hosting.workers else replace(hosting, depth=1)
    found = empty_shards(sources) if world.is_main else None
    return Loader(stream, batches, hosting, Budget.of(settings, sources), found, interrupt)


def shard_cache(settings: DataSettings, *, wanted: int = 0) -> ShardCache:
    """The cache of remote shards, of which `wanted` are in use at once."""
    limit = None if settings.cache_gib is None else int(settings.cache_gib * GIB)
    return ShardCache(settings.cache, limit=limit, wanted=wanted, fetcher=settings.fetcher)


@dataclass
class Lane:
    """A lane while it runs."""

    number: int  # of the lane
    samplers: list[LaneSampler]  # one per source
    drawn: int = 0  # number of slots that it has filled or left empty

    def state(self) -> LaneState:
        return LaneState(self.drawn, [sampler.cursor.copy() for sampler in self.samplers])


@dataclass(slots=True)
class Slot:
    """A slot to fill, and its sample on the way through the stages."""

    lane: Lane  # that fills it
    index: int  # in the rank's batch
    source: int  # number of the source
    sampler: LaneSampler  # of the lane and source
    recipe: ReadingRecipe  # of the source
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
        """The raw sample: the members that the recipe needs, or all that are readable if it is `damaged`."""
        assert self.sample is not None
        shard, ref, url = self.sample[:3]
        members = shard.look(ref) if damaged else shard.load(ref, self.recipe.members)
        return {"__key__": ref.key, "__url__": url, **members}


@dataclass
class Pipeline:
    """Fills the slots of its lanes, batch by batch."""

    stream: Stream
    inputs: ModelInputs
    recipes: Sequence[ReadingRecipe]  # one per source, in the order of names
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
        """Nothing to do: `SampleBatches` closes the shards of a thread, and those of a process end with it."""

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
            slots.append(Slot(lane, index, number, lane.samplers[number], self.recipes[number], name))
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
            recipe, trace = slot.recipe, slot.trace
            try:
                assert slot.sample is not None
                self.stopwatch.at("read", slot.timed_as)
                self._leave_out(slot)
                sample = slot.load()
                if trace:
                    trace.members("read", sample)
                if recipe.transform is not None:
                    self.stopwatch.at("transform", slot.timed_as)
                    sample = recipe.transform(sample)
                    if trace:
                        trace.members("transform", sample)
                    if recipe.probability is not None and recipe.probability.members:
                        _draw(slot, recipe.probability, sample)
                if self.image_views is None:
                    slot.caption = self._caption(slot, sample)
                else:
                    slot.candidates = candidates(recipe.caption, sample)
                    slot.caption = next((text for texts in slot.candidates for text in texts), None)
                    if slot.caption is None:
                        raise Dropped("no_caption")
                if trace:
                    ids = self.inputs.tokenizer.encode([slot.caption])[0].tolist()
                    trace.caption(slot.caption, ids, readable(self.inputs.tokenizer, ids))
                slot.data = image_bytes(sample, recipe.image_key, slot.sample.ref.members)
                slot.group = 0 if recipe.group is None else recipe.group(slot.sample.name, sample)
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
        recipe, sample = slot.recipe, slot.sample
        assert sample is not None
        if sample.position == NO_SAMPLE:
            raise Dropped(NOT_DRAWN)
        if recipe.filter is not None and not recipe.filter(sample.name, sample.ref.key):
            raise Dropped(NOT_KEPT)
        if (one := recipe.probability) is not None and (recipe.transform is None or not one.members):
            members = sample.shard.load(sample.ref, one.members) if one.members else {}
            _draw(slot, one, {"__key__": sample.ref.key, **members})

    def _caption(self, slot: Slot, sample: RawSample) -> str:
        """The caption of a raw sample; with stored features one of theirs, and the image's view is drawn as well."""
        recipe, stored = slot.recipe, slot.recipe.stored
        if stored is None and self.inputs.texts > 1 and slot.rng is not None:
            drawn = draw_several(recipe.caption, sample, slot.rng)
            slot.texts, slot.short = dict.fromkeys(drawn.captions, 1), drawn.short
            if drawn.negative is not None:
                slot.texts.setdefault(drawn.negative, -1)
            return drawn.captions[0]
        if stored is None:
            return recipe.caption(sample, slot.rng)
        assert slot.sample is not None and slot.rng is not None
        by_path = candidates(recipe.caption, sample)
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
            teacher_image, rng = slot.recipe.teacher_image, slot.rng
            again_rng = None if teacher_image is None or rng is None else rng.copy()
            try:
                if not self.image_views:
                    slot.recipe.image(slot.data, rng, pixels)
                else:
                    assert slot.sample.rng_key is not None
                    for view, out in enumerate(pixels.reshape(self.image_views, *pixels.shape[-3:])):
                        slot.recipe.image(slot.data, SampleRNG(mix(view, state=slot.sample.rng_key)), out)
                if teacher_image is not None:
                    teacher_image(slot.data, again_rng, buffer.teacher_pixels[slot.index])
            except Dropped as drop:
                self._drop(slot, drop, again)
                continue
            buffer.checksums[slot.index], buffer.groups[slot.index] = checksum(slot.data), slot.group
            jpeg = slot.recipe.image.jpeg
            if self.inputs.jpegs:
                buffer.jpegs[slot.index] = jpeg or 0
            shown = None if jpeg else pixels  # else it has the bytes of a file
            if slot.stored is not None:
                decoded.setdefault(slot.source, []).append(slot)
            if slot.trace:
                slot.trace.image(slot.data, None if shown is None else shown.reshape(-1, *pixels.shape[-3:])[0])
                slot.trace.end("used", f"slot {slot.index} of this rank's batch")
            slot.name, slot.data = slot.sample.name, b""
            source = slot.recipe.name
            health = self.health.sources[source]
            health.read += 1
            health.used += 1
            if self._captions[source] < FIRST_SAMPLES:
                self._captions[source] += 1
                if slot.recipe.image.lost is not None:
                    health.lost[slot.name] = slot.recipe.image.lost
                if slot.rng is not None:
                    health.captions.add(slot.name, slot.caption or "", shown)
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
        source = slot.recipe.name
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
    stored, index = slots[0].recipe.stored, [slot.index for slot in slots]
    assert stored is not None
    numbers, captions, views = np.array([slot.stored for slot in slots], dtype=np.int64).T
    for name, rows in buffer.stored.items():
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
    recipes: Sequence[ReadingRecipe]  # likewise
    make_sampler: Callable[[int, int, OpenShards], LaneSampler]  # (source, lane, shards) -> sampler
    cache: ShardCache
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
        return self.inputs.shape(self.slots, max(1, self.image_views or 1))

    def filler(
        self, worker: int, ring: BufferRing, report: Callable[[WorkerReport], None], stopwatch: Stopwatch
    ) -> Pipeline:
        """The pipeline of a worker: every `workers`-th lane of the rank."""
        self.cache.alive = stopwatch.touch
        names, start = self.stream.names, self.stream.start.lanes
        pipeline = Pipeline(
            self.stream, self.inputs, self.recipes, ring, Health(names), report, stopwatch,
            self.traced if worker == 0 else 0, self.image_views,
        )  # fmt: skip
        shards = [
            OpenShards(
                source,
                lambda name=name: pipeline.health.sources[name],  # type: ignore[misc]
                stopwatch.begin,
                partial(pipeline.report_early, name),
                recipe.stored,
            )
            for name, source, recipe in zip(names, self.sources, self.recipes, strict=True)
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
        texts = tuple(captions.get(slot, "") for slot in order) if captions else None
        names, size = tuple(keys[slot] for slot in order), self.stream.slots.batch_size(step)
        return self.inputs.batch(buffer, rows, names, step, size, texts)

    def close(self) -> None:
        for shards in self.opened:
            shards.close()
        self.cache.close()
