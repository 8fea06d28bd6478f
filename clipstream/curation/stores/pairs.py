"""Pairs of image and captions: doubtful ones, captions that match many images, and hard negatives of each sample.

A store with both towers of a model enters, and samples that have captions are compared with others of them. A sample's
text is the mean of its captions. Products are float32; memory besides the results: some blocks, `TILE` scores, and for
`doubts` up to `REFERENCES` samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.curation.stores.search import TILE, check_pair
from clipstream.errors import DataError
from clipstream.features.manifest import IMAGE, TEXT
from clipstream.features.store import FeatureStore, Numbers
from clipstream.features.stored_rows import BLOCK, StoredRows, unit_views
from clipstream.utils.torch_state import restored_matmul_precision

REFERENCES = 65536  # samples, at most, that others are compared with for `doubts`
SHARED = 5
Scores = np.ndarray[Any, np.dtype[np.float32]]


class Pairs(NamedTuple):
    """Samples with captions."""

    rows: torch.Tensor  # int64 [m], their rows in the part of images
    images: torch.Tensor  # float32 [m, D], rows of length 1
    texts: torch.Tensor  # float32 [m, D], rows of length 1
    captions: torch.Tensor  # int64 [m], equal for samples with equal captions; other numbers in each process

    def to(self, device: torch.device | str) -> Pairs:
        return Pairs(*(of.to(device) for of in self))

    def part(self, which: torch.Tensor) -> Pairs:
        return Pairs(*(of[which] for of in self))


@dataclass(frozen=True)
class PairRows:
    """The samples of a store that have captions.

    Args:
        source: name of the source to read; '' for all.

    Raises SettingsError: the store lacks features of images or texts.
    """

    store: FeatureStore
    source: str = ""

    def __post_init__(self) -> None:
        check_pair(self.images, self.texts)

    @cached_property
    def images(self) -> StoredRows:
        """The part of images, whose rows give samples their numbers."""
        return StoredRows(self.store, IMAGE)

    @cached_property
    def texts(self) -> StoredRows:
        return StoredRows(self.store, TEXT)

    def blocks(self, most: int = BLOCK) -> Iterator[Pairs]:
        """All of them in order, at least `most` at a time but for the last ones."""
        held: list[Pairs] = []
        for some in self._blocks():
            held.append(some)
            if sum(len(one.rows) for one in held) >= most:
                yield Pairs(*map(torch.cat, zip(*held, strict=True)))
                held = []
        if held:
            yield Pairs(*map(torch.cat, zip(*held, strict=True)))

    def _blocks(self) -> Iterator[Pairs]:
        images, texts = self.images, self.texts
        for number, (image, text) in enumerate(zip(images.shards, texts.shards, strict=True)):
            if self.source not in ("", image.source.name):
                continue
            step = min(images.step(number), texts.step(number))
            rows = images.firsts[number] + (image.rows_of_samples() > 0).cumsum() - 1
            known = [hash(frozenset(captions)) for _, captions in image.source.texts(image.number)]
            for block, of in zip(image.blocks(step), text.blocks(step), strict=True):
                samples = block.samples[:: images.views]
                owners = torch.from_numpy(np.searchsorted(samples, of.samples))
                means = torch.zeros(len(samples), texts.width).index_add_(0, owners, F.normalize(of.features, dim=1))
                used = torch.bincount(owners, minlength=len(samples)) > 0
                mean = unit_views(block.features, images.views).mean(dim=1)
                own = samples[used.numpy()]
                captions = torch.tensor([known[i] for i in own.tolist()], dtype=torch.int64)
                if len(own):
                    mean, means = (F.normalize(of[used], dim=1) for of in (mean, means))
                    yield Pairs(torch.from_numpy(rows[own]), mean, means, captions)


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
    drawn = np.random.default_rng(0).permutation(len(pairs.images))[:REFERENCES]
    picked = torch.zeros(len(pairs.images), dtype=torch.bool)
    picked[torch.from_numpy(drawn)] = True
    blocks = [some.part(picked[some.rows]) for some in pairs.blocks()]
    if not blocks:
        raise DataError(f"{pairs.store.shown} has no image with a caption")
    known = Pairs(*map(torch.cat, zip(*blocks, strict=True))).to(device)
    unique = torch.from_numpy(np.unique(known.captions.cpu().numpy(), return_index=True)[1]).to(device)
    texts = known.part(unique)  # a sample for each text
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
    first_of = rows[firsts]
    mine, theirs = (first_of[np.searchsorted(numbers, of)] for of in (captions, others))
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
    with restored_matmul_precision():
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
