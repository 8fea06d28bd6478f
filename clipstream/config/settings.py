"""The tree of all settings: how it is read, compared between ranks, and written as YAML that `--config` reads back.

A command line, or what Python gives (files, mappings, `Settings` and keyword arguments, which are the short flags),
enters; a frozen `Settings` leaves, `Written` with the place of each value.

config.yaml repeats the run from any folder: paths are made absolute, and the model's JSON config is included. Commands
(`pipe:`, `evals.NAME.fetch`) and settings of plug-ins stay as they are. `--print-config` prints settings
as they were given, and writes no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import braceexpand
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticUndefined

from clipstream.checkpoint.store import resolve_model_name, with_own_config
from clipstream.config.config_sources import (
    Node,
    enumerate_words,
    format_errors,
    harmless,
    merge_sources,
    plain,
    read_yaml,
    to_yaml,
)
from clipstream.config.flags import flag_tree, split
from clipstream.data.settings import SPLIT_FILE, DataSettings, PathTokenizer, TokenizerSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import scheme_of, source_type
from clipstream.distributed.run_record import require_same, software
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, each, errors_as, wrong_type
from clipstream.evals.settings import EvalSettings, FrozenSettings
from clipstream.losses.settings import START, DistillSettings, LossSettings
from clipstream.models.model_config import LOCAL, ModelConfig
from clipstream.models.settings import ModelSettings
from clipstream.report.settings import LogSettings
from clipstream.storage.shard_url import ShardURL, has_secret, parts_of, redact, redact_tree, redact_value
from clipstream.training.optim import OptimSettings, ScheduleSettings
from clipstream.training.settings import CheckpointSettings, TrainSettings
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import (
    PACKAGE,
    PluginSection,
    Section,
    Tree,
    entries_of,
    is_family,
    map_leaves,
    names_path,
    section_of,
)

SHIPPED = f"{PACKAGE}/configs/"
SPLIT_KEYS = re.compile(r"evals\.val\.data\.|data\.sources\..*\.drop$")
ELSEWHERE = re.compile(r"(run|log|model|distill|tokenizer|checkpoint)\.|.*\.shards$")  # no files, or compared elsewhere
OF_A_NODE = re.compile(
    r"run\.(device|threads|debug)|model\.cache_dir|data\.(cache|cache_gib)|data\.sources\..*\.(shards|folder)"
)
S = TypeVar("S", bound=Section)
_ANCHORED = ("/", "~", "$")  # absolute, in the home folder, or from the environment
# Keys whose values may be names as well.
_NAMES = ("name", "pretrained", "image_pretrained", "model", "classes", "templates", "probability", "resume")
_PATTERN = re.compile(r"[{}\[\]*?$]|::")  # characters with a meaning in a specification of shards
TRAINS = re.compile(r"(model|tokenizer|data|loss|distill|optim|schedule|train)\.|run\.(seed|deterministic)$")
BESIDES = re.compile(
    r"model\.cache_dir|data\.(cache|cache_gib|workers|trace|\w+_timeout|max_\w+_failures)"
    r"|data\.sources\..*\.(shards|folder)"
)


def _resolve_names(section: Any, name: str) -> Any:
    """A section before it is validated, with the names of its model and weights as `models.pretrained` reads them."""
    if not isinstance(section, Mapping):
        return section
    model = dict(section)
    for key in (name, "pretrained"):
        try:
            keeps = name == "model" and model.get(key) == START
            model |= {key: resolve_model_name(model[key])} if isinstance(model.get(key), str) and not keeps else {}
        except (SettingsError, ValueError) as error:
            why = InitErrorDetails(type="value_error", loc=(key,), input=None, ctx={"error": ValueError(str(error))})
            raise ValidationError.from_exception_data(name, [why]) from error
    return with_own_config(model, name)


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: Annotated[ModelSettings, BeforeValidator(partial(_resolve_names, name="name"))] = Field(
        default_factory=ModelSettings
    )
    tokenizer: SerializeAsAny[TokenizerSettings] = Field(
        default_factory=lambda: TokenizerSettings.model_validate({"type": "model"})
    )
    data: DataSettings = Field(default_factory=DataSettings)
    loss: SerializeAsAny[LossSettings] = Field(default_factory=lambda: LossSettings.model_validate({"type": "auto"}))
    distill: Annotated[DistillSettings, BeforeValidator(partial(_resolve_names, name="model"))] = Field(
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
    places = merge_sources(Settings, [*files, flags])
    share = places.at(("data", "val_split"))
    if trains and share is not None and share.value is not None and places.at(("evals", "val")) is None:
        places.put(("evals", "val"), Node.of({}, share.place))
    tree: Tree = plain(Settings, places)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        problems += format_errors(Settings, tree, error, places)
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


def non_defaults(section: Section) -> Tree:
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
            tree[name] = non_defaults(value)
        elif section_of(entries_of(info.annotation)) is not None:
            tree[name] = {key: non_defaults(part) for key, part in value.items()}
        else:
            tree[name] = dumped[name]
    return tree


def format_value(value: Any) -> str:
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
        sums = {key: atomic_write.checksum(file) for key, file in files.items() if os.path.isfile(file)}
        return {**found, **sums, **software(found.values())}

    advice = "start all ranks with the same command line, files and software"
    require_same(world, own, "settings or software", advice, format_value)


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

    return map_leaves(value, leaf)


def _text(name: str, value: Any) -> str:
    """A keyword's value as the command line has it."""
    value = _plain(value)
    if isinstance(value, str):
        return value
    if name in ("train_data", "val_data") and isinstance(value, list):
        return "::".join(map(str, value))
    with errors_as(SettingsError, f"{name}: invalid value of type {type(value).__name__}", TypeError):
        return json.dumps(value)


def dump(settings: Settings) -> str:
    """The settings as YAML that, given as `--config` in any folder, repeats the run.

    `checkpoint.resume` and `resume_approximate` are left out, as they belong to this process and not to the run.
    `${NAME}` references stay.
    """
    exclude = {"checkpoint": {"resume", "resume_approximate"}}
    return to_yaml(portable(settings).model_dump(mode="json", exclude=exclude))


def secrets(settings: Settings) -> list[str]:
    """The keys whose values contain a credential; references to the environment do not count."""
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in by_key(settings).items()}
    return [key for key, text in texts.items() if has_secret(text)]


def write_config(settings: Settings, split: FilePath | None) -> None:
    """Write config.yaml and the list of held-out samples; with mode 0600 and a warning if it holds a credential.

    Args:
        settings: `Plan.repeatable`.
        split: the list.
    """
    keys, copied = secrets(settings), settings.checkpoint.remote_sync
    if keys:
        synced = "" if copied is None else f", and --remote-sync copies it to {redact(copied)}"
        logger.warning(
            f"{', '.join(keys)} has a password or key, which is written to config.yaml (mode 0600{synced}): use an "
            f"environment variable, ${{NAME}}, instead"
        )
    if split is not None and split != (own := settings.run_folder / SPLIT_FILE):
        atomic_write.replace(own, split.read_bytes())
    atomic_write.replace(settings.run_folder / "config.yaml", dump(settings).encode(), private=bool(keys))


def redact_settings(settings: Settings) -> Tree:
    """The settings as nested mappings without credentials, for the files and services that show a run."""
    tree: Tree = redact_tree(settings.model_dump(mode="json"))
    return tree


def portable(section: S) -> S:
    """A copy of the settings with absolute paths and the content of the model's JSON config.

    Raises SettingsError: the model's config cannot be read.
    """
    changed: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            changed[key] = portable(value)
        elif isinstance(value, dict):
            changed[key] = {k: portable(v) if isinstance(v, Section) else v for k, v in value.items()}
        elif value is not None and (made := _absolute(section, key, value)) != value:
            changed[key] = made
    if isinstance(section, ModelSettings) and section.config is None and _is_file(section.name, ".json"):
        changed["config"] = asdict(ModelConfig.read(FilePath(section.name)))
        text = changed["config"]["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text.get(key) and FilePath(text[key]).is_dir():
                text[key] = _path(text[key])
    return section.model_copy(update=changed)


def _path(text: str) -> str:
    return text if text.startswith(_ANCHORED) or ShardURL(text).scheme is not None else os.path.abspath(text)


def _absolute(section: Section, key: str, value: Any) -> Any:
    """The value of a setting, with absolute paths where it names shards, files or folders."""
    if isinstance(section, SourceSettings) and key == "shards" and is_plugin(section.type):
        found = [_path(item) if _is_file(item) else item for item in ([value] if isinstance(value, str) else value)]
        return found[0] if isinstance(value, str) else found
    if isinstance(section, SourceSettings | FrozenSettings) and key in ("shards", "train_shards"):
        return _shards(value)
    if not names_path(type(section).model_fields[key]):
        return value
    if key in _NAMES and not isinstance(section, PathTokenizer):
        return _absolute_name(value)
    return [_path(item) for item in value] if isinstance(value, list) else _path(value)


def _absolute_name(text: str | list[str]) -> str | list[str]:
    """The absolute path of an existing file or a model's folder; lists and other texts stay."""
    if isinstance(text, str) and text.startswith(LOCAL):
        return LOCAL + _path(text[len(LOCAL) :])
    return _path(text) if isinstance(text, str) and _is_file(text, ".json") else text


def _is_file(text: str, ending: str = "\0") -> bool:
    return ShardURL(text).scheme is None and (text.endswith(ending) or FilePath(text).is_file())


def _shards(spec: str | list[str]) -> str | list[str]:
    """A specification of shards, with the working folder before its relative paths."""
    if isinstance(spec, list):
        return [str(_shards(item)) for item in spec]
    here, parts = os.getcwd(), parts_of(spec)
    for number, part in enumerate(parts) if not _PATTERN.search(here) else ():
        scheme = scheme_of(part)
        if scheme is not None and source_type(scheme).generated:
            continue
        prefix = f"{scheme}:" if scheme is not None else ""
        rest = part.removeprefix(prefix)
        if not rest or ShardURL(rest).scheme is not None:
            continue
        try:
            paths = [rest, *braceexpand.braceexpand(rest)]
        except ValueError:  # reported where the shards are listed
            paths = [rest]
        if not any(path.startswith(_ANCHORED) for path in paths):
            parts[number] = f"{prefix}{here.rstrip('/')}/{rest}"
    return "::".join(parts)


def settings_of_weights(settings: Settings) -> dict[str, object]:
    """The settings that determine the weights, by dotted key, for a checkpoint's state.

    Args:
        settings: `Plan.recorded`.
    """
    return {
        key: redact_value(value) if isinstance(value, str) else value
        for key, value in by_key(portable(settings)).items()
        if TRAINS.match(key) and not BESIDES.fullmatch(key)
    }


def changes(settings: Settings, before: Mapping[str, object]) -> list[str]:
    """Differences of `settings_of_weights` from a checkpoint: 'KEY OLD -> NEW'; keys that it lacks are left out."""
    return [
        f"{key} {format_value(before[key])} -> {format_value(value)}"
        for key, value in settings_of_weights(settings).items()
        if key in before and before[key] != value
    ]
