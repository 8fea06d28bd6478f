"""The current stage of each worker, and how long the stages take.

    open        a shard is opened, or downloaded
    order       the next samples are looked up, some at once
    read        the members of a sample are read, and its caption is found
    transform   the user's own function, and the caption in its result
    decode      the image, into the batch buffer
    tokenize    the captions of a part of a batch
    hand-over   the part is reported to the loader
    idle        there is no free buffer: training is slower than the data

A stage lasts until the next one begins, so nothing is measured twice and nothing is left out.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from clipstream.text import printable

OPEN, ORDER, READ, IDLE, HAND_OVER = "open", "order", "read", "idle", "hand-over"
STAGES = (OPEN, ORDER, READ, "transform", "decode", "tokenize", HAND_OVER, IDLE)
NUMBER = {stage: number for number, stage in enumerate(STAGES)}
SHORTEST = 1e-6  # s
FINENESS = 4  # buckets to a factor of 2: quantiles are exact within 9%
SLOWEST = 16 << 10  # bytes/s; a slower transfer counts as stalled
WIDEST = 256  # buckets: up to 2^(256 / 4) times the shortest


# Shared words: when the stage began or enough bytes arrived, when any arrived last, how many, the stage, which of the
# names belongs to it (none if negative), the length of the names; then the names.
_SINCE, _CAME, _SIZE, _STAGE, _WHICH, _LENGTH = range(6)
_START = 48  # byte at which the names begin
_SPACE = 1 << 16  # bytes for them
_LONGEST = 500  # characters of a name that are shown
_BETWEEN = "\0"  # separates names


class StageIntervals(NamedTuple):
    """Consecutive stages, not counted yet."""

    numbers: bytes  # of the stages, uint8 [n]
    began: bytes  # when each began, and when the last one ended, float64 [n + 1], s


@dataclass
class StageTimes:
    """How often each stage ran, and how long."""

    seconds: Counter[str] = field(default_factory=Counter)  # stage -> total
    buckets: dict[str, Counter[int]] = field(default_factory=dict)  # stage -> number of a bucket of durations -> count

    def add(self, intervals: Sequence[StageIntervals]) -> None:
        """Count the intervals of stopwatches."""
        if not intervals:
            return
        numbers = np.frombuffer(b"".join(one.numbers for one in intervals), np.uint8).astype(int)
        seconds = np.concatenate([np.diff(np.frombuffer(one.began)) for one in intervals])
        buckets = np.rint(FINENESS * np.log2(np.maximum(seconds, SHORTEST) / SHORTEST)).astype(int)
        counts = np.bincount(numbers * WIDEST + buckets, minlength=len(STAGES) * WIDEST)
        (found,) = counts.nonzero()
        for place, count in zip(found.tolist(), counts[found].tolist(), strict=True):
            self.buckets.setdefault(STAGES[place // WIDEST], Counter())[place % WIDEST] += count
        sums = np.bincount(numbers, seconds, len(STAGES)).tolist()
        for stage in self.buckets:
            self.seconds[stage] += sums[NUMBER[stage]]

    def quantile(self, stage: str, share: float) -> float:
        """A quantile of the stage's durations, s; `share` from 0 to 1."""
        buckets = self.buckets[stage]
        left = share * buckets.total()
        for bucket, count in sorted(buckets.items()):
            left -= count
            if left <= 0:
                return float(SHORTEST * 2 ** (bucket / FINENESS))
        return float(SHORTEST * 2 ** (max(buckets) / FINENESS))

    def summary(self) -> dict[str, dict[str, float]]:
        """{stage: {seconds, count, p50, p99}}; seconds of all workers together."""
        return {
            stage: {
                "seconds": float(self.seconds[stage]),
                "count": buckets.total(),
                "p50": self.quantile(stage, 0.5),
                "p99": self.quantile(stage, 0.99),
            }
            for stage, buckets in sorted(self.buckets.items(), key=lambda item: -self.seconds[item[0]])
        }

    def longest(self) -> str | None:
        """The stage of work (not waiting) that took most time; None if there was none."""
        work = {stage: s for stage, s in self.seconds.items() if stage not in (IDLE, HAND_OVER)}
        return max(work, key=lambda stage: work[stage]) if work else None


class Stopwatch:
    """Measures consecutive stages of one process.

    The current stage is also in shared memory, where the parent process can read it even when this one hangs or is
    dead. It is called several times for each sample, so it keeps flat numbers that are counted later
    (`StageTimes.add`), and names of samples are written together, so that a stage only notes the number of its sample.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _START + _SPACE)
        self._words = memoryview(self._memory).cast("d")
        self._counted = 0  # bytes that had arrived when the stage was last known to progress
        self._began: list[float] = []  # arrays would be smaller and take longer to grow
        self._numbers: list[int] = []

    def begin(self, stage: str, name: str = "") -> None:
        """Begin a stage, at the shard or sample `name`, if any."""
        if name:
            self.name([name])
        self.at(stage, 0 if name else -1)

    def name(self, names: Sequence[str]) -> None:
        """Set the names of the samples that `at` refers to."""
        text = _BETWEEN.join(names).encode(errors="backslashreplace")[:_SPACE]  # file names may hold any bytes
        self._memory[_START : _START + len(text)] = text
        self._words[_LENGTH] = len(text)

    def at(self, stage: str, which: int) -> None:
        """Begin a stage, at sample number `which` of the names that were set; at none if negative."""
        now, number, words = time.monotonic(), NUMBER[stage], self._words
        self._began.append(now)
        self._numbers.append(number)
        words[_STAGE] = number
        words[_WHICH] = which
        words[_SINCE] = now

    def touch(self, size: int) -> None:
        """Note the bytes that a download has; it counts as progress only at `SLOWEST` or faster."""
        now, words = time.monotonic(), self._words
        if size < self._counted:  # of the next shard
            self._counted = 0
        words[_SIZE], words[_CAME] = size, now
        if size - self._counted >= SLOWEST * (now - words[_SINCE]):
            words[_SINCE], self._counted = now, size

    def doing(self) -> tuple[str, float]:
        """The current stage with its sample, and the seconds since it began or last progressed."""
        since, came, size, stage, which, length = self._words[: _LENGTH + 1]
        if not since:
            return "start", 0.0
        text = STAGES[int(stage)]
        if which >= 0:
            names = self._memory[_START : _START + int(length)].decode(errors="replace").split(_BETWEEN)
            # The names may just have been replaced by fewer.
            text += " " + (printable(names[int(which)][:_LONGEST], _LONGEST) if which < len(names) else "?")
        return f"{text}{f' ({size:,.0f} bytes came)' if came >= since else ''}", time.monotonic() - since

    def take(self) -> StageIntervals:
        """The intervals since the last call; the current stage goes on."""
        intervals = StageIntervals(bytes(self._numbers[:-1]), array("d", self._began).tobytes())
        del self._numbers[:-1], self._began[:-1]
        return intervals


def sum_times(parts: Iterable[StageTimes]) -> StageTimes:
    """The sum of several StageTimes."""
    whole = StageTimes()
    for part in parts:
        whole.seconds.update(part.seconds)
        for stage, counts in part.buckets.items():
            whole.buckets.setdefault(stage, Counter()).update(counts)
    return whole
