"""FAISS indexes: the exact one agrees with the exact search, files are made once and again for other features."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.features.analysis.faiss_index import EXTRA, default_factory, open_index, recall
from clipstream.features.analysis.search import TensorRows, search

THERE = importlib.util.find_spec("faiss") is not None
needs_faiss = pytest.mark.skipif(not THERE, reason="FAISS is not installed")


def make_rows(n: int = 3000) -> TensorRows:
    draw = torch.Generator().manual_seed(0)
    return TensorRows(F.normalize(torch.randn(n, 16, generator=draw), dim=1), 700)


@needs_faiss
def test_a_flat_index_finds_what_the_exact_search_finds(tmp_path: Path) -> None:
    rows = make_rows()
    index = open_index(rows, "Flat", tmp_path / "a" / "flat.faiss", {"store": "1"})
    found, exact = index.search(rows.features[:50], 10), search(rows, rows.features[:50], 10)
    assert recall(found, exact) == 1
    assert torch.allclose(found.scores, exact.scores, atol=1e-5)


@needs_faiss
def test_the_default_index_has_a_high_recall_and_is_made_once(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "index.faiss"
    made = open_index(rows, "", path, {"store": "1"})
    assert made.factory == "IVF76,Flat"
    exact = search(rows, rows.features[:100], 1)
    assert recall(made.search(rows.features[:100], 1), exact) == 1  # each query is a row
    written = path.stat().st_mtime_ns
    again = open_index(rows, "", path, {"store": "1"})
    assert path.stat().st_mtime_ns == written
    assert torch.equal(again.search(rows.features[:9], 5).rows, made.search(rows.features[:9], 5).rows)
    open_index(rows, "", path, {"store": "2"})
    assert path.stat().st_mtime_ns != written


@needs_faiss
def test_wrong_factories_and_broken_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    with pytest.raises(SettingsError, match="FAISS cannot make it"):
        open_index(make_rows(), "Nonsense7", path, {})
    open_index(make_rows(), "Flat", path, {})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SettingsError, match="remove it"):
        open_index(make_rows(), "Flat", path, {})


@pytest.mark.skipif(THERE, reason="FAISS is installed")
def test_without_faiss_the_error_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        open_index(make_rows(), "", tmp_path / "index.faiss", {})
    assert str(caught.value) == EXTRA


@pytest.mark.parametrize(("rows", "factory"), [(1, "Flat"), (77, "Flat"), (100, "IVF2,Flat"), (10**6, "IVF4000,Flat")])
def test_lists_of_the_default_index_have_39_rows_or_more(rows: int, factory: str) -> None:
    assert default_factory(rows) == factory
