"""A small store of features, and the samples in use that it holds, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from clipstream.features.manifest import PartInfo, decode_rows
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


def make_rows(n: int, width: int, kind: str, seed: int) -> torch.Tensor:
    """Unit rows: random ones, a few different ones repeated, or ones that differ by less than float32 resolves."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "repeated":
        few = F.normalize(torch.randn(3, width, generator=draw), dim=1)
        return few[torch.randint(3, (n,), generator=draw)]
    if kind == "close":
        base = F.normalize(torch.randn(width, generator=draw), dim=0)
        return F.normalize(base + 1e-6 * torch.randn(n, width, generator=draw), dim=1)
    return F.normalize(torch.randn(n, width, generator=draw), dim=1)
