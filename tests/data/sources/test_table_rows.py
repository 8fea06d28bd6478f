"""Tables become Arrow files of even batches, within limits of memory and disk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext, table_rows
from clipstream.data.sources.table_rows import check_batch, to_arrow
from clipstream.data.sources.tables import RowShard, open_mapped
from clipstream.errors import DataError, ShardError
from clipstream.storage.tar import SampleRef


def write(path: Path, table: pa.Table) -> None:
    """By the suffix of the path; of Arrow, in one batch."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=200)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl"])
@pytest.mark.parametrize(("width", "each"), [(10, 256), (2000, 16), (40_000, 1)])
def test_batches_of_large_rows_have_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, width: int, each: int
) -> None:
    monkeypatch.setattr(table_rows, "BATCH_BYTES", 1 << 17)
    texts = [f"{number}{'x' * width}" for number in range(300)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("title\n" + "\n".join(texts))
    elif suffix == "jsonl":
        path.write_text("\n".join(f'{{"title": "{text}"}}' for text in texts))
    else:
        write(path, pa.table({"title": pa.array(texts).dictionary_encode() if each == 16 else texts}))
    to_arrow(path, path.name, tmp_path / "out")
    reader = open_mapped(tmp_path / "out")
    sizes = [len(reader.get_batch(number)) for number in range(reader.num_record_batches)]
    assert {*sizes[:-1]} == {each} and sum(sizes) == 300
    shard = RowShard(tmp_path / "out", range(300), (), "")
    for row in (0, 15, 16, 257, 299):
        assert shard.load(SampleRef(str(row)), ["title"])["title"].decode() == texts[row]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_value_in_every_row_ends_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Parquet writes a dictionary and runs of its numbers: 100 kB stand in 5,000 rows."""
    monkeypatch.setattr(table_rows, "GIB", 1 << 20)
    indices = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int8()), ["x" * 100_000])
    write(tmp_path / f"a.{suffix}", pa.table({"title": indices}))
    size = (tmp_path / f"a.{suffix}").stat().st_size
    with pytest.raises(ShardError, match=r"too_large: its rows take more than .* GiB, 64 times its size and 1 GiB"):
        to_arrow(tmp_path / f"a.{suffix}", f"a.{suffix}", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size < (1 << 20) + 64 * size + 256 * 100_100


def test_a_table_leaves_as_much_space_as_a_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", pa.table({"filepath": ["a.jpg"], "title": ["a"]}))
    found = os.statvfs(tmp_path)
    full = os.statvfs_result((*found[:3], 1, 1, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(DataError, match=r"a\.parquet: disk: .* GiB left, after .* use a --data.cache with more space"):
        Source(SourceSettings(shards=str(tmp_path / "a.parquet")), SourceContext(cache=str(tmp_path / "cache")))
    assert not [*(tmp_path / "cache").glob("*.part")]


@given(offsets=st.lists(st.integers(0, 40), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_offsets_that_leave_the_buffer_are_refused(offsets: list[int]) -> None:
    """No value is read: Arrow takes offsets at their word. Text that is not UTF-8 costs its own row alone."""
    buffers = [None, pa.py_buffer(b"".join(one.to_bytes(4, "little") for one in offsets)), pa.py_buffer(b"\xff" * 20)]
    array = partial(pa.Array.from_buffers, pa.string(), len(offsets) - 1, buffers)
    if offsets == sorted(offsets) and offsets[-1] <= 20:
        batch = pa.record_batch([array()], names=["title"])
        assert check_batch(batch) is batch
    else:
        with pytest.raises(pa.ArrowInvalid):
            check_batch(pa.record_batch([array()], names=["title"]))


def test_names_of_many_columns_take_linear_time() -> None:
    names = table_rows._names([f"n{number // 2}" for number in range(100_000)])
    assert names[:3] == ["n0.1", "n0.2", "n1.1"] and len({*names}) == 100_000
