"""The console on which commands print their results."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from clipstream.utils.logs import drop_output


class ResultConsole(Console):
    """A console on standard output, of a fixed width where that is no terminal: rich would wrap at 80 columns, also the
    text that scripts search for. Where its reader has gone (`| head`), further text is dropped, and the command goes
    on to its own exit code.

    Args:
        width: columns where there is no terminal.
        options: of rich's Console.
    """

    def __init__(self, width: int = 160, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)
        if not self.is_terminal:
            self.width = width

    def on_broken_pipe(self) -> None:
        """See rich's Console, whose own method ends the program."""
        self.quiet = True
        drop_output(sys.stdout)
