"""Settings from Python: files, mappings, `Settings` and keyword arguments become one validated tree.

Keyword arguments are the short flags of the command line, and go through the same table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from clipstream.config.config_sources import Node
from clipstream.config.dump import changed
from clipstream.config.settings import Settings, load
from clipstream.errors import SettingsError, each, wrong_type

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

    Raises:
        SettingsError: the settings are wrong; the message has a line for each mistake.

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
        trees.append(config.places if config.places.value else _tree(changed(config)))
    elif isinstance(config, Mapping):
        trees.append(_tree(config))
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
    return load(argv, trees=[*trees, _tree(own)] if own else trees, ranks=ranks, trains=trains)


def _tree(values: Mapping[str, Any]) -> Node:
    """The nodes of values by dotted key, or nested."""
    tree = Node()
    for key, value in values.items():
        if not isinstance(key, str):
            raise SettingsError(f"expected a key such as 'optim.lr', not {key!r}")
        tree.put_keys(tuple(key.split(".")), Node.of(_plain(value), ""))
    return tree


def _plain(value: Any) -> Any:
    """A Python value as YAML has it; a class or function becomes its 'module:Name'."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return value


def _text(name: str, value: Any) -> str:
    """A keyword's value as the command line has it."""
    value = _plain(value)
    if isinstance(value, str):
        return value
    if name in ("train_data", "val_data") and isinstance(value, list):
        return "::".join(map(str, value))
    try:
        return json.dumps(value)
    except TypeError as error:
        raise SettingsError(f"{name}: invalid value of type {type(value).__name__}: {error}") from error
