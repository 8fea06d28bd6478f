"""From settings to a loader: builds sources, readers, the order, and the pipelines of a rank's workers.

Training's and evaluation's loaders have the same parts; they differ in the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.captions import CaptionExtractor, build_caption, build_transform
from clipstream.data.decode.images import EvalTransform, ImageTransform, OwnImageTransform
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.loader.batch_buffers import BufferShape
from clipstream.data.loader.health import FIRST_SAMPLES, FIRST_SLOTS, Budget, Health
from clipstream.data.loader.loader import Loader, LoaderPlan
from clipstream.data.loader.pipeline import Lane, Pipeline, Reader, SampleTracer, WorkerReport
from clipstream.data.loader.sampler import LaneSampler, OnceSampler, OpenShards, WindowSampler
from clipstream.data.loader.stage_timing import Stopwatch
from clipstream.data.order.lanes import Cursor, DataState, Fingerprint, LaneSlots, Mix, SourceMix, lanes_of_rank
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import TOKENIZER, differences, fingerprint_of, order_plan, source_order
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.shard_url import is_remote, redact
from clipstream.data.sources.registry import expand
from clipstream.data.sources.source import Source
from clipstream.data.transport.cache_eviction import GIB
from clipstream.data.transport.shard_cache import ShardCache
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.utils.logs import logger

SALT = 7  # hashed with the seed where an order is restarted
# (source, lane, shards, on_open) -> sampler
MakeSampler = Callable[[int, int, OpenShards, Callable[[], None]], LaneSampler]


@dataclass(frozen=True)
class _Stream:
    """The parts that the pipelines of a rank share."""

    names: list[str]
    readers: list[Reader]
    sources: list[Source]
    mix: Mix
    make_sampler: MakeSampler
    slots: LaneSlots
    start: DataState  # with this rank's lanes
    workers: int
    tokenizer: Tokenizer
    store: ShardCache
    traced: int = 0
    opened: list[OpenShards] = field(default_factory=list)  # by this process

    def pipeline(self, worker: int, report: Callable[[WorkerReport], None], stopwatch: Stopwatch) -> Pipeline:
        """The pipeline of a worker: every `workers`-th lane of the rank."""
        self.store.alive = stopwatch.touch
        tracer = SampleTracer(self.traced if worker == 0 else 0)
        pipeline = Pipeline(
            [], self.slots, self.readers, self.mix, self.tokenizer, Health(self.names), report, stopwatch, tracer
        )
        shards = [
            OpenShards(source, lambda name=name: pipeline.health.sources[name], stopwatch.begin)  # type: ignore[misc]
            for name, source in zip(self.names, self.sources, strict=True)
        ]
        self.opened.extend(shards)
        for lane in self.slots.lanes[worker :: max(1, self.workers)]:
            samplers = [
                self.make_sampler(i, lane, shards[i], lambda name=name: pipeline.report_early(name))  # type: ignore[misc]
                for i, name in enumerate(self.names)
            ]
            drawn = self.start.lanes[lane].drawn if lane in self.start.lanes else 0
            pipeline.lanes.append(Lane(lane, samplers, drawn))
        return pipeline

    def loader(self, budget: Budget, image: ImageSpec, depth: int, samples: int, **more: Any) -> Loader:
        """The loader of this stream, whose largest batch has `samples` of this rank; `more`: see LoaderPlan."""
        height, width = image.size
        plan = LoaderPlan(
            make_pipeline=self.pipeline,
            workers=self.workers,
            depth=depth,
            shape=BufferShape(samples, height, width, self.tokenizer.context_length),
            slots=self.slots,
            names=self.names,
            budget=budget,
            start=self.start,
            on_close=self.close,
            **more,
        )
        return Loader(plan)

    def close(self) -> None:
        """Release what this process holds."""
        for shards in self.opened:
            shards.close()
        self.store.close()


def training_loader(
    settings: DataSettings,
    *,
    world: World,
    seed: int,
    tokenizer: Tokenizer,
    image: ImageSpec,
    start: DataState | None = None,
    approximate: bool = False,
    views: bool = False,
) -> Loader:
    """The endless stream of this rank's parts of the global batches.

    Args:
        settings: with `lanes` and `workers` resolved.
        start: the run's position (all ranks' lanes) to resume from.
        approximate: where `start` belongs to another order of samples, restart the order at its step, with a warning.
        views: see LoaderPlan; for callers that have finished with a batch when they ask for the next one.

    Raises:
        SettingsError: this rank would get no sample, or `start` belongs to another order of samples.
    """
    lanes, workers = settings.lanes, settings.workers
    assert isinstance(lanes, int) and isinstance(workers, int), "resolve the settings first"
    slots = _lane_slots(settings, lanes, world)
    limit, shard_limit = _bytes(settings.cache_gib), _bytes(settings.max_shard_gib)
    wanted = _remote_shards_in_use(settings, lanes, world)
    store = ShardCache(settings.cache, limit=limit, wanted=wanted, timeout=settings.transfer_timeout, most=shard_limit)
    named = sorted(settings.sources.items())
    names = [name for name, _ in named]
    sources = [Source(one, store, cache=settings.cache, place=f"data.sources.{name}") for name, one in named]
    order = order_plan(settings, sources, seed)  # sets the counts of the sources, which the fingerprint needs
    fingerprint = fingerprint_of(settings, seed, tokenizer, sources)
    start = start or DataState(lanes_total=lanes, fingerprint=fingerprint)
    start = _resumed(start, fingerprint, lanes, approximate, world)
    if start.salt:
        order = order_plan(settings, sources, mix(seed, SALT, start.salt))
    start = replace(start, lanes={lane: start.lanes[lane] for lane in slots.lanes if lane in start.lanes})

    def make_sampler(source: int, lane: int, shards: OpenShards, on_open: Callable[[], None]) -> LaneSampler:
        cursor = start.lanes[lane].cursors[source].copy() if lane in start.lanes else Cursor()
        return WindowSampler(order.sources[source], lane, cursor, shards, on_open)

    stream = _Stream(
        names=names,
        readers=[_reader(name, one, _image_transform(one, image, settings)) for name, one in named],
        sources=sources,
        mix=order.mix,
        make_sampler=make_sampler,
        slots=slots,
        start=start,
        workers=min(workers, len(slots.lanes)),
        tokenizer=tokenizer,
        store=store,
        traced=settings.trace if world.is_main else 0,
    )
    budget = Budget(
        {name: len(set(source.names)) for name, source in zip(names, sources, strict=True)},
        {name: (one.image_key, one.caption, f"data.sources.{name}") for name, one in named},
        settings.max_shard_failures,
        settings.max_sample_failures,
        settings.on_shard_error,
        FIRST_SLOTS if settings.sampling.mode == "indexed" else FIRST_SAMPLES,
    )
    return stream.loader(
        budget,
        image,
        settings.prefetch,
        max(slots.count(step) for step in settings.batch_changes),
        stall_timeout=settings.stall_timeout,
        device=world.device,
        remainder=order.remainder if world.is_main else None,
        views=views,
        found=_empty_shards(names, sources) if world.is_main else None,
    )


def _lane_slots(settings: DataSettings, lanes: int, world: World) -> LaneSlots:
    """The slots of this rank's lanes. Raises SettingsError if a batch has none."""
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, settings.batch_size)
    for step in settings.batch_changes:
        if slots.count(step) == 0:
            raise SettingsError(
                f"rank {world.rank} of {world.size} gets no sample of a global batch of {settings.batch_size(step)} "
                f"over {slots.total} lanes: use fewer ranks, or a larger --data.global-batch-size, "
                "--data.batch-schedule or --data.lanes"
            )
    return slots


def _empty_shards(names: list[str], sources: list[Source]) -> Health:
    """Faults of shards without samples, found when samples were counted; an exact epoch never opens these shards."""
    found = Health(names)
    for name, source in zip(names, sources, strict=True):
        if source.empty:
            health = found.sources[name]
            health.shards = set(range(len(source.names)))
            health.faults = {redact(source.names[number]): fault for number, fault in source.empty.items()}
            health.unopened = set(source.empty)
    return found


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _remote_shards_in_use(settings: DataSettings, lanes: int, world: World) -> int:
    """Number of remote shards that the lanes of a node have open at once, at most."""
    lanes_of_node = -(-lanes * world.local_size // world.size)
    held = 0
    for source in settings.sources.values():
        shards = expand(source.shards, source.type)
        if remote := len(set(filter(is_remote, shards))):
            held += min(remote, source_order(settings, 0, 0, len(shards)).max_open(lanes_of_node))
    return held


def _resumed(start: DataState, fingerprint: Fingerprint, lanes: int, approximate: bool, world: World) -> DataState:
    """The position to resume from; with another order, restarted under a new salt, so that it shows other samples."""
    changed = differences(start.fingerprint, fingerprint)
    if not changed:
        return start
    listed = "".join(f"\n  {key}: {values}" for key, values in changed.items())
    restart = bool(changed.keys() - {TOKENIZER})
    goes_on = "the data begin anew, in another order" if restart else "the data go on where they were"
    if not approximate:
        raise SettingsError(
            f"--resume: the checkpoint's data order is not that of these settings:{listed}\n"
            f"go back to them, or give --resume-approximate: then the run goes on at step {start.step}, and {goes_on}"
        )
    if world.is_main:
        logger.warning(f"--resume-approximate: from step {start.step} on, {goes_on}:{listed}")
    if restart:
        start = replace(start, lanes={}, salt=start.salt + 1, restarted_at=start.step)
    return replace(start, fingerprint=fingerprint, lanes_total=lanes)


def _image_transform(source: SourceSettings, image: ImageSpec, training: DataSettings | None) -> ImageTransform:
    """The user's own; or the random crop of training, or without `training` the preprocessing of evaluation."""
    upright = source.orientation == "exif" or (source.orientation == "auto" and training is not None)
    if source.image_transform.type != "default":
        return OwnImageTransform(source.image_transform, image, source.background, upright)
    if training is None:
        return EvalTransform(image, source.background, upright)
    return TrainTransform(image, training.augment, source.background, upright, training.decoder)


def _reader(name: str, source: SourceSettings, image: ImageTransform, target: CaptionExtractor | None = None) -> Reader:
    caption = build_caption(source.caption) if target is None else target
    return Reader(name, source.image_key, caption, image, build_transform(source.transform))


def evaluation_loader(
    source: SourceSettings,
    *,
    batch_size: int,
    world: World,
    tokenizer: Tokenizer,
    image: ImageSpec,
    workers: int = 0,
    target: CaptionExtractor | None = None,
    max_samples: int | None = None,
    name: str = "eval",
    place: str = "evals.NAME.data",
    cache: str | None = None,
    cache_gib: float | None = None,
    stall_timeout: float = 300.0,
    transfer_timeout: float = 60.0,
) -> Loader:
    """This rank's part of every sample of `source`, once, in batches of at most `batch_size`; then it ends.

    A missing or broken shard is an error, as metrics over a part of a data set look like metrics of the whole.

    Args:
        target: gives the text that becomes ids in place of the caption (class numbers, with a tokenizer of labels).
        max_samples: use only the first so many samples of the source.
        place: key of the source's settings, for messages.
        cache: folder for downloaded shards; None for a temporary one.
        cache_gib: limit of its size; None for no limit.

    Raises:
        DataError: local shards are missing.
    """
    per_rank = max(1, workers)
    batch_size = max(batch_size, per_rank)
    lanes = world.size * per_rank
    store = ShardCache(cache, limit=_bytes(cache_gib), timeout=transfer_timeout)
    shards_of = Source(source, store, cache=cache, place=place)
    if absent := shards_of.missing:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        shards = f"of {len(shards_of.names)} shards, {absent[0]}{more} {'are' if more else 'is'} not there"
        raise DataError(f"{place}.shards: {shards}")

    def make_sampler(_: int, lane: int, shards: OpenShards, on_open: Callable[[], None]) -> LaneSampler:
        return OnceSampler(lane, lanes, shards, on_open, max_samples)

    stream = _Stream(
        names=[name],
        readers=[_reader(name, source, _image_transform(source, image, None), target)],
        sources=[shards_of],
        mix=SourceMix(0, (1.0,)),
        make_sampler=make_sampler,
        slots=LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size),
        start=DataState(lanes_total=lanes),
        workers=workers,
        tokenizer=tokenizer,
        store=store,
    )
    hint = (source.image_key, None if target is not None else source.caption, place)
    budget = Budget({name: len(set(shards_of.names))}, {name: hint}, 0.0, 1.0)
    return stream.loader(budget, image, 2, batch_size, stall_timeout=stall_timeout, ends=True)
