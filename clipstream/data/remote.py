"""Owns the way from a shard's URL to a local, whole, uncompressed file; never looks inside the tar for samples.

A remote shard is spooled whole and at full speed before anything is read of it: a slowly read network stream times
out, and the end of a stream proves nothing. A spool is written under a temporary name and renamed when its length
(http, buckets), the command's exit status (`pipe:`) or the end of the packed stream says that it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipstream.data import keeping
from clipstream.data.fetching import Fetcher
from clipstream.data.keeping import GROWTH, Room, is_whole, let_go, own_folder, remove_folder, remove_unused
from clipstream.data.packed import packed_version, unpack
from clipstream.data.shards import local_path, redact
from clipstream.data.transfer import ShardError, disk_error
from clipstream.errors import SettingsError

__all__ = ["ShardError", "ShardStore"]

LOOK = 0.5  # s between two looks at how far another process' download is
STEM = re.compile(r"[\w.-]+(?=\.(?:tar|tgz|csv|tsv|json|jsonl|ndjson|parquet)\b)")
Alive = Callable[[int], None]  # takes the bytes that have come


@dataclass
class _Use:
    """A spool that this process reads: the descriptor that holds its lock, its path, and how often it was asked for."""

    lock: int
    target: Path
    count: int = 1


class _Coming:
    """A spool on its way, whose room is reserved as it grows."""

    def __init__(self, store: ShardStore, target: Path) -> None:
        self._store, self._target, self._reserved, self._size = store, target, 0, 0

    def expect(self, size: int) -> None:
        """See Watch."""
        self._have(self._store.room.expect, size)

    def came(self, size: int) -> None:
        """See Watch."""
        self._size = size
        if size > self._reserved:
            self._have(self._store.room.reserve, size + GROWTH)
        self._store.tell(size)

    def _have(self, reserve: Callable[..., bool], size: int) -> None:
        come = -1
        while not reserve(self._target, size, ahead=not _is_waited_for()):
            # What has to be here first may hang, as not every source has time limits: we get on as long as it does.
            if (now := keeping.bytes_coming(self._target.parent)) != come:
                come = now
                self._store.tell(self._size)
            time.sleep(0.1)
        self._reserved = size


Fill = Callable[[Path, _Coming], None]  # writes the whole shard to the path, or raises


class ShardStore:
    """Local files of shards. Picklable, safe to use in forked workers and in threads; all ranks may share one `cache`
    folder.

    A shard is downloaded by one process at a time, whoever asks; the others wait for it. With a folder of one's own,
    spooled shards stay for the next run, by the hash of their whole URL and of the version that the server tells; they
    are checked against what was written. Without one, a temporary folder is made here and removed by
    `close` in the process that made it (and at its end); the temporary folder's disk must hold the shards that are in
    use together.

    Args:
        cache: folder for spooled shards; None for a temporary one.
        limit: bytes that a folder of one's own may hold; None for all that comes.
        wanted: shards that are in use at once on this node, about.
        timeout: seconds without a new byte after which a transfer is given up.
        retries: how often a failed transfer of http or from a bucket is tried again, from where it stopped if it can.
        backoff: seconds before the first retry; doubled each time.

    Attributes:
        fetcher: brings them.
        alive: called with the bytes that have come, as they come, so that a long transfer is told from one that hangs;
            only for transfers of the main thread, which waits for them.

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
    ) -> None:
        self.fetcher = Fetcher(timeout=timeout, retries=retries, backoff=backoff)
        self.temporary = cache is None
        if cache is None:
            self.folder, lock = own_folder()
            self._finalizer: weakref.finalize[..., ShardStore] | None = weakref.finalize(
                self, remove_folder, self.folder, lock, os.getpid()
            )
        else:
            self.folder = Path(cache).expanduser().absolute()
            self._finalizer = None
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be made: {error.strerror}") from error
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SettingsError(f"data.cache: the folder {self.folder} cannot be written")
        self.room = Room(self.folder, None if self.temporary else limit, wanted)
        self._checked: set[Path] = set()
        self._uses: dict[str, _Use] = {}
        self._threads = threading.Lock()
        self._pid = os.getpid()
        self.alive: Alive = _nothing

    def local(self, url: str) -> Path:
        """The whole shard as a local uncompressed file; the path itself for a local tar.

        Raises:
            ShardError: the shard is not there, cannot be reached, or came incomplete.
        """
        if (named := local_path(url)) is not None:
            path = Path(named)
            version = packed_version(path)
            if version is None:
                return path
            return self.spooled(url, f"{path}:{version}", lambda part, coming: unpack(path, part, coming.came))
        return self.spooled(
            url, url, lambda part, coming: self.fetcher.fetch(url, part, coming), version=self._version(url)
        )

    def bring(self, url: str) -> bool:
        """Have a shard here ahead of its use; whether it is held now, to be released: not where room is limited.

        Raises:
            ShardError, SettingsError: as `local`; also where room is taken for now.
        """
        self.local(url)
        if self.room.limited:
            self.release(url)
        return not self.room.limited

    def release(self, url: str, *, keep: bool = True) -> None:
        """Say that this process reads the shard no more: a spool in a temporary folder goes with its last user, and so
        does a kept one that was of no use (`keep` is false).
        """
        self._check_process()
        with self._threads:
            use = self._uses.get(url)
            if use is None:
                return
            use.count -= 1
            if use.count:
                return
            del self._uses[url]
        let_go(use.lock)
        if self.temporary or not keep:
            remove_unused(use.target)  # unless others still read it: the last of them removes it

    def close(self) -> None:
        """Give all shards back; in the process that made a temporary folder, remove it."""
        self._check_process()
        with self._threads:
            for use in self._uses.values():
                let_go(use.lock)
            self._uses = {}
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, object]:
        state = {key: value for key, value in self.__dict__.items() if key != "_threads"}
        return {**state, "_finalizer": None, "_uses": {}, "_pid": -1, "alive": _nothing}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._threads = threading.Lock()

    def _target(self, identity: str, version: str | None) -> Path:
        """The spool's name: a hash of the whole URL, for shards of one name in many folders, one of its version, and a
        readable rest. Where the version cannot be asked for, the newest that is here.
        """
        stems = STEM.findall(redact(identity).partition("?")[0])
        stem = stems[-1][-60:] if stems else "shard"
        first = hashlib.sha256(identity.encode()).hexdigest()[:24]
        if version is None and not self.temporary and (here := keeping.newest(self.folder.glob(f"{first}-*.tar"))):
            return here
        second = "" if version is None else f"{hashlib.sha256(version.encode()).hexdigest()[:8]}-"
        return self.folder / f"{first}-{second}{stem}.tar"

    def _version(self, url: str) -> str | None:
        """What a kept shard is compared with; a temporary one is always fetched anew."""
        return None if self.temporary or url in self._uses else self.fetcher.about(url).version

    def spooled(self, url: str, identity: str, fill: Fill, *, version: str | None = None) -> Path:
        """The local file that `fill` makes, by the one process that is first; the others wait for it.

        Args:
            url: by which it is given back.
            identity: what the file is; another identity is another file.
            version: what changes with its content, if that is known.

        Raises:
            ShardError: it could not be made, here or by the process that was waited for.
            SettingsError: the limit is too small.
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
            # A reader holds the lock shared, the one that downloads or removes holds it alone. Going from one to the
            # other lets go for a moment, in which another process may remove the spool: hence the loop.
            self._lock(lock, fcntl.LOCK_SH, target)
            while not self._is_there(target):
                alone = self._lock_alone(lock, target)
                if alone is not None and not self._is_there(target):
                    if failure := keeping.failure_since(asked, target):
                        raise ShardError(*failure)
                    self._fill(target, fill, alone=alone)
                self._lock(lock, fcntl.LOCK_SH, target)
            if not self.temporary:
                keeping.note_use(target)
        except BaseException:
            let_go(lock)
            raise
        with self._threads:
            if url not in self._uses:
                self._uses[url] = _Use(lock, target)
                return target
            self._uses[url].count += 1  # another thread was here meanwhile
        let_go(lock)
        return target

    def _is_there(self, target: Path) -> bool:
        """Whether the spool is there, and whole: what was kept from another run may be damaged."""
        if self.temporary or target in self._checked:
            return target.exists()
        if is_whole(target):
            self._checked.add(target)
            return True
        return False

    def _lock_alone(self, lock: int, target: Path) -> bool | None:
        """As `_lock`, unless another, who looked as we did, was first: it then holds the lock shared as it reads.

        False, with the lock held shared, also where what is there is damaged, and others go on reading it: they may
        wait for us. It is replaced under their hands, who have the former file open, or will open the new one.
        """
        found, end = keeping.stamp(target), time.monotonic() + LOOK

        def others_have_it() -> bool:
            return keeping.stamp(target) != found or (found is not None and time.monotonic() > end)

        alone = self._lock(lock, fcntl.LOCK_EX, target, unless=others_have_it)
        if alone is None and keeping.stamp(target) == found:
            self._lock(lock, fcntl.LOCK_SH, target)
            return False
        return alone

    def _lock(self, lock: int, kind: int, target: Path, unless: Callable[[], bool] = lambda: False) -> bool | None:
        """flock. False on file systems without it: two processes may download one shard there, both get it whole.

        None where it had to be waited for and `unless` came true: then nothing is locked.
        """
        size, looked = 0, 0.0
        while True:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_UN)  # some file systems leave what was held, and two would wait for ever
                if unless():
                    return None
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                    return False
                raise
            # What another process downloads counts as our own getting on.
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if (now := keeping.size_of_parts(target)) != size:
                    size = now
                    self.tell(now)
            time.sleep(0.02)

    def _fill(self, target: Path, fill: Fill, *, alone: bool) -> None:
        if alone:  # what is not whole goes, and the part that a process left when it was killed
            keeping.discard(target)
            keeping.remove_parts(target)
        handle, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".part", dir=self.folder)
        os.close(handle)
        part = Path(name)
        try:
            fill(part, _Coming(self, target))
            part.chmod(0o644)
            if not self.temporary:
                keeping.seal(part, target)
            part.replace(target)
            if not self.temporary:
                self._checked.add(target)
                for other in self.folder.glob(f"{target.name[:25]}*.tar"):
                    if other != target:
                        remove_unused(other)  # an older version
        except ShardError as error:
            # Those who waited for us need not wait for the same failure, one after the other.
            keeping.note_failure(target, error.reason, error.detail)
            raise
        except OSError as error:
            raise disk_error(self.folder, error) from error
        finally:
            part.unlink(missing_ok=True)
            self.room.settle(target)

    def tell(self, size: int) -> None:
        """A transfer gets on."""
        if _is_waited_for():
            self.alive(size)

    def _forget_uses(self) -> None:
        for use in self._uses.values():
            os.close(use.lock)
        self._uses = {}
        self._threads = threading.Lock()
        self._pid = os.getpid()

    def _check_process(self) -> None:
        """After a fork, the parent's uses are not ours; closing our copies leaves the parent's locks as they are."""
        if self._pid != os.getpid():
            self._forget_uses()


def _is_waited_for() -> bool:
    """Whether this is the thread that reads; others fetch ahead."""
    return threading.current_thread() is threading.main_thread()


def _nothing(size: int) -> None:
    pass
