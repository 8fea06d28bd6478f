"""Downloads over HTTP(S) and from object stores, which resume after an interruption, and the errors of all transfers.

A transfer writes the whole file or raises `ShardError`; the caller removes what a failed one left. HTTP uses
urllib.request: httpx (h11) refuses the malformed Content-Length headers that some servers send, and urllib3 reads no
proxies from the environment; neither resumes a body that broke off. Object stores (s3://, gs://, az://, hf://, …) are
reached through fsspec. Their credentials and time limits are the backends' own; a backend is imported on first use.
"""

from __future__ import annotations

import base64
import errno
import http.client
import itertools
import random
import re
import shutil
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from email.message import Message
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, OpenerDirector, Request, build_opener

from clipstream.errors import ClipstreamError, absent
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan
from clipstream.utils import atomic_write
from clipstream.utils.processes import Failed

CHUNK = 1 << 20
GIB = 1 << 30
DISK_FULL = 1 << 16  # free bytes below which a disk counts as full
INFO_SECONDS = 10.0  # longest wait for the version of a file: without an answer, a cached file is used
TRANSIENT = (408, 416, 425, 429)  # 4xx answers after which another attempt may succeed
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)
Result = TypeVar("Result")


class ShardError(Exception):
    """A shard that cannot be opened, counted by `reason`.

    Reasons: `missing`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`, `timeout`,
    `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's), `not_a_tar`, `too_large`.
    `detail` contains no credentials. `transient` says whether another attempt may succeed.
    """

    def __init__(self, reason: str, detail: str, *, transient: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.transient = transient

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def unreadable(path: str | Path, error: OSError) -> ShardError:
    """The error of a local shard that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ShardError("missing", absent(path))
    return ShardError("unreadable", f"{path}: {error.strerror}")


def disk_error(path: str | Path, error: OSError) -> ShardError:
    """The error of a local file or folder that cannot be written."""
    advice = ": set --data.cache to a folder with more space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ShardError("disk", f"cannot write to {path}: {error.strerror or error}{advice}")


def failed(error: ShardError | OSError, shown: str, folder: Path) -> Failed:
    """The result for a shard that could not be read or written."""
    # The message of a command that could not write is unknown.
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    space = shutil.disk_usage(there).free
    if atomic_write.is_full(error) or space < DISK_FULL or getattr(error, "reason", None) == "disk":
        return Failed(f"{shown}: the disk of {folder} is full", full=True)
    said = str(error) if isinstance(error, (ShardError, ClipstreamError)) else f"disk: {redact(str(error))}"
    return Failed(said if shown in said else f"{shown}: {said}")


class FileInfo(NamedTuple):
    """What a source says about a file: a version that changes with the content, and bytes; None where unknown."""

    version: str | None = None
    size: int | None = None


class Monitor:
    """Receives the progress of a transfer; what it raises ends the transfer."""

    def expect(self, size: int) -> None:
        """The file has `size` bytes."""

    def received(self, size: int) -> None:
        """`size` bytes have arrived so far."""


def retry(
    act: Callable[[], Result], *, retries: int, backoff: float, is_transient: Callable[[Exception], bool]
) -> Result:
    """The result of `act`, which is called up to `retries` times more while its errors are transient.

    Args:
        backoff: approximate seconds before the first retry, doubled for each one, with jitter.
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

    A retry continues after the bytes received so far, as long as the file's version is the same.

    Args:
        timeout: seconds without a byte, for HTTP.
        retries, backoff: as for `retry`, after transient failures.

    Raises ShardError: the failure of the last attempt.
    """
    with open(part, "wb") as file:
        if url.scheme in ("http", "https"):
            download: _Download = _HTTPDownload(url, file, monitor, timeout)
        else:
            download = _ObjectDownload(url, file, monitor)
        retry(
            download.attempt,
            retries=retries,
            backoff=backoff,
            is_transient=lambda error: isinstance(error, ShardError) and error.transient,
        )


def info(url: ShardURL, timeout: float) -> FileInfo:
    """Version and size of a file by HTTP(S) or in an object store; empty if the server refuses to tell.

    Raises ShardError: `timeout` or `unreachable`, if the server does not answer.
    """
    if url.scheme not in ("http", "https"):
        try:
            system, path = _fsspec().core.url_to_fs(url.full)
            size = system.info(path).get("size")
            return FileInfo(str(system.ukey(path)), None if size is None else int(size))
        except (ImportError, ValueError, *_GONE):
            return FileInfo()
        except Exception as error:  # each backend has its own
            raise ShardError("unreachable", str(url)) from error
    try:
        with _opener().open(_request(url, method="HEAD"), timeout=min(timeout, INFO_SECONDS)) as response:
            headers = response.headers
            return FileInfo(headers["ETag"] or headers["Last-Modified"], _content_length(headers))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise ShardError("timeout", str(url)) from error
        return FileInfo()


class _Download(ABC):
    """A file that grows over several attempts.

    Attributes:
        have: bytes received so far.
        total: bytes of the whole file; None if unknown.
        version: of the file that the bytes belong to; None if it cannot be resumed.
    """

    errors: tuple[type[Exception], ...]  # that a transfer may raise

    def __init__(self, url: ShardURL, file: IO[bytes], monitor: Monitor) -> None:
        self.url, self.file, self.monitor = url, file, monitor
        self.restart()

    def restart(self) -> None:
        """Let the next attempt begin at the first byte."""
        self.have, self.total, self.version = 0, None, None  # type: tuple[int, int | None, str | None]

    @abstractmethod
    def open(self) -> AbstractContextManager[Callable[[int], bytes]]:
        """Request the bytes behind the first `have`; set `total`, `version`, and `have` to 0 if the file is another.

        Returns:
            A context with the function that reads at most so many bytes.
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
                while data := read(CHUNK):
                    try:
                        self.file.write(data)
                    except OSError as error:
                        raise disk_error(self.file.name, error) from error
                    self.have += len(data)
                    self.monitor.received(self.have)
            if self.total not in (None, self.have):
                raise self.truncated(f"{self.have:,} of {self.total:,} bytes received")
            self.check()
        except (ClipstreamError, ShardError):
            raise
        except self.errors as error:
            raise self.failure(error) from error

    def truncated(self, detail: str) -> ShardError:
        return ShardError("truncated_download", f"{self.url}: {detail}", transient=True)


class _HTTPDownload(_Download):
    errors = (OSError, ValueError, http.client.HTTPException)

    def __init__(self, url: ShardURL, file: IO[bytes], monitor: Monitor, timeout: float) -> None:
        super().__init__(url, file, monitor)
        self.timeout = timeout

    @contextmanager
    def open(self) -> Iterator[Callable[[int], bytes]]:
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
                    raise self.truncated("the server resumed at another byte, or with another version of the file")
                self.total = total
            else:
                self.have, self.total, self.version = 0, _content_length(headers), version
            yield response.read1

    def check(self) -> None:
        if self.total is None and self._headers["Transfer-Encoding"] is None:
            self.file.flush()  # only the tar itself shows whether it is complete
            fault = scan(self.file.name).fault
            if fault is not None and fault.reason in ("truncated_header", "truncated_member", "missing_end"):
                raise self.truncated(f"the server sent no length, and {fault.detail}")

    def failure(self, error: Exception) -> ShardError:
        if isinstance(error, HTTPError):
            error.close()
            if error.code == 416:  # the file is shorter now than what was received
                self.restart()
            transient = error.code >= 500 or error.code in TRANSIENT
            detail = f"{self.url}: {redact(str(error.reason))}"
            return ShardError(f"http_{error.code}", detail, transient=transient)
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            detail = f"{self.url}: no byte in {self.timeout:g} s after {self.have:,} bytes"
            return ShardError("timeout", detail, transient=True)
        text = redact(str(cause))  # may contain the URL
        if self.have or isinstance(error, http.client.IncompleteRead):
            return self.truncated(f"after {self.have:,} bytes: {text}")
        invalid = isinstance(error, (ValueError, http.client.InvalidURL))
        return ShardError("unreachable", f"{self.url}: {text}", transient=not invalid)


class _ObjectDownload(_Download):
    errors = (Exception,)  # each backend has its own

    def __init__(self, url: ShardURL, file: IO[bytes], monitor: Monitor) -> None:
        super().__init__(url, file, monitor)
        self._system, self._path = filesystem_of(url, "or use pipe:COMMAND")

    @contextmanager
    def open(self) -> Iterator[Callable[[int], bytes]]:
        self.total = self._system.info(self._path).get("size")
        version = str(self._system.ukey(self._path))
        if version != self.version:
            self.have, self.version = 0, version
        with self._system.open(self._path, "rb") as source:
            source.seek(self.have)
            yield source.read

    def check(self) -> None:
        if str(self._system.ukey(self._path)) != self.version:  # the parts may belong to different versions
            raise self.truncated("it changed during the download")

    def failure(self, error: Exception) -> ShardError:
        text = redact(str(error))
        if isinstance(error, _GONE):
            return ShardError("missing", f"{self.url}: {text or type(error).__name__}")
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


def _fsspec() -> Any:
    import fsspec  # on use, as its import takes 0.2 s

    return fsspec


def filesystem_of(url: ShardURL, otherwise: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Args:
        otherwise: the alternative to installing its backend, for the message.

    Raises ShardError: `unknown_scheme` if the backend is not installed; `unreachable` if it connects at once, and
    cannot.
    """
    try:
        system, path = _fsspec().core.url_to_fs(url.full)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(url.scheme or "file")
        advice = f"pip install 'clipstream[{extra}]'" if extra else str(error)
        detail = f"{url}: the backend of {url.scheme or 'file'}:// is not installed: {advice}, {otherwise}"
        raise ShardError("unknown_scheme", detail) from error
    except Exception as error:  # each backend has its own
        detail = f"cannot reach {url}: {redact(str(error)) or type(error).__name__}"
        raise ShardError("unreachable", detail) from error
    return system, str(path)
