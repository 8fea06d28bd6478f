"""Owns the word of warning when training waits for data: which stage is slow, what would help, what it has cost.

A sink like the others, on rank 0. It never ends a run, and warns once; it says so when the waiting is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from clipstream.plugins import is_plugin, load_function
from clipstream.report.progress import duration, milliseconds
from clipstream.report.sinks import Record

PATIENCE = 3  # training lines in a row that wait too long
MOMENT = 30.0  # s; what waits less than this in all is no news
_ADVICE = {
    "open": "shards come slowly: keep them on a local disk (--data.cache FOLDER), take larger shards or a smaller "
    "--data.shuffle.shards, or more --workers",
    "order": "the order is computed for long: fewer, larger shards help",
    "read": "the disk is slow: a local disk, or more --workers",
    "transform": "your transform (data.sources.NAME.transform) is slow: make it faster, or take more --workers",
    "decode": "pictures are decoded slowly: more --workers, or smaller pictures in the shards",
    "tokenize": "the tokenizer is slow: one of the Hub with a tokenizer.json, or more --workers",
}


class Starving:
    """Watches the training lines.

    Args:
        share: of the time that may be waited for data.
        ranks: of the run; while one waits, all do.
        hook: called with the warning besides: `module:function`, or a shell command, which finds it in
            $CLIPSTREAM_ALERT.
    """

    def __init__(self, share: float, ranks: int, hook: str | None = None) -> None:
        self._share, self._ranks, self._hook = share, ranks, hook
        self._lost = 0.0  # s, of the run
        self._lines, self._streak = 0, 0.0  # that wait too long without a break, and s that they waited
        self._warned = False

    def write(self, record: Record) -> None:
        """Take a training line with its stages."""
        if "stages" not in record:
            return
        waited = record["data_wait"] * record["seconds"]
        self._lost += waited
        if record["data_wait"] <= self._share:
            if self._warned:
                _say(f"training no longer waits for data (step {record['step']}); {self._cost()}")
            self._lines, self._streak, self._warned = 0, 0.0, False
            return
        self._lines += 1
        self._streak += waited
        if self._lines >= PATIENCE and self._streak >= MOMENT and not self._warned:
            self._warned = True
            self._warn(record)

    def close(self) -> None:
        """Say what the waiting cost, if there was much."""
        if self._warned:
            _say(f"training waited for data to the end; {self._cost()}")

    def _warn(self, record: Mapping[str, Any]) -> None:
        # Not the line's bottleneck: where less is waited than counts there, that is training.
        stage = next(stage for stage in record["stages"] if stage in _ADVICE)
        took = record["stages"][stage]
        times = f"{milliseconds(took['p50'])} at p50, {milliseconds(took['p99'])} at p99"
        text = (
            f"training waits for data {record['data_wait']:.0%} of its time (step {record['step']}): most of the "
            f"workers' time goes into {stage!r}, {times}; {self._cost()}. {_ADVICE[stage]}"
        )
        _say(f"warning: {text}")
        if self._hook is not None:
            try:
                _call(self._hook, text)
            except Exception as error:  # a user's own; training is more important
                _say(f"warning: log.alert {self._hook!r} failed: {type(error).__name__}: {error}")

    def _cost(self) -> str:
        return f"{duration(self._lost * self._ranks)} of {self._ranks} rank{'s' * (self._ranks > 1)} lost so far"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _call(hook: str, text: str) -> None:
    if is_plugin(hook):
        load_function(hook)(text)
    else:
        # Not waited for: a slow command must not hold training up.
        subprocess.Popen(hook, shell=True, env={**os.environ, "CLIPSTREAM_ALERT": text}, stdin=subprocess.DEVNULL)
