"""Settings as YAML that `--config` reads back: a run's config.yaml, and the output of `--print-config`.

config.yaml repeats the run from any folder: paths are made absolute, and the model's JSON config is included. Commands
(`pipe:`, `evals.NAME.fetch`) and settings of plug-ins stay as they are. `--print-config` prints settings
as they were given, and writes no file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import braceexpand

from clipstream.config.config_sources import to_yaml
from clipstream.config.plan import Plan
from clipstream.config.settings import Settings, Written, by_key, changed, shown
from clipstream.data.settings import SPLIT_FILE, SourceSettings
from clipstream.data.text_settings import PathTokenizer
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.settings import FrozenSettings
from clipstream.models.model_config import LOCAL, ModelConfig
from clipstream.models.settings import ModelSettings
from clipstream.storage.shard_url import PATH_SCHEMES, ShardURL, has_secret, parts_of, redact, redact_tree, redact_value
from clipstream.text import counted
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import Section, Tree, names_path

if TYPE_CHECKING:
    pass

S = TypeVar("S", bound=Section)
FLAG, ALL = "--print-config", "all"
_ANCHORED = ("/", "~", "$")  # absolute, in the home folder, or from the environment
# Keys whose values may be names as well.
_NAMES = ("name", "pretrained", "image_pretrained", "model", "classes", "templates", "probability", "resume")
_PATTERN = re.compile(r"[{}\[\]*?$]|::")  # characters with a meaning in a specification of shards


TRAINS = re.compile(r"(model|tokenizer|data|loss|distill|optim|schedule|train)\.|run\.(seed|deterministic)$")
BESIDES = re.compile(
    r"model\.cache_dir|data\.(cache|cache_gib|workers|trace|\w+_timeout|max_\w+_failures)"
    r"|data\.sources\..*\.(shards|folder)"
)


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


def write_config(plan: Plan) -> None:
    """Write config.yaml and the list of held-out samples; with mode 0600 and a warning if it holds a credential."""
    settings, split = plan.repeatable, plan.survey.split
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


def redacted(settings: Settings) -> Tree:
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
        changed["config"] = asdict(ModelConfig.read(Path(section.name)))
        text = changed["config"]["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text.get(key) and Path(text[key]).is_dir():
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
        return _named(value)
    return [_path(item) for item in value] if isinstance(value, list) else _path(value)


def _named(text: str | list[str]) -> str | list[str]:
    """The absolute path of an existing file or a model's folder; lists and other texts stay."""
    if isinstance(text, str) and text.startswith(LOCAL):
        return LOCAL + _path(text[len(LOCAL) :])
    return _path(text) if isinstance(text, str) and _is_file(text, ".json") else text


def _is_file(text: str, ending: str = "\0") -> bool:
    return ShardURL(text).scheme is None and (text.endswith(ending) or Path(text).is_file())


def _shards(spec: str | list[str]) -> str | list[str]:
    """A specification of shards, with the working folder before its relative paths."""
    if isinstance(spec, list):
        return [str(_shards(item)) for item in spec]
    here, parts = os.getcwd(), parts_of(spec)
    for number, part in enumerate(parts) if not _PATTERN.search(here) else ():
        scheme = ShardURL(part).scheme
        prefix = f"{scheme}:" if scheme in PATH_SCHEMES else ""
        rest = part[len(prefix) :]
        if (scheme is not None and not prefix) or not rest or ShardURL(rest).scheme is not None:
            continue
        try:
            paths = [rest, *braceexpand.braceexpand(rest)]
        except ValueError:  # reported where the shards are listed
            paths = [rest]
        if not any(path.startswith(_ANCHORED) for path in paths):
            parts[number] = f"{prefix}{here.rstrip('/')}/{rest}"
    return "::".join(parts)


def take_flag(argv: Sequence[str]) -> tuple[bool | None, list[str]]:
    """(True for `--print-config all`, False for `--print-config`, None without it; the rest of the command line).

    Raises SettingsError: the flag has another value than `all`.
    """
    rest = list(argv)
    places = [place for place, token in enumerate(rest) if token.partition("=")[0] == FLAG]
    if not places:
        return None, rest
    value = rest.pop(places[0]).partition("=")[2]
    if len(places) > 1 or value not in ("", ALL):
        raise SettingsError(f"{FLAG}: expected once, alone or as {FLAG} {ALL}")
    if rest[places[0] : places[0] + 1] == [ALL]:
        value = rest.pop(places[0])
    return value == ALL, rest


def print_config(written: Written, verb: str, every: bool, comments: Sequence[str] = ()) -> int:
    """Print the settings on rank 0, and return the exit code, 0. A password is printed too, with a warning on stderr.

    Args:
        every: print all settings, and not only those that differ from the defaults.
        comments: lines that stand before them.
    """
    settings, world = written.settings, World.from_env()
    if not world.is_main:
        return 0
    if keys := secrets(settings):
        logger.warning(
            f"{', '.join(keys)} has a password or key, which is in this output: use an environment variable, "
            f"${{NAME}}, instead"
        )
    what = "all settings" if every else f"settings that differ from the defaults ({FLAG} {ALL} prints all)"
    print(f"# clipstream {verb}: {what}")
    if written.places.place_of(("data", "global_batch_size")) == "--batch-size":
        print(f"# data.global_batch_size is --batch-size x --accum-freq x {counted(world.size, 'rank')}")
    tree = settings.model_dump(mode="json") if every else changed(settings)
    print("".join(f"# {line}\n" for line in comments) + to_yaml(tree), end="")
    return 0


def noted(settings: Settings) -> dict[str, object]:
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
    """Differences between `noted(settings)` and a checkpoint's: 'KEY OLD -> NEW'; keys that it lacks are left out."""
    return [
        f"{key} {shown(before[key])} -> {shown(value)}"
        for key, value in noted(settings).items()
        if key in before and before[key] != value
    ]
