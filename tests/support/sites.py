"""A server of small files on loopback that can damage, hold and end transfers."""

from __future__ import annotations

import functools
import hashlib
import http.server
import random
import threading
from collections import Counter

from tests.support.ranks import TIMEOUT
from tests.support.tars import tar_bytes

SIZE = 40_000
HEADER = tar_bytes([{"__key__": "0", "bin": b"x"}])[:512]  # no transfer goes on that begins otherwise


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a site's bytes, with ETags. The second half of a held file waits at its gate, and a 404 of one too."""

    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        self.site.asked[f"{self.command} {name}"] += 1
        body, gate = self.site.bodies.get(name), self.site.gates.get(name)
        if gate is not None and (body is None or (self.command == "HEAD" and self.site.mute)):
            gate.wait(TIMEOUT)
        if body is None:
            return self.send_error(404)
        if self.site.damaged[name] and self.command == "GET":
            self.site.damaged[name] -= 1
            body = body[:2000] + bytes(1024) + body[3024:]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if gate is not None:
                gate.wait(TIMEOUT)
            self.wfile.write(body[half:])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Site:
    """A running server: `bodies` by name, `damaged` so many times, `gates` of held files by name.

    It does not answer a HEAD of a held file while it is `mute`.
    """

    mute = False

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()  # by method and name
        self.damaged: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, self))
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def put(self, name: str, body: bytes) -> str:
        self.bodies[name] = body
        return f"{self.root}/{name}"

    def put_slowly(self, name: str, body: bytes) -> tuple[str, threading.Event]:
        """As `put`; the second half comes when the event is set."""
        return self.put(name, body), self.hold(name)

    def hold(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.server.shutdown()
        self.server.server_close()


def body(number: int) -> bytes:
    return HEADER + random.Random(number).randbytes(SIZE - len(HEADER))
