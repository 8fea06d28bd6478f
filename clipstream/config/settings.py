"""The tree of all settings: how it is loaded, resolved, compared between ranks and written as YAML.

A command line, or what Python gives (files, mappings, `Settings` and keyword arguments, which are the short flags),
enters; a frozen `Settings` leaves.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, PrivateAttr, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticUndefined

from clipstream.checkpoint.store import candidates, named, with_own_config
from clipstream.config.config_sources import (
    Node,
    enumerate_words,
    format_errors,
    format_problem,
    harmless,
    merged,
    plain,
    read_yaml,
)
from clipstream.config.flags import flag_tree, split
from clipstream.data.order import default_lanes
from clipstream.data.settings import SPLIT_FILE, DataSettings, SourceSettings, split_counts
from clipstream.data.sources import Source, SourceContext
from clipstream.data.text_settings import TokenizerSettings
from clipstream.distributed.run_record import require_same, software
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, each, errors_as, wrong_type
from clipstream.evals.settings import EvalSettings, eval_name
from clipstream.losses.settings import START, DistillSettings, LossSettings
from clipstream.models.settings import ModelSettings
from clipstream.report.settings import LogSettings
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.text import counted
from clipstream.training.optim import ConstCooldown, OptimSettings, ScheduleSettings
from clipstream.training.settings import CheckpointSettings, TrainSettings
from clipstream.utils.atomic_write import checksum
from clipstream.utils.logs import announce, logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import (
    PACKAGE,
    SET,
    Conflict,
    Is,
    Path,
    PluginSection,
    Section,
    Tree,
    entries_of,
    mapped,
    section_of,
)
from clipstream.wing import offered

if TYPE_CHECKING:
    from clipstream.data.order.windows import EpochPlan
    from clipstream.training.state import TrainState

INDEXED_EPOCH = Conflict(  # the data give it in this mode afterwards
    {"train.epoch_samples": SET, "data.sampling.mode": Is("indexed")},
    "not supported in mode indexed, where the data determine the length of an epoch: remove it",
)
SHIPPED = f"{PACKAGE}/configs/"
SPLIT_KEYS = re.compile(r"evals\.val\.data\.|data\.sources\..*\.drop$")
ELSEWHERE = re.compile(r"(run|log|model|distill|tokenizer|checkpoint)\.|.*\.shards$")  # no files, or compared elsewhere
OF_A_NODE = re.compile(
    r"run\.(device|threads|debug)|model\.cache_dir|data\.(cache|cache_gib)|data\.sources\..*\.(shards|folder)"
)


def _named(section: Any, name: str) -> Any:
    """A section before it is validated, with the names of its model and weights as `models.pretrained` reads them."""
    if not isinstance(section, Mapping):
        return section
    model = dict(section)
    for key in (name, "pretrained"):
        try:
            keeps = name == "model" and model.get(key) == START
            model |= {key: named(model[key])} if isinstance(model.get(key), str) and not keeps else {}
        except (SettingsError, ValueError) as error:
            why = InitErrorDetails(type="value_error", loc=(key,), input=None, ctx={"error": ValueError(str(error))})
            raise ValidationError.from_exception_data(name, [why]) from error
    return with_own_config(model, name)


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: Annotated[ModelSettings, BeforeValidator(partial(_named, name="name"))] = Field(
        default_factory=ModelSettings
    )
    tokenizer: SerializeAsAny[TokenizerSettings] = Field(
        default_factory=lambda: TokenizerSettings.model_validate({"type": "model"})
    )
    data: DataSettings = Field(default_factory=DataSettings)
    loss: SerializeAsAny[LossSettings] = Field(default_factory=lambda: LossSettings.model_validate({"type": "auto"}))
    distill: Annotated[DistillSettings, BeforeValidator(partial(_named, name="model"))] = Field(
        default_factory=DistillSettings
    )
    optim: SerializeAsAny[OptimSettings] = Field(default_factory=lambda: OptimSettings.model_validate({}))
    schedule: SerializeAsAny[ScheduleSettings] = Field(default_factory=lambda: ScheduleSettings.model_validate({}))
    train: TrainSettings = Field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    evals: dict[str, SerializeAsAny[EvalSettings]] = Field(default_factory=dict, description="evaluators by name")
    log: LogSettings = Field(default_factory=LogSettings)

    _places: Node = PrivateAttr(default_factory=Node)
    _epoch_from_data: bool = PrivateAttr(default=False)  # whether the data determined `train.epoch_samples`
    _epochs: EpochPlan | None = PrivateAttr(default=None)
    _chosen: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)  # by key: what `by_size` chose, the usual
    _unread: ClipstreamError | None = PrivateAttr(default=None)  # why `by_size` could not list the training data
    _split: FilePath | None = PrivateAttr(default=None)  # names of the samples that `data.val_split` holds out

    @property
    def places(self) -> Node:
        """The settings as they were written, with their places."""
        return self._places

    def log_notices(self) -> None:
        """Log the lines about flags of open_clip that have no effect, on rank 0."""
        for text in self.places.notices if World.from_env().is_main else ():
            logger.info(f"notice: {text}")

    @property
    def epochs(self) -> EpochPlan | None:
        """The epochs of the mode `indexed`, once they are known (see `with_known_epoch`)."""
        return self._epochs

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, from steps, samples or epochs. Raises SettingsError: none of them is set."""
        return self.train.total_steps(self.data.steps_for)

    @property
    def run_folder(self) -> FilePath:
        """LOGS/NAME, once the name is known. Raises SettingsError: the run has no name yet (see `resolve`)."""
        if self.run.name is None:
            raise SettingsError("run.name: requires --name")
        return FilePath(self.run.logs) / self.run.name


def load(
    argv: Sequence[str],
    *,
    trees: Sequence[Node] = (),
    ranks: int | None = None,
    trains: bool = True,
    run: FilePath | None = None,
) -> Settings:
    """The settings of a command line: defaults, then each `--config` file in order, then flags.

    Args:
        argv: the command line without the program's name and the verb's own flags.
        trees: settings over those of the files, and under the flags.
        ranks: processes of the run, for `--batch-size`; the launcher's unless given.
        trains: whether there is a source to train on; if not, flags such as `--caption-json` describe --val-data.
        run: the folder of a run that is named: its settings are under those of the files, and `harmless` unless
            its config.yaml is one of these.

    Raises SettingsError: with one line for each mistake, which starts with file and line or the flag.
    """
    problems: list[str] = []
    configs, given = split(argv, problems)
    own = None if run is None else str(run / "config.yaml")
    others = [file for file in configs if own is None or os.path.realpath(file) != os.path.realpath(own)]
    files = [*(read_yaml(file, problems) for file in others), *trees]
    if own is not None:
        written = read_yaml(own, problems)
        files.insert(0, written if len(others) < len(configs) else harmless(written, own, problems))
        if problems:  # before the code is imported
            raise SettingsError(enumerate_words(problems))
    ranks = World.from_env().size if ranks is None else ranks
    flags = flag_tree(Settings, given, files, ranks, problems, trains=trains)
    places = merged(Settings, [*files, flags])
    share = places.at(("data", "val_split"))
    if trains and share is not None and share.value is not None and places.at(("evals", "val")) is None:
        places.put(("evals", "val"), Node.of({}, share.place))
    bare: list[str] = []
    tree: Tree = plain(Settings, places, bare)
    problems += bare
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        said = tuple(line.partition(":")[0] for line in bare)
        lines = format_errors(Settings, tree, error, places)
        problems += [line for line in lines if line.partition(":")[0] not in said]
    if problems:
        raise SettingsError(enumerate_words(problems))
    named, model = places.at(("model", "name")), settings.model
    by_path = named is not None and str(named.value).endswith(".json") and model.config is None
    files_used = [*configs, *([model.name] if by_path else [])]
    shipped = [f"{file} is used, of the installed package" for file in files_used if file.startswith(SHIPPED)]
    places.notices = list(dict.fromkeys([*flags.notices, *shipped]))
    settings._places = places
    return settings


def with_known_epoch(settings: Settings) -> Settings:
    """The settings with the samples of an epoch, if a setting depends on them and the data determine them.

    In the mode `indexed` the data always do: an epoch is a whole number of batches, `data.sampling.remainder` included.

    Raises:
        SettingsError: a source's shards cannot be listed; or the mode is `indexed`, and their numbers of samples are
            not known.
        DataError: a manifest cannot be read.
    """
    train, epochs = settings.train, None
    if settings.data.sampling.mode == "indexed" and settings.data.sources:
        from clipstream.data.order_plan import epoch_plan

        if train.epoch_samples is not None and not settings._epoch_from_data:
            raise SettingsError(format_problem(settings.places, ("train", "epoch_samples"), INDEXED_EPOCH.text()))
        epochs = epoch_plan(settings.data, list(open_sources(settings).values()))
        samples = epochs.steps * settings.data.global_batch_size
    else:
        needed = train.epochs is not None or any(section.every_epochs for _, section in cadences(settings))
        counts = [] if not needed or train.epoch_samples else [one.samples for one in open_sources(settings).values()]
        if not counts or None in counts:
            return settings
        samples = sum(count or 0 for count in counts)
    known = settings.model_copy(update={"train": train.model_copy(update={"epoch_samples": samples})})
    known._epoch_from_data, known._epochs = True, epochs
    return known


def with_val_split(settings: Settings) -> Settings:
    """The settings in which `data.val_split` has become lists: training drops the samples that are held out, and the
    evaluator `val` keeps them. A run that is resumed has its own list; else it is made, unless the cache has it.

    Raises:
        SettingsError: too few samples can be held out, or the run that is resumed has trained on all of them, or it
            holds out some and these settings do not.
        DataError: a table cannot be read.
    """
    data = settings.data
    if data.val_split is None:
        path = _list_of_resumed(settings)
        if path is not None and not any(source.drop for source in data.sources.values()):
            raise SettingsError(
                f"checkpoint.resume: {path.parent} holds samples out of its training data ({SPLIT_FILE}): add "
                f"--val-split, or --config {path.parent / 'config.yaml'}"
            )
        return settings
    ((name, source),) = data.sources.items()
    path = _list_of_resumed(settings)
    if path is None:
        path = offered("hold_out")(source, data.val_split, data, f"data.sources.{name}")
    elif World.from_env().is_main:
        text = counted(split_counts(path)[0], "sample", ",")
        announce(f"val_split {text} held out for the evaluator val, as in {path.parent}, whatever --val-split is now")
    split = _split_by(settings, path, _as_evaluated(source))
    split._split = path
    samples = settings.train.epoch_samples
    if samples is not None and settings._epoch_from_data and data.sampling.mode != "indexed":
        held, usable = split_counts(path)
        known = split.train.model_copy(update={"epoch_samples": (usable or samples) - held})
        split = split.model_copy(update={"train": known})
        split._epoch_from_data = False
    return split


def _as_evaluated(source: SourceSettings) -> SourceSettings:
    """The source as an evaluation reads its training data; of a folder with splits, the split for training."""
    from clipstream.data.sources.folders import with_split  # imports the decoders

    rest: dict[str, Any] = {"drop": None, "weight": 1.0, "upsampling_factors": None, "probability": None}
    if not is_plugin(source.type):
        rest["shards"] = [with_split(part, source.type, source.image_key) for part in source.parts]
    return source.model_copy(update=rest)


def _list_of_resumed(settings: Settings) -> FilePath | None:
    """The names of the samples that the run to go on from holds out; None for a new run, or a remote checkpoint."""
    resume, began = settings.checkpoint.resume, True
    by_name = resume in ("latest", "auto")
    if resume is None:
        return None
    if by_name or ShardURL(resume).scheme is not None:
        if settings.run.name is None:
            return None
        run = settings.run_folder
        began = by_name and bool(candidates(run / "checkpoints"))
    else:
        path = FilePath(resume).resolve()
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


def _split_by(settings: Settings, path: FilePath, evaluated: SourceSettings | None) -> Settings:
    """The settings with a file of the names of held-out samples, and the source that the evaluator reads."""
    assert evaluated is not None
    trained = {name: one.model_copy(update={"drop": str(path)}) for name, one in settings.data.sources.items()}
    data = settings.data.model_copy(update={"val_split": None, "sources": trained})
    val = settings.evals["val"].model_copy(update={"data": evaluated.model_copy(update={"keep": str(path)})})
    return settings.model_copy(update={"data": data, "evals": {**settings.evals, "val": val}})


def with_own_split(settings: Settings) -> Settings:
    """The settings of a run's files: with the list of held-out samples in the run's folder."""
    if settings._split is None:
        return settings
    return _split_by(settings, settings.run_folder / SPLIT_FILE, settings.evals["val"].data)


def by_key(settings: Settings) -> dict[str, object]:
    """The value of every dotted key, JSON-able."""

    def below(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(tree, dict) and tree:
            for key, value in tree.items():
                yield from below(f"{prefix}.{key}", value)
        else:
            yield prefix[1:], tree

    text = json.dumps(settings.model_dump(mode="json"))
    return dict(below("", json.loads(text, parse_constant=str)))  # JSON has no infinity


def changed(section: Section) -> Tree:
    """The settings that differ from the defaults, as a tree for YAML; plug-ins always have their `type`."""
    dumped = section.model_dump(mode="json")
    tree: Tree = {}
    for name, info in type(section).model_fields.items():
        value, default = getattr(section, name), info.get_default(call_default_factory=True)
        # The types of a source share its class, and so need not be named.
        typed = name == "type" and isinstance(section, PluginSection) and "builtin" not in vars(type(section))
        if value == default and default is not PydanticUndefined and not typed:
            continue
        if isinstance(value, Section):
            tree[name] = changed(value)
        elif section_of(entries_of(info.annotation)) is not None:
            tree[name] = {key: changed(part) for key, part in value.items()}
        else:
            tree[name] = dumped[name]
    return tree


def shown(value: Any) -> str:
    return redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def require_equal(settings: Settings, world: World) -> None:
    """Check that all ranks have the same settings, files that these name, and software. Collective.

    What may differ between nodes is left out. The names and sizes of shards are compared when the data order is known,
    the files of a model when they are downloaded.

    Raises SettingsError: they differ; names the keys, both values, and the hosts.
    """

    def own() -> dict[str, object]:
        found = {key: value for key, value in by_key(settings).items() if not OF_A_NODE.fullmatch(key)}
        if settings._split is not None:  # each node has the list in its own cache
            found = {key: value for key, value in found.items() if not SPLIT_KEYS.match(key)}
            found["data.val_split"] = hashlib.sha256(settings._split.read_bytes()).hexdigest()
        named = [
            (key, text) for key, value in found.items() for text in (value if isinstance(value, list) else [value])
        ]
        texts = [(key, text) for key, text in named if isinstance(text, str)]
        files = {f"{key} ({text})": FilePath(text) for key, text in texts if not ELSEWHERE.match(key)}
        files |= {f"{key} ({text})": FilePath(text) / "store.json" for key, text in texts if key.endswith("_features")}
        sums = {key: checksum(file) for key, file in files.items() if os.path.isfile(file)}
        return {**found, **sums, **software(found.values())}

    advice = "start all ranks with the same command line, files and software"
    require_same(world, own, "settings or software", advice, shown)


Cadence = TypeVar("Cadence", CheckpointSettings, EvalSettings)


def cadences(settings: Settings) -> list[tuple[Path, CheckpointSettings | EvalSettings]]:
    """The sections with an interval in steps or epochs (`every`, `every_epochs`), with their paths."""
    return [(("checkpoint",), settings.checkpoint), *((("evals", name), e) for name, e in settings.evals.items())]


def _in_steps(section: Cadence, settings: Settings) -> Cadence:
    """The section with its interval in steps, at least one."""
    if section.every_epochs is None:
        return section
    epoch = (settings.train.epoch_samples or 0) / settings.data.global_batch_size
    return section.model_copy(update={"every": max(1, round(section.every_epochs * epoch)), "every_epochs": None})


def with_lanes(data: DataSettings) -> DataSettings:
    if data.lanes != "auto":
        return data
    return data.model_copy(update={"lanes": default_lanes(min(data.batch_sizes))})


def resolve(settings: Settings, world: World) -> Settings:
    """The settings with the run's name, `data.lanes` and intervals in steps fixed, the same on every rank.

    `run.device`, `loss.type` and `log.progress` stay 'auto': they depend on the machine, the model and the terminal.
    Collective where the run has no name: the ranks agree on the one that rank 0 gives.
    """
    name, train = settings.run.name, settings.train
    if name is None:  # as 2026_11_21-10_30_00-model_ViT-B-32-b_512, with a number added if that folder exists
        model = settings.model.name
        model = FilePath(model).stem if model.endswith(".json") else re.sub(r"^[a-z-]+:", "", model)
        model = re.sub(r"[^\w.-]+", "-", model).strip("-")
        dated = f"{datetime.now():%Y_%m_%d-%H_%M_%S}-model_{model}-b_{settings.data.global_batch_size}"
        names = (dated if number == 1 else f"{dated}-{number}" for number in count(1))
        free = (one for one in names if not (FilePath(settings.run.logs) / one).exists())
        name = world.broadcast_object(next(free) if world.is_main else None)
    schedule, checkpoint = settings.schedule, _in_steps(settings.checkpoint, settings)
    if isinstance(schedule, ConstCooldown.Settings) and schedule.cooldown_epochs is not None:
        cooldown = settings.data.steps_for(math.ceil(schedule.cooldown_epochs * (train.epoch_samples or 0)))
        schedule = schedule.model_copy(update={"cooldown": cooldown, "cooldown_epochs": None})
    if checkpoint.keep_best is None and train.early_stop.metric is not None:
        # A run that ends because its evaluations get no better has had its best checkpoint before.
        best = {"keep_best": train.early_stop.metric, "keep_best_by": train.early_stop.metric_by}
        checkpoint = checkpoint.model_copy(update=best)
    evals = {key: _in_steps(section, settings) for key, section in settings.evals.items()}
    val = evals.get("val")
    if checkpoint.keep_best is None and val is not None and val.every and val.best_metric is not None:
        best = {"keep_best": f"{eval_name('val', val.kinds[0])}/{val.best_metric}"}
        checkpoint = checkpoint.model_copy(update=best)
    return settings.model_copy(
        update={
            "checkpoint": checkpoint,
            "schedule": schedule,
            "evals": evals,
            "run": settings.run.model_copy(update={"name": name}),
            "data": with_lanes(settings.data),
        }
    )


def carried_over(settings: Settings, state: TrainState | None, world: World, *, own_lanes: bool) -> Settings:
    """The settings of a resumed run, with the values that were resolved when it began. Collective.

    Args:
        settings: resolved for these ranks and workers, this machine.
        state: of the checkpoint; None for a new run.
        own_lanes: whether the user set data.lanes.
    """
    from clipstream.training.precision import resolve_precision  # imports torch

    lanes = None if state is None or own_lanes else state.data.lanes_total
    if state is not None and lanes is not None and world.size <= lanes <= min(settings.data.batch_sizes):
        settings = _with(settings, "data", lanes=lanes)
        shards = state.data.fingerprint.get("data.shuffle.shards")
        if settings.data.shuffle.open_shards is None and isinstance(shards, int) and shards > 0:
            shuffle = settings.data.shuffle.model_copy(update={"shards": shards})
            settings = _with(settings, "data", shuffle=shuffle)
    if settings.train.precision == "auto":
        saved: Any = "auto" if state is None else state.train_step.precision
        settings = _with(settings, "train", precision=resolve_precision(saved, world))
    return settings


def _with(settings: Settings, section: str, **values: Any) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})


def open_sources(settings: Settings) -> dict[str, Source]:
    """The sources of training by name, sorted."""
    data = settings.data
    return {
        name: Source(source, SourceContext(cache=data.cache, key=f"data.sources.{name}"))
        for name, source in sorted(data.sources.items())
    }


PathLike: TypeAlias = "str | os.PathLike[str]"
Config: TypeAlias = "PathLike | Sequence[PathLike] | Mapping[str, Any] | Settings | None"
Overrides: TypeAlias = "Mapping[str, Any] | None"


def load_settings(config: Config = None, overrides: Overrides = None, /, **flags: Any) -> Settings:
    """The settings of a run, validated: defaults, under `config`, under `overrides`, under `flags`.

    Args:
        config: a YAML file, several of them, a mapping of sections, or `Settings`.
        overrides: keys of the settings and their values: `{"optim.lr": 1e-3}`, or nested as in YAML. A class of your
            own may stand where settings take `module:Name`.
        flags: short flags of the command line, with underscores: `train_data="shards/*.tar"`, `batch_size=256`; None
            stands for a flag that is not given.

    Raises SettingsError: the settings are wrong; the message has a line for each mistake.

    Examples:
        >>> import clipstream
        >>> settings = clipstream.load_settings({"train": {"steps": 100}}, {"optim.lr": 1e-3}, batch_size=64)
        >>> settings.data.global_batch_size, settings.optim.lr
        (64, 0.001)
    """
    return settings_from(config, overrides, flags)


def settings_from(
    config: Config, overrides: Overrides, flags: Mapping[str, Any], *, ranks: int | None = None, trains: bool = True
) -> Settings:
    """As `load_settings`; `ranks` and `trains` are as `config.settings.load` takes them."""
    if not isinstance(overrides, Mapping | None):
        raise wrong_type("overrides", "a mapping of keys such as 'optim.lr' to values", overrides)
    files: list[str] = []
    trees: list[Node] = []
    if isinstance(config, Settings):
        if not overrides and not flags:
            return config
        trees.append(config.places if config.places.value else tree_of(changed(config)))
    elif isinstance(config, Mapping):
        trees.append(tree_of(config))
    elif config is not None:
        expected = "a YAML file, several, a mapping of sections, or Settings"
        files = [os.fspath(file) for file in each("config", expected, config, (str, os.PathLike))]
    if "overrides" in flags:
        raise SettingsError("overrides is a positional argument, as in train(None, {'optim.lr': 1e-3})")
    own = dict(overrides or {})
    argv = [f"--config={file}" for file in files]
    for name, value in flags.items():
        if name in Settings.model_fields and isinstance(value, Mapping):
            own[name] = value
        elif value is not None:
            argv.append(f"--{name.replace('_', '-')}={_text(name, value)}")
    return load(argv, trees=[*trees, tree_of(own)] if own else trees, ranks=ranks, trains=trains)


def tree_of(values: Mapping[str, Any]) -> Node:
    """The nodes of values by dotted key, or nested."""
    tree = Node()
    for key, value in values.items():
        if not isinstance(key, str):
            raise SettingsError(f"expected a key such as 'optim.lr', not {key!r}")
        tree.put_keys(tuple(key.split(".")), Node.of(_plain(value), ""))
    return tree


def _plain(value: Any) -> Any:
    """A Python value as YAML has it; a class or function becomes its 'module:Name'."""

    def leaf(value: Any) -> Any:
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}:{value.__qualname__}"
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    return mapped(value, leaf)


def _text(name: str, value: Any) -> str:
    """A keyword's value as the command line has it."""
    value = _plain(value)
    if isinstance(value, str):
        return value
    if name in ("train_data", "val_data") and isinstance(value, list):
        return "::".join(map(str, value))
    with errors_as(SettingsError, f"{name}: invalid value of type {type(value).__name__}", TypeError):
        return json.dumps(value)
