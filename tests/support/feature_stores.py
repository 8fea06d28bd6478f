"""Feature stores of small shards, made sample by sample; features are functions of the sample's key or caption."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import ImageSpec, checksum
from clipstream.data.decode.captions import candidates, image_bytes
from clipstream.data.loader.reading_recipe import ModelInputs, build_recipe
from clipstream.data.order.rng import SampleRNG, mix
from clipstream.data.order_plan import stable_names
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import Dropped, ShardError
from clipstream.features.manifest import (
    IDS,
    SAMPLES,
    Manifest,
    PartInfo,
    ShardInfo,
    SourceInfo,
    encode_rows,
    sample_dtype,
)
from clipstream.features.writer import Chunk, StoreWriter, Texts
from clipstream.storage.shard_cache import ShardCache
from tests.support.pictures import ByteTokenizer

WIDTH = 6


def feature(text: str) -> np.ndarray[Any, Any]:
    """The feature float32 [6] of a key or a caption: numbers that float16 holds."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:WIDTH], np.uint8).astype(np.float32) / 256


def view_key(source: str, shard: int, number: int, view: int) -> int:
    return mix(11, len(source), shard, number, view)


def write_store(
    path: Path,
    settings: DataSettings,
    parts: Sequence[str] = ("image", "text", IDS),
    *,
    views: int = 0,
    zstd: bool = False,
    chunk_rows: int = 4096,
    reverse: bool = False,
) -> str:
    """The store of all sources of the settings.

    Args:
        parts: `ids`, and names that end in `image` (of keys and views) or `text` (of captions).
        reverse: have the shards in the opposite order.
    """
    infos, sources, paths = {}, {}, {}
    for name, one in sorted(settings.sources.items()):
        source = sources[name] = Source(one, SourceContext(ShardCache(None)))
        shards = list(zip(stable_names(source.names), source.names, strict=True))
        paths[name] = len(getattr(one.caption, "paths", [""]))
        names = [ShardInfo(stable) for stable, _ in (shards[::-1] if reverse else shards)]
        infos[name] = SourceInfo(tuple(names), getattr(one.caption, "weights", None), paths=paths[name])
    made = {}
    for part in parts:
        if part == IDS:
            made[part] = PartInfo(ByteTokenizer.context_length, "uint16", "caption", zstd=zstd)
        else:
            per: Any = "view" if part.endswith("image") else "caption"
            made[part] = PartInfo(WIDTH, "float16" if part.endswith("image") else "float32", per, zstd=zstd)
    draft = Manifest(infos, made, chunk_rows=chunk_rows, views=views)
    writer = StoreWriter(path, draft)
    for name, one in settings.sources.items():
        reader = build_recipe(name, one, ModelInputs(ByteTokenizer(), ImageSpec((16, 16))), settings)
        names_of = sources[name].names[::-1] if reverse else sources[name].names
        for number, url in enumerate(names_of):
            try:
                shard = sources[name].open(url)
            except (ShardError, OSError) as error:
                writer.write_empty(name, number, str(error))
                continue
            stable = number if not reverse else len(names_of) - 1 - number  # views do not depend on the order
            _write_shard(writer, reader, shard, name, number, stable, views, paths[name])
            shard.close()
    writer.finish()
    return str(path)


def _write_shard(
    writer: StoreWriter, reader: Any, shard: Any, name: str, number: int, stable: int, views: int, paths: int
) -> None:
    total, rows_of = len(shard.index.samples), writer.manifest.chunk_rows
    if not total:
        writer.write_empty(name, number)
    for chunk in range(-(-total // rows_of)):
        refs = shard.index.samples[chunk * rows_of : (chunk + 1) * rows_of]
        samples = np.zeros(len(refs), sample_dtype(views, paths))
        captions: list[list[str]] = []
        reasons, pictures = [], []
        for i, ref in enumerate(refs):
            at = chunk * rows_of + i
            reason, texts, data = "", [[]] * paths, b""
            try:
                raw = {"__key__": ref.key, "__url__": "", **shard.load(ref, reader.members)}
                if reader.transform is not None:
                    raw = reader.transform(raw)
                texts, data = candidates(reader.caption, raw), image_bytes(raw, reader.image_key)
                reader.image(data, SampleRNG(1), None)
            except Dropped as drop:
                reason, texts = f"{drop.reason}: {drop.detail}" if drop.detail else drop.reason, [[]] * paths
            samples[i]["used"] = not reason
            samples[i]["pictures"] = 0 if reason else checksum(data)
            samples[i]["start"] = sum(map(len, captions))
            samples[i]["counts"] = [len(some) for some in texts]
            if views:
                samples[i]["views"] = [view_key(name, stable, at, view) for view in range(views)]
            captions.append([text for some in texts for text in some])
            reasons.append(reason)
            pictures += [feature(f"{ref.key} {view}") for view in range(max(views, 1))]
        made: dict[str, Any] = {SAMPLES: samples}
        flat = [text for own in captions for text in own]
        for part, info in writer.manifest.parts.items():
            if part == IDS:
                rows = torch.from_numpy(ByteTokenizer().encode(flat).astype(np.uint16))
            elif info.rows_per == "view":
                rows = encode_rows(torch.from_numpy(np.stack(pictures)), info.dtype)
            else:
                features = np.stack([feature(text) for text in flat]) if flat else np.zeros((0, WIDTH), np.float32)
                rows = encode_rows(torch.from_numpy(features), info.dtype)
            made[part] = rows
        writer.write(Chunk(name, number, chunk, total), made, Texts([ref.key for ref in refs], captions, reasons))
