"""Caption extraction: the image bytes and the caption of a raw sample, with the user's own code on the way.

A raw sample is a mapping: `__key__` and `__url__` (str) and the members by suffix (bytes). A sample that lacks a
member, or on which the user's code raises, becomes `Dropped` with a reason.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from pydantic_core import from_json

from clipstream.data.decode.class_names import class_names, fold_name, number_of, prompt_templates
from clipstream.data.json_path import ABSENT as ABSENT
from clipstream.data.json_path import parse_path, parse_text, structure, texts_at, unwrapped, value_at
from clipstream.data.source_settings import SENTENCE, SWAP, CaptionSettings, JsonCaption, LabelCaption, TextCaption
from clipstream.errors import Dropped, SettingsError, errors_as
from clipstream.text import listed, printable
from clipstream.utils.content import HEAD, PRINTED, check_bytes, encoding_of, kind, to_utf8
from clipstream.utils.plugins import call_plugin, is_plugin, load_function, load_plugin
from clipstream.utils.section import make_part

if TYPE_CHECKING:
    from clipstream.data.order.rng import SampleRNG, SampleRNGs

LONG_WORD, PUNCTUATION = 4, ".,;:!?\"'()[]"  # of words that `with_swap` swaps
RawSample = Mapping[str, Any]
JsonObject = dict[str, Any]
SampleTransform = Callable[[RawSample], RawSample]
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file


class CaptionExtractor(Protocol):
    """Gives the caption of a sample. A user's own class is constructed with its settings."""

    @property
    def members(self) -> tuple[str, ...] | None:
        """Suffixes of the members that are read; None for all."""

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """The caption.

        Args:
            sample: `__key__`, `__url__`, and the members as bytes by suffix in lower case.
            rng: random numbers of the sample; None in evaluation, which must not depend on chance.

        Raises Dropped: there is no caption; the reason is a short name such as 'no_caption'.
        """
        ...


def candidates(extractor: CaptionExtractor, sample: RawSample) -> list[list[str]]:
    """All captions that training may draw, by path of the caption settings; no path has a blank one.

    A user's own extractor may have a method `candidates(sample) -> list[str]`; without it, its caption in evaluation is
    the only one.

    Raises Dropped: as the extractor does.
    """
    own = getattr(extractor, "candidates", None)
    found: list[list[str]] = [[extractor(sample, None)]] if own is None else own(sample)
    return found


def draw_caption(by_path: Sequence[list[str]], weights: Sequence[float] | None, rng: SampleRNG) -> int:
    """The caption that training draws from the candidates of a sample: its position among all of them.

    Of several paths with text one is drawn by weight, then one of its texts. Paths of weight 0 are used where no other
    has text.
    """
    present = [number for number, texts in enumerate(by_path) if texts]
    usable = [number for number in present if weights is None or weights[number]] or present[:1]
    path = usable[0]
    if weights is not None and len(usable) > 1:
        total = 0.0  # not `sum`, which adds floats in another way since Python 3.12
        for number in usable:
            total += weights[number]
        point = rng.uniform() * total
        path = usable[-1]
        for number in usable:
            point -= weights[number]
            if point < 0:
                path = number
                break
    before = sum(len(texts) for texts in by_path[:path])
    return before + (rng.integer(len(by_path[path])) if len(by_path[path]) > 1 else 0)


class Several(NamedTuple):
    """The texts of a sample in a training step."""

    captions: list[str]  # at least one
    negative: str | None = None  # a hard negative; None without one that differs
    short: str | None = None  # a short text


def draw_several(extractor: CaptionExtractor, sample: RawSample, rng: SampleRNG) -> Several:
    """The texts of a training step; of a user's own extractor its caption."""
    if isinstance(extractor, _Field):
        return extractor.several(sample, rng)
    return Several([extractor(sample, rng)])


def draw_texts(by_path: Sequence[list[str]], weights: Sequence[float] | None, rng: SampleRNG, most: int) -> list[str]:
    """Up to `most` different captions from the candidates of a sample; the first is that of `draw_caption`."""
    left, drawn = [list(texts) for texts in by_path], list[str]()
    while len(drawn) < most and any(left):
        texts = list(chain(*left))
        drawn.append(texts[draw_caption(left, weights, rng) if len(texts) > 1 else 0])
        left = [[text for text in texts if text != drawn[-1]] for texts in left]
    return drawn


def with_swap(text: str, rng: SampleRNG) -> str | None:
    """The text with two different words swapped, those of four letters or more where there are two; None without.

    NegCLIP (arXiv:2210.01936) swaps words of the same part of speech, which needs a tagger of the language.
    """
    words = text.split()
    places = [place for place, word in enumerate(words) if len(word.strip(PUNCTUATION)) >= LONG_WORD]
    places = places if len({words[place].casefold() for place in places}) > 1 else list(range(len(words)))
    if len({words[place].casefold() for place in places}) < 2:
        return None
    first = places[rng.integer(len(places))]
    others = [place for place in places if words[place].casefold() != words[first].casefold()]
    other = others[rng.integer(len(others))]
    words[first], words[other] = words[other], words[first]
    return " ".join(words)


def draw_captions(
    counts: np.ndarray[Any, Any], weights: Sequence[float] | None, rngs: SampleRNGs
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`draw_caption` for n samples, int64 [n].

    Args:
        counts: integers [n, P], number of candidates of each path; each sample has some.
        weights: of the P paths; None to use the first path that has candidates.
        rngs: of the samples.
    """
    rows = np.arange(len(counts))
    drawable = counts > 0 if weights is None else (counts > 0) & (np.asarray(weights) > 0)
    drawn = drawable.any(axis=1)
    paths = np.where(drawn, drawable.argmax(axis=1), (counts > 0).argmax(axis=1))
    if weights is not None and len(several := np.flatnonzero(drawable.sum(axis=1) > 1)):
        shares = np.where(drawable[several], np.asarray(weights, dtype=np.float64), 0.0)
        total = np.zeros(len(several))
        for share in shares.T:
            total += share
        point = rngs.uniform(several) * total
        last = shares.shape[1] - 1 - drawable[several, ::-1].argmax(axis=1)
        chosen = np.full(len(several), -1)
        for path, share in enumerate(shares.T):
            point -= share
            chosen[(chosen < 0) & (share > 0) & (point < 0)] = path
        paths[several] = np.where(chosen < 0, last, chosen)
    held = counts[rows, paths].astype(np.int64)
    choices: np.ndarray[Any, np.dtype[np.int64]] = counts.cumsum(axis=1, dtype=np.int64)[rows, paths] - held
    many = np.flatnonzero(held > 1)
    choices[many] += rngs.integer(held[many], many)
    return choices


@lru_cache(maxsize=256)
def split_keys(keys: str) -> tuple[str, ...]:
    """The suffixes in a setting such as 'jpg;PNG, .webp', in lower case and without the leading dot."""
    names = (key.strip().lower().removeprefix(".") for key in keys.replace(",", ";").split(";"))
    return tuple(name for name in names if name)


def image_bytes(sample: RawSample, keys: str, members: Iterable[str] = ()) -> bytes:
    """The bytes of the first member present of `keys`; `members` are all that it has. Raises Dropped: `no_image`."""
    suffixes = split_keys(keys)
    value = member_of(sample, suffixes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if value is not ABSENT:
        raise Dropped("no_image", f"{type(value).__name__} instead of bytes")
    there = [f".{printable(name)}" for name in [*members] or sample if not name.startswith("__")]
    wanted = _missing(suffixes) if len(suffixes) < 5 else "no member of an image"
    raise Dropped("no_image", f"{wanted} (--image-key): it has {listed(there, 8) or 'none'}")


def build_caption(settings: CaptionSettings) -> CaptionExtractor:
    """The extractor that the settings choose.

    Raises SettingsError: a user's class cannot be constructed.
    """
    if isinstance(settings, TextCaption | JsonCaption):
        field: _Field
        if isinstance(settings, JsonCaption):
            field = JsonField(settings)
        else:
            field = TextField(split_keys(settings.key), settings.lines)
        field.per_image = settings.per_image
        field.negatives, field.short = settings.negatives or "", settings.short or ""
        return cast(CaptionExtractor, field)
    if isinstance(settings, LabelCaption):
        return LabelText(settings)
    with errors_as(SettingsError, "caption", TypeError, ValueError):
        found = load_plugin(settings.type) if is_plugin(settings.type) else None
        if inspect.isfunction(found) and not hasattr(found, "Settings"):
            return _OwnExtractor(found, _takes_rng(found))
        return _OwnExtractor(make_part("caption", settings))


def build_transform(path: str | None) -> SampleTransform | None:
    """The user's own function `package.module:fn`, sample -> sample or None; an exception in it drops the sample.

    Raises SettingsError: there is no such function.
    """
    if path is None:
        return None
    with errors_as(SettingsError, "transform", ValueError):
        return partial(_transformed, load_function(path))


class _Field:
    """A caption extractor that draws from its candidates."""

    weights: Sequence[float] | None = None  # of the paths
    per_image, negatives, short = 1, "", ""  # of `SeveralTexts`

    def several(self, sample: RawSample, rng: SampleRNG) -> Several:
        """The texts of a training step. Raises Dropped."""
        by_path = self.candidates(sample)
        drawn = draw_texts(by_path, self.weights, rng, self.per_image)
        if self.negatives == SWAP:
            negative = with_swap(drawn[0], rng)
        else:
            captions = {*drawn, *chain(*by_path)}
            left = [text for text in self._texts_at(self.negatives, sample) if text not in captions]
            negative = left[rng.integer(len(left))] if left else None
        if self.short == SENTENCE:  # as Long-CLIP's train/sharegpt4v.py
            return Several(drawn, negative, drawn[0].replace("\n", " ").split(". ")[0] or drawn[0])
        left = self._texts_at(self.short, sample)
        return Several(drawn, negative, left[rng.integer(len(left)) if len(left) > 1 else 0] if left else None)

    def _texts_at(self, path: str, sample: RawSample) -> list[str]:
        """The texts at a path of the sample; none at ''."""
        return []

    def candidates(self, sample: RawSample) -> list[list[str]]:
        raise NotImplementedError

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """The caption: in training one that `draw_caption` draws, in evaluation the first. Raises Dropped."""
        by_path = self.candidates(sample)
        texts = list(chain(*by_path))
        return texts[0 if rng is None or len(texts) == 1 else draw_caption(by_path, self.weights, rng)]


class TextField(_Field):
    """The caption is the text of a member: the first present of `members`, UTF-8, stripped.

    Where the text is a list of texts (`json_path.structure`), one is drawn, in evaluation the first; so is one of its
    lines for `lines` 'random', and 'first' takes the first. Reasons of dropped samples: `no_caption`,
    `caption_not_utf8` or `empty_caption`.
    """

    def __init__(self, members: tuple[str, ...], lines: str = "all") -> None:
        self.members, self._lines = members, lines

    def every(self, sample: RawSample) -> list[str]:
        """The texts of a list, else the lines. Raises Dropped as __call__."""
        texts = self._texts(sample)
        return texts if len(texts) > 1 else texts[0].splitlines() or texts

    def candidates(self, sample: RawSample) -> list[list[str]]:
        return [[usable_text(text) for text in self._texts(sample)]]

    def _texts(self, sample: RawSample) -> list[str]:
        text = text_of(sample, self.members, "no_caption")
        if (found := structure(text)) is None:
            lines = [line for line in text.splitlines() if line.strip()] if self._lines != "all" else []
            return (lines[:1] if self._lines == "first" else lines) or [text]
        if isinstance(found, list) and (texts := [one for one in found if isinstance(one, str) and one.strip()]):
            return texts
        raise Dropped("no_caption", f"{_kind(found)}, not a text: select a text in it with --caption-json")


_parsed = lru_cache(parse_text)


class JsonField(_Field):
    """The caption is a string at a path into the JSON member.

    Only strings are captions: a number or a null counts as absent. From a list of strings (also one that is written as
    a text), and from the strings that a path with `*` or a filter matches, one is drawn (in evaluation, the first). Of
    several paths the first that has text is used. With weights, training draws one of those that have text; the first
    of weight 0 is used where no other has text, as in open_clip. The grammar of paths is in `json_path`. Reasons of
    dropped samples: as TextField, `json_invalid` or `json_not_object`.
    """

    def __init__(self, settings: JsonCaption) -> None:
        self._paths = [parse_text(path) for path in settings.paths]
        self.weights = settings.weights
        self._wanted = " or ".join(settings.paths)
        self._json = split_keys(settings.key)
        self._fallback = TextField(split_keys(settings.fallback or ""))
        self.members = self._json + self._fallback.members

    def every(self, sample: RawSample) -> list[str]:
        """All strings of the first path that has text, else the lines of the fallback. Raises Dropped as __call__."""
        by_path = self._by_path(sample)
        return self._fallback.every(sample) if by_path is None else next(filter(None, by_path))

    def candidates(self, sample: RawSample) -> list[list[str]]:
        """See `candidates`; the text of the fallback counts to the first path."""
        by_path = self._by_path(sample)
        return self._fallback.candidates(sample) + [[]] * (len(self._paths) - 1) if by_path is None else by_path

    def _texts_at(self, path: str, sample: RawSample) -> list[str]:
        found: list[str] = []
        if not path:
            return found
        with contextlib.suppress(Dropped):  # the fallback may stand in for a broken JSON member
            for inner in texts_at(object_of(sample, self._json, "no_caption"), _parsed(path)):
                there = unwrapped(inner)
                for text in there if isinstance(there, list) else [there]:
                    with contextlib.suppress(Dropped):
                        found += [usable_text(text)] if isinstance(text, str) else []
        return found

    def _by_path(self, sample: RawSample) -> list[list[str]] | None:
        """The texts by path; None where the fallback, which is present, stands in for them."""
        try:
            return self._texts(object_of(sample, self._json, "no_caption"))
        except Dropped:  # the better reason, unless there is a fallback
            if member_of(sample, self._fallback.members) is ABSENT:
                raise
            return None

    def _texts(self, value: JsonObject | list[Any]) -> list[list[str]]:
        """The texts of each path that training may draw: without weights, of the first that has any."""
        by_path: list[list[str]] = [[] for _ in self._paths]
        weights = self.weights or [1.0] * len(by_path)
        reason, inside = "no_caption", None
        for number in sorted(range(len(by_path)), key=lambda number: not weights[number]):  # those of weight 0 last
            if any(by_path) and not (self.weights and weights[number]):
                break
            items: list[Any] = []
            for inner in texts_at(value, self._paths[number]):
                there = unwrapped(inner)
                items += there if isinstance(there, list) else [there]
                inside = there if isinstance(there, (list, dict)) else inside
            for text in items:
                if isinstance(text, str):
                    try:
                        by_path[number].append(usable_text(text))
                    except Dropped as drop:
                        reason = "caption_not_utf8" if "caption_not_utf8" in (drop.reason, reason) else drop.reason
        if not any(by_path):
            more = f", but {_kind(inside)}: extend the path into it" if inside else ""
            raise Dropped(reason, f"no text at {self._wanted}{more}")
        return by_path


class LabelField:
    """The label of a sample for classification, as text: a number or the name of a class.

    A CaptionExtractor; `LabelEncoder` makes class numbers of its texts. `label` names the member with the class by its
    suffixes (`cls`), or is `json:PATH` into the JSON member.
    """

    def __init__(self, label: str) -> None:
        kind, colon, path = label.partition(":")
        self._path = parse_path(path) if colon and kind.strip().lower() == "json" else None
        self.of_member = self._path is None
        self.members = split_keys(label) if self.of_member else ("json",)

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """The label, see `label_text`. Raises Dropped: `no_label`, `json_invalid` or `json_not_object`."""
        found = self.value(sample)
        if isinstance(found, list) and len(found) != 1:
            raise Dropped("no_label", "a list: several labels per image require labels: list")
        label = label_text(found[0] if isinstance(found, list) else found)
        if not label or number_of(label) in (-1, -100):  # marks of data sets, and of PyTorch's losses
            raise Dropped("no_label", "the label is missing (or -1, -100), or neither a whole number nor text")
        return label

    def value(self, sample: RawSample) -> Any:
        """What the sample has as label or labels; a list from an array or a JSON list."""
        if self._path is not None:
            return value_at(object_of(sample, self.members, "no_label"), self._path)
        value = member_of(sample, self.members)
        if isinstance(value, bytes) and value.startswith(NUMPY):
            try:
                return np.load(io.BytesIO(value), allow_pickle=False).ravel().tolist()
            except Exception as error:  # a MemoryError, for example, of a header that claims 2^40 numbers
                raise Dropped("no_label", f"NumPy cannot read the array: {error}") from error
        if not isinstance(value, (str, bytes, bytearray, memoryview)) and value is not ABSENT:
            return value.tolist() if hasattr(value, "tolist") else value  # of a user's transform
        text = text_of(sample, self.members, "no_label")
        if text.startswith("[") or (text.startswith('"') and text.endswith('"')):
            try:
                return json.loads(text)
            except ValueError as error:
                raise Dropped("json_invalid", str(error)) from error
        return text


class LabelText(_Field):
    """The caption is a template with the name of the sample's class in it, one of several drawn.

    Reasons of dropped samples: as LabelField.
    """

    def __init__(self, settings: LabelCaption) -> None:
        self._label = LabelField(settings.label)
        self.members = self._label.members
        self._templates = prompt_templates(settings.templates)
        self._names = None if settings.classes is None else class_names(settings.classes)
        self._folded = {fold_name(name): name for name in self._names or ()}

    def candidates(self, sample: RawSample) -> list[list[str]]:
        name = self._name(self._label(sample, None))
        return [[usable_text(template(name)) for template in self._templates]]

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """What `draw_caption` gives, without the texts that are not drawn."""
        template = rng.integer(len(self._templates)) if rng is not None and len(self._templates) > 1 else 0
        return usable_text(self._templates[template](self._name(self._label(sample, None))))

    def _name(self, label: str) -> str:
        """The class's name. Raises Dropped: the label is no class, or a number without names."""
        number = number_of(label)
        if self._names is None:
            if number is not None:
                raise Dropped("no_label", f"{label} is a number: set the names of the classes with caption.classes")
            return label.replace("_", " ")
        if (name := self._folded.get(fold_name(label))) is not None:
            return name
        if number is None or not 0 <= number < len(self._names):
            raise Dropped("no_label", f"{label!r} is not one of the {len(self._names):,} classes of caption.classes")
        return self._names[number]


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a user's function takes (sample, rng); else (sample). Raises TypeError: neither."""
    signature = inspect.signature(function)
    several = len(signature.parameters) > 1
    with errors_as(TypeError, f"{function.__name__}{signature}: expected (sample) or (sample, rng)", TypeError):
        signature.bind(*"xx"[: 1 + several])
    return several


class _OwnExtractor:
    """A user's extractor or function; its exceptions and wrong results drop the sample."""

    def __init__(self, extractor: Callable[..., Any], takes_rng: bool = True) -> None:
        self._extractor, self._takes_rng = extractor, takes_rng
        members = getattr(extractor, "members", None)
        names = members if isinstance(members, str) or members is None else ";".join(members)
        self.members = None if names is None else split_keys(names)

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        given = (sample, rng) if self._takes_rng else (sample,)
        caption = call_plugin("extractor_error", "the caption extractor", self._extractor, *given)
        if caption is None and inspect.isfunction(self._extractor):
            raise Dropped("no_caption", f"{self._extractor.__name__} returned None")
        if not isinstance(caption, str):
            raise Dropped("extractor_error", f"expected str, not {type(caption).__name__}")
        return usable_text(caption)

    def candidates(self, sample: RawSample) -> list[list[str]]:
        if (own := getattr(self._extractor, "candidates", None)) is None:
            return [[self(sample, None)]]
        texts = call_plugin("extractor_error", "the caption extractor", own, sample)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Dropped("extractor_error", "`candidates` must return a list of str")
        return [[usable_text(text) for text in texts]]


def _transformed(function: Callable[..., Any], sample: RawSample) -> RawSample:
    """What a user's transform makes of a sample. Raises Dropped."""
    changed = call_plugin("transform_error", "the transform", function, sample)
    if changed is None:
        raise Dropped("transform_none", "")
    if not isinstance(changed, Mapping):
        raise Dropped("transform_error", f"expected a mapping, not {type(changed).__name__}")
    return changed


def member_of(sample: RawSample, suffixes: Sequence[str]) -> Any:
    """The first present member, or ABSENT. Names in capitals, which a user's transform may use, match as well."""
    for suffix in suffixes:
        if suffix in sample:
            return sample[suffix]
    lowered = {name.lower(): name for name in sample if isinstance(name, str)}
    return next((sample[lowered[suffix]] for suffix in suffixes if suffix in lowered), ABSENT)


def text_of(sample: RawSample, suffixes: tuple[str, ...], absent: str) -> str:
    """The stripped text of a member, without a byte order mark. Raises Dropped, with the reason `absent` if missing."""
    value = member_of(sample, suffixes)
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        what = _missing(suffixes) if value is ABSENT else f"{type(value).__name__} instead of text"
        raise Dropped(absent, what)
    check_bytes(len(value), suffixes[0], is_text=True)
    try:
        return str(value, "utf-8").removeprefix("\ufeff").strip()  # the codec utf-8-sig takes ten times as long
    except UnicodeDecodeError as error:
        with contextlib.suppress(UnicodeDecodeError):
            if text := bytes(value).decode(encoding_of(bytes(value))).strip():
                return text
        raise Dropped("caption_not_utf8", f"no UTF-8: {to_utf8(bytes(value))}") from error


def object_of(sample: RawSample, suffixes: tuple[str, ...], absent: str) -> JsonObject | list[Any]:
    """The object or list in a JSON member. Raises Dropped, with the reason `absent` if missing."""
    value = member_of(sample, suffixes)
    if value is ABSENT:
        raise Dropped(absent, _missing(suffixes))
    parsed = json_value(value)
    return parsed if isinstance(parsed, list) and parsed else json_object(parsed)


def json_object(value: Any) -> JsonObject:
    """The object in a JSON text, which a user's transform may have parsed already. Raises Dropped."""
    value = json_value(value)
    if not isinstance(value, dict):
        raise Dropped("json_not_object", f"{type(value).__name__} instead of an object")
    return value


def json_value(value: Any) -> Any:
    """The value of a JSON text, which a user's transform may have parsed already. Raises Dropped."""
    if isinstance(value, (str, bytes, bytearray)):
        check_bytes(len(value), "json")
        try:
            try:
                value = from_json(value)  # takes half the time of json.loads
            except (ValueError, TypeError):  # TypeError: a str with lone surrogates
                value = json.loads(value)  # accepts more: UTF-16, a byte order mark, lone surrogates
        except (ValueError, RecursionError) as error:
            with contextlib.suppress(UnicodeDecodeError):
                value = value if isinstance(value, str) else value.decode("utf-8-sig")
            if not isinstance(value, str) or structure(value) is None:
                what = f"no UTF-8: {to_utf8(bytes(value))}" if isinstance(error, UnicodeDecodeError) else str(error)
                raise Dropped("json_invalid", what) from error
    return unwrapped(value)


def label_text(value: Any) -> str:
    """A value as a label: the text, whole numbers without a fraction, true or false; '' if it is no such value.

    3, 3.0, "3" and b"3", also of NumPy, are "3"; NaN, which is pandas' missing value, is no label.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bytes):
        value = value.decode("utf-8-sig", "replace")
    if isinstance(value, float):
        value = int(value) if value.is_integer() else ""
    label = str(value).strip() if isinstance(value, (str, int)) else ""
    if printed := re.fullmatch(r"b(['\"])(.*)\1", label):  # bytes as Python prints them
        label = printed[2].strip()
    return "" if label.lower() == "nan" else label.lower() if isinstance(value, bool) else label


def _kind(value: list[Any] | JsonObject) -> str:
    """A list or object in words, with the names of its first fields."""
    inner = next((item for item in value if isinstance(item, dict)), {}) if isinstance(value, list) else value
    names = ", ".join(printable(str(name), 40) for name in [*inner][:5])
    what = "an object" if isinstance(value, dict) else "a list of objects" if inner else "a list"
    return what + (f" with the fields {names}" if names else "")


def _missing(suffixes: tuple[str, ...]) -> str:
    return "no member " + " or ".join(f".{suffix}" for suffix in suffixes)


def usable_text(caption: str) -> str:
    """The stripped caption. Raises Dropped if it is empty or has lone surrogates, which JSON's escapes can hold."""
    caption = caption.strip()
    if not caption:
        raise Dropped("empty_caption", "")
    if caption.startswith(("b'", 'b"', "{'")) and kind(caption[:HEAD].encode(errors="replace")) == "repr":
        raise Dropped("no_caption", PRINTED)
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        raise Dropped("caption_not_utf8", str(error)) from error
    return caption
