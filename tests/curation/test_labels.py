"""`clipstream label`: the table, what evaluate reads of it, pages, links, and what is refused."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipstream.api.model import load_model
from clipstream.cli.verbs.evaluate import main as evaluate
from clipstream.cli.verbs.label import main
from tests.support.image_files import save
from tests.support.model_files import build, write
from tests.support.tars import write_tar

CLASSES = ["red bird", "fish", "a/b: house"]
ODD = ["a:b.png", "~x.png", "[1].png", "{k}.png", "with, comma.png", 'quo"te.png', "ü ñ.png", "back\\slash.png"]


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(9, 0).repeat(7, 1)
    return save(Image.fromarray(pixels))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(write(folder)).save_pretrained(folder / "saved")
    return folder / "saved"


@pytest.fixture(autouse=True)
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where we are: a model, and photos without captions, one of them broken."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "photos").mkdir()
    for number, name in enumerate(ODD):
        (tmp_path / "photos" / name).write_bytes(png(number))
    (tmp_path / "photos/broken.png").write_bytes(b"no image")
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    (tmp_path / "attributes.yaml").write_text("color: [a red thing, a blue thing]\nwet: [yes, no]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def label(*words: Any, code: int = 0) -> None:
    assert main(["local-dir:model", *map(str, words)]) == code


def table(path: str = "labels.csv") -> list[dict[str, str]]:
    """The rows of readable images, which are first."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    count = sum(bool(row["label"]) for row in rows)
    assert [(Path(row["filepath"]).name, {*row.values()} - {""}) for row in rows[count:]] == [
        ("broken.png", {row["filepath"]}) for row in rows[count:]
    ]
    return rows[:count]


def test_a_folder_is_named_corrected_and_evaluated(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label("photos", "--classes", "names.txt", "--attributes", "attributes.yaml", "--html", "page.html")
    out, told = capsys.readouterr()
    assert "8 images" in out and "1 sample without a readable image, at the end of labels.csv" in out + told
    assert "\nphotos/broken.png,,,,,,,,\n" in Path("labels.csv").read_text()
    rows = table()
    model, _, _ = load_model("local-dir:model")
    names = [os.path.basename(row["filepath"]) for row in rows]
    assert sorted(names) == sorted(ODD)
    files = [place / "photos" / name for name in names]
    for column, texts, templates in (("label", CLASSES, "openai"), ("color", ["a red thing", "a blue thing"], "plain")):
        expected = model.label(files, texts, templates)
        assert [row[column] for row in rows] == [one.name for one in expected]
        margins = [float(row["margin" if column == "label" else f"{column}_margin"]) for row in rows]
        assert margins == pytest.approx([one.margin for one in expected], abs=2e-2)  # the index is in bfloat16
    margins = [float(row["margin"]) for row in rows]
    assert margins == sorted(margins) and {row["wet"] for row in rows} <= {"yes", "no"}
    page = Path("page.html").read_text()
    assert page.count("data:image/jpeg") == 3 * 8 and "the least certain first" in page

    lines = Path("labels.csv").read_text().splitlines()
    lines[1] = lines[1].replace(rows[0]["label"], "wolf")
    Path("labels.csv").write_text("\n".join(lines) + "\n")
    assert evaluate(["local-dir:model", "labels.csv", "--classes-from", "label", "--output", "found.jsonl"]) == 0
    (found,) = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert (found["n"], found["dropped"]) == (len(ODD), 1) and "wolf" in capsys.readouterr().out
    Path("one.csv").write_text("filepath,label\n" + "".join(f"{row['filepath']},fish\n" for row in rows[:2]))
    assert evaluate(["local-dir:model", "one.csv", "--classes-from", "label"]) == 2
    told = capsys.readouterr().err
    assert "all images have the class 'fish': name the classes in a file" in told
    more = told.partition("and use ")[2].replace("FILE", "names.txt").split()
    assert evaluate(["local-dir:model", "one.csv", *more]) == 0


def test_a_table_in_the_folder_is_no_data_and_new_images_are_seen(place: Path) -> None:
    for count in (8, 9):
        label("photos", "--classes", "names.txt", "--out", "photos/labels.csv")
        rows = table("photos/labels.csv")
        assert len(rows) == count and all((place / "photos" / row["filepath"]).is_file() for row in rows)
        (place / "photos/new.png").write_bytes(png(99))
        (place / "photos/labels.csv").unlink()


def test_corrected_labels_stay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, table_file = ("photos", "--classes", "names.txt"), place / "labels.csv"
    flags = ((), ("--attributes", "attributes.yaml"), ("--html", "page.html"), ("--links", "by"))
    label(*asked)
    capsys.readouterr()
    label(*asked)  # the same table is no error
    assert "1 sample without a readable image" in "".join(capsys.readouterr()), "also of a kept index"
    corrected = table_file.read_text().replace(f",{table()[0]['label']},", ",wolf,", 1)
    table_file.write_text(corrected)
    for new in (False, True):
        if new:  # it is refused before features are computed
            (place / "photos/new.png").write_bytes(png(99))
        for more in flags:
            label(*asked, *more, code=2)
            told = capsys.readouterr().err
            assert "labels.csv exists, perhaps corrected: name another --out, or remove it" in told
            assert "computing features" not in told
    assert table_file.read_text() == corrected and not {"page.html", "by"} & {*os.listdir(place)}
    (place / "photos/new.png").unlink()
    for number, more in enumerate(flags):
        label(*asked, *more, "--out", f"{number}.csv")
        assert table_file.read_text() == corrected and len(table(f"{number}.csv")) == 8


@pytest.mark.parametrize("rows", [None, 2, 6])
def test_images_that_are_not_read_are_told(place: Path, rows: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{number}.png" for number in range(6)]
    if rows is None:  # a folder is a class, in which the other two are
        names[:2] = ["inner/0.png", "inner/1.png"]
    for number, name in enumerate(names):
        (place / "mixed" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "mixed" / name).write_bytes(png(number))
    if rows is not None:
        (place / "mixed/pairs.csv").write_text("\n".join(["filepath,title", *(f"{name},a" for name in names[:rows])]))
    said = {
        None: "mixed: 4 images beside its folders not used, as each folder is a class: move them into a folder",
        2: "mixed: 6 images, but 2 rows to read in its tables: images without a row are not used: add rows",
        6: "",
    }[rows]
    label("mixed", "--classes", "names.txt")
    told = "".join(capsys.readouterr())
    assert f"{rows or 2} images: " in told and said in told and ("not used" in told) == bool(said)


def test_links_have_safe_and_different_names(place: Path) -> None:
    for number, folder in enumerate(("one", "two", "three")):
        (place / "sets" / folder).mkdir(parents=True)
        (place / "sets" / folder / "same.png").write_bytes(png(number))
    label("sets", "--classes", "names.txt", "--links", "sorted")
    links = [path for path in place.glob("sorted/*/*")]
    assert len(links) == 3 and len({path.resolve() for path in links}) == 3
    assert {path.parent.name for path in links} <= {"red bird", "fish", "a_b_ house"}
    before = {path: os.readlink(path) for path in links}
    label("sets", "--classes", "names.txt", "--links", "sorted", code=2)
    assert {path: os.readlink(path) for path in place.glob("sorted/*/*")} == before


def test_images_in_tars_have_shard_and_key(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(place / "shard.tar", [{"__key__": f"k{n}", "png": png(n), "txt": "text"} for n in range(3)])
    label("shard.tar", "--classes", "names.txt", "--html", "page.html", "-k", 1)
    assert "by shard and key" in "".join(capsys.readouterr())
    assert sorted((row["shard"], row["key"]) for row in table()) == [(f"{place}/shard.tar", f"k{n}") for n in range(3)]
    label("shard.tar", "--classes", "names.txt", "--links", "sorted", code=2)
    assert not (place / "sorted").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("photos",), "set --classes FILE, --attributes FILE, or both"),
        (("photos", "--classes", "gone.txt"), "No such file or directory: 'gone.txt')\n"),
        (("photos", "--classes", "one.txt"), "expected at least 2, not 1"),
        (("photos", "--classes", "names.txt", "--templates", "one.txt"), "where the class name goes"),
        (("photos", "--classes", "names.txt", "--out", "names.csv"), "names.csv is a file of other content"),
        (("photos", "--classes", "names.txt", "--out", "labels.parquet"), "ends with .csv"),
        (("photos", "--classes", "names.txt", "--links", "photos"), "--links: photos"),
        (("photos", "--classes", "names.txt", "--links", "photos/sorted"), "is in photos, and would be read"),
        (("empty", "--classes", "names.txt"), "empty"),
        (("photos", "--attributes", "gone.yaml"), "--attributes: gone.yaml"),
        (("photos", "--attributes", "wrong.yaml"), "wrong.yaml:1: color: expected a list of at least 2 different"),
        (("photos", "--attributes", "wrong.yaml"), "wrong.yaml:2: image is another column"),
    ],
)
def test_what_is_refused(place: Path, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "empty").mkdir()
    (place / "one.txt").write_text("cat\n")
    (place / "names.csv").write_text("id,name\n0,cat\n1,dog\n")
    (place / "wrong.yaml").write_text("color: [red, Red]\nimage: [a, b]\n")
    label(*words, code=2)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and part in said and not (place / "labels.csv").exists()


def test_a_name_twice_is_one_class(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "twice.txt").write_text("red bird\nfish\nFish\n")
    label("photos", "--classes", "twice.txt")
    assert "duplicate class names: 'fish'" in "".join(capsys.readouterr()) and len(table()) == 8
