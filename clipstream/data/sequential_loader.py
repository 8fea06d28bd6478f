"""Loaders that read samples once, in stored order: of evaluation, and of features that are computed in advance.

A source and what a model takes enter; a Loader that ends leaves: the pipeline of training with the
sampler of either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from clipstream.data.decode.captions import CaptionExtractor
from clipstream.data.decode.key_lists import SampleLists
from clipstream.data.loader.health import FIRST_SAMPLES, Budget, Health
from clipstream.data.loader.loader import Hosting, Loader
from clipstream.data.loader.reading_recipe import ModelInputs, build_recipe, check_recipes
from clipstream.data.loader.sampler import LaneSample, OpenShards
from clipstream.data.order.lanes import Cursor, DataState, LaneSlots, SourceMix, Stream, lanes_of_rank, share_of
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import auto_workers
from clipstream.data.pipeline import SampleBatches, shard_cache
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import OpenShard, SampleRef, Source, SourceContext
from clipstream.distributed.world import World
from clipstream.errors import DataError
from clipstream.text import listed


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
    recipe = build_recipe(name, section, inputs, None, source.target, listed=shards_of)
    check_recipes([recipe], told=world.is_main)
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=lanes), ends=True)

    def make_sampler(_: int, lane: int, shards: OpenShards) -> OnceSampler:
        return OnceSampler(lane, lanes, shards, source.max_samples, recipe.filter)

    recipes = [replace(recipe, filter=None)]
    batches = SampleBatches(stream, inputs, [shards_of], recipes, make_sampler, cache, batch_size, workers)
    hint = (section.image_key, None if source.target is not None else section.caption, source.place)
    budget = Budget({name: len(set(shards_of.names))}, {name: hint}, 0.0, 1.0)
    hosting = Hosting(workers, 2 if workers else 1, stall_timeout=data.stall_timeout)
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
    assert isinstance(settings.workers, int), "resolve the settings first"
    cache, found = shard_cache(settings), Health([name])
    source.begin(cache)
    found.sources[name].shards = set(done)
    workers = min(settings.workers, chunks.lanes)
    slots = LaneSlots(range(chunks.lanes), chunks.lanes, lambda step: chunks.batch_size)
    stream = Stream([name], SourceMix(0, (1.0,)), slots, DataState(lanes_total=chunks.lanes), ends=True)

    def make_sampler(_: int, lane: int, shards: OpenShards) -> ChunkSampler:
        return ChunkSampler(lane, chunks, shards)

    recipes = [build_recipe(name, settings.sources[name], inputs, settings if views else None)]
    batches = SampleBatches(
        stream, inputs, [source], recipes, make_sampler, cache, chunks.batch_size, workers, settings.trace, views
    )
    budget = replace(Budget.of(settings, {name: source}), total_shards={name: len(chunks.shards) + len(done)})
    hosting = Hosting(workers, chunks.depth if workers else 1, device, True, settings.stall_timeout)
    return Loader(stream, batches, hosting, replace(budget, first_samples=FIRST_SAMPLES, lists={}), found)
