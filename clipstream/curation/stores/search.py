"""Exact search, spherical k-means, and cosines of images with their captions.

Features of a store's part are read as rows of length 1 in order, block by block, without those of dropped samples
(`StoredRows`): in a part of images a row is a sample, the mean of its views; in a part of texts a row is a caption. Row
numbers, their names and cosines leave. Memory besides the results and the queries: a few
blocks and `TILE` scores. Clusters depend on the seed, and on the rounding of float32
products on the device; a row belongs to the centroid with the largest cosine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.features.manifest import IMAGE, TEXT
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import BLOCK, ShardPart, StoredRows, unit_views

TILE = 1 << 22  # scores computed at once
_LAST = (1 << 32) - 1


class Rows(Protocol):
    """Features that can be read any number of times."""

    @property
    def width(self) -> int:
        """Columns, D."""

    def __len__(self) -> int:
        """Number of rows, N."""

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, float32 [m, D] on the CPU) of blocks in order, from row `start` on."""


@dataclass(frozen=True)
class TensorRows:
    """Features in memory, float32 [N, D], read in blocks of `block` rows."""

    features: torch.Tensor
    block: int = BLOCK

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def __len__(self) -> int:
        return len(self.features)

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(start, len(self), self.block):
            yield first, self.features[first : first + self.block]


class TopRows(NamedTuple):
    """The best rows of q queries, best first; rows of equal score in ascending order."""

    scores: torch.Tensor  # float32 [q, k]
    rows: torch.Tensor  # int64 [q, k]


def search(rows: Rows, queries: torch.Tensor, k: int, *, device: torch.device | str = "cpu") -> TopRows:
    """The k rows with the largest product with each query; all rows if there are fewer.

    A score is the float64 product, rounded to float32: results do not depend on the size of blocks or on the device.

    Args:
        queries: float32 [q, D].
        device: where the products are computed; results are on the CPU.
    """
    queries, k = queries.to(device, torch.float64), min(k, len(rows))
    best = torch.full((len(queries), k), torch.iinfo(torch.int64).min, device=device)
    for first, features in rows.blocks() if k else ():
        block = features.to(device, torch.float64)
        for part in torch.split(torch.arange(len(queries), device=device), max(1, TILE // len(block))):
            ranks = _ranks((queries[part] @ block.T).float(), first)
            best[part] = torch.cat([best[part], ranks], 1).topk(k).values
    bits = best >> 32
    return TopRows(_sortable_bits(bits).int().view(torch.float32).cpu(), (_LAST - (best & _LAST)).cpu())


def _ranks(scores: torch.Tensor, first: int) -> torch.Tensor:
    """int64 [q, m], larger for better rows: the bits of the score float32 [q, m], then the row, from `first` on."""
    bits = _sortable_bits((scores + 0.0).view(torch.int32).long())  # + 0.0: there is no -0.0
    return (bits << 32) | (_LAST - first - torch.arange(scores.shape[1], device=scores.device))


def _sortable_bits(bits: torch.Tensor) -> torch.Tensor:
    """Bits of float32 as integers of the same order, and the reverse; int64."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


SAMPLED = 65536  # rows among which the first centroids are chosen; k if there are more clusters
PART = 8192  # rows added up in float64 at once
ITERATIONS = 25  # most updates of the centroids
TOLERANCE = 1e-4  # share by which the mean of 1 - cosine has to become smaller


@dataclass(frozen=True)
class Clusters:
    """The result of k-means."""

    centroids: torch.Tensor  # float32 [k, D], rows of length 1
    sizes: torch.Tensor  # int64 [k]
    means: list[float]  # the mean cosine of a row and its centroid, before each update of the centroids

    def assign(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine, float32 [m], and cluster, int64 [m], of rows float32 [m, D]."""
        return _assign(block, self.centroids.to(block.device))


def kmeans(rows: Rows, k: int, *, seed: int = 0, device: torch.device | str = "cpu") -> Clusters:
    """Clusters by Lloyd's algorithm on the sphere (Dhillon and Modha, 2001), each iteration one pass over the rows.

    A cluster that becomes empty continues at one of the rows that are farthest from their centroids.

    Args:
        k: number of clusters, at most the number of rows.

    Raises SettingsError: there are fewer rows than clusters.
    """
    if not 1 <= k <= len(rows):
        raise SettingsError(f"{k:,} clusters of {len(rows):,} rows: the number must be from 1 to the number of rows")
    centroids = _first_centroids(rows, k, seed).to(device)
    means: list[float] = []
    while True:
        sums = torch.zeros((k, rows.width), dtype=torch.float64)
        sizes = torch.zeros(k, dtype=torch.int64)
        far = torch.zeros((0, rows.width))
        far_scores = torch.zeros(0)
        total = 0.0
        for _, features in rows.blocks():
            scores, labels = (of.cpu() for of in _assign(features.to(device), centroids))
            total += float(scores.double().sum())
            sizes += torch.bincount(labels, minlength=k)
            for some, of in zip(torch.split(features, PART), torch.split(labels, PART), strict=True):
                sums.index_add_(0, of, some.double())
            farthest = scores.sort(stable=True).indices[:k]
            far_scores, order = torch.cat([far_scores, scores[farthest]]).sort(stable=True)
            far, far_scores = torch.cat([far, features[farthest]])[order[:k]], far_scores[:k]
        means.append(total / len(rows))
        # Of the mean of 1 - cosine; the first iteration has none before it.
        before, now = (1 - mean for mean in means[-2:]) if len(means) > 1 else (1.0, 0.0)
        if len(means) > ITERATIONS or before - now <= TOLERANCE * before:
            return Clusters(centroids.cpu(), sizes, means)
        empty = (sizes == 0).nonzero().squeeze(1)
        sums[empty] = far[: len(empty)].double()
        # Opposite rows may cancel each other out; the centroid then stays.
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centroids = torch.where(lengths > 0, sums / lengths.clamp(min=1e-300), centroids.cpu().double()).float()
        centroids = centroids.to(device)


def _assign(block: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest cosine, float32 [m], and its centroid, int64 [m]; the first of equal ones."""
    found = [(part @ centroids.T).max(dim=1) for part in torch.split(block, max(1, TILE // len(centroids)))]
    return torch.cat([of.values for of in found]), torch.cat([of.indices for of in found])


def gather(rows: Rows, numbers: Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
    """Rows of any numbers, float32 [n, D]; all blocks from the first of them to the last are read."""
    wanted = torch.as_tensor(numbers, dtype=torch.int64)
    found = torch.zeros(len(wanted), rows.width)
    for first, block in rows.blocks(int(wanted.min())) if len(wanted) else ():
        here = (wanted >= first) & (wanted < first + len(block))
        found[here] = block[wanted[here] - first]
        if first + len(block) > int(wanted.max()):
            break
    return found


def _first_centroids(rows: Rows, k: int, seed: int) -> torch.Tensor:
    """The centroids to begin with, float32 [k, D]: rows, by k-means++ (Arthur and Vassilvitskii, 2007)."""
    draw = np.random.default_rng(seed)
    count = min(len(rows), max(k, SAMPLED))
    sample = gather(rows, np.sort(draw.choice(len(rows), count, replace=False, shuffle=False)))
    taken = [int(draw.integers(count))]
    near = sample @ sample[taken[0]]
    while len(taken) < k:
        # Squared distance of unit vectors, over 2; 0 exactly for rows that are taken, which must not be drawn again.
        weights = (1 - near.double()).clamp(min=0)
        weights[taken] = 0
        reach = weights.cumsum(0)
        if float(reach[-1]) > 0:
            point = draw.random() * float(reach[-1])
            row = int(torch.searchsorted(reach, point, right=True).clamp(max=count - 1))
        else:  # all others equal a centroid
            row = int(np.setdiff1d(np.arange(count), taken)[0])
        taken.append(row)
        near = torch.maximum(near, sample @ sample[row])
    return F.normalize(sample[taken], dim=1)


class PairScores(NamedTuple):
    """The pairs of some samples of a shard."""

    shard: ShardPart
    samples: Numbers  # int64 [m], the pairs' samples in the shard
    choices: Numbers  # int64 [m], their captions
    scores: torch.Tensor  # float32 [m]: cosine of image and caption, the mean over the image's views


def pair_scores(store: FeatureStore) -> Iterator[PairScores]:
    """The cosine of each image with each of its captions, in order (the CLIP score of arXiv:2104.08718, unscaled).

    Raises SettingsError: the store lacks images or texts, or they are of different models.
    """
    images, texts = StoredRows(store, IMAGE), StoredRows(store, TEXT)
    check_pair(images, texts)
    for number, (image_shard, text_shard) in enumerate(zip(images.shards, texts.shards, strict=True)):
        step = min(images.step(number), texts.step(number))
        for block, of in zip(image_shard.blocks(step), text_shard.blocks(step), strict=True):
            owners = np.searchsorted(block.samples[:: images.views], of.samples)
            mean = unit_views(block.features, images.views).mean(dim=1)
            scores = (mean[torch.from_numpy(owners)] * F.normalize(of.features, dim=1)).sum(dim=1)
            yield PairScores(text_shard, of.samples, of.choices, scores)


def check_pair(images: StoredRows, texts: StoredRows) -> None:
    """Raises SettingsError: parts of images and texts are of different models."""
    if images.width != texts.width:
        one, other = f"{images.part} has rows of {images.width} features", f"{texts.part} of {texts.width}"
        raise SettingsError(f"{one} and {other}: other models")
