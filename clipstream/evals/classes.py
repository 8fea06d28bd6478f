"""Classes of labelled images: their names, prompt templates, and how the labels of samples are read.

They come from settings, files, open_clip, or the data set if it has CLIP_benchmark's layout. Imports torch only for
open_clip's names and templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Literal

from clipstream.data.decode.class_names import class_names, unreadable_names
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources.tars import MULTILABEL, Benchmark, of_source
from clipstream.errors import SettingsError
from clipstream.evals.settings import LabelledSettings, ZeroShotSettings, sources_of
from clipstream.text import printable
from clipstream.utils.logs import logger

if TYPE_CHECKING:
    from clipstream.data.batch import Batch
    from clipstream.data.decode.captions import CaptionExtractor
    from clipstream.data.decode.tokenizers import Tokenizer
    from clipstream.evals.context import EvalContext

Labels = Literal["one", "list", "multi_hot"]
_warn_once = lru_cache(maxsize=256)(logger.warning)


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


def unreadable(settings: LabelledSettings, *, gaps: bool = False) -> dict[str, str]:
    """Key -> why the class names or templates cannot be read, found without an import of torch."""
    found: dict[str, str] = {}
    if isinstance(settings, ZeroShotSettings) and settings.languages:
        for language in reversed(settings.languages):
            found |= unreadable(settings.in_language(language), gaps=True)
        return found
    names = templates = None
    try:
        names = class_spec(settings)
        if names is None and isinstance(settings, ZeroShotSettings):
            raise SettingsError("missing: class names as a list, a file with one per line, or imagenet")
    except SettingsError as error:
        found["classes"] = str(error).removeprefix("classes: ")
    try:
        templates = template_spec(settings) if isinstance(settings, ZeroShotSettings) else None
    except SettingsError as error:
        found["templates"] = str(error).removeprefix("templates: ")
    found = unreadable_names(names, templates, gaps=gaps) | found
    if found.get("templates") == found.get("classes"):  # names and templates may lack the same folder
        found.pop("templates", None)
    return found


@dataclass(frozen=True)
class Labelling:
    """How labels are read."""

    label: str  # member or JSON path with the label
    labels: Labels  # labels per image, and their form
    classes: list[str] | None  # names by number; None if labels are numbers without names

    @classmethod
    def of(cls, settings: LabelledSettings) -> Labelling:
        """From settings. Raises SettingsError: a file of names is missing or invalid."""
        from clipstream.data.sources.folders import check_folders, class_folders  # not for --help, which imports this

        benchmark, spec = benchmark_of(settings), class_spec(settings)
        labels: Labels | None = getattr(settings, "labels", None)
        if labels is None:
            labels = "multi_hot" if benchmark is not None and benchmark.kind == MULTILABEL else "one"
        names, label = None if spec is None else class_names(spec), settings.label
        sources = sources_of(settings).values() if "cls" in label.lower().split(";") else ()
        if folders := [found for one in sources if (found := class_folders(one)) is not None]:
            every = sorted({*chain(*folders)})
            named = not all(map(str.isdecimal, every))  # the names of the folders are the labels
            if names is not None:
                check_folders(every, names)
            elif named and len(folders) == len(sources):
                names = every
            label = f"class;{label}" if named and names is not None else label
        return cls(label, labels, names)

    @property
    def named(self) -> list[str]:
        """The class names of an evaluator that needs them. Raises SettingsError: there are none."""
        if self.classes is None:
            raise SettingsError("classes: missing: class names as a list, a file with one per line, or imagenet")
        return self.classes

    def warn_of_unseen(self, context: EvalContext, counts: Sequence[float]) -> None:
        """Warn once, on rank 0, of named classes without an image, given the number of images by class; not of the few
        samples of a dry run.
        """
        if not context.world.is_main or context.AT_MOST is not None:
            return
        unseen = [name for name, count in zip(self.classes or (), counts, strict=False) if not count]
        if unseen:
            _warn_once(
                f"only {len(counts) - len(unseen):,} of {len(counts):,} class names are labels of the data: no samples "
                f"of {', '.join(repr(printable(name, 60)) for name in unseen[:3])}{', …' if len(unseen) > 3 else ''}. "
                "Set the evaluator's classes to the names of the labels, in the order of their numbers"
            )

    def batches(
        self, context: EvalContext, source: SourceSettings, batch_size: int, key: str = "data"
    ) -> Iterator[Batch]:
        """See `EvalContext.batches`; `ids` are class numbers [n, 1], or 0 and 1 per class [n, C]."""
        from clipstream.data.decode import labels  # imports numpy

        target: CaptionExtractor = labels.LabelField(self.label)
        tokenizer: Tokenizer
        if self.labels == "one":
            tokenizer = labels.LabelEncoder(self.classes)
        else:
            target = labels.LabelsField(self.label)
            tokenizer = labels.LabelsEncoder(self.named, multi_hot=self.labels == "multi_hot")
        return context.batches(source, batch_size, target=target, tokenizer=tokenizer, key=key)
