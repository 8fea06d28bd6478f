"""Owns the way from settings to a loader: sources to readers and orders, lanes to ranks and workers.

Both loaders, training's and evaluation's, are the same machine: lanes, a feeder, slabs. They differ in the walk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clipstream.batch import ImageSpec
from clipstream.data.crops import TrainTransform
from clipstream.data.feeder import Feeder, Lane, Reader, Report
from clipstream.data.fields import CaptionExtractor, build_caption, build_transform
from clipstream.data.health import FIRST_PLACES, FIRST_SAMPLES, Budget, Health
from clipstream.data.images import EvalTransform
from clipstream.data.keeping import GIB
from clipstream.data.loader import DataState, Loader, LoaderPlan
from clipstream.data.opening import Opener, is_remote
from clipstream.data.order import Cursor, Mix, Slots, SourceMix, lanes_of_rank, mix
from clipstream.data.plan import OrderPlan, order_plan
from clipstream.data.remote import ShardStore
from clipstream.data.sameness import TOKENIZER, differences, former_hash, order_of
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.shards import expand
from clipstream.data.slab import SlabShape
from clipstream.data.stages import Stopwatch
from clipstream.data.text import Tokenizer
from clipstream.data.tracing import Tracer
from clipstream.data.walk import OnceWalk, OpenShards, Walk, WindowWalk
from clipstream.errors import DataError, SettingsError
from clipstream.world import World

SALT = 7  # of the seed's hash, where an order begins anew
MakeWalk = Callable[[int, int, OpenShards, Callable[[], None]], Walk]  # (source, lane, shards, pulse) -> walk


@dataclass(frozen=True)
class _Stream:
    """All that the feeders of a rank share."""

    names: list[str]
    readers: list[Reader]
    openers: list[Opener]
    mix: Mix
    make_walk: MakeWalk
    slots: Slots
    drawn: dict[int, int]  # lane -> places it filled before the start
    workers: int
    tokenizer: Tokenizer
    store: ShardStore
    traced: int = 0
    opened: list[OpenShards] = field(default_factory=list)  # by this process

    def feeder(self, worker: int, report: Callable[[Report], None], watch: Stopwatch) -> Feeder:
        """The feeder of a worker: every `workers`-th lane of the rank."""
        self.store.alive = watch.touch
        tracer = Tracer(self.traced if worker == 0 else 0)
        feeder = Feeder(
            [], self.slots, self.readers, self.mix, self.tokenizer, Health(self.names), report, watch, tracer
        )
        shards = [
            OpenShards(opener, lambda name=name: feeder.health.sources[name], watch.begin)  # type: ignore[misc]
            for name, opener in zip(self.names, self.openers, strict=True)
        ]
        self.opened.extend(shards)
        for lane in self.slots.lanes[worker :: max(1, self.workers)]:
            walks = [
                self.make_walk(i, lane, shards[i], lambda name=name: feeder.pulse(name))  # type: ignore[misc]
                for i, name in enumerate(self.names)
            ]
            feeder.lanes.append(Lane(lane, walks, self.drawn.get(lane, 0)))
        return feeder

    def plan(self, budget: Budget, image: ImageSpec, depth: int, samples: int, **more: Any) -> LoaderPlan:
        """The loader's plan for this stream, whose largest batch has `samples` of this rank."""
        height, width = image.size
        return LoaderPlan(
            make_feeder=self.feeder,
            workers=self.workers,
            depth=depth,
            shape=SlabShape(samples, height, width, self.tokenizer.context_length),
            slots=self.slots,
            names=self.names,
            budget=budget,
            on_close=self.close,
            **more,
        )

    def close(self) -> None:
        """Give back what this process holds."""
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
) -> Loader:
    """The endless stream of this rank's parts of the global batches.

    Args:
        settings: with `lanes` and `workers` resolved.
        start: the run's data state (all ranks' lanes) to go on from.
        approximate: where `start` belongs to another order of samples, begin another one at its step, and say so.

    Raises:
        SettingsError: no sample for this rank, or `start` belongs to another order of samples.
    """
    lanes, workers = settings.lanes, settings.workers
    assert isinstance(lanes, int) and isinstance(workers, int), "resolve the settings first"
    names = sorted(settings.sources)
    store = _store(settings, lanes, world)
    openers = _openers(settings, store)
    order = order_plan(settings, openers, seed)  # the openers then know what an identity tells of
    identity = order_of(settings, seed, tokenizer, openers)
    start = _going_on(start, identity, former_hash(settings, seed, openers), approximate, world)
    if anew := _anew(start):
        order = order_plan(settings, openers, mix(seed, SALT, anew["salt"]))
    slots = Slots(lanes_of_rank(world.rank, world.size, lanes), lanes, settings.batch_size)
    _nobody_idle(settings, slots, world)
    saved = _saved_lanes(start, slots)
    stream = _Stream(
        names=names,
        readers=[_training_reader(name, settings, image) for name in names],
        openers=openers,
        mix=order.mix,
        make_walk=_window_walks(order, saved),
        slots=slots,
        drawn={lane: int(state["drawn"]) for lane, state in saved.items()},
        workers=min(workers, len(slots.lanes)),
        tokenizer=tokenizer,
        store=store,
        traced=settings.trace if world.is_main else 0,
    )
    plan = stream.plan(
        _budget(settings, {name: opener.names for name, opener in zip(names, openers, strict=True)}),
        image,
        settings.prefetch,
        max(slots.count(step) for step in settings.batch_changes),
        stall_timeout=settings.stall_timeout,
        lanes_total=lanes,
        order=identity,
        **anew,
        device=world.device,
        tail=order.tail if world.is_main else None,
    )
    return Loader(plan, start and {**start, "lanes": {str(lane): state for lane, state in saved.items()}})


def _window_walks(order: OrderPlan, saved: dict[int, dict[str, Any]]) -> MakeWalk:
    def make_walk(source: int, lane: int, shards: OpenShards, pulse: Callable[[], None]) -> Walk:
        cursor = Cursor.load(saved[lane]["cursors"][source]) if lane in saved else Cursor()
        return WindowWalk(order.sources[source], lane, cursor, shards, pulse)

    return make_walk


def _store(settings: DataSettings, lanes: int, world: World) -> ShardStore:
    wanted = _shards_in_use(settings, lanes, world)
    limit = _limit(settings.cache_gib)
    return ShardStore(settings.cache, limit=limit, wanted=wanted, timeout=settings.transfer_timeout)


def _limit(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _shards_in_use(settings: DataSettings, lanes: int, world: World) -> int:
    """Shards from elsewhere that a node's lanes hold at once, at most."""
    node = -(-lanes * world.local_size // world.size)
    counts = (len(set(filter(is_remote, expand(source.shards)))) for source in settings.sources.values())
    return sum(min(count, node * settings.shuffle.shards) for count in counts)


def _openers(settings: DataSettings, store: ShardStore) -> list[Opener]:
    """Of the sources, in the order of their names."""
    return [
        Opener(source, store, cache=settings.cache, place=f"data.sources.{name}")
        for name, source in sorted(settings.sources.items())
    ]


def _nobody_idle(settings: DataSettings, slots: Slots, world: World) -> None:
    for step in settings.batch_changes:
        if slots.count(step) == 0:
            raise SettingsError(
                f"rank {world.rank} of {world.size} gets no sample of a global batch of {settings.batch_size(step)} "
                f"over {slots.total} lanes: use fewer ranks, or a larger --data.global-batch-size, "
                "--data.batch-schedule or --data.lanes"
            )


def _going_on(
    start: DataState | None, order: dict[str, Any], former: str, approximate: bool, world: World
) -> DataState | None:
    """Where to go on; with another order under a new salt, so that it does not begin with samples already seen."""
    changed = {} if start is None else differences(start["plan"], order, former)
    if start is None or not changed:
        return start
    told = "".join(f"\n  {key}: {values}" for key, values in changed.items())
    step, elsewhere = start["step"], changed.keys() - {TOKENIZER}
    goes_on = "the data begin anew, in another order" if elsewhere else "the data go on where they were"
    if not approximate:
        raise SettingsError(
            f"--resume: the checkpoint's data order is not that of these settings:{told}\n"
            f"go back to them, or give --resume-approximate: then the run goes on at step {step}, and {goes_on}"
        )
    if world.is_main:
        print(f"warning: --resume-approximate: from step {step} on, {goes_on}:{told}", file=sys.stderr, flush=True)
    return {**start, "lanes": {}, "salt": int(start.get("salt", 0)) + 1, "began": step} if elsewhere else start


def _anew(start: DataState | None) -> dict[str, int]:
    """How often the order began anew under other settings, and with which batch last; nothing where it never did."""
    return {key: int(start[key]) for key in ("salt", "began")} if start and start.get("salt") else {}


def _saved_lanes(start: DataState | None, slots: Slots) -> dict[int, dict[str, Any]]:
    """The saved states of this rank's lanes."""
    if start is None:
        return {}
    return {lane: start["lanes"][str(lane)] for lane in slots.lanes if str(lane) in start["lanes"]}


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

    A shard that is missing or broken is an error: figures over a part of a data set look like figures of the whole.

    Args:
        target: what becomes ids in place of the caption (class numbers, with a tokenizer that knows them).
        max_samples: only the first so many samples of the source.
        place: key of the settings where `source` stands, for messages.
        cache: folder for spooled shards; None for a temporary one.
        cache_gib: what it may hold; None for no limit.

    Raises:
        DataError: local shards that are not there.
    """
    per_rank = max(1, workers)
    batch_size = max(batch_size, per_rank)
    lanes = world.size * per_rank
    store = ShardStore(cache, limit=_limit(cache_gib), timeout=transfer_timeout)
    opener = Opener(source, store, cache=cache, place=place)
    _all_there(opener, place)

    def make_walk(_: int, lane: int, shards: OpenShards, pulse: Callable[[], None]) -> Walk:
        return OnceWalk(lane, lanes, shards, pulse, max_samples)

    stream = _Stream(
        names=[name],
        readers=[_reader(name, source, EvalTransform(image, source.background, source.orientation == "exif"), target)],
        openers=[opener],
        mix=SourceMix(0, (1.0,)),
        make_walk=make_walk,
        slots=Slots(lanes_of_rank(world.rank, world.size, lanes), lanes, lambda step: batch_size * world.size),
        drawn={},
        workers=workers,
        tokenizer=tokenizer,
        store=store,
    )
    hint = (source.image_key, None if target is not None else source.caption, place)
    budget = Budget({name: len(set(opener.names))}, {name: hint}, 0.0, 1.0)
    ending = {"stall_timeout": stall_timeout, "lanes_total": lanes, "order": {}, "ends": True}
    return Loader(stream.plan(budget, image, 2, batch_size, **ending))


def _all_there(opener: Opener, place: str) -> None:
    if absent := opener.missing:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        shards = f"of {len(opener.names)} shards, {absent[0]}{more} {'are' if more else 'is'} not there"
        raise DataError(f"{place}.shards: {shards}")


def _training_reader(name: str, settings: DataSettings, image: ImageSpec) -> Reader:
    source = settings.sources[name]
    upright = source.orientation != "stored"
    transform = TrainTransform(image, settings.augment, source.background, upright, settings.decoder)
    return _reader(name, source, transform)


def _reader(
    name: str, source: SourceSettings, image: TrainTransform | EvalTransform, target: CaptionExtractor | None = None
) -> Reader:
    caption = build_caption(source.caption) if target is None else target
    return Reader(name, source.image_key, caption, image, build_transform(source.transform))


def _budget(settings: DataSettings, urls: dict[str, list[str]]) -> Budget:
    hints = {
        name: (source.image_key, source.caption, f"data.sources.{name}") for name, source in settings.sources.items()
    }
    totals = {name: len(set(shards)) for name, shards in urls.items()}
    first = FIRST_PLACES if settings.sampling.mode == "indexed" else FIRST_SAMPLES
    shares = settings.max_shard_failures, settings.max_sample_failures
    return Budget(totals, hints, *shares, settings.on_shard_error, first)
