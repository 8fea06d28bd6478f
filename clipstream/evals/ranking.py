"""Owns the places of right answers among many scores, and the rule for ties; never reads data, never runs a model.

Scores are compared as float64 products of float32 features, computed in tiles: the largest thing in memory is one tile.
Answers whose score equals the best right one's share the places with it, by chance: with `ahead` better answers and
`level` equal ones, `right` of them right, a hit within the first k counts as the chance that a random order of the
level ones has a right one among the first k - ahead. So figures do not depend on the order of the data, a model whose
features are all alike scores exactly chance, and without ties the figures are those of CLIP_benchmark and open_clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from clipstream.world import World

TIE = 1e-12  # far above float64's rounding of a product of unit vectors, far below a float32 difference
ROWS, COLUMNS = 2048, 4096  # of a tile of float32: 32 MiB
DENSE = 64  # where more than one in so many scores of a tile is near a limit, all of it is computed in float64
AT_ONCE = 1 << 22  # numbers of features that are widened to float64 together: 32 MiB


class Places(NamedTuple):
    """Where the right answers of n queries stand.

    Attributes:
        ahead: int64 [n], answers that score better than the best right one.
        level: int64 [n], answers that score the same, that one among them; 0 where its score is not a number, which
            counts as a miss.
        right: int64 [n], how many of the level ones are right.
    """

    ahead: torch.Tensor
    level: torch.Tensor
    right: torch.Tensor

    def hits(self, k: int) -> torch.Tensor:
        """Expected hits within the first k places, float64 [n] in 0 to 1."""
        # The chance that none of the first `room` of the level ones is right, one place after the other.
        room, missed = k - self.ahead, torch.ones(len(self.ahead), dtype=torch.float64, device=self.ahead.device)
        wrong = self.level - self.right
        for place in range(k):
            chance = (wrong - place).clamp(min=0).double() / (self.level - place).clamp(min=1)
            missed *= torch.where(place < room, chance, 1.0)
        return torch.where(self.level > 0, 1 - missed, 0.0)

    def first(self, answers: int) -> torch.Tensor:
        """Expected place of the first right answer, from 1, float64 [n]; that of the last of `answers` for a miss."""
        mean = self.ahead + (self.level + 1) / (self.right + 1).double()
        return torch.where(self.level > 0, mean, float(answers))


def place(
    queries: torch.Tensor, answers: torch.Tensor, right: torch.Tensor, *, rows: int = 1024, columns: int = 4096
) -> Places:
    """Where each query's one right answer stands.

    Args:
        queries: [n, D], L2-normalised.
        answers: [N, D], L2-normalised.
        right: int64 [n], position in `answers` of each query's right answer.
        rows, columns: size of a tile; a tile takes rows x columns x 8 bytes, a few times over.
    """
    ahead, level = torch.zeros_like(right), torch.zeros_like(right)
    for top in range(0, len(queries), rows):
        part = slice(top, top + rows)
        own = products(queries[part], answers[right[part]])
        ahead[part], level[part] = stand(queries[part], answers, own, columns=columns)
    return Places(ahead, level, level.clamp(max=1))


def stand(
    queries: torch.Tensor, answers: torch.Tensor, own: torch.Tensor, *, columns: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many answers score better than each query's limit, and how many the same.

    Args:
        queries: [n, D].
        answers: [N, D].
        own: float64 [n], the limits.
        columns: answers of a tile.

    Returns:
        (ahead, level), int64 [n] each.
    """
    ahead = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    level = torch.zeros_like(ahead)
    block = queries.double()
    for left in range(0, len(answers), columns):
        gap = block @ answers[left : left + columns].double().T - own[:, None]
        ahead += (gap > TIE).sum(dim=1)
        level += (gap.abs() <= TIE).sum(dim=1)
    return ahead, level


def place_pairs(
    images: torch.Tensor, texts: torch.Tensor, owners: torch.Tensor, world: World, *, rows: int = ROWS
) -> tuple[Places, Places]:
    """Where the captions of pictures stand among all captions, and their pictures among all pictures, of all ranks.

    A picture's best caption counts. Each score is computed once, for both ways: captions stay with their rank, and the
    pictures of all ranks come by, a tile at a time. Collective.

    Args:
        images: [n, D], L2-normalised, of this rank; n may differ by rank.
        texts: [m, D], L2-normalised, of this rank's pictures.
        owners: int64 [m], the picture of each caption, a row of `images`; each picture has a caption.
        world: the ranks.
        rows: captions of a tile.

    Returns:
        (of this rank's pictures, of its captions).
    """
    own = torch.cat([products(texts[part], images[owners[part]]) for part in _parts(texts)])
    best = own.new_full((len(images),), -torch.inf).scatter_reduce(0, owners, own, "amax")
    right = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    right.index_add_(0, owners, ((own - best[owners]).abs() <= TIE).long())
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
            _Tile(texts[part], block).count(own[part], limits, of_texts[:, part], of_block)
        before = sum(held[: world.rank])
        of_images[:, some] = world.all_reduce_sum(of_block)[:, before : before + held[world.rank]]
    return Places(of_images[0], of_images[1], right), Places(of_texts[0], of_texts[1], of_texts[1].clamp(max=1))


def products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The products of rows with rows, float64 [n], of [n, D] each."""
    return (one.double() * other.double()).sum(dim=1)


class _Tile:
    """The scores of some captions with some pictures.

    They are computed in float32, whose error is below `margin`; what comes nearer to a limit is computed in float64.
    """

    def __init__(self, texts: torch.Tensor, images: torch.Tensor) -> None:
        self.texts, self.images = texts, images
        self.scores = texts @ images.T
        # Of a product of unit vectors in any order of its sum (Higham, Accuracy and Stability, 3.5), and of a limit.
        self.margin = (texts.shape[1] + 8) * 2.0**-24
        self._above = torch.empty_like(self.scores)  # 0 and 1 as numbers: their sums are ten times as fast as of bools

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
            gap = self._exact(*place) - limits[place[dim]]
            counts[0].index_add_(0, place[dim], (gap > TIE).long())
            counts[1].index_add_(0, place[dim], (gap.abs() <= TIE).long())

    def _over(self, limits: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How many scores of each row (dim 1) or column are surely over its limit, and how many too near to tell."""
        low, high = (
            compare(self.scores, limit.float(), out=self._above).sum(dim=dim).long()
            for compare, limit in ((torch.ge, limits - self.margin), (torch.gt, limits + self.margin))
        )
        return high, low - high

    def _exact(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Scores at places, float64."""
        step = max(1, AT_ONCE // self.texts.shape[1])
        parts = [
            products(self.texts[rows[i : i + step]], self.images[columns[i : i + step]])
            for i in range(0, max(1, len(rows)), step)
        ]
        return torch.cat(parts)


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    """All rows in parts that are small enough to widen; one at least."""
    step = max(1, AT_ONCE // rows.shape[1])
    for start in range(0, max(1, len(rows)), step):
        yield slice(start, start + step)
