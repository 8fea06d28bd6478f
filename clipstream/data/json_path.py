"""Paths into JSON values: a path and a value enter, the values at the path leave.

    path    = step ("." step)*
    step    = (name | position | "*") filter*
    filter  = "[" field "=" value "]"

`caption.en` and `texts.0.t` name fields and positions, from 0. `*` matches every element of a list and every value of
an object. `texts[lang=en]` matches the elements whose field `lang` is `en`; the field is a path of names, and a value
with `]` is written as a JSON string in double quotes. A backslash escapes `.`, `[`, `=`, `*` and itself. A name matches
exactly, or else case-insensitively, and may have dots in the data: `a.b` matches the field `a.b` if `a` has no `b`.
A path leads on into a text that is itself a list or an object, see `structure`.

In place of a path, `{title} by {brand}` makes a text of fields, each with its path in braces. The texts and numbers of
a list are joined by `, `, or as `{tags| / }` says. `{{` and `}}` are braces, and so is one behind a backslash; a
backslash and `n` are a new line.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from clipstream.text import printable

ABSENT = object()
_NAME = re.compile(r"(?:[^.\[\\]|\\.)+", re.DOTALL)
_FILTER = re.compile(r'\[((?:[^=\[\]\\]|\\.)+)=("(?:[^"\\]|\\.)*"|[^"\]][^\]]*)\]', re.DOTALL)
_SPECIAL, _BACKSLASHED = re.compile(r"([].*=[\\{}])"), r"\\\1"
_BRACE, _PLACE = re.compile(r"(?<!\\)[{}]"), re.compile(r"\{\{|\}\}|\{((?:[^{}\\]|\\.)*)\}|(?<!\\)[{}]", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STRUCTURED = re.compile(r"""\s*(?:array\()?(?:"?\s*[\[{]|\(\s*['"]|b['"])""")
_STRING = r"""[bu]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_STRINGS = re.compile(rf"[\[(]\s*{_STRING}(?:(?:\s*,\s*|\s+){_STRING})*\s*,?\s*[\])]", re.DOTALL)
MAX_LITERAL = 1 << 16  # characters of a text in Python's notation that are looked into
MAX_BITS = 1 << 13  # of an integer in it: Python prints no larger ones


class Each(NamedTuple):
    """A step to several values: to all inner ones, or with `field` to the elements whose field has this value."""

    field: tuple[str, ...] = ()
    value: str = ""

    def of(self, value: Any) -> list[Any]:
        """The values below `value` that match."""
        if not self.field:
            return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        items = value if isinstance(value, list) else [value]
        return [item for item in items if any(literal(x) == self.value for x in values_at(item, self.field))]


Steps = tuple[str | Each, ...]


class Template(NamedTuple):
    """A text of fields."""

    parts: tuple[str | tuple[Steps, str], ...]  # texts, and paths with what joins the values at each

    def of(self, value: Any) -> list[str]:
        """The text, as a list of one; empty if a field has neither text nor number."""
        texts = []
        for part in self.parts:
            found = part if isinstance(part, str) else part[1].join(_plain_texts(values_at(value, part[0])))
            if not found:
                return []
            texts.append(found)
        return ["".join(texts)]


def _plain_texts(values: Sequence[Any]) -> Iterator[str]:
    """The texts and numbers among values and in their lists."""
    for value in values:
        inner = unwrapped(value)
        if isinstance(inner, list):
            yield from _plain_texts(inner)
        elif isinstance(inner, str) and inner.strip():
            yield inner.strip()
        elif isinstance(inner, (int, float)) and not isinstance(inner, bool) and math.isfinite(inner):
            yield str(int(inner) if float(inner).is_integer() else inner)


def well_formed(fields: str | list[str] | None) -> str | list[str] | None:
    """Members or json:PATH, as they are. Raises ValueError: one is blank, or a path is malformed."""
    for one in [fields] if isinstance(fields, str) else fields or ():
        if not one.strip():
            raise ValueError("expected a member or json:PATH")
        kind, colon, path = one.partition(":")
        if colon and kind.strip().lower() == "json":
            parse_path(path)
    return fields


@lru_cache(maxsize=256)
def parse_path(path: str) -> Steps:
    """The steps of a path.

    Raises ValueError: it is malformed; the message names the position.
    """
    steps: list[str | Each] = []
    at = 0
    while True:
        name = _NAME.match(path, at)
        if name is None:
            raise _malformed_error(path, at, "expected a name, a list position or *")
        steps.append(Each() if name[0] == "*" else _ESCAPE.sub(r"\1", name[0]))
        at = name.end()
        while path.startswith("[", at):
            match = _FILTER.match(path, at)
            if match is None:
                raise _malformed_error(path, at, "expected [FIELD=VALUE]; write \\[ for a name with a bracket")
            try:
                field = parse_path(match[1])
            except ValueError:
                field = ()
            names = tuple(step for step in field if isinstance(step, str))
            if not names or len(names) < len(field):
                raise _malformed_error(path, match.start(1), "the field of a filter must be names joined by dots")
            value = match[2]
            if value.startswith('"'):
                try:
                    value = json.loads(value, strict=False)
                except ValueError:
                    raise _malformed_error(path, match.start(2), "a quoted value must be a JSON string") from None
            steps.append(Each(names, value))
            at = match.end()
        if at == len(path):
            return tuple(steps)
        if path[at] != ".":
            what = "a backslash is followed by the character" if path[at] == "\\" else "a dot or the end is"
            raise _malformed_error(path, at, f"{what} expected")
        at += 1


def parse_text(path: str) -> Steps | Template:
    """The steps of a path, or a template. Raises ValueError: as `parse_path`, or a brace is alone."""
    if not _BRACE.search(path):
        return parse_path(path)
    path = path.replace(r"\n", "\n")
    parts: list[str | tuple[Steps, str]] = []
    at = 0
    for match in _PLACE.finditer(path):
        parts.append(_ESCAPE.sub(r"\1", path[at : match.start()]))
        field, _, joiner = (match[1] or "").partition("|")
        if match[0] in ("{{", "}}"):
            parts.append(match[0][0])
        elif match[1] is None:
            raise _malformed_error(path, match.start(), "a brace is alone: write it twice, or a field as {FIELD}")
        else:
            parts.append((parse_path(field.strip()), joiner or ", "))
        at = match.end()
    parts.append(_ESCAPE.sub(r"\1", path[at:]))
    return Template(tuple(part for part in parts if part))


def texts_at(value: Any, path: Steps | Template) -> list[Any]:
    """The values at a path, or the text of a template."""
    return path.of(value) if isinstance(path, Template) else values_at(value, path)


def _malformed_error(path: str, at: int, why: str) -> ValueError:
    return ValueError(f"the path {printable(path)!r} is malformed at position {at + 1}: {why}")


def structure(text: str) -> list[Any] | dict[Any, Any] | None:
    """The list or object that a text is, in JSON or as Python or NumPy prints it; None for any other text.

    JSON in a JSON string is unwrapped, and bytes as Python prints them are a list of one text. The result holds only
    what JSON has: tuples and sets become lists; a text with other values of Python (`[1j]`, `{'a': b'x'}`) gives None.
    """
    if not _STRUCTURED.match(text):
        return None
    for parse in (json.loads, _parse_printed):
        try:
            value = parse(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, str):
            return structure(value)
        if isinstance(value, bytes):
            return [value.decode(errors="surrogateescape")]
        return value if isinstance(value, (list, dict)) else None
    return None


def unwrapped(value: Any) -> Any:
    """The list or object that a text is, see `structure`; any other value as it is."""
    return (structure(value) if isinstance(value, str) else None) or value


def _parse_printed(text: str) -> Any:
    """A value as Python or NumPy prints it; a list of strings without commas is not joined to one."""
    if len(text) > MAX_LITERAL:
        raise ValueError("too long")
    if text.startswith("array("):
        text = text[6:].rpartition("]")[0] + "]"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if _STRINGS.fullmatch(text):
            found = [ast.literal_eval(one) for one in re.findall(_STRING, text, re.DOTALL)]
            return [one.decode() if isinstance(one, bytes) else one for one in found]
        value = ast.literal_eval(text)
        return value if isinstance(value, bytes) else _as_json(value)


def _as_json(value: Any) -> Any:
    """A value of Python as JSON has it; a set in the order of its texts. Raises TypeError: JSON has no such value."""
    if isinstance(value, dict) and not any(isinstance(_as_json(key), (list, dict)) for key in value):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_as_json, value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    if value is None or isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() < MAX_BITS):
        return value
    raise TypeError(f"{type(value).__name__} is not a type of JSON")


def values_at(value: Any, steps: Sequence[str | Each]) -> list[Any]:
    if not steps:
        return [value]
    if isinstance(value, str):
        value = structure(value)
    step = steps[0]
    if isinstance(step, Each):
        return [found for item in step.of(value) for found in values_at(item, steps[1:])]
    if isinstance(value, list):
        position = int(step) if step.isdecimal() and len(step) < 20 else len(value)
        return values_at(value[position], steps[1:]) if position < len(value) else []
    if not isinstance(value, dict):
        return []
    # A name with dots was split like the path: joined forms are tried after the plain one.
    name = ""
    for end, part in enumerate(steps, 1):
        if isinstance(part, Each):
            break
        name = f"{name}.{part}" if end > 1 else part
        lowered = name.lower()
        same = (inner for other, inner in value.items() if str(other).lower() == lowered)
        inner = value[name] if name in value else next(same, ABSENT)
        if inner is not ABSENT and (found := values_at(inner, steps[end:])):
            return found
    return []


def value_at(value: Any, steps: Sequence[str | Each]) -> Any:
    """The value at a path, a list if there are several, or ABSENT."""
    found = values_at(value, steps)
    return ABSENT if not found else found[0] if len(found) == 1 else found


def literal(value: Any) -> str | None:
    """A JSON value as text in a filter; None for a list or an object."""
    if isinstance(value, (dict, list)):
        return None
    return value if isinstance(value, str) else json.dumps(value)


def step_of(name: str) -> str:
    """The step to a field, escaped if necessary."""
    with contextlib.suppress(ValueError):
        if parse_path(name) == tuple(name.split(".")) and not _BRACE.search(name):
            return name
    return _SPECIAL.sub(_BACKSLASHED, name)
