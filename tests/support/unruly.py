"""A server on loopback that behaves as servers, proxies and networks do at their worst.

What it does to a path is drawn, request by request, from a generator of the path's own.
"""

from __future__ import annotations

import contextlib
import http.server
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

LOGIN = "Basic dTpwIHc="  # u:p w
STALL = 1.2  # s; longer than a client of these tests waits
FAULTS = (
    "cut", "reset", "stall", "delay", "throttle", "404", "403", "503", "429", "change", "change and cut", "long",
    "short", "ignore range", "other range", "other version after a change", "no length",
    "no length and cut", "chunked and cut", "not http", "empty",
)  # fmt: skip


@dataclass
class FaultyFile:
    """A file of the server, and what happens to requests for it.

    Attributes:
        versions: the bytes that it serves, one after the other as the file changes.
        tags: how a version is told: 'etag', 'weak', 'date' or 'none'.
        draws: its own.
        share: of requests with a fault.
        kinds: the faults that are drawn from.
        script: what is done to the first requests, before anything is drawn.
        version: the present one.
        done: what was done, by kind.
        asked: the ranges of the requests.
    """

    versions: list[bytes]
    tags: str
    draws: random.Random
    share: float = 0.6
    kinds: tuple[str, ...] = FAULTS
    script: list[str] = field(default_factory=list)
    version: int = 0
    done: Counter[str] = field(default_factory=Counter)
    asked: list[str | None] = field(default_factory=list)


class Unruly:
    """A running server.

    Args:
        stall: seconds that a body stops for, before its connection ends.

    Attributes:
        files: by path; any other path is 404.
        on_stall: called when a body stops to come.
    """

    def __init__(self, stall: float = STALL) -> None:
        self.stall = stall
        self.ended = threading.Event()
        self.files: dict[str, FaultyFile] = {}
        self.on_stall: Callable[[], object] = lambda: None
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def put(self, name: str, file: FaultyFile) -> str:
        self.files[f"/{name}"] = file
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.socket.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    site: Unruly

    def do_GET(self) -> None:
        file = self.site.files.get(self.path)
        if file is None:
            self.send_error(404)
            return
        draws = file.draws
        kind = draws.choice(file.kinds) if draws.random() < file.share else "whole"
        kind = file.script.pop(0) if file.script else kind
        file.done[kind] += 1
        file.asked.append(self.headers["Range"])
        if "change" in kind:
            file.version = min(file.version + 1, len(file.versions) - 1)
        self._answer(file, kind)

    def do_HEAD(self) -> None:
        """What a GET of the present version would begin with."""
        self._head(self.site.files[self.path], "whole")

    def _answer(self, file: FaultyFile, kind: str) -> None:
        draws = file.draws
        if kind.isdigit():
            self.send_error(int(kind))
        elif kind.startswith("<"):
            self.send_response(403)
            self.send_header("Content-Length", str(len(kind)))
            self.end_headers()
            self.wfile.write(kind.encode())
        elif kind == "login" and self.headers["Authorization"] != LOGIN:
            self.send_error(401)
        elif kind == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "nowhere://there/0.tar?token=HIDDEN")
            self.end_headers()
        elif kind == "not http":
            self.wfile.write(b"\x15\x03\x01\0\x02\x02\x16 no protocol of yours\r\n\r\n")
        elif kind == "empty":
            self.close_connection = True
        else:
            if kind == "delay":
                time.sleep(draws.uniform(0.0, 0.1))
            body = self._head(file, kind)
            if kind in ("cut", "change and cut", "no length and cut", "reset", "stall", "chunked and cut"):
                body = body[: draws.randrange(len(body) + 1)]
            self._send(body, kind, draws)

    def _head(self, file: FaultyFile, kind: str) -> bytes:
        """Send the headers; the bytes that should follow."""
        whole = file.versions[file.version]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        start = 0 if asked is None or kind == "ignore range" else int(asked[1])
        if start >= len(whole):
            self.send_error(416)
            return b""
        if start and self.headers["If-Range"] != self._tag(file) and not kind.startswith("other version"):
            start = 0
        told = start
        if start and kind == "other range":
            start = told = file.draws.randrange(len(whole))
        body = whole[start:]
        self.send_response(206 if asked is not None and (start or kind == "other range") else 200)
        if self._status == 206:
            self.send_header("Content-Range", f"bytes {told}-{len(whole) - 1}/{len(whole)}")
        length = len(body)
        if kind == "long":
            length += file.draws.randrange(1, 2000)
        elif kind == "short":
            length = file.draws.randrange(length)
        if kind == "chunked and cut":
            self.send_header("Transfer-Encoding", "chunked")
        elif not kind.startswith("no length"):
            self.send_header(
                "Content-Length", kind.removeprefix("length ") if kind.startswith("length ") else str(length)
            )
        if (tag := self._tag(file)) is not None:
            self.send_header("Last-Modified" if file.tags == "date" else "ETag", tag)
        self.end_headers()
        return body

    def send_response(self, code: int, message: str | None = None) -> None:
        self._status = code
        super().send_response(code, message)

    def _tag(self, file: FaultyFile) -> str | None:
        if file.tags == "none":
            return None
        if file.tags == "date":
            return f"Mon, 0{file.version + 1} Jun 2026 10:00:00 GMT"
        return f'{"W/" if file.tags == "weak" else ""}"{file.version}"'

    def _send(self, body: bytes, kind: str, draws: random.Random) -> None:
        if kind == "chunked and cut":
            body = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 999]), body[i : i + 999])
                            for i in range(0, len(body), 999))  # fmt: skip
        try:
            if kind == "throttle":
                step = len(body) // 8 + 1
                for i in range(0, len(body), step):
                    self.wfile.write(body[i : i + step])
                    time.sleep(0.01)
            else:
                self.wfile.write(body)
            self.wfile.flush()
            if kind == "stall":
                self.site.on_stall()
                self.site.ended.wait(self.site.stall)
            elif kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
        except OSError:
            pass  # the client has gone
        self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Say nothing."""
