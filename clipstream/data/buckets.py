"""Owns the way from an address of object storage (s3://, gs://, az://, hf://, …) to a local file, through fsspec.

Credentials are the backends' own (environment, configuration files, instance roles). It imports a backend when it is
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipstream.data.shards import redact
from clipstream.data.transfer import CHUNK, About, ShardError, Watch, disk_error, pause
from clipstream.errors import ClipstreamError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)


def knows(scheme: str) -> bool:
    """Whether fsspec has a backend of this name, its own (installed or not) or a registered one."""
    from fsspec import available_protocols, registry

    return scheme in available_protocols() or scheme in registry


def system_of(url: str, scheme: str, otherwise: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it.

    Args:
        otherwise: what to do instead of installing its backend, for the message.

    Raises:
        ShardError: `unknown_scheme` where the backend is not installed.
    """
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(scheme)
        advice = f"pip install 'clipstream[{extra}]', {otherwise}" if extra else str(error)
        detail = f"{redact(url)}: the backend of {scheme}:// is not installed: {advice}"
        raise ShardError("unknown_scheme", detail) from error
    return system, str(path)


def fetch(url: str, scheme: str, part: Path, *, retries: int, backoff: float, watch: Watch) -> None:
    """Copy a file of a bucket into `part`; a failure is tried again from where it broke, while the file is the same.

    Retries and backoff are those of `fetch_http`. A backend has its own time limits; one that hangs is found by the
    loader, where `watch` is not called.

    Raises:
        ShardError: `missing`, `unreachable`, `truncated_download`, `disk`, or `unknown_scheme` where the backend is
            not installed.
    """
    shown = redact(url)
    system, path = system_of(url, scheme, "or use pipe:COMMAND")
    transfer = _Transfer(system, path, part, watch)
    for attempt in range(retries + 1):
        try:
            return transfer.attempt()
        except _GONE as error:
            raise ShardError("missing", f"{shown}: {redact(str(error)) or type(error).__name__}") from error
        except ClipstreamError:
            raise
        except Exception as error:  # every backend has errors of its own
            if isinstance(error, OSError) and transfer.writing:
                raise disk_error(part, error) from error
            reason = "truncated_download" if transfer.have else "unreachable"
            detail = f"{shown}: after {transfer.have:,} bytes: {type(error).__name__}: {redact(str(error))}"
            if attempt == retries:
                raise ShardError(reason, detail) from error
        pause(attempt, backoff)


def about(url: str) -> About:
    """What the bucket says of a file. Time limits are the backend's, as above.

    Raises:
        ShardError: `unreachable`: every backend has errors of its own; they are told when the file is fetched.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
        size = system.info(path).get("size")
        return About(str(system.ukey(path)), None if size is None else int(size))
    except (ImportError, ValueError, *_GONE):
        return About(None, None)
    except Exception as error:
        raise ShardError("unreachable", redact(url)) from error


class _Transfer:
    """A local file that grows over several tries."""

    def __init__(self, system: Any, path: str, part: Path, watch: Watch) -> None:
        self.system, self.path, self.part, self.watch = system, path, part, watch
        self.have = 0
        self.version: str | None = None
        self.writing = False

    def attempt(self) -> None:
        info = self.system.info(self.path)
        version, size = str(self.system.ukey(self.path)), info.get("size")
        if version != self.version:
            self.have, self.version = 0, version
        if size is not None:
            self.watch.expect(size)
        with self.system.open(self.path, "rb") as source, open(self.part, "r+b") as file:
            source.seek(self.have)
            file.seek(self.have)
            file.truncate()
            while data := source.read(CHUNK):
                self.writing = True
                file.write(data)
                self.writing = False
                self.have += len(data)
                self.watch.came(self.have)
        if size is not None and self.have != size:
            raise EOFError(f"{self.have:,} of {size:,} bytes came")
        if str(self.system.ukey(self.path)) != version:  # a part may be of the one, a part of the other
            raise EOFError("it changed while it came")
