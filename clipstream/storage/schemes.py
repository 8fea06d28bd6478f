"""Chooses the transfer for a URL, checks what arrives, and unpacks it.

Local paths, `pipe:`, HTTP and object stores enter. A transfer ends early if it cannot become a shard: no tar, too
large, or a full disk. gzip and zstd are recognized by their first bytes; a compressed file is used completely or not
at all, as its checksum covers the whole content.

Of a shell command whose output is a shard (`pipe:`), the exit status decides, and no process outlives the transfer.
"""

from __future__ import annotations

import _thread
import contextlib
import gzip
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipstream.storage import download
from clipstream.storage.download import CHUNK, GIB, FileInfo, Monitor, ShardError, unreadable
from clipstream.storage.shard_url import ShardURL, allow_command, redact
from clipstream.storage.tar import BLOCK, ZERO, fault_at_start
from clipstream.utils import content

MOST = 64 * GIB  # default limit of a shard's bytes
KEPT_FREE = GIB  # bytes that a transfer leaves free on its file system; 1/20 of it if that is less
PADDING = 1 << 20  # bytes of zeros that may form an empty tar: tars are padded to blocks of 10 KiB and more


@dataclass
class Guard(Monitor):
    """A Monitor that also ends a transfer that cannot become a shard: no tar, too large, or a full disk."""

    monitor: Monitor  # is called as well
    url: ShardURL  # for messages
    part: Path  # the file being written
    most: int  # bytes that may arrive
    tar: bool  # whether the content has to be a tar, which may be compressed
    before: int = 0  # bytes received before this transfer, which `monitor` counts too

    def expect(self, size: int) -> None:
        self._check_size(size)
        self.monitor.expect(self.before + size)

    def receive(self, size: int) -> None:
        self._check_size(size)
        if self.tar:
            with open(self.part, "rb") as file:
                head = file.read(BLOCK)
            if len(head) == BLOCK and (head != ZERO or size > PADDING):
                self.tar = False
                fault = None if compression_of(head) else fault_at_start(head)
                if head == ZERO or fault is not None:
                    detail = "it begins with zeros only" if fault is None else fault.detail
                    raise ShardError("not_a_tar", f"{self.url}: {detail}")
        disk = os.statvfs(self.part.parent)
        free, kept = disk.f_bavail * disk.f_frsize, min(KEPT_FREE, disk.f_blocks * disk.f_frsize // 20)
        if free < kept:
            raise ShardError(
                "disk",
                f"{self.part.parent} has {free / GIB:.2g} GiB left, after {size:,} bytes of {self.url}: "
                "use a --data.cache with more space, limit it by --data.cache-gib, or lower --data.shuffle.shards",
            )
        self.monitor.receive(self.before + size)

    def _check_size(self, size: int) -> None:
        if size > self.most:
            detail = f"{self.url} is larger than {self.most / GIB:.3g} GiB: if that is intended, raise "
            raise ShardError("too_large", f"{detail}--data.max-shard-gib")


@dataclass
class Fetcher:
    """Downloads shards, or copies local ones. Picklable."""

    timeout: float = 60.0  # seconds without a new byte after which a transfer fails
    retries: int = 3  # of a failed transfer by HTTP or from an object store, which resume if possible
    backoff: float = 0.5  # seconds before the first retry; doubled each time
    most: int = MOST  # bytes of a shard, compressed or not
    _answered: set[str] = field(default_factory=set)  # hosts
    _silent: set[str] = field(default_factory=set)  # hosts that never answered, which are not waited for again

    def info(self, url: ShardURL) -> FileInfo:
        """What the source says about a shard, without a download; empty for commands and missing files.

        Also empty if the host does not answer; a host that never did is asked once.
        """
        if url.path is not None:
            try:
                stat = os.stat(url.path)
            except OSError:
                return FileInfo()
            return FileInfo(f"{stat.st_mtime_ns}-{stat.st_size}", stat.st_size)
        if url.host in self._silent or url.scheme == "pipe":
            return FileInfo()
        try:
            return download.info(url, self.timeout)
        except ShardError:
            self._note_silence(url.host)
            return FileInfo()

    def fetch(self, url: ShardURL, part: Path, monitor: Monitor, *, tar: bool = True) -> None:
        """Write the whole shard to `part`, decompressed. A failure may leave pieces in `part`.

        Args:
            tar: whether to stop as soon as the content is no tar.

        Raises:
            ShardError: the shard is missing, unreachable or incomplete, or no shard.
            OSError: the disk is full.
        """
        guard = Guard(monitor, url, part, self.most, tar)
        if url.path is not None:
            try:
                source = open(url.path, "rb")  # noqa: SIM115
            except OSError as error:
                raise unreadable(url.path, error) from error
            with source:
                _save(source, part, guard)
        elif url.scheme == "pipe":
            allow_command(url.full)  # which braces or a data set's root may have made
            run_pipe(url.full[len("pipe:") :], part, timeout=self.timeout, monitor=guard)
        else:
            retries = 0 if url.host in self._silent else self.retries
            try:
                download.fetch(url, part, guard, timeout=self.timeout, retries=retries, backoff=self.backoff)
            except ShardError as error:
                if error.reason in ("timeout", "unreachable", "credentials"):
                    self._note_silence(url.host)
                raise
            self._answered.add(url.host)
            self._silent.discard(url.host)
        if compression_of(part) is not None:
            unpacked = part.with_suffix(".unpacked.part")
            try:
                self.unpack(url, part, unpacked, monitor, tar=tar, before=part.stat().st_size)
                unpacked.replace(part)
            finally:
                unpacked.unlink(missing_ok=True)

    def unpack(
        self, url: ShardURL, packed: Path, part: Path, monitor: Monitor, *, tar: bool = True, before: int = 0
    ) -> None:
        """Decompress a gzip or zstd file into `part`.

        Raises:
            ShardError: `bad_gzip` or `bad_zstd`, also for a truncated file; or as `fetch`.
            OSError: it cannot be read or written.
        """
        kind = compression_of(packed)
        try:
            with gzip.open(packed) if kind == "gzip" else _open_zstd(packed) as source:
                _save(source, part, Guard(monitor, url, part, self.most, tar, before))
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk; damaged content has no number
                raise
            window = "; it was written with zstd --long=28 or more: write it again with at most --long=27"
            hint = window if "too much memory" in str(error) else ""
            raise ShardError(f"bad_{kind}", f"{packed.name}: {error}{hint}") from error

    def _note_silence(self, host: str) -> None:
        if host not in self._answered:
            self._silent.add(host)


def compression_of(file: Path | bytes) -> str | None:
    """'gzip', 'zstd', or None for other files, by the path or the first bytes. Raises OSError."""
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            file = opened.read(4)
    return found if (found := content.kind(file)) in ("gzip", "zstd") else None


def _open_zstd(packed: Path) -> Any:
    import pyarrow as pa  # on use, as its import takes long

    return pa.input_stream(str(packed), compression="zstd")


def _save(source: Any, part: Path, monitor: Monitor) -> None:
    with open(part, "wb") as file:
        while data := source.read(CHUNK):
            file.write(data)
            monitor.receive(file.tell())


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
