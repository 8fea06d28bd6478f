"""Download over HTTP(S), with resume after an interruption.

This uses urllib.request. httpx (h11) refuses the malformed Content-Length headers that some servers send. urllib3 was
tried: it saves a tenth of this module, as it does not resume a body that broke off either, but it reads no proxies from
the environment, hides the target of a redirect that it cannot follow, and would be one more dependency.
"""

from __future__ import annotations

import base64
import http.client
import re
import ssl
from email.message import Message
from functools import cache
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan
from clipstream.storage.transfer import CHUNK, FileInfo, Monitor, ShardError, disk_error, retry

CONNECT_SECONDS = 10.0  # a host that does not accept a connection within these is down, or behind a firewall
TRANSIENT = (408, 416, 425, 429)  # 4xx answers worth another attempt
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class _Connection(http.client.HTTPConnection):
    """Limits the time to connect separately from the time between two reads."""

    def connect(self) -> None:
        limit = self.timeout
        self.timeout = min(limit or CONNECT_SECONDS, CONNECT_SECONDS)
        super().connect()
        self.timeout = limit
        self.sock.settimeout(limit)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    pass


class _Handler(HTTPHandler, HTTPSHandler):
    def http_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)

    def https_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=_tls())


@cache
def _tls() -> ssl.SSLContext:
    """The process's TLS context. It holds all root certificates, so one for each request would take time and memory."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _opener() -> OpenerDirector:
    """A new opener, which reads the current proxies from the environment."""
    # Since Python 3.12 a handler without a context makes one at once.
    return build_opener(_Handler(context=_tls()))


class _Download:
    """A file that grows over several attempts."""

    def __init__(self, url: ShardURL, file: IO[bytes], timeout: float, monitor: Monitor) -> None:
        self.url, self.file, self.timeout, self.monitor = url, file, timeout, monitor
        self.restart()

    def restart(self) -> None:
        """Let the next attempt begin at the first byte."""
        self.have = 0
        self.total: int | None = None  # bytes of the whole file, if the server says so
        self.version: str | None = None  # a strong validator, which allows a later attempt to resume

    def attempt(self) -> None:
        """Send one request, which continues after the bytes received so far if the server's file is the same."""
        request = _request(self.url)
        if self.have and self.version:
            request.add_header("Range", f"bytes={self.have}-")
            request.add_header("If-Range", self.version)
        with _opener().open(request, timeout=self.timeout) as response:
            headers: Message = response.headers
            tag: str = headers["ETag"] or "W/"
            version: str | None = headers["Last-Modified"] if tag.startswith("W/") else tag
            if response.status == 206:
                match = CONTENT_RANGE.fullmatch(headers["Content-Range"] or "")
                first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
                same = self.total in (None, total) and version in (None, self.version)
                if not same or first != self.have or last + 1 != total:
                    self.restart()
                    detail = f"{self.url}: the server went on with another part, or with another version of the file"
                    raise ShardError("truncated_download", detail)
                self.total = total
            else:
                self.file.seek(0)
                self.file.truncate()
                self.have, self.total, self.version = 0, _content_length(headers), version
            if self.total is not None:
                self.monitor.expect(self.total)
            while data := response.read1(CHUNK):
                try:
                    self.file.write(data)
                except OSError as error:
                    raise disk_error(self.file.name, error) from error
                self.have += len(data)
                self.monitor.received(self.have)
        if self.total is not None:
            if self.have != self.total:
                raise ShardError("truncated_download", f"{self.url}: {self.have:,} of {self.total:,} bytes received")
        elif headers["Transfer-Encoding"] is None:  # without a length, only the tar itself shows whether it is complete
            self.file.flush()
            fault = scan(self.file.name).fault
            if fault is not None and fault.reason in ("truncated_header", "truncated_member", "missing_end"):
                detail = f"{self.url}: the server sent no length, and {fault.detail}"
                raise ShardError("truncated_download", detail)

    def failure(self, error: Exception) -> tuple[Exception, bool]:
        """The error of an attempt as a ShardError, and whether another attempt may succeed."""
        if isinstance(error, ShardError):
            return error, error.reason == "truncated_download"
        if not isinstance(error, (OSError, ValueError, http.client.HTTPException)):
            return error, False
        if isinstance(error, HTTPError):
            error.close()
            if error.code == 416:  # the file is shorter now than what was received
                self.restart()
            transient = error.code >= 500 or error.code in TRANSIENT
            return ShardError(f"http_{error.code}", f"{self.url}: {redact(str(error.reason))}"), transient
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            detail = f"{self.url}: no byte in {self.timeout:g} s after {self.have:,} bytes"
            return ShardError("timeout", detail), True
        text = redact(str(cause))  # may contain the URL
        if self.have or isinstance(error, http.client.IncompleteRead):
            return ShardError("truncated_download", f"{self.url}: after {self.have:,} bytes: {text}"), True
        transient = not isinstance(error, (ValueError, http.client.InvalidURL))
        return ShardError("unreachable", f"{self.url}: {text}"), transient


def fetch_http(url: ShardURL, part: Path, *, timeout: float, retries: int, backoff: float, monitor: Monitor) -> None:
    """Download a URL into `part`. `user:password@` in the URL is sent as basic authentication.

    Args:
        timeout: seconds without a byte; connecting has CONNECT_SECONDS.
        retries, backoff: as for `retry`, after transient failures.

    Raises:
        ShardError: the last attempt's failure; at once if it is permanent, such as http_404.
    """
    with open(part, "wb") as file:
        download = _Download(url, file, timeout, monitor)
        retry(download.attempt, download.failure, retries, backoff)


def http_info(url: ShardURL, timeout: float) -> FileInfo:
    """ETag (or else Last-Modified) and length, by a HEAD request.

    Raises:
        ShardError: `timeout`, if the server does not answer.
    """
    try:
        with _opener().open(_request(url, method="HEAD"), timeout=timeout) as response:
            headers = response.headers
            return FileInfo(headers["ETag"] or headers["Last-Modified"], _content_length(headers))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise ShardError("timeout", str(url)) from error
        return FileInfo()


def _content_length(headers: Message) -> int | None:
    """None also for a malformed number: http.client then reads until the connection ends."""
    length: str = headers["Content-Length"] or ""
    return int(length) if length.isascii() and length.isdigit() else None


def _request(url: ShardURL, method: str = "GET") -> Request:
    """A request whose login, if the URL has one, is not repeated to the target of a redirect."""
    parts = urlsplit(url.full)
    login, _, host = parts.netloc.rpartition("@")
    headers = {"User-Agent": "clipstream", "Accept-Encoding": "identity"}
    request = Request(urlunsplit(parts._replace(netloc=host)), headers=headers, method=method)
    if login:
        encoded = base64.b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request
