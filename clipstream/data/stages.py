"""Owns how long each stage of the data takes: counts, seconds and quantiles; never decides what to do about it.

    open        a shard is opened, or fetched from elsewhere
    order       the next sample is looked up
    read        its members are read
    transform   the user's own function
    decode      caption and picture, into the slab
    tokenize    the captions of a part of a batch
    hand-over   the part is reported to the loader
    idle        there is no free slab: training is slower than the data

A stage lasts until the next one is named, so nothing is measured twice and nothing is left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IDLE, HAND_OVER = "idle", "hand-over"
SHORTEST = 1e-6  # s
KEPT = 5000  # beginnings of stages that wait to be counted
FINENESS = 4  # buckets to a factor of 2: a quantile is within 9% of what it was
WIDEST = 256  # buckets: 2^(256 / 4) times the shortest, which nothing lasts


@dataclass
class StageTimes:
    """How often each stage was gone through, and how long it took.

    Attributes:
        seconds: stage -> in all.
        buckets: stage -> number of a bucket of durations -> times.
    """

    seconds: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, stages: Sequence[str], seconds: Sequence[float] | NDArray[np.float64]) -> None:
        """Count passages: stages [n] and their durations [n]."""
        number = {stage: i for i, stage in enumerate(dict.fromkeys(stages))}
        numbers, lasted = np.fromiter(map(number.__getitem__, stages), int, len(stages)), np.asarray(seconds)
        buckets = np.rint(FINENESS * np.log2(np.maximum(lasted, SHORTEST) / SHORTEST)).astype(int)
        sums = np.bincount(numbers, lasted, len(number)).tolist()
        counts = np.bincount(numbers * WIDEST + buckets, minlength=len(number) * WIDEST).reshape(-1, WIDEST)
        for stage, i in number.items():
            self.seconds[stage] += sums[i]
            (found,) = counts[i].nonzero()
            times = dict(zip(found.tolist(), counts[i][found].tolist(), strict=True))
            self.buckets.setdefault(stage, Counter()).update(times)

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

    Args:
        tell: called with each stage and what it is at.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._times = StageTimes()
        self._begun: list[tuple[float, str]] = []  # when, which stage

    def __call__(self, stage: str, sample: str) -> None:
        """A stage begins."""
        # It is called several times for each sample, among much else that wants the processor's caches: what it takes
        # is counted later, all at once.
        self._begun.append((time.perf_counter(), stage))
        if len(self._begun) == KEPT:
            self._count()
        self._tell(stage, sample)

    def take(self) -> StageTimes:
        """What was measured since the last take."""
        self._count()
        taken, self._times = self._times, StageTimes()
        return taken

    def _count(self) -> None:
        if len(self._begun) > 1:
            began, stages = zip(*self._begun, strict=True)
            self._times.add(stages[:-1], np.diff(began))
            del self._begun[:-1]  # the last stage lasts


def merged(parts: Iterable[StageTimes]) -> StageTimes:
    """The sum of several."""
    whole = StageTimes()
    for part in parts:
        whole.merge(part)
    return whole
