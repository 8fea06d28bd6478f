"""config.yaml of a run, and what else is kept and compared of its settings, by dotted key.

A frozen `Settings` enters; YAML that `--config` reads back, or plain values, leave. config.yaml repeats the run from
any folder: paths are made absolute, and the model's JSON config is included. Commands (`pipe:`, `evals.NAME.fetch`) and
settings of plug-ins stay as they are. `--print-config` prints settings as they were given, and writes no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any, TypeVar, cast

import braceexpand
from pydantic_core import PydanticUndefined

from clipstream.config.settings import Settings
from clipstream.config.value_tree import to_yaml
from clipstream.data.settings import SPLIT_FILE, PathTokenizer
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import scheme_of, source_type
from clipstream.distributed.run_record import require_same, software
from clipstream.distributed.world import World
from clipstream.evals.settings import FrozenSettings, ZeroShotSettings
from clipstream.models.model_config import LOCAL, ModelConfig
from clipstream.models.settings import ModelSettings
from clipstream.storage.shard_url import ShardURL, has_secret, parts_of, redact, redact_tree, redact_value
from clipstream.training.settings import StageSettings
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import PluginSection, Section, Tree, entries_of, is_family, names_path, section_of

SPLIT_KEYS = re.compile(r"evals\.val\.data\.|data\.sources\..*\.drop$")
ELSEWHERE = re.compile(r"(run|log|model|distill|tokenizer|checkpoint)\.|.*\.shards$")  # no files, or compared elsewhere
OF_A_NODE = re.compile(
    r"run\.(device|threads|debug)|model\.cache_dir|data\.(cache|cache_gib)|data\.sources\..*\.(shards|folder)"
)
S = TypeVar("S", bound=Section)
_ANCHORED = ("/", "~", "$")  # absolute, in the home folder, or from the environment
# Keys whose values may be names as well.
_NAMES = ("name", "pretrained", "image_pretrained", "model", "classes", "templates", "against", "probability", "resume")
_PATTERN = re.compile(r"[{}\[\]*?$]|::")  # characters with a meaning in a specification of shards
TRAINS = re.compile(r"(model|tokenizer|data|loss|distill|optim|schedule|train)\.|run\.(seed|deterministic)$")
BESIDES = re.compile(
    r"model\.cache_dir|data\.(cache|cache_gib|workers|trace|\w+_timeout|max_\w+_failures)"
    r"|data\.sources\..*\.(shards|folder)"
)


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

    What may differ between nodes is left out; `split` is a node's own list of the held-out samples. The names and sizes
    of shards are compared when the data order is known, the files of a model when they are downloaded.

    Raises SettingsError: they differ; names the keys, both values, and the hosts.
    """

    def own() -> dict[str, object]:
        found = {key: value for key, value in by_key(settings).items() if not OF_A_NODE.fullmatch(key)}
        if split is not None:
            found = {key: value for key, value in found.items() if not SPLIT_KEYS.match(key)}
            found["data.val_split"] = hashlib.sha256(split.read_bytes()).hexdigest()
        lists = ((key, value if isinstance(value, list) else [value]) for key, value in found.items())
        texts = [(key, text) for key, values in lists for text in values if isinstance(text, str)]
        files = {f"{key} ({text})": FilePath(text) for key, text in texts if not ELSEWHERE.match(key)}
        files |= {f"{key} ({text})": FilePath(text) / "store.json" for key, text in texts if key.endswith("_features")}
        sums = {key: atomic_write.checksum(file) for key, file in files.items() if os.path.isfile(file)}
        return {**found, **sums, **software(found.values())}

    advice = "start all ranks with the same command line, files and software"
    require_same(world, own, "settings or software", advice, format_value)


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
    """Write config.yaml, of `Plan.repeatable`, and the list of held-out samples, `split`; with mode 0600 and a warning
    if it holds a credential.
    """
    if keys := secrets(settings):
        copied = settings.checkpoint.remote_sync
        synced = "" if copied is None else f", and --remote-sync copies it to {redact(copied)}"
        where, advice = f"written to config.yaml (mode 0600{synced})", "use an environment variable, ${NAME}, instead"
        logger.warning(f"{', '.join(keys)} has a password or key, which is {where}: {advice}")
    if split is not None and split != (own := settings.run_folder / SPLIT_FILE):
        atomic_write.replace(own, split.read_bytes())
    atomic_write.replace(settings.run_folder / "config.yaml", dump(settings).encode(), private=bool(keys))


def redact_settings(settings: Settings) -> Tree:
    """The settings as nested mappings without credentials, for the files and services that show a run."""
    return cast(Tree, redact_tree(settings.model_dump(mode="json")))


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
    if isinstance(section, Settings):
        changed["stages"] = {name: _portable_stage(stage, section) for name, stage in section.stages.items()}
    if isinstance(section, ModelSettings) and section.config is None and _is_file(section.name, ".json"):
        changed["config"] = asdict(ModelConfig.read(FilePath(section.name)))
        text = changed["config"]["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text.get(key) and FilePath(text[key]).is_dir():
                text[key] = _path(text[key])
    return section.model_copy(update=changed)


def _portable_stage(stage: StageSettings, settings: Settings) -> StageSettings:
    """The stage with absolute paths of the shards that its sources have in it."""
    values = dict(stage.set)
    for name, source in settings.data.sources.items():
        if (key := f"data.sources.{name}.shards") in values:
            values[key] = _absolute(source, "shards", values[key])
    return stage.model_copy(update={"set": values})


def _path(text: str) -> str:
    return text if text.startswith(_ANCHORED) or ShardURL(text).scheme is not None else os.path.abspath(text)


def _absolute(section: Section, key: str, value: Any) -> Any:
    """The value of a setting, with absolute paths where it names shards, files or folders."""
    if isinstance(section, SourceSettings) and key == "shards" and is_plugin(section.type):
        found = [_path(item) if _is_file(item) else item for item in ([value] if isinstance(value, str) else value)]
        return found[0] if isinstance(value, str) else found
    reads = isinstance(section, SourceSettings | FrozenSettings | ZeroShotSettings)
    if reads and key in ("shards", "train_shards", "tune_shards"):
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
    """Of `Plan.recorded`, the settings that determine the weights, by dotted key, for a checkpoint's state."""
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
