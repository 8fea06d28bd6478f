"""Owns what is being done with the data, and how long each stage takes; never decides what to do about it.

    open        a shard is opened, or fetched from elsewhere
    order       the next samples are looked up, some at once
    read        its members are read, and its caption is found
    transform   the user's own function, and the caption in what it gives
    decode      the picture, into the slab
    tokenize    the captions of a part of a batch
    hand-over   the part is reported to the loader
    idle        there is no free slab: training is slower than the data

A stage lasts until the next one is named, so nothing is measured twice and nothing is left out.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

OPEN, ORDER, IDLE, HAND_OVER = "open", "order", "idle", "hand-over"
STAGES = (OPEN, ORDER, "read", "transform", "decode", "tokenize", HAND_OVER, IDLE)
NUMBER = {stage: number for number, stage in enumerate(STAGES)}
SHORTEST = 1e-6  # s
FINENESS = 4  # buckets to a factor of 2: a quantile is within 9% of what it was
WIDEST = 256  # buckets: 2^(256 / 4) times the shortest, which nothing lasts


# Words: when it began or bytes came, when these came last, how many, the stage, and which of the names belongs to it
# (none where it is below 0), the length of the names; then the names.
_SINCE, _CAME, _SIZE, _STAGE, _WHICH, _LENGTH = range(6)
_START = 48  # byte at which the names begin
_SPACE = 1 << 16  # bytes for them
_LONGEST = 500  # characters of a name that are told
_BETWEEN = "\0"  # two names


class Laps(NamedTuple):
    """Stages that one followed the other, not counted yet.

    Attributes:
        numbers: of the stages, uint8 [n].
        began: when each began, and the end of the last, float64 [n + 1], s.
    """

    numbers: bytes
    began: bytes


@dataclass
class StageTimes:
    """How often each stage was gone through, and how long it took.

    Attributes:
        seconds: stage -> in all.
        buckets: stage -> number of a bucket of durations -> times.
    """

    seconds: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, laps: Sequence[Laps]) -> None:
        """Count what stopwatches took."""
        if not laps:
            return
        numbers = np.frombuffer(b"".join(lap.numbers for lap in laps), np.uint8).astype(int)
        seconds = np.concatenate([np.diff(np.frombuffer(lap.began)) for lap in laps])
        buckets = np.rint(FINENESS * np.log2(np.maximum(seconds, SHORTEST) / SHORTEST)).astype(int)
        counts = np.bincount(numbers * WIDEST + buckets, minlength=len(STAGES) * WIDEST)
        (found,) = counts.nonzero()
        for place, count in zip(found.tolist(), counts[found].tolist(), strict=True):
            self.buckets.setdefault(STAGES[place // WIDEST], Counter())[place % WIDEST] += count
        sums = np.bincount(numbers, seconds, len(STAGES)).tolist()
        for stage in self.buckets:
            self.seconds[stage] += sums[NUMBER[stage]]

    def merge(self, other: StageTimes) -> None:
        """Add another's."""
        self.seconds.update(other.seconds)
        for stage, counts in other.buckets.items():
            self.buckets.setdefault(stage, Counter()).update(counts)

    def quantile(self, stage: str, share: float) -> float:
        """The duration, s, that `share` of the stage's passages did not exceed."""
        buckets = self.buckets[stage]
        left = share * buckets.total()
        for bucket, count in sorted(buckets.items()):
            left -= count
            if left <= 0:
                return float(SHORTEST * 2 ** (bucket / FINENESS))
        return float(SHORTEST * 2 ** (max(buckets) / FINENESS))

    def summary(self) -> dict[str, Any]:
        """{stage: {seconds, count, p50, p99}}, JSON-able; seconds of all workers together."""
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
        """The stage of the data's own work that took most; None where nothing was done."""
        work = {stage: s for stage, s in self.seconds.items() if stage not in (IDLE, HAND_OVER)}
        return max(work, key=lambda stage: work[stage]) if work else None


class Stopwatch:
    """Takes the names of stages as they begin, and charges the time to the one before.

    What is being done now stands in shared memory besides, readable by who forked the process that has the stopwatch,
    also when that process hangs or is dead. It is told of several times for each sample, among much else that wants the
    processor's caches: so it keeps flat numbers, and who takes them counts them; and the names of some samples are
    written together, so that at each of them a number is.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _START + _SPACE)
        self._words = memoryview(self._memory).cast("d")
        self._began: list[float] = []  # arrays would be smaller and take longer to grow
        self._numbers: list[int] = []

    def begin(self, stage: str, name: str = "") -> None:
        """A stage begins, at this shard; '' where it is at none."""
        if name:
            self.name([name])
        self.at(stage, 0 if name else -1)

    def name(self, names: Sequence[str]) -> None:
        """The samples that stages will be at."""
        text = _BETWEEN.join(names).encode(errors="backslashreplace")[:_SPACE]  # file systems know odd bytes
        self._memory[_START : _START + len(text)] = text
        self._words[_LENGTH] = len(text)

    def at(self, stage: str, which: int) -> None:
        """A stage begins, at this one of the samples that were named; at none where the number is below 0."""
        now, number, words = time.monotonic(), NUMBER[stage], self._words
        self._began.append(now)
        self._numbers.append(number)
        words[_STAGE] = number
        words[_WHICH] = which
        words[_SINCE] = now

    def touch(self, size: int) -> None:
        """Say that what is being done goes on, and how many bytes have come."""
        self._words[_SIZE] = size
        self._words[_CAME] = self._words[_SINCE] = time.monotonic()

    def doing(self) -> tuple[str, float]:
        """What is being done, and how many seconds ago it was begun or a byte came."""
        since, came, size, stage, which, length = self._words[: _LENGTH + 1]
        if not since:
            return "start", 0.0
        text = STAGES[int(stage)]
        if which >= 0:
            names = self._memory[_START : _START + int(length)].decode(errors="replace").split(_BETWEEN)
            text += " " + (names[int(which)][:_LONGEST] if which < len(names) else "?")  # others were just written
        return f"{text}{f' ({size:,.0f} bytes came)' if came == since else ''}", time.monotonic() - since

    def take(self) -> Laps:
        """What was measured since the last take; the last stage lasts."""
        laps = Laps(bytes(self._numbers[:-1]), array("d", self._began).tobytes())
        del self._numbers[:-1], self._began[:-1]
        return laps


def merged(parts: Iterable[StageTimes]) -> StageTimes:
    """The sum of several."""
    whole = StageTimes()
    for part in parts:
        whole.merge(part)
    return whole
