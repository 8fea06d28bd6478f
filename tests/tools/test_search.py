"""`clipstream search` on a small store whose features a real model made."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pyarrow import parquet

from clipstream.cli.verbs.search import main
from clipstream.data.decode.images import EvalTransform
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.data.settings import ModelTokenizer
from clipstream.features.manifest import Manifest, PartInfo, ShardInfo, SourceInfo, sample_dtype
from clipstream.features.search import NO_FAISS
from clipstream.features.writer import Chunk, StoreWriter, Texts
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from tests.support.models import MODEL

SAMPLES = 12  # number 5 is dropped; 9 and 11 are copies of 2
COPIES = {9: 2, 11: 2}
USED = [i for i in range(SAMPLES) if i != 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures 0.png … 11.png, the store of their features, and image [12, D] and text [24, D]."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "model.json").write_text(json.dumps(MODEL))
    towers = build_towers(ModelSettings(name=str(folder / "model.json")), seed=0).eval()
    draw = np.random.default_rng(0)
    for i in range(SAMPLES):
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(5, 0).repeat(5, 1)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for copy, of in COPIES.items():
        (folder / f"{copy}.png").write_bytes((folder / f"{of}.png").read_bytes())
    transform = EvalTransform(towers.image, "white")
    pixels = np.stack([transform((folder / f"{i}.png").read_bytes()) for i in range(SAMPLES)])
    texts = [f"picture {i // 2}, {'first' if i % 2 == 0 else 'second'} caption" for i in range(2 * SAMPLES)]
    tokenizer = build_tokenizer(ModelTokenizer(), towers.open_clip_tokenizer(), towers.context_length)
    with torch.inference_mode():
        image = towers.encode_image(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        text = towers.encode_text(torch.as_tensor(tokenizer.encode(texts)))
    np.savez(folder / "features.npz", image=image.numpy(), text=text.numpy())
    parts = {"image": PartInfo(16, "float32", "view"), "text": PartInfo(16, "float32", "caption")}
    source = SourceInfo((ShardInfo("shards/0.tar"), ShardInfo("shards/1.tar")))
    writer = StoreWriter(folder / "store", Manifest({"train": source}, parts))
    half = SAMPLES // 2
    for shard in range(2):
        some = range(shard * half, (shard + 1) * half)
        rows = np.zeros(half, sample_dtype(0, 1))
        rows["used"] = [i in USED for i in some]
        rows["counts"][:, 0] = rows["used"] * 2
        rows["start"] = rows["counts"][:, 0].cumsum() - rows["counts"][:, 0]
        used = torch.tensor([2 * i + j for i in some for j in range(2) if i in USED])
        captions = [texts[2 * i : 2 * i + 2] if i in USED else [] for i in some]
        reasons = ["" if i in USED else "no_image" for i in some]
        parts_of = {"samples": rows, "image": image[some.start : some.stop], "text": text[used]}
        writer.write(Chunk("train", shard, 0, half), parts_of, Texts([f"k{i}" for i in some], captions, reasons))
    writer.finish()
    writer.close()
    towers.save_pretrained(folder / "store/model")
    return folder


def label(i: int) -> str:
    return f"{i // (SAMPLES // 2)}.tar/k{i}"


def features(folder: Path, part: str) -> torch.Tensor:
    """float32 [n, D] of all samples or captions, dropped ones included."""
    return F.normalize(torch.from_numpy(np.load(folder / "features.npz")[part]), dim=1)


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


def test_neighbours_of_a_picture_a_text_and_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--query-image", folder / "3.png", "--query-text", "a cat", "--query-key", "k7", "-k", 4)
    found = search("neighbours", folder, *flags, out="near.parquet")
    image, text = features(folder, "image"), features(folder, "text")
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
    assert len(rows) == 10 and text.shape == (24, 16)


def test_neighbours_of_equal_pictures_come_in_the_order_of_the_store(folder: Path) -> None:
    found = search("neighbours", folder, "--query-key", "k11", "-k", 3, out="near.jsonl")
    assert [row["key"] for row in found] == ["k2", "k9", "k11"]


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


def test_clusters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search("clusters", folder, "--k", 4, "--nearest", 2, out="clusters.parquet")
    assert [f"{row['shard']}/{row['key']}" for row in found] == [label(i) for i in USED]
    assert len({row["cluster"] for row in found}) == 4
    by_key = {row["key"]: row["cluster"] for row in found}
    assert by_key["k2"] == by_key["k9"] == by_key["k11"]
    assert "mean cosine with the centroid" in capsys.readouterr().out


def test_scores_and_what_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, text = features(folder, "image"), features(folder, "text")
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


def test_wrong_flags(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    (folder / "setup").write_text("no image")
    os.mkfifo(folder / "fifo")  # nobody writes to it
    for command, said in (
        ("neighbours", "set --query-image FILE"),
        ("neighbours --query-key nobody", "no such sample"),
        ("neighbours --query-image nowhere.png", "--query-image nowhere.png: No such file"),
        ("neighbours --query-image setup", "undecodable_image"),
        ("neighbours --query-image fifo", "--query-image fifo: not a regular file"),
        ("neighbours --query-key k1 --part teacher.image", "no features 'teacher.image'"),
        ("neighbours --query-key k1 --out a.doc", "expected a file with the suffix"),
        ("neighbours --query-key k1 --device nonsense", "--device nonsense"),
        ("neighbours --query-key k1 -k 0", "expected a whole number, at least 1, not '0'"),
        ("duplicates --threshold 2", "expected a cosine, from -1 to 1, not '2'"),
        ("duplicates --part text", "duplicates requires a part of images"),
        ("clusters --k 100", "100 clusters of 11 rows"),
        ("scores --top-fraction 0", "expected a fraction above 0"),
        ("scores --min-score nan", "expected a cosine, from -1 to 1, not 'nan'"),
        ("neighbours --query-key k1 --index faisss", "expected exact, faiss or faiss:FACTORY"),
        ("neighbours --query-key k1 --out s3://a/b.csv", "s3://a/b.csv is a URL"),
        ("nonsense", "at least one query"),
    ):
        topic, *flags = command.split()
        try:
            code = main([topic, str(folder / "store"), *flags])
        except SystemExit as end:
            code = int(str(end.code))
        assert code == 2 and said in capsys.readouterr().err, command


def test_faiss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["neighbours", str(folder / "store"), "--query-key", "k1", "-k", "3", "--index", "faiss:Flat"]
    if importlib.util.find_spec("faiss") is None:
        assert main(command) == 2
        assert NO_FAISS in capsys.readouterr().err
        return
    assert main(command) == 0
    assert "recall@3 1.0000 of 1 queries" in capsys.readouterr().out
    assert (folder / "store/faiss/image.faiss_Flat.index").exists()
