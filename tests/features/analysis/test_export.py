"""Exported files against what the store holds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from clipstream.cli.verbs.export import main
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.features.analysis.export import export
from clipstream.features.analysis.tables import TableWriter
from clipstream.testing import SMALL_MODEL
from tests.support.features import Content
from tests.support.forks import Fork, wait_until
from tests.support.stored_features import Made, make_store

DTYPES = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("int8", "float32")]


def table_of(paths: list[Path]) -> pa.Table:
    return pa.concat_tables([parquet.read_table(path) for path in paths])


def array_of(table: pa.Table) -> np.ndarray:  # type: ignore[type-arg]
    column = table["features"].combine_chunks()
    return np.asarray(column.values.to_numpy(zero_copy_only=False)).reshape(len(table), -1)


def names_of(table: pa.Table) -> list[tuple[str, str, str]]:
    return list(zip(*(table[name].to_pylist() for name in ("source", "shard", "key")), strict=True))


@pytest.mark.parametrize(("stored", "written"), DTYPES)
def test_parquet_of_views(tmp_path: Path, stored: str, written: str) -> None:
    made = make_store(tmp_path / "store", views=2, dtype=stored)
    paths = export(made.store, "image", tmp_path / "out", "parquet", captions=True)
    assert [path.name for path in paths] == ["a-00000.parquet", "b%2Fc-00000.parquet"]
    table = table_of(paths)
    assert array_of(table).dtype == written and table.schema.field("features").type.list_size == 8
    assert np.array_equal(array_of(table), torch.cat(made.images).numpy())
    assert names_of(table) == [name for name in made.names for _ in range(2)]
    assert table["view"].to_pylist() == [0, 1] * len(made.names)
    assert table["captions"].to_pylist() == [own for own in made.captions for _ in range(2)]


def test_parquet_of_captions_in_several_files(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", sizes={"a": [5, 9, 4]})
    paths = export(made.store, "text", tmp_path / "out", "parquet", dtype="float16", captions=True, file_rows=3)
    assert [path.name for path in paths] == [f"a-0000{i}.parquet" for i in range(3)]
    table = table_of(paths)
    assert np.array_equal(array_of(table), torch.cat(made.texts).half().numpy())
    assert table["caption"].to_pylist() == [text for own in made.captions for text in own]
    assert table["choice"].to_pylist() == [i for own in made.captions for i in range(len(own))]
    assert "captions" not in table.column_names


@pytest.mark.parametrize(("stored", "written"), DTYPES)
def test_numpy(tmp_path: Path, stored: str, written: str) -> None:
    made = make_store(tmp_path / "store", views=2, dtype=stored)
    features, keys = export(made.store, "image", tmp_path / "out", "npy")
    array = np.load(features, mmap_mode="r")
    assert array.dtype == written and np.array_equal(array, torch.cat(made.images).numpy())
    assert names_of(parquet.read_table(keys)) == [name for name in made.names for _ in range(2)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["image.keys.parquet", "image.npy"]


def exported(made: Made, out: Path, *flags: str) -> list[str]:
    assert main(["features", str(made.path), str(out), *flags]) == 0
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def test_the_verb_exports_all_parts_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_store(tmp_path / "store")
    files = ["image/a-00000.parquet", "image/b%2Fc-00000.parquet", "text/a-00000.parquet", "text/b%2Fc-00000.parquet"]
    assert exported(made, tmp_path / "out") == files
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / file) for file in files]
    assert exported(made, tmp_path / "np", "--format", "npy", "--part", "text") == ["text.keys.parquet", "text.npy"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--part", "ids"], "no features 'ids'"),
        (["--rows", "0"], "must be 1 or more"),
        (["--format", "csv"], "invalid choice"),
    ],
)
def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    made = make_store(tmp_path / "store")
    try:
        code = main(["features", str(made.path), str(tmp_path / "out"), *flags])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2 and said in capsys.readouterr().err


def test_a_store_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is no feature store" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json", ".jsonl", ".txt"])
def test_a_table_appears_when_it_is_complete(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"new/table{suffix}"
    schema = pa.schema([("shard", pa.string()), ("key", pa.string())])
    with pytest.raises(ValueError, match="stop"), TableWriter(path, schema) as writer:
        writer.write({"shard": ["0.tar"], "key": ["a"]})
        raise ValueError("stop")
    assert list(path.parent.iterdir()) == []
    with TableWriter(path, schema) as writer:
        for key in ("a", "b,\n"):
            writer.write({"shard": ["0.tar"], "key": [key]})
        assert not path.exists()
    text = b"" if suffix == ".parquet" else path.read_bytes()
    assert (
        text
        == {
            ".parquet": b"",
            ".csv": b'"shard","key"\n"0.tar","a"\n"0.tar","b,\n"\n',
            ".json": b'[\n{"shard": "0.tar", "key": "a"},\n{"shard": "0.tar", "key": "b,\\n"}\n]\n',
            ".jsonl": b'{"shard": "0.tar", "key": "a"}\n{"shard": "0.tar", "key": "b,\\n"}\n',
            ".txt": b"0.tar/a\n0.tar/b,\n\n",
        }[suffix]
    )


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    schema = pa.schema([("shard", pa.string()), ("key", pa.string())])
    with pytest.raises(SettingsError, match="the suffix says"):
        TableWriter(tmp_path / "a.xlsx", schema)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        TableWriter(tmp_path / "file/a.csv", schema)
    with pytest.raises(ClipstreamError, match="could not be written"), TableWriter(tmp_path / "a.csv", schema) as table:
        table.write({"shard": ["0.tar"], "key": ["a"]})
        (tmp_path / "a.csv").mkdir()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".txt"])
def test_keys_that_are_not_utf8_are_escaped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    with TableWriter(path, pa.schema([("shard", pa.string()), ("key", pa.string()), ("n", pa.int32())])) as writer:
        writer.write({"shard": ["0.tar"], "key": ["a\udcff"], "n": [1]})
    text = str(parquet.read_table(path).to_pylist()) if suffix == ".parquet" else path.read_text()
    assert "udcff" in text


def test_sigterm_leaves_no_drafts(tmp_path: Path) -> None:
    Content(sizes={"train": [40]}).make(tmp_path / "s")
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "image.npy.tmp")  # holds the command up
    process = Fork(["-m", "clipstream", "export", "features", str(tmp_path / "s"), str(out), "--format", "npy"])
    wait_until((out / "image.keys.parquet.tmp").exists, process)
    process.terminate()
    assert process.communicate()[1] == b"stopped by SIGTERM\n" and process.returncode == 128 + signal.SIGTERM
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["search", "scores", "STORE", "--out", "OUT/a.txt", "--min-score", "-1"],
        ["bench", "--train-data", "synthetic:", "--model", "MODEL.json", "--counts", "0",
         "--seconds", "1000", "--output", "OUT/b"],
    ],
)  # fmt: skip
def test_sigterm_ends_search_and_bench_in_a_sentence(tmp_path: Path, argv: list[str]) -> None:
    make_store(tmp_path / "STORE")
    (tmp_path / "OUT").mkdir()
    os.mkfifo(tmp_path / "OUT/a.txt.tmp")  # holds the search up
    (tmp_path / "MODEL.json").write_text(json.dumps(SMALL_MODEL))
    process = Fork(["-m", *(str(tmp_path / one) if one.startswith(("STORE", "OUT", "MODEL")) else one for one in argv)])
    wait_until(lambda: bool(process.stdout.read()), process)
    process.terminate()
    assert process.communicate()[1].endswith(b"stopped by SIGTERM\n") and process.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "OUT/a.txt").exists()
