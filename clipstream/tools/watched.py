"""Owns what a follower sees of a run that goes on elsewhere: its checkpoints in their order, and whether it has ended.

    RUN/watch/held/step_…   a checkpoint's files under names of our own, while they are read

It never writes to what the run writes, evaluates nothing, and imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clipstream.report.figures import WATCH_FOLDER
from clipstream.report.sinks import METRICS_FILE
from clipstream.training import shelf
from clipstream.training.place import CHECKPOINTS
from clipstream.training.shelf import MARKER, Marker

UNREAD = ("optimizer.safetensors", "optimizer.pt", "rng.pt")  # of a checkpoint: what no evaluation reads
TAIL = 1 << 16  # bytes of the metrics that hold the last line
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Found:
    """A checkpoint of the run.

    Attributes:
        path: its folder.
        weights: tells its weights from others of the same step, as a later process may save other ones.
    """

    path: Path
    weights: str

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.path.name[5:13])


class WatchedRun:
    """A run's folder, looked at from outside; it need not be there yet.

    Args:
        folder: LOGS/NAME.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / CHECKPOINTS
        self._seen: object = None
        self._since = time.monotonic()

    def found(self) -> list[Found]:
        """The whole checkpoints, in the order in which they were written."""
        markers = [(path, shelf.marker_of(path)) for path in reversed(shelf.whole(self.checkpoints))]
        return [Found(path, _weights(marker)) for path, marker in markers if marker is not None]

    def ended(self) -> bool:
        """Whether the run has said that it is at its end; one that was stopped, or died, has not."""
        try:
            with (self.folder / METRICS_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
            return "end" in json.loads(last)
        except (OSError, ValueError, TypeError):
            return False

    def still(self) -> float:
        """Seconds since anything was last seen to change in it."""
        seen = [_state(self.folder / name) for name in (METRICS_FILE, CHECKPOINTS, "config.yaml")]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since

    def hold(self, found: Found) -> Path | None:
        """A checkpoint's files, but for the moments, in a folder of our own, so that they stay while they are read.

        They are further names of the same files, so that it takes no time and no room; copies where the file system
        has no such names.

        Returns:
            The folder; None where the run has removed the checkpoint, or its weights are others by now.
        """
        held = self.folder / WATCH_FOLDER / "held" / found.path.name
        self.release()
        held.mkdir(parents=True)
        try:
            # By its handle: the folder may be renamed, and another one take its name, at any time.
            handle = os.open(found.path, os.O_RDONLY)
            try:
                with open(os.open(MARKER, os.O_RDONLY, dir_fd=handle), "rb") as file:
                    marker = Marker.parse(file.read())
                if marker is None or _weights(marker) != found.weights:
                    return None
                for name in (MARKER, *(name for name in marker.sizes if name not in UNREAD)):
                    _name_also(handle, name, held / name)
            finally:
                os.close(handle)
        except FileNotFoundError:
            return None
        return held

    def release(self) -> None:
        """Let go of what is held, and of what an earlier process held."""
        shutil.rmtree(self.folder / WATCH_FOLDER / "held", ignore_errors=True)


def fault(held: Path) -> str | None:
    """What is wrong with the files of a held checkpoint; None where nothing is."""
    marker = Marker.parse((held / MARKER).read_bytes())
    assert marker is not None, "what is held has a marker"
    return shelf.fault_by(marker, held, [name for name in marker.sizes if name not in UNREAD])


def _weights(marker: Marker) -> str:
    """Of a checkpoint without checksums, as earlier versions made them, the save's number."""
    return " ".join(marker.checksums[name] for name in _weight_files(marker)) or f"save {marker.serial}"


def _weight_files(marker: Marker) -> Iterator[str]:
    return (name for name in sorted(marker.checksums) if name.endswith(".safetensors") and name not in UNREAD)


def _state(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _name_also(folder: int, name: str, path: Path) -> None:
    """Give a file of an open folder another name, or copy it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(name, path, src_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy)
