"""Owns the signals that ask a run to end: flagged here, agreed between the ranks and acted on by the loop.

Never saves and never ends a process. Data workers must ignore SIGINT themselves: a terminal sends it to them as well.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Context manager, main thread only: notes SIGTERM, SIGINT and SIGUSR1 instead of ending the process.

    A second SIGINT (Ctrl-C twice) interrupts at once.

    Attributes:
        received: name of the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After a failure the launcher's SIGTERM still has to find a process that ends with its own code.
            if error is None or number != signal.SIGTERM:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
