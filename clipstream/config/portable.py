"""Settings independent of the working folder: paths are made absolute, and the model's JSON config is included.

Commands (`pipe:`, `evals.NAME.fetch`, `log.alert`) and settings of plug-ins stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import braceexpand

from clipstream.config.plugins import is_plugin
from clipstream.config.section import Section
from clipstream.data.settings import DataSettings, PathTokenizer, SourceSettings
from clipstream.data.shard_url import PATH_SCHEMES, parts_of, scheme_of
from clipstream.distributed.settings import RunSettings
from clipstream.evals.settings import LabelledSettings, ZeroShotSettings
from clipstream.models.model_config import LOCAL, ModelConfig
from clipstream.models.settings import ModelSettings
from clipstream.training.settings import CheckpointSettings

S = TypeVar("S", bound=Section)
_ANCHORED = ("/", "~", "$")  # absolute, in the home folder, or from the environment
_PATTERN = re.compile(r"[{}\[\]*?$]|::")  # characters with a meaning in a specification of shards


def portable(section: S) -> S:
    """A copy of the settings with absolute paths and the content of the model's JSON config.

    Raises:
        SettingsError: the model's config cannot be read.
    """
    changed: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            changed[key] = portable(value)
        elif isinstance(value, dict):
            changed[key] = {k: portable(v) if isinstance(v, Section) else v for k, v in value.items()}
        elif value is not None:
            for cls, name, rule in _RULES:
                if name == key and isinstance(section, cls):
                    changed[key] = rule(value)
        if key == "shards" and isinstance(section, SourceSettings) and is_plugin(section.type):
            changed[key] = [_file(item) for item in value] if isinstance(value, list) else _file(value)
    if isinstance(section, ModelSettings) and section.config is None and _is_file(section.name, ".json"):
        changed["config"] = asdict(ModelConfig.read(Path(section.name)))
        text = changed["config"]["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text.get(key) and Path(text[key]).is_dir():
                text[key] = _path(text[key])
    return section.model_copy(update=changed)


def _path(text: str) -> str:
    return text if text.startswith(_ANCHORED) or scheme_of(text) is not None else os.path.abspath(text)


def _file(text: str | list[str]) -> str | list[str]:
    """The absolute path of an existing file; lists and other texts stay."""
    return _path(text) if isinstance(text, str) and _is_file(text) else text


def _model(text: str) -> str:
    if text.startswith(LOCAL):
        return LOCAL + _path(text[len(LOCAL) :])
    return _path(text) if _is_file(text, ".json") else text


def _is_file(text: str, ending: str = "\0") -> bool:
    return scheme_of(text) is None and (text.endswith(ending) or Path(text).is_file())


def _shards(spec: str | list[str]) -> str | list[str]:
    """A specification of shards, with the working folder before its relative paths."""
    if isinstance(spec, list):
        return [str(_shards(item)) for item in spec]
    here, parts = os.getcwd(), parts_of(spec)
    for number, part in enumerate(parts) if not _PATTERN.search(here) else ():
        scheme = scheme_of(part)
        prefix = f"{scheme}:" if scheme in PATH_SCHEMES else ""
        rest = part[len(prefix) :]
        if (scheme is not None and not prefix) or not rest or scheme_of(rest) is not None:
            continue
        try:
            paths = [rest, *braceexpand.braceexpand(rest)]
        except ValueError:  # reported where the shards are listed
            paths = [rest]
        if not any(path.startswith(_ANCHORED) for path in paths):
            parts[number] = f"{prefix}{here.rstrip('/')}/{rest}"
    return "::".join(parts)


_RULES: list[tuple[type[Section], str, Callable[[Any], Any]]] = [
    (RunSettings, "logs", _path),
    (ModelSettings, "name", _model),
    (ModelSettings, "pretrained", _model),
    (ModelSettings, "cache_dir", _path),
    (PathTokenizer, "name", _path),
    (DataSettings, "cache", _path),
    (SourceSettings, "shards", _shards),
    (SourceSettings, "folder", _path),
    (SourceSettings, "index", _path),
    (LabelledSettings, "classes", _file),
    (ZeroShotSettings, "templates", _file),
    (CheckpointSettings, "remote_sync", _path),
]
