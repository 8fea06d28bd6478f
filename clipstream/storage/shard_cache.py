"""Local files of shards: a remote or compressed shard is downloaded completely before any of it is read.

URLs enter, paths of complete, uncompressed files leave. A slowly read network stream times out, and its end proves
nothing; so a download goes to a temporary name and is renamed once its length (HTTP, object stores), the command's exit
status (`pipe:`) or the end of the compressed stream shows that it is complete. The content of a tar is not read here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clipstream.errors import SettingsError
from clipstream.storage import cache_eviction
from clipstream.storage.cache_eviction import CacheQuota, beside, remove_unused, stamp, total_size, unlock
from clipstream.storage.downloader import Fetcher, compression_of
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.transfer import Monitor, ShardError, disk_error, unreadable

LOOK = 0.5  # s between two looks at the progress of another process's download
GROWTH = 64 << 20  # bytes reserved at a time for a download of unknown length
STEM = re.compile(r"[\w.-]+(?=\.(?:tar|tgz|csv|tsv|json|jsonl|ndjson|parquet)\b)")
Fill = Callable[[Path, Monitor], None]  # writes the whole shard to the path, or raises


def cache_root() -> Path:
    """The folder for files kept between runs: $CLIPSTREAM_CACHE, $XDG_CACHE_HOME/clipstream or ~/.cache/clipstream."""
    if own := os.environ.get("CLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "clipstream"


@dataclass
class _Use:
    """A file that this process reads: the descriptor that holds its lock, its path, and the number of readers."""

    lock: int
    target: Path
    count: int = 1


class _Reservation(Monitor):
    """Monitor that reserves space for a download as it grows."""

    def __init__(self, cache: ShardCache, target: Path) -> None:
        self._cache, self._target, self._reserved, self._size = cache, target, 0, 0

    def expect(self, size: int) -> None:
        self._reserve(size, whole=True)

    def received(self, size: int) -> None:
        self._size = size
        if size > self._reserved:
            self._reserve(size + GROWTH, whole=False)
        self._cache.report_progress(size)

    def _reserve(self, size: int, *, whole: bool) -> None:
        before, ahead = -1, threading.current_thread() is not threading.main_thread()
        while not self._cache.quota.reserve(self._target, size, whole=whole, ahead=ahead):
            # Prefetches that take the space may hang, as not every source has time limits: their progress is ours.
            if (now := total_size(self._target.parent.glob("*.part"))) != before:
                before = now
                self._cache.report_progress(self._size)
            time.sleep(0.1)
        self._reserved = size


class ShardCache:
    """Local files of shards. Picklable, safe in forked workers and in threads; all ranks may share one `cache` folder.

    Each shard is downloaded by one process at a time; the others wait for it. In a permanent folder, files stay for the
    next run, named by the hash of the URL and of the version that the server reports, and their sizes are compared.
    A temporary folder is removed by `close`, or at exit, in the process that made it; its disk must hold the shards in
    use at once.

    Args:
        cache: permanent folder; None for a temporary one.
        limit: bytes that a permanent folder may hold; None for no limit.
        wanted: approximate number of shards in use at once on this node.
        fetcher: does the downloads.

    Attributes:
        alive: called with the bytes received so far, to tell a long transfer from a hanging one; only for transfers of
            the main thread, which waits for them.

    Raises:
        SettingsError: the cache folder cannot be made or written.
    """

    def __init__(
        self, cache: str | None, *, limit: int | None = None, wanted: int = 1, fetcher: Fetcher | None = None
    ) -> None:
        self.fetcher: Fetcher = fetcher or Fetcher()
        self.folder: Path
        self.temporary: bool = cache is None
        self._finalizer: weakref.finalize[..., ShardCache] | None = None
        if cache is None:
            self.folder, lock = _temporary_folder()
            self._finalizer = weakref.finalize(self, _remove_folder, self.folder, lock, os.getpid())
        else:
            self.folder = Path(cache).absolute()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be made: {error.strerror}") from error
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be written")
        self.quota: CacheQuota = CacheQuota(self.folder, None if self.temporary else limit, wanted)
        self.alive: Callable[[int], None] | None = None
        self._uses: dict[str, _Use] = {}
        self._threads = threading.Lock()
        self._pid = os.getpid()

    def local(self, name: str, *, tar: bool = True, most: int | None = None) -> Path:
        """The whole shard as a local uncompressed file; for a local tar, its own path.

        Args:
            tar: whether the content has to be a tar, so that a download of anything else ends at once.
            most: bytes that it may have, uncompressed too; None for the limit of shards.

        Raises:
            ShardError: the shard is missing, unreachable or incomplete, or no shard.
            SettingsError: the cache's limit is too small.
        """
        url = ShardURL(name)
        fetcher = self.fetcher if most is None else replace(self.fetcher, most=min(most, self.fetcher.most))

        def fetch(part: Path, monitor: Monitor) -> None:
            fetcher.fetch(url, part, monitor, tar=tar)

        if url.path is None:
            known = self.temporary or name in self._uses  # nothing older to compare with
            return self.get_or_make(name, name, fetch, version=None if known else self.fetcher.info(url).version)
        path = Path(url.path)
        if path.is_fifo() or path.is_char_device():  # can be read only once
            return self.get_or_make(name, name, fetch, version=str(path.stat().st_ino))
        try:
            stat = path.stat()
            if compression_of(path) is None:
                return path
        except OSError as error:
            raise unreadable(path, error) from error
        return self.get_or_make(
            name,
            f"{path}:{stat.st_mtime_ns}-{stat.st_size}",
            lambda part, monitor: fetcher.unpack(url, path, part, monitor, tar=tar),
        )

    def prefetch(self, name: str) -> bool:
        """Download a shard ahead of its use.

        Returns:
            Whether the shard is held now and has to be released: not if the cache has a limit.

        Raises:
            ShardError, SettingsError: as `local`; also if the space is taken for now.
        """
        self.local(name)
        if self.quota.limit is None:
            return True
        self.release(name)
        return False

    def release(self, name: str, *, keep: bool = True) -> None:
        """Stop using a shard. Its last user removes the file from a temporary folder, or if `keep` is false."""
        self._check_process()
        with self._threads:
            use = self._uses.get(name)
            if use is None:
                return
            use.count -= 1
            if use.count:
                return
            del self._uses[name]
        unlock(use.lock)
        if self.temporary or not keep:
            remove_unused(use.target)  # other readers hold its lock; the last of them removes it

    def close(self) -> None:
        """Release all shards; in the process that made a temporary folder, remove it."""
        self._check_process()
        with self._threads:
            for use in self._uses.values():
                unlock(use.lock)
            self._uses = {}
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, object]:
        state = {key: value for key, value in self.__dict__.items() if key != "_threads"}
        return {**state, "_finalizer": None, "_uses": {}, "_pid": -1, "alive": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._threads = threading.Lock()

    def get_or_make(self, name: str, identity: str, fill: Fill, *, version: str | None = None) -> Path:
        """The local file that `fill` writes: the first process that asks calls it, and the others wait.

        Args:
            name: to `release` it by.
            identity: names the content; hashed into the file's name.
            version: changes with the content; None if unknown, which accepts the newest file of this identity.

        Raises:
            ShardError: `fill` failed, here or in the process that was waited for.
            SettingsError: the cache's limit is too small.
        """
        self._check_process()
        with self._threads:
            if name in self._uses:
                self._uses[name].count += 1
                return self._uses[name].target
        target = self._target(identity, version)
        asked = time.time()
        lock = os.open(beside(target, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Readers share the lock; who downloads or removes holds it exclusively. Between the two kinds it is free
            # for a moment, in which another process may remove the file: hence the loop.
            self._lock(lock, fcntl.LOCK_SH, target)
            while not self._is_there(target):
                alone = self._lock_alone(lock, target)
                if alone is not None and not self._is_there(target):
                    self._fill(target, fill, asked, alone=alone)
                self._lock(lock, fcntl.LOCK_SH, target)
            if not self.temporary:
                with contextlib.suppress(OSError):  # another user's file
                    # Its time of last use. The modification time must not change: it is sealed.
                    os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        except BaseException:
            unlock(lock)
            raise
        with self._threads:
            if name not in self._uses:
                self._uses[name] = _Use(lock, target)
                return target
            self._uses[name].count += 1  # another thread was faster
        unlock(lock)
        return target

    def _target(self, identity: str, version: str | None) -> Path:
        """FOLDER/HASH-VERSIONHASH-STEM.tar; without a version, the newest file of this identity."""
        stems = STEM.findall(redact(identity).partition("?")[0])
        stem = stems[-1][-60:] if stems else "shard"
        first = hashlib.sha256(identity.encode()).hexdigest()[:24]
        if version is not None:
            return self.folder / f"{first}-{hashlib.sha256(version.encode()).hexdigest()[:8]}-{stem}.tar"
        if not self.temporary:
            stamps = {path: stamp(path) for path in self.folder.glob(f"{first}-*.tar")}
            written = [(found[1], path) for path, found in stamps.items() if found is not None]
            if written:
                return max(written)[1]
        return self.folder / f"{first}-{stem}.tar"

    def _is_there(self, target: Path) -> bool:
        """Whether the file is there and whole."""
        return target.exists() if self.temporary else cache_eviction.is_whole(target)

    def _lock_alone(self, lock: int, target: Path) -> bool | None:
        """As `_lock` with LOCK_EX; None, with nothing locked, if another process makes the file first.

        Also False, with the lock shared, if the file is damaged while others go on reading it, as they may be waiting
        for this process. It is then replaced: they have the former file open, or will open the new one.
        """
        found, end = stamp(target), time.monotonic() + LOOK

        def others_have_it() -> bool:
            return stamp(target) != found or (found is not None and time.monotonic() > end)

        alone = self._lock(lock, fcntl.LOCK_EX, target, unless=others_have_it)
        if alone is None and stamp(target) == found:
            self._lock(lock, fcntl.LOCK_SH, target)
            return False
        return alone

    def _lock(self, lock: int, kind: int, target: Path, unless: Callable[[], bool] = lambda: False) -> bool | None:
        """Take a lock, and report the progress of the process that holds it meanwhile.

        Returns:
            True; False on file systems without flock, where two processes may download the same shard and both get it
            whole; None, with nothing locked, if `unless` became true while waiting.
        """
        size, looked = 0, 0.0
        while True:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_UN)  # some file systems keep the former lock: two would deadlock
                if unless():
                    return None
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                    return False
                raise
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if (now := total_size(self.folder.glob(f"{target.name}.*.part"))) != size:
                    size = now
                    self.report_progress(now)
            time.sleep(0.02)

    def _fill(self, target: Path, fill: Fill, asked: float, *, alone: bool) -> None:
        """Make the file, or raise the failure of the process that tried it since `asked`."""
        failed = beside(target, ".failed")
        with contextlib.suppress(OSError, ValueError):
            if failed.stat().st_mtime >= asked:
                raise ShardError(*json.loads(failed.read_text()))
        if alone:  # remove a damaged entry, and the parts of killed processes
            cache_eviction.discard(target)
            for left in self.folder.glob(f"{target.name}.*.part"):
                left.unlink(missing_ok=True)
        # tempfile would make the file readable by its owner only; the umask decides who may read the cache.
        part = beside(target, f".{secrets.token_hex(4)}.part")
        part.touch(exist_ok=False)
        try:
            fill(part, _Reservation(self, target))
            if not self.temporary:
                cache_eviction.seal(part, target)
            part.replace(target)
            if not self.temporary:
                for other in self.folder.glob(f"{target.name[:25]}*.tar"):
                    if other != target:
                        remove_unused(other)  # an older version
        except ShardError as error:
            # Processes that wait for this download share its failure instead of repeating it one after the other.
            with contextlib.suppress(OSError):  # the disk may be full
                failed.write_text(json.dumps([error.reason, error.detail]))
            raise
        except OSError as error:
            raise disk_error(self.folder, error) from error
        finally:
            part.unlink(missing_ok=True)
            self.quota.release(target)

    def report_progress(self, size: int) -> None:
        """Call `alive` if this is the main thread, which waits for the download; other threads prefetch."""
        if self.alive is not None and threading.current_thread() is threading.main_thread():
            self.alive(size)

    def _check_process(self) -> None:
        """After a fork, drop the parent's uses; closing the copied descriptors leaves the parent's locks."""
        if self._pid != os.getpid():
            for use in self._uses.values():
                os.close(use.lock)
            self._uses = {}
            self._threads = threading.Lock()
            self._pid = os.getpid()


def _temporary_folder() -> tuple[Path, int]:
    """A temporary folder, and the descriptor whose lock is held while this run lives. Removes dead runs'."""
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
    with contextlib.suppress(OSError):  # without locks, no other run removes the folder
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
        (folder / "lock").rename(folder / "owner.lock")  # gets this name only once it is locked
    return folder, own


def _remove_folder(folder: Path, lock: int, owner: int) -> None:
    """Remove the folder in the process `owner`; forked children inherit this finalizer."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
