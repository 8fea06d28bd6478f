"""Download from object stores (s3://, gs://, az://, hf://, …) through fsspec.

Credentials are the backends' own (environment, configuration files, instance roles). A backend is imported on first
use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipstream.errors import ClipstreamError
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.transfer import CHUNK, FileInfo, Monitor, ShardError, disk_error, retry

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)


def knows(scheme: str) -> bool:
    """Whether fsspec has a backend of this name: built in (installed or not) or registered."""
    from fsspec import available_protocols, registry

    return scheme in available_protocols() or scheme in registry


def filesystem_of(url: ShardURL, otherwise: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Args:
        otherwise: the alternative to installing its backend, for the message.

    Raises:
        ShardError: `unknown_scheme` if the backend is not installed; `unreachable` if it connects at once, and cannot.
    """
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url.full)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(url.scheme or "file")
        advice = f"pip install 'clipstream[{extra}]', {otherwise}" if extra else str(error)
        detail = f"{url}: the backend of {url.scheme or 'file'}:// is not installed: {advice}"
        raise ShardError("unknown_scheme", detail) from error
    except Exception as error:  # each backend has its own
        detail = f"{url} cannot be reached: {redact(str(error)) or type(error).__name__}"
        raise ShardError("unreachable", detail) from error
    return system, str(path)


def fetch(url: ShardURL, part: Path, *, retries: int, backoff: float, monitor: Monitor) -> None:
    """Copy an object into `part`. A retry continues after the bytes received while the object's version is the same.

    Retries and backoff are those of `retry`. Time limits are the backend's; if one hangs, the loader notices that
    `monitor` is not called.

    Raises:
        ShardError: `missing`, `unreachable`, `truncated_download`, `disk`, or `unknown_scheme` if the backend is not
            installed.
    """
    download = _Download(url, part, monitor)
    retry(download.attempt, download.failure, retries, backoff)


def object_info(url: ShardURL) -> FileInfo:
    """Version and size of an object. Time limits are the backend's.

    Raises:
        ShardError: `unreachable`, for any error of the backend; `fetch` gives the reason.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url.full)
        size = system.info(path).get("size")
        return FileInfo(str(system.ukey(path)), None if size is None else int(size))
    except (ImportError, ValueError, *_GONE):
        return FileInfo()
    except Exception as error:
        raise ShardError("unreachable", str(url)) from error


class _Download:
    """A local file that grows over several attempts."""

    def __init__(self, url: ShardURL, part: Path, monitor: Monitor) -> None:
        self.url, self.part, self.monitor = url, part, monitor
        self.system, self.path = filesystem_of(url, "or use pipe:COMMAND")
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

    def failure(self, error: Exception) -> tuple[Exception, bool]:
        """The error of an attempt as a ShardError, and whether another attempt may succeed."""
        if isinstance(error, _GONE):
            return ShardError("missing", f"{self.url}: {redact(str(error)) or type(error).__name__}"), False
        if isinstance(error, (ClipstreamError, ShardError)):  # raised by the monitor
            return error, False
        if isinstance(error, OSError) and self.writing:
            return disk_error(self.part, error), False
        # Backends raise errors of their own types.
        reason = "truncated_download" if self.have else "unreachable"
        detail = f"after {self.have:,} bytes: {type(error).__name__}: {redact(str(error))}"
        return ShardError(reason, f"{self.url}: {detail}"), True
