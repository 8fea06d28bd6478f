"""From settings to a loader: builds sources, readers, the order, and the pipelines of a rank's workers.

The loaders of training, of evaluation and of features that are computed in advance have the same parts; they differ in
the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.captions import CaptionExtractor, build_caption, build_transform
from clipstream.data.decode.images import EvalTransform, ImageTransform, OwnImageTransform
from clipstream.data.decode.key_lists import build_filter
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.loader.features import FeatureLoader
from clipstream.data.loader.health import FIRST_SAMPLES, FIRST_SLOTS, Budget, Health
from clipstream.data.loader.loader import Loader, LoaderPlan
from clipstream.data.loader.pipeline import Reader
from clipstream.data.loader.sampler import ChunkPlan, ChunkSampler, LaneSampler, OnceSampler, OpenShards, WindowSampler
from clipstream.data.loader.stored import StoredData, StoredSamples
from clipstream.data.order.lanes import Cursor, DataState, Fingerprint, LaneSlots, SourceMix, lanes_of_rank
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import TOKENIZER, differences, fingerprint_of, order_plan, source_order, stable_names
from clipstream.data.settings import MAX_PIXELS, DataSettings, JsonCaption, SourceSettings
from clipstream.data.sources import SourceContext
from clipstream.data.sources.indexes import count_samples
from clipstream.data.sources.registry import Source, expand
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IDS
from clipstream.storage.downloader import MOST, Fetcher
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.transfer import GIB, ShardError
from clipstream.utils.logs import logger
from clipstream.utils.openmp import spinning_notice

if TYPE_CHECKING:
    import torch

SALT = 7  # hashed with the seed where an order is restarted


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
    teacher_image: ImageSpec | None = None,
    teacher_tokenizer: Tokenizer | None = None,
    features: StoredData | None = None,
    text_lengths: Callable[[torch.Tensor], tuple[int, ...] | None] | None = None,
) -> Loader:
    """The endless stream of this rank's parts of the global batches.

    Args:
        settings: with `lanes` and `workers` resolved.
        start: the run's position (all ranks' lanes) to resume from.
        approximate: where `start` belongs to another order of samples, restart the order at its step, with a warning.
        views: see LoaderPlan; for callers that have finished with a batch when they ask for the next one.
        teacher_image: adds a live teacher's pixels of the same random crop, mirroring and colours.
        teacher_tokenizer: adds the ids of the captions by a live teacher's tokenizer.
        text_lengths: gives the batches' `lengths` from ids on the CPU.
        features: stores of features. Batches have them, and no pixels or no ids where features take their place.

    Raises:
        SettingsError: no sample for this rank, a `start` of another order, or a store of other sources or tokens.
    """
    lanes, workers = settings.lanes, settings.workers
    assert isinstance(lanes, int) and isinstance(workers, int), "resolve the settings first"
    if notice := spinning_notice(world.device, workers if world.is_main else 0):
        logger.info(notice)
    slots, store = _slots(settings, lanes, world), _shard_cache(settings, lanes, world)
    named, names = sorted(settings.sources.items()), sorted(settings.sources)
    sources = [Source(one, SourceContext(store, settings.cache, f"data.sources.{name}")) for name, one in named]
    readers = [_reader(name, one, image, settings, teacher=teacher_image) for name, one in named]
    stored = [] if features is None else _stored(features, settings, names, sources, tokenizer)
    if features is not None and not features.replaces_loader:
        known = _stored(features, settings, names, sources, tokenizer, rows=False)
        readers = [replace(reader, stored=one) for reader, one in zip(readers, known, strict=True)]
    order = order_plan(settings, sources, seed)  # sets the counts of the sources, which the fingerprint needs
    fingerprint = fingerprint_of(settings, seed, tokenizer, sources)
    start = _resumed(start or DataState(), fingerprint, lanes, approximate, world)
    if start.salt:
        order = order_plan(settings, sources, mix(seed, SALT, start.salt))
    start = replace(start, lanes={lane: start.lanes[lane] for lane in slots.lanes if lane in start.lanes})

    def make_sampler(source: int, lane: int, shards: OpenShards) -> LaneSampler:
        cursor = start.lanes[lane].cursors[source].copy() if lane in start.lanes else Cursor()
        return WindowSampler(order.sources[source], lane, cursor, shards)

    plan = LoaderPlan(
        sources,
        readers,
        order.mix,
        make_sampler,
        slots,
        start,
        tokenizer=tokenizer,
        store=store,
        image=image,
        samples=max(slots.count(step) for step in settings.batch_changes),
        budget=_budget(settings, dict(zip(names, sources, strict=True))),
        stall_timeout=settings.stall_timeout,
        workers=min(workers, len(slots.lanes)),
        depth=settings.prefetch,
        traced=settings.trace if world.is_main else 0,
        device=world.device,
        remainder=order.remainder if world.is_main else None,
        views=views,
        teacher_image=teacher_image,
        teacher_tokenizer=teacher_tokenizer,
        found=_empty_shards(names, sources) if world.is_main else None,
        features=features,
        stored=stored,
        text_lengths=text_lengths,
    )
    return Loader(plan) if features is None or not features.replaces_loader else FeatureLoader(plan, order.sources)


def _shard_cache(settings: DataSettings, lanes: int, world: World) -> ShardCache:
    """The cache of remote shards for the lanes of a node."""
    fetcher = Fetcher(timeout=settings.transfer_timeout, most=_bytes(settings.max_shard_gib) or MOST)
    limit, wanted = _bytes(settings.cache_gib), _remote_shards_in_use(settings, lanes, world)
    return ShardCache(settings.cache, limit=limit, wanted=wanted, fetcher=fetcher)


def _slots(settings: DataSettings, lanes: int, world: World) -> LaneSlots:
    """The slots of this rank's lanes. Raises SettingsError: there are none in some batch."""
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, settings.batch_size)
    for step in settings.batch_changes:
        if slots.count(step) == 0:
            raise SettingsError(
                f"rank {world.rank} of {world.size} gets no sample of a global batch of {settings.batch_size(step)} "
                f"over {lanes} lanes: use fewer ranks, or a larger --data.global-batch-size, "
                "--data.batch-schedule or --data.lanes"
            )
    return slots


def _stored(
    features: StoredData,
    settings: DataSettings,
    names: list[str],
    sources: list[Source],
    tokenizer: Tokenizer,
    rows: bool = True,
) -> list[StoredSamples]:
    """The samples of each source in the stores; sets the counts of sources that cannot be counted without.

    Args:
        rows: see StoredSamples.
    """
    if features.replaces_loader and settings.trace:
        raise SettingsError(
            "data.trace prints how samples are read, and features are read in their place: leave it out"
        )
    if features.ids is not None:
        width = features.ids.manifest.parts[IDS].width
        if width != tokenizer.context_length:
            raise SettingsError(
                f"the feature store {features.ids.shown} has {width} token ids a caption, and the model takes "
                f"{tokenizer.context_length}: precompute it with the same model and tokenizer"
            )
    found = []
    for name, source in zip(names, sources, strict=True):
        titles = [source.types[shard].title(shard) for shard in source.names]
        caption = settings.sources[name].caption
        weights = caption.weights if isinstance(caption, JsonCaption) else None
        shards = list(zip(stable_names(source.names), source.names, strict=True))
        own = build_filter(name, settings.sources[name]) if features.replaces_loader else None
        key = f"data.sources.{name}"
        samples = StoredSamples(features, name, shards, titles, key, weights, own, rows=rows)
        found.append(samples)
        if features.replaces_loader:
            _check_first_shard(source, samples)
        if settings.sampling.mode == "indexed" and features.replaces_loader:
            try:
                count_samples(source)
            except SettingsError:  # the shards themselves need not be there
                source.counts = samples.counts.tolist()
                source.empty = {i: samples.fault(i) for i, count in enumerate(source.counts) if not count}
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


def _budget(settings: DataSettings, sources: dict[str, Source]) -> Budget:
    """The failures that training accepts."""
    return Budget(
        {name: len(set(source.names)) for name, source in sources.items()},
        {name: (one.image_key, one.caption, f"data.sources.{name}") for name, one in settings.sources.items()},
        settings.max_shard_failures,
        settings.max_sample_failures,
        FIRST_SLOTS if settings.sampling.mode == "indexed" else FIRST_SAMPLES,
        {name: (one.keep, one.drop) for name, one in settings.sources.items()},
    )


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
        if remote := len({shard for shard in shards if ShardURL(shard).is_remote}):
            held += min(remote, source_order(settings, 0, 0, len(shards)).max_open(lanes_of_node))
    return held


def _resumed(start: DataState, fingerprint: Fingerprint, lanes: int, approximate: bool, world: World) -> DataState:
    """The position to resume from; with another order, restarted under a new salt, so that it shows other samples."""
    if not start.fingerprint:  # a new run, or a checkpoint of open_clip: it has a step, and no position in the data
        return replace(start, fingerprint=fingerprint, lanes_total=lanes, restarted_at=start.step)
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


def _reader(
    name: str,
    source: SourceSettings,
    image: ImageSpec,
    training: DataSettings | None,
    target: CaptionExtractor | None = None,
    teacher: ImageSpec | None = None,
) -> Reader:
    """How a source is read; pixels are those of evaluation without `training`."""
    upright = source.orientation == "exif" or (source.orientation == "auto" and training is not None)

    def transform(spec: ImageSpec) -> ImageTransform:
        most = MAX_PIXELS if training is None else training.max_image_pixels
        if source.image_transform.type != "default":
            return OwnImageTransform(source.image_transform, spec, source.background, upright, most)
        if training is None or not training.augment.enabled:
            return EvalTransform(spec, source.background, upright, most)
        return TrainTransform(spec, training.augment, source.background, upright, training.decoder, most)

    caption = build_caption(source.caption) if target is None else target
    chosen = build_filter(name, source)
    teachers = None if teacher is None else transform(teacher)
    own = build_transform(source.transform)
    return Reader(name, source.image_key, caption, transform(image), own, chosen, teachers)


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
    store = ShardCache(cache, limit=_bytes(cache_gib), fetcher=Fetcher(timeout=transfer_timeout))
    shards_of = Source(source, SourceContext(store, cache, place))
    if absent := shards_of.missing:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        shards = f"of {len(shards_of.names)} shards, {absent[0]}{more} {'are' if more else 'is'} not there"
        raise DataError(f"{place}.shards: {shards}")

    hint = (source.image_key, None if target is not None else source.caption, place)
    plan = LoaderPlan(
        sources=[shards_of],
        readers=[_reader(name, source, image, None, target)],
        mix=SourceMix(0, (1.0,)),
        make_sampler=lambda _, lane, shards: OnceSampler(lane, lanes, shards, max_samples),
        slots=LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size),
        start=DataState(lanes_total=lanes),
        tokenizer=tokenizer,
        store=store,
        image=image,
        samples=batch_size,
        budget=Budget({name: len(set(shards_of.names))}, {name: hint}, 0.0, 1.0),
        stall_timeout=stall_timeout,
        workers=workers,
        depth=2,
        ends=True,
    )
    return Loader(plan)


def chunk_loader(
    settings: DataSettings,
    name: str,
    chunks: ChunkPlan,
    *,
    tokenizer: Tokenizer,
    image: ImageSpec,
    views: int,
    done: Collection[int] = (),
    device: str = "cpu",
) -> Loader:
    """The samples of a rank's chunks once, in stored order, for features that are computed in advance; then it ends.

    A batch has `ChunkPlan.batch_size` consecutive samples of a chunk, or what is left of it, dropped ones included
    (weight 0). `Loader.parts` has the cursors that tell which samples these are (see ChunkSampler), and all captions
    with their ids; `Batch.ids` is not filled. Samples that `keep` and `drop` of the source leave out are not dropped:
    training does that.

    Args:
        settings: with `workers` resolved.
        name: of the source.
        views: augmented views of a picture; 0 for the pixels of evaluation.
        done: numbers of further shards, whose chunks were all made before; they count as tried.
    """
    section = settings.sources[name]
    assert isinstance(settings.workers, int), "resolve the settings first"
    fetcher = Fetcher(timeout=settings.transfer_timeout, most=_bytes(settings.max_shard_gib) or MOST)
    store = ShardCache(settings.cache, limit=_bytes(settings.cache_gib), fetcher=fetcher)
    source = Source(section, SourceContext(store, settings.cache, f"data.sources.{name}"))
    reader = replace(_reader(name, section, image, settings if views else None), filter=None)
    place, found = f"data.sources.{name}", Health([name])
    found.sources[name].shards = set(done)
    plan = LoaderPlan(
        sources=[source],
        readers=[reader],
        mix=SourceMix(0, (1.0,)),
        make_sampler=lambda _, lane, shards: ChunkSampler(lane, chunks, shards),
        slots=LaneSlots(range(chunks.lanes), chunks.lanes, lambda step: chunks.batch_size),
        start=DataState(lanes_total=chunks.lanes),
        tokenizer=tokenizer,
        store=store,
        image=image,
        samples=chunks.batch_size,
        budget=Budget(
            {name: len(chunks.shards) + len(done)},
            {name: (section.image_key, section.caption, place)},
            settings.max_shard_failures,
            settings.max_sample_failures,
        ),
        stall_timeout=settings.stall_timeout,
        workers=min(settings.workers, chunks.lanes),
        depth=chunks.depth,
        traced=settings.trace,
        ends=True,
        device=device,
        views=True,
        image_views=views,
        found=found,
    )
    return Loader(plan)
