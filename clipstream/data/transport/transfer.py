"""What all transfers share: their errors, their progress monitor, and the delay between retries.

A transfer writes the whole file or raises `ShardError`; the caller removes what a failed one left.
"""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

CHUNK = 1 << 20


class ShardError(Exception):
    """A shard that cannot be opened, counted by `reason`.

    Reasons: `missing`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`, `timeout`,
    `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's), `not_a_tar`, `too_large`.
    `detail` contains no credentials.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)


def disk_error(path: str | Path, error: OSError) -> ShardError:
    """The error of a local file or folder that cannot be written."""
    advice = ": give --data.cache a folder with more space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ShardError("disk", f"cannot write to {path}: {error.strerror or error}{advice}")


class TransferEnded(Exception):
    """A transfer was cancelled; says nothing about the shard."""


class FileInfo(NamedTuple):
    """What a source says about a file: a version that changes with the content, and bytes; None where unknown."""

    version: str | None
    size: int | None


class Monitor(Protocol):
    """Receives the progress of a transfer."""

    def expect(self, size: int) -> None:
        """The file has `size` bytes. Raises SettingsError if the cache cannot hold them."""

    def received(self, size: int) -> None:
        """`size` bytes have arrived so far. Raises SettingsError if the cache cannot hold them."""


def pause(attempt: int, backoff: float) -> None:
    """Sleep before the next attempt: exponential backoff with jitter."""
    time.sleep(backoff * 2**attempt * random.SystemRandom().uniform(0.5, 1.5))
