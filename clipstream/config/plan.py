"""The plan of a run: what follows from its settings, its data and the run that it goes on with.

Settings as they were written enter. `survey` lists the training data that they name, once, and counts their samples
where that is cheap. `plan` makes the settings in effect from them, and `draft` the part of it that is checked before
the ranks meet. `Survey` and `Plan` are frozen: with more facts (held-out samples, the counts of rank 0, a checkpoint),
another one is made. Imports no torch; `train.build_plan` adds what needs it.

Choices by the size of the data are made where the user set nothing. Data of more than `LARGE` samples, or of an unknown
number, have the usual defaults. docs/training.md has the measurements behind the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from clipstream.checkpoint import store
from clipstream.config.settings import Settings, Written, load_settings
from clipstream.config.value_tree import Node
from clipstream.data.order import default_lanes
from clipstream.data.settings import SPLIT_FILE, DataSettings, split_counts
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext, list_sources
from clipstream.data.sources.indexes import count_samples
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, absent, errors_as
from clipstream.evals.settings import EvalSettings, eval_name, sources_of
from clipstream.storage.shard_url import ShardURL
from clipstream.text import counted
from clipstream.training.optim import ConstCooldown
from clipstream.training.settings import CheckpointSettings
from clipstream.utils.logs import announce
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import value_at
from clipstream.wing import make_held_out

if TYPE_CHECKING:
    from clipstream.data.loader.stored import StoredData
    from clipstream.data.order.windows import EpochPlan
    from clipstream.training.state import TrainState

Cadence = TypeVar("Cadence", CheckpointSettings, EvalSettings)

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
EPOCH, LANES = "train.epoch_samples", "data.lanes"
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

    def propose(key: str, value: Any, reason: str) -> Iterator[Choice]:
        if key in facts.free and value != values[key]:
            values[key] = value
            yield key, value, reason

    batch = max(batch_of(n), facts.ranks)
    batch = batch + -batch % facts.group if BATCH in facts.free else values[BATCH]
    pads = values[MODE] == "indexed" and n % batch > LEFT_OUT * n and REMAINDER in facts.free
    drops = values[MODE] == "indexed" and values[REMAINDER] == "drop" and not pads
    a_pass = n // batch if drops else -(-n // batch)
    if not a_pass:  # less than a batch, which is refused where the epochs are planned
        return
    yield from propose(BATCH, batch, f"batch {batch}: a pass over {n:,} samples has {a_pass} steps; --batch-size")
    if pads:
        text = f"remainder pad: the last {n % batch} samples of a pass are used as well; --{REMAINDER}"
        yield from propose(REMAINDER, "pad", text)
    samples, (fewest, most) = FRESH if facts.fresh else TUNED
    passes = min(max(round(samples / n), fewest), most)
    enough = 0 if WARMUP in facts.free else 2 * values[WARMUP]
    steps = max(passes * a_pass, enough)
    yield from propose(STEPS, steps, f"steps {steps}: {steps / a_pass:.0f} passes; --steps or --epochs")
    steps, samples, epochs = (values[key] for key in LENGTHS)
    if steps is None:
        steps = math.ceil(epochs * a_pass) if samples is None else -(-samples // batch)
    if not facts.fresh:
        yield from propose(LR, TUNED_LR, f"learning rate {TUNED_LR:g}: training begins with weights; --lr")
    if steps > LONG:
        return
    yield from propose(WARMUP, steps // 20, f"warm-up {steps // 20} steps: 5% of the run; --warmup")
    every = steps // EVALS and max(steps // EVALS, -(-TRAINED * facts.evaluated // batch))
    every = every if every < steps else 0  # at the end only, of a run of a few steps
    told = f"every {every} steps: {-(-steps // every)} times" if every else "at the end"
    yield from propose(EVERY, every, f"val evaluated {told}; --{EVERY}")


@dataclass(frozen=True)
class Survey:
    """What the settings of a run name, looked at once on this rank, before the ranks meet."""

    settings: Settings  # as they were written
    places: Node  # where
    sources: Mapping[str, Source]  # of training by name, sorted, listed; without those that cannot be
    error: ClipstreamError | None = None  # why the training data cannot be listed
    samples: int | None = None  # of the training data; None where counting takes long, or they are not all used
    evaluated: int = 0  # samples of the evaluator `val`
    batch: int | None = None  # global batch of the run that goes on, where --batch-size would make another one
    split: Path | None = None  # names of the samples that `data.val_split` holds out
    free: frozenset[str] = frozenset()  # keys that may be chosen by the size of the data
    held_out: SourceSettings | None = None  # what the evaluator `val` reads these samples from


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    survey: Survey
    settings: Settings  # in effect: as written, with all that follows
    choices: tuple[Choice, ...] = ()  # by the size of the data
    epochs: EpochPlan | None = None  # of the mode `indexed`
    stored: StoredData | None = None  # features in the place of towers or of teachers
    whole: Settings | None = None  # of the run, where `settings` are those of one of its stages

    @property
    def recorded(self) -> Settings:
        """The settings for the run's files: with the list of held-out samples in the run's folder."""
        if self.survey.split is None:
            return self.settings
        return _split_by(self.settings, self.settings.run_folder / SPLIT_FILE, self.settings.evals["val"].data)

    @property
    def repeatable(self) -> Settings:
        """As `recorded`, without an epoch's length that the data determine again."""
        known = self.survey.split is not None and self.epochs is None  # the samples that are left are in no index
        recorded = self.recorded if self.whole is None else replace(self, settings=self.whole, whole=None).recorded
        return recorded if known else with_value(recorded, EPOCH, self.survey.settings.train.epoch_samples)


class Stage(NamedTuple):
    """Steps of a run with the same settings."""

    name: str  # '' for the last one, which has the run's own
    begin: int  # steps done before it
    end: int  # steps done after it
    plan: Plan
    later: float = 0.0  # samples of later stages, in those of this stage that have the same FLOPs; on rank 0

    @property
    def last(self) -> bool:
        """Whether the run ends with it."""
        return not self.name


def staged(made: Plan) -> list[Stage]:
    """The stages of a run, in order, with all of its settings in each; one stage where the settings name none.

    Raises SettingsError: a value of a stage is wrong, or does not go together with others.
    """
    found, begin = [], 0
    for name, stage in sorted(made.settings.stages.items(), key=lambda item: item[1].until):
        settings, seen = _settings_in_stage(made.settings, name), made.survey
        if any(key.startswith("data.sources.") for key in stage.set):
            again = survey(settings, count=False)
            if again.error is not None:
                raise SettingsError(f"stages.{name}.set: {again.error}")
            seen = replace(seen, sources=again.sources)
        part = replace(made, survey=seen, settings=settings, whole=made.settings)
        found.append(Stage(name, begin, stage.until, part))
        begin = stage.until
    return [*found, Stage("", begin, made.settings.total_steps, made)]


def _settings_in_stage(settings: Settings, name: str) -> Settings:
    """The settings in effect in a stage. Raises SettingsError: names the stage, the key and what is wrong."""
    changed = settings.stages[name].set
    for key in changed:
        section, _, source = key.removesuffix(f".{key.rpartition('.')[2]}").rpartition(".")
        if section == "data.sources" and source not in settings.data.sources:
            raise SettingsError(f"stages.{name}.set.{key}: the run has no {source}")
    with errors_as(SettingsError, f"stages.{name}.set", SettingsError):
        return load_settings(settings, changed)


def survey(written: Written | Settings, *, count: bool = True) -> Survey:
    """List the training data of the settings; errors are kept in the result. With `count`, settings follow from the
    numbers of samples, as those of a run do.
    """
    settings, places = written if isinstance(written, Written) else (written, Node())
    train, data = settings.train, settings.data
    errors: list[ClipstreamError] = []
    sources = list_sources(data, errors)
    error = next(iter(errors), None)
    if not count:
        return Survey(settings, places, sources, error)
    if error is None and train.steps is train.samples is train.epochs is None:  # else training counts missing shards
        for source in sources.values():
            if missing := source.missing:
                some = f"{len(missing):,} of {len(source.names):,} shards: " if len(source.names) > 1 else ""
                error = error or SettingsError(f"{source.context.key}.shards: {some}{absent(missing[0])}")
    free = _free(settings)
    samples = None if error is not None or not free else _samples(settings, sources)
    evaluated = _count_evaluated(settings) if samples is not None and EVERY in free else 0
    return Survey(settings, places, sources, error, samples, evaluated, free=free)


def draft(found: Survey, ranks: int) -> Plan:
    """The part of a plan that settings and data alone give: choices, epochs, held-out samples.

    Raises:
        SettingsError: the mode is `indexed`, and the numbers of samples are not known.
        DataError: a manifest cannot be read.
    """
    settings, choices = choose_by_size(found, ranks)
    data, epochs, samples = settings.data, None, None
    in_epochs = [settings.train.epochs, settings.checkpoint.every_epochs]
    in_epochs += [one.every_epochs for one in settings.evals.values()]
    if settings.train.epoch_samples is not None or found.error is not None:
        pass
    elif data.sampling.mode == "indexed" and data.sources:
        from clipstream.data.order_plan import epoch_plan  # imports NumPy and the decoders

        epochs = epoch_plan(data, list(found.sources.values()))
        samples = epochs.steps * data.global_batch_size
    elif any(every is not None for every in in_epochs):
        counts = [source.samples for source in found.sources.values()]
        samples = None if not counts or None in counts else sum(one or 0 for one in counts)
        if samples is not None and found.split is not None:
            held, usable = split_counts(found.split)
            samples = (usable or samples) - held
    settings = settings if samples is None else with_value(settings, EPOCH, samples)
    if found.split is not None:
        settings = _split_by(settings, found.split, found.held_out)
    return Plan(found, settings, choices, epochs)


def plan(found: Survey, ranks: int, state: TrainState | None = None) -> Plan:
    """The plan of a run on so many ranks, but for what needs torch (see `train.build_plan`), from what `agree` gives.
    Lanes and shuffling of the state that the run goes on from stay.

    Raises: as `draft`.
    """
    made = draft(found, ranks)
    settings = _in_steps(made.settings)
    lanes = None if state is None or settings.data.lanes != "auto" else state.data.lanes_total
    settings = with_value(settings, "data", with_lanes(settings.data))
    if state is not None and lanes is not None and ranks <= lanes <= min(settings.data.batch_sizes):
        settings = with_value(settings, LANES, lanes)
        shards = state.data.fingerprint.get("data.shuffle.shards")
        if settings.data.shuffle.open_shards is None and isinstance(shards, int) and shards > 0:
            settings = with_value(settings, "data.shuffle.shards", shards)
    return replace(made, settings=settings)


def agree(found: Survey, world: World) -> Survey:
    """What the ranks found, with the counts of rank 0, as ranks may see other data, and the run's name. Collective."""
    name = found.settings.run.name
    if name is None and world.is_main:
        name = _make_dated_name(draft(found, world.size).settings)
    samples, evaluated, name = world.broadcast_object((found.samples, found.evaluated, name))
    settings = with_value(found.settings, "run.name", name)
    return replace(found, settings=settings, samples=samples, evaluated=evaluated)


def hold_out(found: Survey, world: World) -> Survey:
    """What was found, with the list of the samples that `data.val_split` holds out. A run that is resumed has its own
    list; else it is made, unless the cache has it.

    Raises:
        SettingsError: too few samples can be held out, or the run that is resumed has trained on all of them, or it
            holds out some and these settings do not.
        DataError: a table cannot be read.
    """
    settings, data = found.settings, found.settings.data
    path = _list_of_resumed(settings)
    if data.val_split is None:
        if path is not None and not any(source.drop for source in data.sources.values()):
            what = f"{path.parent} holds samples out of its training data ({SPLIT_FILE})"
            advice = f"add --val-split, or --config {path.parent / 'config.yaml'}"
            raise SettingsError(f"checkpoint.resume: {what}: {advice}")
        return found
    ((name, section),) = data.sources.items()
    if path is None:
        path = make_held_out(section, data.val_split, data, f"data.sources.{name}")
    elif world.is_main:
        text = counted(split_counts(path)[0], "sample", ",")
        announce(f"val_split {text} held out for the evaluator val, as in {path.parent}, whatever --val-split is now")
    source = found.sources[name].with_settings(section.model_copy(update={"drop": str(path)}))
    return replace(found, sources={name: source}, split=path, held_out=_source_for_evaluation(section))


def _source_for_evaluation(source: SourceSettings) -> SourceSettings:
    """The source as an evaluation reads its training data; of a folder with splits, the split for training."""
    from clipstream.data.sources.folders import with_split  # imports the decoders

    rest: dict[str, Any] = {"drop": None, "weight": 1.0, "upsampling_factors": None, "probability": None}
    if not is_plugin(source.type):
        rest["shards"] = [with_split(part, source.type, source.image_key) for part in source.parts]
    return source.model_copy(update=rest)


def _list_of_resumed(settings: Settings) -> Path | None:
    """The names of the samples that the run to go on from holds out; None for a new run, or a remote checkpoint."""
    resume, began = settings.checkpoint.resume, True
    by_name = resume in ("latest", "auto")
    if resume is None:
        return None
    if by_name or ShardURL(resume).scheme is not None:
        if settings.run.name is None:
            return None
        run = settings.run_folder
        began = by_name and bool(store.candidates(run / "checkpoints"))
    else:
        path = Path(resume).resolve()
        around = [path, *path.parents[:2]]  # the run's folder, the one of its checkpoints, or what is in that
        run = next((one for one in around if (one / "checkpoints").is_dir()), path if path.is_dir() else path.parent)
    if (run / SPLIT_FILE).is_file():
        return run / SPLIT_FILE
    if began and settings.data.val_split is not None:
        raise SettingsError(
            f"data.val_split: not supported with --resume of {run}, which has no {SPLIT_FILE} and so has trained on "
            "all samples: begin a new run, or evaluate other data (--val-data)"
        )
    return None


def _split_by(settings: Settings, path: Path, evaluated: SourceSettings | None) -> Settings:
    """The settings with a file of the names of held-out samples, and the source that the evaluator reads."""
    assert evaluated is not None
    trained = {name: one.model_copy(update={"drop": str(path)}) for name, one in settings.data.sources.items()}
    data = settings.data.model_copy(update={"val_split": None, "sources": trained})
    kept = evaluated.model_copy(update={"keep": str(path)})
    split: Settings = with_value(with_value(settings, "data", data), "evals.val.data", kept)
    return split


def keep_batch(found: Survey, world: World) -> Survey:
    """What was found, with the global batch of the run that is resumed, where `--batch-size` of each of other ranks
    would make another one: a run goes on with the same global batches on any number of ranks.
    """
    settings = found.settings
    resume, now = settings.checkpoint.resume, settings.data.global_batch_size
    node = found.places.at(tuple(BATCH.split(".")))
    if resume is None or node is None or node.place != "--batch-size" or settings.checkpoint.resume_approximate:
        return found
    by_name = resume in ("latest", "auto")
    path = Path(resume) if not by_name else settings.run_folder / "checkpoints" if settings.run.name else None
    kept = None if path is None else store.global_batch_size(path)
    if kept is None or kept == now or kept % (now // world.size):  # refused later, as another order of the data
        return found
    if world.is_main:
        text = f"global batch of {kept} stays: --batch-size on {counted(world.size, 'rank')} would make it {now}"
        announce(f"resume   the run's {text}; if memory is short: --train.micro-batch-size {now // world.size}")
    return replace(found, batch=kept)


def _choosable(settings: Settings) -> dict[str, tuple[Any, str]]:
    """By key, the section and the name of each setting that choices depend on."""
    keys = [BATCH, MODE, REMAINDER, WARMUP, LR, *LENGTHS, *([EVERY] if "val" in settings.evals else [])]
    return {key: (value_at(settings, key.split(".")[:-1]), key.rpartition(".")[2]) for key in keys}


def _free(settings: Settings) -> frozenset[str]:
    """The keys that may be chosen, as the user set nothing."""
    if settings.data.batch_schedule or settings.train.epoch_samples is not None:
        return frozenset()
    free = {key for key, (section, name) in _choosable(settings).items() if name not in section.model_fields_set}
    if not settings.train.steps is settings.train.samples is settings.train.epochs is None:
        free -= {STEPS}
    if isinstance(settings.train.micro_batch_size, int) or settings.data.lanes != "auto":
        free -= {BATCH}
    if EVERY in free and settings.evals["val"].every_epochs is not None:
        free -= {EVERY}
    return frozenset(free)


def choose_by_size(found: Survey, ranks: int) -> tuple[Settings, tuple[Choice, ...]]:
    """The settings with the batch of a run that goes on, and with what is chosen by the size of the data."""
    settings = found.settings if found.batch is None else with_value(found.settings, BATCH, found.batch)
    choices = tuple(_choices(settings, found, ranks))
    for key, value, _ in choices:
        settings = with_value(settings, key, value)
    return settings, choices


def _choices(settings: Settings, found: Survey, ranks: int) -> Iterator[Choice]:
    """What is chosen by the size of the data."""
    free, share, samples = found.free, settings.data.val_split, found.samples
    held, usable = (0, None) if found.split is None else split_counts(found.split)
    if usable is not None:
        samples = usable - held
    elif samples is not None and share is not None:
        samples = round(samples * (1 - share))
    if not free or not samples or samples > LARGE:
        return
    group = settings.data.groups.samples if settings.data.groups.by is not None else 1
    evaluated = 0
    if EVERY in free:
        most = getattr(settings.evals["val"], "max_samples", None)
        evaluated = found.evaluated if share is None else round(samples * share / (1 - share))
        evaluated = min(evaluated, most or evaluated)
    values = {key: getattr(section, name) for key, (section, name) in _choosable(settings).items()}
    yield from choose(Facts(samples, ranks, settings.model.is_fresh, values, free, group, evaluated))


def _samples(settings: Settings, sources: Mapping[str, Source]) -> int | None:
    """Samples of the training data; None where there are none, or where counting takes long."""
    if any(source.keep or source.probability for source in settings.data.sources.values()):
        return None
    # Counts are part of the order of a source that is known to have them, which is that of the mode `indexed` alone.
    own = settings.data.sampling.mode == "indexed"
    counts = [_count(one if own else one.with_settings(one.settings)) for one in sources.values()]
    return None if None in counts else sum(one or 0 for one in counts)


def _count(source: Source) -> int | None:
    """Samples of a source; None where counting takes long, or fails, which is raised where they are needed."""
    if source.samples is not None:
        return source.samples
    with suppress(ClipstreamError):
        return sum(count_samples(source)) if len(source.names) <= COUNTED else None
    return None


def _count_evaluated(settings: Settings) -> int:
    """Samples of the data of `val`; 0 if they are not known."""
    total = 0
    for key, section in sources_of(settings.evals["val"]).items() if settings.data.val_split is None else ():
        with suppress(ClipstreamError):
            total += _count(Source(section, SourceContext(cache=settings.data.cache, key=f"evals.val.{key}"))) or 0
    return total


def with_lanes(data: DataSettings) -> DataSettings:
    """The settings with the number of lanes that `auto` stands for."""
    return data if data.lanes != "auto" else with_value(data, "lanes", default_lanes(min(data.batch_sizes)))


def _in_steps(settings: Settings) -> Settings:
    """The settings with intervals in steps, and the metric of the best checkpoint where one follows from others."""
    train, schedule, checkpoint = settings.train, settings.schedule, _every_in_steps(settings.checkpoint, settings)
    if isinstance(schedule, ConstCooldown.Settings) and schedule.cooldown_epochs is not None:
        cooldown = settings.data.steps_for(math.ceil(schedule.cooldown_epochs * (train.epoch_samples or 0)))
        schedule = schedule.model_copy(update={"cooldown": cooldown, "cooldown_epochs": None})
    if checkpoint.keep_best is None and train.early_stop.metric is not None:
        # A run that ends because its evaluations get no better has had its best checkpoint before.
        best = {"keep_best": train.early_stop.metric, "keep_best_by": train.early_stop.metric_by}
        checkpoint = checkpoint.model_copy(update=best)
    evals = {key: _every_in_steps(section, settings) for key, section in settings.evals.items()}
    val = evals.get("val")
    if checkpoint.keep_best is None and val is not None and val.every and val.best_metric is not None:
        metric = f"{'mean_' if getattr(val, 'languages', None) else ''}{val.best_metric}"
        checkpoint = with_value(checkpoint, "keep_best", f"{eval_name('val', val.kinds[0])}/{metric}")
    return settings.model_copy(update={"checkpoint": checkpoint, "schedule": schedule, "evals": evals})


def _every_in_steps(section: Cadence, settings: Settings) -> Cadence:
    """The section with its interval in steps, at least one."""
    if section.every_epochs is None:
        return section
    epoch = (settings.train.epoch_samples or 0) / settings.data.global_batch_size
    return section.model_copy(update={"every": max(1, round(section.every_epochs * epoch)), "every_epochs": None})


def _make_dated_name(settings: Settings) -> str:
    """As 2026_11_21-10_30_00-model_ViT-B-32-b_512, with a number added if that folder exists."""
    model = settings.model.name
    model = Path(model).stem if model.endswith(".json") else re.sub(r"^[a-z-]+:", "", model)
    model = re.sub(r"[^\w.-]+", "-", model).strip("-")
    dated = f"{datetime.now():%Y_%m_%d-%H_%M_%S}-model_{model}-b_{settings.data.global_batch_size}"
    names = (dated if number == 1 else f"{dated}-{number}" for number in count(1))
    return next(one for one in names if not (Path(settings.run.logs) / one).exists())


def with_value(section: Any, key: str, value: Any) -> Any:
    """A copy of a section, or of a mapping of sections, with a value at a dotted key."""
    first, _, rest = key.partition(".")
    if isinstance(section, Mapping):
        return {**section, first: with_value(section[first], rest, value)}
    return section.model_copy(update={first: with_value(getattr(section, first), rest, value) if rest else value})
