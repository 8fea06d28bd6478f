"""What searches in stores compute: exact search, spherical k-means, pairs of images and captions, near-duplicates.

Features of a store's part are read as rows of length 1 in order, block by block, without those of dropped samples
(`StoredRows`): in a part of images a row is a sample, the mean of its views; in a part of texts a row is a caption. Row
numbers, their names and cosines leave. Memory besides the results and the queries: a few blocks, `TILE` scores, and for
`doubts` up to `REFERENCES` samples. Clusters depend on the seed, and on the rounding of float32 products on the device;
a row belongs to the centroid with the largest cosine.

Of a store with both towers of a model, samples that have captions are compared with others of them (doubtful pairs,
hard negatives). A sample's text is the mean of its captions. Near-duplicates are found by the nearest one, for each
row, of those that are preferred to it, of all rows or of its cluster. What is dropped at a threshold follows from these
cosines, for any threshold: rows that have a preferred row at least so near (SemDeDup, arXiv:2303.09540).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IMAGE, TEXT
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import BLOCK, ShardPart, StoredBlock, StoredRows, unit_views
from clipstream.utils.torch_state import restore_matmul_precision

TILE = 1 << 22  # scores computed at once
SAMPLED = 65536  # rows among which the first centroids are chosen; k if there are more clusters
PART = 8192  # rows added up in float64 at once
ITERATIONS = 25  # most updates of the centroids
TOLERANCE = 1e-4  # share by which the mean of 1 - cosine has to become smaller
REFERENCES = 65536  # samples, at most, that others are compared with for `doubts`
SHARED = 5
KINDS = ("clip_score", "duplicate", "doubt")  # of scores of samples
TRAINED_ON = 256  # rows of each cluster, about, that k-means sees
Scores = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class TensorRows:
    """Features in memory, float32 [N, D], read as `StoredRows` in blocks of `block` rows."""

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


Rows = TensorRows | StoredRows


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
    best = torch.full((len(queries), k), -torch.inf, device=device)
    found = torch.zeros((len(queries), k), dtype=torch.int64, device=device)
    for first, features in rows.blocks() if k else ():
        block = features.to(device, torch.float64)
        numbers = torch.arange(first, first + len(block), device=device)
        for part in torch.split(torch.arange(len(queries), device=device), max(1, TILE // len(block))):
            scores = torch.cat([best[part], (queries[part] @ block.T).float()], dim=1)
            at = torch.cat([found[part], numbers.expand(len(part), -1)], dim=1)
            best[part], order = (of[:, :k] for of in scores.sort(dim=1, descending=True, stable=True))
            found[part] = at.gather(1, order)
    return TopRows(best.cpu(), found.cpu())


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

    The centroid of a cluster that becomes empty stays.

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
        total = 0.0
        for _, features in rows.blocks():
            scores, labels = (of.cpu() for of in _assign(features.to(device), centroids))
            total += float(scores.double().sum())
            sizes += torch.bincount(labels, minlength=k)
            for some, of in zip(torch.split(features, PART), torch.split(labels, PART), strict=True):
                sums.index_add_(0, of, some.double())
        means.append(total / len(rows))
        before, now = (1 - mean for mean in means[-2:]) if len(means) > 1 else (1.0, 0.0)  # at first, none is before it
        if len(means) > ITERATIONS or before - now <= TOLERANCE * before:
            return Clusters(centroids.cpu(), sizes, means)
        # Of an empty cluster, and where opposite rows cancel each other out, the centroid stays.
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
    draw, count = np.random.default_rng(seed), min(len(rows), max(k, SAMPLED))
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
    rows: Numbers  # int64 [m], the rows of these in the part of images
    choices: Numbers  # int64 [m], their captions
    scores: torch.Tensor  # float32 [m]: cosine of image and caption, the mean over the image's views


def pair_scores(store: FeatureStore) -> Iterator[PairScores]:
    """The cosine of each image with each of its captions, in order (the CLIP score of arXiv:2104.08718, unscaled).

    Raises SettingsError: the store lacks images or texts, or they are of different models.
    """
    pairs = PairRows(store)
    for number, shard in enumerate(pairs.texts.shards):
        rows = pairs.rows_of_samples(number)
        for _, mean, owners, of in pairs.parts(number):
            scores = (mean[owners] * F.normalize(of.features, dim=1)).sum(dim=1)
            yield PairScores(shard, of.samples, rows[of.samples], of.choices, scores)


class PairBlock(NamedTuple):
    """Samples with captions."""

    rows: torch.Tensor  # int64 [m], their rows in the part of images
    images: torch.Tensor  # float32 [m, D], rows of length 1
    texts: torch.Tensor  # float32 [m, D], rows of length 1
    captions: torch.Tensor  # int64 [m], equal for samples with equal captions; other numbers in each process

    def to(self, device: torch.device | str) -> PairBlock:
        return PairBlock(*(of.to(device) for of in self))

    def part(self, which: torch.Tensor) -> PairBlock:
        return PairBlock(*(of[which] for of in self))


class PairRows:
    """The samples of a store that have captions. Those of `images` give samples their numbers.

    Args:
        source: name of the source to read; '' for all.

    Raises SettingsError: the store lacks images or texts, or they are of different models.
    """

    def __init__(self, store: FeatureStore, source: str = "") -> None:
        self.store, self.source = store, source
        self.images, self.texts = images, texts = StoredRows(store, IMAGE), StoredRows(store, TEXT)
        if images.width != texts.width:
            one, other = f"{images.part} has rows of {images.width} features", f"{texts.part} of {texts.width}"
            raise SettingsError(f"{one} and {other}: other models")

    def blocks(self, most: int = BLOCK) -> Iterator[PairBlock]:
        """All of them in order, at least `most` at a time but for the last ones."""
        held: list[PairBlock] = []
        for some in self._blocks():
            held.append(some)
            if sum(len(one.rows) for one in held) >= most:
                yield PairBlock(*map(torch.cat, zip(*held, strict=True)))
                held = []
        if held:
            yield PairBlock(*map(torch.cat, zip(*held, strict=True)))

    def rows_of_samples(self, number: int) -> Numbers:
        """By sample of a shard, its row in the part of images, if it has one."""
        used = self.images.shards[number].rows_of_samples() > 0
        rows: Numbers = self.images.firsts[number] + used.cumsum() - 1
        return rows

    def parts(self, number: int) -> Iterator[tuple[Numbers, torch.Tensor, torch.Tensor, StoredBlock]]:
        """Of the blocks of a shard in order: samples int64 [m], means of their views float32 [m, D], the places among
        these of the captions' samples int64 [n], and the captions.
        """
        images, texts = self.images, self.texts
        step = min(images.step(number), texts.step(number))
        blocks = (rows.shards[number].blocks(step) for rows in (images, texts))
        for block, of in zip(*blocks, strict=True):
            samples = block.samples[:: images.views]
            owners = torch.from_numpy(np.searchsorted(samples, of.samples))
            yield samples, unit_views(block.features, images.views).mean(dim=1), owners, of

    def _blocks(self) -> Iterator[PairBlock]:
        for number, shard in enumerate(self.images.shards):
            if self.source not in ("", shard.source.name):
                continue
            rows = self.rows_of_samples(number)
            known = [hash(frozenset(captions)) for _, captions in shard.source.texts(shard.number)]
            for samples, mean, owners, of in self.parts(number):
                means = torch.zeros_like(mean).index_add_(0, owners, F.normalize(of.features, dim=1))
                used = torch.bincount(owners, minlength=len(samples)) > 0
                own = samples[used.numpy()]
                captions = torch.tensor([known[i] for i in own.tolist()], dtype=torch.int64)
                if len(own):
                    mean, means = (F.normalize(part[used], dim=1) for part in (mean, means))
                    yield PairBlock(torch.from_numpy(rows[own]), mean, means, captions)


class Doubts(NamedTuple):
    """What speaks against pairs, in stored order."""

    rows: Numbers  # [n], the samples
    scores: Scores  # [n], smaller for more doubtful ones, see `doubts`
    cosines: Scores  # [n], of image and text
    captions: Numbers  # [n], the first sample with the same captions
    others: Numbers  # [n], the first sample with the captions, other than its own, that match the image best
    other_cosines: Scores  # [n]

    @property
    def mistaken(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether other captions match the image better than its own, [n]."""
        return self.other_cosines > self.cosines

    @property
    def are_classes(self) -> bool:
        """Whether captions are labels: those that `SHARED` samples have, on average."""
        return SHARED * len(np.unique(self.captions)) <= len(self.rows)


def doubts(pairs: PairRows, k: int = 5, *, device: torch.device | str = "cpu") -> Doubts:
    """Scores of pairs by their neighbours: 2 s(i, i) - mean s(i, j) - mean s(l, i) + mean c(i, l).

    s(i, j) is the cosine of image i and text j, and c that of two images. j are the k images nearest to image i, whose
    texts should not match it better than its own; l are the k nearest other texts of text i, whose images should not
    match it better, and should resemble image i. Neighbours are found among `REFERENCES` samples, drawn with a fixed
    seed where there are more.

    Raises DataError: the store has no sample with captions.
    """
    picked = torch.zeros(len(pairs.images), dtype=torch.bool)
    picked[torch.from_numpy(np.random.default_rng(0).permutation(len(picked))[:REFERENCES])] = True
    blocks = [some.part(picked[some.rows]) for some in pairs.blocks()]
    if not blocks:
        raise DataError(f"{pairs.store.shown} has no image with a caption")
    known = PairBlock(*map(torch.cat, zip(*blocks, strict=True))).to(device)
    unique = np.unique(known.captions.cpu().numpy(), return_index=True)[1]
    texts = known.part(torch.from_numpy(unique).to(device))  # a sample for each text
    found: list[tuple[torch.Tensor, ...]] = []
    for block in pairs.blocks():
        some = block.to(device)
        own = (some.images * some.texts).sum(dim=1)
        near = _nearest(some.images, known.images, some.rows, known.rows, k)
        like = _nearest(some.texts, known.texts, some.captions, known.captions, k)
        scores = 2 * own - _mean(some.images, known.texts, near)
        scores += _mean(some.images, known.images, like) - _mean(some.texts, known.images, like)
        best, at = (of[:, 0] for of in _nearest(some.images, texts.texts, some.captions, texts.captions, 1))
        found.append(tuple(of.cpu() for of in (some.rows, scores, own, some.captions, texts.captions[at], best)))
    rows, doubt, cosines, captions, others, most = (torch.cat(of).numpy() for of in zip(*found, strict=True))
    numbers, firsts = np.unique(captions, return_index=True)
    mine, theirs = (rows[firsts[np.searchsorted(numbers, of)]] for of in (captions, others))
    return Doubts(rows, doubt, cosines, mine, theirs, most)


def hard_negatives(
    pairs: PairRows, kind: str, k: int, limit: float, *, device: torch.device | str = "cpu", held: int = 256 << 20
) -> Iterator[tuple[Numbers, Numbers]]:
    """Samples int64 [m] in stored order, and for each the others nearest to it, int64 [m, k], best first, -1 for none.

    Others with the same captions, or with images of a cosine of at least `limit`, are left out.

    Args:
        kind: 'image-text' for texts that match the image, 'text-text', or 'image-image'.
        held: bytes of features for which others are sought in one pass over the store.
    """
    query, other = (f"{of}s" for of in kind.split("-"))
    for block in pairs.blocks(max(held // (8 * pairs.images.width), 1)):
        some = block.to(device)
        best = torch.full((len(some.rows), k), -torch.inf, device=device)
        rows = torch.full((len(some.rows), k), -1, device=device)
        for others in (of.to(device) for of in pairs.blocks()):
            near = some.images, others.images, limit
            features = getattr(some, query), getattr(others, other)
            scores, at = _nearest(*features, some.captions, others.captions, k, near)
            # A stable sort: of equal ones those that come first in the store.
            best, order = torch.cat([best, scores], dim=1).sort(dim=1, descending=True, stable=True)
            best, rows = best[:, :k], torch.cat([rows, others.rows[at]], dim=1).gather(1, order[:, :k])
        yield some.rows.cpu().numpy(), rows.masked_fill(best.isinf(), -1).cpu().numpy()


def _nearest(
    queries: torch.Tensor,
    others: torch.Tensor,
    own: torch.Tensor,
    theirs: torch.Tensor,
    k: int,
    near: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and places of the k best others of each query, [m, k]; a cosine is -inf where there are no more.

    Args:
        own, theirs: int64 [m] and [n]; others with the same number as the query are left out.
        near: features of queries and others, and the cosine from which on an other is left out.
    """
    found = []
    with restore_matmul_precision():
        torch.set_float32_matmul_precision("highest")  # never TF32 or bf16
        for part in torch.split(torch.arange(len(queries), device=queries.device), max(1, TILE // len(others))):
            scores = (queries[part] @ others.T).masked_fill_(own[part][:, None] == theirs, -torch.inf)
            if near is not None:
                scores.masked_fill_(near[0][part] @ near[1].T >= near[2], -torch.inf)
            found.append(scores.topk(min(k, len(others)), dim=1))
    return torch.cat([of.values for of in found]), torch.cat([of.indices for of in found])


def _mean(queries: torch.Tensor, others: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean cosine of each query with those that `_nearest` found, [m]; 0 where it found none."""
    total, used = torch.zeros(len(queries), device=queries.device), found[0].isfinite()
    for which, at in zip(used.T, found[1].T, strict=True):
        total += (queries * others[at]).sum(dim=1) * which
    return total / used.sum(dim=1).clamp(min=1)


def sample_scores(where: str) -> pa.Table:
    """The scores of all samples in use of a store, in stored order: source, shard, key, score.

    Args:
        where: STORE or STORE:KIND. 'clip_score' is the cosine of an image with its best caption; 'doubt', see `doubts`,
            is smaller for more doubtful captions; both NaN without captions; 'duplicate' is its largest cosine with an
            image that is preferred to it, -inf for none: those with less than 0.95 are without near-duplicates.

    Raises SettingsError: the store has no such features.
    """
    path, _, kind = where.rpartition(":")
    path, kind = (path, kind) if kind in KINDS else (where, KINDS[0])
    rows, tables = StoredRows(store := FeatureStore(path)), []
    if kind == "clip_score":
        scores = clip_scores(store)
    elif kind == "doubt":
        scores, found = np.full(len(rows), np.nan, np.float32), doubts(PairRows(store))
        scores[found.rows] = found.scores
    else:
        scores = near_duplicates(rows).cosines
    for number, shard in enumerate(rows.shards):
        keys, first = rows.keys_of(number), int(rows.firsts[number])
        names = {"source": pa.repeat(shard.source.name, len(keys)), "shard": pa.repeat(shard.name, len(keys))}
        tables.append(pa.table({**names, "key": pa.array(keys, pa.string()), "score": scores[first:][: len(keys)]}))
    return pa.concat_tables(tables)


def clip_scores(store: FeatureStore) -> Scores:
    """The cosine of each image with its best caption, float32 [rows of images]; NaN for those without captions."""
    found = np.full(len(StoredRows(store)), np.nan, np.float32)
    for some in pair_scores(store):
        np.fmax.at(found, some.rows, some.scores.numpy())
    return found


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
    return find_nearest_preferred(rows, order, device=device)


class Nearest(NamedTuple):
    """For each row the nearest one of those that are preferred to it."""

    cosines: np.ndarray[Any, np.dtype[np.float32]]  # [N]; -inf where there is none
    rows: Numbers  # [N]; -1 where there is none

    def find_kept(self, threshold: float) -> Numbers:
        """The row that is kept in place of each row, int64 [N]: itself, unless its cosine is at least the threshold.

        In a chain of such rows it is the last one.
        """
        found: Numbers = np.where(self.cosines >= threshold, self.rows, np.arange(len(self.rows)))
        while not np.array_equal(above := found[found], found):
            found = above
        return found


def find_nearest_preferred(
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
    with restore_matmul_precision():
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
    """k clusters by `kmeans`, of a sample of `TRAINED_ON` rows for each. Raises SettingsError: fewer rows."""
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
    """As `find_nearest_preferred`, with pairs within clusters alone: N^2 D / (2 k) multiplications for k clusters.

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
            some = find_nearest_preferred(TensorRows(features[torch.from_numpy(own)]), order[members], device=device)
            nearest.cosines[members] = some.cosines
            nearest.rows[members] = np.where(some.rows >= 0, members[some.rows], -1)
        first = end
    return nearest
