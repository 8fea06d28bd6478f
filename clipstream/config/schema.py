"""The tree of settings classes: the class, field or type of value at a path. Independent of any particular section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from clipstream.config.plugins import load_plugin
from clipstream.config.section import PluginSection, Section

Path = tuple[str | int, ...]
Tree = dict[str, Any]  # settings as YAML has them, not validated


def dotted(path: Path) -> str:
    """A path as in messages: `data.sources.train.shards`."""
    return ".".join(str(part) for part in path)


def kinds(annotation: Any) -> list[Any]:
    """The members of a union without `Annotated`; a single type is the only member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in kinds(part)]
    return [annotation]


def section_of(annotation: Any) -> type[Section] | None:
    """The settings class of an annotation; None for anything else."""
    for kind in kinds(annotation):
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
            return kind
    return None


def entries_of(annotation: Any) -> Any:
    """The annotation of the values of a `dict[str, X]`; None for anything else."""
    for kind in kinds(annotation):
        if get_origin(kind) is dict:
            return get_args(kind)[1]
    return None


def items_of(annotation: Any) -> Any:
    """The annotation of the items of a list or tuple; None for anything else."""
    for kind in kinds(annotation):
        if get_origin(kind) in (list, tuple):
            return get_args(kind)[0]
    return None


def chosen(section: type[Section], value: Any) -> type[Section]:
    """The class that validates the mapping `value`: the plug-in that its `type` names, where there is one."""
    if not issubclass(section, PluginSection) or not isinstance(value, Mapping):
        return section
    kind = value.get("type", section.model_fields["type"].default)
    if isinstance(kind, str) and kind in section.builtin:
        return section.builtin[kind]
    if isinstance(kind, str) and ":" in kind:
        try:
            found = getattr(load_plugin(kind), "Settings", section)
        except ValueError:
            return section
        if isinstance(found, type) and issubclass(found, PluginSection):
            return found
    return section


def child(annotation: Any, value: Any, part: str | int) -> Any:
    """The annotation of `value[part]`, where `value` has the given annotation; None where it has no such part."""
    section = section_of(annotation)
    if section is not None:
        field = chosen(section, value).model_fields.get(str(part))
        return None if field is None else field.annotation
    if isinstance(part, int):
        return items_of(annotation)
    return entries_of(annotation)


def below(value: Any, part: str | int) -> Any:
    """`value[part]`, or None."""
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value):
        return value[part]
    return None


def annotation_at(root: type[Section], tree: Any, path: Path) -> Any:
    """The annotation at `path` in `tree`; None where the settings have no such path."""
    annotation: Any = root
    for part in path:
        annotation = child(annotation, tree, part)
        if annotation is None:
            return None
        tree = below(tree, part)
    return annotation


def accepts_text(annotation: Any, text: str) -> bool:
    """Whether the string `text` is itself a valid value of this annotation."""
    return any(kind is str or (get_origin(kind) is Literal and text in get_args(kind)) for kind in kinds(annotation))


def fit(annotation: Any, value: Any, path: Path, texts: Mapping[Path, str]) -> Any:
    """`value` with YAML's guesses about types undone.

    A plain scalar where text is wanted becomes its text (`name: 00001`, `classes: [yes, no]`). A section without keys
    becomes an empty mapping; a null entry of a named map is removed.

    Args:
        path: of the value.
        texts: path -> a plain scalar as it was written.
    """
    section, entries = section_of(annotation), entries_of(annotation)
    optional = NoneType in kinds(annotation)
    if section is not None and (isinstance(value, dict) or (value is None and not optional)):
        value = value or {}
        fields = chosen(section, value).model_fields
        return {
            key: fit(fields[key].annotation, part, (*path, key), texts) if key in fields else part
            for key, part in value.items()
        }
    if entries is Any:
        return value
    if entries is not None and (isinstance(value, dict) or value is None):
        present = {key: part for key, part in (value or {}).items() if part is not None}
        return {key: fit(entries, part, (*path, key), texts) for key, part in present.items()}
    if isinstance(value, list) and items_of(annotation) is not None:
        return [fit(items_of(annotation), part, (*path, place), texts) for place, part in enumerate(value)]
    text = texts.get(path)
    if isinstance(value, str) or text is None or (value is None and optional) or not accepts_text(annotation, text):
        return value
    return text


def leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `section` as `a.b.NAME.c` with its field; a plug-in's keys are those of all its built-ins."""
    families = (section, *section.builtin.values()) if issubclass(section, PluginSection) else (section,)
    fields = {name: field for cls in reversed(families) for name, field in cls.model_fields.items()}
    for name in dict.fromkeys(name for cls in families for name in cls.model_fields):
        field, key = fields[name], f"{prefix}{name}"
        entry = section_of(entries_of(field.annotation))
        if (inner := section_of(field.annotation) or entry) is None:
            yield key, field
        else:
            yield from leaves(inner, f"{key}.NAME." if inner is entry else f"{key}.")
