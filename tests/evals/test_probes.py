"""Linear probe and k-nearest-neighbours equal scikit-learn's, on 1 and 3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.distributed.world import World
from clipstream.errors import DataError
from clipstream.evals.classes import Labelling
from clipstream.evals.metrics import average_precision
from clipstream.evals.probes import Fit, Labelled, Neighbours, encode_labelled, measure, nearest
from clipstream.evals.settings import LinearProbeSettings, NeighboursSettings
from tests.support.evaluating import context_of, evaluated
from tests.support.pictures import make_shards
from tests.support.ranks import run_ranks


def clusters(n: int, classes: int, seed: int) -> Labelled:
    """Features around the middles of classes, which overlap."""
    draw = torch.Generator().manual_seed(0)
    middles = torch.randn(classes, 12, generator=draw)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=draw)
    rows = middles[labels] + 1.5 * torch.randn(n, 12, generator=draw)
    return Labelled(torch.nn.functional.normalize(rows, dim=1), labels)


def part(world: World, whole: Labelled) -> Labelled:
    """This rank's rows, uneven on purpose; of three ranks one has none."""
    cuts = {1: [0, 1], 2: [0, 0.3, 1], 3: [0, 0.6, 0.6, 1]}[world.size]
    first, last = (int(len(whole.labels) * cut) for cut in cuts[world.rank : world.rank + 2])
    return Labelled(whole.features[first:last], whole.labels[first:last])


def fitted(world: World, classes: int, c: float) -> tuple[bool, torch.Tensor]:
    mine = part(world, clusters(300, classes, 1))
    fit = Fit(mine.features, mine.labels, classes, c, world)
    return fit.run(1000), fit.weights


@pytest.mark.parametrize(("size", "classes", "c"), [(1, 2, 0.316), (3, 5, 100.0)])
def test_the_probes_weights_are_scikit_learns(size: int, classes: int, c: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    whole, test = clusters(300, classes, 1), clusters(200, classes, 2)
    theirs = linear_model.LogisticRegression(C=c, tol=1e-10, max_iter=10000)
    theirs.fit(whole.features.double().numpy(), whole.labels.numpy())
    for reached, weights in run_ranks(size, fitted, classes, c):
        assert reached
        assert weights[:, :-1].numpy() == pytest.approx(theirs.coef_, abs=1e-4)
        assert weights[:, -1].numpy() == pytest.approx(theirs.intercept_, abs=1e-4)
    fit = Fit(whole.features, whole.labels, classes, c, World())
    fit.weights = weights
    guesses = theirs.predict(test.features.double().numpy())
    assert np.array_equal(fit.logits(test.features).argmax(dim=1).numpy(), guesses)


def found_near(world: World, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return nearest(part(world, clusters(300, 5, 1)), clusters(200, 5, 2).features, k, world)


@pytest.mark.parametrize(("size", "k"), [(1, 1), (3, 7)])
def test_the_neighbours_are_scikit_learns(size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    monkeypatch.setattr("clipstream.evals.probes.BLOCK", 64)
    whole, test = clusters(300, 5, 1), clusters(200, 5, 2)
    theirs = neighbors.KNeighborsClassifier(k)
    theirs.fit(whole.features.double().numpy(), whole.labels.numpy())
    distances, places = theirs.kneighbors(test.features.double().numpy())
    for cosines, labels in run_ranks(size, found_near, k):
        assert torch.equal(labels, whole.labels[torch.from_numpy(places)])
        assert cosines.numpy() == pytest.approx(1 - distances**2 / 2, abs=1e-6)  # float32 rows are not quite 1 long


def test_the_votes_are_scikit_learns() -> None:
    neighbors, metrics = pytest.importorskip("sklearn.neighbors"), pytest.importorskip("sklearn.metrics")
    whole, test = clusters(300, 5, 1), clusters(200, 5, 2)
    settings = NeighboursSettings.model_validate({"data": {"shards": "a.tar"}, "train_shards": "a.tar", "k": 6})
    tally = Neighbours(settings).tally(whole, test, 5, World())

    def weigh(distances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.exp((1 - distances**2 / 2) / 0.07)

    theirs = neighbors.KNeighborsClassifier(6, weights=weigh)
    theirs.fit(whole.features.double().numpy(), whole.labels.numpy())
    guesses, truth = theirs.predict(test.features.double().numpy()), test.labels.numpy()
    assert float(tally[:, 0].sum()) / 200 == metrics.accuracy_score(truth, guesses)
    recall = float((tally[:, 0] / tally[:, 2]).mean())
    assert recall == pytest.approx(metrics.balanced_accuracy_score(truth, guesses), abs=1e-12)


def test_average_precision_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(300, 6, dtype=torch.float64, generator=draw) / 5
    scores[:60] = scores[60:120]  # equal ones
    labels = torch.rand(300, 6, generator=draw) < 0.2
    labels[:, 1] = True
    theirs = [metrics.average_precision_score(labels[:, k].numpy(), scores[:, k].numpy()) for k in range(6)]
    assert average_precision(scores, labels).tolist() == pytest.approx(theirs, abs=1e-12)


def test_a_score_that_is_no_number_comes_last_and_gives_chance() -> None:
    labels = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=torch.bool)
    broken = torch.full((4, 2), torch.nan, dtype=torch.float64)
    assert average_precision(broken, labels).tolist() == [0.5, 0.5]
    broken[:, 0] = torch.tensor([torch.nan, 0.3, 0.2, 0.1])
    assert float(average_precision(broken, labels)[0]) == pytest.approx((1 + 2 / 4) / 2)


def test_who_is_not_voted_for_is_no_answer() -> None:
    votes = torch.tensor([[2.0, 2.0, -torch.inf, 1.0]] * 4)
    tally = measure(votes, torch.tensor([0, 1, 2, 3]), 4)
    assert tally.tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("labelled")
    make_shards(folder / "train", [30, 25])
    make_shards(folder / "test", [17, 20], start=100)
    return folder


def evaluate(folder: Path, kind: str, **more: Any) -> dict[str, float]:
    data = {"data": {"shards": f"{folder}/test/*.tar"}, "train_shards": f"{folder}/train/*.tar"}
    return evaluated({"type": kind, **data, "batch_size": 8, **more})


def test_classes_without_a_picture_to_learn_from_are_never_guessed(pictures: Path) -> None:
    found, numbered = (evaluate(pictures, "linear_probe", classes=names) for names in ([*"abcde"], None))
    assert found["chance"] == 0.2 and found["top5"] == 1 and found["top1"] == pytest.approx(numbered["top1"])


def test_labels_of_the_features(pictures: Path) -> None:
    section = LinearProbeSettings.model_validate({"data": {"shards": f"{pictures}/test/*.tar"}, "train_shards": "-"})
    found = encode_labelled(context_of(World()), section.data, Labelling.of(section), 8)  # type: ignore[arg-type]
    assert found.labels.tolist() == [(100 + i) % 3 for i in range(37)] and found.features.shape == (37, 16)
    with pytest.raises(DataError, match="is not a whole number: set the evaluator's classes"):
        evaluate(pictures, "knn", label="txt")
