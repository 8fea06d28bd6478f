"""Owns a folder as a whole: who may write to it, and whether it holds a run; never its files' content.

Imports no torch: settings are checked against it.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clipstream.errors import SettingsError

LOCK = ".lock"
LAST_SECONDS = 30.0  # that a dead process' data workers may take to end; they have its lock as well
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
    advice = "wait for its end, or end it, or take another --name"
    with held(folder, "--logs: the folder", lambda holder: f"{folder} is being trained by {holder}: {advice}"):
        yield


@contextmanager
def held(folder: Path, called: str, busy: Callable[[str], str]) -> Iterator[None]:
    """Make the folder, and keep other processes out as long as the context is open.

    Args:
        called: what the folder is, for messages.
        busy: the message where another process is in it, which is named.

    Raises:
        SettingsError: the folder cannot be made, or another process is in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"{called} {folder} cannot be made: {error.strerror}") from error
    try:
        _take(lock, busy)
        with suppress(OSError):  # on a full disk nobody is told who it is
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _take(lock: int, busy: Callable[[str], str]) -> None:
    limit = time.monotonic() + LAST_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            if not _is_dead(holder) or time.monotonic() > limit:
                raise SettingsError(busy(holder or "another process")) from None
            time.sleep(0.1)
        except OSError:
            return None  # a file system without locks


def _is_dead(holder: str) -> bool:
    """Whether the process that wrote this into the lock was one of this machine, and is no more."""
    told = re.fullmatch(r"process (\d+) on (.+)", holder)
    if told is None or told[2] != socket.gethostname():
        return False
    try:
        os.kill(int(told[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's
        return False
    return False
