"""Mean of other evaluators' metrics, the summary of a suite of data sets."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from clipstream.errors import DataError, SettingsError, did_you_mean
from clipstream.evals.context import EvalContext
from clipstream.evals.settings import MeanSettings


class Mean:
    """Yields mean and sets (the number of evaluators), from their metrics at the same step.

    It fails if one of them has none, as a mean over fewer sets is another metric.
    """

    def __init__(self, settings: MeanSettings) -> None:
        self.of = {name: [metrics] if isinstance(metrics, str) else metrics for name, metrics in settings.of.items()}

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """The mean over the evaluators, of which those with several metrics count with their mean.

        Raises:
            DataError: one has no metrics at this step.
            SettingsError: one has no such metric.
        """
        means = []
        for name, metrics in self.of.items():
            figures = context.figures.get(name)
            if figures is None:
                raise DataError(f"{name} has no metrics at this step: it failed, or is evaluated less often")
            for metric in metrics:
                if metric not in figures:
                    hint = did_you_mean(metric, figures)
                    raise SettingsError(f"of: {name} has no metric {metric!r}; choose from {', '.join(figures)}{hint}")
            means.append(fmean(figures[metric] for metric in metrics))
        yield "mean", fmean(means)
        yield "sets", len(means)
