"""k-means: its fixed point, its start, its independence of blocks, and hard data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.errors import SettingsError
from clipstream.features.search import kmeans
from tests.support.stored_features import TensorRows


def blobs(k: int, each: int, noise: float) -> torch.Tensor:
    """Rows around k directions, one after the other."""
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(k, 32, generator=draw), dim=1).repeat_interleave(each, dim=0)
    return F.normalize(centres + noise * torch.randn(k * each, 32, generator=draw), dim=1)


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_clusters_that_are_apart_are_found(init: str) -> None:
    features = blobs(5, 200, noise=0.01)[order := torch.randperm(1000)]
    found = kmeans(TensorRows(features, 300), 5, init=init, seed=3)
    assert int(found.sizes.sum()) == 1000
    assert all(after >= before - 1e-9 for before, after in zip(found.means, found.means[1:], strict=False))
    if init == "k-means++":
        assert found.sizes.tolist() == [200] * 5
        assert len(set(zip((order // 200).tolist(), found.assign(features)[1].tolist(), strict=True))) == 5


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 12),
    block=st.integers(1, 200),
    seed=st.integers(0, 100),
    init=st.sampled_from(["random", "k-means++"]),
)
def test_the_end_is_a_fixed_point_of_lloyds_algorithm(k: int, block: int, seed: int, init: str) -> None:
    features = F.normalize(torch.randn(150, 6, generator=torch.Generator().manual_seed(seed)), dim=1)
    found = kmeans(TensorRows(features, block), k, seed=seed, init=init, iterations=200, tolerance=0.0)
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
    # One of two random centroids of the same direction gets no rows, and moves to the row that is far off.
    features = torch.tensor([[1.0, 0.0]] * 50 + [[0.0, 1.0]])
    for seed in range(20):
        assert sorted(kmeans(TensorRows(features, 10), 2, seed=seed, init="random").sizes.tolist()) == [1, 50]
    for k in (0, 4):
        with pytest.raises(SettingsError, match="of 3 rows"):
            kmeans(TensorRows(torch.eye(3)), k)
