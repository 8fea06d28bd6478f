"""Evaluators on every kind of source: tars, image folders, CSV, JSONL; labels by index and by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from clipstream.distributed.world import World
from clipstream.evals.evaluators.retrieval import Retrieval
from clipstream.evals.evaluators.zero_shot import ZeroShot
from clipstream.evals.settings import RetrievalSettings, ZeroShotSettings
from tests.support.evaluating import context_of
from tests.support.pictures import make_shards, picture

CLASSES = ["cat", "dog", "eel"]
COUNT = 14


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures, labels and captions in each form; the class is the number modulo 3."""
    home: Path = tmp_path_factory.mktemp("forms")
    make_shards(home / "tars", [COUNT])
    rows = []
    for i in range(COUNT):
        file = home / "folder" / CLASSES[i % 3] / f"{i:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(i))
        rows.append({"image": str(file), "kind": CLASSES[i % 3].upper(), "number": i % 3, "title": f"picture {i}"})
    with (home / "rows.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        {**row, "about": {"all": [f"picture {i}", f"no {i}"], "kinds": [CLASSES[i % 3], (i + 1) % 3]}}
        for i, row in enumerate(rows)
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def zero_shot(shards: str, **more: Any) -> dict[str, float]:
    told = {"data": {"shards": shards}, "classes": CLASSES, "templates": ["a {c}"], "batch_size": 5, **more}
    return dict(ZeroShot(ZeroShotSettings.model_validate(told))(context_of(World())))


def test_labels_in_every_form(place: Path) -> None:
    expected = zero_shot(f"{place}/tars/*.tar")
    assert expected["n"] == COUNT and 0 < expected["top1"] < 1
    for shards, label in (
        (f"folder:{place}/folder", "cls"),
        (f"folder:{place}/folder", "class"),
        (f"{place}/rows.csv", "kind"),
        (f"{place}/rows.csv", "number"),
        (f"{place}/rows.jsonl", "json:kind"),
        (f"{place}/rows.jsonl", "number"),
    ):
        assert zero_shot(shards, label=label) == pytest.approx(expected, abs=1e-9), (shards, label)


def test_several_labels_in_every_form(place: Path) -> None:
    expected = zero_shot(f"{place}/rows.jsonl", label="json:about.kinds", labels="list")
    assert expected["n"] == COUNT and expected["chance_mAP"] == pytest.approx(2 / 3) and 0 < expected["mAP"] < 1
    one = zero_shot(f"{place}/rows.csv", label="number", labels="list")
    assert one["chance_mAP"] == pytest.approx(1 / 3) and one["mAP"] < expected["mAP"]


def retrieval(shards: str, **more: Any) -> dict[str, float]:
    caption = more.pop("caption", {"type": "text"})
    told = {"data": {"shards": shards, "caption": caption}, "batch_size": 5, **more}
    return dict(Retrieval(RetrievalSettings.model_validate(told))(context_of(World())))


def test_captions_in_every_form(place: Path) -> None:
    expected = retrieval(f"{place}/tars/*.tar")
    assert retrieval(f"{place}/rows.csv", caption={"type": "text", "key": "title"}) == pytest.approx(expected, abs=1e-9)
    lists = {"type": "json", "path": "about.all"}
    assert retrieval(f"{place}/rows.jsonl", caption=lists) == pytest.approx(expected, abs=1e-9)  # the first of each
    found = retrieval(f"{place}/rows.jsonl", caption=lists, captions="all")
    assert (found["n"], found["captions"]) == (COUNT, 2 * COUNT)
