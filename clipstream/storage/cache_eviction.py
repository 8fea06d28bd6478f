"""The files of a shard cache folder: size limit, eviction, length, and the locks between processes.

    HASH-NAME.tar            an entry
    HASH-NAME.tar.sum        its size
    HASH-NAME.tar.lock       locked shared by readers, exclusively by the process that writes or removes the entry
    HASH-NAME.tar.X.part     a download in progress
    HASH-NAME.tar.failed     the reason of the last failed download
    HASH-NAME.tar.reserved   bytes reserved for a download in progress
    quota.lock                locked while bytes are reserved

All processes of a node share the folder. Locks are `flock` and not filelock's `FileLock`, which is exclusive: readers
share a lock here, and file systems without locks still have to work.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from clipstream.errors import SettingsError
from clipstream.storage.transfer import CHUNK, GIB

# Other files in the folder are the user's and are never touched.
ENTRY = re.compile(r"(?P<entry>[0-9a-f]{24}-.+\.tar)(?P<kind>|\.reserved|\.[a-z0-9_]+(?:\.(?:unpacked|sum))?\.part)")
AHEAD = "ahead"  # marks a reservation of a prefetch, which no reader waits for


class CacheQuota:
    """The size limit of a cache folder.

    Args:
        folder: of the entries.
        limit: bytes; None for no limit.
        wanted: approximate number of entries in use at once on this node.
    """

    def __init__(self, folder: Path, limit: int | None, wanted: int = 1) -> None:
        self.limit = limit
        self._folder, self._wanted = folder, wanted
        self._is_estimated = False

    def reserve(self, target: Path, size: int, *, whole: bool = False, ahead: bool = False) -> bool:
        """Reserve `size` bytes for a new entry, evicting the least recently used entries that nobody reads.

        Args:
            whole: whether `size` is that of the whole entry: the limit must hold `wanted` entries of the first one's.
            ahead: whether this is a prefetch: readers wait for the space it takes instead of failing.

        Returns:
            False if prefetches take the space: try again when they are complete.

        Raises:
            SettingsError: the limit is too small for the entries in use.
        """
        if self.limit is None:
            return True
        if whole and not self._is_estimated:
            if size * self._wanted > self.limit:
                raise self._too_small(size * self._wanted)
            self._is_estimated = True  # by the first entry only: a single larger one needs no more than its own size
        entries: list[tuple[float, int, str]] = []  # time of last use, bytes, path
        reserved: dict[str, int] = {}
        others_ahead = False
        with _locked(self._folder / "quota.lock"):
            with os.scandir(self._folder) as found:
                for file in found:
                    match = ENTRY.fullmatch(file.name)
                    if match is None or match["entry"] == target.name:
                        continue
                    with contextlib.suppress(OSError, ValueError):
                        if not match["kind"]:
                            stat = file.stat()
                            entries.append((stat.st_atime, stat.st_size, file.path))
                            continue
                        # Remove the files of a dead process, which holds no lock.
                        with contextlib.suppress(BlockingIOError):
                            with _locked(self._folder / f"{match['entry']}.lock", wait=False):
                                os.unlink(file.path)
                            continue
                        if match["kind"] == ".reserved":
                            amount, _, why = Path(file.path).read_text().partition(" ")
                            reserved[match["entry"]] = int(amount)
                            others_ahead |= why == AHEAD
            for _, _, path in entries:  # complete already: its size counts, not its reservation
                reserved.pop(os.path.basename(path), None)
            used = sum(reserved.values()) + sum(bytes_ for _, bytes_, _ in entries)
            for _, bytes_, path in sorted(entries):
                if used + size <= self.limit:
                    break
                used -= bytes_ if remove_unused(Path(path)) else 0
            if used + size <= self.limit:
                beside(target, ".reserved").write_text(f"{size} {AHEAD}" if ahead else str(size))
                return True
        if others_ahead and not ahead:
            return False
        raise self._too_small(max(used + size, size * self._wanted))

    def release(self, target: Path) -> None:
        """Release the reservation of an entry that is complete or has failed."""
        if self.limit is not None:
            with _locked(self._folder / "quota.lock"):  # so that no concurrent count misses both entry and reservation
                beside(target, ".reserved").unlink(missing_ok=True)

    def _too_small(self, needed: int) -> SettingsError:
        return SettingsError(
            f"data.cache_gib: {(self.limit or 0) / GIB:.3g} GiB cannot hold the shards that are in use at once on a "
            f"node: give at least {needed * 1.1 / GIB:.2g}, or lower --data.shuffle.shards or --data.lanes"
        )


def seal(part: Path, target: Path) -> None:
    """Record the size of the file that will become `target`."""
    draft = part.with_suffix(".sum.part")
    draft.write_text(json.dumps({"size": part.stat().st_size}))
    draft.replace(beside(target, ".sum"))


def is_whole(target: Path) -> bool:
    """Whether an entry still has the size that was written: after a crash of the machine it may be shorter."""
    try:
        found: bool = json.loads(beside(target, ".sum").read_text())["size"] == target.stat().st_size
        return found
    except (OSError, ValueError, KeyError, TypeError):
        return False


def stamp(target: Path) -> tuple[int, int, int] | None:
    """Identifies the file at this path, so that a replacement is noticed; None if there is none."""
    try:
        stat = target.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def discard(target: Path) -> None:
    """Remove an entry. The caller holds its lock exclusively."""
    target.unlink(missing_ok=True)
    beside(target, ".sum").unlink(missing_ok=True)


def remove_unused(target: Path) -> bool:
    """Remove an entry if nobody reads it; whether it was removed."""
    try:
        with _locked(beside(target, ".lock"), wait=False):
            discard(target)
            return True
    except OSError:
        return False


def total_size(paths: Iterable[Path]) -> int:
    """Bytes of those files that still exist."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def unlock(lock: int) -> None:
    """Unlock and close: closing alone would leave the lock with a forked copy of the descriptor."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def crc_of(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            size += len(data)
            checksum = zlib.crc32(data, checksum)
    return size, checksum


def beside(target: Path, suffix: str) -> Path:
    """A file of an entry."""
    return Path(f"{target}{suffix}")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError) if wait else contextlib.nullcontext():  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        unlock(lock)
