"""Scores of samples, for filters: a store and the kind of score enter, a score for each image of the store leaves.

Near-duplicates are found by the nearest one, for each row, of those that are preferred to it, of all rows or of its
cluster. What is dropped at a threshold follows from these cosines, for any threshold: rows that have a preferred row at
least so near (SemDeDup, arXiv:2303.09540).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from clipstream.curation.stores.pairs import PairRows, doubts
from clipstream.curation.stores.search import TILE, Clusters, PairScores, Rows, TensorRows, gather, kmeans, pair_scores
from clipstream.errors import SettingsError, did_you_mean
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import StoredRows
from clipstream.utils.torch_state import restored_matmul_precision

KINDS = ("clip_score", "duplicate", "doubt")
TRAINED_ON = 256  # rows of each cluster, about, that k-means sees

Scores = np.ndarray[Any, np.dtype[np.float32]]


class ShardScores(NamedTuple):
    """The scores of the samples in use of a shard, in stored order."""

    source: str
    shard: str  # see `shard_url.shard_names`
    keys: list[str]
    scores: Scores  # [n]


def sample_scores(store: FeatureStore, kind: str, *, keep_by: str = "first") -> Iterator[ShardScores]:
    """The scores of all samples in use: one item for each shard, in order.

    Args:
        kind: 'clip_score', the cosine of an image with its best caption; 'doubt', see `pairs.doubts`, smaller for more
            doubtful captions; both NaN without captions; or 'duplicate', its largest cosine with an image that is
            preferred to it, -inf for none: those with less than 0.95 are a data set without near-duplicates.
        keep_by: of 'duplicate', see `near_duplicates`.

    Raises SettingsError: there is no such kind, or the store has no such features.
    """
    if kind not in KINDS:
        raise SettingsError(f"{kind!r} is no score of a store: use {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    rows = StoredRows(store)
    if kind == "clip_score":
        scores = clip_scores(store)
    elif kind == "doubt":
        scores, found = np.full(len(rows), np.nan, np.float32), doubts(PairRows(store))
        scores[found.rows] = found.scores
    else:
        scores = near_duplicates(rows, keep_by=keep_by).cosines
    for number, shard in enumerate(rows.shards):
        first, end = int(rows.firsts[number]), int(rows.firsts[number + 1])
        yield ShardScores(shard.source.name, shard.name, rows.keys_of(number), scores[first:end])


def scores_table(where: str) -> pa.Table:
    """The scores of a store's samples: source, shard, key, score. `where` is STORE or STORE:KIND."""
    path, _, kind = where.rpartition(":")
    path, kind = (path, kind) if kind in KINDS else (where, KINDS[0])
    tables = []
    for found in sample_scores(FeatureStore(path), kind):
        names = {name: pa.repeat(getattr(found, name), len(found.keys)) for name in ("source", "shard")}
        tables.append(pa.table({**names, "key": pa.array(found.keys, pa.string()), "score": found.scores}))
    return pa.concat_tables(tables)


def clip_scores(store: FeatureStore) -> Scores:
    """The cosine of each image with its best caption, float32 [rows of images]; NaN for those without captions."""
    rows = StoredRows(store)
    found = np.full(len(rows), np.nan, np.float32)
    places = {(s.source.name, s.number): (number, s) for number, s in enumerate(rows.shards)}
    for some in pair_scores(store):
        number, shard = places[some.shard.source.name, some.shard.number]
        samples, best = best_captions(some)
        ends = (shard.rows_of_samples() > 0).cumsum()
        found[rows.firsts[number] + ends[samples] - 1] = best.numpy()
    return found


def best_captions(some: PairScores) -> tuple[Numbers, torch.Tensor]:
    """The samples that have captions, int64 [n], and the score of each one's best caption, float32 [n]."""
    samples, places = np.unique(some.samples, return_inverse=True)
    best = torch.full((len(samples),), -torch.inf)
    return samples, best.scatter_reduce(0, torch.from_numpy(places), some.scores, "amax")


def near_duplicates(
    rows: StoredRows, clusters: int = 0, keep_by: str = "first", device: torch.device | str = "cpu"
) -> Nearest:
    """For each image the nearest one of those that are preferred to it.

    Args:
        clusters: compare images of the same one of so many clusters alone (SemDeDup, arXiv:2303.09540); 0 for all.
        keep_by: 'first' prefers the first of images in stored order; 'score' the one with the largest `clip_scores`,
            the first of equal ones; 'centroid' the one farthest from the centroid of its cluster.

    Raises SettingsError: 'centroid' without clusters, more clusters than images, or no captions to score by.
    """
    order: Numbers | None = None
    if keep_by != "centroid":
        order = np.arange(len(rows))
    if keep_by == "score":
        order = np.argsort(-np.nan_to_num(clip_scores(rows.store), nan=-2), kind="stable").argsort()
    if clusters:
        return nearest_in_clusters(rows, cluster(rows, clusters, device=device), order, device=device)
    if order is None:
        raise SettingsError("images are kept by their distance to a centroid in clusters alone: set their number")
    return nearest_preferred(rows, order, device=device)


class Nearest(NamedTuple):
    """For each row the nearest one of those that are preferred to it."""

    cosines: np.ndarray[Any, np.dtype[np.float32]]  # [N]; -inf where there is none
    rows: Numbers  # [N]; -1 where there is none

    def kept(self, threshold: float) -> Numbers:
        """The row that is kept in place of each row, int64 [N]: itself, unless its cosine is at least the threshold.

        In a chain of such rows it is the last one.
        """
        found: Numbers = np.where(self.cosines >= threshold, self.rows, np.arange(len(self.rows)))
        while not np.array_equal(above := found[found], found):
            found = above
        return found


def nearest_preferred(
    rows: Rows, order: Numbers, *, device: torch.device | str = "cpu", held: int = 256 << 20
) -> Nearest:
    """Compare all pairs of rows, by float32 products: N^2 D / 2 multiplications; rows are read N D / (held / 4) times.

    Args:
        order: int64 [N], different numbers; of two rows the one with the smaller number is preferred.
        held: bytes of features that are compared with all later ones in one pass.
    """
    ranks = torch.from_numpy(order).to(device)
    best = torch.full((len(rows),), -torch.inf, device=device)
    of = torch.full((len(rows),), -1, dtype=torch.int64, device=device)

    def update(start: int, scores: torch.Tensor, allowed: torch.Tensor | None, dim: int, first: int) -> None:
        """Take the best of allowed scores [m, n] over `dim`, whose rows begin at `first`, for rows from `start` on."""
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        values = scores.amax(dim=dim)  # four times as fast as max, which finds places too
        better = (values > best[start : start + len(values)]).nonzero()[:, 0]
        best[better + start] = values[better]
        of[better + start] = scores.index_select(1 - dim, better).argmax(dim=dim) + first

    start = 0
    with restored_matmul_precision():
        torch.set_float32_matmul_precision("highest")  # never TF32 or bf16
        while start < len(rows):
            parts: list[torch.Tensor] = []
            for first, block in rows.blocks(start):
                if parts and sum(part.nbytes for part in parts) + block.nbytes > held:
                    break
                parts.append(block)
                end = first + len(block)
            outer = torch.cat(parts).to(device)
            del parts
            for first, features in rows.blocks(start):
                block, step = features.to(device), max(1, TILE // len(features))
                theirs = ranks[first : first + len(block)]
                for top in range(0, min(len(outer), first + len(block) - start), step):
                    some, at = outer[top : top + step], start + top
                    own = ranks[at : at + len(some)]
                    scores = some @ block.T
                    if at + len(some) <= first and own.max() < theirs.min():
                        update(first, scores, None, 0, at)
                        continue
                    update(first, scores, own[:, None] < theirs, 0, at)
                    update(at, scores, own[:, None] > theirs, 1, first)
            start = end
    return Nearest(best.cpu().numpy(), of.cpu().numpy())


def cluster(rows: Rows, k: int, *, seed: int = 0, device: torch.device | str = "cpu") -> Clusters:
    """k clusters by `search.kmeans`, of a sample of `TRAINED_ON` rows for each. Raises SettingsError: fewer rows."""
    count = min(len(rows), max(TRAINED_ON * k, 1))
    sample = np.sort(np.random.default_rng(seed).choice(len(rows), count, replace=False, shuffle=False))
    return kmeans(TensorRows(gather(rows, sample)), k, seed=seed, device=device)


def nearest_in_clusters(
    rows: Rows,
    clusters: Clusters,
    order: Numbers | None,
    *,
    device: torch.device | str = "cpu",
    held: int = 1 << 30,
) -> Nearest:
    """As `nearest_preferred`, with pairs within clusters alone: about N^2 D / (2 k) multiplications for k clusters.

    Args:
        order: None to prefer the rows that are farthest from their centroid, as in the paper.
        held: bytes of features in memory, at most, unless a cluster has more; they are read N D / (held / 4) times.
    """
    found = [tuple(of.cpu() for of in clusters.assign(block.to(device))) for _, block in rows.blocks()]
    scores, labels = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    if order is None:
        order = np.empty(len(rows), np.int64)
        order[np.argsort(scores, kind="stable")] = np.arange(len(rows))
    sizes = np.bincount(labels, minlength=len(clusters.sizes))
    nearest = Nearest(np.full(len(rows), -np.inf, np.float32), np.full(len(rows), -1, np.int64))
    first, most = 0, max(held // (4 * rows.width), 1)
    while first < len(sizes):
        end = max(first + 1, int(np.searchsorted(sizes[first:].cumsum(), most, side="right")) + first)
        numbers = ((labels >= first) & (labels < end)).nonzero()[0]
        features = gather(rows, numbers)
        for own in np.split(labels[numbers].argsort(kind="stable"), sizes[first : end - 1].cumsum()):
            members = numbers[own]
            some = nearest_preferred(TensorRows(features[torch.from_numpy(own)]), order[members], device=device)
            nearest.cosines[members] = some.cosines
            nearest.rows[members] = np.where(some.rows >= 0, members[some.rows], -1)
        first = end
    return nearest
