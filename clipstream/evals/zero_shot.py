"""Zero-shot classification of labelled images with a classifier made of prompts.

The classifier is CLIP's (arXiv:2103.00020, section 3.1.4): the normalised mean over a class's normalised prompt
features. For ties see `evals.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.class_names import Template, prompt_templates
from clipstream.evals.classes import Labelling, template_spec
from clipstream.evals.context import EvalContext
from clipstream.evals.gallery import Kept, Matches, show_classes, show_confusions
from clipstream.evals.metrics import accuracies, mean_average_precision, place
from clipstream.evals.settings import ZeroShotSettings, source_of

PROMPTS_AT_ONCE = 8192  # over all ranks


class ZeroShot:
    """Yields top1, top5 (top C with C < 5 classes), mean_per_class_recall, n (images) and chance (1/C).

    mean_per_class_recall is the mean of top1 over the classes in the data, scikit-learn's balanced_accuracy_score. For
    images with several labels it yields mAP, n and chance_mAP instead.

    Raises SettingsError: no data are set, or a file of names or templates is missing or invalid.
    """

    def __init__(self, settings: ZeroShotSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        self.labelling = Labelling.of(settings)
        self.classes = self.labelling.named
        self.templates = prompt_templates(template_spec(settings))

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective. Raises DataError: no usable image, or a label outside the classes."""
        classifier = text_classifier(context, self.classes, self.templates)
        if self.labelling.labels != "one":
            yield from self._multilabel(context, classifier)
            return
        tally = torch.zeros((len(classifier), 3), dtype=torch.float64, device=classifier.device)
        kept, first = Kept(context), []
        matches = Matches(context, self.settings.prompts)
        true: list[torch.Tensor] = []
        guessed: list[torch.Tensor] = []
        for batch in self.labelling.batches(context, self.source, self.settings.batch_size):
            labels = batch.ids[:, 0].to(classifier.device, torch.int64)
            images = context.encode_image(batch.images)
            tally.index_add_(0, labels, score(images, classifier, labels))
            if kept.take(batch):
                first.append(images)
            matches.add(images, batch, partial(self._words, batch))
            if context.examples_wanted:
                true.append(labels)
                guessed.append((images @ classifier.T).argmax(dim=1))
        tally = context.world.all_reduce_sum(tally)
        if not tally[:, 2].any():
            raise context.unusable("image with a label")
        self.labelling.warn_of_unseen(context, tally[:, 2].tolist())
        show_classes(context, kept, first, classifier, self.classes)
        show_confusions(context, true, guessed, self.classes)
        matches.show()
        yield from accuracies(tally)

    def _multilabel(self, context: EvalContext, classifier: torch.Tensor) -> Iterator[tuple[str, float]]:
        images = [classifier[:0]]
        labels = [torch.zeros((0, len(classifier)), dtype=torch.bool)]
        matches = Matches(context, self.settings.prompts)
        for batch in self.labelling.batches(context, self.source, self.settings.batch_size):
            images.append(context.encode_image(batch.images))
            labels.append(batch.ids.bool())
            matches.add(images[-1], batch, partial(self._words, batch))
        total = sum(context.world.gather_objects(sum(map(len, images))))
        if not total:
            raise context.unusable("image with labels")
        there = torch.cat(labels).to(classifier.device)
        matches.show()
        share = context.world.all_reduce_sum(there.sum(dtype=torch.float64))
        yield "mAP", mean_average_precision(torch.cat(images), classifier, there, context.world)
        yield "n", total
        yield "chance_mAP", float(share) / (total * len(classifier))

    def _words(self, batch: Batch, i: int) -> str:
        """The class names of a batch's i-th image."""
        if self.labelling.labels == "one":
            return self.classes[int(batch.ids[i, 0])]
        return ", ".join(self.classes[j] for j in batch.ids[i].nonzero().flatten().tolist())


def score(images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hits at 1 and at 5, and 1, of each image.

    Args:
        images: [n, D], L2-normalised.
        classifier: [C, D], L2-normalised.
        labels: int64 [n], 0 to C - 1.

    Returns:
        float64 [n, 3].
    """
    places = place(images, classifier, labels)
    top1, top5 = places.hits(1), places.hits(5)
    return torch.stack([top1, top5, torch.ones_like(top1)], dim=1)


def text_classifier(context: EvalContext, classes: Sequence[str], templates: Sequence[Template]) -> torch.Tensor:
    """The classifier of C classes, L2-normalised float32 [C, D], on every rank; cached for the current weights.

    Collective; each rank encodes a share of the prompts.
    """
    prompts = [template(name) for name in classes for template in templates]

    def make() -> torch.Tensor:
        step = max(1, PROMPTS_AT_ONCE // len(templates)) * len(templates)
        rows = []
        for start in range(0, len(prompts), step):
            features = context.encode_prompts(prompts[start : start + step])
            rows.append(features.view(-1, len(templates), features.shape[1]).mean(dim=1))
        return torch.nn.functional.normalize(torch.cat(rows), dim=1)

    return context.remember([str(len(templates)), *prompts], make)
