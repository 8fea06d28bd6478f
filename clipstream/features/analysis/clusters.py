"""Spherical k-means over features that are read in blocks.

Rows of length 1 enter; centroids of length 1, and the sizes of the clusters leave. A row belongs to the centroid with
the largest cosine. Results depend on the seed, and on the rounding of float32 products on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.features.analysis.search import TILE, Rows

SAMPLED = 65536  # rows among which k-means++ chooses the first centroids; k if there are more clusters
PART = 8192  # rows added up in float64 at once


@dataclass(frozen=True)
class Clusters:
    """The result of k-means."""

    centroids: torch.Tensor  # float32 [k, D], rows of length 1
    sizes: torch.Tensor  # int64 [k]
    means: list[float]  # the mean cosine of a row and its centroid, before each update of the centroids

    def assign(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine, float32 [m], and cluster, int64 [m], of rows float32 [m, D]."""
        return _assign(block, self.centroids.to(block.device))


def kmeans(
    rows: Rows,
    k: int,
    *,
    seed: int = 0,
    init: str = "k-means++",
    iterations: int = 25,
    tolerance: float = 1e-4,
    device: torch.device | str = "cpu",
) -> Clusters:
    """Clusters by Lloyd's algorithm on the sphere (Dhillon and Modha, 2001), each iteration one pass over the rows.

    A cluster that becomes empty continues at one of the rows that are farthest from their centroids.

    Args:
        k: number of clusters, at most the number of rows.
        init: 'k-means++' (Arthur and Vassilvitskii, 2007) on up to `SAMPLED` rows, or 'random', k different rows.
        iterations: most updates of the centroids.
        tolerance: stop when the mean of 1 - cosine has become smaller by less than this share.

    Raises SettingsError: there are fewer rows than clusters.
    """
    if not 1 <= k <= len(rows):
        raise SettingsError(f"{k:,} clusters of {len(rows):,} rows: the number must be from 1 to the number of rows")
    centroids = _first_centroids(rows, k, seed, init).to(device)
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
        if len(means) > iterations or (len(means) > 1 and not _improved(means, tolerance)):
            return Clusters(centroids.cpu(), sizes, means)
        empty = (sizes == 0).nonzero().squeeze(1)
        sums[empty] = far[: len(empty)].double()
        # Opposite rows may cancel each other out; the centroid then stays.
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centroids = torch.where(lengths > 0, sums / lengths.clamp(min=1e-300), centroids.cpu().double()).float()
        centroids = centroids.to(device)


def _improved(means: list[float], tolerance: float) -> bool:
    before, now = (1 - mean for mean in means[-2:])
    return before - now > tolerance * before


def _assign(block: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest cosine, float32 [m], and its centroid, int64 [m]; the first of equal ones."""
    found = [(part @ centroids.T).max(dim=1) for part in torch.split(block, max(1, TILE // len(centroids)))]
    return torch.cat([of.values for of in found]), torch.cat([of.indices for of in found])


def _first_centroids(rows: Rows, k: int, seed: int, init: str) -> torch.Tensor:
    """The centroids to begin with, float32 [k, D]: rows."""
    draw = np.random.default_rng(seed)
    count = k if init == "random" else min(len(rows), max(k, SAMPLED))
    chosen = torch.from_numpy(np.sort(draw.choice(len(rows), count, replace=False, shuffle=False)))
    sample = torch.cat(
        [block[chosen[(chosen >= first) & (chosen < first + len(block))] - first] for first, block in rows.blocks()]
    )
    if init == "random":
        return sample
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
