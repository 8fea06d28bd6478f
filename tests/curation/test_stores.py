"""Stored rows, exact search, k-means, scores, near-duplicates, doubt and hard negatives, against float64 products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipstream.curation import stores
from clipstream.curation.stores import (
    PairRows,
    TensorRows,
    cluster,
    doubts,
    find_nearest_preferred,
    gather,
    hard_negatives,
    kmeans,
    near_duplicates,
    nearest_in_clusters,
    pair_scores,
    sample_scores,
    search,
)
from clipstream.errors import DataError, SettingsError
from clipstream.features.stored_rows import StoredRows
from tests.support.stored_features import Made, make_rows, make_store


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    queries=st.integers(1, 9),
    k=st.integers(1, 40),
    block=st.integers(1, 300),
    tile=st.sampled_from([64, stores.TILE]),
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
        patch.setattr(stores, "TILE", tile)
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
        patch.setattr(stores, "ITERATIONS", 200)
        patch.setattr(stores, "TOLERANCE", 0.0)
        found = kmeans(TensorRows(features, block), k, seed=seed)
    cosines = features.double() @ found.centroids.double().T
    labels = cosines.argmax(dim=1)
    assert torch.bincount(labels, minlength=k).tolist() == found.sizes.tolist()
    assert found.means[-1] == pytest.approx(float(cosines.max(dim=1).values.mean()), abs=1e-6)
    for number in range(k):
        mean = features[labels == number].double().mean(dim=0)
        assert torch.allclose(F.normalize(mean, dim=0), found.centroids[number].double(), atol=1e-3)


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


def rows_in_use(made: Made, part: str) -> torch.Tensor:
    """The rows, float32 [N, D]."""
    if part == "text":
        return F.normalize(torch.cat(made.texts), dim=1)
    return F.normalize(torch.stack([F.normalize(own, dim=1).mean(dim=0) for own in made.images]), dim=1)


@pytest.mark.parametrize("block", [1, 4, 16384])
@pytest.mark.parametrize(("views", "dtype"), CASES[1:3])
def test_rows_are_those_of_the_samples_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, dtype: str, block: int
) -> None:
    monkeypatch.setattr(stores, "BLOCK", block)
    made = make_store(tmp_path / "store", views=views, dtype=dtype)
    for part in ("image", "text"):
        rows, wanted = StoredRows(made.store, part), rows_in_use(made, part)
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
def test_scores_are_the_cosines_of_pictures_and_their_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, dtype: str
) -> None:
    monkeypatch.setattr(stores, "BLOCK", 2 if views > 1 else 16384)
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


def nearest_cosines(features: torch.Tensor, order: np.ndarray, labels: np.ndarray | None = None) -> np.ndarray:  # type: ignore[type-arg]
    """Each row's largest cosine with a preferred row (of its label), float64 [N]; -inf for none."""
    cosines, ranks = features.double() @ features.double().T, torch.from_numpy(order)
    allowed = ranks[:, None] > ranks[None, :]
    if labels is not None:
        allowed &= torch.from_numpy(labels[:, None] == labels[None, :])
    found: np.ndarray = cosines.masked_fill(~allowed, -torch.inf).amax(dim=1).numpy()  # type: ignore[type-arg]
    return found


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 150),
    block=st.integers(1, 150),
    held=st.integers(1, 20000),
    tile=st.sampled_from([64, stores.TILE]),
    width=st.sampled_from([3, 24]),
    kind=st.sampled_from(["random", "repeated", "close"]),
    shuffled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_nearest_preferred_row_is_that_of_float64_products(
    n: int, block: int, held: int, tile: int, width: int, kind: str, shuffled: bool, seed: int
) -> None:
    features = make_rows(n, width, kind, seed)
    order = np.random.default_rng(seed).permutation(n) if shuffled else np.arange(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "TILE", tile)
        found = find_nearest_preferred(TensorRows(features, block), order, held=held)
    np.testing.assert_allclose(found.cosines, nearest_cosines(features, order), atol=1e-6)
    has = found.rows >= 0
    assert int((~has).sum()) == 1 and (order[found.rows[has]] < order[has]).all()
    cosines = (features[has].double() * features[found.rows[has]].double()).sum(dim=1)
    np.testing.assert_allclose(found.cosines[has], cosines.numpy(), atol=1e-6)
    for threshold in (-1.1, 0.3, 0.9, 0.99999):
        kept = found.find_kept(threshold)
        assert ((kept != np.arange(n)) == (found.cosines >= threshold)).all(), "these rows are dropped"
        assert (kept[kept] == kept).all() and (order[kept] <= order).all()


def test_a_chain_of_pairs_leaves_one_row() -> None:
    angles = torch.arange(2000) * 0.01
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    found = find_nearest_preferred(TensorRows(features, 100), np.arange(2000), held=4000)
    assert not found.find_kept(float(np.cos(0.011))).any()


@pytest.mark.parametrize("held", [1, 30_000, 1 << 30])
def test_within_clusters_all_pairs_are_compared(held: int) -> None:
    draw = torch.Generator().manual_seed(0)
    features = F.normalize(make_rows(40, 16, "random", 0).repeat(20, 1) + 0.1 * torch.randn(800, 16, generator=draw))
    rows = TensorRows(features, 300)
    found = cluster(rows, 7)
    scores, labels = (of.numpy() for of in found.assign(features))
    for order in (None, np.arange(800)):
        nearest = nearest_in_clusters(rows, found, order, held=held)
        by = np.argsort(scores, kind="stable").argsort() if order is None else order
        np.testing.assert_allclose(nearest.cosines, nearest_cosines(features, by, labels), atol=1e-6)
        has = nearest.rows >= 0
        assert int((~has).sum()) == 7 and (labels[nearest.rows[has]] == labels[has]).all()
    one = nearest_in_clusters(rows, cluster(rows, 1), np.arange(800), held=held)
    np.testing.assert_allclose(one.cosines, find_nearest_preferred(rows, np.arange(800)).cosines, atol=1e-6)


def test_scores_of_samples(tmp_path: Path) -> None:
    """Of all samples in use, by source, shard and key; the best caption counts."""
    made = make_store(tmp_path / "store", views=2)
    wanted = [
        float((F.normalize(image.double(), dim=1) @ F.normalize(texts.double(), dim=1).T).mean(dim=0).max())
        if len(texts)
        else np.nan
        for image, texts in zip(made.images, made.texts, strict=True)
    ]
    table = sample_scores(str(made.store.path))
    assert [tuple(row.values())[:3] for row in table.to_pylist()] == made.names
    scores = table["score"].to_numpy()
    assert scores.dtype == np.float32 and np.isnan(scores).sum() == sum(not own for own in made.captions) > 0
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
    rows = StoredRows(made.store)
    features = torch.cat([block for _, block in rows.blocks()])
    by_score = np.argsort(-np.nan_to_num(scores, nan=-2), kind="stable").argsort()
    for keep_by, order in (("first", np.arange(len(rows))), ("score", by_score)):
        found = near_duplicates(rows, keep_by=keep_by).cosines
        np.testing.assert_allclose(found, nearest_cosines(features, order), atol=1e-6)
    some = sample_scores(f"{made.store.path}:duplicate")["score"].to_numpy()
    np.testing.assert_array_equal(some, near_duplicates(rows).cosines)
    with pytest.raises(SettingsError, match="set their number"):
        near_duplicates(rows, keep_by="centroid")


def both(made: Made) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of samples with captions: their rows, features float64 [n, D] of images and texts, and which share captions."""
    which = [i for i, captions in enumerate(made.captions) if captions]
    unit = [F.normalize(F.normalize(made.images[i].double(), dim=1).mean(dim=0), dim=0) for i in which]
    texts = [F.normalize(F.normalize(made.texts[i].double(), dim=1).mean(dim=0), dim=0) for i in which]
    same = torch.tensor([[set(made.captions[i]) == set(made.captions[j]) for j in which] for i in which])
    return torch.tensor(which), torch.stack(unit), torch.stack(texts), same


def mean_of_best(scores: torch.Tensor, k: int, of: torch.Tensor) -> torch.Tensor:
    """Row by row, the mean of `of` at the k largest scores; 0 where all are -inf."""
    best = scores.topk(min(k, scores.shape[1]), dim=1)
    used = best.values.isfinite()
    return (of.gather(1, best.indices) * used).sum(dim=1) / used.sum(dim=1).clamp(min=1)


@pytest.mark.parametrize(("views", "block"), [(0, 16384), (2, 7)])
def test_doubts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, block: int) -> None:
    monkeypatch.setattr(stores, "TILE", 64)
    made = make_store(tmp_path / "store", views=views, sizes={"a": [5, 40], "b/c": [1, 0, 30]})
    monkeypatch.setattr(PairRows.blocks, "__defaults__", (block,))
    rows, images, texts, same = both(made)
    found = doubts(PairRows(made.store), 3)
    assert found.rows.tolist() == rows.tolist()
    cosines, like = images @ texts.T, (texts @ texts.T).masked_fill(same, -torch.inf)
    near = (images @ images.T).fill_diagonal_(-torch.inf)
    wanted = 2 * cosines.diagonal() - mean_of_best(near, 3, cosines)
    wanted += mean_of_best(like, 3, images @ images.T) - mean_of_best(like, 3, cosines.T)
    np.testing.assert_allclose(found.scores, wanted, atol=1e-5)
    np.testing.assert_allclose(found.cosines, cosines.diagonal(), atol=1e-5)
    firsts = same.int().argmax(dim=1)  # the store's equal captions have other features, of which the first ones count
    is_first = firsts == torch.arange(len(rows))
    others = cosines.masked_fill(same | ~is_first, -torch.inf).max(dim=1)
    np.testing.assert_allclose(found.other_cosines, others.values, atol=1e-5)
    assert found.captions.tolist() == rows[firsts].tolist()
    assert found.others.tolist() == rows[firsts[others.indices]].tolist()
    scores = sample_scores(f"{made.store.path}:doubt")["score"].to_numpy()
    assert np.isnan(scores).sum() == len(made.names) - len(rows) > 0
    monkeypatch.setattr(stores, "REFERENCES", 20)
    some = doubts(PairRows(made.store), 3)
    assert some.rows.tolist() == rows.tolist() and set(some.others) < set(found.captions)


def test_a_store_without_captions(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", sizes={"a": [0]})
    with pytest.raises(DataError, match="no image with a caption"):
        doubts(PairRows(made.store))


@pytest.mark.parametrize("kind", ["image-text", "text-text", "image-image"])
@pytest.mark.parametrize("held", [1, 256 << 20])
def test_hard_negatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, held: int) -> None:
    """Of the same source, best first; same captions and near images are left out; any block size finds the same."""
    monkeypatch.setattr(PairRows.blocks, "__defaults__", (9,))
    made = make_store(tmp_path / "store", sizes={"a": [5, 40], "b/c": [1, 0, 30]})
    rows, images, texts, same = both(made)
    sources = np.array([made.names[i][0] for i in rows.tolist()])
    query, other = (images if of == "image" else texts for of in kind.split("-"))
    for source in ("a", "b/c"):
        left_out = same | (images @ images.T >= 0.5) | torch.from_numpy((sources != source)[None])
        scores, order = (query @ other.T).masked_fill(left_out, -torch.inf).sort(dim=1, descending=True)
        mined = list(hard_negatives(PairRows(made.store, source), kind, 30, 0.5, held=held))
        assert held == 1 or len(mined) == 1
        found, others = (np.concatenate(of) for of in zip(*mined, strict=True))
        assert found.tolist() == rows[sources == source].tolist()
        for i, of in zip((sources == source).nonzero()[0], others, strict=True):
            wanted = rows[order[i][scores[i].isfinite()]][:30].tolist()
            assert [row for row in of.tolist() if row >= 0] == wanted
