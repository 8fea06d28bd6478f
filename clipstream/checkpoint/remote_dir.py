"""A run's folder in remote storage, through fsspec (s3://, gs://, az://, file://, …): list, read, write, download.

    URL/NAME/config.yaml, metrics.jsonl
    URL/NAME/checkpoints/step_XXXXXXXX/…, latest, best     as in the local folder; COMPLETE is written last

Credentials are the backends' own, as for shards, and are never shown. `remote_sync` decides what is copied. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clipstream.checkpoint import store
from clipstream.checkpoint.store import BEST, LATEST, MARKER, NAME, Marker
from clipstream.data.shard_url import ShardURL, redact, with_variables
from clipstream.data.transport import object_store
from clipstream.data.transport.transfer import Monitor, ShardError, pause
from clipstream.errors import SettingsError
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
RETRIES, BACKOFF = 3, 1.0  # further attempts for one file, and seconds before the first of them
_Result = TypeVar("_Result")


class RemoteDir:
    """A remote folder or file.

    Args:
        url: of a run's folder, or of one of its checkpoints; `${NAME}` is replaced from the environment.
        setting: the setting that has the URL, for messages.

    Attributes:
        shown: the URL for messages.

    Raises:
        SettingsError: fsspec does not know the scheme, its backend is not installed, or it cannot be reached.
    """

    def __init__(self, url: str, setting: str) -> None:
        self._url = with_variables(url).rstrip("/")
        self.shown, self.setting = redact(url.rstrip("/")), setting
        try:
            self._system, self._path = object_store.filesystem_of(ShardURL(self._url), "or use another URL")
        except ShardError as error:
            raise SettingsError(f"{setting}: {error.detail}") from error

    def __truediv__(self, name: str) -> RemoteDir:
        """A folder or file in it."""
        return RemoteDir(f"{self._url}/{name}", self.setting)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteDir:
        """The parent folder."""
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

    def write(self, content: bytes) -> None:
        """Write a file."""
        self._make_parent()
        self._system.pipe_file(self._path, content)

    def upload(self, file: Path) -> None:
        """Copy a local file to it."""
        self._make_parent()
        self._system.put_file(str(file), self._path)

    def download(self, file: Path) -> None:
        """Copy it to a local file.

        Raises:
            ShardError: it is missing or unreachable.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        object_store.fetch(ShardURL(self._url), file, retries=RETRIES, backoff=BACKOFF, monitor=Monitor())

    def remove(self) -> None:
        """Delete a checkpoint; its marker first, so that a partly deleted one does not count."""
        for path, folder in ((f"{self._path}/{MARKER}", False), (self._path, True)):
            try:
                self._system.rm(path, recursive=folder)
            except FileNotFoundError:
                continue

    def marker(self) -> Marker | None:
        """The marker of a checkpoint whose files have the right sizes; None for anything else."""
        content = (self / MARKER).read()
        marker = None if content is None else Marker.from_json(content)
        if marker is None:
            return None
        found: Mapping[str, Any] = self._system.find(self._path, detail=True)
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
    """Call `act`, again after a failure up to RETRIES times; a missing file is not tried again."""
    for attempt in range(RETRIES):
        try:
            return act()
        except FileNotFoundError:
            raise
        except Exception:  # backends raise errors of their own types
            pause(attempt, BACKOFF)
    return act()


def message_of(error: Exception) -> str:
    """The message of a backend's error, without credentials."""
    return redact(str(error)) or type(error).__name__


def find(remote: RemoteDir, folder: Path) -> Path | None:
    """The checkpoint that a URL names, copied into `folder` unless it is there already; None if there is none.

    Args:
        remote: a checkpoint, a file `latest` or `best`, or a run's folder (its newest checkpoint).
        folder: of the run's local checkpoints.

    Raises:
        SettingsError: the remote folder cannot be read or copied, or all checkpoints in it are damaged.
    """
    try:
        found = with_retries(partial(_candidates, remote))
        for candidate, marker in found:
            here = folder / candidate.name
            if store.marker_of(here) == marker and store.fault(here) is None:
                return here
            logger.info(f"fetching {candidate.shown}")
            draft = store.begin(folder, candidate.name, sum(marker.sizes.values()))
            for name in marker.sizes:
                (candidate / name).download(draft / name)
                atomic_write.flush(draft / name)
            damage = store.fault_by(marker, draft)
            if damage is None:
                return store.commit(draft, marker)
            store.remove(draft)
            logger.warning(f"{candidate.shown} is damaged ({damage})")
    except SettingsError:
        raise
    except Exception as error:  # backends raise errors of their own types
        raise SettingsError(
            f"{remote.setting}: {remote.shown} cannot be copied to {folder}: {message_of(error)}"
        ) from error
    if found:
        names = ", ".join(candidate.name for candidate, _ in found)
        raise SettingsError(f"{remote.setting}: none of the checkpoints in {remote.shown} is whole ({names})")
    return None


def _candidates(remote: RemoteDir) -> list[tuple[RemoteDir, Marker]]:
    """The whole checkpoints that a URL may name, newest first."""
    if remote.name in (LATEST, BEST):
        name = (remote.read() or b"").decode(errors="replace").partition("\n")[0].strip()
        remote = remote.parent / name
    if NAME.fullmatch(remote.name):
        marker = remote.marker()
        return [] if marker is None else [(remote, marker)]
    for checkpoints in (remote / CHECKPOINTS, remote):
        if whole := checkpoints.whole():
            return [(checkpoints / name, marker) for name, marker in whole.items()]
    return []
