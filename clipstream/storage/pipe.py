"""Shell commands whose output is a shard (`pipe:`): the exit status decides, and no process outlives the transfer."""

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
from collections.abc import Callable
from pathlib import Path

from clipstream.storage.shard_url import redact
from clipstream.storage.transfer import Monitor, ShardError

STDERR_SHOWN = 300  # characters of a command's stderr that a message repeats


class TransferEnded(Exception):
    """A command was killed because its process ends; says nothing about the shard."""


_running: dict[int, int | None] = {}  # process group of a command -> thread that waits for it; None if we ended it
_starting = threading.RLock()  # held while a command starts; reentrant, as signal handlers take it
_is_over = False  # no command starts any more


def _after_fork() -> None:
    """A forked child has none of its parent's threads, and must leave the parent's commands alone."""
    global _starting
    _starting = threading.RLock()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


def end_commands() -> None:
    """Kill the commands of this process and start no others, because it is about to end. Safe in a signal handler."""
    global _is_over
    with _starting:
        _is_over = True
    for thread in set(_running.values()):
        end_command(thread)


def end_command(thread: int | None) -> None:
    """Kill the command that the thread with this identity waits for, if any."""
    for group, waiting in list(_running.items()):
        if waiting == thread:
            _running[group] = None
            _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _Start:
    """Starts a command in a thread of its own, where no signal handler can run.

    A handler between the start and its registration would leave a command that nobody knows, or wait for a lock that
    it holds itself; and the waiting thread may be interrupted by a handler anywhere. So the two share only what takes
    a single step: an exception raised inside a Condition (also a Future's, or that of a Thread's start) leaves it
    locked, or becomes another one.
    """

    def __init__(self, popen: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._popen = popen
        self._claim = threading.Lock()  # taken by the thread when it runs, or by the waiting one when it cancels
        self._outcome: subprocess.Popen[bytes] | BaseException | None = None

    def run(self, waiting: int) -> None:
        """In the thread: start the command, and register the thread `waiting` for it."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            with _starting:
                if _is_over:
                    raise TransferEnded
                process = self._popen()
                _running[process.pid] = waiting
            self._outcome = process
        except BaseException as error:
            self._outcome = error

    def cancel(self) -> bool:
        """Keep the command from starting; False if the thread has begun."""
        return self._claim.acquire(blocking=False)

    def result(self) -> subprocess.Popen[bytes]:
        """The running command; raises the error that prevented its start."""
        while self._outcome is None:
            time.sleep(0.001)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


def run_pipe(command: str, part: Path, *, timeout: float, monitor: Monitor) -> None:
    """Write the output of a shell command to `part`; every part of the pipeline must exit with status 0.

    All processes that the command started are killed before this returns.

    Raises:
        ShardError: `pipe_failed`, or `timeout` if no byte arrived for `timeout` seconds.
        TransferEnded: `end_command` or `end_commands` was called.
    """
    bash = shutil.which("bash")
    shell = [bash, "-o", "pipefail", "-c", command] if bash else ["sh", "-c", command]
    shown = redact(f"pipe:{command}")
    with open(part, "wb") as out, tempfile.TemporaryFile() as errors:
        start = _Start(
            lambda: subprocess.Popen(shell, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True)
        )
        try:
            _thread.start_new_thread(start.run, (threading.get_ident(),))
            silent = not _wait_while_growing(start.result().pid, out.fileno(), timeout, monitor)
        finally:
            # An Exception of result() was raised above, too; a signal handler's exception is none.
            with contextlib.suppress(Exception):
                if not start.cancel():
                    process = start.result()
                    _kill(process.pid)  # before the shell is reaped, so that its process group cannot be another's
                    ended, status = _running.pop(process.pid) is None, process.wait()
        if ended:
            raise TransferEnded
        size = os.fstat(out.fileno()).st_size
        if silent:
            raise ShardError("timeout", f"{shown}: no byte in {timeout:g} s after {size:,} bytes")
        if status != 0:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - STDERR_SHOWN))
            stderr = redact(" ".join(errors.read().decode(errors="replace").split()))
            detail = f"{shown}: exit status {status} after {size:,} bytes{': ' + stderr if stderr else ''}"
            raise ShardError("pipe_failed", detail)
        monitor.expect(size)  # not reported above if the command ended before the first look


def _wait_while_growing(pid: int, file: int, timeout: float, monitor: Monitor) -> bool:
    """Wait until a child ends, without reaping it; False if `file` does not grow for `timeout` seconds."""
    size, since, delay = 0, time.monotonic(), 0.001
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now = os.fstat(file).st_size
        if now != size:
            size, since = now, time.monotonic()
            monitor.received(now)
        elif time.monotonic() - since > timeout:
            return False
        time.sleep(delay)
        delay = min(0.02, delay * 2)
    return True
