"""A server on loopback behind a shard cache."""

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


class Versions(http.server.BaseHTTPRequestHandler):
    """Serves bytes by path, with an ETag; counts what was asked for. The second half waits at the path's gate."""

    def __init__(
        self, bodies: dict[str, bytes], asked: Counter[str], gates: dict[str, threading.Event], *args: object
    ) -> None:
        self.bodies, self.asked, self.gates = bodies, asked, gates
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked[f"{self.command} {self.path}"] += 1
        body = self.bodies[self.path]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: SIZE // 2])
            if self.path in self.gates:
                self.gates[self.path].wait(TIMEOUT)
            self.wfile.write(body[SIZE // 2 :])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Site:
    """A running server."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        handler = functools.partial(Versions, self.bodies, self.asked, self.gates)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(self, name: str, body: bytes) -> str:
        """Serve bytes under a name; its URL."""
        self.bodies[f"/{name}"] = body
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def put_slowly(self, name: str, body: bytes) -> tuple[str, threading.Event]:
        """As `put`; the second half comes when the event is set."""
        gate = self.gates[f"/{name}"] = threading.Event()
        return self.put(name, body), gate

    def close(self) -> None:
        """Stop."""
        for gate in self.gates.values():
            gate.set()
        self.server.shutdown()
        self.server.server_close()


def body(number: int) -> bytes:
    return HEADER + random.Random(number).randbytes(SIZE - len(HEADER))
