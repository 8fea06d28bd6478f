"""F1 at chosen thresholds, and prompts of the opposite, equal scikit-learn's figures on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from clipstream.config.config_file import portable
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.metrics import label_metrics
from clipstream.evals.settings import ZeroShotSettings, sources_of
from clipstream.evals.zero_shot import ZeroShot
from tests.support.evaluating import context_of, evaluated, open_clip_features
from tests.support.pictures import picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar

NAMES = ["hat", "red scarf", "no", "never seen"]
WORN = [[name for bit, name in enumerate(NAMES[:3]) if i * 7 % 11 >> bit & 1] for i in range(30)]


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with lists of labels: 20 in shards 0 and 1, the others in shard 2."""
    folder: Path = tmp_path_factory.mktemp("worn")
    for shard in range(3):
        some = range(10 * shard, 10 * shard + 10)
        samples = [{"__key__": f"{i:04d}", "jpg": picture(i), "json": json.dumps({"wears": WORN[i]})} for i in some]
        write_tar(folder / f"{shard}.tar", samples)
    return folder


def settings_of(folder: Path, **more: Any) -> ZeroShotSettings:
    values = {"label": "json:wears", "labels": "list", "classes": NAMES, "batch_size": 4,
              "templates": ["with a {c}"], "data": {"shards": f"{folder}/{{0,1}}.tar"}, **more}  # fmt: skip
    return ZeroShotSettings.model_validate(values)


def evaluate(world: World, folder: Path, more: dict[str, Any]) -> dict[str, float]:
    return evaluated(settings_of(folder, **more), context_of(world))


def scores_of(template: str) -> np.ndarray[Any, Any]:
    """Cosines of the images with the prompt of each label."""
    images, texts = open_clip_features(range(len(WORN)), [template.format(c=name) for name in NAMES])
    return (images @ texts.T).numpy()


def best_f1(scores: np.ndarray[Any, Any], there: np.ndarray[Any, Any], tune: slice, rest: slice) -> float:
    """Of the others, at the threshold of the best F1 of some, by scikit-learn."""
    precision, recall, thresholds = precision_recall_curve(there[tune], scores[tune])
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = thresholds[len(thresholds) - 1 - int(np.argmax(f1[: len(thresholds)][::-1]))]
    return float(f1_score(there[rest], scores[rest] >= best - 1e-9))


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_scikit_learn(worn: Path, size: int) -> None:
    scores = scores_of("with a {c}") - scores_of("without {c}")
    there = np.array([[name in worn for name in NAMES] for worn in WORN])
    tune, rest = slice(20, 30), slice(0, 20)
    expected = {
        "mAP": np.mean([average_precision_score(there[rest, i], scores[rest, i]) if i < 3 else 0 for i in range(4)]),
        "F1": np.mean([best_f1(scores[:, i], there[:, i], tune, rest) for i in range(3)]),
        "labels": 3, "n": 20, "n_tune": 10, "chance_mAP": there[rest].mean(),
    }  # fmt: skip
    more = {"against": ["without {c}"], "tune_shards": f"{worn}/2.tar"}
    for found in run_ranks(size, evaluate, worn, more):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_half_of_the_images_choose_the_thresholds_of_the_other_half(worn: Path, size: int) -> None:
    every: dict[str, Any] = {"data": {"shards": f"{worn}/*.tar"}}
    alone = evaluate(World(), worn, every)
    assert 5 < alone["n_tune"] < 25 and alone["n"] == 30 and 0 < alone["F1"] < 1
    for found in run_ranks(size, evaluate, worn, every):
        assert found == pytest.approx(alone, abs=1e-9)


def test_thresholds_are_shown_by_label(worn: Path) -> None:
    context = context_of(World(), examples=4)
    evaluated(settings_of(worn, tune_shards=f"{worn}/2.tar"), context)
    (shown,) = [table for table in context.tables if table.title == "labels at their thresholds"]
    assert [row[0] for row in shown.rows] == NAMES[:3]
    assert {row[-1] for row in shown.rows} == {f"{sum(name in one for one in WORN[:20])}" for name in NAMES[:3]}


def test_a_class_without_an_image_is_told(worn: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluated(settings_of(worn, classes=[*NAMES[:3], "worn by none"]))
    assert "only 3 of 4 class names are labels of the data: no samples of 'worn by none'" in caplog.text


@pytest.mark.parametrize(
    "form", ["{0}/0.tar::{0}/1.tar", "{0}/2.tar::{0}/0.tar", ["{0}/1.tar", "{0}/0.tar"], "{0}/./{{0,9}}.tar"]
)
def test_thresholds_are_not_chosen_on_the_test_images(worn: Path, form: str | list[str]) -> None:
    tune = form.format(worn) if isinstance(form, str) else [one.format(worn) for one in form]
    with pytest.raises(ValueError, match=r"tune_shards has .*/[01]\.tar, as data: F1 would be measured on the images"):
        settings_of(worn, data={"shards": f"{worn}/0.tar::{worn}/1.tar"}, tune_shards=tune)


@pytest.mark.parametrize("key", ["against", "tune_shards"])
def test_what_needs_several_labels_says_so(worn: Path, key: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}: requires several labels per image"):
        ZeroShot(settings_of(worn, labels="one", **{key: ["with {c}"]}))
    with pytest.raises(SettingsError, match=r"against: 'without' has no \{c\}"):
        ZeroShot(settings_of(worn, against=["without"]))


def test_a_written_config_has_absolute_shards_and_the_prompts_as_they_are(
    worn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(worn)
    made = portable(settings_of(Path(), against=["without {c}"], tune_shards="2.tar", data={"shards": "0.tar"}))
    assert (made.templates, made.against, made.classes) == (["with a {c}"], ["without {c}"], NAMES)
    sources = sources_of(made)
    assert {key: source.shards for key, source in sources.items()} == {
        "data.shards": f"{worn}/0.tar", "tune_shards": f"{worn}/2.tar",
    }  # fmt: skip
    assert made.tune_shards == f"{worn}/2.tar"


def counted(world: World) -> torch.Tensor:
    images, labels, classifier, tuning = drawn()
    mine = slice(world.rank, None, world.size)
    return label_metrics(images[mine], classifier, labels[mine], tuning[mine].to(torch.uint8) * 2, world)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    images = torch.nn.functional.normalize(torch.randn((90, 6), generator=draw), dim=1)
    classifier = torch.randn((5, 6), generator=draw)
    images[7] = images[50]  # a tie
    labels = images @ classifier.T + torch.randn((90, 5), generator=draw) > 1
    return images, labels, classifier, torch.arange(90) % 3 == 0


@pytest.mark.parametrize("size", [1, 3])
def test_counts_at_the_threshold_are_those_of_its_predictions(size: int) -> None:
    images, labels, classifier, tuning = drawn()
    scores, there, half = (images.double() @ classifier.double().T).numpy(), labels.numpy(), tuning.numpy()
    for found in run_ranks(size, counted):
        for i, (_, threshold, right, taken, count, known) in enumerate(found.T.tolist()):
            guess = scores[:, i] >= threshold - 1e-9
            best = max(f1_score(there[half, i], scores[half, i] >= score) for score in scores[half, i])
            assert f1_score(there[half, i], guess[half]) == pytest.approx(best)
            assert (right, taken) == ((guess & there[:, i])[~half].sum(), guess[~half].sum())
            assert (count, known) == (there[~half, i].sum(), there[half, i].sum())
