"""Owns the layers of settings (YAML files with their lines, flags) and how a later layer lies over an earlier one.

Knows where every value came from, so that an error can say it; never validates a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from types import NoneType
from typing import Any

import yaml

from clipstream.schema import Path, child, kinds, section_of
from clipstream.section import PluginSection, Section

# YAML 1.1 reads 1e-3 as text; people mean the number.
_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
NULLS = ("", "~", "null", "Null", "NULL")

# Several keys that say one thing: a later layer that sets one displaces the others.
EXCLUSIVE: dict[Path, tuple[str, ...]] = {("train",): ("steps", "samples", "epochs")}


class Loader(yaml.SafeLoader):
    """YAML's safe loader, with numbers such as 1e-3."""


class Dumper(yaml.SafeDumper):
    """YAML's safe dumper, which quotes what `Loader` would take for a number."""


for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


@dataclass
class Layer:
    """One source of settings.

    Attributes:
        tree: nested mappings and lists of what it sets.
        places: path -> 'FILE:LINE' or the flag.
        texts: path -> a plain scalar as it was written.
        bare: paths set by a flag without a value.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)
    bare: set[Path] = field(default_factory=set)

    def put(self, path: Path, value: Any, place: str) -> None:
        """Set one value, making the mappings above it."""
        tree = self.tree
        for depth, part in enumerate(path[:-1], start=1):
            if tree.get(str(part)) is None:
                tree[str(part)] = {}
            if not isinstance(tree[str(part)], dict):
                return  # what stands here is no mapping, and will be told to be wrong
            self.places.setdefault(path[:depth], place)
            tree = tree[str(part)]
        tree[str(path[-1])] = value
        self.places[path] = place

    def put_text(self, path: Path, text: str, place: str) -> None:
        """Set one value written as text, a YAML scalar, list or mapping; what is no YAML is a string."""
        try:
            node = yaml.compose(text, Loader=Loader)
            value = None if node is None else _Reader(self, lambda _: place, []).value(node, path)
        except yaml.YAMLError:
            value = text
        # YAML trims text, cuts '# …' off, and takes a lone '!' for null: nobody means that on a command line.
        if isinstance(value, str) or (value is None and text not in NULLS):
            value = text
        self.put(path, value, place)
        self.texts[path] = text

    def drop(self, path: Path) -> None:
        """Take back what was set at `path` itself, if anything was."""
        tree: Any = self.tree
        for part in path[:-1]:
            tree = tree.get(str(part), {})
        tree.pop(str(path[-1]), None)
        self.places.pop(path, None)

    def has(self, path: Path) -> bool:
        """Whether this layer sets something at `path`."""
        return path in self.places


@dataclass(frozen=True)
class Places:
    """Where the values of some layers, highest first, came from."""

    # Two trees of settings are equal if their values are, wherever these came from.
    layers: tuple[dict[Path, str], ...] = field(default=(), compare=False)

    def of(self, path: Path) -> str:
        """The place of `path`, or of the nearest mapping above it; empty where nothing was written."""
        for length in range(len(path), 0, -1):
            for places in self.layers:
                if path[:length] in places:
                    return places[path[:length]]
        return ""


class _Reader:
    """Turns YAML nodes into values, noting lines and texts in a layer and duplicate keys as problems."""

    def __init__(self, layer: Layer, place: Any, problems: list[str]) -> None:
        self.layer = layer
        self.place = place
        self.problems = problems

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The value of a node that stands at `path`."""
        self.layer.places.setdefault(path, self.place(node))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag} has no meaning here", problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.style is None:
            self.layer.texts[path] = node.value
        loader = Loader("")
        return loader.construct_object(node, deep=True)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.value)
            if key_node.tag == "tag:yaml.org,2002:merge":
                parents = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for parent in reversed(parents):
                    inherited.update(self._mapping(parent, path))
                continue
            here = (*path, key)
            if key in own:
                first = self.layer.places[here]
                self.problems.append(f"{self.place(key_node)}: the key '{key}' is given twice (first at {first})")
                continue
            self.layer.places[here] = self.place(key_node)
            own[key] = self.value(value_node, here)
        return {**inherited, **own}


def yaml_layer(file: str, problems: list[str]) -> Layer:
    """Read one YAML file; what is wrong with it is added to `problems`, with its line."""
    layer = Layer()
    try:
        node = yaml.compose(FilePath(file).read_text(encoding="utf-8"), Loader=Loader)
        if node is None:
            return layer
        if not isinstance(node, yaml.MappingNode):
            problems.append(f"{file}:1: settings are a mapping of sections, not {type(node).__name__[:-4].lower()}")
            return layer
        layer.tree = _Reader(layer, lambda node: f"{file}:{node.start_mark.line + 1}", problems).value(node, ())
    except FileNotFoundError:
        problems.append(f"--config: there is no file {file}")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--config: cannot read {file}: {error}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problems.append(f"{file}{line}: not YAML: {getattr(error, 'problem', None) or error}")
    return layer


def merged(root: type[Section], layers: Sequence[Layer]) -> dict[str, Any]:
    """The tree of all layers, given from lowest to highest, each laid over the ones before it."""
    from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

    class Source(PydanticBaseSettingsSource):
        """One layer, less what the layers above it displace."""

        def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
            super().__init__(settings_cls)
            self.layer = layer

        def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
            return self.layer.tree.get(field_name), field_name, False

        def __call__(self) -> dict[str, Any]:
            kept: dict[str, Any] = _undisplaced(root, self.layer.tree, self.current_state, ())
            return kept

    class Tree(BaseSettings):
        """The merged mapping, not yet validated."""

        model_config = SettingsConfigDict(extra="allow")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(Source(settings_cls, layer) for layer in reversed(layers))

    return dict(Tree().model_extra or {})


def merged_texts(layers: Sequence[Layer]) -> dict[Path, str]:
    """The scalars as written of all layers, given from lowest to highest."""
    texts: dict[Path, str] = {}
    for layer in layers:
        for path in layer.places:
            texts.pop(path, None)
        texts.update(layer.texts)
    return texts


def _undisplaced(annotation: Any, mine: Any, above: Any, path: Path) -> Any:
    """`mine` without the keys that make no sense under what `above` sets, and without sections that are null.

    Where `above` names another `type`, only the keys of the whole family stay, as the others belong to the old type.
    """
    section = section_of(annotation)
    if not isinstance(mine, dict):
        return mine
    above = above if isinstance(above, Mapping) else {}
    kept = dict(mine)
    if section is not None and issubclass(section, PluginSection) and "type" in above:
        default = section.model_fields["type"].default
        if mine.get("type", default) != above["type"]:
            # EvalSettings keeps `data` and `every`; a text caption's `key` must not become a JSON caption's.
            kept = {key: value for key, value in mine.items() if key in section.model_fields and key != "type"}
    group = EXCLUSIVE.get(path, ())
    if any(above.get(key) is not None for key in group):
        kept = {key: value for key, value in kept.items() if key not in group}
    types = {**mine, **{key: above[key] for key in above if key == "type"}}
    found = {}
    for key, value in kept.items():
        inner = None if annotation is None else child(annotation, types, key)
        if value is not None or section_of(inner) is None or NoneType in kinds(inner) or section is None:
            found[key] = _undisplaced(inner, value, above.get(key), (*path, key))
    return found
