"""Scores of samples, for filters: a store and the kind of score enter, a score for each image of the store leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from clipstream.errors import SettingsError, did_you_mean
from clipstream.features.duplicates import Nearest, cluster, nearest_in_clusters, nearest_preferred
from clipstream.features.pairs import PairRows, doubts
from clipstream.features.search import PairScores, StoredRows, pair_scores
from clipstream.features.store import FeatureStore, Numbers

KINDS = ("clip_score", "duplicate", "doubt")

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
