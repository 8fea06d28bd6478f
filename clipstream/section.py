"""Owns the base class of every settings class, and the choice of a plug-in's settings by its `type`.

Never imports torch, and never reads a file or a flag: `config` and `cli` do.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from clipstream.plugins import load_plugin


class Section(BaseModel):
    """Settings of one part of the program. Unknown keys are errors; values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)


class PluginSection(Section):
    """Settings chosen by their key `type`: a built-in short name, or a user's `package.module:Name`.

    A family of plug-ins is a direct subclass with a `builtin` table from short name to settings class. A user's class
    brings its own settings as an attribute `Settings` (a subclass of the family); without one, it takes no keys but
    those of the family.
    """

    builtin: ClassVar[dict[str, type[PluginSection]]] = {}

    type: str

    @model_validator(mode="wrap")
    @classmethod
    def _dispatch(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Hand the mapping to the settings class that its `type` names."""
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
