"""Near-duplicates and scores of samples, against float64 products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.curation.stores import pairs as module
from clipstream.curation.stores.pairs import (
    cluster,
    find_nearest_preferred,
    near_duplicates,
    nearest_in_clusters,
    sample_scores,
)
from clipstream.curation.stores.search import TensorRows
from clipstream.errors import SettingsError
from clipstream.features.stored_rows import StoredRows
from tests.support.stored_features import make_rows, make_store


def expected(features: torch.Tensor, order: np.ndarray, labels: np.ndarray | None = None) -> np.ndarray:  # type: ignore[type-arg]
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
    tile=st.sampled_from([64, module.TILE]),
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
        patch.setattr(module, "TILE", tile)
        found = find_nearest_preferred(TensorRows(features, block), order, held=held)
    np.testing.assert_allclose(found.cosines, expected(features, order), atol=1e-6)
    has = found.rows >= 0
    assert int((~has).sum()) == 1 and (order[found.rows[has]] < order[has]).all()
    cosines = (features[has].double() * features[found.rows[has]].double()).sum(dim=1)
    np.testing.assert_allclose(found.cosines[has], cosines.numpy(), atol=1e-6)
    for threshold in (-1.1, 0.3, 0.9, 0.99999):
        kept = found.kept(threshold)
        assert ((kept != np.arange(n)) == (found.cosines >= threshold)).all(), "these rows are dropped"
        assert (kept[kept] == kept).all() and (order[kept] <= order).all()


def test_a_chain_of_pairs_leaves_one_row() -> None:
    angles = torch.arange(2000) * 0.01
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    found = find_nearest_preferred(TensorRows(features, 100), np.arange(2000), held=4000)
    assert not found.kept(float(np.cos(0.011))).any()


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
        np.testing.assert_allclose(nearest.cosines, expected(features, by, labels), atol=1e-6)
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
    found = list(sample_scores(made.store, "clip_score"))
    assert [(some.source, some.shard, key) for some in found for key in some.keys] == made.names
    scores = np.concatenate([some.scores for some in found])
    assert scores.dtype == np.float32 and np.isnan(scores).sum() == sum(not own for own in made.captions) > 0
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
    rows = StoredRows(made.store)
    features = torch.cat([block for _, block in rows.blocks()])
    by_score = np.argsort(-np.nan_to_num(scores, nan=-2), kind="stable").argsort()
    for keep_by, order in (("first", np.arange(len(rows))), ("score", by_score)):
        found = near_duplicates(rows, keep_by=keep_by).cosines
        np.testing.assert_allclose(found, expected(features, order), atol=1e-6)
    some = np.concatenate([some.scores for some in sample_scores(made.store, "duplicate")])
    np.testing.assert_array_equal(some, near_duplicates(rows).cosines)
    with pytest.raises(SettingsError, match="'clipscore' is no score of a store"):
        list(sample_scores(made.store, "clipscore"))
    with pytest.raises(SettingsError, match="set their number"):
        near_duplicates(rows, keep_by="centroid")
