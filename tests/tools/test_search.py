"""`clipstream search` on a small store whose features a real model made."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import clipstream
from clipstream.cli.verbs import precompute
from clipstream.cli.verbs.search import main
from tests.support.models import MODEL
from tests.support.tars import write_tar

SAMPLES = 12  # number 5 is dropped; 9 and 11 are copies of 2
COPIES = {9: 2, 11: 2}
USED = [i for i in range(SAMPLES) if i != 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images 0.png … 11.png and the store of them and of two captions each."""
    folder = tmp_path_factory.mktemp("searched")
    draw = np.random.default_rng(0)
    for i in range(SAMPLES):
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(5, 0).repeat(5, 1)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for copy, of in COPIES.items():
        (folder / f"{copy}.png").write_bytes((folder / f"{of}.png").read_bytes())
    samples = [
        {
            "__key__": f"k{i}",
            "png": (folder / f"{i}.png").read_bytes() if i in USED else b"no image",
            "json": json.dumps({"both": [f"picture {i}, first caption", f"picture {i}, second caption"]}),
        }
        for i in range(SAMPLES)
    ]
    for shard in range(2):
        write_tar(folder / f"{shard}.tar", samples[6 * shard : 6 * shard + 6])
    (folder / "model.json").write_text(json.dumps(MODEL))
    argv = [str(folder / "store"), "--train-data", f"{folder}/{{0..1}}.tar", "--caption-json", "both", "--model"]
    argv += [f"{folder}/model.json", "--towers", "both", "--dtype", "float32", "--precision", "fp32"]
    assert precompute.main([*argv, "--device", "cpu", "--run.threads", "1", "--workers", "0"]) == 0
    return folder


@pytest.fixture(scope="module")
def features(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all images, the broken one included, and of all captions."""
    model = clipstream.load_model(folder / "store/model", device="cpu")[0]
    texts = [f"picture {i}, {which} caption" for i in range(SAMPLES) for which in ("first", "second")]
    return model.encode_image([folder / f"{i}.png" for i in range(SAMPLES)]), model.encode_text(texts)


def label(i: int) -> str:
    return f"{i // 6}.tar/k{i}"


def search(topic: str, folder: Path, *flags: Any, out: str = "") -> list[dict[str, Any]]:
    """Run the verb; the rows of the file that it wrote."""
    path = folder / out
    code = main([topic, str(folder / "store"), *map(str, flags), *(["--out", str(path)] if out else [])])
    assert code == 0
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return list(csv.DictReader(path.open())) if path.suffix == ".csv" else []


def test_neighbours_of_a_picture_a_text_and_a_sample(
    folder: Path, features: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--query-image", folder / "3.png", "--query-text", "a cat", "--query-key", "k7", "-k", 4)
    found = search("neighbours", folder, *flags, out="near.parquet")
    image, _ = features
    assert [row["rank"] for row in found] == [1, 2, 3, 4] * 3
    for first, query in ((0, image[3]), (8, image[7])):
        cosines = [(float(image[i] @ query), label(i)) for i in USED]
        best = sorted(cosines, key=lambda pair: -pair[0])[:4]
        rows = found[first : first + 4]
        assert [row["score"] for row in rows] == pytest.approx([score for score, _ in best], abs=1e-5)
        assert f"{rows[0]['shard']}/{rows[0]['key']}" == best[0][1]
    assert found[0]["key"] == "k3" and found[0]["score"] == pytest.approx(1, abs=1e-5)
    assert found[0]["caption"] == "picture 3, first caption"
    printed = capsys.readouterr().out
    assert "a cat" in printed and "0.tar/k3" in printed
    rows = search("neighbours", folder, "--part", "text", "--query-text", "picture 4, second caption", out="near.csv")
    assert rows[0]["caption"] == "picture 4, second caption" and float(rows[0]["score"]) == pytest.approx(1, abs=1e-5)
    assert len(rows) == 10
    found = search("neighbours", folder, "--query-key", "k11", "-k", 3, out="near.jsonl")
    assert [row["key"] for row in found] == ["k2", "k9", "k11"], "equal ones come in the order of the store"


def test_duplicates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search("duplicates", folder, "--threshold", 0.99999, out="drop.csv")
    assert [(row["shard"], row["key"], row["duplicate_of"]) for row in found] == [
        ("1.tar", "k9", "0.tar/k2"),
        ("1.tar", "k11", "0.tar/k2"),
    ]
    printed = capsys.readouterr().out
    assert "11 samples: 1 groups" in printed and "2 samples (18.18%)" in printed
    search("duplicates", folder, "--threshold", 0.99999, out="drop.txt")
    assert (folder / "drop.txt").read_text() == "1.tar/k9\n1.tar/k11\n"


def test_of_duplicates_the_one_that_scores_best_stays(folder: Path, features: Any) -> None:
    image, text = features
    score = {i: max(float(image[i] @ text[2 * i + j]) for j in range(2)) for i in (2, 9, 11)}
    best = max(score, key=lambda i: score[i])
    flags = ("--threshold", 0.99999, "--keep-by", "score", "--clusters", 3)
    found = search("duplicates", folder, *flags, out="drop.jsonl")
    assert {row["key"] for row in found} == {f"k{i}" for i in (2, 9, 11) if i != best}
    assert {row["duplicate_of"] for row in found} == {label(best)}


def test_clusters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search("clusters", folder, "--k", 4, "--nearest", 2, out="clusters.parquet")
    assert [f"{row['shard']}/{row['key']}" for row in found] == [label(i) for i in USED]
    assert len({row["cluster"] for row in found}) == 4
    by_key = {row["key"]: row["cluster"] for row in found}
    assert by_key["k2"] == by_key["k9"] == by_key["k11"]
    assert "mean cosine with the centroid" in capsys.readouterr().out


def test_scores_and_what_is_kept(folder: Path, features: Any, capsys: pytest.CaptureFixture[str]) -> None:
    image, text = features
    wanted = {(i, j): float(image[i] @ text[2 * i + j]) for i in USED for j in range(2)}
    found = search("scores", folder, out="pairs.parquet")
    assert [(row["key"], row["choice"]) for row in found] == [(f"k{i}", j) for i, j in wanted]
    assert [row["score"] for row in found] == pytest.approx(list(wanted.values()), abs=1e-6)
    assert found[3]["caption"] == "picture 1, second caption"
    best = {i: max(wanted[i, 0], wanted[i, 1]) for i in USED}
    kept = search("scores", folder, "--top-fraction", 0.5, out="kept.csv")
    most = sorted(best, key=lambda i: -best[i])[: round(0.5 * len(USED))]
    assert {row["key"] for row in kept} >= {f"k{i}" for i in most if i not in (2, 9, 11)}
    assert len(most) <= len(kept) <= len(most) + 2  # copies with equal captions' scores are kept together
    least = sorted(best.values())[4] - 1e-5
    kept = search("scores", folder, f"--min-score={least}", out="kept.parquet")
    assert [row["key"] for row in kept] == [f"k{i}" for i in USED if best[i] >= least]
    assert "best caption of each sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("neighbours", "set --query-image FILE"),
        ("neighbours --query-key nobody", "no such sample"),
        ("neighbours --query-image nowhere.png", "nowhere.png: No such file"),
        ("neighbours --query-image model.json", "undecodable_image"),
        ("neighbours --query-image /dev/null", "/dev/null: not a regular file"),
        ("neighbours --query-key k1 --part teacher.image", "no features 'teacher.image'"),
        ("neighbours --query-key k1 --out a.doc", "expected a file with the suffix"),
        ("neighbours --query-key k1 -k 0", "expected a whole number, at least 1, not '0'"),
        ("duplicates --threshold 2", "expected a cosine, from -1 to 1, not '2'"),
        ("duplicates --keep-by centroid", "set their number"),
        ("duplicates --clusters 12", "12 clusters of 11 rows"),
        ("duplicates --part text", "duplicates requires a part of images"),
        ("clusters --k 100", "100 clusters of 11 rows"),
        ("scores --top-fraction 0", "expected a fraction above 0"),
        ("neighbours --query-key k1 --index faisss", "expected exact, faiss or faiss:FACTORY"),
        ("neighbours --query-key k1 --out s3://a/b.csv", "s3://a/b.csv is a URL"),
        ("nonsense", "at least one query"),
    ],
)
def test_wrong_flags(command: str, said: str, folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    topic, *flags = command.split()
    try:
        code = main([topic, str(folder / "store"), *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err
