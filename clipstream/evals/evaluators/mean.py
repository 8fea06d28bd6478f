"""The mean of the metrics of other evaluators.

A part in one file: its settings, and what it does. Modules of this package are imported to know their settings, and so
import torch inside of functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from clipstream.errors import DataError, SettingsError, did_you_mean
from clipstream.evals.settings import EvalSettings
from clipstream.utils.section import part

if TYPE_CHECKING:
    from clipstream.evals.context import EvalContext


@part(EvalSettings, "mean")
class Mean:
    """Yields mean and sets (the number of evaluators), from their metrics at the same step.

    It fails if one of them has none, as a mean over fewer sets is another metric.
    """

    class Settings(EvalSettings):
        """The mean of other evaluators' figures, each of which counts once: `of` says which, as {NAME: METRIC}."""

        type: Literal["mean"] = "mean"
        of: dict[str, str | list[str]] = Field(
            description="map from evaluator to metric, or to several whose mean counts: [image_to_text_R@1, "
            "text_to_image_R@1]"
        )

        reads: ClassVar[bool] = False

        @field_validator("of")
        @classmethod
        def _some(cls, value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
            if not value or not all(value.values()):
                raise ValueError("set at least one evaluator and its metric")
            return value

    def __init__(self, settings: Settings) -> None:
        self.of = {name: [metrics] if isinstance(metrics, str) else metrics for name, metrics in settings.of.items()}

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """The mean over the evaluators, of which those with several metrics count with their mean.

        Raises:
            DataError: one has no metrics at this step.
            SettingsError: one has no such metric.
        """
        means = []
        for name, metrics in self.of.items():
            found = context.metrics.get(name)
            if found is None:
                raise DataError(f"{name} has no metrics at this step: it failed, or is evaluated less often")
            for metric in metrics:
                if metric not in found:
                    hint = did_you_mean(metric, found)
                    raise SettingsError(f"of: {name} has no metric {metric!r}; choose from {', '.join(found)}{hint}")
            means.append(fmean(found[metric] for metric in metrics))
        yield "mean", fmean(means)
        yield "sets", len(means)
