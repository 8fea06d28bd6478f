"""The base classes of all settings, and the tree of these classes: the class, field or type of value at a path.

A mapping enters `Section`; a frozen, validated object leaves, or a `ValidationError` that names each wrong key. The
class of a `PluginSection` depends on its key `type`: a part that is registered with `part`, or a user's own, which
`make_part` makes of its settings. A `Conflict` is a record of settings that do not go together, by which they are
refused, and listed in the documentation. `parse_as` validates files that are read back.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)  # fmt: skip
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails
from typing_extensions import Self

from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.text import printable
from clipstream.utils.plugins import load_plugin, make_plugin

PACKAGE = FilePath(__file__).parents[1]
SHIPPED_MODELS = PACKAGE / "configs" / "models"
Path = tuple[str | int, ...]
Tree = dict[str, Any]  # settings as YAML has them, not validated
T = TypeVar("T")
Class = TypeVar("Class", bound=type)
MOST = 10**15  # steps, samples, bytes
Count = Annotated[int, Field(ge=0, le=MOST)]
VALUE_SHOWN = 60  # characters of a wrong value
OBJECTS = ConfigDict(arbitrary_types_allowed=True)  # of a class with tensors
_ABSENT = object()


@dataclass(frozen=True)
class Is:
    """A condition on a setting, in words and as a test; without a test, code that knows more refuses by the record."""

    words: str
    test: Callable[[Any], bool] | None = None


SET, UNSET = Is("set", bool), Is("not set", lambda value: not value)
GIVEN = Is("set", lambda value: value is not None)  # to 0, too


def other_than(default: Any) -> Is:
    """That a setting differs from its default."""
    return Is("set" if default is None else f"other than {default}", lambda value: value != default)


@dataclass(frozen=True)
class Conflict:
    """Settings that do not go together."""

    # Dotted key -> its value, several of them in a tuple, or an `Is`. The first key is the one that is refused. A part
    # `NAME` stands for each name; a key that is no setting describes the model, the data or the machine.
    when: Mapping[str, Any]
    reason: str  # why, and what to do; `{0}` is the value of the first key, `{1}` that of the second
    notice: bool = False  # whether the first key merely has no effect: then it is told, and not refused

    def text(self, *values: Any) -> str:
        return self.reason.format(*values)

    def error(self, key: str, *values: Any) -> SettingsError:
        """The refusal of a key, where the model, the data or the machine show the conflict."""
        return SettingsError(f"{key}: {self.text(*values)}")

    def find(self, root: Any, facts: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
        """(path of the first key, text) for each place below `root` where all conditions hold; see `conflicts_in`."""
        paths = [tuple(key.split(".")) for key in self.when]
        named = paths[0].index("NAME") if "NAME" in paths[0] else None
        for name in ("",) if named is None else value_at(root, paths[0][:named]):
            here = [tuple(name if part == "NAME" else part for part in path) for path in paths]
            values = [facts.get(key, value_at(root, path)) for key, path in zip(self.when, here, strict=True)]
            if all(map(_holds, self.when.values(), values)):
                yield here[0], self.text(*values)


def value_at(root: Any, path: Iterable[str]) -> Any:
    """What is at a path; `_ABSENT` where a section has no such key, and None where a mapping has none."""
    for key in path:
        root = root.get(key) if isinstance(root, Mapping) else getattr(root, key, _ABSENT)
    return root


def _holds(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, Is):
        return value is not _ABSENT and wanted.test is not None and wanted.test(value)
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def conflicts_in(
    conflicts: Iterable[Conflict], root: Any, *, notices: bool = False, **facts: Any
) -> Iterator[tuple[Path, str]]:
    """(path, text) for each refusal, or for each notice, of `conflicts` in a section or a mapping of flags. `facts` are
    values of keys that are no settings.
    """
    for conflict in conflicts:
        if conflict.notice == notices:
            yield from conflict.find(root, facts)


def with_home(text: str) -> str:
    """Expand a leading `~` or `~user`, also after a prefix such as `local-dir:`.

    Raises ValueError: the path contains a null character.
    """
    if "\0" in text:
        raise ValueError("no path has a null character")
    match = re.match(r"(?:[\w-]+:)?(?=~)", text)
    return text if match is None else match[0] + os.path.expanduser(text[match.end() :])


def own_path(text: str) -> str:
    """A path that is written to, as `with_home`. Raises SettingsError: it is a URL."""
    if re.match(r"[a-zA-Z][\w+.-]+://", text):
        raise SettingsError(f"{text} is a URL, and files are written to this machine's disk: name a path, and copy it")
    return with_home(text)


def with_shipped(text: str) -> str:
    """The path; of a file `configs/…` that the working folder lacks, the path of the copy in the installed package."""
    copy = PACKAGE / text
    return str(copy) if text.startswith("configs/") and not os.path.exists(text) and copy.is_file() else text


def with_shipped_model(text: str) -> str:
    """As `with_shipped`, also of the name alone of a model's configuration in the package, such as small-vit."""
    return str(SHIPPED_MODELS / f"{text}.json") if text in shipped_models() else with_shipped(text)


@functools.cache
def shipped_models() -> tuple[str, ...]:
    """The names of the models whose configurations the package has."""
    return tuple(sorted(path.stem for path in SHIPPED_MODELS.glob("*.json")))


# Text that is, or may be, a path.
PathText = Annotated[str, AfterValidator(with_home)]
ModelText = Annotated[PathText, AfterValidator(with_shipped_model)]


def names_path(field: FieldInfo) -> bool:
    """Whether a field is, or may be, a `PathText` or a list of them."""

    def is_path(part: Any) -> bool:
        return getattr(part, "func", None) is with_home or any(map(is_path, get_args(part)))

    return any(map(is_path, (*field.metadata, field.annotation)))


class Section(BaseModel):
    """Settings of one part of the program. Unknown keys are errors, and so are NaN and infinity unless a field allows
    them (`allow_inf_nan=True`).
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, defer_build=True, allow_inf_nan=False
    )

    pairs: ClassVar[tuple[Conflict, ...]] = ()  # keys of this section that do not go together

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each key, dotted below a nested section, whose value does not go with the other keys of
        this section, for a reason that `pairs` cannot say.
        """
        return iter(())

    @model_validator(mode="after")
    def _raise_conflicts(self) -> Self:
        problems = [*conflicts_in(self.pairs, self), *((tuple(key.split(".")), text) for key, text in self.conflicts())]
        errors = [
            InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": ValueError(text)})
            for path, text in problems
        ]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self


class PluginSection(Section):
    """Settings whose class depends on their key `type`: a built-in name, or a user's `package.module:Name`.

    A family of parts is a direct subclass. A part's class has its own settings as the attribute `Settings`, a subclass
    of the family; without it, only the family's keys are valid.
    """

    home: ClassVar[str] = ""  # package whose modules register further parts; imported when a name is looked up

    type: str

    @model_validator(mode="wrap")
    @classmethod
    def _dispatch(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        # A subclass has this validator too: it must not dispatch again to itself.
        target = class_for(cls, value)
        target.model_rebuild()  # a class with a deferred schema is not serialized by pydantic 2.10 to 2.12
        return handler(value) if target is cls else target.model_validate(value)


_PARTS: dict[type[PluginSection], dict[str, Any]] = {}  # family -> name -> class


def part(family: type[PluginSection], *names: str) -> Callable[[Class], Class]:
    """Register a class under the names that the key `type` of its family may have; help and messages list them.

    The class has the form of a user's own (docs/plugins.md): it is called with its settings. It may also be the class
    of the settings alone, if its package makes what they describe.
    """

    def place(item: tuple[str, Any]) -> tuple[bool, str]:
        return item[1].__module__ != family.__module__, item[1].__module__

    def register(cls: Class) -> Class:
        parts = _PARTS.get(family, {})
        assert not parts.keys() & names, f"{names} are registered already"
        # Those of the family's own module first, whichever module was imported first.
        _PARTS[family] = dict(sorted((parts | dict.fromkeys(names, cls)).items(), key=place))
        family.model_fields["type"].description = f"{', '.join(_PARTS[family])}, or package.module:Name"
        return cls

    return register


def is_family(cls: type[PluginSection]) -> bool:
    """Whether a class is a family, and not that of one part."""
    return PluginSection in cls.__bases__


def family_of(section: type[PluginSection]) -> type[PluginSection]:
    """The family of a part's settings."""
    return next(cls for cls in section.__mro__ if issubclass(cls, PluginSection) and is_family(cls))


def builtin_parts(section: type[PluginSection]) -> Mapping[str, Any]:
    """The registered classes of the family of `section`, by name; from then on the description of `type` lists them."""
    family = family_of(section)
    _import_all(family.home)
    return _PARTS.get(family, {})


@functools.cache
def _import_all(home: str) -> None:
    """Import a package and its modules."""
    if home:
        package = importlib.import_module(home)
        for module in pkgutil.iter_modules(package.__path__, f"{home}."):
            importlib.import_module(module.name)


def class_for(section: type[PluginSection], value: Any) -> type[PluginSection]:
    """The class that validates `value`: the one that its `type` names, if it is a mapping with such a key.

    Raises ValueError: there is no such type, or the user's module does not import.
    """
    kind = value.get("type", section.model_fields["type"].default) if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        return section
    # A name that is registered needs no import of the others.
    found = _PARTS.get(section, {}).get(kind) or builtin_parts(section).get(kind)
    if found is None and ":" not in kind:
        names = ", ".join(sorted(builtin_parts(section)))
        raise ValueError(f"type {kind!r} is not one of {names}, nor a 'package.module:Name'")
    return _settings_of(load_plugin(kind) if found is None else found, section)


def _settings_of(part: Any, section: type[PluginSection]) -> type[PluginSection]:
    """The class of a part's settings; `section` where it has none of its own."""
    found = getattr(part, "Settings", part)
    return found if isinstance(found, type) and issubclass(found, PluginSection) else section


def make_part(key: str, settings: PluginSection, *more: Any) -> Any:
    """The part that `settings.type` names, made of the settings and further arguments.

    Raises SettingsError: there is no such class, or it raised; the message begins with `key`.
    """
    found = builtin_parts(type(settings)).get(settings.type)
    if found is None:
        return make_plugin(key, settings, *more)
    with errors_as(SettingsError, key, ClipstreamError, ValueError):
        return found(settings, *more)


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
    classes = (kind for kind in kinds(annotation) if isinstance(kind, type) and get_origin(kind) is None)
    return next((kind for kind in classes if issubclass(kind, Section)), None)


def required_section(annotation: Any) -> bool:
    """Whether an annotation is a settings class without None: null then means that no key is set."""
    return section_of(annotation) is not None and NoneType not in kinds(annotation)


def entries_of(annotation: Any) -> Any:
    """The annotation of the values of a `dict[str, X]`; None for anything else."""
    return next((get_args(kind)[1] for kind in kinds(annotation) if get_origin(kind) is dict), None)


def items_of(annotation: Any) -> Any:
    """The annotation of the items of a list or tuple; None for anything else."""
    return next((get_args(kind)[0] for kind in kinds(annotation) if get_origin(kind) in (list, tuple)), None)


def class_of_value(section: type[Section], value: Any) -> type[Section]:
    """The class that validates `value`; `section` itself where its `type` is wrong."""
    try:
        return class_for(section, value) if issubclass(section, PluginSection) else section
    except ValueError:
        return section


def child(annotation: Any, value: Any, part: str | int) -> Any:
    """The annotation of `value[part]`, where `value` has the given annotation; None where it has no such part."""
    section = section_of(annotation)
    if section is not None:
        field = class_of_value(section, value).model_fields.get(str(part))
        return None if field is None else field.annotation
    return items_of(annotation) if isinstance(part, int) else entries_of(annotation)


def below(value: Any, part: str | int) -> Any:
    """`value[part]`, or None."""
    if isinstance(value, Mapping):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value) else None


def map_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A tree of mappings and lists, with `leaf` applied to all other values."""
    if isinstance(tree, Mapping):
        return {str(key): map_leaves(value, leaf) for key, value in tree.items()}
    return [map_leaves(value, leaf) for value in tree] if isinstance(tree, list | tuple) else leaf(tree)


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Flatten nested mappings; keys are joined by the separator."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{separator}{key}" if prefix else str(key)
        found.update(flat(value, path, separator) if isinstance(value, Mapping) else {path: value})
    return found


def types_of(section: type[Section]) -> dict[str, type[PluginSection]]:
    """The built-in types of a family that have settings of their own, with the classes of these."""
    if not issubclass(section, PluginSection):
        return {}
    family = family_of(section)
    types = {name: _settings_of(found, family) for name, found in builtin_parts(section).items()}
    return {name: cls for name, cls in types.items() if cls is not family}


def all_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a class and of its types; of a field of several classes, the first."""
    found: dict[str, FieldInfo] = {}
    for cls in (section, *types_of(section).values()):
        found = {**found, **{name: field for name, field in cls.model_fields.items() if name not in found}}
    return found


def leaf(section: type[Section], key: str) -> FieldInfo | None:
    """As `dict(leaves(section)).get(key)`; the modules of a family's parts are imported only for a key of theirs."""
    head, _, rest = key.partition(".")
    if (field := section.model_fields.get(head) or all_fields(section).get(head)) is None:
        return None
    entry = section_of(entries_of(field.annotation))
    if (inner := section_of(field.annotation) or entry) is None:
        return None if rest else field
    return leaf(inner, rest.removeprefix("NAME.") if inner is entry else rest)


def leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `section` as `a.b.NAME.c` with its field; a plug-in's keys are those of all its built-ins."""
    for name, field in all_fields(section).items():
        key = f"{prefix}{name}"
        entry = section_of(entries_of(field.annotation))
        if (inner := section_of(field.annotation) or entry) is None:
            yield key, field
        else:
            yield from leaves(inner, f"{key}.NAME." if inner is entry else f"{key}.")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_as(kind: type[T], values: Any) -> T:
    """The values as `kind`; bytes and text are JSON.

    Raises ValueError: they are not.
    """
    try:
        adapter: Any = _adapter(kind)  # type: ignore[arg-type]
        found: T = (adapter.validate_json if isinstance(values, str | bytes) else adapter.validate_python)(values)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = dotted(first["loc"]) or "content", printable(repr(first["input"]), VALUE_SHOWN)
        raise ValueError(f"{key}: {first['msg']}, not {value}") from error
