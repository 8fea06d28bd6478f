"""The tree of all settings, and how it is read: files and flags, one over the other, as `read` has them in order.

A command line, or what Python gives (files, mappings, `Settings` and keyword arguments, which are the short flags),
enters; a frozen `Settings` leaves, `Written` with the place of each value.

A flag is `--section.key VALUE`, or a short one. A value is a YAML scalar, list or mapping; where text is wanted it is
the text itself. Lists are written `'[a, b]'`; a flag given again replaces its earlier value. A flag without a value
means true. Unknown keys are found when the whole tree is validated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails

from clipstream.checkpoint.store import resolve_model_name, with_own_config
from clipstream.config.short_flags import (
    BY_FLAG,
    CAPTION,
    DEFAULTS,
    INTERVALS,
    READING_FLAGS,
    SOURCE,
    Around,
    FlagAlias,
    Typed,
    notice,
    refusal,
    translate,
)
from clipstream.config.value_tree import (
    Node,
    advice,
    enumerate_words,
    format_errors,
    harmless,
    plain_field,
    read_yaml,
)
from clipstream.data.settings import SPLIT_FILE, DataSettings, TokenizerSettings
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, each, errors_as, wrong_type
from clipstream.evals.settings import EvalSettings
from clipstream.losses.settings import START, DistillSettings, LossSettings
from clipstream.models.settings import ModelSettings
from clipstream.report.settings import LogSettings
from clipstream.training.optim import OptimSettings, ScheduleSettings
from clipstream.training.settings import CheckpointSettings, StageSettings, TrainSettings
from clipstream.utils.section import (
    PACKAGE,
    Path,
    PluginSection,
    Section,
    Tree,
    child,
    dotted,
    entries_of,
    items_of,
    kinds,
    leaf,
    map_leaves,
    required_section,
    section_of,
    with_home,
    with_shipped,
)

SHIPPED = f"{PACKAGE}/configs/"


# Keys that exclude each other: a later source that sets one removes the others.
EXCLUSIVE: dict[Path, tuple[str, ...]] = {("train",): ("steps", "samples", "epochs"), ("model",): ("name", "config")}


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
    stages: dict[str, StageSettings] = Field(
        default_factory=dict, description="stages by name; after the last one the run has its own settings"
    )
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


def load(argv: Sequence[str], **how: Any) -> Settings:
    """The settings of a command line, as `read` takes it, without the places of its values."""
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


def split(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The `--config` files in order, and the other flags as typed, with None for the text of those without a value."""
    configs: list[str] = []
    given: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            hint = "quote patterns, and write several values as one list, '[a, b]'"
            problems.append(f"unexpected argument {token!r}: {hint}")
            continue
        flag, equals, text = token.partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        alias = BY_FLAG.get(flag)
        many = alias.many if alias is not None else (notice(flag) or refusal(flag)) is not None
        if value is not None and not equals and many:
            while rest and not rest[0].startswith("--"):
                value = f"{value}\n{rest.pop(0)}"
        if flag != "--config":
            given.append((flag, value))
        elif value:
            configs.append(with_shipped(with_home(value)))
        else:
            problems.append("--config: requires a file")
    return configs, given


def flag_tree(
    root: type[Section],
    given: Iterable[tuple[str, str | None]],
    files: Sequence[Node],
    ranks: int,
    problems: list[str],
    *,
    trains: bool = True,
) -> Node:
    """The tree of all flags except `--config`, over the trees of files, with notices about those that have no effect;
    mistakes are added to `problems`. `ranks` and `trains` are as `read` takes them.
    """
    tree = Node()
    aliased: dict[str, str] = {}
    for flag, text in given:
        alias = BY_FLAG.get(flag) or BY_FLAG.get(flag.replace("_", "-"))
        if alias is not None and text is None and not is_switch(root, alias):
            problems.append(f"{alias.flag}: requires a value")
        elif alias is not None:
            aliased[alias.flag] = "true" if text is None else text
            if (alias.flag, (text or "").lower()) == ("--precision", "amp"):
                why = "amp is bfloat16 without a scaler where the device supports it; fp16 is float16 with a scaler"
                tree.notices.append(f"{alias.flag}: {why}")
        elif "." not in flag and (told := notice(flag.replace("_", "-"))) is not None:
            tree.notices.append(f"{flag}: {told}")
        elif "." not in flag and flag.removeprefix("--") not in root.model_fields:
            problems.append(f"{flag}: {advice(root, flag)}")
        else:
            path, key = _path_of(root, flag)
            if text is None and (field := leaf(root, key)) is not None and bool not in kinds(field.annotation):
                problems.append(f"{flag}: requires a value")
            else:
                tree.put(path, Node.of(True, flag) if text is None else Node.of_text(text, flag))

    # Short flags come after all others, so that a key given twice is noticed.
    section = merge_sources(root, [*files, tree]).at(("evals",))
    evaluators = set(section.value) if section is not None and isinstance(section.value, dict) else set()
    aliased = _with_defaults(aliased, tree, files, problems)
    for flag, path, value in translate(aliased, Around(evaluators, ranks, tree.notices), problems):
        node = Node.of_text(str(value), flag) if isinstance(value, Typed) else Node.of(value, flag)
        before = tree.at(path)
        if before is not None and path not in (CAPTION, ("tokenizer",)) and before.place != flag:
            problems.append(f"{flag} and {before.place} both set {dotted(path)}: use one of them")
        tree.put_keys(path, node)
    # The data of --val-data, and without training those of each evaluator of the command line, are read as the training
    # source, unless their own settings say otherwise.
    train = merge_sources(root, [*files, tree])
    read = [name for name in evaluators if not trains and tree.at(("evals", name, "data", "shards")) is not None]
    for name in [*read, *(["val"] if "--val-data" in aliased else [])]:
        for key in ("caption", "image_key", "folder", "separator", "background"):
            path, found = ("evals", name, "data", key), train.at((*SOURCE, key))
            if found is not None and not any(one.at(path) for one in (*files, tree)):
                tree.put(path, found)
    if "--val-data" in aliased:
        keep = ("evals", "val", "data", "keep")
        kept = None if tree.at(keep) else train.at(keep)
        if kept is not None and str(kept.value).endswith(f"/{SPLIT_FILE}"):  # of the run's own training data
            tree.put(keep, Node.of(None, "--val-data"))
    used = [flag for flag in READING_FLAGS if flag in aliased]
    if used and not trains:  # flags of the training source describe --val-data
        if "--val-data" not in aliased:
            problems.append(f"{used[0]}: requires --val-data")
        sources = tree.at(SOURCE[:-1])
        if sources is not None and tree.at(SOURCE) is not None and tree.at((*SOURCE, "shards")) is None:
            del sources.value[SOURCE[-1]]
    return tree


def _path_of(root: type[Section], flag: str) -> tuple[Path, str]:
    """The path of a dotted flag, and its key with NAME for the names that users give to sources, evaluators and sinks.

    Kebab case becomes snake case, except in these names.
    """
    path, key, annotation = list[str](), list[str](), root
    for part in flag.removeprefix("--").split("."):
        named = entries_of(annotation) is not None
        path.append(part if named else part.replace("-", "_"))
        key.append("NAME" if named else path[-1])
        annotation = child(annotation, None, path[-1])
    return tuple(path), ".".join(key)


def is_switch(root: type[Section], alias: FlagAlias) -> bool:
    """Whether the flag alone means true."""
    field = plain_field(root, alias)
    return alias.switch or "true" in alias.words or (field is not None and bool in kinds(field.annotation))


def _with_defaults(aliased: dict[str, str], tree: Node, files: Sequence[Node], problems: list[str]) -> dict[str, str]:
    """The short flags, with open_clip's defaults for other ones, if --open-clip-defaults asks for them."""
    if aliased.pop(flag := "--open-clip-defaults", "false").lower() == "false":
        return aliased
    if files:
        problems.append(f"{flag}: not supported with --config")
    without = {one for one, (data, _) in INTERVALS.items() if not any(name in aliased for name in data)}
    if "--steps" in aliased or any(tree.at(("train", key)) is not None for key in ("steps", "samples", "epochs")):
        without.add("--epochs")
    if "--train-data-upsampling-factors" in aliased:  # which open_clip takes with replacement only
        without.add("--dataset-resampled")
    without |= {one for one in DEFAULTS if any(tree.at(tuple(key.split("."))) for key in BY_FLAG[one].keys)}
    return {**{one: text for one, text in DEFAULTS.items() if one not in without}, **aliased}


def merge_sources(root: type[Section], sources: Sequence[Node]) -> Node:
    """All sources, given from lowest to highest, as one tree."""
    tree = Node()
    for source in reversed(sources):
        tree = _merge(root, source, tree, ())
    return tree


def _merge(annotation: Any, low: Node, high: Node, path: Path) -> Node:
    """The mapping `low` with `high` merged over it, without keys that `high` excludes.

    Where `high` has another `type`, only the keys of the whole family are kept, as the others belong to the old type.
    """
    section, found, over = section_of(annotation), dict(low.value), high.value
    given = [node.value for node in (over.get("type"), found.get("type")) if node is not None]
    typed = {"type": given[0]} if given else {}
    if section is not None and issubclass(section, PluginSection) and "type" in over:
        before = given[1] if len(given) > 1 else section.model_fields["type"].default
        if given[0] != before:
            # EvalSettings keeps `data` and `every`; the `key` of a text caption must not become a JSON caption's.
            found = {key: node for key, node in found.items() if key in section.model_fields and key != "type"}
    group = EXCLUSIVE.get(path, ())
    if any(key in over and over[key].value is not None for key in group):
        found = {key: node for key, node in found.items() if key not in group}
    for key, node in over.items():
        under, inner = found.get(key), child(annotation, typed, key)
        found[key] = node
        if under is not None and isinstance(under.value, dict):
            if isinstance(node.value, dict):
                found[key] = _merge(inner, under, node, (*path, key))
            elif node.value is None and section is not None and required_section(inner):
                found[key] = under
    return Node(found, high.place or low.place, high.written or low.written)


def plain(annotation: Any, node: Node) -> Any:
    """The value of a node with YAML's guesses about types undone.

    A plain scalar where text is wanted becomes its text (`name: 00001`, `classes: [yes, no]`). A section without keys
    and a null entry of a named map are removed. Raises SettingsError: a key that is no switch has no value.
    """
    value, section, entries, items = node.value, section_of(annotation), entries_of(annotation), items_of(annotation)
    mapped = section is not None or entries is not None
    wanted: dict[type[Any], bool] = {dict: mapped, list: items is not None, str: True}
    alone = value is True and node.text is None and node.place.startswith("--")  # a flag, here of a plug-in's own key
    if alone and {bool, Any, None}.isdisjoint(kinds(annotation)):
        raise SettingsError(f"{node.place}: requires a value")
    optional = value is None and NoneType in kinds(annotation)
    if node.text is not None and not wanted.get(type(value), optional) and accepts_text(annotation, node.text):
        return node.text
    if isinstance(value, dict):
        typed = {"type": value["type"].value} if section is not None and "type" in value else {}
        found = {}
        for key, part in value.items():
            inner = child(annotation, typed, key)
            removed = required_section(inner) if section is not None else entries not in (None, Any)
            if part.value is not None or not removed:
                found[key] = plain(inner, part)
        return found
    if isinstance(value, list):
        return [plain(items, item) for item in value]
    return {} if value is None and entries not in (None, Any) else value


def accepts_text(annotation: Any, text: str) -> bool:
    """Whether the string `text` is itself a valid value of this annotation."""
    return any(kind is str or (get_origin(kind) is Literal and text in get_args(kind)) for kind in kinds(annotation))


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
