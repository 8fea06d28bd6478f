"""Evaluators on every kind of source: tars, image folders, CSV, JSONL; labels by index and by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source
from clipstream.errors import SettingsError
from clipstream.evals.settings import ChoiceSettings
from tests.support.evaluating import evaluated
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
    return evaluated({"type": "zero_shot", **told})


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


def linked(place: Path, *names: str) -> str:
    """The class folders under other names, in the order of CLASSES."""
    folder = place / "-".join(names).replace(" ", "_")
    folder.mkdir()
    for name, of in zip(names, CLASSES, strict=True):
        (folder / name).symlink_to(place / "folder" / of)
    return f"folder:{folder}"


def test_a_class_folder_has_the_class_of_its_name_or_of_its_number(place: Path, tmp_path: Path) -> None:
    """torchvision 0.25's ImageFolder numbers folders in the order of names, where 10 comes before 2."""
    expected = zero_shot(f"{place}/tars/*.tar")
    many = [*CLASSES[:2], *(f"class {number}" for number in range(2, 10)), CLASSES[2]]
    padded = zero_shot(linked(place, "00", "01", "10"), classes=many)
    assert zero_shot(linked(place, "0", "1", "10"), classes=many) == padded
    assert zero_shot(linked(place, "0", "1", "2"), classes=many) != padded
    assert zero_shot(linked(place, "000", "001", "002")) == pytest.approx(expected, abs=1e-9)
    shuffled = [CLASSES[1], "a_Bird seen", CLASSES[0], CLASSES[2]]
    assert zero_shot(f"folder:{place}/folder", classes=shuffled)["top1"] == pytest.approx(
        zero_shot(f"{place}/rows.csv", label="kind", classes=shuffled)["top1"]
    )
    for names, classes, said in (
        (("1", "2", "3"), CLASSES, r"1 of the folders are none of the 3 classes: '3'\. .* from 0: rename"),
        (("x", "y", CLASSES[0]), CLASSES, "2 of the folders are none of the 3 classes: 'x', 'y'"),
        (("1", "01", "2"), CLASSES, "two folders have one number"),
    ):
        shards = linked(place, *names)
        with pytest.raises(SettingsError, match=said):
            zero_shot(shards, classes=classes)
    label = {"type": "label", "classes": CLASSES}
    with pytest.raises(SettingsError, match="'3'"):
        Source(SourceSettings.model_validate({"shards": f"folder:{place}/1-2-3", "caption": label}))


def test_class_folders_of_two_sets_have_the_classes_of_their_names(place: Path) -> None:
    part = linked(place, "b", "c", "d").removeprefix("folder:")
    (Path(part) / "b").unlink()
    told = {"type": "knn", "data": {"shards": part}, "train_shards": f"{place}/b-c-d-all", "k": 1}
    (place / "b-c-d-all").mkdir()
    for name, of in zip("bcd", CLASSES, strict=True):
        (place / "b-c-d-all" / name).symlink_to(place / "folder" / of)
    assert evaluated(told)["top1"] == 1  # numbers in the order of names would be 0 and 1, of b and c


def test_several_labels_in_every_form(place: Path) -> None:
    expected = zero_shot(f"{place}/rows.jsonl", label="json:about.kinds", labels="list")
    assert expected["n"] == COUNT and expected["chance_mAP"] == pytest.approx(2 / 3) and 0 < expected["mAP"] < 1
    one = zero_shot(f"{place}/rows.csv", label="number", labels="list")
    assert one["chance_mAP"] == pytest.approx(1 / 3) and one["mAP"] < expected["mAP"]


def retrieval(shards: str, **more: Any) -> dict[str, float]:
    data = {"shards": shards, "caption": more.pop("caption", {"type": "text"})}
    return evaluated({"type": "retrieval", "data": data, "batch_size": 5, **more})


def test_captions_in_every_form(place: Path) -> None:
    expected = retrieval(f"{place}/tars/*.tar")
    assert retrieval(f"{place}/rows.csv", caption={"type": "text", "key": "title"}) == pytest.approx(expected, abs=1e-9)
    lists = {"type": "json", "path": "about.all"}
    assert retrieval(f"{place}/rows.jsonl", caption=lists) == pytest.approx(expected, abs=1e-9)  # the first of each
    found = retrieval(f"{place}/rows.jsonl", caption=lists, captions="all")
    assert (found["n"], found["captions"]) == (COUNT, 2 * COUNT)


def test_fetch_is_a_command_or_the_name_of_a_set() -> None:
    assert ChoiceSettings(fetch="./get.sh").download == "./get.sh"
    found = ChoiceSettings(fetch="org/set").download
    assert found is not None and found.startswith("hf download org/set ")
