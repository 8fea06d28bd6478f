"""The features of a store's part as rows in order, without those of dropped samples, and the names of these rows.

A store enters; blocks of rows of length 1, names of rows, and the cosines of images with their captions leave. In a
part of images a row is a sample, the mean of its views; in a part of texts a row is a caption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IMAGE, TEXT, decode_rows
from clipstream.features.search import BLOCK
from clipstream.features.store import FeatureStore, StoredSource

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Name(NamedTuple):
    """What a row belongs to."""

    source: str
    shard: str  # name without folders
    key: str
    choice: int  # of the sample's captions; 0 in a part of images
    captions: list[str]  # of the sample; in a part of texts that of the row alone

    @property
    def label(self) -> str:
        """'SHARD/KEY'."""
        return f"{self.shard}/{self.key}"


class StoredBlock(NamedTuple):
    """Rows of one shard, in order."""

    samples: Numbers  # int64 [m], their samples in the shard
    choices: Numbers  # int64 [m], their views or captions
    features: torch.Tensor  # float32 [m, D], as stored


class ShardPart(NamedTuple):
    """A part of a shard."""

    source: StoredSource
    known: StoredSource  # the same source without the rows of the part: to count them, these need not be there
    number: int  # of the shard in its source
    part: str

    @property
    def name(self) -> str:
        """The shard's name without folders."""
        return self.source.shards[self.number].name.rstrip("/").rpartition("/")[2]

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
        """All shards of all sources, in order."""
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

    def names_of(self, number: int) -> list[Name]:
        """What the rows of the shard of this number belong to."""
        return self.names(range(int(self.firsts[number]), int(self.firsts[number + 1])))

    def names(self, rows: Sequence[int]) -> list[Name]:
        """What rows belong to; the texts of the shards that they are in are read."""
        found: dict[int, Name] = {}
        wanted = np.unique(np.asarray(rows, np.int64))
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
                found[row] = Name(shard.source.name, shard.name, key, choice, texts)
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

    def gather(self, rows: Sequence[int]) -> torch.Tensor:
        """Rows of any numbers, float32 [n, D]; all blocks up to the last are read."""
        found = torch.zeros(len(rows), self.width)
        wanted = torch.tensor(rows, dtype=torch.int64)
        for first, block in self.blocks(min(rows)) if rows else ():
            here = (wanted >= first) & (wanted < first + len(block))
            found[here] = block[wanted[here] - first]
            if first + len(block) > max(rows):
                break
        return found

    def identity(self) -> dict[str, object]:
        """What the rows depend on, in few bytes."""
        about = {"part": asdict(self.store.manifest.parts[self.part]), "views": self.views}
        about["sources"] = {name: asdict(source) for name, source in self.store.manifest.sources.items()}
        return {"features": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}


class PairScores(NamedTuple):
    """The pairs of some samples of a shard."""

    shard: ShardPart
    samples: Numbers  # int64 [m], the pairs' samples in the shard
    choices: Numbers  # int64 [m], their captions
    scores: torch.Tensor  # float32 [m]: cosine of image and caption, the mean over the image's views


def pair_scores(store: FeatureStore, image: str = IMAGE, text: str = TEXT) -> Iterator[PairScores]:
    """The cosine of each image with each of its captions, in order (the CLIP score of arXiv:2104.08718, unscaled).

    Args:
        image, text: the parts.

    Raises SettingsError: the store has no such parts, or they are of different models.
    """
    images, texts = StoredRows(store, image), StoredRows(store, text)
    if images.width != texts.width:
        raise SettingsError(f"{image} has rows of {images.width} features and {text} of {texts.width}: other models")
    for number, (image_shard, text_shard) in enumerate(zip(images.shards, texts.shards, strict=True)):
        step = min(images.step(number), texts.step(number))
        for block, of in zip(image_shard.blocks(step), text_shard.blocks(step), strict=True):
            owners = np.searchsorted(block.samples[:: images.views], of.samples)
            mean = unit_views(block.features, images.views).mean(dim=1)
            scores = (mean[torch.from_numpy(owners)] * F.normalize(of.features, dim=1)).sum(dim=1)
            yield PairScores(text_shard, of.samples, of.choices, scores)


def unit_views(features: torch.Tensor, views: int) -> torch.Tensor:
    """Rows of length 1 by sample, [n, views, D], of stored rows [n * views, D]; storage in few bits changes lengths."""
    return F.normalize(features, dim=1).view(-1, views, features.shape[1])
