"""Owns the words of settings errors: pydantic's findings as plain sentences, each with its place and a suggestion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from clipstream.errors import did_you_mean
from clipstream.layers import Places
from clipstream.schema import Path, annotation_at, below, child, chosen, dotted, kinds, leaves, section_of
from clipstream.section import PluginSection, Section

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


def problem(places: Places, path: Path, text: str) -> str:
    """One line: where it was written, the key, and what is wrong."""
    place, key = places.of(path), dotted(path)
    if not place or (place.startswith("--") and place.removeprefix("--").replace("-", "_") == key.replace("-", "_")):
        return f"{place or key}: {text}"
    return f"{place}: {key}: {text}"


def worded(root: type[Section], tree: dict[str, Any], error: ValidationError, places: Places) -> list[str]:
    """Every finding of `error` about `tree` as one line of its own, in the order of the tree's sections."""
    found: dict[Path, list[Any]] = {}
    for one in error.errors(include_url=False):
        found.setdefault(_path(root, tree, one["loc"], one["type"]), []).append(one)
    lines = []
    for path, findings in found.items():
        where, text = _sentence(root, tree, path, findings)
        lines.append(problem(places, where, text))
    return lines


def _path(root: type[Section], tree: Any, loc: Sequence[str | int], kind: str) -> Path:
    """The place in the tree that pydantic's `loc` means: without the names of union members in it."""
    annotation: Any = root
    path: Path = ()
    for part in loc:
        step = None if annotation is None else child(annotation, tree, part)
        known = (isinstance(tree, Mapping) and part in tree) or (isinstance(tree, list) and isinstance(part, int))
        if step is None and not known:
            continue
        if isinstance(part, int) and kind == "missing":
            break  # a list that is too short: the list is wrong, not the item that is not there
        path, annotation, tree = (*path, part), step, below(tree, part)
    return path


def _sentence(root: type[Section], tree: dict[str, Any], path: Path, findings: Sequence[Any]) -> tuple[Path, str]:
    """(the path to blame, what is wrong with it)."""
    kinds_found = {one["type"] for one in findings}
    first = findings[0]
    value: Any = tree
    for part in path:
        value = below(value, part)
    if "extra_forbidden" in kinds_found:
        return path, _unknown_key(root, tree, path)
    length = _wanted_length(annotation_at(root, tree, path))
    if length and isinstance(value, list) and len(value) != length:
        return path, f"expected {length} values, not {len(value)}"
    if "missing" in kinds_found:
        return path, _missing(path)
    if "value_error" in kinds_found:
        text = str(next(one for one in findings if one["type"] == "value_error")["ctx"]["error"])
        section = section_of(annotation_at(root, tree, path))
        if (
            section is not None
            and issubclass(section, PluginSection)
            and isinstance(value, Mapping)
            and "type" in value
        ):
            kind = str(value["type"])
            if chosen(section, {"type": kind}) is section and kind not in section.builtin:
                return (*path, "type"), text + did_you_mean(kind, section.builtin)
        return path, text
    if kinds_found == {"literal_error"}:
        choices = [str(choice) for one in findings for choice in _choices(annotation_at(root, tree, path), one)]
        if len(choices) > 1 or len(findings) > 1:
            return path, f"{_shown(value)} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    wanted = list(dict.fromkeys(_expectation(one) for one in findings))
    known = {"literal_error", *_EXPECTED, *_LIMITS}
    if len(findings) == 1 and first["type"] not in known:
        return path, f"{first['msg'][0].lower()}{first['msg'][1:]}"
    return path, f"expected {' or '.join(wanted)}, not {_shown(value)}"


_LIMITS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "at most"),
}


def _expectation(one: Any) -> str:
    kind, context = one["type"], one.get("ctx", {})
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"{words} {context[key]:g}"
    if kind == "literal_error":
        return str(context["expected"])
    return _EXPECTED.get(kind) or str(one["msg"])


def _shown(value: Any) -> str:
    """A value as YAML shows it, shortened."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else repr(value)
    text = str(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _choices(annotation: Any, one: Any) -> list[str]:
    options = [choice for kind in kinds(annotation) for choice in get_args(kind)] if annotation else []
    return [str(option) for option in options] or [str(one["ctx"]["expected"])]


def _wanted_length(annotation: Any) -> int | None:
    for kind in kinds(annotation) if annotation is not None else ():
        if getattr(kind, "__origin__", None) is tuple and Ellipsis not in get_args(kind):
            return len(get_args(kind))
    return None


def _missing(path: Path) -> str:
    if path == ("data", "sources", "train", "shards"):
        return (
            "missing: the short flags for data set the source named 'train'; give --train-data SHARDS, "
            "or name the source that you mean: --data.sources.NAME.KEY"
        )
    return "missing: this key has no default"


def _unknown_key(root: type[Section], tree: dict[str, Any], path: Path) -> str:
    value: Any = tree
    for part in path[:-1]:
        value = below(value, part)
    annotation = annotation_at(root, tree, path[:-1])
    section = section_of(annotation) if annotation is not None else None
    known = list(chosen(section, value).model_fields) if section is not None else []
    name = str(path[-1])
    near = did_you_mean(name, known)
    if near:
        return f"there is no such key{near}"
    if section is not None and issubclass(section, PluginSection):
        types = [kind for kind, cls in section.builtin.items() if name in cls.model_fields]
        if types:
            return f"a key of type {' or '.join(types)} only: set the type as well"
    elsewhere = _elsewhere(root, name)
    if elsewhere:
        return f"there is no such key; did you mean {elsewhere}?"
    kind = f" of type {value['type']}" if isinstance(value, Mapping) and isinstance(value.get("type"), str) else ""
    return f"there is no such key; here are{kind}: {', '.join(known)}"


def _elsewhere(root: type[Section], name: str) -> str:
    """Keys of this very name in other sections."""
    return " or ".join(f"'{key}'" for key, _ in leaves(root) if key.rpartition(".")[2] == name)


def joined(problems: Iterable[str]) -> str:
    """All problems as one message; each stands on a line that opens with 'error: ' when it is printed."""
    return "\nerror: ".join(dict.fromkeys(problems))
