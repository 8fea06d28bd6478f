"""Owns shell commands whose output is a shard: they count by their exit status, and none outlives who waits for it.

It writes the whole output or raises `ShardError`; what a partial one left in the file is the caller's to remove.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from clipstream.data.shards import redact
from clipstream.data.transfer import ShardError, TransferEnded, Watch

TOLD = 300  # characters of a command's stderr that a message repeats

_running: dict[int, int | None] = {}  # process group of a command -> the thread that waits for it; None: ended by us
_starting = threading.RLock()  # held while one starts; by a handler of a signal too, even within another
_is_over = False  # none starts any more


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
    global _is_over
    with _starting:
        _is_over = True
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


class _Start:
    """The start of a command, in a thread of its own: no handler of a signal can run there.

    One that came between the start and its note would leave a command that nobody knows, or wait for a lock that it
    holds itself. Whoever waits here may be cut off by a handler anywhere. So nothing is shared but what takes a single
    step: an exception out of the inside of a Condition (also a Future's, or that of a Thread's start) leaves it locked,
    or becomes another one.
    """

    def __init__(self, shell: list[str], out: IO[bytes], errors: IO[bytes]) -> None:
        self._shell, self._out, self._errors = shell, out, errors
        self._claim = threading.Lock()  # of the thread, once it goes on; of the one who waits, if that gave up before
        self._outcome: subprocess.Popen[bytes] | BaseException | None = None

    def run(self, waiting: int) -> None:
        """To be called in the thread: start the command, and note that the thread `waiting` waits for it."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            with _starting:
                if _is_over:
                    raise TransferEnded
                process = subprocess.Popen(
                    self._shell,
                    stdin=subprocess.DEVNULL,
                    stdout=self._out,
                    stderr=self._errors,
                    start_new_session=True,
                )
                _running[process.pid] = waiting
            self._outcome = process
        except BaseException as error:
            self._outcome = error

    def given_up(self) -> bool:
        """Have the command not started, if the thread did not come to it."""
        return self._claim.acquire(blocking=False)

    def result(self) -> subprocess.Popen[bytes]:
        """The command, when it runs; raises what prevented that."""
        while self._outcome is None:
            time.sleep(0.001)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def process(self) -> subprocess.Popen[bytes] | None:
        """The command, when the thread is through; None where it could not be started."""
        try:
            return self.result()
        except Exception:  # told already; what cuts us off is none
            return None


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
        start = _Start(shell, out, errors)
        try:
            _thread.start_new_thread(start.run, (threading.get_ident(),))
            silent = not _wait_while_growing(start.result().pid, out.fileno(), timeout, watch)
        finally:
            if not start.given_up() and (process := start.process()) is not None:
                ended, status = _over_with(process)
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
