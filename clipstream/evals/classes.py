"""Classes of labelled images: their names, prompt templates, and how the labels of samples are read.

They come from settings, files, open_clip, or the data set if it has CLIP_benchmark's layout. Imports torch only for
open_clip's names and templates.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clipstream.data.json_path import structure
from clipstream.data.settings import SourceSettings
from clipstream.data.sources.tars import MULTILABEL, Benchmark, of_source
from clipstream.errors import SettingsError, each
from clipstream.evals.settings import LabelledSettings, ZeroShotSettings
from clipstream.text import listed, printable
from clipstream.utils.content import read_text
from clipstream.utils.logs import logger

if TYPE_CHECKING:
    from clipstream.data.batch import Batch
    from clipstream.data.decode.captions import CaptionExtractor
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.evals.context import EvalContext

Template = Callable[[str], str]
Labels = Literal["one", "list", "multi_hot"]
NAME_COLUMNS = ("name", "class_name", "classname", "class", "label", "text", "template", "prompt", "category", "title")
NUMBER_COLUMNS = ("id", "index", "idx", "number", "class_id", "class_idx", "class_index", "label_id", "label", "")
INNER = ("names", "classes", "classnames", "labels", "id2label", "templates")  # fields with the list or map
OF_OPEN_CLIP = ("imagenet", "openai", "simple")


def benchmark_of(settings: LabelledSettings) -> Benchmark | None:
    """The evaluator's data set if it has CLIP_benchmark's layout, else None.

    Raises SettingsError: its address is invalid.
    """
    return None if settings.data is None else of_source(settings.data.shards, settings.data.type)


def class_spec(settings: LabelledSettings) -> str | list[str] | None:
    """The argument of `class_names`: the evaluator's setting, else the names of its data set, else None.

    Raises SettingsError: the names of the data set cannot be read.
    """
    benchmark = benchmark_of(settings) if settings.classes is None else None
    return settings.classes if benchmark is None else benchmark.classes


def template_spec(settings: ZeroShotSettings) -> str | list[str]:
    """The argument of `prompt_templates`: the evaluator's setting, else that of its data set, else 'openai'.

    Raises SettingsError: the templates of the data set cannot be read.
    """
    benchmark = benchmark_of(settings) if settings.templates is None else None
    return settings.templates or (None if benchmark is None else benchmark.templates) or "openai"


def class_names(spec: str | Sequence[str]) -> list[str]:
    """Class names from a list, 'imagenet' (open_clip's names), or a file, see `text_list`.

    Raises SettingsError: no such file, or fewer than 2 names.
    """
    if spec == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    text = isinstance(spec, str)
    names = _lines(str(spec), "classes") if text else list(each("classes", "names, a file or imagenet", spec, str))
    if len(names) < 2:
        raise SettingsError(f"classes: expected at least 2, not {len(names)}")
    return names


def repeated(settings: LabelledSettings) -> str | None:
    """A warning about class names of the user's own that are given more than once, ignoring case as labels do."""
    if settings.classes in (None, *OF_OPEN_CLIP):
        return None
    names = class_names(settings.classes or [])
    counts = Counter(name.strip().casefold() for name in names)
    twice = [repr(name) for name in names if counts.pop(name.strip().casefold(), 0) > 1]
    shown = listed([printable(name, 80) for name in twice])
    return f"duplicate class names: {shown}" if twice else None


def unreadable(settings: LabelledSettings) -> dict[str, str]:
    """Key -> why the class names or templates cannot be read, found without an import of torch."""
    found: dict[str, str] = {}
    try:
        names = class_spec(settings)
        if names is None and isinstance(settings, ZeroShotSettings):
            raise SettingsError("missing: class names as a list, a file with one per line, or imagenet")
        if names is not None and names not in OF_OPEN_CLIP:
            class_names(names)
    except SettingsError as error:
        found["classes"] = str(error).removeprefix("classes: ")
    if isinstance(settings, ZeroShotSettings):
        try:
            templates = template_spec(settings)
            if templates not in OF_OPEN_CLIP:
                prompt_templates(templates)
        except SettingsError as error:
            text = str(error).removeprefix("templates: ")
            if text not in found.values():  # names and templates may lack the same folder
                found["templates"] = text
    return found


def prompt_templates(spec: str | Sequence[str]) -> list[Template]:
    """Templates from a list, 'openai', 'simple', 'plain', or a file, see `text_list`.

    Raises SettingsError: no such file, or a template without {c} or {}.
    """
    if spec in ("openai", "simple"):
        import open_clip

        return list(open_clip.OPENAI_IMAGENET_TEMPLATES if spec == "openai" else open_clip.SIMPLE_IMAGENET_TEMPLATES)
    if isinstance(spec, str):
        texts = ["{c}"] if spec == "plain" else _lines(spec, "templates")
    else:
        texts = list(each("templates", "texts, a file, or openai, simple or plain", spec, str))
    for text in texts:
        if not has_place(text):
            raise SettingsError(f"templates: {text!r} has no {{c}} or {{}} where the class name goes")
    if not texts:
        raise SettingsError("templates: none given")
    return [lambda name, text=text: text.replace("{c}", name).replace("{}", name) for text in texts]  # type: ignore[misc]


def has_place(text: str) -> bool:
    """Whether a template has a placeholder for the class name."""
    return "{c}" in text or "{}" in text


def _lines(path: str, what: str) -> list[str]:
    try:
        text = read_text(Path(path))
        text.encode()  # raises for what is not UTF-8
        return text_list(text, Path(path).suffix.lower())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{what}: cannot read the file {path!r} ({error}); write texts as a list") from error


def text_list(text: str, suffix: str = "") -> list[str]:
    """The texts of a file, in the order of their numbers.

    They are one a line (`0 cat`, `1: dog` and `n02123045 tabby` without what is before the name), a list, a map from
    numbers or to numbers (JSON, or as Python prints it; also as a field such as `id2label`, or with pairs of WordNet's
    number and name), or the column of a table with a header.

    Args:
        text: of the file.
        suffix: of its name; .json is JSON, .csv and .tsv are tables.

    Raises ValueError: it is of another form, or its numbers are not those from 0 without a gap.
    """
    text = text.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if suffix in (".yaml", ".yml"):
        raise ValueError("YAML is not supported: write one text per line, or JSON")
    if suffix == ".json" or text.startswith("[") or (text.startswith("{") and not all(map(has_place, lines))):
        try:
            found = structure(text) or json.loads(text)
        except ValueError as error:
            raise ValueError(f"invalid JSON: {error}") from None
        if isinstance(found, dict):
            found = next((found[key] for key in INNER if isinstance(found.get(key), dict | list)), found)
        if isinstance(found, dict):
            keys, values = [str(key) for key in found], list(found.values())
            if values and all(isinstance(value, int) for value in values):
                keys, values = [str(value) for value in values], keys
            found = _in_order(keys, values)
        if isinstance(found, list):  # ImageNet's class index has pairs ["n01440764", "tench"]
            found = [one[1] if isinstance(one, list) and len(one) == 2 else one for one in found]
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError("expected a JSON list of texts or a map from numbers to texts")
        return [one.strip() for one in found]
    rows = list(csv.reader(lines, delimiter="\t" if "\t" in (lines or [""])[0] else ","))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    name = next((n for n, cell in enumerate(header) if cell in NAME_COLUMNS), None)
    number = next((n for n, cell in enumerate(header) if cell in NUMBER_COLUMNS and n != name), None)
    if name is not None and (suffix in (".csv", ".tsv") or number is not None):
        if any(len(row) != len(header) for row in rows):
            raise ValueError(f"expected {len(header)} columns in each row, as in the header")
        texts = [row[name].strip() for row in rows[1:]]
        return texts if number is None else _in_order([row[number] for row in rows[1:]], texts)
    for form in (r"(\d+)\s*[\s:,.)]\s*(.+)", r"(n\d{8})\s+(.+)"):
        numbered = [(one[1], one[2]) for line in lines if (one := re.fullmatch(form, line))]
        if len(numbered) == len(lines) and form[1] == "n":
            return [name for _, name in numbered]
        if len(numbered) == len(lines):
            numbered.sort(key=lambda one: int(one[0]))
            if [int(n) - int(numbered[0][0]) for n, _ in numbered] == list(range(len(lines))):
                return [name for _, name in numbered]
    if suffix in (".csv", ".tsv") and len(header) > 1:
        raise ValueError(f"none of its columns ({', '.join(header)}) is named {', '.join(NAME_COLUMNS[:3])}")
    return [", ".join(row).strip() for row in rows] if suffix in (".csv", ".tsv") else lines


def _in_order(keys: Sequence[str], texts: Sequence[Any]) -> list[Any]:
    """The texts by their numbers. Raises ValueError: these are not all from 0, without a gap."""
    from clipstream.data.decode.labels import number_of  # imports NumPy, which help does without

    by_number = {number_of(key): text for key, text in zip(keys, texts, strict=True)}
    if set(by_number) != set(range(len(texts))):
        shown = ", ".join(map(printable, keys[:3]))
        raise ValueError(f"its {len(texts)} texts are not numbered from 0 to {len(texts) - 1}: {shown}, …")
    return [by_number[number] for number in range(len(texts))]


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    logger.warning(text)


@dataclass(frozen=True)
class Labelling:
    """How labels are read."""

    label: str  # member or JSON path with the label
    labels: Labels  # labels per image, and their form
    classes: list[str] | None  # names by number; None if labels are numbers without names

    @classmethod
    def of(cls, settings: LabelledSettings) -> Labelling:
        """From settings. Raises SettingsError: a file of names is missing or invalid."""
        benchmark, spec = benchmark_of(settings), class_spec(settings)
        labels: Labels | None = getattr(settings, "labels", None)
        if labels is None:
            labels = "multi_hot" if benchmark is not None and benchmark.kind == MULTILABEL else "one"
        return cls(settings.label, labels, None if spec is None else class_names(spec))

    @property
    def named(self) -> list[str]:
        """The class names of an evaluator that needs them. Raises SettingsError: there are none."""
        if self.classes is None:
            raise SettingsError("classes: missing: class names as a list, a file with one per line, or imagenet")
        return self.classes

    def warn_of_unseen(self, counts: Sequence[float]) -> None:
        """Warn once of named classes without an image, given the number of images by class."""
        unseen = [name for name, count in zip(self.classes or (), counts, strict=False) if not count]
        if unseen:
            _warn_once(
                f"only {len(counts) - len(unseen):,} of {len(counts):,} class names are labels of the data: no "
                f"samples of"
                f" {', '.join(repr(printable(name, 60)) for name in unseen[:3])}{', …' if len(unseen) > 3 else ''}. "
                "Set the evaluator's classes to the names of the labels, in the order of their numbers"
            )

    @property
    def target(self) -> CaptionExtractor:
        """Extracts the label or labels of a sample."""
        from clipstream.data.decode.labels import LabelField, LabelsField  # imports numpy

        return LabelField(self.label) if self.labels == "one" else LabelsField(self.label)

    @property
    def encoder(self) -> Tokenizer:
        """Turns them into class numbers [n, 1], or 0 and 1 per class [n, C]."""
        from clipstream.data.decode.labels import LabelEncoder, LabelsEncoder  # imports numpy

        if self.labels != "one":
            return LabelsEncoder(self.named, multi_hot=self.labels == "multi_hot")
        return LabelEncoder(self.classes)

    def batches(
        self, context: EvalContext, source: SourceSettings, batch_size: int, key: str = "data"
    ) -> Iterator[Batch]:
        """See `EvalContext.batches`; `ids` are the output of `encoder`."""
        return context.batches(source, batch_size, target=self.target, tokenizer=self.encoder, key=key)
