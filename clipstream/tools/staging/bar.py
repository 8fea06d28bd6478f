"""The progress of staging: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from clipstream.report.terminal import duration
from clipstream.utils.escape import printable_lines

LINES_EVERY = 10.0  # s between two lines where there is no terminal
REFRESH = 0.2  # s between two updates of the bar


class Bar:
    """The progress of work on shards.

    Args:
        label: of the work.
        sizes: bytes of each shard; None if unknown.
        stream: standard output unless given.
    """

    def __init__(self, label: str, sizes: Sequence[int | None], stream: TextIO | None = None) -> None:
        self.label, self.sizes = label, sizes
        known = [size for size in sizes if size is not None]
        # The output of a command has an unknown size: the mean of the others is assumed.
        self.size = sum(known) * len(sizes) // len(known) if known else None
        self._about = "" if len(known) == len(sizes) else "about "
        self.stream = sys.stdout if stream is None else stream
        self._done = self._failed = self._bytes = 0
        self._coming: dict[int, int] = {}
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None
        if self.stream.isatty():
            columns = TextColumn(label), BarColumn(), TextColumn("{task.description}")
            # Without a refreshing thread, as processes are forked while the bar is shown.
            self._bar = Progress(*columns, console=Console(file=self.stream, force_terminal=True), auto_refresh=False)
            self._task = self._bar.add_task(self._words(), total=1.0)
            self._bar.start()

    def received(self, number: int, amount: int) -> None:
        """Set the bytes of a shard, at most its size: a transfer that decompresses may exceed it."""
        size = self.sizes[number]
        self._coming[number] = amount if size is None else min(amount, size)
        self.pulse()

    def done(self, number: int, failed: bool = False) -> None:
        """Count a shard as done."""
        received = self._coming.pop(number, 0)
        size = self.sizes[number]
        self._bytes += received if failed or size is None else size
        self._done += 1
        self._failed += failed
        self.pulse()

    def pulse(self) -> None:
        """Update the display if it is due."""
        now = time.monotonic()
        if now - self._said < (REFRESH if self._bar else LINES_EVERY):
            return
        self._said = now
        if self._bar is not None:
            self._bar.update(self._task, completed=self._share, description=self._words(), refresh=True)
        else:
            self.say(f"{self.label}: {self._words()}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        text = printable_lines(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._share, description=self._words(), refresh=True)
            self._bar.stop()

    @property
    def _here(self) -> int:
        return self._bytes + sum(self._coming.values())

    @property
    def _share(self) -> float:
        """Progress from 0 to 1, by bytes if sizes are known, else by shards."""
        return min(1.0, self._here / self.size if self.size else self._done / max(1, len(self.sizes)))

    def _words(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        parts = [f"{self._done:,} of {len(self.sizes):,} shards"]
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        if self._here:
            parts.append(f"{decimal(self._here)}{f' of {self._about}{decimal(self.size)}' if self.size else ''}")
            parts.append(f"{decimal(int(self._here / seconds))}/s")
        if 0 < (share := self._share) < 1:
            parts.append(f"{duration(seconds * (1 - share) / share)} left")
        return "  ".join(parts)
