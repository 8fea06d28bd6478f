"""A clock of the data pipeline that a test moves, in place of the machine's, which goes on while a machine is busy."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import MutableSequence
from types import SimpleNamespace

import pytest

from clipstream.data import pipeline
from clipstream.data.loader import loader, stage_timing

START = 1000.0  # s


class Clock:
    """It stands still until it is advanced, or runs.

    Args:
        monkeypatch: puts it in the place of `time.monotonic` in the pipeline, also in workers that are started then.
        shared: whether all processes have the same clock; else each goes on alone from where its parent's was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shared: bool = True) -> None:
        self._words: MutableSequence[float] = multiprocessing.RawArray("d", 2) if shared else [0.0, 0.0]
        self._words[:] = [START, 0.0]
        for module in (loader, pipeline, stage_timing):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.now, perf_counter=time.perf_counter))

    def now(self) -> float:
        """Seconds."""
        seconds, since = self._words
        return seconds + (time.monotonic() - since if since else 0.0)

    def advance(self, seconds: float) -> None:
        """Go forward; one process at a time may call this."""
        self._words[0] += seconds

    def run(self) -> None:
        """Go on as time does."""
        self._words[1] = self._words[1] or time.monotonic()
