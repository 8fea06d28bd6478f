"""Retrieval by groups equals scikit-learn's figures on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from clipstream.data.settings import GroupsSettings as BatchGroups
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import DryRun
from clipstream.evals.groups import Groups
from clipstream.evals.metrics import group_ranks
from clipstream.evals.settings import GroupsSettings
from clipstream.evals.statistics import bounds, chance_of
from clipstream.losses.settings import PositivesSettings
from tests.support.evaluating import context_of, evaluated, open_clip_features
from tests.support.pictures import picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar

GROUPS = [0, 1, 2, 0, 1, 0, 3, 4, 4, 0, 1, None, None, 2, 5, 4, 6]  # None: a sample without the field


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("products")
    for shard in range(3):
        samples = []
        for i, group in list(enumerate(GROUPS))[shard::3]:
            # The image of sample 9 is that of sample 0, of the same group.
            one = {"__key__": f"{i:04d}", "jpg": picture(0 if i == 9 else i), "txt": f"thing {i}"}
            samples.append({**one, "json": json.dumps({} if group is None else {"sku": group})})
        write_tar(folder / f"{shard}.tar", samples)
    return folder


def evaluate(world: World, folder: Path) -> dict[str, float]:
    settings = {"type": "groups", "group": "json:sku", "data": {"shards": f"{folder}/*.tar"}, "batch_size": 4}
    return evaluated(settings, context_of(world))


def reference() -> dict[str, float]:
    numbers = [i for i in range(len(GROUPS)) if i != 9]
    texts_of_all = [f"thing {i}" for i in range(len(GROUPS))]
    images, texts = (rows.numpy() for rows in open_clip_features(numbers, texts_of_all))
    names = np.array([100 + i if group is None else group for i, group in enumerate(GROUPS)])
    of_images = names[numbers]
    found: dict[str, list[list[float]]] = {"image_to_image": [], "text_to_image": []}
    for way, queries, of_queries in (("image_to_image", images, of_images), ("text_to_image", texts, names)):
        for i, (query, group) in enumerate(zip(queries, of_queries, strict=True)):
            others = np.arange(len(images)) != i if way == "image_to_image" else np.full(len(images), True)
            right, scores = (of_images == group)[others], (images @ query)[others]
            if right.any():
                order = right[np.argsort(-scores)]
                r = right.sum()
                row = [average_precision_score(right, scores), order[0], order[:r].mean(), right.mean()]
                found[way].append(row)
    figures = {}
    for way, rows in found.items():
        for name, value in zip(("mAP", "R@1", "R-precision", "chance"), np.mean(rows, axis=0), strict=True):
            figures[f"chance_{way}_R@1" if name == "chance" else f"{way}_{name}"] = float(value)
    return figures


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_scikit_learn(products: Path, size: int) -> None:
    expected = reference()
    assert 0 < expected["image_to_image_mAP"] < 1
    counts = {"n": 16, "captions": 17, "groups": 7, "left_out": 5}
    for found in run_ranks(size, evaluate, products):
        assert found == pytest.approx({**expected, **counts}, abs=1e-6)
    assert chance_of(found, "text_to_image_mAP") is None
    assert chance_of(found, "image_to_image_R@1") == found["chance_image_to_image_R@1"]
    assert bounds(found, "image_to_image_R@1") == bounds({"n": 11, "x_R@1": found["image_to_image_R@1"]}, "x_R@1")


@pytest.mark.parametrize("group", ["json:", "JSON:a[", "json:a..b"])
def test_a_malformed_path_is_a_mistake_of_the_settings(group: str) -> None:
    section = {"data": {"shards": "a.tar"}, "group": group}
    for made in (GroupsSettings, PositivesSettings, BatchGroups):
        with pytest.raises(ValueError, match="malformed at position"):
            made.model_validate(section if made is GroupsSettings else {"by": group})


def test_ties_are_chance_and_a_query_is_no_answer() -> None:
    same = torch.full((6, 4), 0.5, dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    found = group_ranks(same, groups, same, groups, torch.arange(6))
    assert torch.allclose(found, torch.full((3, 6), 2 / 5, dtype=torch.float64))


def test_the_field_is_that_of_the_loss_and_is_required(products: Path) -> None:
    settings = GroupsSettings.model_validate({"data": {"shards": f"{products}/*.tar"}})
    context = context_of(World())
    with pytest.raises(SettingsError, match=r"group: missing"):
        dict(Groups(settings)(context))
    context.loss = type("Loss", (), {"groups_by": "json:sku"})()
    assert dict(Groups(settings)(context)) == evaluate(World(), products)
    context.loss = type("Loss", (), {"groups_by": "txt"})()
    with pytest.raises(SettingsError, match="no two of the 17 samples have the same 'txt'"):
        dict(Groups(settings)(context))


@pytest.mark.parametrize("count", [40, 70])
def test_a_dry_run_warns_of_a_field_that_later_samples_may_have(
    tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    last = {count - 2: '{"sku": 1}', count - 1: '{"sku": 1}'} if count > 64 else {}
    samples = [
        {"__key__": f"{i:04d}", "jpg": picture(i), "txt": f"thing {i}", "json": last.get(i, "{}")} for i in range(count)
    ]
    write_tar(tmp_path / "0.tar", samples)
    groups = Groups(GroupsSettings.model_validate({"data": {"shards": f"{tmp_path}/0.tar"}, "group": "json:sku"}))
    dry = DryRun.of(context_of(World()), "products")
    if not last:  # all samples were seen
        with pytest.raises(SettingsError, match="none of the 40 samples has 'json:sku'"):
            dict(groups(dry))
        return
    assert dict(groups(dry))["groups"] == 0 and "none of the first 64 samples has 'json:sku'" in caplog.text
    assert dict(groups(context_of(World())))["groups"] == 1
