"""What a store gives back is what was written, bit for bit; from a folder and from a web server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import (
    FEATURE_DTYPES,
    Manifest,
    PartInfo,
    ShardInfo,
    SourceInfo,
    decode_rows,
    encode_rows,
    is_finite,
    keys_digest,
    stored_width,
)
from clipstream.features.store import FeatureStore
from tests.support.features import PARTS, Content, read_all
from tests.support.sites import Site


def check_gathered(store: FeatureStore, content: Content) -> None:
    """Rows at random over all shards of a source, with and without a place for them."""
    source, rng = store.source("train"), np.random.default_rng(0)
    for shard, size in enumerate(content.sizes["train"]):
        source.hold(shard)
        keys = source.keys(shard)
        assert source.samples_of(shard) == size and source.has_keys(shard, keys)
        assert not keys or not source.has_keys(shard, [*keys[1:], "other"])
        assert source.shards[shard].keys == keys_digest(keys, content.chunk_rows)
    numbers = np.concatenate([source.base(n) + np.arange(size) for n, size in enumerate(content.sizes["train"])])
    order = rng.permutation(numbers)
    counts = source.sample_rows(order)["counts"].sum(axis=1)
    for part, info in content.parts.items():
        if info.rows_per == "view":
            take, place = source.view_rows, np.arange(len(order)) % max(content.views, 1)
        else:
            take, place = source.caption_rows, np.maximum(counts - 1, 0)
        some = np.flatnonzero((counts > 0) | (info.rows_per == "view"))
        rows = take(order[some], place[some])
        found = source.gather(part, rows)
        one_by_one = [source.gather(part, rows[i : i + 1]) for i in range(0, len(rows), 97)]
        assert torch.equal(found[::97].view(torch.uint8), torch.cat(one_by_one).view(torch.uint8))
        out = torch.empty_like(found)
        assert source.gather(part, rows, out) is out and torch.equal(out.view(torch.uint8), found.view(torch.uint8))
        assert source.gather(part, rows[:0]).shape == (0, found.shape[1])
    for shard in range(len(content.sizes["train"])):
        source.release(shard)
    with pytest.raises(IndexError, match="not held"):
        source.sample_rows(order[:1])


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("views", [0, 1, 3])
def test_a_store_gives_back_what_was_written(tmp_path: Path, views: int, zstd: bool) -> None:
    parts = {name: replace(part, zstd=zstd) for name, part in PARTS.items()}
    content = Content(parts=parts, views=views)
    content.make(tmp_path / "store")
    assert read_all(tmp_path / "store") == content.expected()
    check_gathered(FeatureStore(tmp_path / "store"), content)
    assert not list((tmp_path / "store").rglob("*.tmp"))
    if not zstd:  # a chunk file is safetensors whose body begins at a page
        path = tmp_path / "store/image/train/00000-0000.safetensors"
        assert torch.equal(load_file(path)["rows"], content.rows("train", 0, 0)["image"])
        assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0


@pytest.mark.parametrize("zstd", [False, True])
def test_a_remote_store(tmp_path: Path, zstd: bool) -> None:
    parts = {name: replace(part, zstd=zstd) for name, part in PARTS.items()}
    content = Content(sizes={"train": [40, 9]}, parts=parts)
    content.make(tmp_path / "made")
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    with closing(Site()) as site:
        site.bodies = {path.relative_to(tmp_path / "made").as_posix(): path.read_bytes() for path in files}
        for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):
            before = sum(count for name, count in site.asked.items() if name.startswith("GET"))
            store = FeatureStore(site.root, cache=cache)
            source = store.source("train", ["image"])
            with source.holding(0):
                found = source.gather("image", source.view_rows(np.arange(40), np.full(40, 1)))
            assert found.tolist() == content.rows("train", 0, 0)["image"][1::2].tolist()
            assert source.keys(1) == content.rows("train", 1, 0)["texts"][0]
        again = sum(count for name, count in site.asked.items() if name.startswith("GET")) - before
        assert again == 0, "the last one had everything in its cache"
        gone = "image/train/00001-0000.safetensors"
        site.bodies = {name: data for name, data in site.bodies.items() if not name.startswith(gone)}
        with pytest.raises(DataError, match=rf"{gone}.*: http_404.*clipstream precompute"):
            FeatureStore(site.root).source("train").hold(1)
        with pytest.raises((DataError, SettingsError), match=r"store\.json"):
            FeatureStore(f"{site.root}/elsewhere")


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../../x", "%2E%2E", "...", "a\x00"])
def test_names_of_sources_stay_in_the_store_and_shards_may_have_any_name(tmp_path: Path, name: str) -> None:
    Content(sizes={name: [5], "train": [5]}).make(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    folders = [path.parent.parent.name for path in (tmp_path / "s").glob("*/*/*.safetensors")]
    assert sorted(folders) == sorted([*PARTS, "samples", "texts"] * 2)
    assert len(FeatureStore(tmp_path / "s").source(name).keys(0)) == 5
    source = SourceInfo((ShardInfo("a\udcff.tar", 0),))
    manifest = Manifest({name: source}, {"image": PartInfo(4, "float16", "view")}, complete=True)
    (tmp_path / "store.json").write_bytes(manifest.to_bytes())
    assert FeatureStore(tmp_path).manifest == manifest


ROWS = st.lists(st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6), min_size=1, max_size=5)


@given(ROWS)
def test_rows_are_rounded_to_the_type_and_int8_elements_within_half_of_the_rows_scale(
    values: list[list[float]],
) -> None:
    features = torch.tensor(values)
    for dtype in ("float32", "float16", "bfloat16"):
        rows = encode_rows(features, dtype)
        assert rows.dtype == FEATURE_DTYPES[dtype] and rows.shape == features.shape
        decoded = decode_rows(rows)
        assert decoded.dtype == torch.float32
        assert torch.equal(encode_rows(decoded, dtype), rows), "what was stored once is exact"
        assert torch.equal(decoded, features.to(FEATURE_DTYPES[dtype]).float())
    rows = encode_rows(features, "int8")
    assert rows.dtype == torch.int8 and rows.shape == (len(values), 10)
    scale = rows[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    assert torch.equal(scale[:, 0], features.abs().amax(dim=1) / 127)
    error = (decode_rows(rows) - features).abs()
    normal = (features.abs().amax(dim=1, keepdim=True) > 1e-30).expand_as(error)  # below, the scale is subnormal
    assert (error[normal] <= (scale * (0.5 + 1e-4)).expand_as(error)[normal]).all()
    assert torch.isfinite(error).all() and is_finite(rows)


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_sizes_and_rows_that_are_not_finite(dtype: str) -> None:
    rows = encode_rows(torch.ones(2, 768), dtype)
    assert rows.shape == (2, stored_width(768, dtype)) and rows.nbytes == 2 * PartInfo(768, dtype, "sample").row_bytes
    assert decode_rows(encode_rows(torch.zeros(2, 3), dtype)).tolist() == [[0.0] * 3] * 2
    assert is_finite(rows) and is_finite(rows[:0])
    for value in (float("nan"), float("inf")):
        features = torch.ones(3, 4)
        features[1, 2] = value
        assert not is_finite(encode_rows(features, dtype))
