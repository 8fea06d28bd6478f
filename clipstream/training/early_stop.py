"""Owns the end of a run whose evaluations get no better: what was best, and for how many evaluations that stands.

It follows from evaluations, which are the same on all ranks, and is saved with the run's position, so a resumed run
ends where it would have ended. It evaluates nothing, keeps no checkpoint, and ends nothing itself: the loop asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipstream.training.settings import EarlyStopSettings


class EarlyStop:
    """Takes evaluations.

    Args:
        settings: which metric, and for how long it may get no better; without a metric a run is never over.
        state: what `state()` gave, of a resumed run. What it counted of another metric does not count.

    Attributes:
        row: evaluations since the best one.
    """

    def __init__(self, settings: EarlyStopSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings, self.metric = settings, settings.watched
        told = state if state is not None and state.get("metric") == settings.metric else {}
        self.row: int = told.get("row", 0)
        self._best: float | None = told.get("best")
        self._best_step: int | None = told.get("best_step")
        self._heard: int = told.get("heard", -1)  # step of the last evaluation that counts

    @property
    def over(self) -> bool:
        """Whether the run is to end: the same on all ranks."""
        return self.row >= self.settings.patience

    def hear(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take note of evaluations (step, eval, metrics); one that failed says nothing of the weights."""
        for record in records:
            step, value = int(record["step"]), None if self.metric is None else self.metric.value(record)
            # At its last step a run that is resumed evaluates again.
            if self.metric is None or value is None or step <= self._heard:
                continue
            self._heard = step
            if self.metric.is_better(value, self._best, self.settings.min_delta):
                self._best, self._best_step, self.row = value, step, 0
            else:
                self.row += 1

    def expect(self, metrics: Mapping[str, Sequence[str]]) -> None:
        """As `Metric.expect`."""
        if self.metric is not None:
            self.metric.expect("train.early_stop.metric", metrics)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "metric": self.settings.metric,
            "row": self.row,
            "best": self._best,
            "best_step": self._best_step,
            "heard": self._heard,
        }

    def why(self) -> dict[str, Any]:
        """Why a run that is over has ended, for people: metric, evaluations, best, best_step (None: no number ever)."""
        return {
            "metric": self.settings.metric,
            "evaluations": self.row,
            "best": self._best,
            "best_step": self._best_step,
        }
