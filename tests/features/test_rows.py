"""Rows of a store in order, their names, and the scores of pictures with captions, against what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clipstream.errors import SettingsError
from clipstream.features import search as module
from clipstream.features.search import StoredRows, pair_scores
from tests.support.stored_features import Made, make_store

CASES = [(0, "float32"), (3, "float16"), (2, "int8"), (1, "bfloat16")]


def expected(made: Made, part: str) -> torch.Tensor:
    """The rows, float32 [N, D]."""
    if part == "text":
        return F.normalize(torch.cat(made.texts), dim=1)
    return F.normalize(torch.stack([F.normalize(own, dim=1).mean(dim=0) for own in made.images]), dim=1)


@pytest.mark.parametrize("block", [1, 4, 16384])
@pytest.mark.parametrize(("views", "dtype"), CASES[1:3])
def test_rows_are_those_of_the_samples_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, dtype: str, block: int
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    made = make_store(tmp_path / "store", views=views, dtype=dtype)
    for part in ("image", "text"):
        rows, wanted = StoredRows(made.store, part), expected(made, part)
        assert (len(rows), rows.width) == wanted.shape
        for start in (0, 1, 7, len(rows) - 1, len(rows)):
            found = list(rows.blocks(start))
            firsts = start + np.cumsum([0, *(len(rows) for _, rows in found)])[:-1]
            assert [first for first, _ in found] == firsts.tolist()
            features = torch.cat([torch.zeros(0, rows.width), *(block for _, block in found)])
            assert torch.allclose(features, wanted[start:], atol=1e-6)
        some = [len(rows) - 1, 0, 3]
        assert torch.allclose(rows.gather(some), wanted[some], atol=1e-6)


def test_names_of_pictures_and_captions(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store")
    store = made.store
    names = StoredRows(store).names(list(range(len(made.names)))[::-1])[::-1]
    assert [(name.source, name.shard, name.key) for name in names] == made.names
    assert [name.captions for name in names] == made.captions
    rows = StoredRows(store, "text")
    every = [
        (*name, i, [text]) for name, own in zip(made.names, made.captions, strict=True) for i, text in enumerate(own)
    ]
    assert [tuple(name) for name in rows.names(range(len(rows)))] == every
    rows = StoredRows(store)
    for name in ("00002.tar/2/000004", "0/000000", "0/00000"):
        found = [i for i, (_, shard, key) in enumerate(made.names) if name in (key, f"{shard}/{key}")]
        assert rows.find(name) == found


@pytest.mark.parametrize(("views", "dtype"), CASES)
@pytest.mark.parametrize("block", [2, 16384])
def test_scores_are_the_cosines_of_pictures_and_their_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, dtype: str, block: int
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    made = make_store(tmp_path / "store", views=views, dtype=dtype)
    wanted = [
        float((F.normalize(image.double(), dim=1) @ F.normalize(text.double(), dim=0)).mean())
        for image, texts in zip(made.images, made.texts, strict=True)
        for text in texts
    ]
    found = list(pair_scores(made.store))
    assert torch.allclose(torch.cat([some.scores for some in found]).double(), torch.tensor(wanted).double(), atol=1e-6)
    keys = [some.shard.source.keys(some.shard.number)[i] for some in found for i in some.samples.tolist()]
    assert keys == [name[2] for name, own in zip(made.names, made.captions, strict=True) for _ in own]
    assert [i for some in found for i in some.choices.tolist()] == [i for own in made.captions for i in range(len(own))]


def test_parts_without_features_and_identities(tmp_path: Path) -> None:
    one, same, other = (make_store(tmp_path / f"{i}", dtype=d).store for i, d in enumerate(["float32"] * 2 + ["int8"]))
    for part in ("ids", "imag"):
        with pytest.raises(SettingsError, match=f"no features '{part}', only image, text"):
            StoredRows(one, part)
    assert StoredRows(one).identity() == StoredRows(same).identity() != StoredRows(other).identity()
    assert StoredRows(one).identity() != StoredRows(one, "text").identity()
