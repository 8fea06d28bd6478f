"""Owns how the labels of an evaluator's pictures are read, whatever its settings leave open, and their figures.

What is not set comes from a data set in CLIP_benchmark's layout, where the evaluator tests on one. It encodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from clipstream.batch import Batch
from clipstream.data.benchmark import MULTILABEL
from clipstream.data.fields import CaptionExtractor
from clipstream.data.settings import SourceSettings
from clipstream.data.targets import LabelEncoder, LabelField, LabelsEncoder, LabelsField, NumberEncoder
from clipstream.data.text import Tokenizer
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.prompts import benchmark_of, class_names, class_spec
from clipstream.evals.settings import LabelledSettings

Labels = Literal["one", "list", "multi_hot"]


@dataclass(frozen=True)
class Labelling:
    """How labels are read.

    Attributes:
        label: member or JSON path that holds them.
        labels: how many a picture has, and in which form.
        classes: names in the order of their numbers; None where labels are numbers and nothing names them.
    """

    label: str
    labels: Labels
    classes: list[str] | None

    @classmethod
    def of(cls, settings: LabelledSettings) -> Labelling:
        """What the settings say.

        Raises:
            SettingsError: a file of names is not there or wrong.
        """
        benchmark, spec = benchmark_of(settings), class_spec(settings)
        labels: Labels | None = getattr(settings, "labels", None)
        if labels is None:
            labels = "multi_hot" if benchmark is not None and benchmark.kind == MULTILABEL else "one"
        return cls(settings.label, labels, None if spec is None else class_names(spec))

    @property
    def named(self) -> list[str]:
        """The class names of an evaluator that cannot do without.

        Raises:
            SettingsError: there are none.
        """
        if self.classes is None:
            raise SettingsError("classes: missing: the class names: a list, a file with one a line, or imagenet")
        return self.classes

    @property
    def target(self) -> CaptionExtractor:
        """What takes the label, or the labels, out of a sample."""
        return LabelField(self.label) if self.labels == "one" else LabelsField(self.label)

    @property
    def encoder(self) -> Tokenizer:
        """What makes ids of it: class numbers [n, 1], or a 0 or 1 for each class, [n, C]."""
        if self.labels != "one":
            return LabelsEncoder(self.named, multi_hot=self.labels == "multi_hot")
        return NumberEncoder() if self.classes is None else LabelEncoder(self.classes)

    def batches(
        self, context: EvalContext, source: SourceSettings, batch_size: int, key: str = "data"
    ) -> Iterator[Batch]:
        """The batches of a source (see `EvalContext.batches`), whose ids are what `encoder` makes."""
        return context.batches(source, batch_size, target=self.target, tokenizer=self.encoder, key=key)


def figures(tally: torch.Tensor) -> Iterator[tuple[str, float]]:
    """The metrics of a whole data set of one label a picture, from its sums by class.

    Args:
        tally: float64 [C, 3]: top1, top5 and n; one picture at least.

    Yields:
        top1, top5, mean_per_class_recall (over the classes that the data have), n and chance.
    """
    top1, top5, n = tally.cpu().unbind(dim=1)
    total = int(n.sum())
    present = n > 0
    yield "top1", float(top1.sum()) / total
    yield "top5", float(top5.sum()) / total
    yield "mean_per_class_recall", float((top1[present] / n[present]).mean())
    yield "n", total
    yield "chance", 1 / len(n)
