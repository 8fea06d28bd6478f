"""What a store gives back is what was written, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clipstream.features.codec import decode_rows
from clipstream.features.manifest import keys_digest
from clipstream.features.region import Region
from clipstream.features.store import FeatureStore
from tests.support.features import PARTS, Content


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check(store: FeatureStore, content: Content) -> None:
    """Every row, key and caption of a store, and rows at random over all shards."""
    for name, sizes in content.sizes.items():
        source = store.source(name)
        numbers, rows = [], {part: [] for part in content.parts}
        for shard, size in enumerate(sizes):
            assert source.samples_of(shard) == size
            source.hold(shard)
            keys: list[str] = []
            captions: list[list[str]] = []
            reasons: list[str] = []
            for chunk in range(-(-size // content.chunk_rows)):
                made = content.rows(name, shard, chunk)
                first = source.base(shard) + chunk * content.chunk_rows
                own = np.arange(first, first + len(made["samples"]))
                numbers.append(own)
                assert source.sample_rows(own).tobytes() == made["samples"].tobytes()
                for found, texts in zip((keys, captions, reasons), made["texts"], strict=True):
                    found += texts
                for part in content.parts:
                    rows[part].append(made[part])
            assert (source.keys(shard), source.captions(shard), source.reasons(shard)) == (keys, captions, reasons)
            assert source.has_keys(shard, keys) and (not keys or not source.has_keys(shard, [*keys[1:], "other"]))
            assert source.shards[shard].keys == keys_digest(keys, content.chunk_rows)
        order = np.random.default_rng(0).permutation(np.concatenate(numbers))
        counts = source.sample_rows(order)["counts"].sum(axis=1)
        everything = {part: torch.cat(found) for part, found in rows.items()}
        position = {number: i for i, number in enumerate(np.concatenate(numbers).tolist())}
        at = np.array([position[number] for number in order.tolist()])
        unordered = source.sample_rows(np.concatenate(numbers))["counts"].sum(axis=1)
        starts = np.cumsum(unordered) - unordered
        for part, info in content.parts.items():
            if info.rows_per == "view":
                views = np.arange(len(order)) % max(content.views, 1)
                wanted = torch.from_numpy(at * max(content.views, 1) + views)
                found = source.gather(part, source.view_rows(order, views))
            else:
                some = np.flatnonzero(counts)
                last = counts[some] - 1
                wanted = torch.from_numpy(starts[at[some]] + last)
                found = source.gather(part, source.caption_rows(order[some], last))
            assert bits(found) == bits(everything[part].view(torch.uint8)[wanted])
            out = torch.empty_like(found)
            assert source.gather(part, np.zeros(0, np.int64)).shape == (0, found.shape[1])
            if info.rows_per == "view":
                assert source.gather(part, source.view_rows(order, views), out) is out and bits(out) == bits(found)
            blocks = [(shard, first, block) for own, shard, first, block in store.blocks(part, 1000) if own == name]
            if info.dtype not in ("uint16", "int32"):
                assert torch.equal(torch.cat([block for *_, block in blocks]), decode_rows(everything[part]))
        for shard in range(len(sizes)):
            source.release(shard)
        with pytest.raises(IndexError, match="not held"):
            source.sample_rows(order[:1])


@pytest.mark.parametrize("views", [0, 1, 3])
@pytest.mark.parametrize("zstd", [False, True])
def test_a_mapped_store_gives_back_what_was_written(tmp_path: Path, views: int, zstd: bool) -> None:
    parts = {name: replace(part, zstd=zstd) for name, part in PARTS.items()}
    content = Content(parts=parts, views=views)
    content.make(tmp_path / "store")
    check(FeatureStore.open(tmp_path / "store"), content)
    assert not list((tmp_path / "store").rglob("*.tmp"))


def test_a_chunk_file_is_safetensors_and_its_body_begins_at_a_page(tmp_path: Path) -> None:
    content = Content(sizes={"train": [4100]})
    content.make(tmp_path)
    path = tmp_path / "image/train/00000-0000.safetensors"
    rows = content.rows("train", 0, 0)["image"]
    assert torch.equal(load_file(path)["rows"], rows)
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0
    store = FeatureStore.open(tmp_path)
    with store.source("train").holding(0):
        pass


@pytest.mark.parametrize("page", [4096, 16384])
def test_a_region_shows_the_files_in_its_slots(tmp_path: Path, page: int) -> None:
    """With pages larger than the body's alignment, files are read instead."""
    region, content = Region(3, 8192, page), np.random.default_rng(0).integers(0, 256, 12288, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    with open(tmp_path / "file", "rb") as file:
        region.map(2, file.fileno(), 4096, 8192)
        region.map(0, file.fileno(), 8192, 100)
    assert region.array[16384:].tobytes() == content[4096:].tobytes()
    assert region.array[:100].tobytes() == content[8192:8292].tobytes()
    region.unmap(2)
    assert region.array[:100].tobytes() == content[8192:8292].tobytes()
