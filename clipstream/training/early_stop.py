"""Early stopping: the best value of a metric, and the number of evaluations since.

Evaluations are the same on all ranks and the state is saved with the run, so a resumed run stops at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipstream.training.settings import EarlyStopSettings
from clipstream.training.state import EarlyStopState


class EarlyStop:
    """Listens to evaluations.

    Args:
        settings: metric and patience; without a metric the run never stops early.
        state: of a resumed run; ignored if it belongs to another metric.
    """

    def __init__(self, settings: EarlyStopSettings, state: EarlyStopState | None = None) -> None:
        self.settings, self.metric = settings, settings.watched
        same = state is not None and state.metric == settings.metric
        self.state = state if state is not None and same else EarlyStopState(settings.metric)

    @property
    def should_stop(self) -> bool:
        """Whether to end the run; the same on all ranks."""
        return self.state.stale >= self.settings.patience

    def on_eval(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Count evaluations (step, eval, metrics); failed ones are ignored."""
        for record in records:
            step, value = int(record["step"]), None if self.metric is None else self.metric.value(record)
            # A run that is resumed at its last step evaluates it again.
            if self.metric is None or value is None or step <= self.state.last_step:
                continue
            self.state.last_step = step
            if self.metric.is_better(value, self.state.best, self.settings.min_delta):
                self.state.best, self.state.best_step, self.state.stale = value, step, 0
            else:
                self.state.stale += 1

    def expect(self, metrics: Mapping[str, Sequence[str]]) -> None:
        """See `Metric.expect`."""
        if self.metric is not None:
            self.metric.expect("train.early_stop.metric", metrics)

    def summary(self) -> dict[str, Any]:
        """Why the run stopped, for its last record; best and best_step are None if no value was finite."""
        state = self.state
        return {
            "metric": state.metric,
            "evaluations": state.stale,
            "best": state.best,
            "best_step": state.best_step,
        }
