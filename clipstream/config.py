"""Owns the tree of settings: its sections, how it is loaded, resolved and written down.

Never imports torch, and never trains, reads data or starts processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, TypeVar

import yaml
from pydantic import Field, PrivateAttr, SerializeAsAny, ValidationError

from clipstream.data.settings import DataSettings, TokenizerSettings
from clipstream.errors import SettingsError
from clipstream.evals.settings import EvalSettings
from clipstream.flags import flag_layer, split
from clipstream.layers import Dumper, Layer, Places, merged, merged_texts, yaml_layer
from clipstream.model.settings import LossSettings, ModelSettings
from clipstream.report.settings import LogSettings
from clipstream.schema import Path, annotation_at, fit, kinds
from clipstream.section import Section
from clipstream.training.settings import (
    CheckpointSettings,
    OptimSettings,
    RunSettings,
    ScheduleSettings,
    TrainSettings,
)
from clipstream.wording import joined, problem, worded
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.data.epochs import EpochPlan
    from clipstream.data.opening import Opener

LANES = 48


class Settings(Section):
    """Everything that a run can be told."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    tokenizer: SerializeAsAny[TokenizerSettings] = Field(
        default_factory=lambda: TokenizerSettings.model_validate({"type": "model"})
    )
    data: DataSettings = Field(default_factory=DataSettings)
    loss: SerializeAsAny[LossSettings] = Field(default_factory=lambda: LossSettings.model_validate({"type": "auto"}))
    optim: OptimSettings = Field(default_factory=OptimSettings)
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    evals: dict[str, SerializeAsAny[EvalSettings]] = Field(default_factory=dict, description="evaluators by name")
    log: LogSettings = Field(default_factory=LogSettings)

    _places: Places = PrivateAttr(default_factory=Places)
    _told_by_data: bool = PrivateAttr(default=False)  # whether the data said how long an epoch is
    _epochs: EpochPlan | None = PrivateAttr(default=None)

    @property
    def places(self) -> Places:
        """Where each setting was given."""
        return self._places

    @property
    def epochs(self) -> EpochPlan | None:
        """The epochs of the mode `indexed`, once they are known (see `with_known_epoch`)."""
        return self._epochs

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, from steps, samples or epochs.

        Raises:
            SettingsError: none of them is set.
        """
        return self.train.total_steps(self.data.steps_for)

    @property
    def run_folder(self) -> FilePath:
        """LOGS/NAME, once the name is known.

        Raises:
            SettingsError: the run has no name yet (see `resolve`).
        """
        if self.run.name is None:
            raise SettingsError("run.name: the run has no name yet: give --name")
        return FilePath(self.run.logs) / self.run.name


def load(argv: Sequence[str], *, ranks: int | None = None, trains: bool = True) -> Settings:
    """The settings that `argv` describes: defaults, then each `--config` file in order, then flags.

    Args:
        argv: the command line without the program's name and without the flags of a verb's own.
        ranks: processes of the run, for `--batch-size`; what the launcher says unless given.
        trains: whether there is a source to train on; without, `--caption-json` and its like are --val-data's.

    Raises:
        SettingsError: everything that is wrong, one line each, with file and line or flag.
    """
    problems: list[str] = []
    configs, given = split(argv, problems)
    files = [yaml_layer(file, problems) for file in configs]
    ranks = World.from_env().size if ranks is None else ranks
    layers = [*files, flag_layer(Settings, given, files, ranks, problems, trains=trains)]
    texts = merged_texts(layers)
    places = Places(tuple(layer.places for layer in reversed(layers)))
    tree = fit(Settings, merged(Settings, layers), (), texts)
    bare = _bare_flags(tree, layers[-1])
    problems += [f"{places.of(path)}: needs a value" for path in bare]
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        said = {places.of(path) for path in bare}
        lines = worded(Settings, tree, error, places)
        problems += [line for line in lines if line.partition(":")[0] not in said]
    if problems:
        raise SettingsError(joined(problems))
    settings._places = places
    return settings


def _bare_flags(tree: dict[str, object], flags: Layer) -> list[Path]:
    """Flags without a value whose key is no switch. Unknown keys are told as such instead."""
    found = [(path, annotation_at(Settings, tree, path)) for path in sorted(flags.bare, key=str)]
    return [path for path, annotation in found if annotation is not None and bool not in kinds(annotation)]


def with_known_epoch(settings: Settings) -> Settings:
    """The settings with the samples of an epoch, where an epoch is asked for and only the data say how long it is.

    In the mode `indexed` the data always do: a whole number of batches, with what the tail adds or leaves out.

    Raises:
        SettingsError: a source's shards cannot be listed; or the mode is `indexed`, and nothing tells how many samples
            they hold.
        DataError: a manifest cannot be read.
    """
    if settings.data.sampling.mode == "indexed" and settings.data.sources:
        return _with_exact_epoch(settings)
    asked = settings.train.epochs is not None or any(section.every_epochs for _, section in cadences(settings))
    if not asked or settings.train.epoch_samples is not None:
        return settings
    samples = [opener.samples for opener in openers(settings).values()]
    if not samples or None in samples:
        return settings
    return _with_epoch(settings, sum(count for count in samples if count is not None))


def _with_exact_epoch(settings: Settings) -> Settings:
    from clipstream.data.plan import epoch_plan

    if settings.train.epoch_samples is not None:
        text = "the mode 'indexed' knows how long an epoch is: leave it out"
        raise SettingsError(problem(settings.places, ("train", "epoch_samples"), text))
    epochs = epoch_plan(settings.data, list(openers(settings).values()))
    known = _with_epoch(settings, epochs.steps * settings.data.global_batch_size)
    known._epochs = epochs
    return known


def _with_epoch(settings: Settings, samples: int) -> Settings:
    known = settings.model_copy(update={"train": settings.train.model_copy(update={"epoch_samples": samples})})
    known._told_by_data = True
    return known


Cadence = TypeVar("Cadence", CheckpointSettings, EvalSettings)


def cadences(settings: Settings) -> list[tuple[Path, CheckpointSettings | EvalSettings]]:
    """What happens every so many steps or epochs."""
    return [(("checkpoint",), settings.checkpoint), *((("evals", name), e) for name, e in settings.evals.items())]


def _in_steps(section: Cadence, settings: Settings) -> Cadence:
    """The section with its epochs turned into steps, at least one."""
    if section.every_epochs is None:
        return section
    epoch = (settings.train.epoch_samples or 0) / settings.data.global_batch_size
    return section.model_copy(update={"every": max(1, round(section.every_epochs * epoch)), "every_epochs": None})


def _with_best(section: CheckpointSettings, settings: Settings) -> CheckpointSettings:
    """The section with `keep_best` set, where a run ends when its evaluations get no better: after the best ones."""
    stop = settings.train.early_stop
    if section.keep_best is not None or stop.metric is None:
        return section
    return section.model_copy(update={"keep_best": stop.metric, "keep_best_by": stop.metric_by})


def resolve(settings: Settings, world: World) -> Settings:
    """The settings with the run's name, `data.lanes` and what is told in epochs fixed, the same on every rank.

    `run.device`, `loss.type` and `log.progress` stay 'auto': they depend on the machine, the model and the terminal.
    To be called after `world.start()`, as the ranks agree on the name that rank 0 gives.

    Raises:
        SettingsError: a source's shards cannot be listed, or there are fewer of them than ranks where whole shards are
            dealt.
    """
    name = settings.run.name
    if name is None:
        name = world.broadcast_object(_dated_name(settings) if world.is_main else None)
    lanes = settings.data.lanes
    if lanes == "auto":
        lanes = _auto_lanes(settings, world)
    elif settings.data.sampling.deals_shards:
        for key, count in _shard_counts(settings).items():
            if count < lanes:
                mode = settings.data.sampling.words
                text = f"{lanes} lanes cannot be dealt the {count} shards of {key!r} in {mode}: set it to auto"
                raise SettingsError(problem(settings.places, ("data", "lanes"), text))
    return settings.model_copy(
        update={
            "checkpoint": _with_best(_in_steps(settings.checkpoint, settings), settings),
            "evals": {key: _in_steps(section, settings) for key, section in settings.evals.items()},
            "run": settings.run.model_copy(update={"name": name}),
            "data": settings.data.model_copy(update={"lanes": lanes}),
        }
    )


def _auto_lanes(settings: Settings, world: World) -> int:
    """48·2^k, to have at least ranks x workers; fewer where the batch is smaller, or fewer shards are dealt."""
    data = settings.data
    lanes = LANES
    while lanes < world.size * max(1, data.most_workers):
        lanes *= 2
    lanes = min(lanes, *data.batch_sizes)
    if not data.sampling.deals_shards:
        return lanes
    for name, shards in _shard_counts(settings).items():
        if shards < world.size:
            path: Path = ("data", "sources", name, "shards")
            text = (
                f"{shards} shards cannot be dealt to {world.size} ranks in {data.sampling.words}: make more of them, "
                "or set --data.sampling.mode resampled and --data.sampling.shards shared"
            )
            raise SettingsError(problem(settings.places, path, text))
        lanes = min(lanes, shards)
    return lanes


def _shard_counts(settings: Settings) -> dict[str, int]:
    return {name: len(opener.names) for name, opener in openers(settings).items()}


def openers(settings: Settings) -> dict[str, Opener]:
    """The sources by name: their shards, and how many samples they hold, where that is known."""
    from clipstream.data.opening import Opener

    data = settings.data
    return {
        name: Opener(source, None, cache=data.cache, place=f"data.sources.{name}")
        for name, source in sorted(data.sources.items())
    }


def _dated_name(settings: Settings) -> str:
    """`2026_11_21-10_30_00-model_ViT-B-32-b_512`, with a number behind it where that folder exists."""
    model = settings.model.name
    model = FilePath(model).stem if model.endswith(".json") else re.sub(r"^[a-z-]+:", "", model)
    model = re.sub(r"[^\w.-]+", "-", model).strip("-")
    name = f"{datetime.now():%Y_%m_%d-%H_%M_%S}-model_{model}-b_{settings.data.global_batch_size}"
    taken, number = name, 1
    while (FilePath(settings.run.logs) / name).exists():
        number += 1
        name = f"{taken}-{number}"
    return name


def dump(settings: Settings) -> str:
    """The settings as YAML that, given as `--config`, repeats the run.

    `checkpoint.resume` and `resume_approximate` are left out: they say how this process starts, not what the run is. So
    is the length of an epoch where the data told it: other data will tell another. `${NAME}` references stay.
    """
    tree = settings.model_dump(mode="json", exclude={"checkpoint": {"resume", "resume_approximate"}})
    if settings._told_by_data:
        tree["train"]["epoch_samples"] = None
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
