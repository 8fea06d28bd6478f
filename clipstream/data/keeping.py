"""Owns a folder of kept shards: its size limit, who has to go, and whether an entry is what was written.

    HASH-NAME.tar            an entry        HASH-NAME.tar.sum        its size and CRC-32, dated when they were checked
    HASH-NAME.tar.lock       held shared by its readers, alone by the one that writes or removes it
    HASH-NAME.tar.X.part     what has come of it
    HASH-NAME.tar.failed     why it could not be had last time
    HASH-NAME.tar.reserved   bytes that are kept free for it while it comes
    room.lock                held while room is made

All processes of a node share the folder. It never fetches anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from clipstream.errors import SettingsError

CHUNK = 1 << 20
GROWTH = 64 << 20  # bytes that are reserved at a time for what does not say how long it is
GIB = 1 << 30
FRESH = 3600.0  # s that a check of an entry holds
# What else is in the folder is somebody's own.
ENTRY = re.compile(r"(?P<entry>[0-9a-f]{24}-.+\.tar)(?P<kind>|\.reserved|\.[a-z0-9_]+(?:\.(?:unpacked|sum))?\.part)")
AHEAD = "ahead"  # behind the bytes that are reserved for what nobody waits for yet


class Room:
    """The limit of a folder.

    Args:
        folder: of the entries.
        limit: bytes; None for none.
        wanted: entries that are in use at once on this node, about.

    Attributes:
        limited: whether there is one.
    """

    def __init__(self, folder: Path, limit: int | None, wanted: int = 1) -> None:
        self._folder, self._limit, self._wanted = folder, limit, wanted
        self._is_estimated = False
        self.limited = limit is not None

    def reserve(self, target: Path, size: int, *, ahead: bool = False) -> bool:
        """Have `size` bytes for an entry that comes; the least recently used ones that nobody reads go for it.

        Args:
            ahead: whether nobody waits for it: such a one never stands in another's way for long.

        Returns:
            False where the room is taken by what comes ahead of its use: ask again when that is here.

        Raises:
            SettingsError: the limit is too small for what is in use.
        """
        if self._limit is None:
            return True
        with _locked(self._folder / "room.lock"):
            entries, reserved, others_ahead = self._survey(but=target)
            used = reserved + sum(entry.size for entry in entries.values())
            if used + size > self._limit:
                used -= _remove(entries.values(), used + size - self._limit)
            if used + size <= self._limit:
                _reserved(target).write_text(f"{size} {AHEAD}" if ahead else str(size))
                return True
        if others_ahead and not ahead:
            return False
        raise self._too_small(max(used + size, size * self._wanted))

    def expect(self, target: Path, size: int, *, ahead: bool = False) -> bool:
        """As `reserve`, for one whose size is known: the limit must hold as many of the first as are in use at once.

        Raises:
            SettingsError: it does not.
        """
        if self._limit is not None and not self._is_estimated:
            if size * self._wanted > self._limit:
                raise self._too_small(size * self._wanted)
            self._is_estimated = (
                True  # by the first alone: one that is larger than the others needs no more than its own
            )
        return self.reserve(target, size, ahead=ahead)

    def settle(self, target: Path) -> None:
        """The entry is there, or will not come."""
        if self._limit is not None:
            with _locked(self._folder / "room.lock"):  # or one who counts just now finds neither it nor its room
                _reserved(target).unlink(missing_ok=True)

    def _too_small(self, needed: int) -> SettingsError:
        assert self._limit is not None
        return SettingsError(
            f"data.cache_gib: {self._limit / GIB:.3g} GiB cannot hold the shards that are in use at once on a node: "
            f"give at least {needed * 1.1 / GIB:.2g}, or lower --data.shuffle.shards or --data.lanes"
        )

    def _survey(self, but: Path) -> tuple[dict[str, _Entry], int, bool]:
        """The other entries by name, bytes that are reserved for others, whether some of these come ahead of their use.

        What dead processes left goes. One that is here and not yet settled needs no more than it has.
        """
        entries: dict[str, _Entry] = {}
        reserved: dict[str, int] = {}
        ahead, own = False, but.name
        with os.scandir(self._folder) as found:
            for file in found:
                named = ENTRY.fullmatch(file.name)
                if named is None or named["entry"] == own:
                    continue
                with contextlib.suppress(OSError, ValueError):
                    if not named["kind"]:
                        stat = file.stat()
                        entries[file.name] = _Entry(stat.st_atime, stat.st_size, file.path)
                    elif not _remove_of_dead(file.path, self._folder / named["entry"]) and named["kind"] == ".reserved":
                        size, _, why = Path(file.path).read_text().partition(" ")
                        reserved[named["entry"]] = int(size)
                        ahead |= why == AHEAD
        return entries, sum(size for name, size in reserved.items() if name not in entries), ahead


class _Entry(NamedTuple):
    """What may go: when it was used last, its bytes, its path."""

    used: float
    size: int
    path: str


def _remove(entries: Iterable[_Entry], wanted: int) -> int:
    """Remove at least `wanted` bytes if that can be; how many went."""
    gone = 0
    for entry in sorted(entries):
        if gone >= wanted:
            break
        if remove_unused(Path(entry.path)):
            gone += entry.size
    return gone


def _remove_of_dead(path: str, target: Path) -> bool:
    """Remove what came with an entry, if who fetched it is no more; whether it went."""
    try:
        with _locked(_lock(target), wait=False):
            os.unlink(path)
            return True
    except BlockingIOError:
        return False


def seal(part: Path, target: Path) -> None:
    """Note size, time and checksum of what is going to be `target`."""
    size, checksum = crc_of(part)
    draft = part.with_suffix(".sum.part")
    draft.write_text(json.dumps({"size": size, "crc32": checksum, "written": part.stat().st_mtime_ns}))
    draft.replace(_seal(target))


def is_whole(target: Path) -> bool:
    """Whether an entry is what was written.

    It is read through where that was not done for an hour, on this node since its start; whoever does it dates the
    note, so that hundreds of processes need not all do it.
    """
    try:
        told, stat = json.loads(_seal(target).read_text()), target.stat()
        if stat.st_size != told["size"]:
            return False
        if stat.st_mtime_ns == told.get("written") and _is_fresh(_seal(target)):
            return True
        if crc_of(target) != (told["size"], told["crc32"]):
            return False
        os.utime(_seal(target))
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_fresh(note: Path) -> bool:
    age = time.time() - note.stat().st_mtime
    return 0 <= age < min(FRESH, time.monotonic())  # which counts from the node's start


def note_use(target: Path) -> None:
    """Who was used last goes last. A file's time of access is free for that; that of its writing must stay."""
    with contextlib.suppress(OSError):  # another user's
        os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))


def newest(entries: Iterable[Path]) -> Path | None:
    """The entry that was written last; None where there is none."""
    written = {}
    for path in entries:
        with contextlib.suppress(OSError):  # it has gone meanwhile
            written[path] = path.stat().st_mtime_ns
    return max(written, key=lambda path: written[path], default=None)


def stamp(target: Path) -> tuple[int, int, int] | None:
    """What another file in an entry's place does not share; None where there is none."""
    try:
        stat = target.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def discard(target: Path) -> None:
    """Remove an entry, by who holds its lock alone."""
    target.unlink(missing_ok=True)
    _seal(target).unlink(missing_ok=True)


def remove_parts(target: Path) -> None:
    """Remove what a killed process left of an entry, by who holds its lock alone."""
    for part in _parts(target):
        part.unlink(missing_ok=True)


def size_of_parts(target: Path) -> int:
    """Bytes that have come of an entry by now."""
    return _bytes_of(_parts(target))


def bytes_coming(folder: Path) -> int:
    """Bytes that have come by now of all entries on their way."""
    return _bytes_of(folder.glob("*.part"))


def _bytes_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # it has gone meanwhile
            total += path.stat().st_size
    return total


def note_failure(target: Path, reason: str, detail: str) -> None:
    """Leave word for those who wait for the same entry."""
    with contextlib.suppress(OSError):  # the disk may be full
        _failure(target).write_text(json.dumps([reason, detail]))


def failure_since(asked: float, target: Path) -> tuple[str, str] | None:
    """Reason and detail of a failure after time.time() `asked`."""
    try:
        if _failure(target).stat().st_mtime < asked:
            return None
        reason, detail = json.loads(_failure(target).read_text())
        return reason, detail
    except (OSError, ValueError):
        return None


def remove_unused(target: Path) -> bool:
    """Remove an entry if nobody reads it; whether it went."""
    try:
        with _locked(_lock(target), wait=False):
            discard(target)
            return True
    except OSError:
        return False


def let_go(lock: int) -> None:
    """Unlock and close: a copy of the descriptor that a fork has made must not go on holding the lock."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def crc_of(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            size += len(data)
            checksum = zlib.crc32(data, checksum)
    return size, checksum


def _seal(target: Path) -> Path:
    return Path(f"{target}.sum")


def _parts(target: Path) -> list[Path]:
    return list(target.parent.glob(f"{target.name}.*.part"))


def _failure(target: Path) -> Path:
    return Path(f"{target}.failed")


def _reserved(target: Path) -> Path:
    return Path(f"{target}.reserved")


def _lock(target: Path) -> Path:
    return Path(f"{target}.lock")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError) if wait else contextlib.nullcontext():  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        let_go(lock)


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
