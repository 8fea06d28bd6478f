"""The base classes of all settings: `Section`, and `PluginSection`, whose class depends on its key `type`.

A mapping enters; a frozen, validated object leaves, or a `ValidationError` that names each wrong key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)  # fmt: skip
from pydantic_core import InitErrorDetails
from typing_extensions import Self

from clipstream.config.plugins import load_plugin


def with_home(text: str) -> str:
    """Expand a leading `~` or `~user`, also after a prefix such as `local-dir:`.

    Raises:
        ValueError: the path contains a null character.
    """
    if "\0" in text:
        raise ValueError("no path has a null character")
    match = re.match(r"(?:[\w-]+:)?(?=~)", text)
    return text if match is None else match[0] + os.path.expanduser(text[match.end() :])


# Text that is, or may be, a path.
PathText = Annotated[str, AfterValidator(with_home)]


class Section(BaseModel):
    """Settings of one part of the program. Unknown keys are errors, and so are NaN and infinity unless a field allows
    them (`allow_inf_nan=True`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each key whose value does not go with the other keys of this section."""
        return iter(())

    @model_validator(mode="after")
    def _raise_conflicts(self) -> Self:
        found = [
            InitErrorDetails(type="value_error", loc=(key,), input=None, ctx={"error": ValueError(text)})
            for key, text in self.conflicts()
        ]
        if found:
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self


class PluginSection(Section):
    """Settings whose class depends on their key `type`: a built-in name, or a user's `package.module:Name`.

    A family of plug-ins is a direct subclass with a table `builtin` of settings classes by name. A user's class has its
    own settings as the attribute `Settings`, a subclass of the family; without it, only the family's keys are valid.
    """

    builtin: ClassVar[dict[str, type[PluginSection]]] = {}

    type: str

    @model_validator(mode="wrap")
    @classmethod
    def _dispatch(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(value, dict):
            return handler(value)
        kind = value.get("type", cls.model_fields["type"].default)
        if not isinstance(kind, str):
            return handler(value)
        target: type[Section]
        if kind in cls.builtin:
            target = cls.builtin[kind]
        elif ":" in kind:
            target = getattr(load_plugin(kind), "Settings", cls)
        else:
            names = ", ".join(sorted(cls.builtin))
            raise ValueError(f"type {kind!r} is not one of {names}, nor a 'package.module:Name'")
        if target is cls or not issubclass(target, PluginSection):
            return handler(value)
        # A subclass has this validator too: it must not dispatch again to itself.
        return handler(value) if cls is target else target.model_validate(value)
