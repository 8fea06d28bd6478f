"""A small feature store with made-up content."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.features.manifest import ID_DTYPES, Manifest, PartInfo, ShardInfo, SourceInfo, encode_rows, sample_dtype
from clipstream.features.store import FeatureStore
from clipstream.features.writer import Chunk, StoreWriter, Texts

PARTS = {
    "image": PartInfo(12, "float16", "view", {"model": "a"}),
    "text": PartInfo(12, "int8", "caption", {"model": "a"}),
    "ids": PartInfo(5, "uint16", "caption"),
    "t.image": PartInfo(8, "bfloat16", "view", {"model": "t"}, logit_scale=100.0),
}


@dataclass
class Content:
    """What a store is made of, a function of `seed`: each sample has 0 to 3 captions; some are dropped.

    Attributes:
        sizes: samples of each shard by source.
    """

    sizes: dict[str, list[int]] = field(default_factory=lambda: {"train": [5000, 0, 7], "more": [3]})
    parts: dict[str, PartInfo] = field(default_factory=lambda: dict(PARTS))
    views: int = 2
    chunk_rows: int = 4096
    seed: int = 0

    def draft(self) -> Manifest:
        """The draft that a writer takes."""
        sources = {
            name: SourceInfo(tuple(ShardInfo(f"{n:05d}.tar") for n in range(len(sizes))), (1.0, 2.0), {"path": "a"}, 2)
            for name, sizes in self.sizes.items()
        }
        return Manifest(sources, self.parts, self.chunk_rows, self.views)

    def chunks(self) -> list[tuple[str, int, int]]:
        """(source, shard, chunk) of all chunks."""
        return [
            (source, shard, chunk)
            for source, sizes in self.sizes.items()
            for shard, size in enumerate(sizes)
            for chunk in range(-(-size // self.chunk_rows))
        ]

    def write(self, writer: StoreWriter, source: str, shard: int, chunk: int) -> None:
        """Write what is missing of a chunk."""
        made = self.rows(source, shard, chunk)
        rows = {part: made[part] for part in ("samples", *self.parts)}
        writer.write(Chunk(source, shard, chunk, self.sizes[source][shard]), rows, Texts(*made["texts"]))

    def rows(self, source: str, shard: int, chunk: int) -> dict[str, Any]:
        """Content of a chunk by part."""
        count = min(self.chunk_rows, self.sizes[source][shard] - chunk * self.chunk_rows)
        key = [self.seed, len(source), shard, chunk]
        rng = np.random.default_rng(key)
        samples = np.zeros(count, sample_dtype(self.views, 2))
        samples["used"] = rng.random(count) < 0.9
        samples["pictures"] = rng.integers(-(2**62), 2**62, count)
        samples["counts"] = rng.integers(0, 3, (count, 2)) * samples["used"][:, None]
        counts = samples["counts"].sum(axis=1)
        samples["start"] = np.cumsum(counts) - counts
        samples["views"] = rng.integers(0, 2**64, (count, self.views), dtype=np.uint64)
        first = chunk * self.chunk_rows
        keys = [f"{shard}/{'é-' * (i == 1)}{first + i:06d}" for i in range(count)]
        captions = [[f"text {i} {j}" for j in range(c)] for i, c in enumerate(counts.tolist())]
        reasons = ["" if used else "no_caption" for used in samples["used"]]
        made: dict[str, Any] = {"samples": samples, "texts": (keys, captions, reasons)}
        for number, (name, part) in enumerate(self.parts.items()):
            generator = torch.Generator().manual_seed(hash((*key, number)))
            n = int(counts.sum()) if part.rows_per == "caption" else count * max(self.views, 1)
            if part.dtype in ID_DTYPES:
                made[name] = torch.randint(0, 40000, (n, part.width), generator=generator).to(ID_DTYPES[part.dtype])
            else:
                features = torch.randn((n, part.width), generator=generator)
                made[name] = encode_rows(torch.nn.functional.normalize(features, dim=1), part.dtype)
        return made

    def expected(self) -> list[bytes]:
        """What `read_all` finds of it."""
        found = []
        for source, sizes in self.sizes.items():
            for shard, size in enumerate(sizes):
                made = [self.rows(source, shard, chunk) for chunk in range(-(-size // self.chunk_rows))]
                found.append(b"".join(one["samples"].tobytes() for one in made))
                for part in self.parts:
                    found.append(b"".join(one[part].contiguous().view(torch.uint8).numpy().tobytes() for one in made))
                texts = ([text for one in made for text in one["texts"][i]] for i in range(3))
                found.append(repr(tuple(texts)).encode())
        return found

    def make(self, path: Path) -> Manifest:
        """Write the whole store."""
        with StoreWriter(path, self.draft()) as writer:
            return self.fill(writer)

    def fill(self, writer: StoreWriter) -> Manifest:
        """Write all that is missing of the store."""
        for source, shard, chunk in self.chunks():
            self.write(writer, source, shard, chunk)
        for source, sizes in self.sizes.items():
            for shard, size in enumerate(sizes):
                if not size:
                    writer.write_empty(source, shard, "missing")
        return writer.finish()


def read_all(path: Path) -> list[bytes]:
    """All that can be read of a store."""
    found = []
    store = FeatureStore(path)
    for name in store.manifest.sources:
        source = store.source(name)
        for shard in range(len(source.shards)):
            with source.holding(shard):
                numbers = source.base(shard) + np.arange(source.samples_of(shard))
                samples = source.sample_rows(numbers)
                found.append(samples.tobytes())
                for part in source.parts:
                    if store.manifest.per_caption(part):
                        counts = samples["counts"].sum(axis=1)
                        choices = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
                        rows = source.caption_rows(np.repeat(numbers, counts), choices)
                    else:
                        views = store.manifest.rows_of(part)
                        rows = source.view_rows(np.repeat(numbers, views), np.tile(np.arange(views), len(numbers)))
                    found.append(source.gather(part, rows).view(torch.uint8).numpy().tobytes())
            found.append(
                repr(
                    (source.keys(shard), [captions for _, captions in source.texts(shard)], source.reasons(shard))
                ).encode()
            )
    return found
