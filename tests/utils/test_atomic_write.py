"""A file is replaced completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from clipstream.checkpoint.store import LATEST, Marker, begin, commit, is_locked
from clipstream.distributed.failure import tell_once
from clipstream.distributed.world import World
from clipstream.storage.shard_cache import ShardCache, file_lock
from clipstream.utils import atomic_write
from clipstream.utils.atomic_write import CHUNK, lock_folder
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


LACKING = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL)


@pytest.fixture
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that answers as sshfs and CIFS (folders), or NFS without a lock daemon; nothing is told yet."""

    def fail(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    fsync = os.fsync
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, fail)
    monkeypatch.setattr(os, "fsync", lambda handle: (fail if stat.S_ISDIR(os.fstat(handle).st_mode) else fsync)(handle))
    monkeypatch.setattr(atomic_write, "_told", bytearray(2))


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("lacking", LACKING, indirect=True)
def test_what_a_file_system_lacks_is_done_without_and_said_once(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """fsync of a folder: EINVAL of CIFS and sshfs, Linux 6. flock: ENOLCK of NFS without its daemon, EBADF for files
    opened to be read (flock(2), "NFS details"), ENOSYS of FUSE.
    """
    number = request.node.callspec.params["lacking"]
    flushes = number != errno.ENOLCK  # which fsync does not give
    with lock_folder(tmp_path / "run", "--logs", ""), lock_folder(tmp_path / "run", "--logs", ""):
        assert is_locked(tmp_path / "run")
        if flushes:
            for name in ("step_00000001", "step_00000001", "step_00000002"):
                draft = begin(tmp_path / "run", name, 10)
                commit(draft, Marker(step=1, sizes={}, serial=1))
            assert (tmp_path / "run" / LATEST).read_text() == "step_00000002\n"
            atomic_write.replace(tmp_path / "file", b"new")
    (tmp_path / "0.tar").write_bytes(shard := b"a tar")
    atomic_write.flush(tmp_path / "0.tar")
    with closing(ShardCache(str(tmp_path / "cache"))) as cache:
        made = cache.get_or_make("0", "identity", lambda path, _: path.write_bytes(shard) and None)
        assert made.read_bytes() == shard
    with file_lock(tmp_path / "lock"), open(tmp_path / "lock", "w") as lock:
        assert atomic_write.try_lock(lock.fileno(), fcntl.LOCK_EX, posix=True) is None
        with pytest.raises(OSError, match="is locked, or cannot be"), file_lock(tmp_path / "lock", wait=False):
            pass
    told: list[int] = []
    tell_once(World(size=2, address="127.0.0.1:1"), "x", lambda: told.append(1))
    assert told == [1]
    assert caplog.text.count("files cannot be locked") == 1
    assert caplog.text.count("cannot be flushed to the disk") == flushes


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    for act in (lambda: atomic_write.replace(tmp_path / "file", b"x"), lambda: atomic_write.flush(tmp_path)):
        with pytest.raises(OSError, match=os.strerror(number)):
            act()


def test_a_lock_that_another_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EACCES is the answer of a CIFS share, which keeps locks as ranges of bytes (flock(2), "CIFS details")."""
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert atomic_write.try_lock(one.fileno(), fcntl.LOCK_EX) is True
        assert atomic_write.try_lock(other.fileno(), fcntl.LOCK_EX) is False
        assert atomic_write.try_lock(one.fileno(), fcntl.LOCK_UN) is True
        assert atomic_write.try_lock(other.fileno(), fcntl.LOCK_EX, wait=True) is True

    def denied(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", denied)
    with open(tmp_path / "lock", "w") as one:
        assert atomic_write.try_lock(one.fileno(), fcntl.LOCK_EX) is False
