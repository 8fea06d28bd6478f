"""Owns shell commands whose output is a shard: they count by their exit status, and none outlives who waits for it.

It writes the whole output or raises `ShardError`; what a partial one left in the file is the caller's to remove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from clipstream.data.shards import redact
from clipstream.data.transfer import ShardError, TransferEnded, Watch

TOLD = 300  # characters of a command's stderr that a message repeats

_running: dict[int, int | None] = {}  # process group of a command -> the thread that waits for it; None: ended by us
_starting = threading.RLock()  # held while one starts; by a handler of a signal too, even within another
_over = threading.Event()  # none starts any more


def _after_fork() -> None:
    """A forked process has none of its parent's threads, and must leave the parent's commands alone."""
    global _starting
    _starting = threading.RLock()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


def end_commands() -> None:
    """Kill the commands that threads of this process wait for, and start no other: it is about to end.

    A handler of a signal may call it.
    """
    with _starting:
        _over.set()
    for group in list(_running):
        _end(group)


def end_command(thread: int | None) -> None:
    """Kill the command that the thread of this identity waits for, if it does."""
    for group, waiting in list(_running.items()):
        if waiting == thread:
            _end(group)


def _end(group: int) -> None:
    _running[group] = None
    _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_pipe(command: str, part: Path, *, timeout: float, watch: Watch) -> None:
    """Run a shell command with its output into `part`; only exit status 0 of every part of the pipeline counts.

    All processes that it started are gone afterwards, whatever happens.

    Raises:
        ShardError: `pipe_failed`, or `timeout` when no byte came for `timeout` seconds.
        TransferEnded: `end_command` or `end_commands` was called.
    """
    bash = shutil.which("bash")
    shell = [bash, "-o", "pipefail", "-c", command] if bash else ["sh", "-c", command]
    shown = redact(f"pipe:{command}")
    with open(part, "wb") as out, tempfile.TemporaryFile() as errors:
        begun: Future[subprocess.Popen[bytes]] = Future()
        starter = threading.Thread(
            target=_start, args=(shell, out, errors, threading.get_ident(), begun), daemon=True, name="start"
        )
        try:
            starter.start()
            silent = not _wait_while_growing(begun.result().pid, out.fileno(), timeout, watch)
        finally:
            if starter.is_alive():
                starter.join()
            if begun.done() and begun.exception() is None:
                ended, status = _over_with(begun.result())
        if ended:
            raise TransferEnded
        size = os.fstat(out.fileno()).st_size
        if silent:
            raise ShardError("timeout", f"{shown}: no byte in {timeout:g} s after {size:,} bytes")
        if status != 0:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TOLD))
            said = redact(" ".join(errors.read().decode(errors="replace").split()))
            detail = f"{shown}: exit status {status} after {size:,} bytes{': ' + said if said else ''}"
            raise ShardError("pipe_failed", detail)
        watch.expect(size)  # also of a command that was quicker than we looked


def _start(
    shell: list[str], out: IO[bytes], errors: IO[bytes], waiting: int, begun: Future[subprocess.Popen[bytes]]
) -> None:
    """Start a command and note which thread waits for it.

    In a thread of its own, where no handler of a signal can run: one that came between the start and the note would
    leave a command that nobody knows, or wait for a lock that it holds itself.
    """
    try:
        with _starting:
            if _over.is_set():
                raise TransferEnded
            process = subprocess.Popen(
                shell, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
            _running[process.pid] = waiting
    except BaseException as error:
        begun.set_exception(error)
    else:
        begun.set_result(process)


def _over_with(process: subprocess.Popen[bytes]) -> tuple[bool, int]:
    """Kill what is left of a command; whether somebody ended it, and its exit status."""
    _kill(process.pid)  # before the shell is reaped, so that its process group cannot be another's
    return _running.pop(process.pid) is None, process.wait()


def _wait_while_growing(pid: int, file: int, timeout: float, watch: Watch) -> bool:
    """Wait for a child's end without reaping it; False when `file` stops growing for `timeout` seconds."""
    size, since, pause = 0, time.monotonic(), 0.001
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now = os.fstat(file).st_size
        if now != size:
            size, since = now, time.monotonic()
            watch.came(now)
        elif time.monotonic() - since > timeout:
            return False
        time.sleep(pause)
        pause = min(0.02, pause * 2)
    return True
