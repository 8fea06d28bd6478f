"""Choice: each image has texts of its own, of which one is right (SugarCrepe, ARO, NegBench), or two images have their
captions to share (Winoground, arXiv:2204.03162).

Without ties the figures equal clip-benchmark's image_caption_selection; its argmax takes the first of equal scores,
here they receive their expected share, so that constant features score exactly chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import permutations
from statistics import fmean

import torch

from clipstream.data.decode.labels import ChoicesField, Unencoded
from clipstream.data.source_settings import SourceSettings
from clipstream.errors import DataError
from clipstream.evals.context import EvalContext
from clipstream.evals.metrics import TIE, Ranks, products
from clipstream.evals.settings import ChoiceSettings, source_of

# A random order of the four scores of two images and two captions: two independent comparisons, or both right ones
# above both wrong ones (2! 2! / 4!).
CHANCE = {"text_score": 1 / 4, "image_score": 1 / 4, "group_score": 1 / 6}


class Choice:
    """Yields accuracy, n (images), chance_accuracy (mean of 1 / texts), and CATEGORY_accuracy, n_CATEGORY and
    chance_CATEGORY_accuracy of each category.

    With `group` it yields text_score, image_score, group_score, n (groups) and the chance of each.

    Raises SettingsError: no data are set.
    """

    def __init__(self, settings: ChoiceSettings) -> None:
        self.settings, self.source = settings, source_of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective. Raises DataError: no usable image, or a group not of two samples."""
        of = self.settings
        if of.group:
            yield from self._scores(context, of.group)
            return
        target = ChoicesField(self.source.caption, [*of.wrong], of.answer, of.category)
        rows: list[tuple[str, float, float]] = []  # by image: category, probability of the right text, chance
        for batch in context.batches(self.source, of.batch_size, target=target, tokenizer=Unencoded()):
            assert batch.captions is not None, "in evaluation"
            texts, categories = zip(*map(json.loads, batch.captions), strict=True)
            ids = torch.from_numpy(context.tokenizer.encode([text for some in texts for text in some]))
            images = context.encode_image(batch.images)
            features = torch.cat([context.encode_text(some) for some in torch.split(ids, of.batch_size)])
            counts = torch.tensor([len(some) for some in texts], device=images.device)
            right = first_of(images, features, counts)
            rows += zip(categories, right.tolist(), (1 / counts.double()).tolist(), strict=True)
        rows = [row for part in context.world.gather_objects(rows) for row in part]
        if not rows:
            raise context.unusable("image with a right and a wrong text")
        taken = set[str]()
        by_category = {"": rows}
        for row in rows:
            if row[0]:
                by_category.setdefault(row[0], []).append(row)
        for category, own in sorted(by_category.items()):
            name = re.sub(r"\W+", "_", category).strip("_")
            name = f"of_{name}" if name == "chance" or (category and not name) else name
            while name in taken:  # of 'a b' and 'a-b'
                name += "_2"
            taken.add(name)
            of_category = f"{name}_" if name else ""
            yield f"{of_category}accuracy", fmean(row[1] for row in own)
            yield f"n_{name}" if name else "n", len(own)
            yield f"chance_{of_category}accuracy", fmean(row[2] for row in own)

    def _scores(self, context: EvalContext, field: str) -> Iterator[tuple[str, float]]:
        """Winoground's scores of the pairs of samples that share a field. Collective."""
        pictures, captions, joined = [], [], [torch.zeros(0, dtype=torch.int64)]
        sources, text = [self.source], self.source.model_dump_json()
        if "{n}" in self.source.image_key:  # the two images of a row
            sources = [SourceSettings.model_validate_json(text.replace("{n}", n)) for n in "01"]
        for source in sources:
            for batch in context.batches(source, self.settings.batch_size, groups=field):
                assert batch.groups is not None, "asked for"
                own = batch.groups & 1 == 0  # others lack the field
                context.dropped += int((~own).sum())
                pictures.append(context.encode_image(batch.images)[own])
                captions.append(context.encode_text(batch.ids)[own])
                joined.append(batch.groups[own])
        gather = context.world.gather_rows
        images, texts = map(gather, context.stack(f"pair with {field}", pictures, captions))
        groups = gather(torch.cat(joined).to(context.world.device))
        _, inverse, counts = torch.unique(groups, return_inverse=True, return_counts=True)
        whole = counts == 2
        if not whole.all() and context.AT_MOST is None:
            raise DataError(
                f"group: {int((~whole).sum()):,} of {len(counts):,} values of {field} do not have "
                "exactly two usable samples: name the field that an image with its caption and the other one share"
            )
        order = inverse.sort(stable=True).indices
        order = order[whole[inverse[order]]].view(-1, 2)
        if not len(order) and context.AT_MOST is None:
            raise context.unusable(f"pair with {field}")
        found = pair_scores(images[order].double() @ texts[order].double().transpose(1, 2))
        for name, value in zip(CHANCE, found.sum(dim=0).tolist(), strict=True):
            yield name, value / max(1, len(order))
        yield "n", len(order)
        yield from ((f"chance_{name}", value) for name, value in CHANCE.items())


def first_of(images: torch.Tensor, texts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The probability that an image's first text is chosen, float64 [n].

    Args:
        images: [n, D], L2-normalised.
        texts: [m, D], L2-normalised, those of the first image first.
        counts: int64 [n], texts of each image, at least one.
    """
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    scores = products(images[owners], texts)
    gap = scores - scores[counts.cumsum(0) - counts][owners]
    none = torch.zeros_like(counts)
    ahead, level = (none.index_add(0, owners, hit.long()) for hit in (gap > TIE, gap.abs() <= TIE))
    return Ranks(ahead, level, level.clamp(max=1)).hits(1)


def pair_scores(scores: torch.Tensor) -> torch.Tensor:
    """text_score, image_score and group_score of groups, float64 [k, 3]: the means over all orders of equal scores.

    Args:
        scores: float64 [k, 2, 2], of images (rows) and captions; NaN counts as a miss.
    """
    flat = scores.flatten(1)
    below = (flat[:, :, None] - flat[:, None, :] > TIE).sum(dim=2) * 4
    found = torch.zeros((len(flat), 3), dtype=torch.float64, device=flat.device)
    orders = list(permutations(range(4)))
    for order in orders:
        a, b, c, d = (below + torch.tensor(order, device=flat.device)).unbind(dim=1)
        text, image = (a > b) & (d > c), (a > c) & (d > b)
        found += torch.stack([text, image, text & image], dim=1)
    return torch.where(flat.isnan().any(dim=1, keepdim=True), 0.0, found / len(orders))
