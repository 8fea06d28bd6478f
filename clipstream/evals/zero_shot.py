"""Owns zero-shot classification: prompts make a classifier, labelled pictures are counted against it.

The classifier is CLIP's (arXiv:2103.00020, section 3.1.4): each prompt's feature is normalised, the mean over a class's
prompts is normalised again. Ties: see `ranking`, and `average_precision` for pictures with several labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from clipstream.batch import Batch
from clipstream.evals.average_precision import mean_average_precision
from clipstream.evals.context import EvalContext
from clipstream.evals.labels import Labelling, figures
from clipstream.evals.looks import Kept, Matches, show_classes, show_confusions
from clipstream.evals.prompts import Template, prompt_templates, template_spec
from clipstream.evals.protocol import source_of
from clipstream.evals.ranking import place
from clipstream.evals.settings import ZeroShotSettings

PROMPTS_AT_ONCE = 8192  # over all ranks; bounds what is gathered


class ZeroShot:
    """Yields top1, top5 (top C with C < 5 classes), mean_per_class_recall, n (pictures) and chance (1/C).

    mean_per_class_recall is the mean of top1 over the classes that the data have, as scikit-learn's
    balanced_accuracy_score. Of pictures with several labels it yields mAP, n and chance_mAP instead.

    Raises:
        SettingsError: no data are set, or a file of names or templates is not there or wrong.
    """

    def __init__(self, settings: ZeroShotSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        self.labelling = Labelling.of(settings)
        self.classes = self.labelling.named
        self.templates = prompt_templates(template_spec(settings))

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate on all ranks; the values are 0 to 1, but for n.

        Raises:
            DataError: no usable picture, or a label outside the classes.
        """
        classifier = text_classifier(context, self.classes, self.templates)
        yield from (self._one if self.labelling.labels == "one" else self._several)(context, classifier)

    def _one(self, context: EvalContext, classifier: torch.Tensor) -> Iterator[tuple[str, float]]:
        """The metrics of pictures with one label each."""
        tally = torch.zeros((len(classifier), 3), dtype=torch.float64, device=classifier.device)
        kept, first = Kept(context), []
        matches = Matches(context, self.settings.prompts)
        true: list[torch.Tensor] = []
        guessed: list[torch.Tensor] = []
        for batch in self.labelling.batches(context, self.source, self.settings.batch_size):
            assert batch.pixels is not None, "an evaluation source gives pixels"
            labels = batch.ids[:, 0].to(classifier.device, torch.int64)
            images = context.encode_image(batch.pixels)
            tally.index_add_(0, labels, score(images, classifier, labels))
            if kept.add(batch):
                first.append(images)
            matches.add(images, batch, partial(self._words, batch))
            if context.examples_wanted:
                true.append(labels)
                guessed.append((images @ classifier.T).argmax(dim=1))
        tally = context.world.all_reduce_sum(tally)
        if not tally[:, 2].any():
            raise context.unusable("picture with a label")
        show_classes(context, kept, first, classifier, self.classes)
        show_confusions(context, true, guessed, self.classes)
        matches.show()
        yield from figures(tally)

    def _several(self, context: EvalContext, classifier: torch.Tensor) -> Iterator[tuple[str, float]]:
        """The metrics of pictures with several labels each."""
        images = [classifier[:0]]
        labels = [torch.zeros((0, len(classifier)), dtype=torch.bool)]
        matches = Matches(context, self.settings.prompts)
        for batch in self.labelling.batches(context, self.source, self.settings.batch_size):
            assert batch.pixels is not None, "an evaluation source gives pixels"
            images.append(context.encode_image(batch.pixels))
            labels.append(batch.ids.bool())
            matches.add(images[-1], batch, partial(self._words, batch))
        total = sum(context.world.gather_objects(sum(map(len, images))))
        if not total:
            raise context.unusable("picture with labels")
        there = torch.cat(labels).to(classifier.device)
        matches.show()
        share = context.world.all_reduce_sum(there.sum(dtype=torch.float64))
        yield "mAP", mean_average_precision(torch.cat(images), classifier, there, context.world)
        yield "n", total
        yield "chance_mAP", float(share) / (total * len(classifier))

    def _words(self, batch: Batch, i: int) -> str:
        """The class names of a picture."""
        if self.labelling.labels == "one":
            return self.classes[int(batch.ids[i, 0])]
        return ", ".join(self.classes[j] for j in batch.ids[i].nonzero().flatten().tolist())


def score(images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hits among the first 1 and 5 places, and 1, of each picture.

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
    """The classifier of C classes, float32 [C, D] with rows of length 1, on every rank; ranks share the encoding.

    It is made once for the present weights (see `EvalContext.remember`).
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
