"""Owns the text of `--help`: short flags, then every key by section with type, default and meaning.

Never imports torch or the heavier halves of the settings: help has to be there at once.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from clipstream.schema import entries_of, kinds, section_of
from clipstream.section import PluginSection, Section
from clipstream.shorts import SHORTS

_NAMES = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}

_INTRO = """\
Settings come from the defaults, then each --config file in order, then flags; later ones win. Every key is a flag,
--section.key VALUE or --section.key=VALUE. A value is written as in YAML: 3, 1e-3, true, null, '[a, b]'. A flag given
again replaces its earlier value. NAME stands for a name of your own, and --evals.NAME null removes an evaluator.
${NAME} in the name of a shard is that environment variable, looked up when it is used and never written down."""


def help_text(root: type[Section], verb: str, width: int | None = None) -> str:
    """The whole help of a verb.

    Args:
        root: the class of the whole tree.
        verb: 'train', as in `python -m clipstream.train`.
        width: columns; the terminal's, or 120 where the output is no terminal, unless given.
    """
    width = width or (min(shutil.get_terminal_size().columns, 140) if sys.stdout.isatty() else 120)
    lines = [f"usage: python -m clipstream.{verb} [--config FILE.yaml]... [--section.key VALUE]...", ""]
    lines += textwrap.wrap(_INTRO, width)
    lines += ["", "Short flags", *_row("--config FILE", "settings in YAML; may be given several times", width)]
    for short in SHORTS:
        meaning = f"{short.meaning} [sets {', '.join(short.keys)}]"
        lines += _row(f"{short.flag} {short.value}".rstrip(), meaning, width)
    for name, field in root.model_fields.items():
        section = section_of(field.annotation) or section_of(entries_of(field.annotation))
        assert section is not None
        prefix = f"--{name}." if section_of(field.annotation) else f"--{name}.NAME."
        lines += ["", *_wrapped(f"{name}: {_summary(section)}", width, 4), *_section(section, prefix, width)]
    return "\n".join(lines) + "\n"


def _summary(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _section(section: type[Section], prefix: str, width: int) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield from _field(name, field, prefix, width)
    if not issubclass(section, PluginSection):
        return
    for kind, cls in section.builtin.items():
        own = {name: field for name, field in cls.model_fields.items() if name not in section.model_fields}
        yield from _wrapped(f"  with {prefix}type {kind}: {_summary(cls)}", width, 4)
        for name, field in own.items():
            yield from _field(name, field, prefix, width)


def _field(name: str, field: FieldInfo, prefix: str, width: int) -> Iterator[str]:
    flag = prefix + name.replace("_", "-")
    section, entries = section_of(field.annotation), section_of(entries_of(field.annotation))
    if section is not None or entries is not None:
        inner = section or entries
        assert inner is not None
        yield from _wrapped(f"  {flag}: {field.description or _summary(inner)}", width, 4)
        yield from _section(inner, f"{flag}." if section else f"{flag}.NAME.", width)
        return
    default = "required" if field.is_required() else f"default {_shown(field)}"
    yield from _row(f"{flag} {_kind(field.annotation)}", f"{field.description or ''} [{default}]".strip(), width)


def _shown(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(f'{item:.4g}' if isinstance(item, float) else str(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(annotation: Any) -> str:
    """What a value looks like: INT, 'auto|INT', 'TEXT|[TEXT, ...]'."""
    names: list[str] = []
    for kind in kinds(annotation):
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            names += [str(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            names.append(f"[{', '.join(_kind(item) for item in get_args(kind))}]")
        elif get_origin(kind) is list:
            names.append(f"[{_kind(get_args(kind)[0])}, ...]")
        else:
            names.append(_NAMES.get(kind, "VALUE"))
    return "|".join(names)


def _row(head: str, text: str, width: int) -> list[str]:
    """A flag and its meaning; the meaning stands in its own column, or below a long flag."""
    column = min(44, width // 2)
    first = f"  {head}"
    body = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
    if len(first) < column - 1:
        first, body = f"{first:<{column}}{body[0]}".rstrip(), body[1:]
    return [first, *(f"{'':<{column}}{line}" for line in body)]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
