"""Owns the copying of a run's checkpoints, settings and metrics to a remote place, in the background.

A thread copies the newest whole checkpoint, then what is to stay for longer, then removes what does not stay there; one
that another save overtakes is finished first. A failure is a warning, tried again after the next save: it never ends a
run. It never decides when to save, and reads no checkpoint back (see `place`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from clipstream.data.shards import redact
from clipstream.training import shelf
from clipstream.training.place import CHECKPOINTS, METRICS, Place, patiently
from clipstream.training.settings import CheckpointSettings
from clipstream.training.shelf import ASIDE, BEST, LATEST, MARKER, NAME, Marker

SMALL = ("config.yaml", METRICS)
NOTICEABLE = 2.0  # s that the end of a run waits for the last copy, from which on it is told


class Mirror:
    """The copy of one run's folder.

    Args:
        place: the remote folder.
        folder: the run's own.
        settings: which checkpoints stay.

    Attributes:
        last_serial: the largest number that a save had there before this run.
    """

    def __init__(self, place: Place, folder: Path, settings: CheckpointSettings) -> None:
        self.place, self.last_serial = place, 0
        self._folder, self._settings = folder, settings
        self._state = threading.Condition()
        self._wanted = self._busy = False
        self._held: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Copy what is new, soon."""
        with self._state:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def drain(self) -> None:
        """Wait until all is copied, or could not be."""
        with self._state:
            if not self._state.wait_for(self._is_idle, NOTICEABLE):
                print(f"waiting for the copy to {self.place.shown}", file=sys.stderr, flush=True)
                self._state.wait_for(self._is_idle)

    @contextmanager
    def holding(self) -> Iterator[frozenset[str]]:
        """The checkpoints that are being copied, and must not be removed; no other begins within the context."""
        with self._state:
            yield self._held

    def _is_idle(self) -> bool:
        return not (self._wanted or self._busy)

    def _run(self) -> None:
        while True:
            with self._state:
                self._busy, self._held = False, frozenset()
                self._state.notify_all()
                self._state.wait_for(lambda: self._wanted)
                self._wanted, self._busy = False, True
            try:
                with self._state:
                    local = self._to_copy()
                    self._held = frozenset(local)
                self._copy(local)
            except Exception as error:  # every backend has errors of its own
                said = redact(f"{type(error).__name__}: {error}")
                print(
                    f"warning: {self.place.setting}: not all is copied to {self.place.shown}, and it is tried again "
                    f"after the next save: {said}",
                    file=sys.stderr,
                    flush=True,
                )

    def _to_copy(self) -> dict[str, Marker]:
        """The checkpoints that should be there, newest first."""
        found = {path.name: marker for path in shelf.whole(self._folder / CHECKPOINTS) if (marker := _marker(path))}
        stay = self._staying({name: marker.serial for name, marker in found.items()}, last=1)
        return {name: marker for name, marker in found.items() if name in stay}

    def _copy(self, local: dict[str, Marker]) -> None:
        checkpoints = self.place / CHECKPOINTS
        there = patiently(checkpoints.whole)
        for name, marker in local.items():
            if there.get(name) != marker and self._copy_one(name, marker):
                there[name] = marker
        files = [self._folder / name for name in SMALL]
        files += [self._folder / CHECKPOINTS / name for name in (LATEST, BEST)]
        for file in files:
            if file.is_file():
                target = self.place / str(file.relative_to(self._folder))
                patiently(partial(target.write, file.read_bytes()))
        if not local.keys() & there.keys():
            return
        stay = self._staying({name: marker.serial for name, marker in there.items()}, last=self._settings.keep_last)
        for name in patiently(checkpoints.names):
            if NAME.fullmatch(name) and name not in stay:
                patiently((checkpoints / name).remove)

    def _copy_one(self, name: str, marker: Marker) -> bool:
        """Copy a checkpoint, its marker last, so that it is whole or does not count; False if it is another by now."""
        source, target = self._folder / CHECKPOINTS / name, self.place / CHECKPOINTS / name
        patiently(target.remove)
        for file in marker.sizes:
            patiently(partial((target / file).upload, source / file))
        if shelf.marker_of(source) != marker:  # its step was saved anew meanwhile
            return False
        patiently(partial((target / MARKER).write, marker.dump()))
        return True

    def _staying(self, serials: dict[str, int], last: int) -> set[str]:
        best = shelf.best_of(self._folder / CHECKPOINTS)
        return shelf.kept(serials, last=last, every=self._settings.keep_every, best=None if best is None else best.name)


def _marker(path: Path) -> Marker | None:
    """Of what has its final name."""
    return None if path.name.endswith(ASIDE) else shelf.marker_of(path)
