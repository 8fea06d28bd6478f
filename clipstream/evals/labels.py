"""Reading of labels for evaluators of labelled images, and their accuracy metrics.

Defaults come from the data set if it has CLIP_benchmark's layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.captions import CaptionExtractor
from clipstream.data.decode.labels import LabelEncoder, LabelField, LabelsEncoder, LabelsField, NumberEncoder
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.settings import SourceSettings
from clipstream.data.sources.clip_benchmark import MULTILABEL
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.prompts import benchmark_of, class_names, class_spec
from clipstream.evals.settings import LabelledSettings

Labels = Literal["one", "list", "multi_hot"]


@dataclass(frozen=True)
class Labelling:
    """How labels are read.

    Attributes:
        label: member or JSON path with the label.
        labels: labels per image, and their form.
        classes: names by number; None if labels are numbers without names.
    """

    label: str
    labels: Labels
    classes: list[str] | None

    @classmethod
    def of(cls, settings: LabelledSettings) -> Labelling:
        """From settings.

        Raises:
            SettingsError: a file of names is missing or invalid.
        """
        benchmark, spec = benchmark_of(settings), class_spec(settings)
        labels: Labels | None = getattr(settings, "labels", None)
        if labels is None:
            labels = "multi_hot" if benchmark is not None and benchmark.kind == MULTILABEL else "one"
        return cls(settings.label, labels, None if spec is None else class_names(spec))

    @property
    def named(self) -> list[str]:
        """The class names of an evaluator that needs them.

        Raises:
            SettingsError: there are none.
        """
        if self.classes is None:
            raise SettingsError("classes: missing: the class names: a list, a file with one a line, or imagenet")
        return self.classes

    @property
    def target(self) -> CaptionExtractor:
        """Extracts the label or labels of a sample."""
        return LabelField(self.label) if self.labels == "one" else LabelsField(self.label)

    @property
    def encoder(self) -> Tokenizer:
        """Turns them into class numbers [n, 1], or 0 and 1 per class [n, C]."""
        if self.labels != "one":
            return LabelsEncoder(self.named, multi_hot=self.labels == "multi_hot")
        return NumberEncoder() if self.classes is None else LabelEncoder(self.classes)

    def batches(
        self, context: EvalContext, source: SourceSettings, batch_size: int, key: str = "data"
    ) -> Iterator[Batch]:
        """See `EvalContext.batches`; `ids` are the output of `encoder`."""
        return context.batches(source, batch_size, target=self.target, tokenizer=self.encoder, key=key)


def figures(tally: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Accuracy metrics of a data set with one label per image, from sums per class.

    Args:
        tally: float64 [C, 3]: top1, top5 and n; at least one image.

    Yields:
        top1, top5, mean_per_class_recall (over the classes in the data), n and chance.
    """
    top1, top5, n = tally.cpu().unbind(dim=1)
    total = int(n.sum())
    present = n > 0
    yield "top1", float(top1.sum()) / total
    yield "top5", float(top5.sum()) / total
    yield "mean_per_class_recall", float((top1[present] / n[present]).mean())
    yield "n", total
    yield "chance", 1 / len(n)
