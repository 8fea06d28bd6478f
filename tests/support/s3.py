"""An S3 server (moto's) on loopback, behind a proxy that answers requests wrongly, or not at all, if told to."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

boto3: Any = pytest.importorskip("boto3")
moto: Any = pytest.importorskip("moto.server")
s3fs: Any = pytest.importorskip("s3fs")

BUCKET = "bucket"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
}  # fmt: skip
_XML = "<?xml version='1.0' encoding='UTF-8'?>"
_LISTING = f"{_XML}<ListBucketResult><Name>{BUCKET}</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
ANSWERS = {  # fault -> status and body, as S3 gives them; an answer to HEAD has no body
    "503": (503, f"{_XML}<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "expired": (400, f"{_XML}<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"),
    "unknown key": (403, f"{_XML}<Error><Code>InvalidAccessKeyId</Code><Message>No such key id.</Message></Error>"),
    "denied": (403, f"{_XML}<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
    "404": (404, f"{_XML}<Error><Code>NoSuchKey</Code><Message>The key does not exist.</Message></Error>"),
    "empty": (200, f"{_LISTING}</ListBucketResult>"),
}


@dataclass
class Request:
    """A request to the proxy."""

    method: str
    path: str  # with the query
    number: int  # from 0
    key: str  # id of the caller's access key

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type" in self.path


class S3:
    """The server and its proxy.

    Attributes:
        url: of the proxy.
        fault: returns what happens to a request: None, a key of ANSWERS, 'hang' or 'reset'.
        left: bytes of uploads that are taken; then the proxy is dead, for all requests. None for no limit.
        before: called with each request before it is passed on.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Request], str | None] = lambda request: None
        self.before: Callable[[Request], object] = lambda request: None
        self.left: int | None = None
        self.hung = True  # whether requests wait without an end, or may be another server's
        self.requests: list[Request] = []
        self.ended = threading.Event()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        _, self.port = self._moto.get_host_and_port()
        handler = type("Handler", (_Handler,), {"site": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has gone
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.client: Any = boto3.client(  # past the proxy
            "s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1", aws_access_key_id="own",
            aws_secret_access_key="own",
        )  # fmt: skip

    def clear(self) -> None:
        """Begin anew with an empty bucket and no fault."""
        S3.heal(self)
        if self.hung:  # the connections of s3fs are taken
            s3fs.S3FileSystem.clear_instance_cache()
        self.hung = False
        with contextlib.suppress(self.client.exceptions.NoSuchBucket):
            for name in self.names():
                self.client.delete_object(Bucket=BUCKET, Key=name)
        self.client.create_bucket(Bucket=BUCKET)

    def heal(self) -> None:
        """End all faults."""
        self.fault, self.before, self.left = (lambda request: None), (lambda request: None), None
        self.requests.clear()

    def names(self, prefix: str = "") -> list[str]:
        """The keys of the objects in the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", ())]

    def put(self, name: str, content: bytes) -> str:
        """Write an object; its URL."""
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)
        return f"s3://{BUCKET}/{name}"

    def get(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def environment(self) -> dict[str, str]:
        """The variables with which a process finds the proxy."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.socket.close()
        self._moto.stop()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of an answer waits 40 ms for the client's word on its headers
    site: S3

    def _answer(self) -> None:
        site, asked = self.site, self.headers
        key = (asked["Authorization"] or "").partition("Credential=")[2].partition("/")[0]
        request = Request(self.command, self.path, len(site.requests), key)
        site.requests.append(request)
        fault = site.fault(request)
        body = self._body()
        if fault == "hang":
            site.hung = True
            site.ended.wait(600)
        if body is None or fault in ("hang", "reset"):
            self.close_connection = True
            return
        if fault is not None:
            status, text = ANSWERS[fault]
            self._send(status, [("Content-Type", "application/xml")], text.encode())
            return
        site.before(request)
        onward = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        with contextlib.closing(onward):
            onward.request(self.command, self.path, body, {name: text for name, text in asked.items()})
            answer = onward.getresponse()
            content = answer.read()
            self._send(answer.status, answer.getheaders(), content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self) -> bytes | None:
        """The body of the request; None once the proxy is dead."""
        length, site = int(self.headers["Content-Length"] or 0), self.site
        if site.left is None:
            return self.rfile.read(length)
        took = self.rfile.read(min(length, site.left))
        site.left -= len(took)
        return took if site.left else None

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        sent = {name.lower() for name, _ in headers}
        for name, text in headers:
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, text)
        if "content-length" not in sent:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def write_keys(folder: Path, key: str) -> None:
    """The file of credentials in a folder, whose key has this id."""
    content = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = hidden\naws_session_token = t\n"
    (folder / "keys").write_text(content)


def use_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let s3fs read credentials from the file of `write_keys`, whose key is OLD now."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "keys"))
    write_keys(folder, "OLD")
    s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def running() -> Iterator[S3]:
    """A server, which s3fs finds by the environment of `S3.environment`."""
    site = S3()
    try:
        yield site
    finally:
        site.close()
        if "s3" in fsspec.registry:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
