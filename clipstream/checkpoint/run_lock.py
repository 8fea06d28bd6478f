"""The lock of a run's folder, and whether the folder holds a run. Imports no torch: settings are checked with it.

The lock is `flock` and not filelock's `FileLock`: forked data workers must hold it too, so that a killed run's folder
is free only when they have ended; other processes only probe it, by a shared lock; the file names its holder, which
filelock 3.13 truncates at each attempt; and file systems without locks still have to work.
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
WORKERS_END = 30.0  # s for a dead process's data workers to end; they hold its lock as well
# Files that a run may have written before its first step.
_EARLY = {
    LOCK, "config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html", "tensorboard", "pictures", "out.log"
}  # fmt: skip


def holds_a_run(folder: Path) -> bool:
    """Whether a new run would overwrite a checkpoint, a training record, or files that are not a run's."""
    if not folder.is_dir():
        return folder.exists()
    names = {path.name for path in folder.iterdir()}
    if any(name not in _EARLY and not re.fullmatch(r"out-\d+\.log", name) for name in names):
        return True
    metrics = folder / "metrics.jsonl"
    return bool(names) and (b'"loss"' in metrics.read_bytes() if metrics.is_file() else bool(names - {LOCK}))


def is_occupied(folder: Path) -> bool:
    """Whether a process holds the folder's lock; true, too, if the file system has no locks."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from training in it while the context is open.

    Raises SettingsError: it cannot be made, or another process trains in it.
    """
    advice = "wait for it, stop it, or use another --name"
    with held(folder, "--logs: the folder", lambda holder: f"{folder} is in use by {holder}: {advice}"):
        yield


@contextmanager
def held(folder: Path, called: str, busy: Callable[[str], str]) -> Iterator[None]:
    """Make the folder, and lock it while the context is open.

    Args:
        called: describes the folder, for messages.
        busy: makes the message if another process, which is its argument, holds the lock.

    Raises SettingsError: the folder cannot be made, or another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"{called} cannot create {folder}: {error.strerror}") from error
    try:
        limit = time.monotonic() + WORKERS_END
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
                if not _is_dead(holder) or time.monotonic() > limit:
                    raise SettingsError(busy(holder or "another process")) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        with suppress(OSError):  # the disk is full: the holder stays unnamed
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _is_dead(holder: str) -> bool:
    """Whether the process named in a lock file ran on this machine and has ended."""
    match = re.fullmatch(r"process (\d+) on (.+)", holder)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        pass
    return False
