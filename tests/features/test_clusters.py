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


def blobs(k: int, each: int, width: int = 32, noise: float = 0.05, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows around k directions, shuffled, and the direction of each."""
    draw = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(k, width, generator=draw), dim=1)
    labels = torch.arange(k).repeat_interleave(each)[torch.randperm(k * each, generator=draw)]
    return F.normalize(centres[labels] + noise * torch.randn(k * each, width, generator=draw), dim=1), labels


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_clusters_that_are_apart_are_found(init: str) -> None:
    features, labels = blobs(5, 200, noise=0.01)
    found = kmeans(TensorRows(features, 300), 5, init=init, seed=3)
    assert int(found.sizes.sum()) == 1000
    assert all(after >= before - 1e-9 for before, after in zip(found.means, found.means[1:], strict=False))
    if init == "k-means++":
        assert found.sizes.tolist() == [200] * 5
        pairs = set(zip(labels.tolist(), found.assign(features)[1].tolist(), strict=True))
        assert len(pairs) == 5


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
    features, _ = blobs(20, 30, noise=0.3)
    one, same, other = (kmeans(TensorRows(features), 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.centroids, same.centroids) and one.means == same.means
    assert not torch.equal(one.centroids, other.centroids)


def test_more_clusters_than_different_rows() -> None:
    features = F.normalize(torch.eye(3), dim=1).repeat(10, 1)
    found = kmeans(TensorRows(features, 7), 6)
    assert found.means[-1] == pytest.approx(1.0)
    assert int(found.sizes.sum()) == 30 and torch.isfinite(found.centroids).all()


def test_an_empty_cluster_takes_a_far_row() -> None:
    """One of two random centroids of the same direction gets no rows, and moves to the row that is far off."""
    features = torch.tensor([[1.0, 0.0]] * 50 + [[0.0, 1.0]])
    for seed in range(20):
        assert sorted(kmeans(TensorRows(features, 10), 2, seed=seed, init="random").sizes.tolist()) == [1, 50]


@pytest.mark.parametrize("k", [0, 4])
def test_the_number_of_clusters_must_fit(k: int) -> None:
    with pytest.raises(SettingsError, match="of 3 rows"):
        kmeans(TensorRows(torch.eye(3)), k)
