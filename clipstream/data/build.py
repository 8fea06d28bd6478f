"""Loaders that read samples once, in stored order: of evaluation, and of features that are computed in advance.

A source and what a model takes enter; a Loader that ends leaves: the pipeline of training with another sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from clipstream.data.decode.captions import CaptionExtractor
from clipstream.data.loader.health import FIRST_SAMPLES, Budget, Health
from clipstream.data.loader.loader import Hosting, Loader
from clipstream.data.loader.recipe import ModelInputs, build_recipe, check_recipes
from clipstream.data.loader.sampler import ChunkPlan, ChunkSampler, OnceSampler
from clipstream.data.loader.workers import auto_workers
from clipstream.data.order.lanes import DataState, LaneSlots, SourceMix, Stream, lanes_of_rank
from clipstream.data.pipeline import SampleBatches, shard_cache
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.distributed.world import World
from clipstream.errors import DataError
from clipstream.text import listed


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
    section, name, cache = source.settings, "eval", shard_cache(data)
    shards_of = Source(section, SourceContext(cache, data.cache, source.place))
    if absent := shards_of.missing:
        verb = "do" if len(absent) > 1 else "does"
        raise DataError(
            f"{source.place}.shards: of {len(shards_of.names)} shards, {listed(absent, 1)} {verb} not exist"
        )
    recipe = build_recipe(name, section, inputs, None, source.target, shards=shards_of)
    check_recipes([recipe], told=world.is_main)
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=lanes), ends=True)
    batches = SampleBatches(
        stream,
        inputs,
        [shards_of],
        [replace(recipe, filter=None)],
        lambda _, lane, shards: OnceSampler(lane, lanes, shards, source.max_samples, recipe.filter),
        cache,
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
    cache, found = shard_cache(settings), Health([name])
    source.begin(cache)
    found.sources[name].shards = set(done)
    workers = min(settings.workers, chunks.lanes)
    slots = LaneSlots(range(chunks.lanes), chunks.lanes, lambda step: chunks.batch_size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=chunks.lanes), ends=True)
    batches = SampleBatches(
        stream,
        inputs,
        [source],
        [build_recipe(name, section, inputs, settings if views else None)],
        lambda _, lane, shards: ChunkSampler(lane, chunks, shards),
        cache,
        chunks.batch_size,
        workers,
        traced=settings.trace,
        image_views=views,
    )
    budget = replace(Budget.of(settings, {name: source}), total_shards={name: len(chunks.shards) + len(done)})
    hosting = Hosting(workers, chunks.depth if workers else 1, device, True, settings.stall_timeout)
    return Loader(stream, batches, hosting, replace(budget, first_samples=FIRST_SAMPLES, lists={}), found)
