"""The copy of a run's folder in remote storage, through fsspec (s3://, gs://, az://, file://, …).

    URL/NAME/config.yaml, metrics.jsonl
    URL/NAME/checkpoints/step_XXXXXXXX/…, latest, best     as in the local folder; COMPLETE is written last

`RemoteSync` uploads checkpoints, settings and metrics in the background: a thread copies the newest whole checkpoint,
then those that are kept for longer, then removes the others from remote storage; a copy in progress is finished before
a newer one begins. A failure is a warning, and the copy is retried after the next save: it never ends a run.
`download` copies a checkpoint to this machine. Credentials are the backends' own, as for shards, and are never shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from clipstream.checkpoint import store
from clipstream.checkpoint.store import ASIDE, BEST, LATEST, MARKER, NAME, Marker
from clipstream.errors import SettingsError
from clipstream.storage.download import Monitor, ShardError, fetch, filesystem_of, retry
from clipstream.storage.shard_url import ShardURL, redact, with_variables
from clipstream.training.settings import CheckpointSettings
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
SMALL = ("config.yaml", METRICS)
NOTICEABLE = 2.0  # s that the end of a run waits for the last copy before it says so
RETRIES, BACKOFF = 3, 1.0  # further attempts for one file, and seconds before the first of them
_Result = TypeVar("_Result")


class RemoteDir:
    """A remote folder or file.

    Args:
        url: of a run's folder, or of one of its checkpoints; `${NAME}` is replaced from the environment.
        setting: the setting that has the URL, for messages.

    Raises SettingsError: fsspec does not know the scheme, its backend is not installed, or it cannot be reached.
    """

    def __init__(self, url: str, setting: str) -> None:
        self._url = with_variables(url).rstrip("/")
        self.shown, self.setting = redact(url.rstrip("/")), setting
        try:
            self._system, self._path = filesystem_of(ShardURL(self._url), "or use another URL")
        except ShardError as error:
            raise SettingsError(f"{setting}: {error.detail}") from error

    def __truediv__(self, name: str) -> RemoteDir:
        return RemoteDir(f"{self._url}/{name}", self.setting)

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteDir:
        return RemoteDir(self._url.rpartition("/")[0], self.setting)

    def names(self) -> list[str]:
        """Names of the folder's entries; empty if the folder does not exist."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(self) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        try:
            return bytes(self._system.cat_file(self._path))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def size(self) -> int | None:
        """Bytes of a file; None if it does not exist."""
        self._system.invalidate_cache()
        try:
            return int(self._system.info(self._path)["size"])
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        self._make_parent()
        self._system.pipe_file(self._path, content)

    def upload(self, file: Path) -> None:
        self._make_parent()
        self._system.put_file(str(file), self._path)

    def download(self, file: Path) -> None:
        """Copy it to a local file. Raises ShardError: it is missing or unreachable."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fetch(ShardURL(self._url), file, Monitor(), retries=RETRIES, backoff=BACKOFF)

    def remove(self) -> None:
        """Delete a checkpoint; its marker first, so that a partly deleted one does not count."""
        for path, folder in ((f"{self._path}/{MARKER}", False), (self._path, True)):
            with suppress(FileNotFoundError):
                self._system.rm(path, recursive=folder)

    def marker(self) -> Marker | None:
        """The marker of a checkpoint whose files have the right sizes; None for anything else."""
        content = (self / MARKER).read()
        marker = None if content is None else Marker.from_json(content)
        if marker is None:
            return None
        found: Mapping[str, Mapping[str, object]] = self._system.find(self._path, detail=True)
        sizes = {path.rpartition(f"/{self.name}/")[2]: info.get("size") for path, info in found.items()}
        return marker if all(sizes.get(name) == size for name, size in marker.sizes.items()) else None

    def whole(self) -> dict[str, Marker]:
        """The whole checkpoints in this folder, newest first."""
        named = {name: (self / name).marker() for name in self.names() if NAME.fullmatch(name)}
        found = {name: marker for name, marker in named.items() if marker is not None}
        return dict(sorted(found.items(), key=lambda item: item[1].serial, reverse=True))

    def _make_parent(self) -> None:
        """Object stores have no folders, and making one may need permissions that the user lacks."""
        if "file" in self._system.protocol:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)


def with_retries(act: Callable[[], _Result]) -> _Result:
    """The result of `act`, called again after a failure up to RETRIES times, unless a file is missing."""
    return retry(
        act, retries=RETRIES, backoff=BACKOFF, is_transient=lambda error: not isinstance(error, FileNotFoundError)
    )


@contextmanager
def told(remote: RemoteDir, verb: str, where: str = "") -> Iterator[None]:
    """Raise errors of backends, which have types of their own, as SettingsError: the remote folder cannot be read."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        why = redact(str(error)) or type(error).__name__
        raise SettingsError(f"{remote.setting}: cannot {verb} {remote.shown}{where}: {why}") from error


def download(remote: RemoteDir, folder: Path) -> Path | None:
    """The checkpoint that a URL names, copied into `folder` unless it is there already; None if there is none.

    Args:
        remote: a checkpoint, a file `latest` or `best`, or a run's folder (its newest checkpoint).
        folder: of the run's local checkpoints.

    Raises SettingsError: the remote folder cannot be read or copied, or all checkpoints in it are damaged.
    """

    def candidates() -> list[tuple[RemoteDir, Marker]]:
        """The whole checkpoints that the URL may name, newest first."""
        named = remote
        if remote.name in (LATEST, BEST):
            named = remote.parent / (remote.read() or b"").decode(errors="replace").partition("\n")[0].strip()
        if NAME.fullmatch(named.name):
            return [] if (marker := named.marker()) is None else [(named, marker)]
        for part in (named / CHECKPOINTS, named):
            if whole := part.whole():
                return [(part / name, marker) for name, marker in whole.items()]
        return []

    with told(remote, "copy", f" to {folder}"):
        found = with_retries(candidates)
        for candidate, marker in found:
            here = folder / candidate.name
            if store.marker_of(here) == marker and store.fault(here) is None:
                return here
            logger.info(f"fetching {candidate.shown}")
            draft = store.begin(folder, candidate.name, sum(marker.sizes.values()))
            for name in marker.sizes:
                (candidate / name).download(draft / name)
                atomic_write.flush(draft / name)
            damage = store.fault(draft, marker=marker)
            if damage is None:
                return store.commit(draft, marker)
            store.remove(draft)
            logger.warning(f"{candidate.shown} is damaged ({damage})")
    if found:
        names = ", ".join(candidate.name for candidate, _ in found)
        raise SettingsError(f"{remote.setting}: all checkpoints in {remote.shown} are incomplete ({names})")
    return None


class RemoteSync:
    """The remote copy of a run's folder.

    Attributes:
        last_serial: the largest serial of a checkpoint in the remote folder before this run.
    """

    def __init__(self, remote: RemoteDir, folder: Path, settings: CheckpointSettings) -> None:
        self.remote, self.last_serial = remote, 0
        self._folder, self._checkpoints, self._settings = folder, folder / CHECKPOINTS, settings
        self._lock = threading.Lock()
        self._wanted = False
        self._held: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None  # while there is something to copy

    def wake(self) -> None:
        """Start a copy of what is new."""
        with self._lock:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remote-sync", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until everything is copied, or has failed."""
        if (thread := self._thread) is not None:
            thread.join(NOTICEABLE)
            if thread.is_alive():
                logger.info(f"waiting for the copy to {self.remote.shown}")
                thread.join()

    @contextmanager
    def holding(self) -> Iterator[frozenset[str]]:
        """The checkpoints being copied, which must not be removed; no other copy begins within the context."""
        with self._lock:
            yield self._held

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
                    markers = store.markers(self._checkpoints)
                    found = {name: marker for name, marker in markers.items() if not name.endswith(ASIDE)}
                    kept = store.retained(self._checkpoints, found, last=1, every=self._settings.keep_every)
                    local = {name: marker for name, marker in found.items() if name in kept}
                    self._held = frozenset(local)
                self._copy(local)
            except Exception as error:  # backends raise errors of their own types
                message = redact(f"{type(error).__name__}: {error}")
                logger.warning(
                    f"{self.remote.setting}: the copy to {self.remote.shown} is incomplete and is retried after the "
                    f"next save: {message}"
                )

    def _copy(self, local: dict[str, Marker]) -> None:
        checkpoints = self.remote / CHECKPOINTS
        there = with_retries(checkpoints.whole)
        for name, marker in local.items():
            if there.get(name) != marker and self._copy_one(name, marker):
                there[name] = marker
        files = [self._folder / name for name in SMALL]
        files += [self._checkpoints / name for name in (LATEST, BEST)]
        for file in files:
            if file.is_file():
                target = self.remote / str(file.relative_to(self._folder))
                with_retries(partial(target.write, file.read_bytes()))
        if not local.keys() & there.keys():
            return
        last, every = self._settings.keep_last, self._settings.keep_every
        kept = store.retained(self._checkpoints, there, last=last, every=every)
        for name in with_retries(checkpoints.names):
            if NAME.fullmatch(name) and name not in kept:
                with_retries((checkpoints / name).remove)

    def _copy_one(self, name: str, marker: Marker) -> bool:
        """Copy a checkpoint, its marker last; False if the local one was replaced meanwhile."""
        source, target = self._checkpoints / name, self.remote / CHECKPOINTS / name
        with_retries(target.remove)
        for file in marker.sizes:
            with_retries(partial((target / file).upload, source / file))
        if store.marker_of(source) != marker:  # its step was saved again
            return False
        with_retries(partial((target / MARKER).write, marker.to_json()))
        return True
