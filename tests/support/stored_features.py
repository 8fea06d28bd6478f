"""A small store of features, and the samples in use that it holds, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clipstream.features.manifest import PartInfo, decode_rows
from clipstream.features.search import BLOCK
from clipstream.features.store import FeatureStore
from tests.support.features import Content

SIZES = {"a": [5, 9], "b/c": [1, 0, 30]}  # samples of each shard of each source


@dataclass
class Made:
    """The samples in use of a store."""

    path: Path
    names: list[tuple[str, str, str]] = field(default_factory=list)  # source, shard, key
    captions: list[list[str]] = field(default_factory=list)
    images: list[torch.Tensor] = field(default_factory=list)  # float32 [views, D] of each sample, as stored
    texts: list[torch.Tensor] = field(default_factory=list)  # float32 [captions, D] of each sample, as stored

    @property
    def store(self) -> FeatureStore:
        return FeatureStore(self.path)


def make_store(
    path: Path,
    *,
    views: int = 0,
    dtype: str = "float32",
    sizes: dict[str, list[int]] | None = None,
) -> Made:
    """Write a store of the parts image, text and ids, as `Content` makes it."""
    parts = {"image": PartInfo(8, dtype, "view"), "text": PartInfo(8, dtype, "caption")}
    content = Content(sizes or SIZES, {**parts, "ids": PartInfo(4, "int32", "caption")}, views)
    content.make(path)
    made, k = Made(path), max(views, 1)
    for source, shard, chunk in content.chunks():
        rows = content.rows(source, shard, chunk)
        (keys, captions, _), samples = rows["texts"], rows["samples"]
        images, texts = decode_rows(rows["image"]), decode_rows(rows["text"])
        for i in samples["used"].nonzero()[0].tolist():
            made.names.append((source, f"{shard:05d}.tar", keys[i]))
            made.captions.append(captions[i])
            made.images.append(images[i * k : (i + 1) * k])
            first = int(samples["start"][i])
            made.texts.append(texts[first : first + len(captions[i])])
    return made


@dataclass(frozen=True)
class TensorRows:
    """Rows of features that are in memory."""

    features: torch.Tensor  # float32 [N, D]
    block: int = BLOCK

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def __len__(self) -> int:
        return len(self.features)

    def blocks(self, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(start, len(self), self.block):
            yield first, self.features[first : first + self.block]
