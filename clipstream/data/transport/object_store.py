"""Download from object stores (s3://, gs://, az://, hf://, …) through fsspec.

Credentials are the backends' own (environment, configuration files, instance roles). A backend is imported on first
use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipstream.data.shard_url import redact
from clipstream.data.transport.transfer import CHUNK, FileInfo, Monitor, ShardError, disk_error, pause
from clipstream.errors import ClipstreamError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)


def knows(scheme: str) -> bool:
    """Whether fsspec has a backend of this name: built in (installed or not) or registered."""
    from fsspec import available_protocols, registry

    return scheme in available_protocols() or scheme in registry


def filesystem_of(url: str, scheme: str, otherwise: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Args:
        otherwise: the alternative to installing its backend, for the message.

    Raises:
        ShardError: `unknown_scheme` if the backend is not installed.
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


def fetch(url: str, scheme: str, part: Path, *, retries: int, backoff: float, monitor: Monitor) -> None:
    """Copy an object into `part`. A retry continues after the bytes received while the object's version is the same.

    Retries and backoff are those of `fetch_http`. Time limits are the backend's; if one hangs, the loader notices that
    `monitor` is not called.

    Raises:
        ShardError: `missing`, `unreachable`, `truncated_download`, `disk`, or `unknown_scheme` if the backend is not
            installed.
    """
    shown = redact(url)
    system, path = filesystem_of(url, scheme, "or use pipe:COMMAND")
    transfer = _Transfer(system, path, part, monitor)
    for attempt in range(retries + 1):
        try:
            return transfer.attempt()
        except _GONE as error:
            raise ShardError("missing", f"{shown}: {redact(str(error)) or type(error).__name__}") from error
        except (ClipstreamError, ShardError):  # raised by the monitor
            raise
        except Exception as error:  # backends raise errors of their own types
            if isinstance(error, OSError) and transfer.writing:
                raise disk_error(part, error) from error
            reason = "truncated_download" if transfer.have else "unreachable"
            detail = f"{shown}: after {transfer.have:,} bytes: {type(error).__name__}: {redact(str(error))}"
            if attempt == retries:
                raise ShardError(reason, detail) from error
        pause(attempt, backoff)


def object_info(url: str) -> FileInfo:
    """Version and size of an object. Time limits are the backend's.

    Raises:
        ShardError: `unreachable`, for any error of the backend; `fetch` gives the reason.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
        size = system.info(path).get("size")
        return FileInfo(str(system.ukey(path)), None if size is None else int(size))
    except (ImportError, ValueError, *_GONE):
        return FileInfo(None, None)
    except Exception as error:
        raise ShardError("unreachable", redact(url)) from error


class _Transfer:
    """A local file that grows over several attempts."""

    def __init__(self, system: Any, path: str, part: Path, monitor: Monitor) -> None:
        self.system, self.path, self.part, self.monitor = system, path, part, monitor
        self.have = 0
        self.version: str | None = None
        self.writing = False

    def attempt(self) -> None:
        info = self.system.info(self.path)
        version, size = str(self.system.ukey(self.path)), info.get("size")
        if version != self.version:
            self.have, self.version = 0, version
        if size is not None:
            self.monitor.expect(size)
        with self.system.open(self.path, "rb") as source, open(self.part, "r+b") as file:
            source.seek(self.have)
            file.seek(self.have)
            file.truncate()
            while data := source.read(CHUNK):
                self.writing = True
                file.write(data)
                self.writing = False
                self.have += len(data)
                self.monitor.received(self.have)
        if size is not None and self.have != size:
            raise EOFError(f"{self.have:,} of {size:,} bytes received")
        if str(self.system.ukey(self.path)) != version:  # the parts may belong to different versions
            raise EOFError("it changed during the download")
