"""Lists of samples to use or to leave out: their files, and what a loader makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from clipstream.data.decode.key_lists import KeyList, read_list
from clipstream.errors import SettingsError
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.tars import write_tar

COLUMNS = {"source": ["train", "train", "other"], "shard": ["0.tar", "1.tar", "0.tar"], "key": ["007", "a/b", "c"]}
WRITERS = {".csv": csv.write_csv, ".parquet": parquet.write_table}


@pytest.mark.parametrize("suffix", WRITERS)
def test_tables_and_texts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"keys{suffix}"
    WRITERS[suffix](pa.table({**COLUMNS, "score": [0.5, 0.25, 1.0]}), path)
    keys = KeyList(str(path), "train")
    assert keys.holds("0.tar/007", "007") and keys.holds("1.tar/a/b", "a/b")
    assert not keys.holds("1.tar/007", "007") and not keys.holds("0.tar/7", "7") and not keys.holds("0.tar/c", "c")
    WRITERS[suffix](pa.table({"key": COLUMNS["key"]}), path)
    keys = KeyList(str(path), "train")
    assert all(keys.holds(f"9.tar/{key}", key) for key in COLUMNS["key"]) and not keys.holds("9.tar/7", "7")
    path = tmp_path / "keys.txt"
    path.write_bytes(b"0.tar/007\r\n\nkey with spaces \nb\xff")
    keys = KeyList(str(path), "train")
    assert keys.holds("0.tar/007", "007") and not keys.holds("1.tar/007", "007") and not keys.holds("1.tar/", "")
    assert keys.holds("1.tar/key with spaces ", "key with spaces ") and keys.holds("1.tar/b\udcff", "b\udcff")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("form", ["  {}\t", "/data/set/{}", "s3://bucket/set/{}", "./{}", "{}\r"])
def test_how_people_write_lists(tmp_path: Path, encoding: str, form: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_bytes("\n".join(form.format(name) for name in ("0.tar/a/b", "1.tar.gz/c", "2.tar/é x")).encode(encoding))
    keys = KeyList(str(path), "train")
    assert keys.holds("0.tar/a/b", "a/b") and keys.holds("1.tar.gz/c", "c") and keys.holds("2.tar/é x", "é x")
    assert not keys.holds("1.tar/a/b", "a/b") and not keys.holds("0.tar/b", "b")
    path.write_bytes(f" shard,key \n/x/0.tar,{form.format('k')}\n".replace("\r", "").encode(encoding))
    path.rename(tmp_path / "keys.csv")
    if form in ("{}", "{}\r"):
        assert KeyList(str(tmp_path / "keys.csv"), "train").holds("0.tar/k", "k")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "No such file"),
        ("none.parquet", None, "cannot read a list of keys"),
        ("empty.txt", "\n", "no keys of source"),
        ("empty.csv", "", "cannot read a list of keys"),
        ("names.csv", "name\na\n", "no column 'key'"),
        ("other.csv", "source,key\nother,a\n", "no keys of source 'train' in it"),
        ("broken.parquet", "PAR1", "cannot read a list of keys"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=said) as caught:
        KeyList(str(tmp_path / name), "train")
    assert name in str(caught.value)


def test_a_column_must_have_one_number_for_each_sample(tmp_path: Path) -> None:
    path, shards = tmp_path / "p.parquet", ["a/0.tar", "b/0.tar", "b/1.tar"]
    for values, said in (
        ([0.5, 0.25, 1.0], "p 0.5 for 'a/0.tar/k' and 0.25 for 'b/0.tar/k'"),
        ([{"x": 1}] * 3, "cannot read a list of keys"),
        ([[0.5, 1.0]] * 3, "'p' has lists"),
        ([0.5, 0.5, 1.0], ""),
    ):
        parquet.write_table(pa.table({"shard": shards, "key": ["k"] * 3, "p": values}), path)
        if said:
            with pytest.raises(SettingsError, match=said):
                KeyList(str(path), "train", "p")
    keys = KeyList(str(path), "train", "p")
    assert keys.values is not None and keys.values[keys.place("1.tar/k", "k")] == 1


def write_shards(folder: Path) -> str:
    """Two shards of 50 samples with the keys k0 … k49; the picture of every tenth is broken."""
    for shard in range(2):
        jpgs = [picture(i, size=20) if i % 10 else b"broken" for i in range(50)]
        write_tar(folder / f"{shard}.tar", [{"__key__": f"k{i}", "jpg": jpg, "txt": "x"} for i, jpg in enumerate(jpgs)])
    return str(folder / "{0..1}.tar")


@pytest.mark.parametrize(("mode", "workers"), [("resampled", 0), ("epoch", 2)])
def test_training_uses_the_samples_that_are_kept(tmp_path: Path, mode: str, workers: int) -> None:
    shards = write_shards(tmp_path)
    kept = {f"0.tar/k{i}" for i in range(20)} | {f"1.tar/k{i}" for i in range(5)}
    (tmp_path / "keep.txt").write_text("\n".join(sorted(kept)))
    (tmp_path / "drop.txt").write_text("0.tar/k1\n")
    source = {"shards": shards, "keep": str(tmp_path / "keep.txt"), "drop": str(tmp_path / "drop.txt")}
    # Nearly 80% of the samples are left out, and 10% of the rest fail: more than 5% but less than 15%.
    limits = {"max_sample_failures": 0.15, "sampling": {"mode": mode}, "workers": workers}
    with loader(data(shards, sources={"train": source}, **limits)) as batches:
        seen = {key for _ in range(30) for key in next(batches).keys}
        counts = batches.health.sources["train"]
    assert seen == {name for name in kept if name not in ("0.tar/k0", "0.tar/k10", "1.tar/k0", "0.tar/k1")}
    assert set(counts.dropped) == {"not_kept", "undecodable_image"}
    assert counts.read - counts.used == sum(counts.dropped.values()) > 2 * counts.used
    assert counts.failed == counts.dropped["undecodable_image"]
    assert {one.reason for one in batches.health.take_dropped()} == {"undecodable_image"}


@pytest.mark.parametrize(
    ("flag", "lines", "said"),
    [
        ("drop", "absent", "drop: none of the "),
        ("drop", "k3", ""),
        ("keep", "1.tar/k7", "keep: only "),
        ("keep", "\n".join(f"k{i}" for i in range(100)), ""),
    ],
)
def test_lists_that_match_next_to_nothing_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flag: str, lines: str, said: str
) -> None:
    samples = [{"__key__": f"k{i}", "jpg": picture(i, size=8), "txt": f"{i}"} for i in range(1200)]
    for n in range(3):  # of one or two, all keys are compared before samples are read
        write_tar(tmp_path / f"{n}.tar", samples[n::3])
    (tmp_path / "list").write_text(lines)
    source = {"shards": str(tmp_path / "{0..2}.tar"), flag: str(tmp_path / "list")}
    with loader(data(source["shards"], sources={"train": source})) as batches:
        while batches.health.sources["train"].read < 2100:
            next(batches)
    warnings = [one.getMessage() for one in caplog.records if "data.sources.train" in one.getMessage()]
    assert len(warnings) == bool(said) and said in "".join(warnings)


MATCH = "entries match samples of these data"


@pytest.mark.parametrize("flag", ["keep", "drop"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["other.tar/k1"], "0 of its 1 entries match"),
        (["0.tar/k1", "1.tar/k1", "other.tar/k1"], ""),  # of more shards
        (["0.tar/k1", "other.tar/k1"], f"1 of its 2 {MATCH}; 'other.tar/k1' does not, and"),
        (["0.tar/k1", "0.tar/k50"], f"1 of its 2 {MATCH}; '0.tar/k50' does not: samples"),
        (["/old/place/0.tar/k1", "1.tar#0-5/k2", "k3"], ""),
        (["k1", "k50"], f"1 of its 2 {MATCH}; 'k50' does not: samples are called '0.tar/k0'"),
        (["0/k1"], f"0 of its 1 {MATCH}; '0/k1' does not: samples are called '0.tar/k0'"),
    ],
)
def test_entries_without_a_sample_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flag: str, lines: list[str], said: str
) -> None:
    (tmp_path / "list.txt").write_text("\n".join(lines))
    settings = data(None, sources={"train": {"shards": write_shards(tmp_path), flag: str(tmp_path / "list.txt")}})
    if said:
        with pytest.raises(SettingsError, match=re.escape(said)) as caught:
            loader(settings)
        assert f"--data.sources.train.{flag}: {tmp_path}/list.txt" in str(caught.value)
    else:
        next(loader(settings))
        assert ("the list is of more shards" in caplog.text) == (len(lines) > 2 and "other.tar/k1" in lines)


def test_sources_may_share_a_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path)
    (tmp_path / "list.txt").write_text("0.tar/k1\n1.tar/k2")
    sources = {str(n): {"shards": f"{tmp_path}/{n}.tar", "drop": str(tmp_path / "list.txt")} for n in range(2)}
    next(loader(data(None, sources=sources)))
    (tmp_path / "list.txt").write_text("0.tar/k1\n1.tar/k2\n1.tar/absent")
    with pytest.raises(SettingsError, match=f"2 of its 3 {MATCH}; '1.tar/absent' does"):
        loader(data(None, sources=sources))
    assert "more shards" not in caplog.text


def test_cells_of_a_list_may_be_empty_or_numbers(tmp_path: Path) -> None:
    """A cell `shard` without a text is an entry by its key alone; keys are texts or numbers."""
    lists = {
        "csv": "shard,key\n,k1\n0.tar,k2\n",
        "jsonl": '{"key": "k1"}\n{"key": 7, "shard": null}\n{"key": "k2", "shard": "0.tar"}\n',
    }
    for suffix, text in lists.items():
        (path := tmp_path / f"list.{suffix}").write_text(text)
        keys = KeyList(str(path), "train")
        assert keys.holds("9.tar/k1", "k1") and keys.holds("0.tar/k2", "k2") and not keys.holds("1.tar/k2", "k2")
        assert keys.holds("9.tar/7", "7") == (suffix == "jsonl")


def test_a_list_whose_rows_have_fields_of_their_own_takes_linear_time(tmp_path: Path) -> None:
    """Only the columns of a list are held: 20,000 fields of as many rows are 400 million cells."""
    path = tmp_path / "keep.jsonl"
    path.write_text("".join(f'{{"key": "k{number}", "n{number}": 1}}\n' for number in range(20_000)))
    assert len(read_list(str(path), None).keys) == 20_000
