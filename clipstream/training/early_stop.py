"""Early stopping, and the metrics that a run acts on (`train.early_stop`, `checkpoint.keep_best`).

Evaluations enter; whether the run should end leaves. Evaluations are the same on all ranks and the state is saved with
the run, so a resumed run stops at the same step. Does not import torch, as settings name metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from clipstream.errors import SettingsError, did_you_mean
from clipstream.utils.section import SET, UNSET, Conflict, Section, other_than

By = Literal["auto", "max", "min"]
EvalRecord = Mapping[str, str | float]  # step, eval (the evaluator's name) and its metrics

SMALL_IS_GOOD = {"loss", "error", "rank", "perplexity"}  # words of metrics' names
METRIC_BY = "whether larger or smaller values are better; auto: losses, errors and ranks are better if smaller"


def checked_metric(text: str | None) -> str | None:
    """The value of a setting that names a metric. Raises ValueError: it is not EVALUATOR/METRIC."""
    if text is not None and not all(text.partition("/")):
        raise ValueError("write EVALUATOR/METRIC as in metrics.jsonl, e.g. val/image_to_text_R@1")
    return text


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluator."""

    evaluator: str  # name of the evaluation, NAME or NAME_averaged
    name: str  # of the metric
    lower: bool  # whether smaller values are better

    @classmethod
    def of(cls, text: str | None, by: By) -> Metric | None:
        """The metric of EVALUATOR/METRIC, if set; with 'auto', losses, errors and ranks are better if smaller."""
        if text is None:
            return None
        evaluator, _, name = text.partition("/")
        small = bool(SMALL_IS_GOOD & {*re.findall(r"[a-z]+", name.lower())})
        return cls(evaluator, name, by == "min" or (by == "auto" and small))

    def __str__(self) -> str:
        return f"{self.evaluator}/{self.name}"

    def is_better(self, value: float, than: float | None, margin: float = 0.0) -> bool:
        """Whether a value is better than another by more than a margin; NaN and infinity never are."""
        gain = 0.0 if than is None else than - value if self.lower else value - than
        return math.isfinite(value) and (than is None or gain > margin)

    def value(self, record: EvalRecord) -> float | None:
        """Its value in a record; None if the record is another evaluator's, or lacks it."""
        given = record.get(self.name) if record["eval"] == self.evaluator else None
        return None if given is None else float(given)

    def expect(self, key: str, metrics: Mapping[str, Sequence[str]]) -> None:
        """Check the metric against those that evaluators will give.

        Args:
            key: setting that names the metric.
            metrics: names of metrics by evaluator, if known.

        Raises SettingsError: its evaluator has no such metric.
        """
        known = metrics.get(self.evaluator, [self.name])
        if self.name not in known:
            hint = did_you_mean(self.name, known)
            raise SettingsError(f"{key}: {self.evaluator} gives no {self.name!r} but {', '.join(known)}{hint}")


class EarlyStopSettings(Section):
    """Early stopping: end the run when a metric no longer improves."""

    metric: str | None = Field(
        None, description="EVALUATOR/METRIC that must keep improving; no early stopping unless set"
    )
    metric_by: By = Field("auto", description=METRIC_BY)
    patience: int = Field(3, ge=1, description="evaluations without improvement after which the run ends")
    min_delta: float = Field(0.0, ge=0, description="smallest improvement that counts")

    _both = field_validator("metric")(checked_metric)

    pairs = tuple(
        Conflict({key: changed, "metric": UNSET}, "requires --train.early-stop.metric EVALUATOR/METRIC")
        for key, changed in (("metric_by", other_than("auto")), ("patience", other_than(3)), ("min_delta", SET))
    )

    @property
    def watched(self) -> Metric | None:
        """The metric, if set."""
        return Metric.of(self.metric, self.metric_by)


@dataclass
class EarlyStopState:
    """Owned by `EarlyStop`."""

    metric: str | None = None  # EVALUATOR/METRIC that the other values belong to
    stale: int = 0  # evaluations since the best one
    best: float | None = None  # best value; None before the first finite one
    best_step: int | None = None  # its step
    last_step: int = -1  # step of the last evaluation that was counted; -1 for none


class EarlyStop:
    """Listens to evaluations: the best value of a metric, and the number of evaluations since.

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

    def on_eval(self, records: Iterable[EvalRecord]) -> None:
        """Count evaluations; failed ones are ignored."""
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

    def summary(self) -> dict[str, str | float | None]:
        """Why the run stopped, for its last record; best and best_step are None if no value was finite."""
        state = self.state
        return {"metric": state.metric, "evaluations": state.stale, "best": state.best, "best_step": state.best_step}
