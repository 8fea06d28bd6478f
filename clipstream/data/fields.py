"""Owns what is taken out of a raw sample: the image's bytes, the caption, and the user's own code on the way.

A raw sample is a mapping: `__key__` and `__url__` (str) and the members by suffix (bytes). Whatever a sample lacks, or
a user's own code raises on it, becomes `Dropped` with a reason. It never decodes a picture and never makes token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pydantic_core import from_json

from clipstream.data.settings import CaptionSettings, JsonCaption, TextCaption
from clipstream.errors import Dropped, SettingsError
from clipstream.plugins import load_function, load_plugin

if TYPE_CHECKING:
    from clipstream.data.order import Draws

RawSample = Mapping[str, Any]
SampleTransform = Callable[[RawSample], RawSample]

ABSENT = object()


class CaptionExtractor(Protocol):
    """Gives the caption of a sample. A user's own is constructed with its settings.

    Attributes:
        members: suffixes of the members that are read; None for all.
    """

    @property
    def members(self) -> tuple[str, ...] | None: ...

    def __call__(self, sample: RawSample, draws: Draws | None) -> str:
        """The caption.

        Args:
            sample: `__key__`, `__url__`, and the members as bytes by suffix in lower case.
            draws: the sample's own random numbers; None in evaluation, which must not depend on chance.

        Raises:
            Dropped: the sample has none; the reason is a short name such as 'no_caption'.
        """
        ...


@lru_cache(maxsize=256)
def split_keys(keys: str) -> tuple[str, ...]:
    """The suffixes of a setting such as 'jpg;PNG, .webp', in lower case and without the leading dot."""
    names = (key.strip().lower().removeprefix(".") for key in keys.replace(",", ";").split(";"))
    return tuple(name for name in names if name)


def image_bytes(sample: RawSample, keys: str) -> bytes:
    """The bytes of the image member: the first present of the suffixes in `keys`.

    Raises:
        Dropped: `no_image`.
    """
    suffixes = split_keys(keys)
    value = member_of(sample, suffixes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise Dropped("no_image", _missing(suffixes) if value is ABSENT else f"{type(value).__name__} instead of bytes")


def build_caption(settings: CaptionSettings) -> CaptionExtractor:
    """The extractor that the settings choose.

    Raises:
        SettingsError: weights that do not fit the paths, or a user's class that cannot be made.
    """
    if isinstance(settings, TextCaption):
        return TextField(split_keys(settings.key))
    if isinstance(settings, JsonCaption):
        return JsonField(settings)
    try:
        extractor = load_plugin(settings.type)
    except ValueError as error:
        raise SettingsError(f"caption: {error}") from error
    try:
        return _OwnExtractor(extractor(settings))
    except Exception as error:
        raise SettingsError(f"caption: {settings.type} cannot be made of its settings: {error!r}") from error


def build_transform(path: str | None) -> SampleTransform | None:
    """The user's own function `package.module:fn`, sample -> sample or None; what it raises drops the sample.

    Raises:
        SettingsError: there is no such function.
    """
    return None if path is None else _OwnTransform(path)


class TextField:
    """The caption is the text of a member: the first present of `members`, UTF-8, stripped."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members

    def __call__(self, sample: RawSample, draws: Draws | None) -> str:
        """The caption.

        Raises:
            Dropped: `no_caption`, `caption_not_utf8` or `empty_caption`.
        """
        return usable_text(text_of(sample, self.members, "no_caption"))


class JsonField:
    """The caption is a string at a path into the JSON member.

    Only strings are captions: a number or a null counts as absent. Of a list of strings one is drawn, the first in
    evaluation. Of several paths the first that has text is taken; with weights one of those that have text is drawn
    in training (the first in evaluation), and a path of weight 0 is never taken. Names match exactly, or else without
    regard to case; a name may itself hold dots.
    """

    def __init__(self, settings: JsonCaption) -> None:
        weights = settings.weights or [1.0] * len(settings.paths)
        if len(weights) != len(settings.paths):
            raise SettingsError(
                f"caption.weights has {len(weights)} numbers and caption.path {len(settings.paths)} paths: one per path"
            )
        self._choices = [(path.split("."), w) for path, w in zip(settings.paths, weights, strict=True) if w > 0]
        self._weighted = settings.weights is not None
        self._wanted = " or ".join(settings.paths)
        self._json = split_keys(settings.key)
        self._fallback = split_keys(settings.fallback or "")
        self.members = self._json + self._fallback

    def __call__(self, sample: RawSample, draws: Draws | None) -> str:
        """The caption.

        Raises:
            Dropped: `no_caption`, `json_invalid`, `json_not_object`, `caption_not_utf8` or `empty_caption`.
        """
        try:
            return usable_text(self._choose(object_of(sample, self._json, "no_caption"), draws))
        except Dropped:
            if not self._falls_back(sample):
                raise
        return usable_text(text_of(sample, self._fallback, "no_caption"))

    def every(self, sample: RawSample) -> list[str]:
        """All strings of the first path that has text, or else the lines of the fallback. Raises Dropped likewise."""
        try:
            return self._found(object_of(sample, self._json, "no_caption"), None)[0][0]
        except Dropped:
            if not self._falls_back(sample):
                raise
        return text_of(sample, self._fallback, "no_caption").splitlines()

    def _falls_back(self, sample: RawSample) -> bool:
        """Where the fallback is absent too, the JSON member's own fault is the better reason."""
        return bool(self._fallback) and member_of(sample, self._fallback) is not ABSENT

    def _choose(self, value: dict[str, Any], draws: Draws | None) -> str:
        found = self._found(value, draws)
        texts = found[0][0]
        if draws is None:
            return texts[0]
        if len(found) > 1:
            texts = _weighted(found, draws.uniform())
        return texts[draws.integer(len(texts))] if len(texts) > 1 else texts[0]

    def _found(self, value: dict[str, Any], draws: Draws | None) -> list[tuple[list[str], float]]:
        """The texts to choose from, with their weights: of all paths where one is drawn, else of the first."""
        empty = False
        found: list[tuple[list[str], float]] = []
        for parts, weight in self._choices:
            texts = _strings(value_at(value, parts))
            usable = [text for text in texts if text.strip()]
            empty |= len(usable) < len(texts)
            if usable:
                found.append((usable, weight))
                if draws is None or not self._weighted:
                    break
        if not found:
            raise Dropped("empty_caption" if empty else "no_caption", f"no text at {self._wanted}")
        return found


class _OwnExtractor:
    """A user's extractor: what it raises or gives instead of a caption drops the sample."""

    def __init__(self, extractor: CaptionExtractor) -> None:
        self._extractor = extractor
        members = getattr(extractor, "members", None)
        names = members if isinstance(members, str) or members is None else ";".join(members)
        self.members = None if names is None else split_keys(names)

    def __call__(self, sample: RawSample, draws: Draws | None) -> str:
        try:
            caption = self._extractor(sample, draws)
        except Dropped:
            raise
        except Exception as error:
            raise Dropped("extractor_error", repr(error)) from error
        if not isinstance(caption, str):
            raise Dropped("extractor_error", f"it gave {type(caption).__name__}, not str")
        return usable_text(caption)


class _OwnTransform:
    """A user's transform: what it raises or gives instead of a sample drops the sample."""

    def __init__(self, path: str) -> None:
        try:
            self._function = load_function(path)
        except ValueError as error:
            raise SettingsError(f"transform: {error}") from error

    def __call__(self, sample: RawSample) -> RawSample:
        try:
            changed = self._function(sample)
        except Dropped:
            raise
        except Exception as error:
            raise Dropped("transform_error", repr(error)) from error
        if changed is None:
            raise Dropped("transform_none", "")
        if not isinstance(changed, Mapping):
            raise Dropped("transform_error", f"it gave {type(changed).__name__}, not a mapping")
        return changed


def member_of(sample: RawSample, suffixes: Sequence[str]) -> Any:
    """The first present member, or ABSENT. A user's transform may have named members in capitals."""
    for suffix in suffixes:
        if suffix in sample:
            return sample[suffix]
    lowered = {name.lower(): name for name in sample if isinstance(name, str)}
    for suffix in suffixes:
        if suffix in lowered:
            return sample[lowered[suffix]]
    return ABSENT


def text_of(sample: RawSample, suffixes: tuple[str, ...], absent: str) -> str:
    """The stripped text of a member; a byte order mark is no text."""
    value = member_of(sample, suffixes)
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        _refuse(value, suffixes, absent)
    try:
        return bytes(value).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise Dropped("caption_not_utf8", str(error)) from error


def object_of(sample: RawSample, suffixes: tuple[str, ...], absent: str) -> dict[str, Any]:
    """The object of a JSON member."""
    value = member_of(sample, suffixes)
    if value is ABSENT:
        _refuse(value, suffixes, absent)
    return json_object(value)


def json_object(value: Any) -> dict[str, Any]:
    """The object of a JSON text; a user's transform may have parsed it already.

    Raises:
        Dropped: `json_invalid` or `json_not_object`.
    """
    if isinstance(value, (str, bytes, bytearray)):
        try:
            value = _parsed(value)
        except (ValueError, RecursionError) as error:
            raise Dropped("json_invalid", str(error)) from error
    if not isinstance(value, dict):
        raise Dropped("json_not_object", f"{type(value).__name__} instead of an object")
    return value


def _parsed(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. Raises ValueError, RecursionError."""
    try:
        return from_json(text)  # in half the time
    except (ValueError, TypeError):  # the second where a str holds halves of characters
        return json.loads(text)  # forgives more: UTF-16, a byte order mark, halves of characters


def _refuse(value: Any, suffixes: tuple[str, ...], reason: str) -> NoReturn:
    raise Dropped(reason, _missing(suffixes) if value is ABSENT else f"{type(value).__name__} instead of text")


def _missing(suffixes: tuple[str, ...]) -> str:
    return "no member " + " or ".join(f".{suffix}" for suffix in suffixes)


def usable_text(caption: str) -> str:
    """The stripped caption, if a tokenizer can read it: JSON's escapes can hold halves of characters."""
    caption = caption.strip()
    if not caption:
        raise Dropped("empty_caption", "")
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        raise Dropped("caption_not_utf8", str(error)) from error
    return caption


def value_at(value: Any, parts: Sequence[str]) -> Any:
    """What lies at a path of names and list positions, or ABSENT."""
    if not parts:
        return value
    if isinstance(value, list):
        position = int(parts[0]) if parts[0].isdecimal() else len(value)
        return value_at(value[position], parts[1:]) if position < len(value) else ABSENT
    if not isinstance(value, dict):
        return ABSENT
    # A name with dots in it was split with the path: its longer forms are tried after the plain one.
    for end in range(1, len(parts) + 1):
        found = value_at(_named(value, ".".join(parts[:end])), parts[end:])
        if found is not ABSENT:
            return found
    return ABSENT


def _named(value: dict[str, Any], name: str) -> Any:
    if name in value:
        return value[name]
    lowered = name.lower()
    return next((inner for other, inner in value.items() if other.lower() == lowered), ABSENT)


def _strings(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str)]


def _weighted(found: list[tuple[list[str], float]], point: float) -> list[str]:
    """The choice at `point` of [0, 1) along the weights."""
    point *= sum(weight for _, weight in found)
    for texts, weight in found:
        point -= weight
        if point < 0:
            return texts
    return found[-1][0]
