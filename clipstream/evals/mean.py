"""Owns the mean of other evaluators' figures, as a suite of data sets is summed up; reads no data, runs no model."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from clipstream.errors import DataError, SettingsError, did_you_mean
from clipstream.evals.context import EvalContext
from clipstream.evals.settings import MeanSettings


class Mean:
    """Yields mean and sets (evaluators that it is of), from what the others gave at the same step.

    A mean over fewer sets than were asked for would pass for the mean of all of them, so one without figures fails it.
    """

    def __init__(self, settings: MeanSettings) -> None:
        self.of = {name: [told] if isinstance(told, str) else told for name, told in settings.of.items()}

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """The mean over the evaluators; of one with several metrics their mean counts.

        Raises:
            DataError: one has no figures at this step.
            SettingsError: one gives no such metric.
        """
        yield "mean", fmean(fmean(self._figures(context, name)) for name in self.of)
        yield "sets", len(self.of)

    def _figures(self, context: EvalContext, name: str) -> Iterator[float]:
        figures = context.figures.get(name)
        if figures is None:
            raise DataError(f"{name} has no figures at this step: it failed, or is evaluated less often")
        for metric in self.of[name]:
            if metric not in figures:
                hint = did_you_mean(metric, figures)
                raise SettingsError(f"of: {name} gives no {metric!r} but {', '.join(figures)}{hint}")
            yield figures[metric]
