"""Chooses the transfer for a URL, checks what arrives, and unpacks it.

Beside local paths, `pipe:`, HTTP and object stores, this covers the schemes that webdataset or the user registers in
`webdataset.gopen`. A transfer ends early if it cannot become a shard: no tar, too large, or a full disk.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipstream.data.shard_url import local_path, redact, scheme_of
from clipstream.data.tar import BLOCK, ZERO, fault_at_start
from clipstream.data.transport import object_store
from clipstream.data.transport.compression import packing, unpack
from clipstream.data.transport.http import fetch_http, http_info
from clipstream.data.transport.pipe import run_pipe
from clipstream.data.transport.transfer import CHUNK, FileInfo, Monitor, ShardError
from clipstream.errors import ClipstreamError

GIB = 1 << 30
MOST = 64 * GIB  # default limit of a shard's bytes
KEPT_FREE = GIB  # bytes that a transfer leaves free on its file system; 1/20 of it if that is less
PADDING = 1 << 20  # bytes of zeros that may form an empty tar: tars are padded to blocks of 10 KiB and more


class Guard:
    """A Monitor that also ends a transfer that cannot become a shard: no tar, too large, or a full disk.

    Args:
        monitor: is called as well.
        url: the source, for messages.
        part: the file being written.
        most: bytes that may arrive.
        tar: whether the content has to be a tar, which may be compressed.
        before: bytes received before this transfer, which `monitor` counts too.
    """

    def __init__(self, monitor: Monitor, url: str, part: Path, most: int, *, tar: bool, before: int = 0) -> None:
        self._monitor, self._shown, self._part = monitor, redact(url), part
        self._most, self._tar, self._before = most, tar, before

    def expect(self, size: int) -> None:
        """See Monitor. Raises ShardError."""
        self._check_size(size)
        self._monitor.expect(self._before + size)

    def received(self, size: int) -> None:
        """See Monitor. Raises ShardError."""
        self._check_size(size)
        if self._tar:
            with open(self._part, "rb") as file:
                head = file.read(BLOCK)
            if len(head) == BLOCK and (head != ZERO or size > PADDING):
                self._tar = False
                fault = None if packing(head) else fault_at_start(head)
                if head == ZERO or fault is not None:
                    detail = "it begins with zeros and goes on" if fault is None else fault.detail
                    raise ShardError("not_a_tar", f"{self._shown}: {detail}")
        disk = os.statvfs(self._part.parent)
        free, kept = disk.f_bavail * disk.f_frsize, min(KEPT_FREE, disk.f_blocks * disk.f_frsize // 20)
        if free < kept:
            raise ShardError(
                "disk",
                f"{self._part.parent} has {free / GIB:.2g} GiB left, after {size:,} bytes of {self._shown}: give "
                "--data.cache a folder with more space, limit it by --data.cache-gib, or lower --data.shuffle.shards",
            )
        self._monitor.received(self._before + size)

    def _check_size(self, size: int) -> None:
        if size > self._most:
            detail = f"{self._shown} has more than {self._most / GIB:.3g} GiB: if it is no mistake, raise "
            raise ShardError("too_large", f"{detail}--data.max-shard-gib")


class Fetcher:
    """Downloads shards, or copies local ones. Picklable.

    Remembers hosts that never answered, which are not waited for again.

    Args:
        timeout: seconds without a new byte after which a transfer fails.
        retries: further attempts of a failed transfer by HTTP or from an object store, which resume if possible.
        backoff: seconds before the first retry; doubled each time.
        most: maximum bytes of a shard, compressed or not; MOST by default.
    """

    def __init__(
        self, *, timeout: float = 60.0, retries: int = 3, backoff: float = 0.5, most: int | None = None
    ) -> None:
        self.timeout, self.retries, self.backoff, self.most = timeout, retries, backoff, most or MOST
        self._answered: set[str] = set()
        self._silent: set[str] = set()

    def info(self, url: str) -> FileInfo:
        """As `file_info`, but empty if the host does not answer; a host that never did is asked once."""
        if (host := _host_of(url)) in self._silent:
            return FileInfo(None, None)
        try:
            return file_info(url, self.timeout)
        except ShardError:
            self._note_silence(host)
            return FileInfo(None, None)

    def fetch(self, url: str, part: Path, monitor: Monitor, *, tar: bool = True) -> None:
        """Write the whole shard to `part`, decompressed. A failure may leave pieces in `part`.

        Args:
            tar: whether to stop as soon as the content is no tar.

        Raises:
            ShardError: the shard is missing, unreachable or incomplete, or no shard.
            OSError: the disk is full.
        """
        guard = Guard(monitor, url, part, self.most, tar=tar)
        scheme = scheme_of(url) or ""
        if (path := local_path(url)) is not None:
            _copy(Path(path), part, guard)
        elif scheme == "pipe":
            run_pipe(url[len("pipe:") :], part, timeout=self.timeout, monitor=guard)
        elif scheme in ("http", "https") and not _has_own_handler(scheme):
            retries = 0 if (host := _host_of(url)) in self._silent else self.retries
            try:
                fetch_http(url, part, timeout=self.timeout, retries=retries, backoff=self.backoff, monitor=guard)
            except ShardError as error:
                if error.reason in ("timeout", "unreachable"):
                    self._note_silence(host)
                raise
            self._answered.add(host)
            self._silent.discard(host)
        elif object_store.knows(scheme) and not _has_own_handler(scheme):
            object_store.fetch(url, scheme, part, retries=self.retries, backoff=self.backoff, monitor=guard)
        else:
            _fetch_gopen(url, scheme, part, guard)
        if packing(part) is not None:
            unpacked = part.with_suffix(".unpacked.part")
            size = part.stat().st_size
            try:
                self.unpack(url, part, unpacked, monitor, tar=tar, before=size)
                unpacked.replace(part)
            finally:
                unpacked.unlink(missing_ok=True)

    def unpack(
        self, url: str, packed: Path, part: Path, monitor: Monitor, *, tar: bool = True, before: int = 0
    ) -> None:
        """Decompress a file into `part`. Raises as `fetch`."""
        unpack(packed, part, Guard(monitor, url, part, self.most, tar=tar, before=before).received)

    def _note_silence(self, host: str) -> None:
        if host not in self._answered:
            self._silent.add(host)


def file_info(url: str, timeout: float) -> FileInfo:
    """What the source says about a shard, without a download; empty for commands and missing files.

    Raises:
        ShardError: the host does not answer.
    """
    if (path := local_path(url)) is not None:
        try:
            stat = os.stat(path)
        except OSError:
            return FileInfo(None, None)
        return FileInfo(f"{stat.st_mtime_ns}-{stat.st_size}", stat.st_size)
    scheme = scheme_of(url) or ""
    if _has_own_handler(scheme):
        return FileInfo(None, None)
    if scheme in ("http", "https"):
        return http_info(url, timeout)
    return object_store.object_info(url) if object_store.knows(scheme) else FileInfo(None, None)


def _host_of(url: str) -> str:
    """Host, port and login of a URL, or the bucket; also for malformed URLs."""
    return url.partition("//")[2].partition("/")[0]


def _copy(path: Path, part: Path, monitor: Monitor) -> None:
    def read() -> bytes:
        try:
            return source.read(CHUNK)
        except OSError as error:
            raise ShardError("unreadable", f"{path}: {error.strerror}") from error

    try:
        source = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError as error:
        raise ShardError("missing", f"{path} is not there") from error
    except OSError as error:
        raise ShardError("unreadable", f"{path}: {error.strerror}") from error
    with source, open(part, "wb") as file:
        while data := read():
            file.write(data)
            monitor.received(file.tell())


def _fetch_gopen(url: str, scheme: str, part: Path, monitor: Monitor) -> None:
    """Copy the stream of webdataset's handler for the scheme; a command behind it must exit with status 0.

    There is no time limit here: if a handler hangs, the loader notices that `monitor` is not called.

    Raises:
        ShardError: the scheme has no handler, or it failed.
    """
    module = importlib.import_module("webdataset.gopen")  # on use, because it imports torch
    schemes: dict[str, Any] = module.gopen_schemes
    if scheme not in schemes:
        hint = "use pipe:COMMAND, or register one in webdataset.gopen.gopen_schemes"
        raise ShardError("unknown_scheme", f"{redact(url)}: no handler for {scheme}://; {hint}")
    try:
        stream = module.gopen(url, "rb")
        child = getattr(stream, "proc", None)
        try:
            with open(part, "wb") as file:
                while data := stream.read(CHUNK):
                    file.write(data)
                    monitor.received(file.tell())
        except (ClipstreamError, ShardError):
            if child is not None:
                child.kill()
            with suppress(Exception):  # close() reports that the child was killed
                stream.close()
            raise
        stream.close()
    except (ClipstreamError, ShardError):
        raise
    except Exception as error:  # a user's handler may raise anything
        raise ShardError("unreachable", f"{redact(url)}: {type(error).__name__}: {redact(str(error))}") from error
    if child is not None and child.returncode != 0:
        raise ShardError("pipe_failed", f"{redact(url)}: exit status {child.returncode}")


def _has_own_handler(scheme: str) -> bool:
    """Whether the user has replaced webdataset's handler for a scheme."""
    module = sys.modules.get("webdataset.gopen")  # if it is not imported, nothing was registered
    handler = None if module is None else module.gopen_schemes.get(scheme)
    return handler is not None and getattr(handler, "__module__", "") != "webdataset.gopen"
