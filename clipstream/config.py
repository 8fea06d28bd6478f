"""Owns the tree of settings: its sections, how it is loaded, checked as a whole, resolved and written down.

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

from clipstream.data.settings import CaptionSettings, DataSettings, JsonCaption, TokenizerSettings
from clipstream.errors import SettingsError
from clipstream.evals.prompts import OF_OPEN_CLIP, class_names, prompt_templates
from clipstream.evals.settings import EvalSettings, ZeroShotSettings
from clipstream.flags import flag_layer, split
from clipstream.folder import holds_a_run
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

    Raises:
        SettingsError: a source's shards cannot be listed.
        DataError: a manifest cannot be read.
    """
    asked = settings.train.epochs is not None or any(section.every_epochs for _, section in _cadences(settings))
    if not asked or settings.train.epoch_samples is not None:
        return settings
    samples = [opener.samples for opener in openers(settings).values()]
    if not samples or None in samples:
        return settings
    total = sum(count for count in samples if count is not None)
    known = settings.model_copy(update={"train": settings.train.model_copy(update={"epoch_samples": total})})
    known._told_by_data = True
    return known


def validate_run(settings: Settings, world: World) -> None:
    """Check what no section can check alone, before torch is imported and before anything of the run is written.

    Every rank looks for an existing run folder: rank 0 must not make it before all of them have been here.

    Raises:
        SettingsError: every contradiction, one line each.
    """
    found = [
        *_length_problems(settings),
        *_batch_problems(settings, world),
        *_model_problems(settings),
        *_data_problems(settings),
        *_folder_problems(settings, world),
    ]
    if found:
        raise SettingsError(joined(problem(settings._places, path, text) for path, text in found))


Found = list[tuple[Path, str]]
Cadence = TypeVar("Cadence", CheckpointSettings, EvalSettings)


def _length_problems(settings: Settings) -> Found:
    train = settings.train
    given = [key for key in ("steps", "samples", "epochs") if getattr(train, key) is not None]
    if not given:
        return [(("train",), "nothing says how long to train: give --steps, --train.samples or --epochs")]
    if len(given) > 1:
        return [(("train", given[1]), f"{' and '.join(given)} are all given: keep the one that is meant")]
    if given == ["epochs"] and train.epoch_samples is None:
        text = "how many samples are an epoch? The data do not tell: give --train-num-samples, or --steps"
        return [(("train", "epochs"), text)]
    steps, schedule, lr = settings.total_steps, settings.schedule, settings.optim.lr
    found: Found = []
    if 0 < steps < schedule.warmup:
        text = f"{schedule.warmup} steps of warm-up, but the run has {steps}: lower --warmup"
        found.append((("schedule", "warmup"), text))
    if late := [step for step, _ in settings.data.batch_schedule if step >= steps]:
        found.append((("data", "batch_schedule"), f"step {late[0]} never comes: the run has {steps}"))
    for path, section in _cadences(settings):
        if section.every_epochs is None:
            continue
        if "every" in section.model_fields_set:
            found.append(((*path, "every"), "every and every_epochs are both given: keep the one that is meant"))
        elif train.epoch_samples is None:
            found.append(((*path, "every_epochs"), "how many samples are an epoch? Give --train-num-samples"))
        elif settings.data.batch_schedule:
            text = "an epoch has no fixed number of steps under data.batch_schedule: give every, in steps"
            found.append(((*path, "every_epochs"), text))
    if schedule.min_lr > lr:
        found.append((("schedule", "min_lr"), f"{schedule.min_lr:g} is above the peak, optim.lr {lr:g}"))
    return found


def _cadences(settings: Settings) -> list[tuple[Path, CheckpointSettings | EvalSettings]]:
    """What happens every so many steps or epochs."""
    return [(("checkpoint",), settings.checkpoint), *((("evals", name), e) for name, e in settings.evals.items())]


def _in_steps(section: Cadence, settings: Settings) -> Cadence:
    """The section with its epochs turned into steps, at least one."""
    if section.every_epochs is None:
        return section
    epoch = (settings.train.epoch_samples or 0) / settings.data.global_batch_size
    return section.model_copy(update={"every": max(1, round(section.every_epochs * epoch)), "every_epochs": None})


def _batch_problems(settings: Settings, world: World) -> Found:
    found: Found = []
    data, micro = settings.data, settings.train.micro_batch_size
    lanes, batch, largest = data.lanes, min(data.batch_sizes), max(data.batch_sizes)
    if batch < world.size:
        key = "global_batch_size" if batch == data.global_batch_size else "batch_schedule"
        found.append((("data", key), f"{batch} samples cannot be shared by {world.size} ranks"))
    if lanes != "auto" and lanes > batch:
        text = f"{lanes} lanes, but a global batch has {batch} samples: a lane needs one each step"
        found.append((("data", "lanes"), text))
    if lanes != "auto" and lanes < world.size:
        found.append((("data", "lanes"), f"{lanes} lanes cannot be shared by {world.size} ranks: one each at least"))
    if isinstance(micro, int) and micro > largest:
        text = f"{micro} is more than the largest global batch, {largest}"
        found.append((("train", "micro_batch_size"), text))
    return found


def _model_problems(settings: Settings) -> Found:
    model, augment = settings.model, settings.data.augment
    found: Found = []
    for key, lock in (("unlocked_groups", "lock_image"), ("unlocked_layers", "lock_text")):
        if getattr(model, key) and not getattr(model, lock):
            found.append(
                (("model", key), f"nothing is locked: give --{lock.replace('_', '-')} as well, or leave it out")
            )
    loss = settings.loss
    if getattr(loss, "duplicates_by", None) and getattr(loss, "duplicates", None) == "negatives":
        text = "what becomes of duplicates? Give --loss.duplicates mask or positives as well"
        found.append((("loss", "duplicates_by"), text))
    if model.patch_dropout and model.lock_image and not model.unlocked_groups:
        found.append((("model", "patch_dropout"), "a locked image tower drops no patches: leave one of the two out"))
    if augment.color_jitter_prob and augment.color_jitter is None:
        text = "how strong? Give --data.augment.color-jitter '[0.4, 0.4, 0.4, 0.1]' as well"
        found.append((("data", "augment", "color_jitter_prob"), text))
    if augment.color_jitter is not None and not augment.color_jitter_prob:
        text = "how often? Give --data.augment.color-jitter-prob as well, 0 to 1"
        found.append((("data", "augment", "color_jitter"), text))
    return found


def _data_problems(settings: Settings) -> Found:
    found: Found = []
    if not settings.data.sources:
        text = "there is no data: give --train-data SHARDS, or --config configs/quickstart.yaml for a first look"
        found.append((("data", "sources"), text))
    captions: list[tuple[Path, CaptionSettings]] = [
        (("data", "sources", name), source.caption) for name, source in settings.data.sources.items()
    ]
    for name, evaluator in settings.evals.items():
        if evaluator.data is not None:
            captions.append((("evals", name, "data"), evaluator.data.caption))
        elif evaluator.type in EvalSettings.builtin:
            text = f"the evaluator has no data: give --evals.{name}.data.shards, or remove it with --evals.{name} null"
            found.append((("evals", name), text))
        if isinstance(evaluator, ZeroShotSettings):
            found += _prompt_problems(name, evaluator)
    for path, caption in captions:
        if isinstance(caption, JsonCaption) and caption.weights and len(caption.weights) != len(caption.paths):
            text = f"{len(caption.weights)} weights for {len(caption.paths)} paths: give one for each"
            found.append(((*path, "caption", "weights"), text))
    return found


def _prompt_problems(name: str, evaluator: ZeroShotSettings) -> Found:
    found: Found = []
    for key, read in (("classes", class_names), ("templates", prompt_templates)):
        given = getattr(evaluator, key)
        if given in OF_OPEN_CLIP:  # reading these imports torch
            continue
        try:
            read(given)
        except SettingsError as error:
            found.append((("evals", name, key), str(error).removeprefix(f"{key}: ")))
    return found


def _folder_problems(settings: Settings, world: World) -> Found:
    resume, name = settings.checkpoint.resume, settings.run.name
    # Rank 0 finds the checkpoint for all: others may have a disk of their own.
    if resume not in (None, "latest", "auto") and world.is_main and not FilePath(str(resume)).exists():
        text = f"there is no {resume}: give a checkpoint's folder, latest (with --name) or auto"
        return [(("checkpoint", "resume"), text)]
    if name is None:
        if resume in ("latest", "auto"):
            return [(("checkpoint", "resume"), f"{resume} of which run? Give its --name")]
        return []
    if name in (".", "..") or re.search(r"[/\\]", name) or not name.strip():
        return [(("run", "name"), f"{name!r} is no name for a folder: leave out slashes, and set the place by --logs")]
    folder = settings.run_folder
    if resume is None and holds_a_run(folder):
        text = f"{folder} exists: go on with it by --resume auto, or start another run by another --name"
        return [(("run", "name"), text)]
    return []


def resolve(settings: Settings, world: World) -> Settings:
    """The settings with the run's name, `data.lanes` and what is told in epochs fixed, the same on every rank.

    `run.device`, `loss.type` and `log.progress` stay 'auto': they depend on the machine, the model and the terminal.
    To be called after `world.start()`, as the ranks agree on the name that rank 0 gives.

    Raises:
        SettingsError: a source's shards cannot be listed, or there are fewer of them than ranks in `epoch` mode.
    """
    name = settings.run.name
    if name is None:
        name = world.broadcast_object(_dated_name(settings) if world.is_main else None)
    lanes = settings.data.lanes
    if lanes == "auto":
        lanes = _auto_lanes(settings, world)
    elif settings.data.sampling.mode == "epoch":
        for key, count in _shard_counts(settings).items():
            if count < lanes:
                text = (
                    f"{lanes} lanes cannot be dealt the {count} shards of {key!r} in the mode 'epoch': set it to auto"
                )
                raise SettingsError(problem(settings._places, ("data", "lanes"), text))
    return settings.model_copy(
        update={
            "checkpoint": _in_steps(settings.checkpoint, settings),
            "evals": {key: _in_steps(section, settings) for key, section in settings.evals.items()},
            "run": settings.run.model_copy(update={"name": name}),
            "data": settings.data.model_copy(update={"lanes": lanes}),
        }
    )


def _auto_lanes(settings: Settings, world: World) -> int:
    """48·2^k, to have at least ranks x workers; fewer where the batch, or the shards in `epoch` mode, are fewer."""
    data = settings.data
    lanes = LANES
    while lanes < world.size * max(1, data.workers):
        lanes *= 2
    lanes = min(lanes, *data.batch_sizes)
    if data.sampling.mode != "epoch":
        return lanes
    for name, shards in _shard_counts(settings).items():
        if shards < world.size:
            path: Path = ("data", "sources", name, "shards")
            text = (
                f"{shards} shards cannot be dealt to {world.size} ranks in the mode 'epoch': "
                "make more of them, or set --data.sampling.mode resampled"
            )
            raise SettingsError(problem(settings._places, path, text))
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

    `checkpoint.resume` is left out: it says how this process starts, not what the run is. So is the length of an epoch
    where the data told it: other data will tell another. `${NAME}` references stay.
    """
    tree = settings.model_dump(mode="json", exclude={"checkpoint": {"resume"}})
    if settings._told_by_data:
        tree["train"]["epoch_samples"] = None
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
