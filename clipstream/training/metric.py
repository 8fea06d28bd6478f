"""A metric that a run acts on (`keep_best`, `early_stop`): its name, and which of two values is better.

Does not import torch, as settings name metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clipstream.errors import SettingsError, did_you_mean

By = Literal["auto", "max", "min"]

SMALL_IS_GOOD = {"loss", "error", "rank", "perplexity"}  # words of metrics' names


def checked(text: str | None) -> str | None:
    """The value of a setting that names a metric.

    Raises:
        ValueError: it is not EVALUATOR/METRIC.
    """
    if text is not None and not all(text.partition("/")):
        raise ValueError("write EVALUATOR/METRIC as in metrics.jsonl, e.g. val/image_to_text_R@1")
    return text


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluator.

    Attributes:
        evaluator: name of the evaluation, NAME or NAME_averaged.
        name: of the metric.
        lower: whether smaller values are better.
    """

    evaluator: str
    name: str
    lower: bool

    @classmethod
    def of(cls, text: str, by: By) -> Metric:
        """The metric of EVALUATOR/METRIC; with 'auto', losses, errors and ranks are better if smaller."""
        evaluator, _, name = text.partition("/")
        small = bool(SMALL_IS_GOOD & {*re.findall(r"[a-z]+", name.lower())})
        return cls(evaluator, name, by == "min" or (by == "auto" and small))

    def __str__(self) -> str:
        return f"{self.evaluator}/{self.name}"

    def is_better(self, value: float, than: float | None, margin: float = 0.0) -> bool:
        """See `is_better`."""
        return is_better(value, than, lower=self.lower, margin=margin)

    def value(self, record: Mapping[str, Any]) -> float | None:
        """Its value in a record (eval, metrics); None if the record is another evaluator's, or lacks it."""
        given = record.get(self.name) if record["eval"] == self.evaluator else None
        return None if given is None else float(given)

    def expect(self, key: str, metrics: Mapping[str, Sequence[str]]) -> None:
        """Check the metric against those that evaluators will give.

        Args:
            key: setting that names the metric.
            metrics: names of metrics by evaluator, if known.

        Raises:
            SettingsError: its evaluator has no such metric.
        """
        known = metrics.get(self.evaluator, [self.name])
        if self.name not in known:
            hint = did_you_mean(self.name, known)
            raise SettingsError(f"{key}: {self.evaluator} gives no {self.name!r} but {', '.join(known)}{hint}")


def is_better(value: float, than: float | None, *, lower: bool, margin: float = 0.0) -> bool:
    """Whether a value is better than another by more than a margin; NaN and infinity never are."""
    gain = 0.0 if than is None else than - value if lower else value - than
    return math.isfinite(value) and (than is None or gain > margin)
