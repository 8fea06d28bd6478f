"""Stores behind a web server are read as local ones, through the cache of shards."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clipstream.errors import DataError, SettingsError
from clipstream.features.store import FeatureStore
from tests.support.features import PARTS, Content
from tests.support.sites import Site


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
            store = FeatureStore.open(site.root, cache=cache)
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
            FeatureStore.open(site.root).source("train").hold(1)
        with pytest.raises((DataError, SettingsError), match=r"store\.json"):
            FeatureStore.open(f"{site.root}/elsewhere")
