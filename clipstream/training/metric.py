"""Owns a metric that a run acts on: its name, which of two values is the better one, what an evaluation gave of it.

Imports no torch: settings name metrics. What is done with a value is decided by those who ask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clipstream.errors import SettingsError, did_you_mean
from clipstream.training.shelf import is_better

By = Literal["auto", "max", "min"]

SMALL_IS_GOOD = {"loss", "error", "rank", "perplexity"}  # words of metrics' names


def checked(told: str | None) -> str | None:
    """What a setting tells.

    Raises:
        ValueError: it is not EVALUATOR/METRIC.
    """
    if told is not None and not all(told.partition("/")):
        raise ValueError("write EVALUATOR/METRIC as in metrics.jsonl, e.g. val/image_to_text_R@1")
    return told


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluator.

    Attributes:
        evaluator: as evaluations are called, NAME or NAME_averaged.
        name: of the metric.
        lower: whether the smaller of two values is the better one.
    """

    evaluator: str
    name: str
    lower: bool

    @classmethod
    def of(cls, told: str, by: By) -> Metric:
        """EVALUATOR/METRIC; by 'auto' a loss, an error or a rank is good if small."""
        evaluator, _, name = told.partition("/")
        small = bool(SMALL_IS_GOOD & {*re.findall(r"[a-z]+", name.lower())})
        return cls(evaluator, name, by == "min" or (by == "auto" and small))

    def __str__(self) -> str:
        return f"{self.evaluator}/{self.name}"

    def is_better(self, value: float, than: float | None, margin: float = 0.0) -> bool:
        """As `shelf.is_better`."""
        return is_better(value, than, lower=self.lower, margin=margin)

    def value(self, record: Mapping[str, Any]) -> float | None:
        """What an evaluation (eval, metrics) gave of it; None of another evaluator's, or where it gave none."""
        given = record.get(self.name) if record["eval"] == self.evaluator else None
        return None if given is None else float(given)

    def expect(self, key: str, metrics: Mapping[str, Sequence[str]]) -> None:
        """Take note of what evaluators will give: the names of their metrics, where they are known.

        Args:
            key: of the setting that names it.

        Raises:
            SettingsError: its evaluator gives others only.
        """
        known = metrics.get(self.evaluator, [self.name])
        if self.name not in known:
            hint = did_you_mean(self.name, known)
            raise SettingsError(f"{key}: {self.evaluator} gives no {self.name!r} but {', '.join(known)}{hint}")
