"""Local files of shards: a remote or compressed shard is downloaded completely before any of it is read.

URLs enter, paths of complete, uncompressed files leave. A slowly read network stream times out, and its end proves
nothing; so a download goes to a temporary name and is renamed once its length (HTTP, object stores), the command's exit
status (`pipe:`) or the end of the compressed stream shows that it is complete. The content of a tar is not read here.

    HASH-NAME.tar            an entry
    HASH-NAME.tar.lock       locked shared by readers, exclusively by the process that writes or removes the entry;
                             holds the entry's size
    HASH-NAME.tar.part       a download in progress
    HASH-NAME.tar.failed     the reason of the last failed download
    HASH-NAME.tar.reserved   bytes reserved for a download in progress
    quota.lock               locked while bytes are reserved

All processes of a node share the folder. Locks are `flock` and not filelock's `FileLock`, which is exclusive: readers
share a lock here, and file systems without locks still have to work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clipstream.errors import SettingsError, ShardError, errors_as
from clipstream.storage.backends import Monitor
from clipstream.storage.download import GIB, Fetcher, compression_of, disk_error, unreadable
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.utils.atomic_write import try_lock
from clipstream.utils.content import file_state

LOOK = 0.5  # s between two looks at the progress of another process's download
GROWTH = 64 << 20  # bytes reserved at a time for a download of unknown length
STEM = re.compile(r"[\w.-]+(?=\.(?:tar|tgz|csv|tsv|json|jsonl|ndjson|parquet)\b)")
# Other files in the folder are the user's and are never touched.
ENTRY = re.compile(r"(?P<entry>[0-9a-f]{24}-.+\.tar)(?P<kind>|\.reserved|(?:\.[0-9a-f]{8})?(?:\.unpacked)?\.part)")
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


class ShardCache:
    """Local files of shards. Picklable, safe in forked workers and in threads; all ranks may share one `cache` folder.

    Each shard is downloaded by one process at a time; the others wait for it. In a permanent folder, files stay for the
    next run, named by the hash of the URL and of the version that the server reports; a file that does not have the
    length that was written is downloaded again. A temporary folder is removed by `close`, or at exit, in the process
    that made it; its disk must hold the shards in use at once.

    Args:
        cache: permanent folder; None for a temporary one.
        limit: bytes that a permanent folder may hold; None for no limit.
        wanted: approximate number of shards in use at once on this node.

    Attributes:
        alive: called with the bytes received so far, to tell a long transfer from a hanging one; only for transfers of
            the main thread, which waits for them.

    Raises SettingsError: the cache folder cannot be made or written.
    """

    def __init__(
        self, cache: str | None, *, limit: int | None = None, wanted: int = 1, fetcher: Fetcher | None = None
    ) -> None:
        self.fetcher: Fetcher = fetcher or Fetcher()
        self.folder: Path
        self.temporary: bool = cache is None
        self._finalizer: weakref.finalize[..., ShardCache] | None = None
        if cache is None:
            self._make_temporary()
        else:
            self.folder = Path(cache).absolute()
            with errors_as(SettingsError, f"data.cache: cannot create {self.folder}", OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SettingsError(f"data.cache: {self.folder} is not writable")
        self.limit: int | None = None if self.temporary else limit
        self.alive: Callable[[int], None] | None = None
        self._wanted = wanted
        self._is_estimated = False
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
        identity = f"{path}:{stat.st_mtime_ns}-{stat.st_size}"
        return self.get_or_make(name, identity, lambda part, monitor: fetcher.unpack(url, path, part, monitor, tar=tar))

    def prefetch(self, name: str) -> bool:
        """Download a shard ahead of its use; whether it is held now, and has to be released: not in a limited cache.

        Raises ShardError, SettingsError: as `local`; also if the space is taken for now.
        """
        self.local(name)
        if self.limit is None:
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
        _unlock(use.lock)
        if self.temporary or not keep:
            _remove_unused(use.target)  # other readers hold its lock; the last of them removes it

    def close(self) -> None:
        """Release all shards; in the process that made a temporary folder, remove it."""
        self._check_process()
        with self._threads:
            for use in self._uses.values():
                _unlock(use.lock)
            self._uses = {}
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, object]:
        state = {key: value for key, value in self.__dict__.items() if key != "_threads"}
        return {**state, "_finalizer": None, "_uses": {}, "_pid": -1, "alive": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._threads = threading.Lock()
        if not self.folder.exists():  # on another machine
            if self.temporary:
                self._make_temporary()
            else:
                with contextlib.suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True)

    def _make_temporary(self) -> None:
        self.folder, lock = _temporary_folder()
        self._finalizer = weakref.finalize(self, _remove_folder, self.folder, lock, os.getpid())

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
        lock = os.open(_beside(target, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A file that is whole may be read with a shared lock, as it is left with. Else the exclusive lock is tried:
            # got (this process fills), held by another (let go, wait and look again), or not supported here (fill too).
            self._lock(lock, target)
            while not self._is_whole(target):
                # Some file systems keep the former lock while another is waited for: two processes would deadlock.
                # Without locks, two processes may download the same shard, and both get it whole.
                alone = try_lock(lock, fcntl.LOCK_EX)
                if alone is False:  # another process has it, or looks at this moment as well
                    try_lock(lock, fcntl.LOCK_UN)
                    time.sleep(random.uniform(0.001, 0.02))
                elif not self._is_whole(target):
                    self._fill(target, fill, asked, lock, locked=bool(alone))
                self._lock(lock, target)
            if not self.temporary:
                with contextlib.suppress(OSError):  # another user's file
                    # The time of its last use. The modification time tells the newest version.
                    os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        except BaseException:
            _unlock(lock)
            raise
        with self._threads:
            if name not in self._uses:
                self._uses[name] = _Use(lock, target)
                return target
            self._uses[name].count += 1  # another thread was faster
        _unlock(lock)
        return target

    def reserve(self, target: Path, size: int, *, whole: bool = False, wait: bool = True) -> bool:
        """Reserve `size` bytes for a new entry, evicting the least recently used entries that nobody reads. If it is
        the size of the whole entry, the limit must hold `wanted` entries of the first one's. With `wait`, returns False
        while other downloads take the space, in place of an error.

        Raises SettingsError: the limit is too small for the entries in use.
        """
        if self.limit is None:
            return True
        if whole and not self._is_estimated:
            if size * self._wanted > self.limit:
                raise self._too_small(size * self._wanted)
            self._is_estimated = True  # by the first entry only: a single larger one needs no more than its own size
        entries: list[tuple[float, int, str]] = []  # time of last use, bytes, path
        reserved: dict[str, int] = {}
        with file_lock(self.folder / "quota.lock"):
            for file in os.scandir(self.folder):
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
                        with file_lock(self.folder / f"{match['entry']}.lock", wait=False):
                            os.unlink(file.path)
                        continue
                    if match["kind"] == ".reserved":
                        reserved[match["entry"]] = int(Path(file.path).read_text())
            for _, _, path in entries:  # complete already: its size counts, not its reservation
                reserved.pop(os.path.basename(path), None)
            used = sum(reserved.values()) + sum(bytes_ for _, bytes_, _ in entries)
            for _, bytes_, path in sorted(entries):
                if used + size <= self.limit:
                    break
                used -= bytes_ if _remove_unused(Path(path)) else 0
            if used + size <= self.limit:
                _beside(target, ".reserved").write_text(str(size))
                return True
        if reserved and wait:
            return False
        raise self._too_small(max(used + size, size * self._wanted))

    def report_progress(self, size: int) -> None:
        """Call `alive` if this is the main thread, which waits for the download; other threads prefetch."""
        if self.alive is not None and threading.current_thread() is threading.main_thread():
            self.alive(size)

    def _too_small(self, needed: int) -> SettingsError:
        return SettingsError(
            f"data.cache_gib: {(self.limit or 0) / GIB:.3g} GiB cannot hold the shards that are in use at once on a "
            f"node: set at least {needed * 1.1 / GIB:.2g}, or lower --data.shuffle.shards or --data.lanes"
        )

    def _target(self, identity: str, version: str | None) -> Path:
        """FOLDER/HASH-VERSIONHASH-STEM.tar; without a version, the newest file of this identity."""
        stems = STEM.findall(redact(identity).partition("?")[0])
        stem = stems[-1][-60:] if stems else "shard"
        first = hashlib.sha256(identity.encode()).hexdigest()[:24]
        if version is not None:
            return self.folder / f"{first}-{hashlib.sha256(version.encode()).hexdigest()[:8]}-{stem}.tar"
        written = []
        for path in [] if self.temporary else self.folder.glob(f"{first}-*.tar"):
            with contextlib.suppress(OSError):
                written.append((path.stat().st_mtime_ns, path))
        return max(written)[1] if written else self.folder / f"{first}-{stem}.tar"

    def _is_whole(self, target: Path) -> bool:
        """Whether the file exists and has the size that was written: after a crash of the machine it may be shorter."""
        try:
            size = target.stat().st_size
            return self.temporary or int(_beside(target, ".lock").read_text()) == size
        except (OSError, ValueError):
            return False

    def _lock(self, lock: int, target: Path) -> None:
        """Wait for the shared lock of a file, and report the progress of the process that writes it meanwhile."""
        size, looked = 0, 0.0
        while try_lock(lock, fcntl.LOCK_SH) is False:
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if (now := total_size(self.folder.glob(f"{target.name}*.part"))) != size:
                    size = now
                    self.report_progress(now)
            time.sleep(0.02)

    def _fill(self, target: Path, fill: Fill, asked: float, lock: int, *, locked: bool) -> None:
        """Make the file, or raise the failure of the process that tried it since `asked`."""
        failed = _beside(target, ".failed")
        with contextlib.suppress(OSError, ValueError):
            if failed.stat().st_mtime >= asked:
                raise ShardError(*json.loads(failed.read_text()))
        # tempfile would make the file readable by its owner only; the umask decides who may read the cache.
        part = _beside(target, ".part" if locked else f".{secrets.token_hex(4)}.part")
        part.touch()
        try:
            fill(part, _Reservation(self, target))
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(part.stat().st_size).encode(), 0)
            part.replace(target)
            if not self.temporary:
                for other in self.folder.glob(f"{target.name[:25]}*.tar"):
                    if other != target:
                        _remove_unused(other)  # an older version
        except ShardError as error:
            # Processes that wait for this download share its failure instead of repeating it one after the other.
            with contextlib.suppress(OSError):  # the disk may be full
                failed.write_text(json.dumps([error.reason, error.detail]))
            raise
        except OSError as error:
            raise disk_error(self.folder, error) from error
        finally:
            part.unlink(missing_ok=True)
            if self.limit is not None:
                with file_lock(self.folder / "quota.lock"):  # no count is to miss both the entry and its reservation
                    _beside(target, ".reserved").unlink(missing_ok=True)

    def _check_process(self) -> None:
        """After a fork, drop the parent's uses; closing the copied descriptors leaves the parent's locks."""
        if self._pid != os.getpid():
            for use in self._uses.values():
                os.close(use.lock)
            self._uses = {}
            self._threads = threading.Lock()
            self._pid = os.getpid()


class _Reservation(Monitor):
    """Monitor that reserves space for a download as it grows."""

    def __init__(self, cache: ShardCache, target: Path) -> None:
        self._cache, self._target, self._reserved, self._size = cache, target, 0, 0

    def expect(self, size: int) -> None:
        self._reserve(size, whole=True)

    def receive(self, size: int) -> None:
        self._size = size
        if size > self._reserved:
            self._reserve(size + GROWTH, whole=False)
        self._cache.report_progress(size)

    def _reserve(self, size: int, *, whole: bool) -> None:
        before, wait = -1, threading.current_thread() is threading.main_thread()
        while not self._cache.reserve(self._target, size, whole=whole, wait=wait):
            # The downloads that take the space may hang, as not every source has time limits: their progress is ours.
            if (now := total_size(self._target.parent.glob("*.part"))) != before:
                before = now
                self._cache.report_progress(self._size)
            time.sleep(0.1)
        self._reserved = size


def _remove_unused(target: Path) -> bool:
    """Remove an entry if nobody reads it; whether it was removed."""
    try:
        with file_lock(_beside(target, ".lock"), wait=False):
            target.unlink(missing_ok=True)
            return True
    except OSError:
        return False


def total_size(paths: Iterable[Path]) -> int:
    """Bytes of those files that still exist."""
    return sum(state[0] for path in paths if (state := file_state(path)))


def _beside(target: Path, suffix: str) -> Path:
    return Path(f"{target}{suffix}")


def _unlock(lock: int) -> None:
    """Unlock and close: closing alone would leave the lock with a forked copy of the descriptor."""
    try_lock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """A context with the exclusive lock of a file. Without `wait`, raises OSError if it cannot be had at once."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(lock, fcntl.LOCK_EX, wait=wait) and not wait:
            raise BlockingIOError(f"{path} is locked, or cannot be")
        yield
    finally:
        _unlock(lock)


def _temporary_folder() -> tuple[Path, int]:
    """A temporary folder, and the descriptor whose lock is held while this run lives. Removes dead runs'."""
    for other in Path(tempfile.gettempdir()).glob("clipstream-*/owner.lock"):
        with contextlib.suppress(OSError), file_lock(other, wait=False):
            shutil.rmtree(other.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="clipstream-"))
    own = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if try_lock(own, fcntl.LOCK_SH):  # without locks, no other run removes the folder
        (folder / "lock").rename(folder / "owner.lock")  # gets this name only once it is locked
    return folder, own


def _remove_folder(folder: Path, lock: int, owner: int) -> None:
    """Remove the folder in the process `owner`; forked children inherit this finalizer."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
