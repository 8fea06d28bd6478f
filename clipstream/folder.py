"""Owns a run's folder as a whole: who may write to it, and whether it holds a run; never its files' content.

Imports no torch: settings are checked against it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipstream.errors import SettingsError

LOCK = ".lock"
# What a run may have written before its first step.
_EARLY = {LOCK, "config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html", "tensorboard", "pictures"}


def holds_a_run(folder: Path) -> bool:
    """Whether a new run would write over something: a checkpoint, a training line, or files that no run makes."""
    if not folder.is_dir():
        return folder.exists()
    names = {path.name for path in folder.iterdir()}
    if names - _EARLY:
        return True
    metrics = folder / "metrics.jsonl"
    return bool(names) and (b'"loss"' in metrics.read_bytes() if metrics.is_file() else bool(names - {LOCK}))


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from training in it as long as the context is open.

    Raises:
        SettingsError: it cannot be made, or another process trains in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"--logs: the folder {folder} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise SettingsError(
                f"{folder} is being trained by {holder}: wait for its end, or end it, or take another --name"
            ) from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)
