"""RUN/out.log: the lines that rank 0 shows on the terminal, with time and level, as open_clip writes them.

The messages of the logger `clipstream` enter, and, line by line, what else is printed meanwhile (`Tee`). Redraws of
progress bars and terminal escapes are left out, credentials in URLs are masked, and a full disk loses lines but never
ends a run.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy

from clipstream.data.shard_url import redact
from clipstream.utils.logs import Tee, logger

LOG_FILE = "out.log"
_URL = re.compile(r"\S+://\S+")


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _URL.sub(lambda url: redact(url[0]), record.message)
        return super().formatMessage(record)


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: the message about a full disk would be the next line to be written."""

    def close(self) -> None:
        """Close the file; what a full disk does not take is dropped."""
        with suppress(OSError):
            super().close()


@contextmanager
def printed_above(console: Console) -> Iterator[None]:
    """Have what is printed on a terminal appear above the live display of `console`, as long as the context is open."""
    tees = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Tee) and stream.isatty()]
    before = [tee.terminal for tee in tees]
    for tee in tees:
        tee.terminal = FileProxy(console, tee.terminal)
    try:
        yield
    finally:
        for tee, stream in zip(tees, before, strict=True):
            tee.flush()
            tee.terminal = stream


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Add the lines of this process to FOLDER/out.log, until the context ends.

    Raises:
        OSError: the file cannot be opened.
    """
    handler = _File(folder / LOG_FILE, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S"))
    handler.setLevel(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    before = sys.stdout, sys.stderr
    tees: Any = [Tee(stream) for stream in before]
    sys.stdout, sys.stderr = tees
    try:
        yield
    finally:
        for tee in tees:
            tee.finish()
        sys.stdout, sys.stderr = before
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
