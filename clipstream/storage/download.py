"""Downloads: a shard's URL becomes a complete, uncompressed file, or a `ShardError`.

`Fetcher` chooses the transfer for a URL: local paths, `pipe:`, HTTP(S), or an object store. A transfer writes the whole
file or raises `ShardError`; the caller removes what a failed one left. It ends early (`Guard`) if it cannot become a
shard: no tar, too large, or a full disk. HTTP and object stores resume after an interruption. gzip and zstd are
recognized by their first bytes; a compressed file is used completely or not at all, as its checksum covers the whole
content.

HTTP uses urllib.request: httpx (h11) refuses the malformed Content-Length headers that some servers send, and urllib3
reads no proxies from the environment; neither resumes a body that broke off. Object stores (s3://, gs://, az://, hf://,
…) are reached through fsspec (`backends`), whose credentials are its own.
"""

from __future__ import annotations

import base64
import errno
import gzip
import http.client
import itertools
import os
import random
import re
import shutil
import ssl
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, OpenerDirector, Request, build_opener

from clipstream.errors import ClipstreamError, DataError, ShardError, absent
from clipstream.storage.backends import Monitor, call_within, denial, explain, reach, run_pipe
from clipstream.storage.shard_url import ShardURL, allow_command, redact
from clipstream.storage.tar import BLOCK, ZERO, fault_at_start, scan
from clipstream.utils import content

CHUNK = 1 << 20
GIB = 1 << 30
MOST = 64 * GIB  # default limit of a shard's bytes
KEPT_FREE = GIB  # bytes that a transfer leaves free on its file system; 1/20 of it if that is less
PADDING = 1 << 20  # bytes of zeros that may form an empty tar: tars are padded to blocks of 10 KiB and more
DISK_FULL = 1 << 16  # free bytes below which a disk counts as full
INFO_SECONDS = 10.0  # longest wait for the version of a file: without an answer, a cached file is used
TRANSIENT = (408, 416, 425, 429)  # 4xx answers after which another attempt may succeed
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
REQUEST = 1 << 22  # bytes of a request to an object store, which must arrive within the limit of time
_GONE = (FileNotFoundError, IsADirectoryError)
# What S3, Azure and servers like S3 say of a signed link that has expired.
_EXPIRED = re.compile(
    "ExpiredToken|ExpiredRequest|InvalidToken|[Rr]equest has expired|Signature not valid in the specified time"
)
Result = TypeVar("Result")


def unreadable(path: str | Path, error: OSError) -> ShardError:
    """The error of a local shard that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ShardError("missing", absent(path))
    return ShardError("unreadable", f"{path}: {error.strerror}")


def fault_of(error: Exception) -> str:
    """Why a shard cannot be read. Raises DataError: the credentials are refused, which is no fault of the shard."""
    if getattr(error, "reason", None) == "credentials":
        raise DataError(f"{error}: renew them, and run the same command again") from error
    return str(error)


def disk_error(path: str | Path, error: OSError) -> ShardError:
    """The error of a local file or folder that cannot be written."""
    advice = ": set --data.cache to a folder with more space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ShardError("disk", f"cannot write to {path}: {error.strerror or error}{advice}")


class FileInfo(NamedTuple):
    """What a source says about a file: a version that changes with the content, and bytes; None where unknown."""

    version: str | None = None
    size: int | None = None


def retry(
    act: Callable[[], Result],
    *,
    retries: int,
    backoff: float,
    is_transient: Callable[[Exception], bool] = lambda error: getattr(error, "transient", False),
) -> Result:
    """The result of `act`, which is called up to `retries` times more while its errors are transient, after `backoff`
    seconds, doubled for each retry, with jitter.
    """
    for attempt in itertools.count():
        try:
            return act()
        except Exception as error:
            if attempt >= retries or not is_transient(error):
                raise
        time.sleep(backoff * 2**attempt * random.SystemRandom().uniform(0.5, 1.5))
    raise AssertionError  # unreachable


def fetch(
    url: ShardURL, part: Path, monitor: Monitor, *, timeout: float = 60.0, retries: int = 3, backoff: float = 0.5
) -> None:
    """Download a file by HTTP(S) or from an object store into `part`.

    A retry continues after the bytes received so far, as long as the file's version is the same. `timeout`: seconds
    without a byte, or without the answer to a request.

    Raises ShardError: the failure of the last attempt.
    """
    with open(part, "wb") as file:
        kind = _HTTPDownload if url.scheme in ("http", "https") else _ObjectDownload
        retry(kind(url, file, monitor, timeout).attempt, retries=retries, backoff=backoff)


def info(url: ShardURL, timeout: float) -> FileInfo:
    """Version and size of a file by HTTP(S) or in an object store; empty if the server refuses to tell.

    Raises ShardError: `timeout` or `unreachable`, if the server does not answer.
    """
    if url.scheme not in ("http", "https"):
        try:
            return reach(url, _info, min(timeout, INFO_SECONDS))
        except (ConnectionError, TimeoutError) as error:
            raise ShardError("unreachable", str(url)) from error
        except Exception:  # each backend has its own
            return FileInfo()
    try:
        with _opener().open(_request(url, method="HEAD"), timeout=min(timeout, INFO_SECONDS)) as response:
            headers = response.headers
            return FileInfo(headers["ETag"] or headers["Last-Modified"], _content_length(headers))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise ShardError("timeout", str(url)) from error
        return FileInfo()


class _Download(ABC):
    """A file that grows over several attempts."""

    errors: tuple[type[Exception], ...]  # that a transfer may raise
    have: int  # bytes received so far
    total: int | None  # bytes of the whole file; None if unknown
    version: str | None  # of the file that the bytes belong to; None if it cannot be resumed

    def __init__(self, url: ShardURL, file: IO[bytes], monitor: Monitor, timeout: float) -> None:
        self.url, self.file, self.monitor, self.timeout = url, file, monitor, timeout
        self.restart()

    def restart(self) -> None:
        """Let the next attempt begin at the first byte."""
        self.have, self.total, self.version = 0, None, None

    @abstractmethod
    def open(self) -> AbstractContextManager[Callable[[], bytes]]:
        """Request the bytes behind the first `have`; set `total`, `version`, and `have` to 0 if the file is another. A
        context with the function that reads the next bytes.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the bytes received are not the whole file, where `total` does not tell."""

    @abstractmethod
    def failure(self, error: Exception) -> ShardError:
        """One of `errors` as a ShardError."""

    def attempt(self) -> None:
        """Receive the rest of the file. Raises ShardError."""
        try:
            with self.open() as read:
                self.file.seek(self.have)
                self.file.truncate()
                if self.total is not None:
                    self.monitor.expect(self.total)
                while data := read():
                    try:
                        self.file.write(data)
                    except OSError as error:
                        raise disk_error(self.file.name, error) from error
                    self.have += len(data)
                    self.monitor.receive(self.have)
            if self.total not in (None, self.have):
                raise self.truncation(f"{self.have:,} of {self.total:,} bytes received")
            self.check()
        except (ClipstreamError, ShardError):
            raise
        except self.errors as error:
            raise self.failure(error) from error

    def truncation(self, detail: str) -> ShardError:
        return ShardError("truncated_download", f"{self.url}: {detail}", transient=True)


class _HTTPDownload(_Download):
    errors = (OSError, ValueError, http.client.HTTPException)

    @contextmanager
    def open(self) -> Iterator[Callable[[], bytes]]:
        request = _request(self.url)
        if self.have and self.version:
            request.add_header("Range", f"bytes={self.have}-")
            request.add_header("If-Range", self.version)
        with _opener().open(request, timeout=self.timeout) as response:
            headers = self._headers = response.headers
            tag: str = headers["ETag"] or "W/"
            version: str | None = headers["Last-Modified"] if tag.startswith("W/") else tag
            if response.status == 206:
                match = CONTENT_RANGE.fullmatch(headers["Content-Range"] or "")
                first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
                same = self.total in (None, total) and version in (None, self.version)
                if not same or first != self.have or last + 1 != total:
                    self.restart()
                    raise self.truncation("the server resumed at another byte, or with another version of the file")
                self.total = total
            else:
                self.have, self.total, self.version = 0, _content_length(headers), version
            yield partial(response.read1, CHUNK)

    def check(self) -> None:
        if self.total is None and self._headers["Transfer-Encoding"] is None:
            self.file.flush()  # only the tar itself shows whether it is complete
            fault = scan(self.file.name).fault
            if fault is not None and fault.reason in ("truncated_header", "truncated_member", "missing_end"):
                raise self.truncation(f"the server sent no length, and {fault.detail}")

    def failure(self, error: Exception) -> ShardError:
        if isinstance(error, HTTPError):
            answer = b""
            with suppress(OSError, http.client.HTTPException), error:
                answer = getattr(error.fp, "read1", error.read)(CHUNK) if error.code in (400, 403) else b""
            if error.code == 416:  # the file is shorter now than what was received
                self.restart()
            if _EXPIRED.search(answer.decode(errors="replace")):
                return ShardError("credentials", f"{self.url}: {error.code}: the signature of the link has expired")
            transient = error.code >= 500 or error.code in TRANSIENT
            detail = f"{self.url}: {redact(str(error.reason))}"
            return ShardError(f"http_{error.code}", detail, transient=transient)
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            detail = f"{self.url}: no byte in {self.timeout:g} s after {self.have:,} bytes"
            return ShardError("timeout", detail, transient=True)
        text = redact(str(cause))  # may contain the URL
        if self.have or isinstance(error, http.client.IncompleteRead):
            return self.truncation(f"after {self.have:,} bytes: {text}")
        invalid = isinstance(error, (ValueError, http.client.InvalidURL))
        return ShardError("unreachable", f"{self.url}: {text}", transient=not invalid)


class _ObjectDownload(_Download):
    errors = (Exception,)  # each backend has its own

    @contextmanager
    def open(self) -> Iterator[Callable[[], bytes]]:
        version, self.total = reach(self.url, _info, self.timeout)
        if version != self.version:
            self.have, self.version = 0, version

        def open_file(system: Any, path: str) -> Any:
            source = system.open(path, "rb", cache_type="none")  # each read is one request
            source.seek(self.have)
            return source

        source = reach(self.url, open_file, self.timeout)
        try:
            yield lambda: call_within(partial(source.read, REQUEST), self.timeout)
        finally:
            with suppress(Exception):
                call_within(source.close, self.timeout)

    def check(self) -> None:
        if reach(self.url, _info, self.timeout).version != self.version:  # the parts may belong to different versions
            raise self.truncation("it changed during the download")

    def failure(self, error: Exception) -> ShardError:
        text = explain(error)
        if isinstance(error, _GONE):
            return ShardError("missing", f"{self.url}: {text}")
        if (reason := denial(error)) is not None:
            return ShardError(reason, f"{self.url}: {text}", transient=reason == "credentials")
        if isinstance(error, TimeoutError):
            return ShardError("timeout", f"{self.url}: {text} after {self.have:,} bytes", transient=True)
        reason = "truncated_download" if self.have else "unreachable"
        detail = f"{self.url}: after {self.have:,} bytes: {type(error).__name__}: {text}"
        return ShardError(reason, detail, transient=True)


@cache
def _tls() -> ssl.SSLContext:
    """The process's TLS context. It holds all root certificates, so one for each request would take time and memory."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _opener() -> OpenerDirector:
    """A new opener, which reads the current proxies from the environment."""
    return build_opener(HTTPSHandler(context=_tls()))


def _content_length(headers: Message) -> int | None:
    """None also for a malformed number: http.client then reads until the connection ends."""
    length: str = headers["Content-Length"] or ""
    return int(length) if length.isascii() and length.isdigit() else None


def _request(url: ShardURL, method: str = "GET") -> Request:
    """A request. `user:password@` in the URL is sent as basic authentication, but not to the target of a redirect."""
    parts = urlsplit(url.full)
    login, _, host = parts.netloc.rpartition("@")
    headers = {"User-Agent": "clipstream", "Accept-Encoding": "identity"}
    request = Request(urlunsplit(parts._replace(netloc=host)), headers=headers, method=method)
    if login:
        encoded = base64.b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request


def _info(system: Any, path: str) -> FileInfo:
    size = system.info(path).get("size")
    return FileInfo(str(system.ukey(path)), None if size is None else int(size))


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
        disk = shutil.disk_usage(self.part.parent)
        if disk.free < min(KEPT_FREE, disk.total // 20):
            left = f"{self.part.parent} has {disk.free / GIB:.2g} GiB left, after {size:,} bytes of {self.url}"
            advice = "a --data.cache with more space, limit it by --data.cache-gib, or lower --data.shuffle.shards"
            raise ShardError("disk", f"{left}: use {advice}")
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
            return info(url, self.timeout)
        except ShardError:
            self._note_silence(url.host)
            return FileInfo()

    def fetch(self, url: ShardURL, part: Path, monitor: Monitor, *, tar: bool = True) -> None:
        """Write the whole shard to `part`, decompressed; with `tar`, stop as soon as the content is none. A failure may
        leave pieces in `part`.

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
                fetch(url, part, guard, timeout=self.timeout, retries=retries, backoff=self.backoff)
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
