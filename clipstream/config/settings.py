"""The tree of all settings: how it is loaded, resolved, compared between ranks and written as YAML.

A command line, or what Python gives (files, mappings, `Settings` and keyword arguments, which are the short flags),
enters; a frozen `Settings` leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticUndefined

from clipstream.checkpoint.store import named, with_own_config
from clipstream.config.config_sources import (
    Node,
    enumerate_words,
    format_errors,
    harmless,
    merged,
    plain,
    read_yaml,
)
from clipstream.config.flags import flag_tree, split
from clipstream.data.settings import DataSettings
from clipstream.data.text_settings import TokenizerSettings
from clipstream.distributed.run_record import require_same, software
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, each, errors_as, wrong_type
from clipstream.evals.settings import EvalSettings
from clipstream.losses.settings import START, DistillSettings, LossSettings
from clipstream.models.settings import ModelSettings
from clipstream.report.settings import LogSettings
from clipstream.storage.shard_url import redact
from clipstream.training.optim import OptimSettings, ScheduleSettings
from clipstream.training.settings import CheckpointSettings, TrainSettings
from clipstream.utils.atomic_write import checksum
from clipstream.utils.logs import logger
from clipstream.utils.section import (
    PACKAGE,
    PluginSection,
    Section,
    Tree,
    entries_of,
    is_family,
    mapped,
    section_of,
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

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, from steps, samples or epochs. Raises SettingsError: none of them is set."""
        return self.train.total_steps(self.data.steps_for)

    @property
    def run_folder(self) -> FilePath:
        """LOGS/NAME, once the name is known. Raises SettingsError: the run has no name yet (see `plan.agree`)."""
        if self.run.name is None:
            raise SettingsError("run.name: requires --name")
        return FilePath(self.run.logs) / self.run.name


class Written(NamedTuple):
    """Settings as they were written."""

    settings: Settings
    places: Node  # where each value was written, for messages

    def log_notices(self) -> None:
        """Log the lines about flags of open_clip that have no effect, on rank 0."""
        for text in self.places.notices if World.from_env().is_main else ():
            logger.info(f"notice: {text}")


def load(argv: Sequence[str], **how: Any) -> Settings:
    """The settings of a command line, as `read` takes it, for who tells nothing about single values."""
    return read(argv, **how).settings


def read(
    argv: Sequence[str],
    *,
    trees: Sequence[Node] = (),
    ranks: int | None = None,
    trains: bool = True,
    run: FilePath | None = None,
) -> Written:
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
    return Written(settings, places)


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
        typed = name == "type" and isinstance(section, PluginSection) and not is_family(type(section))
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


def require_equal(settings: Settings, world: World, split: FilePath | None = None) -> None:
    """Check that all ranks have the same settings, files that these name, and software. Collective.

    Args:
        split: names of the held-out samples, of which each node has the list in its own cache.

    What may differ between nodes is left out. The names and sizes of shards are compared when the data order is known,
    the files of a model when they are downloaded.

    Raises SettingsError: they differ; names the keys, both values, and the hosts.
    """

    def own() -> dict[str, object]:
        found = {key: value for key, value in by_key(settings).items() if not OF_A_NODE.fullmatch(key)}
        if split is not None:
            found = {key: value for key, value in found.items() if not SPLIT_KEYS.match(key)}
            found["data.val_split"] = hashlib.sha256(split.read_bytes()).hexdigest()
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
    return settings_from(config, overrides, flags).settings


def settings_from(
    config: Config, overrides: Overrides, flags: Mapping[str, Any], *, ranks: int | None = None, trains: bool = True
) -> Written:
    """As `load_settings`; `ranks` and `trains` are as `read` takes them. Of `Settings`, keys are the places."""
    if not isinstance(overrides, Mapping | None):
        raise wrong_type("overrides", "a mapping of keys such as 'optim.lr' to values", overrides)
    files: list[str] = []
    trees: list[Node] = []
    if isinstance(config, Settings):
        if not overrides and not flags:
            return Written(config, Node())
        trees.append(tree_of(config.model_dump(mode="json", exclude_unset=True)))
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
    return read(argv, trees=[*trees, tree_of(own)] if own else trees, ranks=ranks, trains=trains)


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
