"""A server of small files on loopback that can damage, stall and end transfers."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections import Counter

from tests.support.ranks import TIMEOUT


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a site's bytes, with ETags."""

    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        self.site.asked[f"{self.command} {name}"] += 1
        body = self.site.bodies.get(name)
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
            self.wfile.write(body[:3000])
            self.wfile.flush()
            if name in self.site.stuck:
                self.site.free.wait(TIMEOUT)
            self.wfile.write(body[3000:])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Site:
    """A server on loopback: `bodies` by name, `damaged` so many times, `stuck` in the middle until `free` is set."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.damaged: Counter[str] = Counter()
        self.stuck: set[str] = set()
        self.free = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, self))
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop; whoever asks then is refused."""
        self.free.set()
        self.server.shutdown()
        self.server.server_close()
