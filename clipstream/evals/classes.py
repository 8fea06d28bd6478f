"""Classes of labelled images: their names, prompt templates, and how the labels of samples are read.

They come from settings, files, open_clip, or the data set if it has CLIP_benchmark's layout. Imports torch only for
open_clip's names and templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipstream.data.settings import SourceSettings
from clipstream.data.sources.clip_benchmark import MULTILABEL, Benchmark, of_source
from clipstream.errors import SettingsError, each
from clipstream.evals.settings import LabelledSettings, ZeroShotSettings
from clipstream.utils.escape import printable

if TYPE_CHECKING:
    from clipstream.data.batch import Batch
    from clipstream.data.decode.captions import CaptionExtractor
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.evals.context import EvalContext

Template = Callable[[str], str]
Labels = Literal["one", "list", "multi_hot"]
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
    if settings.classes is not None:
        return settings.classes
    benchmark = benchmark_of(settings)
    return None if benchmark is None else benchmark.classes


def template_spec(settings: ZeroShotSettings) -> str | list[str]:
    """The argument of `prompt_templates`: the evaluator's setting, else that of its data set, else 'openai'.

    Raises SettingsError: the templates of the data set cannot be read.
    """
    if settings.templates is not None:
        return settings.templates
    benchmark = benchmark_of(settings)
    return (None if benchmark is None else benchmark.templates) or "openai"


def class_names(spec: str | Sequence[str]) -> list[str]:
    """Class names from a list, 'imagenet' (open_clip's names), or a file with one per line.

    Raises SettingsError: no such file, or fewer than 2 names.
    """
    if spec == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    names = (
        _lines(spec, "classes")
        if isinstance(spec, str)
        else list(each("classes", "names, a file or imagenet", spec, str))
    )
    if len(names) < 2:
        raise SettingsError(f"classes: {len(names)} given, classification takes at least 2")
    return names


def repeated(settings: LabelledSettings) -> str | None:
    """A warning about class names of the user's own that are given more than once, ignoring case as labels do."""
    if settings.classes in (None, *OF_OPEN_CLIP):
        return None
    first: dict[str, str] = {}
    twice: dict[str, str] = {}
    for name in class_names(settings.classes or []):
        word = name.strip().casefold()
        if word in first:
            twice[word] = printable(repr(first[word]), 80)
        first.setdefault(word, name)
    if not twice:
        return None
    shown = ", ".join([*twice.values()][:5]) + (f" and {len(twice) - 5} more" if len(twice) > 5 else "")
    return f"given more than once: {shown}; classes of one name cannot be told apart, give each its own"


def unreadable(settings: LabelledSettings) -> dict[str, str]:
    """Key -> why the class names or templates cannot be read, found without an import of torch."""
    found: dict[str, str] = {}
    try:
        names = class_spec(settings)
        if names is None and isinstance(settings, ZeroShotSettings):
            raise SettingsError("missing: the class names: a list, a file with one a line, or imagenet")
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
    """Templates from a list, 'openai', 'simple', 'plain', or a file with one per line.

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
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{what}: cannot read the file {path!r} ({error}); texts themselves are given as a list"
        ) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


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
            raise SettingsError("classes: missing: the class names: a list, a file with one a line, or imagenet")
        return self.classes

    @property
    def target(self) -> CaptionExtractor:
        """Extracts the label or labels of a sample."""
        from clipstream.data.decode.labels import LabelField, LabelsField  # imports numpy

        return LabelField(self.label) if self.labels == "one" else LabelsField(self.label)

    @property
    def encoder(self) -> Tokenizer:
        """Turns them into class numbers [n, 1], or 0 and 1 per class [n, C]."""
        from clipstream.data.decode.labels import LabelEncoder, LabelsEncoder, NumberEncoder  # imports numpy

        if self.labels != "one":
            return LabelsEncoder(self.named, multi_hot=self.labels == "multi_hot")
        return NumberEncoder() if self.classes is None else LabelEncoder(self.classes)

    def batches(
        self, context: EvalContext, source: SourceSettings, batch_size: int, key: str = "data"
    ) -> Iterator[Batch]:
        """See `EvalContext.batches`; `ids` are the output of `encoder`."""
        return context.batches(source, batch_size, target=self.target, tokenizer=self.encoder, key=key)
