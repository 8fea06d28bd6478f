"""Shards in object stores become complete local files, on a file system that fails and changes meanwhile."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.support.stores import BODY, failure, make_store


class Bucket(LocalFileSystem):
    """Object storage in a folder: `bucket:///PATH`. A name with `cut` breaks after some bytes, as often as it says."""

    protocol = "bucket"
    cachable = False
    opened: ClassVar[list[tuple[str, int]]] = []
    changed: ClassVar[dict[str, bytes]] = {}
    ends: ClassVar[dict[str, int]] = {}

    def ukey(self, path: str) -> str:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super().open(path, mode, **more)
        left, read = self.ends.get(path, 0), file.read
        self.ends[path] = left - 1

        def broken(size: int = -1) -> bytes:
            self.opened.append((path, file.tell()))
            if file.tell() and path in self.changed:
                Path(path).write_bytes(self.changed.pop(path))
            if left > 0 and file.tell() % 100_000 >= 60_000:
                raise ConnectionResetError("the peer is gone")
            return bytes(read(60_000))

        file.read = broken
        return file


@pytest.fixture
def bucket() -> Iterator[type[Bucket]]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.opened, Bucket.ends = [], {}
    yield Bucket
    fsspec.register_implementation("bucket", LocalFileSystem, clobber=True)


def test_buckets_go_on_where_they_broke(tmp_path: Path, bucket: type[Bucket]) -> None:
    source = tmp_path / "0.tar"
    source.write_bytes(BODY)
    bucket.ends[str(source)] = 1
    store = make_store(tmp_path / "cache")
    assert store.local(f"bucket://{source}").read_bytes() == BODY
    offsets = [at for _, at in bucket.opened]
    assert offsets.count(0) == 1 and offsets.count(60_000) == 2, (
        "the second try begins at the byte where the first broke"
    )
    bucket.ends[str(source)] = 9
    error = failure(make_store(tmp_path / "b"), f"bucket://{source}")
    assert error.reason == "truncated_download" and "after 60,000 bytes: ConnectionResetError" in error.detail
    assert failure(make_store(tmp_path / "b"), f"bucket://{tmp_path}/1.tar").reason == "missing"
    assert not list((tmp_path / "b").glob("*.part"))


def test_a_file_of_a_bucket_that_changes_while_it_comes_is_fetched_anew(tmp_path: Path, bucket: type[Bucket]) -> None:
    source = tmp_path / "0.tar"
    source.write_bytes(BODY)
    bucket.changed[str(source)] = BODY[::-1]
    assert make_store(tmp_path / "cache").local(f"bucket://{source}").read_bytes() == BODY[::-1]


def test_a_bucket_without_its_backend_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    error = failure(make_store(tmp_path), "s3://somewhere/0.tar")
    assert error.reason == "unknown_scheme" and "clipstream[s3]" in error.detail
