"""What all transfers share: their errors, their progress monitor, and their retries.

A transfer writes the whole file or raises `ShardError`; the caller removes what a failed one left.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CHUNK = 1 << 20
GIB = 1 << 30


class ShardError(Exception):
    """A shard that cannot be opened, counted by `reason`.

    Reasons: `missing`, `unreadable` (local), `unreachable`, `http_404` and so on, `truncated_download`, `timeout`,
    `pipe_failed`, `unknown_scheme`, `bad_gzip`, `bad_zstd`, `disk` (the cache's), `not_a_tar`, `too_large`.
    `detail` contains no credentials.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def unreadable(path: str | Path, error: OSError) -> ShardError:
    """The error of a local shard that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ShardError("missing", f"{path} is not there")
    return ShardError("unreadable", f"{path}: {error.strerror}")


def disk_error(path: str | Path, error: OSError) -> ShardError:
    """The error of a local file or folder that cannot be written."""
    advice = ": give --data.cache a folder with more space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ShardError("disk", f"cannot write to {path}: {error.strerror or error}{advice}")


class TransferEnded(Exception):
    """A transfer was cancelled; says nothing about the shard."""


class FileInfo(NamedTuple):
    """What a source says about a file: a version that changes with the content, and bytes; None where unknown."""

    version: str | None = None
    size: int | None = None


class Monitor:
    """Receives the progress of a transfer; what it raises ends the transfer."""

    def expect(self, size: int) -> None:
        """The file has `size` bytes."""

    def received(self, size: int) -> None:
        """`size` bytes have arrived so far."""


def pause(attempt: int, backoff: float) -> None:
    """Sleep before the next attempt: exponential backoff with jitter."""
    time.sleep(backoff * 2**attempt * random.SystemRandom().uniform(0.5, 1.5))


def retry(
    attempt: Callable[[], None], failure: Callable[[Exception], tuple[Exception, bool]], retries: int, backoff: float
) -> None:
    """Call `attempt` until it succeeds, up to `retries` times more.

    Args:
        failure: the error to raise for one of `attempt`, and whether another attempt may succeed.
        backoff: approximate seconds before the first retry, doubled for each one.
    """
    for number in range(retries + 1):
        try:
            return attempt()
        except Exception as error:
            told, transient = failure(error)
            if not transient or number == retries:
                if told is error:
                    raise
                raise told from error
        pause(number, backoff)
