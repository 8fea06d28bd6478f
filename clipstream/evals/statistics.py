"""What the metrics of an evaluation mean: shares with their 95% interval and chance level, main and minor metrics.

Counts by class, and the record of an evaluation as in metrics.jsonl enter; numbers and texts leave. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from clipstream.text import percent

if TYPE_CHECKING:
    import torch

Record = Mapping[str, Any]
ABOUT = ("step", "eval", "error")  # keys of a record that are no metrics
_SHARE = re.compile(r"chance|(?:chance_)?(?:top\d+|(?:\w+_)?R@\d+|mAP|mean|mean_per_class_recall|(?:\w+_)?accuracy)")


def accuracies(tally: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Accuracy metrics of a data set with one label per image, from sums per class.

    Args:
        tally: float64 [C, 3]: top1, top5 and n; at least one image.

    Yields:
        top1, top5, mean_per_class_recall (over the classes in the data), n and chance.
    """
    top1, top5, n = tally.cpu().unbind(dim=1)
    total = int(n.sum())
    present = n > 0
    yield "top1", float(top1.sum()) / total
    yield "top5", float(top5.sum()) / total
    yield "mean_per_class_recall", float((top1[present] / n[present]).mean())
    yield "n", total
    yield "chance", 1 / len(n)


def metrics_of(record: Record) -> dict[str, Any]:
    """The metrics of an evaluation by name, `dropped` and `seconds` included; null stands for NaN.

    A record of a run of before 0.2 does not list them: all its numbers are metrics.
    """
    if "metrics" in record:
        return {name: record[name] for name in record["metrics"]}
    numbers = {name: value for name, value in record.items() if value is None or isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if name not in ABOUT and not isinstance(value, bool)}


def is_minor(metric: str) -> bool:
    """Whether a metric is not a main one (top1, R@1 or mean)."""
    return not (metric in ("top1", "mean") or metric.endswith("R@1"))


def is_share(metric: str, value: Any) -> bool:
    """Whether a metric is shown in percent: a float from 0 to 1 whose name is that of a share."""
    return isinstance(value, float) and 0 <= value <= 1 and _SHARE.fullmatch(metric) is not None


def interval(record: Record, metric: str) -> str:
    """The 95% interval of a share as text, such as 0.9-10.8%; '' where `bounds` knows none."""
    found = bounds(record, metric)
    return "" if found is None else f"{100 * found[0]:.1f}-{percent(found[1])}"


def bounds(record: Record, metric: str) -> tuple[float, float] | None:
    """The 95% interval of the share of n answers that are right, top1, top5 or R@k; None for other metrics.

    Wilson's score interval (JASA 22, 1927): (p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n), with z = 1.96.
    """
    n, share = record.get("captions" if metric.startswith("text_to_image") else "n", 0), record[metric]
    if not n or not is_share(metric, share) or not re.fullmatch(r"top\d+|.*_R@\d+", metric):
        return None
    z = 1.96**2 / n
    middle, half = (share + z / 2) / (1 + z), math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def chance_of(record: Record, metric: str) -> float | None:
    """The chance level of a metric: `chance_X` belongs to the metrics that end in X, `chance` to top1."""
    for name, value in record.items():
        if name.startswith("chance_") and metric.endswith(name.removeprefix("chance_")):
            return float(value)
    return float(record["chance"]) if metric == "top1" and "chance" in record else None


def format_value(metric: str, value: Any, form: str = ".4g") -> str:
    """A metric as text: in percent if it is a share, else as `form` says."""
    if is_share(metric, value):
        return percent(value)
    return format(value, form) if isinstance(value, (int, float)) else str(value)


def format_chance(record: Record, metric: str) -> str:
    """The chance level of a metric as text: in percent if the metric is; '' if it is not known."""
    chance = chance_of(record, metric)
    return "" if chance is None else percent(chance) if is_share(metric, record[metric]) else f"{chance:.4g}"
