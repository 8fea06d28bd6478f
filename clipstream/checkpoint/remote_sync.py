"""The copy of a run's folder in remote storage, through fsspec (s3://, gs://, az://, file://, …).

    URL/NAME/config.yaml, metrics.jsonl
    URL/NAME/checkpoints/step_XXXXXXXX/…, latest, best     as in the local folder; COMPLETE is written last

`RemoteSync` uploads checkpoints, settings and metrics in the background: a thread copies the newest whole checkpoint,
then those that are kept for longer, then removes the others of this run from remote storage; a copy in progress is
finished before a newer one begins. A failure is a warning, and the copy is retried after the next save: it never ends a
run, whose last line and exit code say how far the copy is behind. `download` copies a checkpoint to this machine.

A listing may be empty though there are files, as of a gateway that fails. So files of known names (`latest`, COMPLETE)
are read as well, and only what this run wrote, or found when it began, is removed or replaced.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clipstream.checkpoint import store
from clipstream.checkpoint.store import ASIDE, BEST, LATEST, MARKER, NAME, Marker
from clipstream.errors import SettingsError, ShardError
from clipstream.storage.backends import Monitor, explain, progress_of, reach
from clipstream.storage.download import fetch, retry
from clipstream.storage.shard_url import ShardURL, redact, with_variables
from clipstream.training.settings import CheckpointSettings
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
SMALL = ("config.yaml", METRICS)
NOTICEABLE = 2.0  # s that the end of a run waits for the last copy before it says so
PATIENCE = 10.0  # s without progress after which a run that was asked to stop does not wait for it any more
LIMIT = 60.0  # s without an answer, or without progress of an upload, after which it fails
PART, PARTS = 8 << 20, 4  # bytes of a part of an upload, and parts that are sent at once, where the backend sends parts
SLOWEST = 1 << 20  # bytes/s of an upload whose parts are not reported, at least
RETRIES, BACKOFF = 3, 1.0  # further attempts for one file, and seconds before the first of them
_Result = TypeVar("_Result")


class RemoteDir:
    """A remote folder or file, by the URL of a setting, in which `${NAME}` is replaced from the environment.

    Raises SettingsError: fsspec does not know the scheme, its backend is not installed, or it cannot be reached.
    """

    def __init__(self, url: str, setting: str) -> None:
        self._url = with_variables(url).rstrip("/")
        self.shown, self.setting = redact(url.rstrip("/")), setting
        try:
            self._parts = self._reach(_parts)
        except (ShardError, TimeoutError) as error:
            raise SettingsError(f"{setting}: {getattr(error, 'detail', error)}") from error

    def _reach(
        self, act: Callable[[Any, str], _Result], limit: float | None = None, alive: Callable[[], float] = lambda: 0.0
    ) -> _Result:
        return reach(ShardURL(self._url), act, limit or LIMIT, alive)

    def __truediv__(self, name: str) -> RemoteDir:
        return self._at(f"{self._url}/{name}")

    def _at(self, url: str) -> RemoteDir:
        """Another place of the same storage."""
        other = copy(self)
        other._url, other.shown = url, redact(url)
        return other

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteDir:
        return self._at(self._url.rpartition("/")[0])

    def names(self) -> list[str]:
        """Names of the folder's entries; empty if the folder does not exist, or the listing fails to show it."""
        try:
            found = self._reach(lambda system, path: system.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(self) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        try:
            return bytes(self._reach(lambda system, path: system.cat_file(path)))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def size(self) -> int | None:
        """Bytes of a file; None if it does not exist."""
        try:
            return int(self._reach(lambda system, path: system.info(path)["size"]))
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        self._reach(lambda system, path: system.pipe_file(path, content), self.limit(len(content)))

    def upload(self, file: Path, moved: Callable[[float], object] = lambda limit: None) -> None:
        """Copy a local file, and check its size there; `moved` is called after each part, with the seconds that the
        next one may take.

        Raises Exception: the backend's; OSError: fewer bytes are there.
        """
        size = file.stat().st_size
        limit = self.limit(size)
        progress, alive = progress_of(lambda: moved(limit))
        options = {"callback": progress, **self._parts}
        self._reach(lambda system, path: system.put_file(str(file), path, **options), limit, alive)
        if (there := self.size()) != size:
            raise OSError(f"{there or 0:,} of {size:,} bytes of {self.name} arrived")

    def limit(self, size: int) -> float:
        """Seconds without progress after which an upload of `size` bytes fails."""
        return LIMIT + (min(size, PART * PARTS) if "chunksize" in self._parts else size) / SLOWEST

    def download(self, file: Path) -> None:
        """Copy it to a local file. Raises ShardError: it is missing or unreachable."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fetch(ShardURL(self._url), file, Monitor(), retries=RETRIES, backoff=BACKOFF)

    def remove(self) -> None:
        """Delete a checkpoint; its marker first, so that a partly deleted one does not count."""

        def delete(system: Any, path: str) -> None:
            for one, folder in ((f"{path}/{MARKER}", False), (path, True)):
                with suppress(FileNotFoundError):
                    system.rm(one, recursive=folder)

        self._reach(delete)

    def examine(self) -> Marker | str:
        """The marker of a checkpoint whose files have the right sizes, or what is wrong with it."""
        content = (self / MARKER).read()
        marker = None if content is None else Marker.from_json(content)
        if marker is None:
            return f"it has no {MARKER}" if content is None else f"its {MARKER} is damaged"
        for name, size in marker.sizes.items():
            if (there := (self / name).size()) != size:
                return f"{name} is missing" if there is None else f"{name} has {there:,} of {size:,} bytes"
        return marker

    def checkpoints(self) -> dict[str, bool]:
        """The checkpoints in this folder and those that `latest` and `best` name, and whether they are listed."""
        listed = {name for name in self.names() if NAME.fullmatch(name)}
        named = {parse_pointer((self / pointer).read()) for pointer in (LATEST, BEST)}
        return {name: name in listed for name in sorted(listed | named, reverse=True) if NAME.fullmatch(name)}

    def examine_checkpoints(self) -> dict[str, Marker | str]:
        """The checkpoints in this folder, as from `examine`: the incomplete ones, then the whole ones, newest first."""
        found = {name: ((self / name).examine(), listed) for name, listed in self.checkpoints().items()}
        there = {name: one for name, (one, listed) in found.items() if listed or isinstance(one, Marker)}
        for name in (name for name in there if not found[name][1]):
            logger.warning(f"the listing of {self.shown} lacks {name}, which is there")
        serials = {name: one.serial for name, one in there.items() if isinstance(one, Marker)}
        return {name: there[name] for name in sorted(there, key=lambda name: -serials.get(name, 1 << 62))}

    def whole(self) -> dict[str, Marker]:
        """The whole checkpoints in this folder, newest first."""
        return {name: one for name, one in self.examine_checkpoints().items() if isinstance(one, Marker)}


def _parts(system: Any, path: str) -> dict[str, int]:
    """The arguments for an upload in parts that the backend takes."""
    own = inspect.signature(getattr(system, "_put_file", system.put_file)).parameters
    return {name: value for name, value in (("chunksize", PART), ("max_concurrency", PARTS)) if name in own}


def parse_pointer(content: bytes | None) -> str:
    """The name of the checkpoint in a file `latest` or `best`."""
    return (content or b"").decode(errors="replace").partition("\n")[0].strip()


def with_retries(act: Callable[[], _Result]) -> _Result:
    """The result of `act`, called again after a failure up to RETRIES times, unless a file is missing."""
    return retry(
        act, retries=RETRIES, backoff=BACKOFF, is_transient=lambda error: not isinstance(error, FileNotFoundError)
    )


@contextmanager
def as_settings_error(remote: RemoteDir, verb: str, where: str = "") -> Iterator[None]:
    """Raise errors of backends, which have types of their own, as SettingsError: the remote folder cannot be read."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{remote.setting}: cannot {verb} {remote.shown}{where}: {explain(error)}") from error


def download(remote: RemoteDir, folder: Path) -> Path | None:
    """The checkpoint that a URL names (also a file `latest` or `best`, or a run's folder: its newest one), copied
    into the folder of local checkpoints unless it is there already; None if there is none.

    Raises SettingsError: the remote folder cannot be read or copied, or all checkpoints in it are damaged.
    """

    def candidates() -> list[tuple[RemoteDir, Marker | str]]:
        """The checkpoints that the URL may name, as from `RemoteDir.examine_checkpoints`."""
        named = remote.parent / parse_pointer(remote.read()) if remote.name in (LATEST, BEST) else remote
        if NAME.fullmatch(named.name):
            return [(named, named.examine())]
        for part in (named / CHECKPOINTS, named):
            if there := part.examine_checkpoints():
                return [(part / name, one) for name, one in there.items()]
        return []

    with as_settings_error(remote, "copy", f" to {folder}"):
        found = with_retries(candidates)
        for candidate, marker in found:
            damage: str | None = marker if isinstance(marker, str) else None
            if isinstance(marker, Marker):
                here = folder / candidate.name
                if store.marker_of(here) == marker and store.fault(here) is None:
                    return here
                logger.info(f"fetching {candidate.shown}")
                draft = store.begin(folder, candidate.name, sum(marker.sizes.values()))
                if (damage := _fetch(candidate, marker, draft)) is None:
                    return store.commit(draft, marker)
                store.remove(draft)
            logger.warning(f"{candidate.shown} is damaged ({damage}): it is not used")
    if names := [candidate.name for candidate, marker in found if isinstance(marker, Marker)]:
        raise SettingsError(f"{remote.setting}: all checkpoints in {remote.shown} are incomplete ({', '.join(names)})")
    return None


def _fetch(candidate: RemoteDir, marker: Marker, draft: Path) -> str | None:
    """Download a checkpoint's files; returns what is wrong with them. Raises ShardError: they cannot be reached."""
    for name, size in marker.sizes.items():
        try:
            (candidate / name).download(draft / name)
        except ShardError as error:
            if error.reason not in ("missing", "truncated_download"):
                raise
            return error.detail
        atomic_write.flush(draft / name)
        if (there := (draft / name).stat().st_size) != size:
            return f"{name} has {there:,} of {size:,} bytes"
    return store.fault(draft, marker=marker)


class RemoteSync:
    """The remote copy of a run's folder. The end of a run that `is_stopping` waits for `PATIENCE` alone."""

    def __init__(
        self,
        remote: RemoteDir,
        folder: Path,
        settings: CheckpointSettings,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.remote, self.is_stopping = remote, is_stopping
        self._folder, self._checkpoints, self._settings = folder, folder / CHECKPOINTS, settings
        self._lock = threading.Lock()
        self._wanted = False
        self._held: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None  # while there is something to copy
        self._there: dict[str, Marker | None] = {}  # this run's remote checkpoints; None for a part of one
        self._is_new = True  # whether there was none when this run began
        self._failure: str | None = None  # of the last copy
        self._moved, self._due = 0.0, 0.0  # time of the last progress, and at which the next one is due
        self._stopping = 0.0  # time at which the end of a run that was asked to stop began to wait

    @property
    def last_serial(self) -> int:
        """The largest serial of a remote checkpoint of this run; 0 without one. From any thread."""
        return max((marker.serial for marker in [*self._there.values()] if marker is not None), default=0)

    def begin(self, whole: dict[str, Marker]) -> None:
        """Continue the run that the remote checkpoints are of."""
        self._there, self._is_new = dict(whole), not whole

    def behind(self) -> str | None:
        """How far the remote copy is behind the run, in words; None if it is complete."""
        if self._failure is None and self._thread is None:
            return None
        why = self._failure or f"no answer in {time.monotonic() - self._moved:.0f} s"
        serial = self.last_serial
        steps = [marker.step for marker in [*self._there.values()] if marker is not None and marker.serial == serial]
        last = f"ends at step {steps[0]}" if steps else "has no checkpoint"
        lacking = max((one.serial for one in store.markers(self._checkpoints, []).values()), default=0) - serial
        what = f"{lacking:,} save{'s' * (lacking != 1)} behind" if lacking > 0 else "incomplete"
        return f"the copy in {self.remote.shown} is {what} ({last}): {why}"

    def wake(self) -> None:
        """Start a copy of what is new."""
        with self._lock:
            self._wanted = True
            if self._thread is None:
                self._expect(LIMIT)
                self._thread = threading.Thread(target=self._run, name="remote-sync", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until everything is copied, has failed, or makes no progress."""
        began, said = time.monotonic(), False
        while (thread := self._thread) is not None and (now := time.monotonic()) < self._due:
            if self.is_stopping():
                self._stopping = self._stopping or now
                if now > max(self._stopping, self._moved) + PATIENCE:
                    break
            if not said and now > began + NOTICEABLE:
                said = True
                logger.info(f"waiting for the copy to {self.remote.shown}")
            thread.join(0.1)

    @contextmanager
    def holding(self) -> Iterator[frozenset[str]]:
        """The checkpoints being copied, which must not be removed; no other copy begins within the context."""
        with self._lock:
            yield self._held

    def _expect(self, seconds: float) -> None:
        """Note progress, and that the next one may take so long."""
        self._moved = time.monotonic()
        self._due = self._moved + seconds

    def _do(self, act: Callable[[], _Result], limit: float | None = None) -> _Result:
        self._expect((limit or LIMIT) + RETRIES * BACKOFF)
        return with_retries(act)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._held = frozenset()
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                with self._lock:
                    markers = store.markers(self._checkpoints, [])
                    found = {name: marker for name, marker in markers.items() if not name.endswith(ASIDE)}
                    kept = store.names_to_keep(self._checkpoints, found, last=1, every=self._settings.keep_every)
                    local = {name: marker for name, marker in found.items() if name in kept}
                    self._held = frozenset(local)
                self._copy(local)
                self._failure = None
            except Exception as error:  # backends raise errors of their own types
                self._failure = explain(error)
                logger.warning(
                    f"{self.remote.setting}: the copy to {self.remote.shown} is incomplete and is retried after the "
                    f"next save: {type(error).__name__}: {self._failure}"
                )

    def _copy(self, local: dict[str, Marker]) -> None:
        checkpoints = self.remote / CHECKPOINTS
        self._compare(checkpoints, local)
        for name, marker in local.items():
            if self._there.get(name) != marker:
                self._copy_one(name, marker)
        for name in (*SMALL, f"{CHECKPOINTS}/{LATEST}", f"{CHECKPOINTS}/{BEST}"):
            if (self._folder / name).is_file():
                target, content = self.remote / name, (self._folder / name).read_bytes()
                self._do(partial(target.write, content), target.limit(len(content)))
        if not any(self._there.get(name) for name in local):
            return
        last, every = self._settings.keep_last, self._settings.keep_every
        there = {name: marker for name, marker in self._there.items() if marker is not None}
        kept = store.names_to_keep(self._checkpoints, there, last=last, every=every)
        for name in self._there.keys() - kept:
            self._do((checkpoints / name).remove)
            del self._there[name]

    def _compare(self, checkpoints: RemoteDir, local: dict[str, Marker]) -> None:
        """Look for checkpoints that this run did not write. Raises SettingsError: they were not seen as it began."""
        listed = self._do(checkpoints.checkpoints)
        unknown = {*listed, *(local if self._is_new else ())} - self._there.keys()
        whole = {name for name in unknown if self._do((checkpoints / name / MARKER).read) is not None}
        if whole and self._is_new:
            raise SettingsError(
                f"it has checkpoints of another run ({', '.join(sorted(whole))}), which were not there when this one "
                "began: nothing is copied or removed; continue that run with --resume auto, or choose another --name"
            )
        for name in unknown - whole:
            if listed.get(name) and MARKER not in self._do((checkpoints / name).names):
                self._there[name] = None  # a part, of a process that was killed

    def _copy_one(self, name: str, marker: Marker) -> None:
        """Copy a checkpoint, its marker last, unless the local one is replaced meanwhile."""
        source, target = self._checkpoints / name, self.remote / CHECKPOINTS / name
        self._there[name] = None
        self._do(target.remove)
        for file, size in marker.sizes.items():
            remote = target / file
            self._do(partial(remote.upload, source / file, self._expect), remote.limit(size))
        if store.marker_of(source) == marker:  # its step was not saved again
            self._do(partial((target / MARKER).write, marker.to_json()))
            self._there[name] = marker
