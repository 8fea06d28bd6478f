"""Settings by the size of the data: what training takes where the user set nothing, and why.

Facts enter; settings with their reasons leave. Data of more than `LARGE` samples, or of an unknown number, have the
usual defaults. docs/training.md has the measurements behind the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipstream.checkpoint import store
from clipstream.config.settings import Settings, open_sources
from clipstream.data.sources import Source, SourceContext
from clipstream.data.sources.indexes import count_samples
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, absent
from clipstream.evals.settings import sources_of
from clipstream.text import counted
from clipstream.utils.logs import announce

LARGE = 100_000  # samples
COUNTED = 256  # shards at most whose samples are counted for this
BATCHES = 32, 512  # smallest and largest batch
PASS = 10  # batches of a pass over the data, at least
FRESH = 20_000, (10, 40)  # samples of a run without weights, and passes at least and at most
TUNED = 10_000, (3, 10)  # the same of a run that begins with weights
TUNED_LR = 1e-5
EVALS = 10  # evaluations of `val` in a run, at most
TRAINED = 4  # samples of training between two evaluations, for each one that is evaluated
LONG = 20_000  # steps of a run that is planned by itself, whatever the size of its data
LEFT_OUT = 0.05  # share of the samples that a pass may leave out
BATCH, MODE, REMAINDER = "data.global_batch_size", "data.sampling.mode", "data.sampling.remainder"
STEPS, WARMUP, LR, EVERY = "train.steps", "schedule.warmup", "optim.lr", "evals.val.every"
LENGTHS = (STEPS, "train.samples", "train.epochs")
Choice = tuple[str, Any, str]  # key, value, reason


@dataclass(frozen=True)
class Facts:
    """What the rules depend on."""

    samples: int  # of the training data
    ranks: int
    fresh: bool  # whether training begins without weights
    values: Mapping[str, Any]  # of the user, or else the defaults, by key
    free: frozenset[str]  # keys that the user did not set
    group: int = 1  # samples whose multiple a batch is
    evaluated: int = 0  # samples of `val`


def batch_of(samples: int) -> int:
    """The batch for data of so many samples."""
    return max(min(1 << max(samples // PASS, 1).bit_length() - 1, BATCHES[1]), BATCHES[0])


def choose(facts: Facts) -> Iterator[Choice]:
    """The settings that differ from `facts.values`; each follows from those before it."""
    n, values = facts.samples, dict(facts.values)

    def chosen(key: str, value: Any, reason: str) -> Iterator[Choice]:
        if key in facts.free and value != values[key]:
            values[key] = value
            yield key, value, reason

    batch = max(batch_of(n), facts.ranks)
    batch = batch + -batch % facts.group if BATCH in facts.free else values[BATCH]
    pads = values[MODE] == "indexed" and n % batch > LEFT_OUT * n and REMAINDER in facts.free
    drops = values[MODE] == "indexed" and values[REMAINDER] == "drop" and not pads
    a_pass = n // batch if drops else -(-n // batch)
    yield from chosen(BATCH, batch, f"batch {batch}: a pass over {n:,} samples has {a_pass} steps; --batch-size")
    if pads:
        text = f"remainder pad: the last {n % batch} samples of a pass are used as well; --{REMAINDER}"
        yield from chosen(REMAINDER, "pad", text)
    samples, (fewest, most) = FRESH if facts.fresh else TUNED
    passes = min(max(round(samples / n), fewest), most)
    enough = 0 if WARMUP in facts.free else 2 * values[WARMUP]
    steps = max(passes * a_pass, enough)
    yield from chosen(STEPS, steps, f"steps {steps}: {steps / a_pass:.0f} passes; --steps or --epochs")
    steps, samples, epochs = (values[key] for key in LENGTHS)
    if steps is None:
        steps = math.ceil(epochs * a_pass) if samples is None else -(-samples // batch)
    if not facts.fresh:
        yield from chosen(LR, TUNED_LR, f"learning rate {TUNED_LR:g}: training begins with weights; --lr")
    if steps > LONG:
        return
    yield from chosen(WARMUP, steps // 20, f"warm-up {steps // 20} steps: 5% of the run; --warmup")
    every = steps // EVALS and max(steps // EVALS, -(-TRAINED * facts.evaluated // batch))
    every = every if every < steps else 0  # at the end only, of a run of a few steps
    told = f"every {every} steps: {-(-steps // every)} times" if every else "at the end"
    yield from chosen(EVERY, every, f"val evaluated {told}; --{EVERY}")


def by_size(settings: Settings, ranks: int, samples: int | None = None) -> tuple[Settings, list[str]]:
    """The settings with what is chosen by the size of the data, and the lines that say so.

    Args:
        samples: that training uses, if they are known.
    """
    keys = [BATCH, MODE, REMAINDER, WARMUP, LR, *LENGTHS, *([EVERY] if "val" in settings.evals else [])]
    values = {key: getattr(_section(settings, key), key.rpartition(".")[2]) for key in keys}
    free = {key for key in keys if key.rpartition(".")[2] not in _section(settings, key).model_fields_set}
    if any(values[key] is not None for key in LENGTHS):
        free -= {STEPS}
    if isinstance(settings.train.micro_batch_size, int) or settings.data.lanes != "auto":
        free -= {BATCH}
    if EVERY in values and settings.evals["val"].every_epochs is not None:
        free -= {EVERY}
    planned = settings.data.batch_schedule or settings.train.epoch_samples is not None
    samples = None if planned or not free else samples or _samples(settings)
    if samples is None or samples > LARGE:
        return settings, []
    group = settings.data.groups.samples if settings.data.groups.by is not None else 1
    evaluated = _evaluated(settings, samples) if EVERY in free else 0
    choices = [*choose(Facts(samples, ranks, settings.model.is_fresh, values, frozenset(free), group, evaluated))]
    for key, value, _ in choices:
        settings = _with(settings, *key.split("."), value)
    settings._chosen = {key: (value, values[key]) for key, value, _ in choices}
    return settings, [f"{reason} sets it" for *_, reason in choices]


def with_one_choice(settings: Settings, world: World) -> Settings:
    """The settings with what `by_size` chose on rank 0: ranks may see other data, or none. Collective."""
    return with_choice(settings, world.broadcast_object(settings._chosen))


def with_choice(settings: Settings, chosen: dict[str, tuple[Any, Any]]) -> Settings:
    """The settings with another choice of `by_size` than their own."""
    usual = {key: (value, value) for key, (_, value) in settings._chosen.items()}
    for key, (value, _) in {**usual, **chosen}.items():
        settings = _with(settings, *key.split("."), value)
    settings._chosen = chosen
    return settings


def with_recorded_batch(settings: Settings, world: World) -> Settings:
    """The settings with the global batch of the run that is resumed, where `--batch-size` of each of other ranks would
    make another one: a run goes on with the same global batches on any number of ranks.
    """
    resume, node, now = (
        settings.checkpoint.resume,
        settings.places.at(tuple(BATCH.split("."))),
        settings.data.global_batch_size,
    )
    if resume is None or node is None or node.place != "--batch-size" or settings.checkpoint.resume_approximate:
        return settings
    by_name = resume in ("latest", "auto")
    path = Path(resume) if not by_name else settings.run_folder / "checkpoints" if settings.run.name else None
    kept = None if path is None else store.global_batch_size(path)
    if kept is None or kept == now or kept % (now // world.size):  # refused later, as another order of the data
        return settings
    if world.is_main:
        text = (
            f"the run's global batch of {kept} stays: --batch-size on {counted(world.size, 'rank')} would make it {now}"
        )
        announce(f"resume   {text}; if memory is short: --train.micro-batch-size {now // world.size}")
    return settings.model_copy(update={"data": _with(settings.data, "global_batch_size", kept)})


def _samples(settings: Settings) -> int | None:
    """Samples of the training data; None where there are none, or where counting takes long."""
    total = 0
    if any(source.keep or source.probability for source in settings.data.sources.values()):
        return None
    try:
        sources = open_sources(settings)
    except ClipstreamError as error:
        settings._unread = error
        return None
    unset = all(getattr(settings.train, key.rpartition(".")[2]) is None for key in LENGTHS)
    for source in sources.values() if unset else ():
        if missing := source.missing:
            some = f"{len(missing):,} of {len(source.names):,} shards: " if len(source.names) > 1 else ""
            settings._unread = SettingsError(f"{source.context.key}.shards: {some}{absent(missing[0])}")
            return None
    try:
        for source in sources.values():
            if (found := _count(source)) is None:
                return None
            total += found
    except ClipstreamError:  # it is raised again where the data are needed
        return None
    return round(total * (1 - (settings.data.val_split or 0))) or None


def _count(source: Source) -> int | None:
    """Samples of a source; None where counting takes long."""
    if source.samples is None and len(source.names) > COUNTED:
        return None
    return sum(count_samples(source)) if source.samples is None else source.samples


def _evaluated(settings: Settings, samples: int) -> int:
    """Samples of the evaluator `val`, beside `samples` of training; 0 if they are not known."""
    share, val, found = settings.data.val_split, settings.evals["val"], 0
    if share is not None:
        found = round(samples * share / (1 - share))
    else:
        for key, section in sources_of(val).items():
            with suppress(ClipstreamError):  # it is raised again where they are needed
                found += _count(Source(section, SourceContext(cache=settings.data.cache, key=f"evals.val.{key}"))) or 0
    return min(found, getattr(val, "max_samples", None) or found)


def _section(settings: Settings, key: str) -> Any:
    found: Any = settings
    for part in key.split(".")[:-1]:
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found


def _with(section: Any, key: str, *rest: Any) -> Any:
    """A copy of a section, or of a mapping of sections, with a value at a path: keys, and then the value."""
    if isinstance(section, Mapping):
        return {**section, key: _with(section[key], *rest)}
    return section.model_copy(update={key: rest[0] if len(rest) == 1 else _with(getattr(section, key), *rest)})
