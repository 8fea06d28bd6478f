"""From settings to a loader: builds sources, readers, the order, and the pipelines of a rank's workers.

The loaders of training, of evaluation and of features that are computed in advance have the same parts; they differ in
the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.captions import CaptionExtractor, build_caption, build_transform
from clipstream.data.decode.images import EvalTransform, ImageTransform, OwnImageTransform
from clipstream.data.decode.key_lists import SampleLists, build_filter, check_lists
from clipstream.data.decode.labels import GroupField, SampleProbability
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.groups import group_labels, look_up, probabilities
from clipstream.data.image_settings import MAX_PIXELS
from clipstream.data.loader.features import FeatureBatches
from clipstream.data.loader.health import FIRST_SAMPLES, FIRST_SLOTS, Budget, Health
from clipstream.data.loader.loader import BatchSource, Hosting, Loader
from clipstream.data.loader.pipeline import ModelInputs, Reader, SampleBatches
from clipstream.data.loader.sampler import ChunkPlan, ChunkSampler, LaneSampler, OnceSampler, OpenShards, WindowSampler
from clipstream.data.loader.stored import StoredData, StoredSamples
from clipstream.data.loader.workers import auto_workers
from clipstream.data.order.lanes import Cursor, DataState, Fingerprint, LaneSlots, SourceMix, Stream, lanes_of_rank
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import TOKENIZER, differences, fingerprint_of, order_plan, source_order
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.sources import Source, SourceContext, open_sources
from clipstream.data.sources.indexes import count_samples
from clipstream.data.text_settings import JsonCaption
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IDS
from clipstream.storage.download import GIB, ShardError
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, redact, whole_file
from clipstream.text import lines, listed
from clipstream.utils.logs import logger
from clipstream.utils.torch_state import spinning_notice

SALT = 7  # hashed with the seed where an order is restarted


def training_loader(
    settings: DataSettings,
    inputs: ModelInputs,
    *,
    sources: Mapping[str, Source] | None = None,
    world: World,
    seed: int,
    start: DataState | None = None,
    approximate: bool = False,
    views: bool = False,
    interrupt: Callable[[], bool] = lambda: False,
) -> Loader:
    """The endless stream of this rank's parts of the global batches.

    Args:
        settings: with `lanes` and `workers` resolved.
        sources: of the settings by name, sorted, where they are listed already.
        inputs: of the model; with a live teacher's, images have the same random crop, mirroring and colours for both.
        start: the run's position (all ranks' lanes) to resume from.
        approximate: where `start` belongs to another order of samples, restart the order at its step, with a warning.
        views: see Hosting; for callers that have finished with a batch when they ask for the next one.
        interrupt: see Loader.

    Raises SettingsError: no sample for this rank, a `start` of another order, or a store of other sources or tokens.
    """
    lanes, workers, features = settings.lanes, settings.workers, inputs.features
    assert isinstance(lanes, int) and isinstance(workers, int), "resolve the settings first"
    if notice := spinning_notice(world.device, workers if world.is_main else 0):
        logger.info(notice)
    slots = _slots(settings, lanes, world)
    names, sources = sorted(settings.sources), open_sources(settings) if sources is None else sources
    store = _shard_cache(settings, wanted=_remote_shards_in_use(settings, sources, lanes, world))
    for source in sources.values():
        source.begin(store)
    stored = {} if features is None else _stored(features, settings, sources, inputs.tokenizer)
    listed_sources = list(sources.values())
    if settings.sampling.mode == "indexed":
        for source in listed_sources:
            look_up(source, settings, told=world.is_main)
    order = order_plan(settings, listed_sources, seed)  # sets the sources' counts, for the fingerprint
    fingerprint = fingerprint_of(settings, seed, inputs.tokenizer, listed_sources)
    start = _resumed(start or DataState(), fingerprint, lanes, approximate, world)
    if start.salt:
        order = order_plan(settings, listed_sources, mix(seed, SALT, start.salt))
    start = replace(start, lanes={lane: start.lanes[lane] for lane in slots.lanes if lane in start.lanes})
    stream = Stream(names, order.mix, slots, start, remainder=order.remainder if world.is_main else None)
    most = max(slots.count(step) for step in settings.batch_changes)
    hosting = Hosting(min(workers, len(slots.lanes)), settings.prefetch, world.device, views, settings.stall_timeout)
    batches: BatchSource
    if features is not None and features.replaces_loader:
        if inputs.groups is not None:
            for name, samples in stored.items():
                samples.groups = samples.by_number(
                    group_labels(sources[name], inputs.groups, settings, "loss.positives.by")
                )
        if settings.sampling.mode != "indexed":
            for name, samples in stored.items():
                if settings.sources[name].probability is not None:
                    samples.probabilities = samples.by_number(probabilities(sources[name], settings))
        hosting = replace(hosting, workers=0, depth=settings.prefetch + 1)  # one is in use while the others are filled
        batches = FeatureBatches(stream, inputs, list(stored.values()), order.sources, most)
    else:
        readers = [
            _reader(name, settings.sources[name], inputs, settings, stored=stored.get(name), shards=source)
            for name, source in sources.items()
        ]
        _check_lists(readers, world)

        def make_sampler(source: int, lane: int, shards: OpenShards) -> LaneSampler:
            cursor = start.lanes[lane].cursors[source].copy() if lane in start.lanes else Cursor()
            return WindowSampler(order.sources[source], lane, cursor, shards)

        batches = SampleBatches(
            stream, inputs, list(sources.values()), readers, make_sampler, store, most, hosting.workers,
            traced=settings.trace if world.is_main else 0,
        )  # fmt: skip
        hosting = hosting if hosting.workers else replace(hosting, depth=1)
    found = _empty_shards(sources) if world.is_main else None
    return Loader(stream, batches, hosting, _budget(settings, sources), found, interrupt)


def _shard_cache(settings: DataSettings, *, wanted: int = 0) -> ShardCache:
    """The cache of remote shards, of which `wanted` are in use at once."""
    limit = None if settings.cache_gib is None else int(settings.cache_gib * GIB)
    return ShardCache(settings.cache, limit=limit, wanted=wanted, fetcher=settings.fetcher)


def _slots(settings: DataSettings, lanes: int, world: World) -> LaneSlots:
    """The slots of this rank's lanes. Raises SettingsError: there are none in some batch."""
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, settings.batch_size)
    for step in settings.batch_changes:
        if slots.count(step) == 0:
            raise SettingsError(
                f"rank {world.rank} of {world.size} has no sample of a global batch of {settings.batch_size(step)} "
                f"with {lanes} lanes: use fewer ranks, or a larger --data.global-batch-size, --data.batch-schedule or "
                "--data.lanes"
            )
    return slots


def _stored(
    features: StoredData, settings: DataSettings, sources: Mapping[str, Source], tokenizer: Tokenizer
) -> dict[str, StoredSamples]:
    """The samples of each source in the stores; sets the counts of sources that cannot be counted without."""
    if features.replaces_loader and settings.trace:
        raise SettingsError("data.trace is not supported with data.image_features: remove it")
    if features.ids is not None:
        width = features.ids.manifest.parts[IDS].width
        if width != tokenizer.context_length:
            raise SettingsError(
                f"the feature store {features.ids.shown} has {width} token ids per caption, but the model takes "
                f"{tokenizer.context_length}: precompute it with the same model and tokenizer"
            )
    found = {}
    for name, source in sources.items():
        section = settings.sources[name]
        weights = section.caption.weights if isinstance(section.caption, JsonCaption) else None
        own = build_filter(section, f"data.sources.{name}", source) if features.replaces_loader else None
        samples = found[name] = StoredSamples(features, name, source, weights, own)
        if not features.replaces_loader:
            continue
        _check_first_shard(source, samples)
        if settings.sampling.mode == "indexed":
            try:
                count_samples(source)
            except SettingsError:  # the shards themselves need not be there
                source.counts = samples.counts.tolist()
                source.empty = {i: samples.fault(i) for i, count in enumerate(source.counts) if not count}
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


def _budget(settings: DataSettings, sources: Mapping[str, Source]) -> Budget:
    """The failures that training accepts."""
    return Budget(
        {name: len(set(source.names)) for name, source in sources.items()},
        {name: (one.image_key, one.caption, f"data.sources.{name}") for name, one in settings.sources.items()},
        settings.max_shard_failures,
        settings.max_sample_failures,
        FIRST_SLOTS if settings.sampling.mode == "indexed" else FIRST_SAMPLES,
        {name: (one.keep, one.drop) for name, one in settings.sources.items()},
    )


def _empty_shards(sources: Mapping[str, Source]) -> Health:
    """Faults of shards without samples, found when samples were counted; an exact epoch never opens these shards."""
    found = Health(list(sources))
    for name, source in sources.items():
        if source.empty:
            health = found.sources[name]
            health.shards = set(range(len(source.names)))
            health.faults = {redact(source.names[number]): fault for number, fault in source.empty.items()}
            health.unopened = set(source.empty)
    return found


def _remote_shards_in_use(settings: DataSettings, sources: Mapping[str, Source], lanes: int, world: World) -> int:
    """Number of remote shards that the lanes of a node have open at once, at most."""
    lanes_of_node = -(-lanes * world.local_size // world.size)
    held = 0
    for source in sources.values():
        if remote := len({file for file in map(whole_file, source.names) if ShardURL(file).is_remote}):
            most = source_order(settings, 0, 0, len(source.names)).max_open(lanes_of_node)
            held += remote if settings.groups.by or settings.hard_negatives else min(remote, most)
    return held


def _resumed(start: DataState, fingerprint: Fingerprint, lanes: int, approximate: bool, world: World) -> DataState:
    """The position to resume from; with another order, restarted under a new salt, so that it shows other samples."""
    if not start.fingerprint:  # a new run, or a checkpoint of open_clip: it has a step, and no position in the data
        return replace(start, fingerprint=fingerprint, lanes_total=lanes, restarted_at=start.step)
    changed = differences(start.fingerprint, fingerprint)
    if not changed:
        return start
    listed = [f"  {key}: {values}" for key, values in changed.items()]
    restart = bool(changed.keys() - {TOKENIZER})
    goes_on = "the data start anew, in a different order" if restart else "the data continue at their position"
    if not approximate:
        advice = (
            f"restore them, or set --resume-approximate: the run then continues at step {start.step}, and {goes_on}"
        )
        said = "--resume: the checkpoint's data order is not that of these settings:"
        raise SettingsError(lines(said, *listed, advice))
    if world.is_main:
        logger.warning(lines(f"--resume-approximate: from step {start.step} on, {goes_on}:", *listed))
    if restart:
        start = replace(start, lanes={}, salt=start.salt + 1, restarted_at=start.step)
    return replace(start, fingerprint=fingerprint, lanes_total=lanes)


def _reader(
    name: str,
    source: SourceSettings,
    inputs: ModelInputs,
    training: DataSettings | None,
    target: CaptionExtractor | None = None,
    stored: StoredSamples | None = None,
    shards: Source | None = None,
) -> Reader:
    """How a source is read; pixels are those of evaluation without `training`.

    Args:
        shards: of the source, for its lists and probabilities; without them, all samples are read.
    """
    upright = source.orientation == "exif" or (source.orientation == "auto" and training is not None)

    def transform(spec: ImageSpec) -> ImageTransform:
        most = MAX_PIXELS if training is None else training.max_image_pixels
        if source.image_transform.type != "default":
            return OwnImageTransform(source.image_transform, spec, source.background, upright, most)
        if training is None or not training.augment.enabled:
            return EvalTransform(spec, source.background, upright, most)
        return TrainTransform(spec, training.augment, source.background, upright, training.decoder, most)

    teacher, where = inputs.teacher_image, source.probability
    exact = training is None or training.sampling.mode == "indexed"  # where the order draws
    return Reader(
        name,
        source.image_key,
        build_caption(source.caption) if target is None else target,
        transform(inputs.image),
        build_transform(source.transform),
        None if shards is None else build_filter(source, shards.context.key, shards),
        None if teacher is None else transform(teacher),
        stored,
        None if inputs.groups is None or training is None else GroupField(inputs.groups, name),
        None if where is None or shards is None or exact else SampleProbability(where, shards.context.key, shards),
    )


def _check_lists(readers: Sequence[Reader], world: World) -> None:
    """Compare the lists of a run with its sources, as far as they are known before samples are read."""
    chances = [None if one.probability is None else SampleLists(one.probability.list, None) for one in readers]
    check_lists([*(one.filter for one in readers), *chances], told=world.is_main)


@dataclass(frozen=True)
class EvalSource:
    """A source that an evaluation reads.

    Attributes:
        settings: of the source.
        place: key of the settings, for messages.
        target: gives the text that becomes ids in place of the caption (class numbers, with a tokenizer of labels).
        max_samples: use only the first so many samples; None for all.
    """

    settings: SourceSettings
    place: str = "evals.NAME.data"
    target: CaptionExtractor | None = None
    max_samples: int | None = None


def evaluation_loader(
    source: EvalSource,
    inputs: ModelInputs,
    *,
    batch_size: int,
    world: World,
    data: DataSettings,
    interrupt: Callable[[], bool] = lambda: False,
) -> Loader:
    """This rank's part of every sample of `source`, once, in batches of at most `batch_size`; then it ends.

    A missing or broken shard is an error, as metrics over a part of a data set look like metrics of the whole.

    Args:
        data: the run's settings of workers, cache and time limits.
        interrupt: see Loader.

    Raises DataError: local shards are missing.
    """
    workers = auto_workers(world) if data.workers == "auto" else data.workers
    batch_size = max(batch_size, workers)
    lanes = world.size * max(1, workers)
    section, name, store = source.settings, "eval", _shard_cache(data)
    shards_of = Source(section, SourceContext(store, data.cache, source.place))
    if absent := shards_of.missing:
        verb = "do" if len(absent) > 1 else "does"
        raise DataError(
            f"{source.place}.shards: of {len(shards_of.names)} shards, {listed(absent, 1)} {verb} not exist"
        )
    reader = _reader(name, section, inputs, None, source.target, shards=shards_of)
    _check_lists([reader], world)
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=lanes), ends=True)
    batches = SampleBatches(
        stream,
        inputs,
        [shards_of],
        [replace(reader, filter=None)],
        lambda _, lane, shards: OnceSampler(lane, lanes, shards, source.max_samples, reader.filter),
        store,
        batch_size,
        workers,
    )
    hint = (section.image_key, None if source.target is not None else section.caption, source.place)
    budget = Budget({name: len(set(shards_of.names))}, {name: hint}, 0.0, 1.0)
    depth = 2 if workers else 1
    hosting = Hosting(workers, depth, stall_timeout=data.stall_timeout)
    return Loader(stream, batches, hosting, budget, interrupt=interrupt)


def chunk_loader(
    settings: DataSettings,
    name: str,
    source: Source,
    chunks: ChunkPlan,
    inputs: ModelInputs,
    *,
    views: int,
    done: Collection[int] = (),
    device: str = "cpu",
) -> Loader:
    """The samples of a rank's chunks once, in stored order, for features that are computed in advance; then it ends.

    A batch has `ChunkPlan.batch_size` consecutive samples of a chunk, or what is left of it, dropped ones included
    (weight 0). `Loader.parts` has the cursors that tell which samples these are (see ChunkSampler), and all captions
    with their ids; `Batch.ids` is not filled. Samples that `keep`, `drop` and `probability` leave out are not dropped:
    training does that.

    Args:
        settings: with `workers` resolved.
        name, source: the source.
        views: augmented views of an image; 0 for the pixels of evaluation.
        done: numbers of further shards, whose chunks were all made before; they count as tried.
    """
    section = settings.sources[name]
    assert isinstance(settings.workers, int), "resolve the settings first"
    store, found = _shard_cache(settings), Health([name])
    source.begin(store)
    found.sources[name].shards = set(done)
    workers = min(settings.workers, chunks.lanes)
    slots = LaneSlots(range(chunks.lanes), chunks.lanes, lambda step: chunks.batch_size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=chunks.lanes), ends=True)
    batches = SampleBatches(
        stream,
        inputs,
        [source],
        [_reader(name, section, inputs, settings if views else None)],
        lambda _, lane, shards: ChunkSampler(lane, chunks, shards),
        store,
        chunks.batch_size,
        workers,
        traced=settings.trace,
        image_views=views,
    )
    budget = replace(_budget(settings, {name: source}), total_shards={name: len(chunks.shards) + len(done)})
    hosting = Hosting(workers, chunks.depth if workers else 1, device, True, settings.stall_timeout)
    return Loader(stream, batches, hosting, replace(budget, first_samples=FIRST_SAMPLES, lists={}), found)
