"""Settings of `clipstream interpolate`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator

from clipstream.errors import SettingsError, did_you_mean
from clipstream.training.settings import Metric, check_metric_name
from clipstream.utils.section import Section

INTERPOLATED = "interpolated"  # in a run's folder


class InterpolateSettings(Section):
    """Weights between the start and the end of a run (WiSE-FT, arXiv:2109.01903), of which one is chosen."""

    alphas: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        min_length=1,
        description="shares of the end that are evaluated; the start, 0, always is",
    )
    target: str | None = Field(
        None,
        description="EVALUATOR/METRIC to be best; default: R@1, or the first metric, of the only evaluator without "
        "role guard",
    )
    guard_kept: float = Field(
        0.97, ge=0, le=1, description="share of the start's figure that each evaluator with role guard must keep"
    )

    _whole = field_validator("target")(check_metric_name)

    def target_of(self, roles: Mapping[str, str]) -> tuple[str, Metric | None]:
        """The evaluator that decides, of those with these roles by name, and its metric where one is set.

        Raises SettingsError: there is no such evaluator, or several and no metric.
        """
        metric = Metric.of(self.target, "auto")
        if metric is not None:
            if metric.evaluator not in roles:
                raise SettingsError(f"the target {metric} is of no evaluator{did_you_mean(metric.evaluator, roles)}")
            return metric.evaluator, metric
        targets = [name for name, role in roles.items() if role != "guard"]
        if len(targets) != 1:
            found = f"several evaluators, {', '.join(targets)}," if targets else "no evaluator"
            raise SettingsError(f"{found} without role guard: name the target as EVALUATOR/METRIC")
        return targets[0], None
