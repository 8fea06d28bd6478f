"""The metrics: ranks of right answers among many scores, accuracies, and mean average precision.

Features and labels, or counts by class, enter.

Scores are float64 products of float32 features, computed in tiles: memory holds one tile at a time. Ties receive their
expected rank: with `ahead` better answers and `level` equal ones, `right` of them right, a hit within the first k
counts as the probability that a random order of the equal answers has a right one among the first k - ahead. Metrics
therefore do not depend on the order of the data, and a model with constant features scores exactly chance. Without ties
they equal those of CLIP_benchmark and open_clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from clipstream.distributed.world import World

TIE = 1e-12  # far above float64's rounding of a product of unit vectors, far below a float32 difference
ROWS, COLUMNS = 2048, 4096  # of a float32 tile: 32 MiB
EXACT_ROWS = 1024  # of a float64 tile with as many columns
DENSE = 64  # if more than one in this many scores of a tile is near a limit, the whole tile is computed in float64
AT_ONCE = 1 << 22  # feature elements converted to float64 at once: 32 MiB
NO_SCORE = -3 / TIE  # the level of NaN, below that of any score
CLASSES_AT_ONCE = 1 << 22  # scores sorted at once, over all ranks


class Ranks(NamedTuple):
    """Ranks of the best right answers of n queries."""

    ahead: torch.Tensor  # int64 [n], answers with a better score
    # int64 [n], answers with the same score, itself included; 0 if its score is NaN, which counts as a miss
    level: torch.Tensor
    right: torch.Tensor  # int64 [n], right answers among those of the same score

    def hits(self, k: int) -> torch.Tensor:
        """Expected hits within the first k places, float64 [n] in 0 to 1."""
        # The probability that none of the first `slots` equal answers is right, one after the other.
        slots, missed = k - self.ahead, torch.ones(len(self.ahead), dtype=torch.float64, device=self.ahead.device)
        wrong = self.level - self.right
        for place in range(k):
            chance = (wrong - place).clamp(min=0).double() / (self.level - place).clamp(min=1)
            missed *= torch.where(place < slots, chance, 1.0)
        return torch.where(self.level > 0, 1 - missed, 0.0)

    def first(self, answers: int) -> torch.Tensor:
        """Expected rank of the first right answer, from 1, float64 [n]; `answers`, their number, for a miss."""
        mean = self.ahead + (self.level + 1) / (self.right + 1).double()
        return torch.where(self.level > 0, mean, float(answers))


def place(queries: torch.Tensor, answers: torch.Tensor, right: torch.Tensor) -> Ranks:
    """Ranks of each query's one right answer.

    Args:
        queries: [n, D], L2-normalised.
        answers: [N, D], L2-normalised.
        right: int64 [n], index in `answers` of each query's right answer.
    """
    ahead, level = torch.zeros_like(right), torch.zeros_like(right)
    for top in range(0, len(queries), EXACT_ROWS):
        part = slice(top, top + EXACT_ROWS)
        own = products(queries[part], answers[right[part]])
        ahead[part], level[part] = stand(queries[part], answers, own)
    return Ranks(ahead, level, level.clamp(max=1))


def stand(queries: torch.Tensor, answers: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the answers that score better than each query's limit, and those that score the same.

    Args:
        queries: [n, D].
        answers: [N, D].
        own: float64 [n], the limits.

    Returns:
        (ahead, level), int64 [n] each.
    """
    ahead = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    level = torch.zeros_like(ahead)
    block = queries.double()
    for left in range(0, len(answers), COLUMNS):
        gap = block @ answers[left : left + COLUMNS].double().T - own[:, None]
        ahead += (gap > TIE).sum(dim=1)
        level += (gap.abs() <= TIE).sum(dim=1)
    return ahead, level


def accuracies(tally: torch.Tensor) -> Iterator[tuple[str, float]]:
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


class EqualCaptions(NamedTuple):
    """The m captions of this rank, and the M of all ranks, by their texts."""

    of: torch.Tensor  # int64 [M], the text of each caption, in rank order
    first: torch.Tensor  # int64 [m], the place of the first caption with the same text among the M
    own: torch.Tensor  # int64 [m], `of` of this rank's
    copies: torch.Tensor  # int64 [m], number of captions with the text; 0 for one that its image has twice

    @classmethod
    def find(cls, texts: torch.Tensor, owners: torch.Tensor, world: World) -> EqualCaptions | None:
        """Compare captions; None if no two images have the same. Collective.

        Args:
            texts: int64 [m], equal for equal captions.
            owners: int64 [m], the image of each caption, of this rank.
        """
        distinct, of = torch.unique(world.gather_rows(texts), return_inverse=True)
        start = sum(world.gather_objects(len(texts))[: world.rank])
        own = of[start : start + len(texts)]
        pairs, pair = torch.unique(owners * len(distinct) + own, return_inverse=True)
        if sum(world.gather_objects(len(pairs))) == len(distinct):
            return None
        once = first_places(pair, len(pairs))[pair] == torch.arange(len(pair), device=pair.device)
        return cls(of, first_places(of, len(distinct))[own], own, of.bincount()[own] * once)

    def limits(self, scores: torch.Tensor, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        """The best score of an image with the text of each caption, float64 [m], and the number of such images.

        Args:
            scores: float64 [m], of each caption with its image.
        """
        scores = world.gather_rows(torch.where(scores.isnan(), -torch.inf, scores))
        once = world.gather_rows((self.copies > 0).long())
        best = torch.full_like(scores, -torch.inf).scatter_reduce(0, self.of, scores, "amax")
        right = torch.zeros_like(self.of).index_add_(0, self.of, ((scores - best[self.of]).abs() <= TIE) * once)
        return best[self.own], right[self.own]


def first_places(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """The first place of each of the numbers below `count`, int64 [count]."""
    places = torch.arange(len(numbers), device=numbers.device)
    return places.new_full((count,), len(numbers)).scatter_reduce(0, numbers, places, "amin")


def place_pairs(
    images: torch.Tensor,
    texts: torch.Tensor,
    owners: torch.Tensor,
    world: World,
    *,
    rows: int = ROWS,
    equal: EqualCaptions | None = None,
) -> tuple[Ranks, Ranks]:
    """Ranks of images' captions among all captions, and of captions' images among all images, of all ranks.

    Of an image, its best caption counts, and of a caption that several images have, its best image. Each score is
    computed once for both directions: captions stay on their rank, and tiles of all ranks' images are gathered one
    after the other. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank; n may differ between ranks.
        texts: [m, D], L2-normalised, of this rank's images.
        owners: int64 [m], the row of `images` for each caption; each image has a caption.
        rows: captions per tile.
        equal: the captions that several images have, whose features are equal.

    Returns:
        (of this rank's images, of its captions).
    """
    step = max(1, AT_ONCE // texts.shape[1])
    own = torch.cat(
        [products(t, images[o]) for t, o in zip(torch.split(texts, step), torch.split(owners, step), strict=True)]
    )
    best = own.new_full((len(images),), -torch.inf).scatter_reduce(0, owners, own, "amax")
    right = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    level = (own - best[owners]).abs() <= TIE
    right.index_add_(0, owners, level.long() if equal is None else level * equal.copies)
    own, images_right = (own, None) if equal is None else equal.limits(own, world)
    of_texts = torch.zeros((2, len(texts)), dtype=torch.int64, device=texts.device)
    of_images = torch.zeros((2, len(images)), dtype=torch.int64, device=images.device)
    counts = world.gather_objects(len(images))
    share = -(-COLUMNS // world.size)
    for start in range(0, max(counts), share):
        some = slice(start, start + share)
        held = [max(0, min(count, some.stop) - start) for count in counts]
        block, limits = world.gather_rows(images[some], held), world.gather_rows(best[some], held)
        of_block = torch.zeros((2, len(block)), dtype=torch.int64, device=block.device)
        for top in range(0, len(texts), rows):
            part = slice(top, top + rows)
            ScoreTile(texts[part], block).count(own[part], limits, of_texts[:, part], of_block)
        before = sum(held[: world.rank])
        of_images[:, some] = world.all_reduce_sum(of_block)[:, before : before + held[world.rank]]
    images_right = of_texts[1].clamp(max=1) if images_right is None else images_right
    return Ranks(of_images[0], of_images[1], right), Ranks(of_texts[0], of_texts[1], images_right)


def products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Row-wise dot products, float64 [n], of [n, D] each."""
    return (one.double() * other.double()).sum(dim=1)


class ScoreTile:
    """The scores of some captions with some images.

    They are computed in float32, with an error below `margin`; scores that are closer to a limit again in float64.
    """

    def __init__(self, texts: torch.Tensor, images: torch.Tensor) -> None:
        self.texts, self.images = texts, images
        self.scores = texts @ images.T
        # Error of a product of unit vectors in any order of summation (Higham, Accuracy and Stability, 3.5), and of a
        # rounded limit.
        self.margin = (texts.shape[1] + 8) * 2.0**-24
        self._above = torch.empty_like(self.scores)  # 0 and 1 as floats: summing them is ten times as fast

    def count(self, of_rows: torch.Tensor, of_columns: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Add to (ahead, level) of rows and columns, int64 [2, …], given their limits, float64."""
        found = [self._over(of_rows[:, None], dim=1), self._over(of_columns[None, :], dim=0)]
        if sum(int(near.sum()) for _, near in found) * DENSE > self.scores.numel():
            exact = self.texts.double() @ self.images.double().T
            for limits, counts, dim in ((of_rows[:, None], rows, 1), (of_columns[None, :], columns, 0)):
                gap = exact - limits
                counts[0] += (gap > TIE).sum(dim=dim)
                counts[1] += (gap.abs_() <= TIE).sum(dim=dim)
            return
        for (ahead, near), limits, counts, dim in zip(
            found, (of_rows, of_columns), (rows, columns), (0, 1), strict=True
        ):
            counts[0] += ahead
            some = near.nonzero().squeeze(1)
            scores, low, high = self.scores.index_select(dim, some), limits[some] - self.margin, limits[some]
            shape = (-1, 1) if dim == 0 else (1, -1)
            low, high = low.float().view(shape), (high + self.margin).float().view(shape)
            place = list(((scores >= low) & (scores <= high)).nonzero(as_tuple=True))
            place[dim] = some[place[dim]]
            step = max(1, AT_ONCE // self.texts.shape[1])
            pairs = zip(torch.split(place[0], step), torch.split(place[1], step), strict=True)
            exact = torch.cat([products(self.texts[row], self.images[column]) for row, column in pairs])
            gap = exact - limits[place[dim]]
            counts[0].index_add_(0, place[dim], (gap > TIE).long())
            counts[1].index_add_(0, place[dim], (gap.abs() <= TIE).long())

    def _over(self, limits: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the scores per row (dim 1) or column that exceed its limit for sure, and those too close to tell."""
        low, high = (
            compare(self.scores, limit.float(), out=self._above).sum(dim=dim).long()
            for compare, limit in ((torch.ge, limits - self.margin), (torch.gt, limits + self.margin))
        )
        return high, low - high


def mean_average_precision(images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor, world: World) -> float:
    """Mean over the classes of the average precision on all ranks' images. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank.
        classifier: [C, D], L2-normalised.
        labels: bool [n, C].
    """
    found = [average_precision(*of_some) for of_some in _by_classes(images, classifier, labels, world)]
    return float(torch.cat(found).mean())


def f1_counts(
    images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor, tuning: torch.Tensor, world: World
) -> torch.Tensor:
    """What the F1 of each class is made of, at the threshold that has the best F1 on some images. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank.
        classifier: [C, D].
        labels: bool [n, C].
        tuning: bool [n], the images that the thresholds are chosen on; some rank has one.

    Returns:
        float64 [5, C]: the threshold, the lowest score that is taken for the class; of the other images those that are
        taken for it and have it, that are taken for it, and that have it; the images for tuning that have it.
    """
    chosen, found = world.gather_rows(tuning.to(torch.uint8)).bool(), []
    for scores, there in _by_classes(images, classifier, labels, world):
        levels = _levels(scores)
        ranked, order = levels[chosen].sort(dim=0, descending=True, stable=True)
        right, seen, last = _counts(ranked, there[chosen].gather(0, order))
        best = torch.where(last, 2 * right / (seen + right[-1]), -1.0).argmax(dim=0)
        limit = ranked.gather(0, best[None])
        taken, rest = levels[~chosen] >= limit, there[~chosen]
        counts = [(taken & rest).sum(dim=0), taken.sum(dim=0), rest.sum(dim=0), right[-1]]
        found.append(torch.stack([limit[0] * TIE, *counts]))
    return torch.cat(found, dim=1)


def _by_classes(
    images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor, world: World
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All ranks' (scores float64 [N, c], labels bool [N, c]) for some classes after the other. Collective."""
    counts = world.gather_objects(len(images))
    step = max(1, CLASSES_AT_ONCE // max(1, sum(counts)))
    for start in range(0, len(classifier), step):
        some = slice(start, start + step)
        scores = images.double() @ classifier[some].double().T
        there = world.gather_rows(labels[:, some].to(torch.uint8), counts)
        yield world.gather_rows(scores, counts), there.bool()


def _levels(scores: torch.Tensor) -> torch.Tensor:
    """Whole numbers, equal for scores that tie. NaN is last; it would be first, in the order of the data."""
    return (scores / TIE).round().nan_to_num(nan=NO_SCORE, neginf=2 * NO_SCORE)


def average_precision(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Average precision of each class, float64 [C].

    Args:
        scores: float64 [n, C], from -2 to 2; scores that differ by less than `TIE` are equal.
        labels: bool [n, C].
    """
    ranked, order = _levels(scores).sort(dim=0, descending=True, stable=True)
    return _average_precision(ranked, labels.gather(0, order))


def _average_precision(ranked: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    right, seen, last = _counts(ranked, labels)
    precision = torch.where(last, right / seen, 0.0)
    # Gain of recall between two such positions, in right answers.
    until = torch.where(last, right, 0.0).cummax(dim=0).values
    before = torch.cat([torch.zeros_like(until[:1]), until[:-1]])
    gain = torch.where(last, right - before, 0.0)
    return (precision * gain).sum(dim=0) / right[-1].clamp(min=1)


def _counts(ranked: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right answers and answers up to each place, float64, and whether it is the last one of a run of ties, bool."""
    right = labels.cumsum(dim=0).double()
    seen = torch.arange(1, len(ranked) + 1, device=ranked.device, dtype=torch.float64)[:, None]
    last = torch.ones_like(labels)
    last[:-1] = ranked[1:] != ranked[:-1]
    return right, seen, last


def group_ranks(
    queries: torch.Tensor,
    groups: torch.Tensor,
    answers: torch.Tensor,
    of_answers: torch.Tensor,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average precision, R@1 and R-precision of each query, float64 [3, n]; right are the answers of its group.

    R-precision is the share of right answers among the first R, if R are right.

    Args:
        queries: [n, D], L2-normalised.
        groups: int64 [n], their groups, each of which has an answer besides the query.
        answers: float64 [N, D], L2-normalised.
        of_answers: int64 [N], their groups.
        own: int64 [n], the place of each query among the answers, which is no answer to it; None for other queries.
    """
    step = max(1, CLASSES_AT_ONCE // len(answers))
    found = [answers.new_zeros((3, 0))]
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        scores = queries[some].double() @ answers.T
        right = groups[some, None] == of_answers
        if own is not None:
            scores.scatter_(1, own[some, None], -torch.inf)
            right.scatter_(1, own[some, None], False)
        ranked, order = _levels(scores.T).sort(dim=0, descending=True, stable=True)
        right = right.T.gather(0, order)
        total = right.sum(dim=0)
        of_total = _hits(ranked, right, total) / total
        found.append(torch.stack([_average_precision(ranked, right), _hits(ranked, right, total * 0 + 1), of_total]))
    return torch.cat(found, dim=1)


def _hits(ranked: torch.Tensor, right: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Expected number of right answers within the first k [C] places; an answer without a score is a miss."""
    limit, right = ranked.gather(0, k[None] - 1), right & (ranked > NO_SCORE)
    ahead, level = ranked > limit, ranked == limit
    free = (k - ahead.sum(dim=0)).double() / level.sum(dim=0)
    return (right & ahead).sum(dim=0) + free * (right & level).sum(dim=0)
