"""A file is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipstream import durable


def test_it_replaces_what_is_there_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "config.yaml.tmp").write_bytes(b"what a crash left, longer than the rest")
    for content in (b"first", b"", b"second"):
        durable.replace(path, content)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_what_was_there_stays_when_a_write_fails(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "latest"
    durable.replace(path, b"old")
    (tmp_path / "latest.tmp").symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        durable.replace(path, b"new")
    assert path.read_bytes() == b"old"
    with pytest.raises(FileNotFoundError):
        durable.replace(tmp_path / "gone" / "latest", b"new")
