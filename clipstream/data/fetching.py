"""Owns the choice of a transfer for a URL: what the source says of a shard, and all of it into a file, unpacked.

Also the schemes that are webdataset's, or a user's own.
It knows which hosts never answered, so that nobody waits for them at length again and again. It never keeps a file,
and never looks inside the tar.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from clipstream.data import buckets
from clipstream.data.commands import run_pipe
from clipstream.data.packed import packing, unpack
from clipstream.data.shards import local_path, redact, scheme_of
from clipstream.data.transfer import (
    CHUNK,
    About,
    ShardError,
    Watch,
    fetch_http,
    host_of,
    http_about,
)
from clipstream.errors import ClipstreamError


class Fetcher:
    """Brings shards from where they are, local ones too. Picklable.

    Args:
        timeout: seconds without a new byte after which a transfer is given up.
        retries: how often a failed transfer of http or from a bucket is tried again, from where it stopped if it can.
        backoff: seconds before the first retry; doubled each time.
    """

    def __init__(self, *, timeout: float = 60.0, retries: int = 3, backoff: float = 0.5) -> None:
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._answered: set[str] = set()
        self._silent: set[str] = set()

    def about(self, url: str) -> About:
        """As the function `about`, but nothing where nobody answers; a host that never did is asked once."""
        if (host := host_of(url)) in self._silent:
            return About(None, None)
        try:
            return about(url, self.timeout)
        except ShardError:
            self._note_silence(host)
            return About(None, None)

    def fetch(self, url: str, part: Path, watch: Watch) -> None:
        """Write the whole shard to `part`, without gzip or zstd around it. A failure may leave pieces in `part`.

        Raises:
            ShardError: it is not there, cannot be reached, or came incomplete.
            OSError: it cannot be copied or unpacked for want of room.
        """
        scheme = scheme_of(url) or ""
        if (named := local_path(url)) is not None:
            _copy(Path(named), part, watch)
        elif scheme == "pipe":
            run_pipe(url[len("pipe:") :], part, timeout=self.timeout, watch=watch)
        elif scheme in ("http", "https") and not _has_own_handler(scheme):
            self._fetch_http(url, part, watch)
        elif buckets.knows(scheme) and not _has_own_handler(scheme):
            buckets.fetch(url, scheme, part, retries=self.retries, backoff=self.backoff, watch=watch)
        else:
            _fetch_gopen(url, scheme, part, watch=watch)
        if packing(part) is not None:
            unpacked = part.with_suffix(".unpacked.part")
            size = part.stat().st_size
            try:
                unpack(part, unpacked, lambda more: watch.came(size + more))
                unpacked.replace(part)
            finally:
                unpacked.unlink(missing_ok=True)

    def _fetch_http(self, url: str, part: Path, watch: Watch) -> None:
        retries = 0 if (host := host_of(url)) in self._silent else self.retries
        try:
            fetch_http(url, part, timeout=self.timeout, retries=retries, backoff=self.backoff, watch=watch)
        except ShardError as error:
            if error.reason in ("timeout", "unreachable"):
                self._note_silence(host)
            raise
        self._answered.add(host)
        self._silent.discard(host)

    def _note_silence(self, host: str) -> None:
        """A host that never answered is not waited for at length again and again."""
        if host not in self._answered:
            self._silent.add(host)


def about(url: str, timeout: float) -> About:
    """What the source says of a shard, without fetching it; nothing of a command, or of what is not there.

    Raises:
        ShardError: nothing answers.
    """
    if (named := local_path(url)) is not None:
        try:
            stat = os.stat(named)
        except OSError:
            return About(None, None)
        return About(f"{stat.st_mtime_ns}-{stat.st_size}", stat.st_size)
    scheme = scheme_of(url) or ""
    if _has_own_handler(scheme):
        return About(None, None)
    if scheme in ("http", "https"):
        return http_about(url, timeout)
    return buckets.about(url) if buckets.knows(scheme) else About(None, None)


def _copy(path: Path, part: Path, watch: Watch) -> None:
    with ExitStack() as stack:
        try:
            source = stack.enter_context(open(path, "rb"))
        except FileNotFoundError as error:
            raise ShardError("missing", f"{path} is not there") from error
        except OSError as error:
            raise ShardError("unreadable", f"{path}: {error.strerror}") from error
        file = stack.enter_context(open(part, "wb"))
        while data := _read(source, path):
            file.write(data)
            watch.came(file.tell())


def _read(source: IO[bytes], path: Path) -> bytes:
    try:
        return source.read(CHUNK)
    except OSError as error:
        raise ShardError("unreadable", f"{path}: {error.strerror}") from error


def _fetch_gopen(url: str, scheme: str, part: Path, *, watch: Watch) -> None:
    """Copy what webdataset's handler of the scheme gives; of a command behind it only exit status 0 counts.

    It has no time limit of its own: a handler that hangs is found by the loader's, where `watch` is not called.

    Raises:
        ShardError: no handler for the scheme, or it fails.
    """
    # Late, because webdataset imports torch.
    module = importlib.import_module("webdataset.gopen")
    schemes: dict[str, Any] = module.gopen_schemes
    if scheme not in schemes:
        hint = "use pipe:COMMAND, or register one in webdataset.gopen.gopen_schemes"
        raise ShardError("unknown_scheme", f"{redact(url)}: no handler for {scheme}://; {hint}")
    try:
        stream = module.gopen(url, "rb")
        with open(part, "wb") as file:
            while data := stream.read(CHUNK):
                file.write(data)
                watch.came(file.tell())
        stream.close()
        child = getattr(stream, "proc", None)
    except ClipstreamError:
        raise
    except Exception as error:  # a user's handler may raise anything
        raise ShardError("unreachable", f"{redact(url)}: {type(error).__name__}: {redact(str(error))}") from error
    if child is not None and child.returncode != 0:
        raise ShardError("pipe_failed", f"{redact(url)}: exit status {child.returncode}")


def _has_own_handler(scheme: str) -> bool:
    """Whether a user put a handler of their own in place of webdataset's for a scheme."""
    module = sys.modules.get("webdataset.gopen")  # not imported: nobody can have registered one
    handler = None if module is None else module.gopen_schemes.get(scheme)
    return handler is not None and getattr(handler, "__module__", "") != "webdataset.gopen"
