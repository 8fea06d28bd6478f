"""Zero-shot classification of labelled images with a classifier made of prompts.

The classifier is CLIP's (arXiv:2103.00020, section 3.1.4): the normalised mean over a class's normalised prompt
features. For ties see `evals.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.class_names import Template, class_names, prompt_templates
from clipstream.data.source_settings import LANG
from clipstream.errors import SettingsError
from clipstream.evals.classes import Labelling, class_spec, template_spec
from clipstream.evals.context import EvalContext, Table, of_samples
from clipstream.evals.examples import Kept, Matches, show_classes, show_confusions
from clipstream.evals.metrics import accuracies, label_metrics, place
from clipstream.evals.settings import ZeroShotSettings, source_of
from clipstream.evals.statistics import by_language
from clipstream.text import percent

PROMPTS_AT_ONCE = 8192  # over all ranks


class ZeroShot:
    """Yields top1, top5 (top C with C < 5 classes), mean_per_class_recall, n (images) and chance (1/C).

    mean_per_class_recall is the mean of top1 over the classes in the data, scikit-learn's balanced_accuracy_score. For
    images with several labels it yields mAP, F1 (mean over labels, each at the threshold of the best F1 on other
    images), labels (those that have images of both kinds, over which F1 is the mean), n, n_tune (images that thresholds
    are chosen on) and chance_mAP instead.

    With languages it yields what `statistics.by_language` does of these. A language that has names for some of the
    classes is evaluated on the images of those, among them; what is shown is of the first language.

    Raises SettingsError: no data are set, a file of names or templates is missing or invalid, languages are set for
    images with several labels, or thresholds or prompts of the opposite for those with one.
    """

    def __init__(self, settings: ZeroShotSettings) -> None:
        self.settings = settings
        self.source = source_of(settings)
        self.languages = settings.languages or [""]
        # Names in several languages are no labels: these are numbers, or names that the data set has.
        named = settings if LANG not in settings.texts()["classes"] else settings.model_copy(update={"classes": None})
        self.labelling = Labelling.of(named)
        if settings.languages and self.labelling.labels != "one":
            raise SettingsError(f"languages: not supported with labels: {self.labelling.labels}")
        for key in ("against", "tune_shards") if self.labelling.labels == "one" else ():
            if getattr(settings, key) is not None:
                raise SettingsError(f"{key}: requires several labels per image: set labels to list or multi_hot")
        self.numbers, self.texts = list[torch.Tensor](), list[tuple[list[str], list[Template]]]()
        for language in self.languages:
            own = settings.in_language(language)
            spec = class_spec(own)
            names = self.labelling.named if not language or spec is None else class_names(spec, gaps=True)
            numbers = [number for number, name in enumerate(names) if name or not language]
            self.numbers.append(torch.tensor(numbers))
            self.texts.append(([names[number] for number in numbers], prompt_templates(template_spec(own))))
        self.classes, self.templates = self.texts[0]
        if settings.against is not None:
            self.texts.append((self.classes, prompt_templates(settings.against, "against")))

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective. Raises DataError: no usable image, or a label outside the classes."""
        classifiers = text_classifiers(context, self.texts)
        if self.labelling.labels != "one":
            yield from self._multilabel(context, classifiers[0] - sum(classifiers[1:]))
            return
        device = classifiers[0].device
        tallies = [torch.zeros((len(one), 3), dtype=torch.float64, device=device) for one in classifiers]
        beyond = max(int(numbers[-1]) for numbers in self.numbers) + 1
        rows = torch.full((len(tallies), beyond + 1), -1)  # of a classifier, by language and label
        for row, numbers in zip(rows, self.numbers, strict=True):
            row[numbers] = torch.arange(len(numbers))
        kept, first, total = Kept(context), [], 0
        matches = Matches(context, self.settings.prompts)
        true: list[torch.Tensor] = []
        guessed: list[torch.Tensor] = []
        for batch in self.labelling.batches(context, self.source, self.settings.batch_size):
            images, total = context.encode_image(batch.images), total + len(batch)
            labels = rows[:, batch.ids[:, 0].long().clamp(max=beyond)]
            for tally, classifier, of_images in zip(tallies, classifiers, labels, strict=True):
                some = of_images >= 0
                own = of_images[some].to(device)
                tally.index_add_(0, own, score(images[some.to(device)], classifier, own))
            if context.examples_wanted:
                own, some = labels[0].to(device), (labels[0] >= 0).to(device)
                true.append(own[some])
                guessed.append((images[some] @ classifiers[0].T).argmax(dim=1))
                if kept.take(replace(batch, ids=labels[0][:, None])):
                    first.append(images)
                matches.add(images, batch, partial(self._word, labels[0]))
        tallies = [context.world.all_reduce_sum(tally) for tally in tallies]
        total = sum(context.world.gather_objects(total))
        if not total:
            raise context.unusable("image with a label")
        found = {}
        for language, tally in zip(self.languages, tallies, strict=True):
            if not tally[:, 2].any():
                if context.AT_MOST is None:
                    raise context.unusable(f"image with a class of {language}")
                tally[0] = 1  # the few samples of a dry run may lack it, and its metrics mean nothing
            found[language] = dict(accuracies(tally))
        show_classes(context, kept, first, classifiers[0], self.classes)
        show_confusions(context, true, guessed, self.classes)
        matches.show()
        if not self.settings.languages:
            self.labelling.warn_of_unseen(context, tallies[0][:, 2].tolist())
            yield from found[""].items()
            return
        context.tell_left_out(found, total)
        yield from by_language(found, total)

    def _multilabel(self, context: EvalContext, classifier: torch.Tensor) -> Iterator[tuple[str, float]]:
        images, tune, world = [classifier[:0]], self.settings.tune, context.world
        labels = [torch.zeros((0, len(classifier)), dtype=torch.bool)]
        roles = [torch.zeros(0, dtype=torch.uint8)]  # see label_metrics
        matches = Matches(context, self.settings.prompts)
        for key, source in {"data": self.source, "tune_shards": tune}.items():
            before = len(images)
            for batch in self.labelling.batches(context, source, self.settings.batch_size, key) if source else ():
                images.append(context.encode_image(batch.images))
                labels.append(batch.ids.bool())
                half = torch.from_numpy((of_samples(batch)[0] >> np.uint64(63)).astype(np.uint8))
                roles.append(half if tune is None else torch.full_like(half, 2 * (key != "data")))
                if key == "data":
                    matches.add(images[-1], batch, partial(self._words, batch))
            if key == "data" and not any(world.gather_objects(len(images) > before)):
                raise context.unusable("image with labels")
        matches.show()
        there, role = torch.cat(labels).to(classifier.device), torch.cat(roles).to(classifier.device)
        numbers = torch.stack([(role < 2).sum(), (role > 0).sum(), *there[role < 2].sum(dim=0)])
        n, n_tune, *counts = map(int, world.all_reduce_sum(numbers.double()).tolist())
        self.labelling.warn_of_unseen(context, counts)
        f1, rows, found = list[float](), [], label_metrics(torch.cat(images), classifier, there, role, world)
        for name, (_, threshold, right, taken, own, known) in zip(self.classes, found.T.tolist(), strict=True):
            if own and known:
                f1.append(2 * right / (taken + own))
                cells = (f"{threshold:.4f}", percent(right / taken) if taken else "", percent(right / own))
                rows.append((name, *cells, percent(f1[-1]), f"{int(own):,}"))
        if context.examples_wanted and rows:
            header = ("label", "threshold", "precision", "recall", "F1", "images")
            context.tables.append(Table("labels at their thresholds", header, tuple(rows)))
        yield "mAP", float(found[0].mean())
        yield "F1", fmean(f1) if f1 else float("nan")
        yield "labels", len(f1)
        yield "n", n
        yield "n_tune", n_tune
        yield "chance_mAP", sum(counts) / (n * len(classifier))

    def _word(self, labels: torch.Tensor, i: int) -> str:
        """The class name of a batch's i-th image; '' if it has none in the first language."""
        return self.classes[int(labels[i])] if labels[i] >= 0 else ""

    def _words(self, batch: Batch, i: int) -> str:
        """The class names of a batch's i-th image."""
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


def text_classifiers(
    context: EvalContext, sets: Sequence[tuple[Sequence[str], Sequence[Template]]]
) -> list[torch.Tensor]:
    """The classifier of each set of C classes and templates, L2-normalised float32 [C, D], on every rank.

    Cached for the current weights. Collective; each rank encodes a share of the prompts.
    """
    prompts = [[template(name) for name in classes for template in templates] for classes, templates in sets]
    per_class = [len(templates) for _, templates in sets]

    def make() -> torch.Tensor:
        rows = []
        for count, of_set in zip(per_class, prompts, strict=True):
            step = max(1, PROMPTS_AT_ONCE // count) * count
            for start in range(0, len(of_set), step):
                features = context.encode_prompts(of_set[start : start + step])
                rows.append(features.view(-1, count, features.shape[1]).mean(dim=1))
        return torch.nn.functional.normalize(torch.cat(rows), dim=1)

    key = [text for count, of_set in zip(per_class, prompts, strict=True) for text in (str(count), *of_set)]
    return list(torch.split(context.remember(key, make), [len(classes) for classes, _ in sets]))
