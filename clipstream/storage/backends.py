"""What downloads reach besides HTTP: object stores and file systems of fsspec, and shell commands (`pipe:`).

Backends of fsspec are imported on first use, retry for minutes and keep what they have listed and read: `reach` limits
the time of each request, and takes renewed credentials once some are refused.

Of a shell command whose output is a shard, the exit status decides, and no process outlives the transfer.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from clipstream.errors import ShardError
from clipstream.storage.shard_url import ShardURL, redact

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
# Error codes of S3, and types of errors of botocore, google-auth and azure-core, that concern the credentials alone.
_CREDENTIALS = re.compile(
    "ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch|RequestTimeTooSkewed"
    "|AuthenticationFailed|CredentialsError|CredentialRetrievalError|RefreshError|ClientAuthenticationError"
)
STDERR_SHOWN = 300  # characters of a command's stderr that a message repeats
Result = TypeVar("Result")


class Monitor:
    """Receives the progress of a transfer; what it raises ends the transfer."""

    def expect(self, size: int) -> None:
        """The file has `size` bytes."""

    def receive(self, size: int) -> None:
        """`size` bytes have arrived so far."""


def filesystem_of(url: ShardURL) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Raises ShardError: `unknown_scheme` if the backend is not installed; `unreachable` if it connects at once, and
    cannot.
    """
    import fsspec  # on use, as its import takes 0.2 s

    # Object stores have no folders; `local:` is fsspec's other name of `file:`.
    options = {"auto_mkdir": True} if url.path is not None or url.scheme == "local" else {}
    try:
        system, path = fsspec.core.url_to_fs(url.full, **options)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(url.scheme or "file")
        advice = f"pip install 'clipstream[{extra}]'" if extra else str(error)
        detail = f"{url}: the backend of {url.scheme or 'file'}:// is not installed: {advice}, or use another URL"
        raise ShardError("unknown_scheme", f"{detail}, for shards also pipe:COMMAND") from error
    except Exception as error:  # each backend has its own
        detail = f"cannot reach {url}: {redact(str(error)) or type(error).__name__}"
        raise ShardError("unreachable", detail) from error
    return system, str(path)


def call_within(act: Callable[[], Result], seconds: float, alive: Callable[[], float] = lambda: 0.0) -> Result:
    """The result of `act`, which a thread calls. Backends retry requests without an answer for up to hours.

    Raises TimeoutError: `seconds` pass without progress, of which `alive` returns the last time (`time.monotonic`); the
    thread is left behind.
    """
    outcome = queue.SimpleQueue[tuple[Any, BaseException | None]]()

    def run() -> None:
        try:
            outcome.put((act(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="request", daemon=True).start()
    began = time.monotonic()
    while (left := max(began, alive()) + seconds - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            result, error = outcome.get(timeout=left)
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
    raise TimeoutError(f"no answer in {seconds:g} s")


def reach(
    url: ShardURL, act: Callable[[Any, str], Result], seconds: float, alive: Callable[[], float] = lambda: 0.0
) -> Result:
    """The result of `act(FILE SYSTEM, PATH)` on the file or folder of a URL, without what the backend has cached.

    After a refusal, the next call makes the file system anew, which reads the credentials again. Arguments and errors
    as for `call_within` and `filesystem_of`; the backend's errors are its own.
    """

    def run() -> Result:
        system, path = filesystem_of(url)
        system.invalidate_cache()
        try:
            return act(system, path)
        except Exception as error:
            if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EINVAL:
                try:
                    system.cat_file(path, start=0, end=1)  # the answer to a HEAD, which has no body, tells no reason
                except Exception as other:
                    error = other if denial(other) is not None else error
            if denial(error) is not None:
                type(system).clear_instance_cache()
            raise error

    return call_within(run, seconds, alive)


def denial(error: BaseException) -> str | None:
    """`credentials` if a backend's error says that they are expired or invalid, `denied` for another refusal."""
    if isinstance(error, FileNotFoundError | TimeoutError):
        return None
    chain = (error, error.__cause__, error.__context__)
    if any(_CREDENTIALS.search(f"{type(one).__name__} {one}") or getattr(one, "status", 0) == 401 for one in chain):
        return "credentials"
    return "denied" if any(isinstance(one, PermissionError) for one in chain) else None


def explain(error: Exception) -> str:
    """A backend's error in words."""
    text = redact(str(error)) or type(error).__name__
    return text if denial(error) is None else f"{text} (the credentials are expired or denied)"


def progress_of(moved: Callable[[], object]) -> tuple[Any, Callable[[], float]]:
    """fsspec's callback for an upload, which calls `moved`, and `alive` for `call_within`."""
    from fsspec.callbacks import Callback

    last = [0.0]

    def note(*_: Any, **__: Any) -> None:
        last[0] = time.monotonic()
        moved()

    return Callback(hooks={"moved": note}), lambda: last[0]


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
            # An Exception of result() was raised above, too; a signal handler's exception is not one.
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
            monitor.receive(now)
        elif time.monotonic() - since > timeout:
            return False
        time.sleep(delay)
        delay = min(0.02, delay * 2)
    return True
