"""Error messages about settings: pydantic's errors as sentences, each with file and line, or flag, and a suggestion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from clipstream.config.config_sources import Node
from clipstream.errors import did_you_mean
from clipstream.utils.section import (
    Path,
    PluginSection,
    Section,
    Tree,
    below,
    child,
    chosen,
    dotted,
    kinds,
    leaves,
    section_of,
)  # fmt: skip

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
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of names",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
_LIMITS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "at most"),
}


def format_problem(places: Node, path: Path, text: str) -> str:
    """One line: the place of a setting, its key, and `text`.

    Args:
        places: the tree of settings as they were written.
    """
    return _line(places.place_of(path, written=True), dotted(path), text)


def _line(place: str, key: str, text: str) -> str:
    if not place or (place.startswith("--") and place.removeprefix("--").replace("-", "_") == key.replace("-", "_")):
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
        lines.append(_line(places.place_of(where, written=missing), dotted(where), text))
    return lines


def _locate(root: type[Section], tree: Any, loc: Sequence[str | int], *, items: bool = True) -> tuple[Path, Any, Any]:
    """(path, annotation, value) at a pydantic `loc`, in which the names of union members are left out.

    Args:
        items: whether the path may lead into a list.
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
            if isinstance(name, str) and chosen(section, {"type": name}) is section and name not in section.builtin:
                return (*path, "type"), text + did_you_mean(name, section.builtin)
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
    known = list(chosen(section, value).model_fields) if section is not None else []
    if near := did_you_mean(name, known):
        return f"unknown key{near}"
    if section is not None and issubclass(section, PluginSection):
        types = [kind for kind, cls in section.builtin.items() if name in cls.model_fields]
        if types:
            return f"a key of type {' or '.join(types)} only: set the type"
    if elsewhere := " or ".join(f"'{key}'" for key, _ in leaves(root) if key.rpartition(".")[2] == name):
        return f"unknown key; did you mean {elsewhere}?"
    kind = f" of type {value['type']}" if isinstance(value, Mapping) and isinstance(value.get("type"), str) else ""
    return f"unknown key; known keys{kind}: {', '.join(known)}"


def enumerate_words(problems: Iterable[str]) -> str:
    """All problems as one message, in which each line starts with 'error: ' when it is printed."""
    return "\nerror: ".join(dict.fromkeys(problems))
