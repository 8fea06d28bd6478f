"""The console on which commands print their results, and their progress."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from clipstream.text import MESSAGE, printable, printable_lines
from clipstream.utils.logs import drop_output, loading

LINES_EVERY, REFRESH = 10.0, 0.2  # s between two lines of progress, and between two redraws of a bar


class ResultConsole(Console):
    """A console on standard output, `width` columns wide where that is no terminal: rich would wrap at 80, also the
    text that scripts search for. Where its reader has gone (`| head`), further text is dropped, and the command goes
    on to its own exit code.
    """

    def __init__(self, width: int = 160, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)
        if not self.is_terminal:
            self.width = width

    def on_broken_pipe(self) -> None:
        """See rich's Console, whose own method ends the program."""
        self.quiet = True
        drop_output(sys.stdout)


def print_training(words: Iterable[str]) -> str:
    """Print the command that trains on what a verb has checked or made; returns it."""
    command = printable(shlex.join(words), MESSAGE)
    ResultConsole(markup=False).print(f"train on them with: {command}", soft_wrap=True)
    sys.stdout.flush()
    return command


def result_table(title: str, columns: Sequence[str], numbers: Collection[str]) -> Table:
    """An empty table, in which the columns named in `numbers` are aligned to the right, and not wrapped."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        is_number = column in numbers
        made.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    return made


def _print(text: str) -> None:
    print(text, flush=True)


class ProgressBar:
    """The progress of a verb: a bar on a terminal, lines every so many seconds elsewhere. A context manager."""

    def __init__(
        self, label: str, *, shown: bool = True, lines_every: float = LINES_EVERY, say: Callable[[str], object] = _print
    ) -> None:
        self._label, self._said, self._say = label, time.monotonic(), say
        self._every = lines_every if shown else math.inf
        # Without a refreshing thread, as processes are forked while the bar is shown.
        self._bar = Progress(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(force_terminal=True), auto_refresh=False, disable=not (shown and sys.stdout.isatty()),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0, label=label)

    def __enter__(self) -> ProgressBar:
        loading.erase()
        loading.paused = True
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        loading.paused = False

    def update(self, done: int, total: int, text: str | Callable[[], str]) -> None:
        """Show `text`, or what it gives, with the numbers `done` and `total`, unless one was shown a moment ago."""
        now = time.monotonic()
        late = now - self._said >= (self._every if self._bar.disable else REFRESH)
        if late or (done == total and not self._bar.disable):
            self._said, text = now, text if isinstance(text, str) else text()
            if self._bar.disable:
                self.say(f"{self._label}: {text}")
            else:
                self._bar.update(self._task, completed=done / max(1, total), description=text, refresh=True)

    def say(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        if self._bar.disable:
            self._say(printable_lines(text))
        else:
            self._bar.console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)
