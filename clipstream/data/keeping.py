"""Owns a folder of kept shards: its size limit, who has to go, and whether an entry is what was written.

    HASH-NAME.tar            an entry        HASH-NAME.tar.sum        its size and CRC-32
    HASH-NAME.tar.lock       held shared by its readers, alone by the one that writes or removes it
    HASH-NAME.tar.reserved   bytes that are kept free for it while it comes
    room.lock                held while room is made

All processes of a node share the folder. It never fetches anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipstream.errors import SettingsError

CHUNK = 1 << 20
GROWTH = 64 << 20  # bytes that are reserved at a time for what does not say how long it is
GIB = 1 << 30


class Room:
    """The limit of a folder.

    Args:
        folder: of the entries.
        limit: bytes; None for none.
        wanted: entries that are in use at once on this node, about.
    """

    def __init__(self, folder: Path, limit: int | None, wanted: int = 1) -> None:
        self._folder, self._limit, self._wanted = folder, limit, wanted

    def reserve(self, target: Path, size: int) -> None:
        """Have `size` bytes for an entry that comes; the least recently used ones that nobody reads go for it.

        Raises:
            SettingsError: the limit is too small for what is in use.
        """
        if self._limit is None:
            return
        with _locked(self._folder / "room.lock"):
            used = self._used(but=target)
            if used + size > self._limit:
                used -= self._remove(used + size - self._limit, but=target)
            if used + size > self._limit:
                raise self._too_small(used + size)
            _reserved(target).write_text(str(size))

    def expect(self, target: Path, size: int) -> None:
        """As `reserve`, for one whose size is known: the limit must hold as many of these as are in use at once.

        Raises:
            SettingsError: it does not.
        """
        if self._limit is not None and size * self._wanted > self._limit:
            raise self._too_small(size * self._wanted)
        self.reserve(target, size)

    def settle(self, target: Path) -> None:
        """The entry is there, or will not come."""
        if self._limit is not None:
            with _locked(self._folder / "room.lock"):  # or one who counts just now finds neither it nor its room
                _reserved(target).unlink(missing_ok=True)

    def remove_others(self, target: Path, others: Iterator[Path]) -> None:
        """Remove older versions of an entry that nobody reads."""
        for other in others:
            if other != target:
                _remove_unused(other)

    def _too_small(self, needed: int) -> SettingsError:
        assert self._limit is not None
        return SettingsError(
            f"data.cache_gib: {self._limit / GIB:.3g} GiB cannot hold the shards that are in use at once on a node: "
            f"give at least {needed * 1.1 / GIB:.2g}, or lower --data.shuffle.shards or --data.lanes"
        )

    def _used(self, but: Path) -> int:
        total = 0
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if path.suffix == ".tar" and path != but:
                    total += path.stat().st_size
                elif path.suffix == ".reserved" and path != _reserved(but):
                    if _is_unused(path.with_suffix("")):
                        path.unlink()  # whoever reserved it is dead
                    else:
                        total += int(path.read_text())
        return total

    def _remove(self, wanted: int, but: Path) -> int:
        """Remove at least `wanted` bytes if that can be; how many went."""
        entries = []
        for path in self._folder.glob("*.tar"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                entries.append((stat.st_mtime, stat.st_size, path))
        gone = 0
        for _, size, path in sorted(entries):
            if gone >= wanted:
                break
            if path != but and _remove_unused(path):
                gone += size
        return gone


def seal(part: Path, target: Path) -> None:
    """Note size and checksum of what is going to be `target`."""
    size, checksum = _sum(part)
    draft = target.with_suffix(".tar.sum.part")
    draft.write_text(json.dumps({"size": size, "crc32": checksum}))
    draft.replace(_seal(target))


def is_whole(target: Path) -> bool:
    """Whether an entry is what was written."""
    try:
        told = json.loads(_seal(target).read_text())
        if target.stat().st_size != told["size"]:
            return False
        return _sum(target) == (told["size"], told["crc32"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            size += len(data)
            checksum = zlib.crc32(data, checksum)
    return size, checksum


def _seal(target: Path) -> Path:
    return Path(f"{target}.sum")


def _reserved(target: Path) -> Path:
    return Path(f"{target}.reserved")


def _is_unused(target: Path) -> bool:
    try:
        with _locked(Path(f"{target}.lock"), wait=False):
            return True
    except BlockingIOError:
        return False


def _remove_unused(target: Path) -> bool:
    try:
        with _locked(Path(f"{target}.lock"), wait=False):
            target.unlink(missing_ok=True)
            _seal(target).unlink(missing_ok=True)
            return True
    except OSError:
        return False


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError) if wait else contextlib.nullcontext():  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(lock)


def own_folder() -> tuple[Path, int]:
    """A temporary folder and the descriptor that locks it as long as a process of this run lives.

    The folders of dead runs are removed.
    """
    for other in Path(tempfile.gettempdir()).glob("clipstream-*/owner.lock"):
        with contextlib.suppress(OSError):
            lock = os.open(other, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other.parent, ignore_errors=True)
            finally:
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix="clipstream-"))
    own = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it but we
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
        (folder / "lock").rename(folder / "owner.lock")  # named only when it is held
    return folder, own


def remove_folder(folder: Path, lock: int, owner: int) -> None:
    """A forked child has this finalizer too, and must leave its parent's folder alone."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
