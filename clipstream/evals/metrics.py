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
NO_SCORE = -3.0  # what NaN counts as, below any score
CLASSES_AT_ONCE = 1 << 22  # scores sorted at once, over all ranks
SCORES_AT_ONCE = 1 << 23  # scores of groups counted at once: 64 MiB


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
        pair = torch.unique(owners * len(distinct) + own, return_inverse=True)[1]
        once = are_first(pair)
        if sum(world.gather_objects(int(once.sum()))) == len(distinct):
            return None
        return cls(of, first_places(of)[start : start + len(texts)], own, of.bincount()[own] * once)

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


def first_places(numbers: torch.Tensor) -> torch.Tensor:
    """Of each of the numbers, from 0 without a gap, the place of the first that is equal, int64 [n]."""
    places = torch.arange(len(numbers), device=numbers.device)
    return torch.full_like(places, len(numbers)).scatter_reduce(0, numbers, places, "amin")[numbers]


def are_first(numbers: torch.Tensor) -> torch.Tensor:
    """Whether each of the numbers is the first that is equal, bool [n]."""
    return first_places(numbers) == torch.arange(len(numbers), device=numbers.device)


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


def label_metrics(
    images: torch.Tensor, classifier: torch.Tensor, labels: torch.Tensor, roles: torch.Tensor, world: World
) -> torch.Tensor:
    """Average precision of each class, and what its F1 is made of at the threshold with the best F1 on some images.
    Collective.

    Args:
        images: [n, D], L2-normalised, of this rank.
        classifier: [C, D].
        labels: bool [n, C].
        roles: uint8 [n]: 0 for images of the test, 2 for those that thresholds are chosen on, 1 for those of the test
            that thresholds are chosen on: F1 is not of these.

    Returns:
        float64 [6, C]: average precision in the test; the threshold, the lowest score that is taken for the class; of
        the images with role 0 those that are taken for it and have it, that are taken for it, and that have it; the
        images that the threshold is chosen on that have it. Without such images all but the first are 0.
    """
    counts = world.gather_objects(len(images))
    roles, found = world.gather_rows(roles, counts), []
    tests, chosen, rest = roles < 2, roles > 0, roles == 0
    step = max(1, CLASSES_AT_ONCE // max(1, len(roles)))
    for start in range(0, len(classifier), step):
        some = slice(start, start + step)
        scores = world.gather_rows(images.double() @ classifier[some].double().T, counts)
        there = world.gather_rows(labels[:, some].to(torch.uint8), counts).bool()
        rows = scores.new_zeros((6, scores.shape[1]))
        rows[0] = average_precision(scores[tests], there[tests])
        if chosen.any():
            levels = _levels(scores)
            ranked, right, seen, last = _counts(levels[chosen], there[chosen])
            best = torch.where(last, 2 * right / (seen + right[-1]), -1.0).argmax(dim=0)
            limit = ranked.gather(0, best[None])
            taken, own = levels[rest] >= limit, there[rest]
            of_rest = [(taken & own).sum(dim=0), taken.sum(dim=0), own.sum(dim=0)]
            rows[1:] = torch.stack([limit[0] * TIE, *of_rest, right[-1]])
        found.append(rows)
    return torch.cat(found, dim=1)


def _levels(scores: torch.Tensor) -> torch.Tensor:
    """Whole numbers, equal for scores that tie. NaN is last; it would be first, in the order of the data."""
    return (scores / TIE).round().nan_to_num(nan=NO_SCORE / TIE)


def average_precision(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Average precision of each class, float64 [C].

    Args:
        scores: float64 [n, C], from -2 to 2; scores that differ by less than `TIE` are equal.
        labels: bool [n, C].
    """
    _, right, seen, last = _counts(_levels(scores), labels)
    precision = torch.where(last, right / seen, 0.0)
    # Gain of recall between two such positions, in right answers.
    until = torch.where(last, right, 0.0).cummax(dim=0).values
    before = torch.cat([torch.zeros_like(until[:1]), until[:-1]])
    gain = torch.where(last, right - before, 0.0)
    return (precision * gain).sum(dim=0) / right[-1].clamp(min=1)


def _counts(levels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Levels from the highest; right answers and answers up to each, float64; whether it is the last of a tie, bool."""
    ranked, order = levels.sort(dim=0, descending=True, stable=True)
    right = labels.gather(0, order).cumsum(dim=0).double()
    seen = torch.arange(1, len(ranked) + 1, device=ranked.device, dtype=torch.float64)[:, None]
    last = torch.ones_like(labels)
    last[:-1] = ranked[1:] != ranked[:-1]
    return ranked, right, seen, last


def group_ranks(
    queries: torch.Tensor,
    groups: torch.Tensor,
    answers: torch.Tensor,
    of_answers: torch.Tensor,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average precision, R@1 and R-precision of each query, float64 [3, n]; right are the answers of its group.

    R-precision is the share of right answers among the first R, if R are right. Scores are not sorted: they are counted
    between those of the right answers.

    Args:
        queries: [n, D], L2-normalised.
        groups: int64 [n], their groups, each of which has an answer besides the query.
        answers: float64 [N, D], L2-normalised.
        of_answers: int64 [N], their groups.
        own: int64 [n], the place of each query among the answers, which is no answer to it; None for other queries.
    """
    by_group, order = of_answers.sort(stable=True)
    begins, ends = (torch.searchsorted(by_group, groups, right=side) for side in (False, True))
    found, sizes, step = answers.new_zeros((3, len(queries))), ends - begins, max(1, SCORES_AT_ONCE // len(answers))
    by_size = sizes.argsort()
    for start in range(0, len(queries), step):
        some = by_size[start : start + step]
        scores = (queries[some].double() @ answers.T).nan_to_num_(nan=NO_SCORE)
        places = begins[some, None] + torch.arange(int(sizes[some[-1]]), device=some.device)
        there, places = places < ends[some, None], order[places.clamp(max=len(order) - 1)]
        if own is not None:
            scores.scatter_(1, own[some, None], -torch.inf)
            there &= places != own[some, None]
        limits = torch.where(there, scores.gather(1, places), -torch.inf)
        edges = torch.cat([limits - TIE, limits + TIE], dim=1).sort(dim=1)
        until, ahead = _above(edges.values, edges.indices, scores).chunk(2, dim=1)
        right, total = _above(edges.values, edges.indices, limits).chunk(2, dim=1)[0], there.sum(dim=1, keepdim=True)
        precision = torch.where(there, right / until, 0.0) / total
        first_of = [torch.where(limits > NO_SCORE, (k - ahead) / (until - ahead), 0.0).clamp(0, 1) for k in (1, total)]
        found[:, some] = torch.stack([one.sum(dim=1) for one in (precision, first_of[0], first_of[1] / total)])
    return found


def _above(edges: torch.Tensor, order: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many of a row's values [n, m] exceed each of its limits, float64 [n, k].

    Args:
        edges: [n, k], the limits, sorted.
        order: [n, k], their places before.
    """
    places = torch.searchsorted(edges, values)
    counts = places.new_zeros((len(edges), edges.shape[1] + 1))
    counts.scatter_add_(1, places, places.new_ones(1).expand_as(places))
    above = counts.flip(1).cumsum(dim=1).flip(1)[:, 1:]
    return torch.empty_like(edges).scatter_(1, order, above.double())
