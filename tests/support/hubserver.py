"""A Hub on loopback: the part of its protocol that lists and serves files, and takes small ones.

Files lie in a folder a repository and revision: SERVED/ORG/NAME/REVISION/FILE, where `main` names the newest commit.
Data sets lie below SERVED/datasets.
Large files are redirected to another path, as the Hub sends them to its storage.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGE = 4096  # bytes from which a file is redirected


@dataclass
class Behaviour:
    """What the Hub does beside giving files.

    Attributes:
        gated: repositories whose files are refused, but for `token`.
        token: what opens them.
        cuts: how many bodies of large files are still to be cut in the middle.
        out: whether storage answers nothing but 503.
        asked: requests so far: method, path, and the Range asked for.
    """

    gated: set[str] = field(default_factory=set)
    token: str = "let-me-in"
    cuts: int = 0
    out: bool = False
    asked: list[tuple[str, str, str]] = field(default_factory=list)


@contextmanager
def serve(served: Path) -> Iterator[tuple[str, Behaviour]]:
    """A running Hub: its address, and its behaviour, which may be changed while it runs."""
    behaviour = Behaviour()

    class Handler(_Handler):
        folder = served
        state = behaviour

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", behaviour
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    folder: Path
    state: Behaviour

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        """Takes a new repository, and a commit of files, which are small enough to be part of it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.state.asked.append(("POST", self.path, ""))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.headers.get("Authorization") != f"Bearer {self.state.token}":
            return self.reply(401, **{"X-Error-Message": "Invalid username or password."})
        if parts[1:] == ["repos", "create"]:
            told = json.loads(body)
            name = "/".join(filter(None, (told.get("organization"), told["name"])))
            return self.say({"url": f"http://127.0.0.1:{self.server.server_address[1]}/{name}"})
        if parts[1] == "validate-yaml":
            return self.say({"errors": [], "warnings": []})
        repo = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.say({"files": [{**file, "shouldIgnore": False} for file in files]})
        commit = self.folder / repo / ("c" * 40)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = commit / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        (commit.parent / "main").symlink_to(commit)
        url = f"http://127.0.0.1:{self.server.server_address[1]}/{repo}/commit/{commit.name}"
        return self.say({"commitUrl": url, "commitOid": commit.name, "pullRequestUrl": None, "success": True})

    def answer(self, body: bool) -> None:
        self.state.asked.append((self.command, self.path, self.headers.get("Range", "")))
        parts = self.path.strip("/").split("/")
        if self.path == "/":
            return self.reply(200)
        if parts[0] == "storage":
            return self.give(self.folder.joinpath(*parts[1:]), body)
        if parts[0] == "api":
            return self.tell(parts[1], "/".join(parts[2:4]), [part.partition("?")[0] for part in parts[4:]])
        kind = parts.pop(0) if parts[0] == "datasets" else ""
        if len(parts) < 5 or parts[2] != "resolve":
            return self.reply(404, **{"X-Error-Code": "RepoNotFound"})
        repo, revision, name = "/".join([kind, *parts[:2]]).strip("/"), parts[3], "/".join(parts[4:])
        if not self.folder.joinpath(repo).is_dir():
            return self.reply(401, **{"X-Error-Code": "RepoNotFound"})
        if repo in self.state.gated and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            return self.reply(403, **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        home = self.folder / repo / revision
        if not home.exists():
            return self.reply(404, **{"X-Error-Code": "RevisionNotFound"})
        file = home / name
        commit = home.resolve().name
        if not file.is_file():
            return self.reply(404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if file.stat().st_size < LARGE:
            return self.give(file, body, **{"X-Repo-Commit": commit})
        linked = {"X-Repo-Commit": commit, "X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": _etag(file)}
        # To another host, as there: the client follows redirects on one host, and takes the last answer's headers.
        path = file.resolve().relative_to(self.folder.resolve())
        return self.reply(302, Location=f"http://localhost:{self.server.server_address[1]}/storage/{path}", **linked)

    def tell(self, kind: str, name: str, rest: list[str]) -> None:
        """What the Hub's interface says of a data set: its revision with all files, or what lies in a folder of it."""
        home = self.folder / kind / name / (rest[1] if rest else "main")
        if not home.exists():
            return self.reply(404, **{"X-Error-Code": "RevisionNotFound" if home.parent.exists() else "RepoNotFound"})
        if rest[:1] != ["tree"]:
            names = sorted(str(file.relative_to(home)) for file in home.rglob("*") if file.is_file())
            siblings = [{"rfilename": found} for found in names]
            return self.say({"id": name, "sha": home.resolve().name, "siblings": siblings, "private": False})
        place = home.joinpath(*rest[2:])
        if not place.is_dir():
            return self.reply(404, **{"X-Error-Code": "EntryNotFound"})
        found = place.rglob("*") if "recursive=true" in self.path.lower() else place.iterdir()
        return self.say([self.entry(file, str(file.relative_to(home))) for file in sorted(found)])

    def entry(self, file: Path, path: str) -> dict[str, Any]:
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        return {"type": "file", "path": path, "oid": _etag(file).strip('"')[:40], "size": file.stat().st_size}

    def say(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def give(self, file: Path, body: bool, **headers: str) -> None:
        large = file.stat().st_size >= LARGE
        if self.state.out and large:
            return self.reply(503)
        data = file.read_bytes()
        asked = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        start, whole = int(asked[0] or 0), len(data)
        data = data[: int(asked[2]) + 1] if asked[2] else data
        if partial := start > 0 or len(data) < whole:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{whole}"
        self.send_response(206 if partial else 200)
        headers |= {"ETag": _etag(file), "Content-Length": str(len(data) - start), "Accept-Ranges": "bytes"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return None
        if large and self.state.cuts > 0:
            self.state.cuts -= 1
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
            return None
        self.wfile.write(data[start:])
        return None

    def reply(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(file: Path) -> str:
    return f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"'
