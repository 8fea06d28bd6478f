"""A file is replaced completely or not at all."""

from __future__ import annotations

import mmap
import random
import zlib
from pathlib import Path

import pytest

from clipstream.utils import atomic_write
from clipstream.utils.atomic_write import CHUNK
from tests.support.savers import damage, small_disk


def test_it_replaces_what_is_there_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "config.yaml.tmp").write_bytes(b"what a crash left, longer than the rest")
    for content in (b"first", b"", b"second"):
        atomic_write.replace(path, content)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_what_was_there_stays_when_a_write_fails(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "latest"
    atomic_write.replace(path, b"old")
    (tmp_path / "latest.tmp").symlink_to(full)
    with pytest.raises(OSError, match=r"No space left.*latest\.tmp"):
        atomic_write.replace(path, b"new")
    assert path.read_bytes() == b"old"
    with pytest.raises(FileNotFoundError):
        atomic_write.replace(tmp_path / "gone" / "latest", b"new")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_parts_large_and_small_become_one_file(size: int, tmp_path: Path) -> None:
    parts = [b"start", random.Random(size).randbytes(size), b"", b"end"]
    expected = b"".join(parts)
    written, told = atomic_write.write(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == expected and written == len(expected)
    assert told == atomic_write.checksum(tmp_path / "file") == f"crc32:{zlib.crc32(expected):08x}"
    damage(tmp_path / "file")
    assert atomic_write.checksum(tmp_path / "file") != told


def test_a_disk_that_fills_up_says_so_at_the_end_of_it(tmp_path: Path) -> None:
    with small_disk(tmp_path, "40m"):
        data = mmap.mmap(-1, 41 << 20)
        with pytest.raises(OSError) as caught:
            atomic_write.write(tmp_path / "file", [data])
        assert atomic_write.is_full(caught.value) and not atomic_write.is_full(OSError(5, "broken"))
