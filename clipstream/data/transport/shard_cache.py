"""Local files of shards: a remote or compressed shard is downloaded completely before any of it is read.

URLs enter, paths of complete, uncompressed files leave. A slowly read network stream times out, and its end proves
nothing; so a download goes to a temporary name and is renamed once its length (HTTP, object stores), the command's exit
status (`pipe:`) or the end of the compressed stream shows that it is complete. The content of a tar is not read here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipstream.data.shard_url import local_path, redact
from clipstream.data.transport import cache_eviction
from clipstream.data.transport.cache_eviction import (
    GROWTH,
    CacheQuota,
    is_whole,
    remove_folder,
    remove_unused,
    stamp,
    temporary_folder,
    total_size,
    unlock,
)
from clipstream.data.transport.compression import packed_version
from clipstream.data.transport.downloader import Fetcher
from clipstream.data.transport.transfer import Monitor, ShardError, disk_error
from clipstream.errors import SettingsError

LOOK = 0.5  # s between two looks at the progress of another process's download
STEM = re.compile(r"[\w.-]+(?=\.(?:tar|tgz|csv|tsv|json|jsonl|ndjson|parquet)\b)")
Fill = Callable[[Path, Monitor], None]  # writes the whole shard to the path, or raises


@dataclass
class _Use:
    """A file that this process reads: the descriptor that holds its lock, its path, and the number of readers."""

    lock: int
    target: Path
    count: int = 1


class _Reservation:
    """Monitor that reserves space for a download as it grows."""

    def __init__(self, cache: ShardCache, target: Path) -> None:
        self._cache, self._target, self._reserved, self._size = cache, target, 0, 0

    def expect(self, size: int) -> None:
        """See Monitor."""
        self._reserve(self._cache.quota.reserve_whole, size)

    def received(self, size: int) -> None:
        """See Monitor."""
        self._size = size
        if size > self._reserved:
            self._reserve(self._cache.quota.reserve, size + GROWTH)
        self._cache.report_progress(size)

    def _reserve(self, reserve: Callable[..., bool], size: int) -> None:
        before = -1
        while not reserve(self._target, size, ahead=threading.current_thread() is not threading.main_thread()):
            # Prefetches that take the space may hang, as not every source has time limits: their progress is ours.
            if (now := total_size(self._target.parent.glob("*.part"))) != before:
                before = now
                self._cache.report_progress(self._size)
            time.sleep(0.1)
        self._reserved = size


class ShardCache:
    """Local files of shards. Picklable, safe in forked workers and in threads; all ranks may share one `cache` folder.

    Each shard is downloaded by one process at a time; the others wait for it. In a permanent folder, files stay for the
    next run, named by the hash of the URL and of the version that the server reports, and their checksums are verified.
    A temporary folder is removed by `close`, or at exit, in the process that made it; its disk must hold the shards in
    use at once.

    Args:
        cache: permanent folder; None for a temporary one.
        limit: bytes that a permanent folder may hold; None for no limit.
        wanted: approximate number of shards in use at once on this node.
        timeout: seconds without a new byte after which a transfer fails.
        retries: further attempts of a failed transfer by HTTP or from an object store, which resume if possible.
        backoff: seconds before the first retry; doubled each time.
        most: maximum bytes of a shard; `downloader.MOST` by default.

    Attributes:
        fetcher: does the downloads.
        alive: called with the bytes received so far, to tell a long transfer from a hanging one; only for transfers of
            the main thread, which waits for them.

    Raises:
        SettingsError: the cache folder cannot be made or written.
    """

    def __init__(
        self,
        cache: str | None,
        *,
        limit: int | None = None,
        wanted: int = 1,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        most: int | None = None,
    ) -> None:
        self.fetcher = Fetcher(timeout=timeout, retries=retries, backoff=backoff, most=most)
        self.temporary = cache is None
        self._finalizer: weakref.finalize[..., ShardCache] | None = None
        if cache is None:
            self.folder, lock = temporary_folder()
            self._finalizer = weakref.finalize(self, remove_folder, self.folder, lock, os.getpid())
        else:
            self.folder = Path(cache).absolute()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be made: {error.strerror}") from error
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be written")
        self.quota = CacheQuota(self.folder, None if self.temporary else limit, wanted)
        self._checked: set[Path] = set()
        self._uses: dict[str, _Use] = {}
        self._threads = threading.Lock()
        self._pid = os.getpid()
        self.alive: Callable[[int], None] = _ignore

    def local(self, url: str, *, tar: bool = True) -> Path:
        """The whole shard as a local uncompressed file; for a local tar, its own path.

        Args:
            tar: whether the content has to be a tar, so that a download of anything else ends at once.

        Raises:
            ShardError: the shard is missing, unreachable or incomplete, or no shard.
            SettingsError: the cache's limit is too small.
        """

        def fetch(part: Path, monitor: Monitor) -> None:
            self.fetcher.fetch(url, part, monitor, tar=tar)

        name = local_path(url)
        if name is None:
            known = self.temporary or url in self._uses  # nothing older to compare with
            return self.get_or_make(url, url, fetch, version=None if known else self.fetcher.info(url).version)
        path = Path(name)
        if path.is_fifo() or path.is_char_device():  # can be read only once
            return self.get_or_make(url, url, fetch, version=str(path.stat().st_ino))
        version = packed_version(path)
        if version is None:
            return path
        return self.get_or_make(
            url,
            f"{path}:{version}",
            lambda part, monitor: self.fetcher.unpack(url, path, part, monitor, tar=tar),
        )

    def prefetch(self, url: str) -> bool:
        """Download a shard ahead of its use.

        Returns:
            Whether the shard is held now and has to be released: not if the cache has a limit.

        Raises:
            ShardError, SettingsError: as `local`; also if the space is taken for now.
        """
        self.local(url)
        if self.quota.limited:
            self.release(url)
        return not self.quota.limited

    def release(self, url: str, *, keep: bool = True) -> None:
        """Stop using a shard. Its last user removes the file from a temporary folder, or if `keep` is false."""
        self._check_process()
        with self._threads:
            use = self._uses.get(url)
            if use is None:
                return
            use.count -= 1
            if use.count:
                return
            del self._uses[url]
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
        return {**state, "_finalizer": None, "_uses": {}, "_pid": -1, "alive": _ignore}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._threads = threading.Lock()

    def get_or_make(self, url: str, identity: str, fill: Fill, *, version: str | None = None) -> Path:
        """The local file that `fill` writes: the first process that asks calls it, and the others wait.

        Args:
            url: the name to `release` it by.
            identity: names the content; hashed into the file's name.
            version: changes with the content; None if unknown, which accepts the newest file of this identity.

        Raises:
            ShardError: `fill` failed, here or in the process that was waited for.
            SettingsError: the cache's limit is too small.
        """
        self._check_process()
        with self._threads:
            if url in self._uses:
                self._uses[url].count += 1
                return self._uses[url].target
        target = self._target(identity, version)
        asked = time.time()
        lock = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Readers share the lock; who downloads or removes holds it exclusively. Between the two kinds it is free
            # for a moment, in which another process may remove the file: hence the loop.
            self._lock(lock, fcntl.LOCK_SH, target)
            while not self._is_there(target):
                alone = self._lock_alone(lock, target)
                if alone is not None and not self._is_there(target):
                    if failure := cache_eviction.failure_since(asked, target):
                        raise ShardError(*failure)
                    self._fill(target, fill, alone=alone)
                self._lock(lock, fcntl.LOCK_SH, target)
            if not self.temporary:
                cache_eviction.touch(target)
        except BaseException:
            unlock(lock)
            raise
        with self._threads:
            if url not in self._uses:
                self._uses[url] = _Use(lock, target)
                return target
            self._uses[url].count += 1  # another thread was faster
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
        """Whether the file is there and intact; one kept from another run may be damaged."""
        if self.temporary or target in self._checked:
            return target.exists()
        if is_whole(target):
            self._checked.add(target)
            return True
        return False

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
                if (now := total_size(cache_eviction.parts(target))) != size:
                    size = now
                    self.report_progress(now)
            time.sleep(0.02)

    def _fill(self, target: Path, fill: Fill, *, alone: bool) -> None:
        if alone:  # remove a damaged entry, and the parts of killed processes
            cache_eviction.discard(target)
            for left in cache_eviction.parts(target):
                left.unlink(missing_ok=True)
        # tempfile would make the file readable by its owner only; the umask decides who may read the cache.
        part = self.folder / f"{target.name}.{secrets.token_hex(4)}.part"
        part.touch(exist_ok=False)
        try:
            fill(part, _Reservation(self, target))
            if not self.temporary:
                cache_eviction.seal(part, target)
            part.replace(target)
            if not self.temporary:
                self._checked.add(target)
                for other in self.folder.glob(f"{target.name[:25]}*.tar"):
                    if other != target:
                        remove_unused(other)  # an older version
        except ShardError as error:
            # Processes that wait for this download share its failure instead of repeating it one after the other.
            cache_eviction.note_failure(target, error.reason, error.detail)
            raise
        except OSError as error:
            raise disk_error(self.folder, error) from error
        finally:
            part.unlink(missing_ok=True)
            self.quota.settle(target)

    def report_progress(self, size: int) -> None:
        """Call `alive` if this is the main thread, which waits for the download; other threads prefetch."""
        if threading.current_thread() is threading.main_thread():
            self.alive(size)

    def _check_process(self) -> None:
        """After a fork, drop the parent's uses; closing the copied descriptors leaves the parent's locks."""
        if self._pid != os.getpid():
            for use in self._uses.values():
                os.close(use.lock)
            self._uses = {}
            self._threads = threading.Lock()
            self._pid = os.getpid()


def _ignore(size: int) -> None:
    pass
