"""Downloads over HTTP(S) and from object stores, which resume after an interruption, and the errors of all transfers.

A transfer writes the whole file or raises `ShardError`; the caller removes what a failed one left. HTTP uses
urllib.request: httpx (h11) refuses the malformed Content-Length headers that some servers send, and urllib3 reads no
proxies from the environment; neither resumes a body that broke off. Object stores (s3://, gs://, az://, hf://, …) are
reached through fsspec. Credentials are the backends' own; `reach` limits the time of each request, and takes renewed
credentials once some are refused. A backend is imported on first use.
"""

from __future__ import annotations

import base64
import errno
import http.client
import itertools
import queue
import random
import re
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from email.message import Message
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, OpenerDirector, Request, build_opener

from clipstream.errors import ClipstreamError, DataError, absent
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan

CHUNK = 1 << 20
GIB = 1 << 30
DISK_FULL = 1 << 16  # free bytes below which a disk counts as full
INFO_SECONDS = 10.0  # longest wait for the version of a file: without an answer, a cached file is used
TRANSIENT = (408, 416, 425, 429)  # 4xx answers after which another attempt may succeed
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
BLOCK = 1 << 22  # bytes of a request to an object store, which must arrive within the limit of time
_GONE = (FileNotFoundError, IsADirectoryError)
# Error codes of S3, and types of errors of botocore, google-auth and azure-core, that concern the credentials alone.
_CREDENTIALS = re.compile(
    "ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch|RequestTimeTooSkewed"
    "|AuthenticationFailed|CredentialsError|CredentialRetrievalError|RefreshError|ClientAuthenticationError"
)
# What S3, Azure and servers like S3 say of a signed link that has expired.
_EXPIRED = re.compile(
    "ExpiredToken|ExpiredRequest|InvalidToken|[Rr]equest has expired|Signature not valid in the specified time"
)
Result = TypeVar("Result")


class ShardError(Exception):
    """A shard that cannot be opened, counted by `reason`, unless that is `credentials`: refused for all shards alike.

    Reasons: `missing`, `denied`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`,
    `timeout`, `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's), `not_a_tar`, `too_large`.
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


class Monitor:
    """Receives the progress of a transfer; what it raises ends the transfer."""

    def expect(self, size: int) -> None:
        """The file has `size` bytes."""

    def receive(self, size: int) -> None:
        """`size` bytes have arrived so far."""


def retry(
    act: Callable[[], Result],
    *,
    retries: int,
    backoff: float,
    is_transient: Callable[[Exception], bool] = lambda error: getattr(error, "transient", False),
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
        timeout: seconds without a byte, or without the answer to a request.
        retries, backoff: as for `retry`, after transient failures.

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
    """A file that grows over several attempts.

    Attributes:
        have: bytes received so far.
        total: bytes of the whole file; None if unknown.
        version: of the file that the bytes belong to; None if it cannot be resumed.
    """

    errors: tuple[type[Exception], ...]  # that a transfer may raise

    def __init__(self, url: ShardURL, file: IO[bytes], monitor: Monitor, timeout: float) -> None:
        self.url, self.file, self.monitor, self.timeout = url, file, monitor, timeout
        self.restart()

    def restart(self) -> None:
        """Let the next attempt begin at the first byte."""
        self.have, self.total, self.version = 0, None, None  # type: tuple[int, int | None, str | None]

    @abstractmethod
    def open(self) -> AbstractContextManager[Callable[[], bytes]]:
        """Request the bytes behind the first `have`; set `total`, `version`, and `have` to 0 if the file is another.

        Returns:
            A context with the function that reads the next bytes.
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
            yield lambda: call_within(partial(source.read, BLOCK), self.timeout)
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


def _fsspec() -> Any:
    import fsspec  # on use, as its import takes 0.2 s

    return fsspec


def filesystem_of(url: ShardURL) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Raises ShardError: `unknown_scheme` if the backend is not installed; `unreachable` if it connects at once, and
    cannot.
    """
    # Object stores have no folders; `local:` is fsspec's other name of `file:`.
    options = {"auto_mkdir": True} if url.path is not None or url.scheme == "local" else {}
    try:
        system, path = _fsspec().core.url_to_fs(url.full, **options)
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

    Args:
        alive: time (`time.monotonic`) of the last progress.

    Raises TimeoutError: `seconds` pass without progress; the thread is left behind.
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
        with suppress(queue.Empty):
            result, error = outcome.get(timeout=left)
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
    raise TimeoutError(f"no answer in {seconds:g} s")


def reach(
    url: ShardURL,
    act: Callable[[Any, str], Result],
    seconds: float,
    alive: Callable[[], float] = lambda: 0.0,
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


def _info(system: Any, path: str) -> FileInfo:
    size = system.info(path).get("size")
    return FileInfo(str(system.ukey(path)), None if size is None else int(size))


def progress_of(moved: Callable[[], object]) -> tuple[Any, Callable[[], float]]:
    """fsspec's callback for an upload, which calls `moved`, and `alive` for `call_within`."""
    last = [0.0]

    def note(*_: Any, **__: Any) -> None:
        last[0] = time.monotonic()
        moved()

    return _fsspec().callbacks.Callback(hooks={"moved": note}), lambda: last[0]
