"""Owns what a transfer into a local file is, whatever brings it, and the one by http(s).

It writes the whole of it or raises `ShardError`; what a partial transfer left in the file is the caller's to remove.
"""

from __future__ import annotations

import base64
import errno
import http.client
import random
import re
import time
from email.message import Message
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener

from clipstream.data.shards import redact
from clipstream.data.tarstream import scan

CHUNK = 1 << 20
CONNECT_SECONDS = 10.0  # a host that does not answer within these is down, or behind a firewall
TRANSIENT = (408, 425, 429)  # of the 4xx answers, those that say "later"
PLACE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")  # a Content-Range


class ShardError(Exception):
    """A shard that cannot be opened, counted under `reason`.

    Reasons: `missing`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`, `timeout`,
    `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's). Credentials are not in `detail`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)


def disk_error(path: str | Path, error: OSError) -> ShardError:
    """A local file, or folder, that cannot be written."""
    advice = ": give --data.cache a folder with more room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ShardError("disk", f"cannot write to {path}: {error.strerror or error}{advice}")


class TransferEnded(Exception):
    """A transfer that was given up because nobody wants it any more; it says nothing about the shard."""


class About(NamedTuple):
    """What a source says of a file: what changes when the file does, and its bytes; None for what it does not say."""

    version: str | None
    size: int | None


class Watch(Protocol):
    """Is told how a transfer gets on."""

    def expect(self, size: int) -> None:
        """So many bytes will come in all. Raises SettingsError where there is no room for them."""

    def came(self, size: int) -> None:
        """So many bytes have come by now. Raises SettingsError where there is no room for them."""


class _Connection(http.client.HTTPConnection):
    """Gives up connecting sooner than it gives up waiting for bytes."""

    def connect(self) -> None:
        limit = self.timeout
        self.timeout = min(limit or CONNECT_SECONDS, CONNECT_SECONDS)
        super().connect()
        self.timeout = limit
        self.sock.settimeout(limit)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """The same, encrypted."""


class _Http(HTTPHandler):
    def http_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(HTTPSHandler):
    def https_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)


class _Download:
    """A file that grows over several tries of one http transfer."""

    def __init__(self, url: str, file: IO[bytes], timeout: float, watch: Watch) -> None:
        _request(url)  # what is no URL is told before anything is asked
        self.url, self.shown = url, redact(url)
        self.file = file
        self.timeout = timeout
        self.watch = watch
        self.have = 0
        self.total: int | None = None  # bytes of the whole file, as far as the server tells
        self.version: str | None = None  # what says that a later try continues the same file

    def attempt(self) -> None:
        """One request, from where the last one stopped if the server's file has a strong version."""
        request = _request(self.url)
        if self.have and self.version:
            request.add_header("Range", f"bytes={self.have}-")
            request.add_header("If-Range", self.version)
        # Made anew: proxies are those of the environment now.
        with build_opener(_Http, _Https).open(request, timeout=self.timeout) as response:
            if response.status == 206:
                self._go_on(response.headers)
            else:
                self._begin(response.headers)
            if self.total is not None:
                self.watch.expect(self.total)
            while data := response.read1(CHUNK):
                self._write(data)
        if self.total is not None and self.have != self.total:
            raise ShardError("truncated_download", f"{self.shown}: {self.have:,} of {self.total:,} bytes came")
        if self.total is None and response.headers["Transfer-Encoding"] is None:
            self._check_end()

    def forget(self) -> None:
        """Let the next try begin anew."""
        self.have, self.total, self.version = 0, None, None

    def _begin(self, headers: Message) -> None:
        """The whole file comes."""
        self.file.seek(0)
        self.file.truncate()
        self.have = 0
        self.version = _strong_version(headers)
        self.total = _told_length(headers)

    def _go_on(self, headers: Message) -> None:
        """The rest of what is here comes, unless the server sends another part, or that of another file."""
        place = PLACE.fullmatch(headers["Content-Range"] or "")
        first, last, total = map(int, place.groups()) if place else (-1, -1, -1)
        same = self.total in (None, total) and _strong_version(headers) in (None, self.version)
        if not same or first != self.have or last + 1 != total:
            self.forget()
            detail = f"{self.shown}: the server went on with another part, or with another version of the file"
            raise ShardError("truncated_download", detail)
        self.total = total

    def _write(self, data: bytes) -> None:
        try:
            self.file.write(data)
        except OSError as error:
            raise disk_error(self.file.name, error) from error
        self.have += len(data)
        self.watch.came(self.have)

    def _check_end(self) -> None:
        """Without a length, only the tar itself tells whether all of it came."""
        self.file.flush()
        fault = scan(self.file.name).fault
        if fault is not None and fault.reason in ("truncated_header", "truncated_member", "missing_end"):
            raise ShardError("truncated_download", f"{self.shown}: the server told no length, and {fault.detail}")


def fetch_http(url: str, part: Path, *, timeout: float, retries: int, backoff: float, watch: Watch) -> None:
    """Download a URL into `part`. `user:password@` in it becomes a login.

    Args:
        timeout: seconds without a byte; connecting has CONNECT_SECONDS.
        retries: further tries after failures that may pass.
        backoff: seconds before the first of them, about; doubled for each.

    Raises:
        ShardError: the last try's failure; at once for answers that will not change, such as http_404.
    """
    with open(part, "wb") as file:
        try:
            download = _Download(url, file, timeout, watch)
        except ValueError as error:
            raise ShardError("unreachable", f"{redact(url)}: {redact(str(error))}") from error
        for attempt in range(retries + 1):
            try:
                return download.attempt()
            except (OSError, ValueError, http.client.HTTPException, ShardError) as error:
                failure, passing = _judge(download, error)
                if not passing or attempt == retries:
                    raise failure from error
            pause(attempt, backoff)


def http_about(url: str, timeout: float) -> About:
    """What the server says of a file: its ETag, or else its date, and its length.

    Raises:
        ShardError: `timeout`, where it says nothing at all.
    """
    try:
        request = _request(url, method="HEAD")
        with build_opener(_Http, _Https).open(request, timeout=timeout) as response:
            headers = response.headers
            return About(headers["ETag"] or headers["Last-Modified"], _told_length(headers))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise ShardError("timeout", redact(url)) from error
        return About(None, None)


def host_of(url: str) -> str:
    """Host, port and login of a URL, or the bucket; also of what is no right URL."""
    return url.partition("//")[2].partition("/")[0]


def _strong_version(headers: Message) -> str | None:
    """What is equal only for equal bytes."""
    tag: str | None = headers["ETag"]
    found: str | None = tag if tag and not tag.startswith("W/") else headers["Last-Modified"]
    return found


def _told_length(headers: Message) -> int | None:
    """Bytes that will come; None also for what is no number, as http.client then reads until the connection ends."""
    length: str = headers["Content-Length"] or ""
    return int(length) if length.isascii() and length.isdigit() else None


def _request(url: str, method: str = "GET") -> Request:
    """`user:password@` becomes a login, which is not repeated to the host that a redirection names."""
    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    login = unquote(parts.netloc.rpartition("@")[0])
    request = Request(bare, headers={"User-Agent": "clipstream", "Accept-Encoding": "identity"}, method=method)
    if login:
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    return request


def pause(attempt: int, backoff: float) -> None:
    """Wait before the next try, twice as long each time, and not in step with other processes."""
    time.sleep(backoff * 2**attempt * random.SystemRandom().uniform(0.5, 1.5))


def _judge(download: _Download, error: Exception) -> tuple[ShardError, bool]:
    """The failure as a ShardError, and whether another try may help."""
    shown = download.shown
    if isinstance(error, ShardError):
        return error, error.reason == "truncated_download"
    if isinstance(error, HTTPError):
        error.close()
        if error.code == 416:  # the file became shorter than what we have
            download.forget()
        passing = error.code >= 500 or error.code in (*TRANSIENT, 416)
        return ShardError(f"http_{error.code}", f"{shown}: {redact(str(error.reason))}"), passing
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        detail = f"{shown}: no byte in {download.timeout:g} s after {download.have:,} bytes"
        return ShardError("timeout", detail), True
    said = redact(str(cause))  # which may repeat the URL
    if download.have or isinstance(error, http.client.IncompleteRead):
        return ShardError("truncated_download", f"{shown}: after {download.have:,} bytes: {said}"), True
    passing = not isinstance(error, (ValueError, http.client.InvalidURL))
    return ShardError("unreachable", f"{shown}: {said}"), passing
