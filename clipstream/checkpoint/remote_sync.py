"""Copies a run's checkpoints, settings and metrics to remote storage, in the background.

A thread copies the newest whole checkpoint, then those that are kept for longer, then removes the others from remote
storage; a copy in progress is finished before a newer one begins. A failure is a warning, and the copy is tried again
after the next save: it never ends a run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from clipstream.checkpoint import store
from clipstream.checkpoint.remote_dir import CHECKPOINTS, METRICS, RemoteDir, with_retries
from clipstream.checkpoint.store import ASIDE, BEST, LATEST, MARKER, NAME, Marker
from clipstream.data.shard_url import redact
from clipstream.training.settings import CheckpointSettings
from clipstream.utils.logs import logger

SMALL = ("config.yaml", METRICS)
NOTICEABLE = 2.0  # s that the end of a run waits for the last copy before it says so


class RemoteSync:
    """The remote copy of a run's folder.

    Args:
        remote: the remote folder.
        folder: the local folder.
        settings: which checkpoints are kept.

    Attributes:
        last_serial: the largest serial of a checkpoint in the remote folder before this run.
    """

    def __init__(self, remote: RemoteDir, folder: Path, settings: CheckpointSettings) -> None:
        self.remote, self.last_serial = remote, 0
        self._folder, self._settings = folder, settings
        self._state = threading.Condition()
        self._wanted = self._busy = False
        self._held: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start a copy of what is new."""
        with self._state:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def drain(self) -> None:
        """Wait until everything is copied, or has failed."""
        with self._state:
            for limit in (NOTICEABLE, None):
                if self._state.wait_for(lambda: not (self._wanted or self._busy), limit):
                    break
                logger.info(f"waiting for the copy to {self.remote.shown}")

    @contextmanager
    def holding(self) -> Iterator[frozenset[str]]:
        """The checkpoints being copied, which must not be removed; no other copy begins within the context."""
        with self._state:
            yield self._held

    def _run(self) -> None:
        while True:
            with self._state:
                self._busy, self._held = False, frozenset()
                self._state.notify_all()
                self._state.wait_for(lambda: self._wanted)
                self._wanted, self._busy = False, True
            try:
                with self._state:
                    whole = store.whole(self._folder / CHECKPOINTS)
                    markers = {p.name: store.marker_of(p) for p in whole if not p.name.endswith(ASIDE)}
                    found = {name: marker for name, marker in markers.items() if marker is not None}
                    kept = self._retained(found, last=1)
                    local = {name: marker for name, marker in found.items() if name in kept}
                    self._held = frozenset(local)
                self._copy(local)
            except Exception as error:  # backends raise errors of their own types
                message = redact(f"{type(error).__name__}: {error}")
                logger.warning(
                    f"{self.remote.setting}: not all is copied to {self.remote.shown}, and it is tried again "
                    f"after the next save: {message}"
                )

    def _copy(self, local: dict[str, Marker]) -> None:
        checkpoints = self.remote / CHECKPOINTS
        there = with_retries(checkpoints.whole)
        for name, marker in local.items():
            if there.get(name) != marker and self._copy_one(name, marker):
                there[name] = marker
        files = [self._folder / name for name in SMALL]
        files += [self._folder / CHECKPOINTS / name for name in (LATEST, BEST)]
        for file in files:
            if file.is_file():
                target = self.remote / str(file.relative_to(self._folder))
                with_retries(partial(target.write, file.read_bytes()))
        if not local.keys() & there.keys():
            return
        kept = self._retained(there, last=self._settings.keep_last)
        for name in with_retries(checkpoints.names):
            if NAME.fullmatch(name) and name not in kept:
                with_retries((checkpoints / name).remove)

    def _copy_one(self, name: str, marker: Marker) -> bool:
        """Copy a checkpoint, its marker last; False if the local one was replaced meanwhile."""
        source, target = self._folder / CHECKPOINTS / name, self.remote / CHECKPOINTS / name
        with_retries(target.remove)
        for file in marker.sizes:
            with_retries(partial((target / file).upload, source / file))
        if store.marker_of(source) != marker:  # its step was saved again
            return False
        with_retries(partial((target / MARKER).write, marker.to_json()))
        return True

    def _retained(self, checkpoints: Mapping[str, Marker], last: int) -> set[str]:
        serials = {name: marker.serial for name, marker in checkpoints.items()}
        best = store.best_of(self._folder / CHECKPOINTS)
        name = None if best is None else best.name
        return store.retained(serials, last=last, every=self._settings.keep_every, best=name)
