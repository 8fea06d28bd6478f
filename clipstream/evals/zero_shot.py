"""Owns zero-shot classification: prompts make a classifier, labelled pictures are counted against it.

The classifier is CLIP's (arXiv:2103.00020, section 3.1.4): each prompt's feature is normalised, the mean over a class's
prompts is normalised again. Ties: see `ranking`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from clipstream.data.fields import LabelField
from clipstream.data.text import LabelEncoder
from clipstream.evals.looks import Kept, show_classes
from clipstream.evals.prompts import Template, class_names, prompt_templates
from clipstream.evals.protocol import EvalContext, source_of
from clipstream.evals.ranking import hits, place
from clipstream.evals.settings import ZeroShotSettings

PROMPTS_AT_ONCE = 8192  # over all ranks; bounds what is gathered


class ZeroShot:
    """Yields top1, top5 (top C with C < 5 classes), mean_per_class_recall, n (pictures) and chance (1/C).

    mean_per_class_recall is the mean of top1 over the classes that the data have, as scikit-learn's
    balanced_accuracy_score.

    Raises:
        SettingsError: no data are set, or a file of names or templates is not there or wrong.
    """

    def __init__(self, settings: ZeroShotSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        self.classes = class_names(settings.classes)
        self.templates = prompt_templates(settings.templates)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate on all ranks; the values are 0 to 1, but for n.

        Raises:
            DataError: no usable picture, or a label outside the classes.
        """
        settings, count = self.settings, len(self.classes)
        classifier = text_classifier(context, self.classes, self.templates)
        tally = torch.zeros((count, 3), dtype=torch.float64, device=classifier.device)  # top1, top5, n by class
        target = LabelField(settings.label)
        encoder = LabelEncoder(self.classes)
        kept, first = Kept(context), []
        for batch in context.batches(self.source, settings.batch_size, target=target, tokenizer=encoder):
            assert batch.pixels is not None, "an evaluation source gives pixels"
            labels = batch.ids[:, 0].to(classifier.device, torch.int64)
            images = context.encode_image(batch.pixels)
            tally.index_add_(0, labels, score(images, classifier, labels))
            if kept.add(batch):
                first.append(images)
        tally = context.world.all_reduce_sum(tally)
        if not tally[:, 2].any():
            raise context.unusable("picture with a label")
        show_classes(context, kept, first, classifier, self.classes)
        yield from figures(tally)


def score(images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hits among the first 1 and 5 places, and 1, of each picture.

    Args:
        images: [n, D], L2-normalised.
        classifier: [C, D], L2-normalised.
        labels: int64 [n], 0 to C - 1.

    Returns:
        float64 [n, 3].
    """
    ahead, level = place(images, classifier, labels)
    top1, top5 = hits(ahead, level, 1), hits(ahead, level, 5)
    return torch.stack([top1, top5, torch.ones_like(top1)], dim=1)


def figures(tally: torch.Tensor) -> Iterator[tuple[str, float]]:
    """The metrics of a whole data set, from its sums by class: float64 [C, 3] of top1, top5 and n; one at least."""
    top1, top5, n = tally.cpu().unbind(dim=1)
    total = int(n.sum())
    present = n > 0
    yield "top1", float(top1.sum()) / total
    yield "top5", float(top5.sum()) / total
    yield "mean_per_class_recall", float((top1[present] / n[present]).mean())
    yield "n", total
    yield "chance", 1 / len(n)


def text_classifier(context: EvalContext, classes: Sequence[str], templates: Sequence[Template]) -> torch.Tensor:
    """The classifier of C classes, float32 [C, D] with rows of length 1, on every rank; ranks share the encoding."""
    step = max(1, PROMPTS_AT_ONCE // len(templates))
    rows = []
    for start in range(0, len(classes), step):
        some = classes[start : start + step]
        features = context.encode_prompts([template(name) for name in some for template in templates])
        rows.append(features.view(len(some), len(templates), -1).mean(dim=1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=1)
