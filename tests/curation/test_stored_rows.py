"""Stored rows, scores, exact search and k-means, against float64 products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipstream.curation.stores import search as module
from clipstream.curation.stores.search import TensorRows, gather, kmeans, pair_scores, search
from clipstream.errors import SettingsError
from clipstream.features.stored_rows import StoredRows
from tests.support.stored_features import Made, make_rows, make_store


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    queries=st.integers(1, 9),
    k=st.integers(1, 40),
    block=st.integers(1, 300),
    tile=st.sampled_from([64, module.TILE]),
    width=st.sampled_from([1, 5, 64]),
    kind=st.sampled_from(["random", "repeated", "close"]),
    seed=st.integers(0, 1000),
)
@example(n=300, queries=5, k=3, block=120, tile=64, width=64, kind="close", seed=1)
def test_search_is_that_of_float64_products(
    n: int, queries: int, k: int, block: int, tile: int, width: int, kind: str, seed: int
) -> None:
    """Rounded to float32; of equal scores, the first rows."""
    features = make_rows(n, width, kind, seed)
    wanted = torch.cat([make_rows(queries, width, "random", seed + 1), features[:1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", tile)
        found = search(TensorRows(features, block), wanted, k)
    scores = torch.stack([(features.double() * query.double()).sum(dim=1) for query in wanted]).float()
    values, rows = scores.sort(dim=1, descending=True, stable=True)
    assert found.scores.dtype == torch.float32 and found.rows.dtype == torch.int64
    assert torch.equal(found.scores, values[:, :k]) and torch.equal(found.rows, rows[:, :k])


def blobs(k: int, each: int, noise: float) -> torch.Tensor:
    """Rows around k directions, one after the other."""
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(k, 32, generator=draw), dim=1).repeat_interleave(each, dim=0)
    return F.normalize(centres + noise * torch.randn(k * each, 32, generator=draw), dim=1)


def test_clusters_that_are_apart_are_found() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    features = blobs(5, 200, noise=0.01)[order]
    found = kmeans(TensorRows(features, 300), 5, seed=3)
    assert int(found.sizes.sum()) == 1000
    assert all(after >= before - 1e-9 for before, after in zip(found.means, found.means[1:], strict=False))
    assert found.sizes.tolist() == [200] * 5
    assert len(set(zip((order // 200).tolist(), found.assign(features)[1].tolist(), strict=True))) == 5


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 12),
    block=st.integers(1, 200),
    seed=st.integers(0, 100),
)
def test_the_end_is_a_fixed_point_of_lloyds_algorithm(k: int, block: int, seed: int) -> None:
    features = F.normalize(torch.randn(150, 6, generator=torch.Generator().manual_seed(seed)), dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ITERATIONS", 200)
        patch.setattr(module, "TOLERANCE", 0.0)
        found = kmeans(TensorRows(features, block), k, seed=seed)
    cosines = features.double() @ found.centroids.double().T
    labels = cosines.argmax(dim=1)
    assert torch.bincount(labels, minlength=k).tolist() == found.sizes.tolist()
    assert found.means[-1] == pytest.approx(float(cosines.max(dim=1).values.mean()), abs=1e-6)
    for cluster in range(k):
        mean = features[labels == cluster].double().mean(dim=0)
        assert torch.allclose(F.normalize(mean, dim=0), found.centroids[cluster].double(), atol=1e-3)


def test_the_seed_decides() -> None:
    features = blobs(20, 30, noise=0.3)
    one, same, other = (kmeans(TensorRows(features), 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.centroids, same.centroids) and one.means == same.means
    assert not torch.equal(one.centroids, other.centroids)


def test_repeated_rows_and_numbers_of_clusters_that_do_not_fit() -> None:
    found = kmeans(TensorRows(torch.eye(3).repeat(10, 1), 7), 6)  # more than there are different rows
    assert found.means[-1] == pytest.approx(1.0)
    assert int(found.sizes.sum()) == 30 and torch.isfinite(found.centroids).all()
    for k in (0, 4):
        with pytest.raises(SettingsError, match="of 3 rows"):
            kmeans(TensorRows(torch.eye(3)), k)


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
        assert torch.allclose(gather(rows, some), wanted[some], atol=1e-6)


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
    assert [name[:5] for name in rows.names(range(len(rows)))] == every
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


def test_parts_without_features(tmp_path: Path) -> None:
    one = make_store(tmp_path / "store").store
    for part in ("ids", "imag"):
        with pytest.raises(SettingsError, match=f"no features '{part}', only image, text"):
            StoredRows(one, part)
