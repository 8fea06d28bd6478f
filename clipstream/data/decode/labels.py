"""Labels: what evaluators read from a sample in place of one caption (a label, several labels, all captions), and its
ids.

An extractor gives a text, as a caption extractor does, and the encoder that belongs to it makes ids of the text in the
data workers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clipstream.data.decode.captions import (
    JsonField,
    RawSample,
    TextField,
    build_caption,
    json_value,
    label_text,
    split_keys,
    usable_text,
)
from clipstream.data.decode.captions import LabelField as LabelField
from clipstream.data.decode.class_names import fold_name, number_of
from clipstream.data.decode.key_lists import TABLES, KeyList, ListedSource
from clipstream.data.decode.tokenizers import Ids, Tokenizer
from clipstream.data.json_path import structure
from clipstream.data.order.rng import hash_of
from clipstream.data.source_settings import LANG, CaptionSettings, JsonCaption
from clipstream.errors import DataError, Dropped, SettingsError

if TYPE_CHECKING:
    from clipstream.data.order.rng import SampleRNG

NO_CAPTION = -1  # in the ids of missing captions


class GroupField:
    """The group of a sample (a product, a class), as a label of 64 bits that is equal for the samples of a group.

    `field` names it as LabelField's `label` does. A sample without it is a group of its own: its label is that of its
    name in its source, and odd, while those of groups are even.
    """

    def __init__(self, field: str, source: str) -> None:
        self._one, self._source = LabelField(field), source
        self.members = self._one.members

    def __call__(self, name: str, sample: RawSample) -> int:
        """The label, which fits into int64; never 0. `name`: 'SHARD/KEY' of the sample."""
        try:
            text, alone = self._one(sample, None), 0
        except Dropped:
            text, alone = f"{self._source}/{name}", 1
        return ((hash_of(text.encode(errors="surrogateescape")) | 3) - 1 | alone) - (1 << 63)


class SampleProbability:
    """The probability with which a sample is drawn in training.

    Args:
        where: a file (.csv, .parquet, .jsonl) with the columns shard, key and probability, read as a KeyList; or the
            field of a sample that has it, as of GroupField.
        setting: dotted key of the samples' source.
        source: the source.

    Attributes:
        members: of a sample that are needed; () with a file.

    Raises SettingsError: the file cannot be read, has no sample of the source, or a number that is no probability.
    """

    def __init__(self, where: str, setting: str, source: ListedSource) -> None:
        self._where, self.list, flag = where, None, f"--{setting}.probability"
        if where.endswith(TABLES):
            self.list = KeyList(where, setting.rpartition(".")[2], "probability", source, flag)
        self._field = None if self.list is not None else LabelField(where)
        self.members: tuple[str, ...] = () if self._field is None else self._field.members
        if self.list is not None:
            assert self.list.values is not None
            wrong = self.list.values[~((self.list.values >= 0) & (self.list.values <= 1))]
            if len(wrong):
                raise SettingsError(f"{where}: {wrong[0]:g} is no probability: expected numbers from 0 to 1")

    def __call__(self, name: str, sample: RawSample) -> float:
        """The probability, 0 to 1, of the sample 'SHARD/KEY'. Raises Dropped: `no_probability`."""
        if self.list is not None:
            place, values = self.list.place(name, sample["__key__"]), self.list.values
            if place is None or values is None:
                raise Dropped("no_probability", f"not in {self._where}")
            return float(values[place])
        assert self._field is not None
        try:
            found = self._field.value(sample)
            value = float(found[0] if isinstance(found, list) and len(found) == 1 else found)
        except Dropped as drop:
            raise Dropped("no_probability", drop.detail) from drop
        except (TypeError, ValueError):
            raise Dropped("no_probability", f"{str(found)[:60]!r} is no number") from None
        if not 0 <= value <= 1:
            raise Dropped("no_probability", f"{value:g} is no number from 0 to 1")
        return value


def compare_groups(setting: str, field: str, labels: np.ndarray[Any, Any], of: str = "") -> tuple[str, str]:
    """What to say where no two samples share a group, and where most samples have none, else ''.

    Args:
        setting: that names `field`, for messages.
        labels: of GroupField, int64 [n].
        of: what the samples are of, such as ' of the first batch'.

    Raises SettingsError: no sample has a group.
    """
    grouped = labels[labels & 1 == 0]
    if not len(grouped):
        raise SettingsError(
            f"{setting}: none of the {len(labels):,} samples{of} has {field!r}: name json:PATH, a member of the tars "
            "or a column of the table that gives the group of a sample (`clipstream check` lists them)"
        )
    few = f"{setting}: of the {len(labels):,} samples{of} only {len(grouped):,} have {field!r}; each of the others is "
    few += "a group of its own"
    alone = f"{setting}: no two of the {len(grouped):,} samples{of} have the same {field!r}"
    return "" if len(np.unique(grouped)) < len(grouped) else alone, few if 2 * len(grouped) < len(labels) else ""


class LabelsField:
    """All labels of a sample, as a JSON list: of names and numbers of classes, or of a 0 or 1 for each class.

    They are in a list in the JSON member (`json:PATH`), in a text member as a JSON list or one per line, or in a `npy`
    member. A sample with an empty list is usable, one without the member or field is not. `label`: as for LabelField.
    """

    def __init__(self, label: str) -> None:
        self._one = LabelField(label)
        self.members = self._one.members

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """The labels, as a JSON list. Raises Dropped: as LabelField."""
        found = self._one.value(sample)
        if isinstance(found, str) and self._one.of_member:
            found = [line for line in found.splitlines() if line.strip()]
        if isinstance(found, (str, int, float)):
            found = [found]
        if not isinstance(found, list):
            raise Dropped("no_label", "no list of labels")
        labels = [int(x) if isinstance(x, (bool, float)) and float(x).is_integer() else label_text(x) for x in found]
        if "" in labels:
            raise Dropped("no_label", "a label is empty, or neither a whole number nor text")
        return json.dumps(labels)


class CaptionsField:
    """All captions of a sample, one per line: each line of a text, each string of a JSON list.

    Line breaks within a JSON string become spaces. The captions of a user's own extractor are the lines of its text.
    """

    def __init__(self, settings: CaptionSettings) -> None:
        self._caption = build_caption(settings)
        self.members = self._caption.members

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """At least one line, none of them blank. Raises Dropped: as the extractor of one caption."""
        if isinstance(self._caption, (JsonField, TextField)):
            texts = [" ".join(text.splitlines()) for text in self._caption.every(sample)]
        else:
            texts = self._caption(sample, None).splitlines()
        return "\n".join(usable_text(text) for text in texts if text.strip()) or usable_text("")


class LanguagesField:
    """The captions of a sample in L languages, as a JSON list with a list for each, which is empty without a caption.

    Args:
        settings: of the caption, in which {lang} stands for a language.
        languages: their codes.
        every: take all captions of a language, as `CaptionsField`; else one.
    """

    def __init__(self, settings: CaptionSettings, languages: Sequence[str], *, every: bool) -> None:
        text = settings.model_dump_json()
        of_each = [type(settings).model_validate_json(text.replace(LANG, language)) for language in languages]
        self._every = every
        self._fields = [CaptionsField(one) if every else build_caption(one) for one in of_each]
        self._json = {key for one in of_each if isinstance(one, JsonCaption) for key in split_keys(one.key)}
        self.members = tuple(dict.fromkeys(name for one in self._fields for name in one.members or ()))

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """Lists of which at least one is not empty. Raises Dropped: there is no caption in any language."""
        # Parsed once for all languages; what is no JSON is found by the first of them.
        with contextlib.suppress(Dropped):
            sample = {**sample, **{key: json_value(sample[key]) for key in self._json if key in sample}}
        found: list[list[str]] = []
        dropped = Dropped("no_caption", "")
        for field in self._fields:
            found.append([])
            try:
                text = field(sample, None)
                found[-1] = text.split("\n") if self._every else [text]
            except Dropped as drop:
                dropped = drop
        if not any(found):
            raise dropped
        return json.dumps(found)


class LabelEncoder:
    """A tokenizer of labels: each becomes the number of its class, ids [n, 1].

    A label is the number of a class, from 0, or its name (`fold_name`); if names are numbers, labels are numbers.
    What is neither may be another form of a number, see `number_of`. Without class names, labels are whole numbers.
    """

    context_length = 1

    def __init__(self, classes: Sequence[str] | None) -> None:
        self._classes = None if classes is None else list(classes)
        self._numbers: dict[str, list[int]] = {}
        for number, name in enumerate(classes or ()):
            self._numbers.setdefault(fold_name(name), []).append(number)
        self.vocab_size = 2**31 - 1 if classes is None else len(classes)
        # With names such as 1, 2, 3 for the classes 0, 1, 2, a number out of range could be either.
        self._numerals = any(name.strip().isdecimal() and int(name) < self.vocab_size for name in classes or ())

    def index(self, label: str) -> int:
        """The class's number. Raises DataError: the label is no class, or the name of several."""
        label = label.strip()
        if label.isdecimal() and int(label) < self.vocab_size:
            return int(label)
        numbers = [] if label.isdecimal() and self._numerals else self._numbers.get(fold_name(label), [])
        if not numbers and not label.isdecimal() and (number := number_of(label)) is not None:
            numbers = [number] if 0 <= number < self.vocab_size else []
        if len(numbers) == 1:
            return numbers[0]
        if self._classes is None:
            raise DataError(
                f"label {label!r} is not a whole number: set the evaluator's classes (names in the order of their "
                "numbers), or its label to another member (cls) or field (json:PATH)"
            )
        what = f"the name of {len(numbers)} classes" if numbers else "no class"
        raise DataError(
            f"label {label!r} is {what}: expected a name or a number from 0 of one of the {len(self._classes)} "
            f"classes. Set the evaluator's classes to those of the data, or its label to another member (cls) or "
            f"field (json:PATH)"
        )

    def encode(self, texts: Sequence[str]) -> Ids:
        """Labels to int32 [n, 1]. Raises DataError: as `index`."""
        return np.array([self.index(text) for text in texts], dtype=np.int32).reshape(-1, 1)

    def decode(self, ids: Sequence[int]) -> str:
        """The name of the class, or its number if it has none."""
        return str(int(ids[0])) if self._classes is None else self._classes[int(ids[0])]


class LabelsEncoder:
    """A tokenizer of the texts of `LabelsField`: a 0 or 1 for each of C classes, ids [n, C].

    With `multi_hot` the lists have a 0 or 1 for each class, instead of the labels that apply.
    """

    vocab_size = 2

    def __init__(self, classes: Sequence[str], *, multi_hot: bool) -> None:
        self._one = LabelEncoder(classes)
        self._multi_hot = multi_hot
        self.context_length = len(classes)

    def encode(self, texts: Sequence[str]) -> Ids:
        """Lists of labels to int32 [n, C]. Raises DataError: a label is no class, or a list has not C numbers."""
        ids = np.zeros((len(texts), self.context_length), dtype=np.int32)
        for row, text in zip(ids, texts, strict=True):
            labels = json.loads(text)
            if not self._multi_hot:
                row[[self._one.index(str(label)) for label in labels]] = 1
                continue
            numbers = [number_of(str(label)) for label in labels]
            if len(labels) == self.context_length and all(number in (0, 1) for number in numbers):
                row[:] = [int(number == 1) for number in numbers]
            else:
                raise DataError(
                    f"labels {text[:60]} are not a list of 0 or 1 for each of the {self.context_length} classes: set "
                    "the evaluator's classes to those of the data, or its labels to list"
                )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return ", ".join(self._one.decode([number]) for number, there in enumerate(ids) if there)


class CaptionsEncoder:
    """A tokenizer of the texts of `CaptionsField`: the ids of each caption, ids [n, most · T].

    If a sample has fewer captions than `most`, the remaining ids are NO_CAPTION. `tokenizer` gives T ids a caption.
    With `languages` it takes the texts of `LanguagesField`, and the number of its language stands before the ids of a
    caption: ids [n, most · (1 + T)].
    """

    def __init__(self, tokenizer: Tokenizer, most: int, *, languages: bool = False) -> None:
        self._tokenizer, self._most, self._lead = tokenizer, most, int(languages)
        self.context_length = most * (self._lead + tokenizer.context_length)
        self.vocab_size = tokenizer.vocab_size

    def encode(self, texts: Sequence[str]) -> Ids:
        """Texts of n samples to int32 ids. Raises DataError: a sample has more captions."""
        ids = np.full((len(texts), self._most, self.context_length // self._most), NO_CAPTION, dtype=np.int32)
        for row, text in zip(ids, texts, strict=True):
            by_language: list[list[str]] = json.loads(text) if self._lead else [text.split("\n")]
            captions = [caption for some in by_language for caption in some]
            if len(captions) > self._most:
                raise DataError(f"an image has {len(captions)} captions, more than {self._most}")
            row[: len(captions), self._lead :] = self._tokenizer.encode(captions)
            if self._lead:
                row[: len(captions), 0] = np.repeat(range(len(by_language)), list(map(len, by_language)))
        return ids.reshape(len(texts), self.context_length)

    def decode(self, ids: Sequence[int]) -> str:
        """The first caption."""
        return self._tokenizer.decode(ids[self._lead : self._lead + self._tokenizer.context_length])


class ChoicesField:
    """The texts that a sample chooses between, the right one first, with its category, as JSON.

    Args:
        caption: settings of the right text.
        wrong: fields of the wrong texts, each a text per line, a list of texts, or texts in maps; with `answer`, fields
            of all texts. Without `wrong` they are the captions, of which the first is right.
        answer: field of the right text's number, from 0.
        category: field of the category.

    Attributes:
        members: of a sample that are needed; None for all.
    """

    def __init__(
        self, caption: CaptionSettings, wrong: Sequence[str], answer: str | None, category: str | None
    ) -> None:
        self._caption = build_caption(caption) if wrong else CaptionsField(caption)
        self._wrong, self._all = [LabelField(field) for field in wrong], not wrong
        self._answer, self._category = (None if field is None else LabelField(field) for field in (answer, category))
        own = [*([] if self._answer else [self._caption]), *self._wrong, *filter(None, (self._answer, self._category))]
        some = [one.members for one in own if one.members is not None]
        self.members = None if len(some) < len(own) else tuple(dict.fromkeys(name for names in some for name in names))

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        """The JSON. Raises Dropped: `no_wrong_text`, `no_label`, or as the extractor of the caption."""
        texts = [] if self._answer else self._caption(sample, None).split("\n" if self._all else "\0")
        for field in self._wrong:
            texts += _texts_in(field.value(sample), lines=field.of_member)
        texts = [usable_text(" ".join(text.split())) if text.strip() else "" for text in texts]
        if self._answer is not None:
            found = self._answer(sample, None)
            number = number_of(found)
            if number is None or not 0 <= number < len(texts) or not texts[number]:
                told = f"answer {found[:40]!r} is not the number of a text: {len(texts)} are there, the first is 0"
                raise Dropped("no_label", told)
            texts.insert(0, texts.pop(number))
        texts = [*texts[:1], *(text for text in texts[1:] if text and text != texts[0])]
        if len(texts) < 2:
            raise Dropped("no_wrong_text", "no text to choose besides the right one: see the evaluator's wrong")
        if self._category is None:
            return json.dumps([texts, ""])
        if category := label_text(self._category.value(sample)):
            return json.dumps([texts, category])
        raise Dropped("no_label", "no category: see the evaluator's category")


def _texts_in(value: Any, *, lines: bool) -> list[str]:
    """The texts and numbers of a field, with those of lists, printed lists and maps; '' for what is none."""
    if isinstance(value, str) and (inner := structure(value)) is not None:
        value = inner
    elif isinstance(value, str):
        return [label_text(text) for text in (value.splitlines() if lines else [value])]
    if isinstance(value, (list, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return [text for one in inside for text in _texts_in(one, lines=False)]
    return [label_text(value)]


class Unencoded:
    """A tokenizer for texts that an evaluator takes from `Batch.captions`: ids [n, 1], all 0."""

    context_length = vocab_size = 1

    def encode(self, texts: Sequence[str]) -> Ids:
        return np.zeros((len(texts), 1), dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return ""
