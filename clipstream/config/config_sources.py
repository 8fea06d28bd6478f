"""The layers of settings: YAML files and flags, each with the place of every value, merged into one tree.

Files and texts enter; a nested mapping leaves, not yet validated, with `Places` for error messages. A later layer is
merged over an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from types import NoneType
from typing import Any

import yaml

from clipstream.config.schema import Path, Tree, child, fit, kinds, section_of
from clipstream.config.section import PluginSection, Section
from clipstream.utils.escape import printable

# YAML 1.1 reads 1e-3 as text; here it is a number.
_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MOST_BYTES = 16 << 20  # of a file: config.yaml has some KB, and a list of 100,000 shards some MB
MOST_COPIES = 10_000  # keys and values repeated by aliases: ten nested lists of ten aliases each make 10^10
MOST_LEVELS = 100
NULLS = ("", "~", "null", "Null", "NULL")

# Keys that exclude each other: a later layer that sets one removes the others.
EXCLUSIVE: dict[Path, tuple[str, ...]] = {
    ("train",): ("steps", "samples", "epochs"),
    ("model",): ("name", "config"),
}


class Loader(yaml.SafeLoader):
    """YAML's safe loader, with numbers such as 1e-3."""


class Dumper(yaml.SafeDumper):
    """YAML's safe dumper; quotes texts that `Loader` reads as numbers, and escapes Unicode's line breaks."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """A scalar; double-quoted where a reader would split the line."""
        style = '"' if _LINE_BREAKS.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, Dumper.represent_str)

for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


@dataclass
class Layer:
    """One source of settings.

    Attributes:
        tree: nested mappings and lists.
        places: path -> 'FILE:LINE' or the flag.
        texts: path -> a plain scalar as it was written.
        bare: paths set by a flag without a value.
        implied: mappings that exist only because flags set keys in them; their place is the first of these flags.
    """

    tree: Tree = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)
    bare: set[Path] = field(default_factory=set)
    implied: set[Path] = field(default_factory=set)

    def put(self, path: Path, value: Any, place: str) -> None:
        """Set one value, with the mappings above it. Below a value that is no mapping nothing is set."""
        tree = self.tree
        for depth, part in enumerate(path[:-1], start=1):
            if tree.get(str(part)) is None:
                tree[str(part)] = {}
            if not isinstance(tree[str(part)], dict):
                return  # validation refuses this value
            if not self.has(path[:depth]):
                self.places[path[:depth]] = place
                self.implied.add(path[:depth])
            tree = tree[str(part)]
        tree[str(path[-1])] = value
        self.places[path] = place
        self.implied.discard(path)

    def put_text(self, path: Path, text: str, place: str) -> None:
        """Set one value from a YAML scalar, list or mapping; text that is not YAML is a string."""
        try:
            node = yaml.compose(text, Loader=Loader)
            value = None if node is None else _Reader(self, lambda _: place, []).value(node, path)
        except (yaml.YAMLError, RecursionError):
            value = text
        # YAML strips text, cuts '# …' off, and reads a lone '!' as null: not meant on a command line.
        if isinstance(value, str) or (value is None and text not in NULLS):
            value = text
        self.put(path, value, place)
        self.texts[path] = text

    def has(self, path: Path) -> bool:
        """Whether this layer sets something at `path`."""
        return path in self.places


@dataclass(frozen=True)
class Places:
    """Where values were written.

    Attributes:
        layers: highest first.
    """

    # Excluded from comparison: settings are equal if their values are.
    layers: tuple[Layer, ...] = field(default=(), compare=False)

    def of(self, path: Path) -> str:
        """The place of `path`, or of the nearest mapping above it; empty where neither was written."""
        nearest, layers = self._nearest(path)
        return layers[0].places[nearest] if layers else ""

    def written(self, path: Path) -> str:
        """As `of`, but empty for a mapping that is only implied by flags of other keys."""
        nearest, layers = self._nearest(path)
        return next((layer.places[nearest] for layer in layers if nearest not in layer.implied), "")

    def _nearest(self, path: Path) -> tuple[Path, list[Layer]]:
        """The longest prefix of `path` that is set, and the layers that set it."""
        for length in range(len(path), 0, -1):
            if found := [layer for layer in self.layers if layer.has(path[:length])]:
                return path[:length], found
        return (), []


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that settings must not contain."""


class _Reader:
    """Converts YAML nodes to values; adds places and texts to a layer, and duplicate keys to `problems`."""

    def __init__(self, layer: Layer, place: Callable[[yaml.Node], str], problems: list[str]) -> None:
        self.layer, self.place, self.problems = layer, place, problems
        self.seen: set[int] = set()
        self.copies = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The value of a node at `path`.

        Raises:
            yaml.MarkedYAMLError: an unknown tag, a key that is no scalar, or nesting and aliases beyond the limits.
        """
        self.copies += id(node) in self.seen
        self.seen.add(id(node))
        if self.copies > MOST_COPIES:
            text = f"aliases (*NAME) repeat more than {MOST_COPIES:,} keys and values: write fewer of them"
            raise _Refused(problem=text, problem_mark=node.start_mark)
        if len(path) > MOST_LEVELS:
            text = f"more than {MOST_LEVELS} levels of lists and mappings, one in the other"
            raise _Refused(problem=text, problem_mark=node.start_mark)
        self.layer.places.setdefault(path, self.place(node))
        if isinstance(node, yaml.ScalarNode):
            if node.style is None:
                self.layer.texts[path] = node.value
            try:
                return Loader("").construct_object(node, deep=True)
            except ValueError:  # an impossible date, a number of thousands of digits
                return node.value
        if node.tag not in _PLAIN_TAGS:
            raise _Refused(problem=f"the tag {node.tag} has no meaning here", problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        own: Tree = {}
        inherited: Tree = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _Refused(problem="a key is a word, not a list or a mapping", problem_mark=key_node.start_mark)
            key = key_node.value
            here = (*path, key)
            if key_node.tag == "tag:yaml.org,2002:merge":
                parents = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for parent in reversed(parents):
                    if not isinstance(parent, yaml.MappingNode):
                        raise _Refused(problem="<< takes only mappings", problem_mark=parent.start_mark)
                    inherited.update(self.value(parent, path))
            elif key in own:
                first = self.layer.places[here]
                self.problems.append(f"{self.place(key_node)}: the key '{key}' is given twice (first at {first})")
            else:
                self.layer.places[here] = self.place(key_node)
                own[key] = self.value(value_node, here)
        return {**inherited, **own}


def yaml_layer(file: str, problems: list[str]) -> Layer:
    """Read one YAML file; its mistakes are added to `problems`, with their lines."""
    layer, named, text = Layer(), printable(file), ""
    try:
        with FilePath(file).open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)  # a device such as /dev/zero has no end
        if len(content) > MOST_BYTES:
            problems.append(f"--config: {named} has more than {MOST_BYTES >> 20} MiB: it is no file of settings")
            return layer
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=Loader)
        if isinstance(node, yaml.MappingNode):
            layer.tree = _Reader(layer, lambda node: f"{file}:{node.start_mark.line + 1}", problems).value(node, ())
        elif node is not None:
            problems.append(f"{file}:1: settings are a mapping of sections, not {type(node).__name__[:-4].lower()}")
    except FileNotFoundError:
        problems.append(f"--config: there is no file {named}")
    except UnicodeDecodeError as error:
        problems.append(f"--config: {named} is no text in UTF-8 (byte {error.start:,})")
    except RecursionError:
        problems.append(f"{file}: lists and mappings are nested too deeply, or an alias contains itself")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(f"{file}:{line}: not YAML: the character #x{error.character:04x} is not allowed")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line_of = f":{mark.line + 1}" if mark else ""
        said = "" if isinstance(error, _Refused) else "not YAML: "
        problems.append(f"{file}{line_of}: {said}{getattr(error, 'problem', None) or error}")
    except (OSError, ValueError) as error:
        problems.append(f"--config: cannot read {named}: {getattr(error, 'strerror', None) or error}")
    return layer


def merged(root: type[Section], layers: Sequence[Layer]) -> Tree:
    """The tree of all layers, given from lowest to highest, with YAML's guesses about types undone (see `fit`)."""
    tree: Tree = {}
    texts: dict[Path, str] = {}
    for layer in layers:
        for path in layer.places:
            texts.pop(path, None)
        texts.update(layer.texts)
    for layer in reversed(layers):
        tree = _merge(root, layer.tree, tree, ())
    fitted: Tree = fit(root, tree, (), texts)
    return fitted


def _merge(annotation: Any, low: Tree, high: Tree, path: Path) -> Tree:
    """`low` with `high` merged over it, without keys that `high` excludes and without sections that are null.

    Where `high` has another `type`, only the keys of the whole family are kept, as the others belong to the old type.
    """
    section = section_of(annotation)
    kept = dict(low)
    if (
        section is not None
        and issubclass(section, PluginSection)
        and high.get("type", kind := low.get("type", section.model_fields["type"].default)) != kind
    ):
        # EvalSettings keeps `data` and `every`; the `key` of a text caption must not become a JSON caption's.
        kept = {key: value for key, value in low.items() if key in section.model_fields and key != "type"}
    group = EXCLUSIVE.get(path, ())
    if any(high.get(key) is not None for key in group):
        kept = {key: value for key, value in kept.items() if key not in group}
    typed = {**low, "type": high["type"]} if "type" in high else low
    found: Tree = {}
    for key, value in kept.items():
        inner = None if annotation is None else child(annotation, typed, key)
        over = high.get(key)
        if isinstance(value, dict):
            value = _merge(inner, value, over if isinstance(over, dict) else {}, (*path, key))
        elif value is None and section is not None and section_of(inner) is not None and NoneType not in kinds(inner):
            continue
        found[key] = value
    return found | {k: v for k, v in high.items() if not (isinstance(v, dict) and isinstance(found.get(k), dict))}
