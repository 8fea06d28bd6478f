"""Owns a run's folder in a remote place that fsspec knows (s3://, gs://, az://, file://, …): what is there, and how
files come and go.

    URL/NAME/config.yaml, metrics.jsonl
    URL/NAME/checkpoints/step_XXXXXXXX/…, latest, best     as in the run's own folder, COMPLETE last

It never decides what is copied. Credentials are the backends' own, as for shards; none is ever shown. No torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clipstream import durable
from clipstream.data import buckets
from clipstream.data.shards import redact, scheme_of, with_variables
from clipstream.data.transfer import ShardError, pause
from clipstream.errors import SettingsError
from clipstream.training import shelf
from clipstream.training.shelf import BEST, LATEST, MARKER, NAME, Marker

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
RETRIES, BACKOFF = 3, 1.0  # further tries of one file, and the seconds before the first of them
_Result = TypeVar("_Result")


class Place:
    """A folder that a URL names.

    Args:
        url: of a run's folder, or of one of its checkpoints; `${NAME}` is taken from the environment.
        setting: what named it, for messages.

    Attributes:
        shown: the URL for messages.

    Raises:
        SettingsError: fsspec knows no such scheme, or its backend is not installed.
    """

    def __init__(self, url: str, setting: str) -> None:
        self._url = with_variables(url).rstrip("/")
        self.shown, self.setting = redact(url.rstrip("/")), setting
        try:
            scheme = scheme_of(self._url) or "file"
            self._system, self._path = buckets.system_of(self._url, scheme, "or name another place")
        except ShardError as error:
            raise SettingsError(f"{setting}: {error.detail}") from error

    def __truediv__(self, name: str) -> Place:
        """A folder or file in it."""
        return Place(f"{self._url}/{name}", self.setting)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """The folder that holds it."""
        return Place(self._url.rpartition("/")[0], self.setting)

    def names(self) -> list[str]:
        """Names of what the folder holds; none where there is no such folder."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(self) -> bytes | None:
        """The content of a small file; None where there is none."""
        try:
            return bytes(self._system.cat_file(self._path))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def write(self, content: bytes) -> None:
        """Make it a file with that content."""
        self._make_parent()
        self._system.pipe_file(self._path, content)

    def upload(self, file: Path) -> None:
        """Make it a copy of a file."""
        self._make_parent()
        self._system.put_file(str(file), self._path)

    def download(self, file: Path) -> None:
        """Copy it to a file.

        Raises:
            ShardError: it cannot be had.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        scheme = scheme_of(self._url) or "file"
        buckets.fetch(self._url, scheme, file, retries=RETRIES, backoff=BACKOFF, watch=_Unwatched())

    def remove(self) -> None:
        """Delete a checkpoint; its marker first, so that a half deleted one does not count."""
        for path, folder in ((f"{self._path}/{MARKER}", False), (self._path, True)):
            try:
                self._system.rm(path, recursive=folder)
            except FileNotFoundError:
                continue

    def marker(self) -> Marker | None:
        """The marker of a checkpoint whose files have their sizes; None of anything else."""
        told = (self / MARKER).read()
        marker = None if told is None else Marker.parse(told)
        if marker is None:
            return None
        found: Mapping[str, Any] = self._system.find(self._path, detail=True)
        sizes = {path.rpartition(f"/{self.name}/")[2]: info.get("size") for path, info in found.items()}
        return marker if all(sizes.get(name) == size for name, size in marker.sizes.items()) else None

    def whole(self) -> dict[str, Marker]:
        """The whole checkpoints in this folder of them, newest first."""
        named = {name: (self / name).marker() for name in self.names() if NAME.fullmatch(name)}
        found = {name: marker for name, marker in named.items() if marker is not None}
        return dict(sorted(found.items(), key=lambda item: item[1].serial, reverse=True))

    def _make_parent(self) -> None:
        """Buckets have no folders, and asking for one may need rights that nobody has given."""
        if "file" in self._system.protocol:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)


class _Unwatched:
    """Is told how a transfer gets on, and lets it."""

    def expect(self, size: int) -> None: ...

    def came(self, size: int) -> None: ...


def patiently(act: Callable[[], _Result]) -> _Result:
    """Act, and try again a few times if that fails; what is not there stays away."""
    for attempt in range(RETRIES):
        try:
            return act()
        except FileNotFoundError:
            raise
        except Exception:  # every backend has errors of its own
            pause(attempt, BACKOFF)
    return act()


def said(error: Exception) -> str:
    """What an error of a backend says, without credentials."""
    return redact(str(error)) or type(error).__name__


def find(place: Place, folder: Path) -> Path | None:
    """The checkpoint that a remote place stands for, copied into `folder` unless it is there already; None for none.

    Args:
        place: a checkpoint, a file `latest` or `best`, or a run's folder (its newest checkpoint).
        folder: of the run's own checkpoints.

    Raises:
        SettingsError: the place cannot be read or copied, or all that is there is damaged.
    """
    try:
        found = patiently(partial(_candidates, place))
        for candidate, marker in found:
            if (copied := _copied(candidate, marker, folder)) is not None:
                return copied
    except SettingsError:
        raise
    except Exception as error:  # every backend has errors of its own
        raise SettingsError(f"{place.setting}: {place.shown} cannot be copied to {folder}: {said(error)}") from error
    if found:
        names = ", ".join(candidate.name for candidate, _ in found)
        raise SettingsError(f"{place.setting}: none of the checkpoints in {place.shown} is whole ({names})")
    return None


def _candidates(place: Place) -> list[tuple[Place, Marker]]:
    """The whole checkpoints by their sizes that a place stands for, newest first."""
    if place.name in (LATEST, BEST):
        named = (place.read() or b"").decode(errors="replace").partition("\n")[0].strip()
        place = place.parent / named
    if NAME.fullmatch(place.name):
        marker = place.marker()
        return [] if marker is None else [(place, marker)]
    for checkpoints in (place / CHECKPOINTS, place):
        if whole := checkpoints.whole():
            return [(checkpoints / name, marker) for name, marker in whole.items()]
    return []


def _copied(place: Place, marker: Marker, folder: Path) -> Path | None:
    """A whole checkpoint, copied into the folder; None, and told, where what comes is not what was written."""
    here = folder / place.name
    if shelf.marker_of(here) == marker and shelf.fault(here) is None:
        return here
    print(f"fetching {place.shown}", file=sys.stderr, flush=True)
    draft = shelf.begin(folder, place.name, sum(marker.sizes.values()))
    for name in marker.sizes:
        (place / name).download(draft / name)
        durable.flush(draft / name)
    if (told := shelf.fault_by(marker, draft)) is not None:
        shelf.remove(draft)
        print(f"warning: {place.shown} is damaged ({told})", file=sys.stderr, flush=True)
        return None
    return shelf.put(draft, marker)
