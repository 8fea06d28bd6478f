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
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IMAGE, TEXT, decode_rows
from clipstream.features.store import FeatureStore, Numbers, StoredSource

BLOCK = 16384  # rows of a block, by default
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


class Found(NamedTuple):
    """The best rows of q queries, best first; rows of equal score in ascending order."""

    scores: torch.Tensor  # float32 [q, k]
    rows: torch.Tensor  # int64 [q, k]


def search(rows: Rows, queries: torch.Tensor, k: int, *, device: torch.device | str = "cpu") -> Found:
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
    return Found(_ordered(bits).int().view(torch.float32).cpu(), (_LAST - (best & _LAST)).cpu())


def _ranks(scores: torch.Tensor, first: int) -> torch.Tensor:
    """int64 [q, m], larger for better rows: the bits of the score float32 [q, m], then the row, from `first` on."""
    bits = _ordered((scores + 0.0).view(torch.int32).long())  # + 0.0: there is no -0.0
    return (bits << 32) | (_LAST - first - torch.arange(scores.shape[1], device=scores.device))


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bits of float32 as integers of the same order, and the reverse; int64."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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


def _first_centroids(rows: Rows, k: int, seed: int, init: str) -> torch.Tensor:
    """The centroids to begin with, float32 [k, D]: rows."""
    draw = np.random.default_rng(seed)
    count = k if init == "random" else min(len(rows), max(k, SAMPLED))
    sample = gather(rows, np.sort(draw.choice(len(rows), count, replace=False, shuffle=False)))
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


class Name(NamedTuple):
    """What a row belongs to."""

    source: str
    shard: str  # see `shard_url.shard_names`
    key: str
    choice: int  # of the sample's captions; 0 in a part of images
    captions: list[str]  # of the sample; in a part of texts that of the row alone
    stored: str  # the store's name of the shard

    @property
    def label(self) -> str:
        return f"{self.shard}/{self.key}"


class StoredBlock(NamedTuple):
    """Rows of one shard, in order."""

    samples: Numbers  # int64 [m], their samples in the shard
    choices: Numbers  # int64 [m], their views or captions
    features: torch.Tensor  # float32 [m, D], as stored


class ShardPart(NamedTuple):
    source: StoredSource
    known: StoredSource  # the same source without the rows of the part: to count them, these need not be there
    number: int  # of the shard in its source
    part: str

    @property
    def name(self) -> str:
        """The shard's name in the names of its samples."""
        return self.source.shard_names[self.number]

    def rows_of_samples(self) -> Numbers:
        """How many rows each sample has, int64 [n]; 0 for dropped ones."""
        with self.known.holding(self.number):
            return self._counts(self.known, 0, self.known.samples_of(self.number))

    def blocks(self, step: int, start: int = 0) -> Iterator[StoredBlock]:
        """The rows of the samples from number `start` on, those of `step` samples at a time."""
        source, manifest = self.source, self.source.store.manifest
        count, base = source.samples_of(self.number), source.base(self.number)
        with source.holding(self.number):
            for first in range(start, count, step):
                counts = self._counts(source, first, min(first + step, count))
                samples = np.repeat(np.arange(first, first + len(counts)), counts)
                choices = np.arange(len(samples)) - np.repeat(counts.cumsum() - counts, counts)
                of = source.caption_rows if manifest.per_caption(self.part) else source.view_rows
                features = decode_rows(source.gather(self.part, of(samples + base, choices)))
                if not torch.isfinite(features.sum(dtype=torch.float64)):
                    raise DataError(
                        f"feature store: {source.store.shown}: features of part {self.part} of {self.name} are not "
                        "finite (NaN or infinite): compute them again, into another folder"
                    )
                yield StoredBlock(samples, choices, features)

    def _counts(self, source: StoredSource, start: int, stop: int) -> Numbers:
        base, manifest = source.base(self.number), source.store.manifest
        table = source.sample_rows(np.arange(base + start, base + stop))
        used = table["used"].astype(np.int64)
        rows = table["counts"].sum(axis=1) if manifest.per_caption(self.part) else manifest.rows_of(self.part)
        return used * rows


@dataclass(frozen=True)
class StoredRows:
    """The rows of a part, for `search`, `duplicates` and `kmeans`. Counts them when it is made.

    Raises SettingsError: the store has no such part of features.
    """

    store: FeatureStore
    part: str = IMAGE

    def __post_init__(self) -> None:
        parts = self.store.manifest.feature_parts
        if self.part not in parts:
            raise SettingsError(f"{self.store.shown} has no features {self.part!r}, only {', '.join(parts) or 'none'}")
        _ = self.firsts

    @property
    def width(self) -> int:
        return self.store.manifest.parts[self.part].width

    @property
    def views(self) -> int:
        """Stored rows of each row."""
        return self.store.manifest.rows_of(self.part)

    @property
    def per_caption(self) -> bool:
        """Whether a row is a caption, and not an image."""
        return self.store.manifest.per_caption(self.part)

    @cached_property
    def shards(self) -> list[ShardPart]:
        names, source = list(self.store.manifest.sources), self.store.source
        pairs = [(source(name, [self.part]), source(name, [])) for name in names]
        return [ShardPart(*pair, number, self.part) for pair in pairs for number in range(len(pair[0].shards))]

    @cached_property
    def firsts(self) -> Numbers:
        """The first row of each shard, and the number of rows after the last, int64."""
        counts = [int(shard.rows_of_samples().sum()) // self.views for shard in self.shards]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def step(self, number: int) -> int:
        """Samples of the shard of this number that are read at once, so that they have about `BLOCK` stored rows."""
        rows = int(self.firsts[number + 1] - self.firsts[number]) * self.views
        shard = self.shards[number]
        return max(1, min(BLOCK, BLOCK * shard.source.samples_of(shard.number) // max(rows, 1)))

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, float32 [m, D] of rows of length 1) of blocks in order, from row `start` on."""
        for number, shard in enumerate(self.shards):
            if self.firsts[number + 1] <= start:
                continue
            row, sample = int(self.firsts[number]), 0
            if row < start:
                ends = shard.rows_of_samples().cumsum() // self.views
                sample = int(np.searchsorted(ends, start - row, side="right"))
                row += int(ends[sample - 1]) if sample else 0
            for block in shard.blocks(self.step(number), sample):
                features = unit_views(block.features, self.views)
                features = F.normalize(features.mean(dim=1), dim=1) if self.views > 1 else features[:, 0]
                features = features[max(start - row, 0) :]
                if len(features):
                    yield max(row, start), features
                row += len(block.samples) // self.views

    def keys_of(self, number: int) -> list[str]:
        """The keys of the samples in use of the shard of this number."""
        shard = self.shards[number]
        used = shard.rows_of_samples() > 0
        return [key for key, use in zip(shard.source.keys(shard.number), used, strict=True) if use]

    def names_of(self, number: int) -> list[Name]:
        return self.names(range(int(self.firsts[number]), int(self.firsts[number + 1])))

    def names(self, rows: Sequence[int]) -> list[Name]:
        """What rows belong to; the texts of the shards that they are in are read."""
        found: dict[int, Name] = {}
        wanted = np.unique(np.asarray(rows, np.int64))
        if len(wanted) and wanted[-1] >= len(self):
            raise SettingsError(f"{self.store.shown} has {len(self):,} rows in {self.part}, and no row {wanted[-1]:,}")
        numbers = np.searchsorted(self.firsts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            shard, own = self.shards[number], wanted[numbers == number]
            ends = (shard.rows_of_samples() // self.views).cumsum()
            samples = np.searchsorted(ends, own - self.firsts[number], side="right")
            choices = own - self.firsts[number] - np.concatenate([[0], ends])[samples]
            known = shard.source.texts(shard.number)
            for row, sample, choice in zip(own.tolist(), samples.tolist(), choices.tolist(), strict=True):
                key, captions = known[sample]
                texts = captions[choice : choice + 1] if self.per_caption else captions
                stored = shard.source.shards[shard.number].name
                found[row] = Name(shard.source.name, shard.name, key, choice, texts, stored)
        return [found[row] for row in rows]

    def find(self, key: str) -> list[int]:
        """The rows of the samples with this key, given as KEY or as SHARD/KEY."""
        rows: list[int] = []
        for number, shard in enumerate(self.shards):
            keys = {key, key.removeprefix(f"{shard.name}/")}
            if samples := [i for i, own in enumerate(shard.source.keys(shard.number)) if own in keys]:
                ends = self.firsts[number] + (shard.rows_of_samples() // self.views).cumsum()
                starts = np.concatenate([self.firsts[number : number + 1], ends])
                rows += [row for i in samples for row in range(starts[i], ends[i])]
        return rows


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


def unit_views(features: torch.Tensor, views: int) -> torch.Tensor:
    """Rows of length 1 by sample, [n, views, D], of stored rows [n * views, D]; storage in few bits changes lengths."""
    return F.normalize(features, dim=1).view(-1, views, features.shape[1])
