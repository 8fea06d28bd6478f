"""YAML files and values of flags as a tree in which each value has its place, and messages about wrong ones.

Files and texts enter; a tree of `Node` leaves. What pydantic says about the settings made of it becomes sentences, each
with file and line, or flag, and a suggestion (`format_errors`); an unknown flag becomes advice.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from clipstream.config.short_flags import BY_FLAG, FlagAlias, refusal
from clipstream.errors import absent, did_you_mean, nearest
from clipstream.storage.shard_url import GENERATED, ONLY_NAMED, PATH_SCHEMES, WITHHELD
from clipstream.text import Lines, listed, message, printable
from clipstream.utils.atomic_write import note_input
from clipstream.utils.section import (
    Path,
    PluginSection,
    Section,
    Tree,
    below,
    builtin_parts,
    child,
    class_of_value,
    dotted,
    kinds,
    leaf,
    leaves,
    section_of,
    types_of,
)  # fmt: skip

# YAML 1.1 reads 1e-3 as text; here it is a number.
_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MOST_BYTES = 16 << 20  # of a file: config.yaml has some KB, and a list of 100,000 shards some MB
MOST_COPIES = 10_000  # keys and values repeated by aliases: ten nested lists of ten aliases each make 10^10
NULLS = ("", "~", "null", "Null", "NULL")

_LOCAL = re.compile(rf"(?:{'|'.join(('file', *PATH_SCHEMES, *GENERATED))}):(?://)?")
_ELSEWHERE = re.compile(r"pipe:|[\w+.-]+://")


class YamlLoader(yaml.SafeLoader):
    """YAML's safe loader, with numbers such as 1e-3."""


class Dumper(yaml.SafeDumper):
    """YAML's safe dumper; quotes texts that `YamlLoader` reads as numbers, and escapes Unicode's line breaks."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """A scalar; double-quoted where a reader would split the line."""
        style = '"' if _LINE_BREAKS.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, Dumper.represent_str)

for _cls in (YamlLoader, Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def to_yaml(tree: object) -> str:
    """A tree as YAML that `YamlLoader` reads back unchanged."""
    text: str = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


@dataclass
class Node:
    """One setting as it was written. Excluded from comparison: settings are equal if their values are."""

    value: Any = field(default_factory=dict, compare=False)  # a scalar, a list of nodes, or nodes by key
    # 'FILE:LINE' or the flag; of a mapping that only flags of its keys imply, the first of these flags.
    place: str = field(default="", compare=False)
    written: str = field(default="", compare=False)  # as `place`, but empty for such a mapping
    text: str | None = field(default=None, compare=False)  # a plain scalar as it was written
    notices: list[str] = field(default_factory=list, compare=False)  # of a whole tree: on flags without effect

    @classmethod
    def of(cls, value: object, place: str) -> Node:
        """The nodes of a value whose parts all have the same place."""
        if isinstance(value, dict):
            value = {key: cls.of(part, place) for key, part in value.items()}
        elif isinstance(value, list):
            value = [cls.of(part, place) for part in value]
        return cls(value, place, place)

    @classmethod
    def of_text(cls, text: str, place: str) -> Node:
        """The node of a YAML scalar, list or mapping; text that is not YAML is a string."""
        node = cls(text, place, place)
        try:
            composed = yaml.compose(text, Loader=YamlLoader)
            node.value = None if composed is None else _Reader(lambda _: place, []).node(composed).value
        except (yaml.YAMLError, RecursionError):
            pass
        # YAML strips text, cuts '# …' off, and reads a lone '!' as null: not meant on a command line.
        if isinstance(node.value, str) or (node.value is None and text not in NULLS):
            node.value = text
        node.text = text
        return node

    def put(self, path: Path, node: Node) -> None:
        """Put a node below this one, with the mappings above it. Below a value that is no mapping nothing is put."""
        tree = self.value
        for part in path[:-1]:
            if part not in tree or tree[part].value is None:
                tree[part] = Node({}, node.place)
            if not isinstance(tree[part].value, dict):
                return  # validation refuses this value
            tree = tree[part].value
        tree[path[-1]] = node

    def put_keys(self, path: Path, node: Node) -> None:
        """As `put`, but the keys of a mapping are put one by one, beside those that are there."""
        if isinstance(node.value, dict) and node.text is None:  # a text such as 'synthetic:' is YAML's mapping, too
            for key, part in node.value.items():
                self.put_keys((*path, key), part)
        else:
            self.put(path, node)

    def at(self, path: Path) -> Node | None:
        node: Node | None = self
        for part in path:
            node = None if node is None else below(node.value, part)
        return node

    def place_of(self, path: Path, *, written: bool = False) -> str:
        """The place of the node at `path`, or of the nearest one above it; empty where neither was written. With
        `written`, mappings that are only implied by flags of other keys have no place.
        """
        nearest = self
        for part in path:
            inner: Node | None = below(nearest.value, part)
            if inner is None:
                break
            nearest = inner
        return nearest.written if written else nearest.place


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that settings must not contain."""


class _Reader:
    """Converts YAML's nodes to ours; duplicate keys are added to `problems`."""

    def __init__(self, place: Callable[[yaml.Node], str], problems: list[str]) -> None:
        self.place, self.problems = place, problems
        self.seen: set[int] = set()
        self.copies = 0

    def node(self, node: yaml.Node, place: str = "") -> Node:
        """The node, with the place of its key, if any.

        Raises yaml.MarkedYAMLError: an unknown tag, a key that is no scalar, or aliases that multiply.
        """
        self.copies += id(node) in self.seen
        self.seen.add(id(node))
        if self.copies > MOST_COPIES:
            text = f"aliases (*NAME) expand to more than {MOST_COPIES:,} keys and values"
            raise _Refused(problem=text, problem_mark=node.start_mark)
        place = place or self.place(node)
        made = Node(None, place, place)
        if isinstance(node, yaml.ScalarNode):
            made.text = node.value if node.style is None else None
            try:
                made.value = YamlLoader("").construct_object(node, deep=True)
            except ValueError:  # an impossible date, a number of thousands of digits
                made.value = node.value
            return made
        if node.tag not in _PLAIN_TAGS:
            raise _Refused(problem=f"unknown tag {node.tag}", problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            made.value = [self.node(item) for item in node.value]
            return made
        own: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                text = "a key must be a scalar, not a list or a mapping"
                raise _Refused(problem=text, problem_mark=key_node.start_mark)
            key, key_place = key_node.value, self.place(key_node)
            if key_node.tag == "tag:yaml.org,2002:merge":
                parents = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for parent in reversed(parents):
                    if not isinstance(parent, yaml.MappingNode):
                        raise _Refused(problem="<< takes only mappings", problem_mark=parent.start_mark)
                    inherited.update(self.node(parent).value)
            elif key in own:
                self.problems.append(f"{key_place}: duplicate key '{key}' (first at {own[key].place})")
            else:
                own[key] = self.node(value_node, key_place)
        made.value = {**inherited, **own}
        return made


def read_yaml(file: str, problems: list[str]) -> Node:
    """Read one YAML file; its mistakes are added to `problems`, with their lines."""
    named, text = printable(file), ""
    try:
        note_input(file)
        with FilePath(file).open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)  # a device such as /dev/zero has no end
        if len(content) > MOST_BYTES:
            problems.append(f"--config: {named} has more than {MOST_BYTES >> 20} MiB")
            return Node()
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=YamlLoader)
        if isinstance(node, yaml.MappingNode):
            reader = _Reader(lambda node: f"{file}:{node.start_mark.line + 1}", problems)
            return Node(reader.node(node).value)
        if node is not None:
            problems.append(f"{file}:1: expected a mapping of sections, not {type(node).__name__[:-4].lower()}")
    except FileNotFoundError:
        problems.append(f"--config: {absent(file)}")
    except UnicodeDecodeError as error:
        problems.append(f"--config: {named} is not UTF-8 (byte {error.start:,})")
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
    return Node()


def harmless(node: Node, file: str, problems: list[str], path: Path = ()) -> Node:
    """The settings of a run that was only named, which somebody else may have written.

    Sinks are left out, other Python code is added to `problems`, and commands and URLs of data become `WITHHELD` names,
    which are an error where they are read.
    """
    value, text = node.value, node.text if node.text is not None else node.value
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if (*path, name) != ("log", "sinks")}
        inner: Any = {name: harmless(part, file, problems, (*path, name)) for name, part in kept.items()}
        return replace(node, value=inner)
    if isinstance(value, list):
        items = enumerate(value)
        return replace(node, value=[harmless(part, file, problems, (*path, number)) for number, part in items])
    code = key in ("type", "transform") and ":" in str(text)  # as `load_plugin` takes it, also of modules with a dash
    if code or (key == "trust_remote_code" and value not in (None, False)):
        problems.append(f"{node.place}: {dotted(path)}: {printable(text)} is Python code, {ONLY_NAMED.format(file)}")
    if path[:1] not in (("data",), ("evals",)) or not isinstance(text, str):
        return node
    leaves_it = _ELSEWHERE.match(text) is not None
    if key == "shards":  # whose braces may make a scheme
        leaves_it = any(":" in _LOCAL.sub("", part.strip()) for part in text.split("::"))
    return Node.of(f"{WITHHELD}{node.place}", node.place) if leaves_it else node


_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list",
    "dict_type": "a mapping of names",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
_SECTIONS = {"dict_type", "model_type", "model_attributes_type"}
_LIMITS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "at most"),
}


def format_problem(places: Node, path: Path, text: str) -> str:
    """One line: the place of a setting, its key, and `text`."""
    return _line(places.place_of(path, written=True), dotted(path), text)


def _line(place: str, key: str, text: str) -> str:
    if not place or place.lstrip("-").replace("-", "_").lower() == key.replace("-", "_").strip("_").lower():
        return f"{place or key}: {text}"
    return f"{place}: {key}: {text}"


def format_errors(root: type[Section], tree: Tree, error: ValidationError, places: Node) -> list[str]:
    """One line for each error about `tree`, in the order of the tree's sections."""
    found: dict[Path, list[Any]] = {}
    for one in error.errors(include_url=False):
        # The error of a list that is too short is the list's, not the missing item's.
        path, _, _ = _locate(root, tree, one["loc"], items=one["type"] != "missing")
        found.setdefault(path, []).append(one)
    lines = []
    for path, findings in found.items():
        where, text = _sentence(root, tree, path, findings)
        # A missing key is not the fault of flags that set other keys of the same section.
        missing = any(one["type"] == "missing" for one in findings)
        place = places.place_of(where, written=missing)
        if place.startswith("--") and {one["type"] for one in findings} <= _SECTIONS:
            text = f"a section of settings: set its keys{_flags_of(where, place)}"
        lines.append(_line(place, dotted(where), text))
    return lines


def _flags_of(path: Path, place: str) -> str:
    """The flags of a section: its own, and up to three short ones, first those that are called as it is."""
    known = [alias.flag for alias in BY_FLAG.values() if "".join(alias.keys[:1]).startswith(f"{dotted(path)}.")]
    known.sort(key=lambda flag: not flag.endswith(f"-{path[-1]}"))
    return f", {place}.KEY" + (f"; short flags of it are {listed(known, 3)}" if known else "")


def _locate(root: type[Section], tree: Any, loc: Sequence[str | int], *, items: bool = True) -> tuple[Path, Any, Any]:
    """(path, annotation, value) at a pydantic `loc`, in which the names of union members are left out; without `items`,
    the path does not lead into a list.
    """
    annotation: Any = root
    path: Path = ()
    for part in loc:
        step = child(annotation, tree, part)
        known = (isinstance(tree, Mapping) and part in tree) or (isinstance(tree, list) and isinstance(part, int))
        if step is None and not known:
            continue
        if isinstance(part, int) and not items:
            break
        path, annotation, tree = (*path, part), step, below(tree, part)
    return path, annotation, tree


def _sentence(root: type[Section], tree: Tree, path: Path, findings: Sequence[Any]) -> tuple[Path, str]:
    """(path of the wrong setting, message), for pydantic's errors about `path`."""
    by_type = {one["type"]: one for one in findings}
    if "extra_forbidden" in by_type:
        return path, _unknown_key(root, tree, path)
    _, annotation, value = _locate(root, tree, path)
    for kind in kinds(annotation) if isinstance(value, list) else ():
        if get_origin(kind) is tuple and Ellipsis not in get_args(kind) and len(value) != len(get_args(kind)):
            return path, f"expected {len(get_args(kind))} values, not {len(value)}"
    if "missing" in by_type:
        if path == ("data", "sources", "train", "shards"):
            return path, (
                "missing: short flags of the data set the source 'train': set --train-data SHARDS, or use "
                "--data.sources.NAME.KEY"
            )
        return path, "missing: required"
    if "value_error" in by_type:
        text, section = str(by_type["value_error"]["ctx"]["error"]), section_of(annotation)
        if section is not None and issubclass(section, PluginSection) and isinstance(value, Mapping):
            name = value.get("type")
            known = builtin_parts(section)
            if isinstance(name, str) and class_of_value(section, {"type": name}) is section and name not in known:
                return (*path, "type"), text + did_you_mean(name, known)
        return path, text
    shown = {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    if by_type.keys() == {"literal_error"}:
        options = [str(choice) for kind in kinds(annotation) for choice in get_args(kind)]
        choices = [choice for one in findings for choice in options or [str(one["ctx"]["expected"])]]
        if len(choices) > 1 or len(findings) > 1:
            return path, f"{shown} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    wanted = []
    for one in findings:
        if (kind := one["type"]) in _LIMITS:
            key, words = _LIMITS[kind]
            wanted.append(f"{words} {one['ctx'][key]:g}")
        elif kind == "literal_error":
            wanted.append(str(one["ctx"]["expected"]))
        elif kind in _EXPECTED or len(findings) > 1:
            wanted.append(_EXPECTED.get(kind) or str(one["msg"]))
        else:
            return path, f"{one['msg'][0].lower()}{one['msg'][1:]}"
    return path, f"expected {' or '.join(dict.fromkeys(wanted))}, not {shown}"


def _unknown_key(root: type[Section], tree: Tree, path: Path) -> str:
    """The message about a key that its section does not have, with the keys that may be meant."""
    (_, annotation, value), name = _locate(root, tree, path[:-1]), str(path[-1])
    section = section_of(annotation)
    known = list(class_of_value(section, value).model_fields) if section is not None else []
    if near := did_you_mean(name, known):
        return f"unknown key{near}"
    if section is not None and issubclass(section, PluginSection):
        types = [kind for kind, cls in types_of(section).items() if name in cls.model_fields]
        if types:
            return f"a key of type {' or '.join(types)} only: set the type"
    if elsewhere := " or ".join(f"'{key}'" for key, _ in leaves(root) if key.rpartition(".")[2] == name):
        return f"unknown key; did you mean {elsewhere}?"
    kind = f" of type {value['type']}" if isinstance(value, Mapping) and isinstance(value.get("type"), str) else ""
    return f"unknown key; known keys{kind}: {', '.join(known)}"


def enumerate_words(problems: Iterable[str]) -> str:
    """All problems as one message, in which each line starts with 'error: ' when it is printed."""
    return Lines("\nerror: ".join(map(message, dict.fromkeys(problems))))


def generic_key(key: str) -> str:
    """A short flag's key, with NAME for the name of a source or evaluator."""
    return re.sub(r"^(data\.sources|evals)\.\w+", r"\1.NAME", key)


def plain_field(root: type[Section], alias: FlagAlias) -> FieldInfo | None:
    """The setting that a short flag is another name of; None where it means something else."""
    plain = not (alias.words or alias.convert or alias.sets or alias.together or alias.keys[1:])
    return leaf(root, generic_key(alias.keys[0])) if plain else None


def meaning_of(root: type[Section], alias: FlagAlias) -> str:
    """What a short flag means: its own text, or that of its setting."""
    field = plain_field(root, alias)
    return alias.meaning or (field and field.description) or ""


def advice(root: type[Section], flag: str) -> str:
    """Advice for an unknown flag: on one of open_clip's, the keys with this name in some section, or a near flag."""
    if (text := refusal(flag.replace("_", "-"))) is not None:
        return text
    name = flag.removeprefix("--").replace("-", "_")
    fields = {key: field for key, field in leaves(root) if "NAME" not in key}
    flags = {key: f"--{key.replace('_', '-')}" for key in fields}
    if same := [known for key, known in flags.items() if key.rpartition(".")[2] == name]:
        return f"unknown flag; did you mean {' or '.join(map(repr, same))}?"
    names = {known.rpartition(".")[2]: known for known in flags.values()}
    names |= {known.removeprefix("--"): known for known in (*BY_FLAG, "--config", "--help", "--print-config")}
    about = {flag: f"{flag} {alias.value} {meaning_of(root, alias)}" for flag, alias in BY_FLAG.items()}
    short = {key for alias in BY_FLAG.values() for key in alias.keys}
    about |= {flags[key]: f"{flags[key]} {field.description}" for key, field in fields.items() if key not in short}
    typed = [names[one] for one in difflib.get_close_matches(name.replace("_", "-"), names, 1, 0.85)]
    near = [names[one] for one in nearest(name, names)]
    if found := typed or list(dict.fromkeys([*flags_like(name, about), *near])):
        return f"unknown flag; did you mean {' or '.join(map(repr, found))}?"
    return "unknown flag; see --help all"


def flags_like(name: str, about: Mapping[str, str]) -> list[str]:
    """Up to two flags whose names and descriptions have the words of `name`, or most of them: those of other trainers.

    A word is found if one begins as the other, by at least three letters; rare words count more (inverse document
    frequency), and words of a flag's own name twice. `about`: flag -> its name and description.
    """

    def words(text: str) -> set[str]:
        return {word[:6] for word in re.findall(r"[a-z]{2,}[0-9]*", text.lower().replace("_", " "))}

    def hits(wanted: set[str], there: set[str]) -> set[str]:
        longer = tuple(word for word in there if len(word) > 2)
        begun = {word[:size] for word in there for size in range(3, len(word) + 1)}
        return {word for word in wanted if word in there or word in begun or word.startswith(longer)}

    if not (wanted := words(name)):
        return []
    found = {flag: hits(wanted, words(text)) for flag, text in about.items()}
    count = Counter(word for there in found.values() for word in there)
    weight = {word: min(math.log(len(about) / count[word]) if count[word] else 3, 3) for word in wanted}

    def score(flag: str) -> float:
        share = sum(weight[word] for word in found[flag]) / sum(weight.values())
        own = sum(weight[word] for word in hits(found[flag], words(flag))) / sum(weight.values())
        return share + own / 2 - len(about[flag]) / 1000 - 0.2 * ("." in flag) if share > 0.65 else 0

    best = sorted(about, key=score, reverse=True)
    return [flag for flag in best[:2] if score(flag) > 0.8 * score(best[0])]
