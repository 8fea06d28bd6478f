"""Exported files against what the store holds."""

from __future__ import annotations

import os
import signal
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from clipstream.cli.verbs.export import main
from clipstream.cli.verbs.precompute import main as precompute
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.export.tables import export
from clipstream.utils.table_files import TableWriter
from tests.support import model_files
from tests.support.features import Content
from tests.support.forks import Fork, wait_until
from tests.support.pictures import make_shards
from tests.support.stored_features import make_store

DTYPES = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("int8", "float32")]


def array_of(table: pa.Table) -> np.ndarray:  # type: ignore[type-arg]
    column = table["features"].combine_chunks()
    return np.asarray(column.values.to_numpy(zero_copy_only=False)).reshape(len(table), -1)


def names_of(table: pa.Table) -> list[tuple[str, str, str]]:
    return list(zip(*(table[name].to_pylist() for name in ("source", "shard", "key")), strict=True))


@pytest.mark.parametrize(("stored", "written"), DTYPES)
def test_views_in_parquet_and_numpy_files(tmp_path: Path, stored: str, written: str) -> None:
    made = make_store(tmp_path / "store", views=2, dtype=stored)
    paths = export(made.store, "image", tmp_path / "out", "parquet", captions=True)
    assert [path.name for path in paths] == ["a-00000.parquet", "b%2Fc-00000.parquet"]
    table = pa.concat_tables(map(parquet.read_table, paths))
    assert array_of(table).dtype == written and table.schema.field("features").type.list_size == 8
    assert np.array_equal(array_of(table), torch.cat(made.images).numpy())
    assert names_of(table) == [name for name in made.names for _ in range(2)]
    assert table["view"].to_pylist() == [0, 1] * len(made.names)
    assert table["captions"].to_pylist() == [own for own in made.captions for _ in range(2)]
    features, keys = export(made.store, "image", tmp_path / "np", "npy")
    array = np.load(features, mmap_mode="r")
    assert array.dtype == written and np.array_equal(array, torch.cat(made.images).numpy())
    assert names_of(parquet.read_table(keys)) == names_of(table)
    assert sorted(path.name for path in (tmp_path / "np").iterdir()) == ["image.keys.parquet", "image.npy"]


def test_an_older_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """No row of it is left for a reader of OUT/PART/*.parquet; files of other sources are not mixed with."""
    large = make_store(tmp_path / "large", sizes={"a": [5, 9, 4], "b/c": [3]})
    small = make_store(tmp_path / "small", sizes={"a": [2]})
    out = tmp_path / "out"
    for rows in (3, None, 2):
        for made in (large, make_store(tmp_path / f"new{rows}", sizes={"b/c": [2], "a": [1]})):
            paths = export(made.store, "image", out, "parquet", file_rows=rows)
            assert sorted((out / "image").iterdir()) == sorted(paths) and list(out.iterdir()) == [out / "image"]
            assert len(pa.concat_tables(map(parquet.read_table, paths))) == len(made.names)
    before = {path: path.read_bytes() for path in paths}
    with pytest.raises(SettingsError, match=r"b%2Fc-00000.parquet is of another export, .*: name another folder"):
        export(small.store, "image", out, "parquet")
    assert {path: path.read_bytes() for path in (out / "image").iterdir()} == before


def test_parquet_of_captions_in_several_files(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", sizes={"a": [5, 9, 4]})
    paths = export(made.store, "text", tmp_path / "out", "parquet", dtype="float16", captions=True, file_rows=3)
    assert [path.name for path in paths] == [f"a-0000{i}.parquet" for i in range(3)]
    table = pa.concat_tables(map(parquet.read_table, paths))
    assert np.array_equal(array_of(table), torch.cat(made.texts).half().numpy())
    assert table["caption"].to_pylist() == [text for own in made.captions for text in own]
    assert table["choice"].to_pylist() == [i for own in made.captions for i in range(len(own))]
    assert "captions" not in table.column_names


def test_the_verb_exports_all_parts_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(make_store(tmp_path / "store").path)
    files = ["image/a-00000.parquet", "image/b%2Fc-00000.parquet", "text/a-00000.parquet", "text/b%2Fc-00000.parquet"]
    for name, flags, wanted in (
        ("out", [], files),
        ("np", ["--format", "npy", "--part", "text"], ["text.npy", "text.keys.parquet"]),
    ):
        assert main(["features", store, str(tmp_path / name), *flags]) == 0
        assert sorted(capsys.readouterr().out.split()) == sorted(str(tmp_path / name / file) for file in wanted)
        assert all((tmp_path / name / file).is_file() for file in wanted)
    (tmp_path / "out" / "image").rename(tmp_path / "out" / "teacher")  # of a store that has such a part
    assert main(["features", store, str(tmp_path / "out")]) == 2
    assert "is of another export, with a part that this store lacks" in capsys.readouterr().err
    assert not (tmp_path / "out" / "image").exists()
    for argv, said in (
        ([store, "--part", "ids"], "no features 'ids'"),
        ([store, "--rows", "0"], "at least 1, not 0"),
        ([store, "--format", "csv"], "'csv' is not one of parquet, npy"),
        ([str(tmp_path)], "is no feature store"),
    ):
        assert main(["features", argv[0], str(tmp_path / "wrong"), *argv[1:]]) == 2 and said in capsys.readouterr().err


def test_thumbnails_and_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows in the order of the store, with the image of their own sample."""
    data = tmp_path / "data"
    make_shards(data, [7, 6])
    model = model_files.write(tmp_path / "data")
    model_files.build(model).save_pretrained(tmp_path / "model")
    shards, store = f"{data}/{{00000..00001}}.tar", str(tmp_path / "store")
    argv = [store, "--towers", "image", "--checkpoint", str(tmp_path / "model"), "--train-data", shards]
    assert precompute([*argv, "--workers", "1", "--device", "cpu"]) == 0
    flags = ["--captions", "--images", shards]
    tables = []
    for name in ("a", "b"):
        assert main(["features", store, str(tmp_path / name), *flags]) == 0
        tables.append(parquet.read_table(next((tmp_path / name / "image").iterdir())))
    table = tables[0]
    assert table.equals(tables[1]) and len(table) == 13
    for row in table.to_pylist():
        assert row["caption"] == row["captions"][0] and row["image"]["path"] == f"{row['shard']}/{row['key']}.jpg"
        assert Image.open(BytesIO(row["image"]["bytes"])).mode == "RGB"
    capsys.readouterr()
    for more, said in (
        (["--format", "npy", "--images", shards], "a column of Parquet files"),
        (["--images", f"{data}/00000.tar"], "no shard"),
    ):
        assert main(["features", store, str(tmp_path / "c"), *more]) == 2 and said in capsys.readouterr().err


SCHEMA = pa.schema([("shard", pa.string()), ("key", pa.string())])


@pytest.mark.parametrize(
    ("suffix", "wanted"),
    [
        (".parquet", None),
        (".csv", b'"shard","key"\n"0.tar","a"\n"0.tar","b,\n"\n"0.tar","c\\udcff"\n'),
        (".jsonl", b"".join(b'{"shard": "0.tar", "key": "%s"}\n' % key for key in (b"a", b"b,\\n", b"c\\\\udcff"))),
        (".txt", b"0.tar/a\n0.tar/b,\n\n0.tar/c\\udcff\n"),
    ],
)
def test_a_table_appears_when_it_is_complete(tmp_path: Path, suffix: str, wanted: bytes | None) -> None:
    """Keys that are not UTF-8 are escaped."""
    path = tmp_path / f"new/table{suffix}"
    with pytest.raises(ValueError, match="stop"), TableWriter(path, SCHEMA) as writer:
        writer.write({"shard": ["0.tar"], "key": ["a"]})
        raise ValueError("stop")
    assert list(path.parent.iterdir()) == []
    with TableWriter(path, SCHEMA) as writer:
        for key in ("a", "b,\n", "c\udcff"):
            writer.write({"shard": ["0.tar"], "key": [key]})
        assert not path.exists()
    if wanted is None:
        assert parquet.read_table(path)["key"].to_pylist() == ["a", "b,\n", "c\\udcff"]
    else:
        assert path.read_bytes() == wanted


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a file with the suffix"):
        TableWriter(tmp_path / "a.xlsx", SCHEMA)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        TableWriter(tmp_path / "file/a.csv", SCHEMA)
    with pytest.raises(ClipstreamError, match="could not be written"), TableWriter(tmp_path / "a.csv", SCHEMA) as table:
        table.write({"shard": ["0.tar"], "key": ["a"]})
        (tmp_path / "a.csv").mkdir()


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
