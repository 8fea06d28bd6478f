"""The rows of a part of a store, in order and with their names, for searches, scores and exports.

A part of a store enters; blocks of features without those of dropped samples leave, and what a row belongs to: in a
part of images a row is a sample, the mean of its views; in a part of texts a row is a caption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import IMAGE, decode_rows
from clipstream.features.store import FeatureStore, Numbers, StoredSource

BLOCK = 16384  # rows of a block, by default


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


def unit_views(features: torch.Tensor, views: int) -> torch.Tensor:
    """Rows of length 1 by sample, [n, views, D], of stored rows [n * views, D]; storage in few bits changes lengths."""
    return F.normalize(features, dim=1).view(-1, views, features.shape[1])
