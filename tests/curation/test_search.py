"""`clipstream search` on a small store whose features a real model made."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pyarrow import parquet

import clipstream
from clipstream.cli.verbs import precompute
from clipstream.cli.verbs.search import main
from clipstream.config.settings import load
from clipstream.curation.stores import Doubts
from clipstream.curation.topics import _mistaken
from clipstream.data.groups import look_up
from clipstream.data.sources import Source, SourceContext
from clipstream.storage.shard_cache import ShardCache
from tests.support.runs import MODEL
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


def test_the_page_of_duplicates(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each group with the image that stays; images that cannot be read are told, as those of a table elsewhere."""
    page, flags = tmp_path / "page.html", ("--threshold", 0.99999)
    argv = ["duplicates", str(folder / "store"), *map(str, flags), "--html", str(page), "--images"]
    assert main([*argv, f"{folder}/{{0..1}}.tar"]) == 0 and not caplog.records
    html = page.read_text()
    assert "3 near-duplicates; kept: 0.tar/k2" in html and html.count("data:image") == 9  # the 3, and their nearest
    with tarfile.open(folder / "1.tar") as old, tarfile.open(tmp_path / "1.tar", "w") as new:
        for member in old:
            if not member.name.startswith("k9."):
                new.addfile(member, old.extractfile(member))
    shutil.copy(folder / "0.tar", tmp_path)
    assert main([*argv, f"{tmp_path}/{{0..1}}.tar", "--data.sources.train.folder", str(folder)]) == 0
    assert page.read_text().count("data:image") == 8
    assert f"1 images cannot be read from --images {tmp_path}" in caplog.text and "such as 1.tar/k9: if" in caplog.text


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


def test_doubtful_pairs_and_their_page(folder: Path, features: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "doubt.html"
    flags = ("--worst", 4, "-k", 2, "--html", page, "--images", f"{folder}/{{0..1}}.tar")
    found = search("doubt", folder, *flags, out="doubt.parquet")
    assert [row["doubt"] for row in found] == sorted(row["doubt"] for row in found) and len(found) == 4
    image, text = features
    for row in found:
        i = int(row["key"][1:])
        assert row["cosine"] == pytest.approx(
            float(image[i] @ F.normalize(text[2 * i] + text[2 * i + 1], dim=0)), abs=1e-5
        )
        assert row["caption"] == f"picture {i}, first caption" != row["other_caption"]
    printed = capsys.readouterr().out
    assert "Doubtful pairs" in printed and "11 samples with captions" in printed and "the 4 most doubtful" in printed
    html = page.read_text()
    assert html.count("<figure") >= 4 and html.count("data:image") >= 4 and "the worst 4" in html
    search("doubt", folder, "--worst", 0.2, out="doubt.txt")
    assert len((folder / "doubt.txt").read_text().splitlines()) == round(0.2 * len(USED))


def test_captions_that_match_many_images_and_confused_classes() -> None:
    """Of 30 images in each of three classes, 10 of the second and all of the third match the first best."""
    rows, classes = np.arange(90), np.repeat([0, 30, 60], 30)
    others = np.where(classes == 0, 30, 0)
    mistaken = np.where((classes == 60) | ((classes == 30) & (rows < 40)), 1.0, -1.0).astype(np.float32)
    zero = np.zeros(90, np.float32)
    found = _mistaken(Doubts(rows, zero, zero, classes, others, mistaken))
    assert [(of.row, of.own, of.images, of.rows[0]) for of in found] == [(0, 60, 30, 60), (0, 30, 10, 30)]
    found = _mistaken(Doubts(rows, zero, zero, rows, others, mistaken))
    assert [(of.row, of.own, of.images, len(of.rows)) for of in found] == [(0, -1, 40, 12)]


def test_hard_negatives_are_those_that_training_reads(folder: Path, features: Any) -> None:
    found = search("neighbours", folder, "--mine", "image-text", "-k", 3, "--max-cosine", 0.99999, out="hard.parquet")
    assert [(row["shard"], row["key"]) for row in found] == [(f"{i // 6}.tar", f"k{i}") for i in USED]
    assert {row["source"] for row in found} == {"train"}
    query, other = features[0], F.normalize(features[1].view(SAMPLES, 2, -1).mean(dim=1), dim=1)
    for i, row in zip(USED, found, strict=True):
        wanted = [j for j in USED if j != i and COPIES.get(i, i) != COPIES.get(j, j)]
        best = sorted(wanted, key=lambda j: -float(query[i] @ other[j]))[:3]
        if len({round(float(query[i] @ other[j]), 5) for j in wanted}) == len(wanted):  # copies match alike
            assert row["neighbours"] == [label(j) for j in best]
    flags = "--caption-json both --data.sampling.mode indexed --data.global-batch-size 2 --data.hard-negatives"
    settings = load(["--train-data", f"{folder}/{{0..1}}.tar", *flags.split(), str(folder / "hard.parquet")])
    section = settings.data.sources["train"]
    source = Source(section, SourceContext(ShardCache(None), None, "data.sources.train"))
    look_up(source, settings.data)
    assert source.neighbours is not None and (source.neighbours[0] >= 0).sum() == 3


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
        ("neighbours --query-key k1 -k 0", "-k: expected at least 1, not 0"),
        ("duplicates --threshold 2", "--threshold: expected at most 1, not 2"),
        ("duplicates --keep-by centroid", "set their number"),
        ("duplicates --clusters 12", "12 clusters of 11 rows"),
        ("duplicates --part text", "duplicates requires a part of images"),
        ("clusters --k 100", "100 clusters of 11 rows"),
        ("doubt --worst 1.5", "expected a number or a fraction below 1, not 1.5"),
        ("doubt --html page.html", "set both, or none"),
        ("doubt --html page.html --images 0.tar", "there is no shard"),
        ("duplicates --images 0.tar", "set both, or none"),
        ("duplicates --html page.html --images {0..1}.tar --data.sources.train.foldr x", "did you mean 'folder'"),
        ("duplicates --sort", "--sort is of the settings that read --images"),
        ("doubt photos", "photos is one argument too many"),
        ("neighbours --mine image-text", "set --out FILE.parquet"),
        ("neighbours --mine image-text --out a.csv", "set --out FILE.parquet"),
        ("neighbours --mine image-text --out a.parquet --query-key k1", "for all samples"),
        ("duplicates --device hpu", "--device hpu: "),
        ("scores --top-fraction 0", "--top-fraction: expected a number above 0"),
        ("neighbours --query-key k1 --out s3://a/b.csv", "s3://a/b.csv is a URL"),
        ("nonsense", "missing QUERY: clipstream search RUN DATA QUERY..."),
    ],
)
def test_wrong_flags(command: str, said: str, folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    topic, *flags = command.split()
    assert main([topic, str(folder / "store"), *flags]) == 2 and said in capsys.readouterr().err
