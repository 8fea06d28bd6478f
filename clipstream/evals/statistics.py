"""What the metrics of an evaluation mean: shares with their 95% interval and chance level, main and minor metrics.

The record of an evaluation as in metrics.jsonl enters; numbers and texts leave. `differences` says
whether two evaluations may be compared: they need the same test set and settings. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from clipstream.text import percent

Record = Mapping[str, Any]
ABOUT = ("step", "eval", "error")  # keys of a record that are no metrics
# Settings that do not affect metrics, and those whose effect the fingerprints of data and texts show.
NO_PART = ("every", "every_epochs", "fetch", "on_error", "weights", "batch_size", "prompts", "role")
FINGERPRINTED = ("classes", "templates", "label", "max_samples")
PIXELS = ("transform", "background", "orientation")  # settings of a source that change the pixels of the same files
# Oldest first, the last one by evaluator, step, whether `clipstream evaluate` made it, and whether it failed.
Evaluations = dict[tuple[str, int, bool, bool], Record]
_SHARE = re.compile(
    r"chance|(?:chance_)?(?:(?:[\w-]+_)?(?:top\d+|R@\d+|mean_per_class_recall)|mean|"
    r"(?:\w+_)?(?:mAP|R-precision|accuracy)|F1|(?:text|image|group)_score)"
)
_OF_LANGUAGE = re.compile(r"([\w-]+)_(?:(?:image_to_text|text_to_image)_R@\d+|top\d+|mean_per_class_recall)")


def metrics_of(record: Record) -> dict[str, Any]:
    """The metrics of an evaluation by name, `dropped` and `seconds` included; null stands for NaN.

    A record of a run of 0.1.0 does not list them: all its numbers are metrics.
    """
    if "metrics" in record:
        return {name: record[name] for name in record["metrics"]}
    numbers = {name: value for name, value in record.items() if value is None or isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if name not in ABOUT and not isinstance(value, bool)}


def is_minor(metric: str) -> bool:
    """Whether a metric is not a main one (top1, R@1, mAP, F1, accuracy, group_score, mean); of languages, the mean."""
    main = ("top1", "mean", "mean_top1", "accuracy", "group_score", "F1")
    return is_of_language(metric) or not (metric in main or metric.endswith(("R@1", "mAP")))


def is_of_language(metric: str) -> bool:
    """Whether a metric is that of one of several languages, not of their mean."""
    language = _OF_LANGUAGE.fullmatch(metric)
    return language is not None and language[1] != "mean"


def is_count_of_part(metric: str, found: Container[str]) -> bool:
    """Whether a metric among those `found` is the number of images or captions of a language, or of a category."""
    of_category = metric.startswith("n_") and f"{metric.removeprefix('n_')}_accuracy" in found
    return of_category or ("languages" in found and metric.startswith(("n_", "captions_")))


def is_share(metric: str, value: Any) -> bool:
    """Whether a metric is shown in percent: a float from 0 to 1 whose name is that of a share."""
    return isinstance(value, float) and 0 <= value <= 1 and _SHARE.fullmatch(metric) is not None


def interval(record: Record, metric: str) -> str:
    """The 95% interval of a share as text, such as 0.9-10.8%; '' where `bounds` knows none."""
    found = bounds(record, metric)
    return "" if found is None else f"{100 * found[0]:.1f}-{percent(found[1])}"


def bounds(record: Record, metric: str) -> tuple[float, float] | None:
    """The 95% interval of the share of n answers that are right (top1, top5, R@k, accuracy, Winoground's scores).

    None for others, and for means.

    Wilson's score interval (JASA 22, 1927): (p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n), with z = 1.96.
    """
    count, language = "captions" if "text_to_image" in metric else "n", _OF_LANGUAGE.fullmatch(metric)
    of = f"_{language[1]}" if language else ""
    # The metric of a user's own evaluator may look like one of a language.
    n, share = record.get(count + of, 0 if of == "_mean" else record.get(count, 0)), record[metric]
    n = record.get(f"n_{metric.removesuffix('_accuracy')}", n)  # of a category
    if metric.startswith("image_to_image"):
        n -= record.get("left_out", 0)
    if (
        not n
        or not is_share(metric, share)
        or not re.fullmatch(r"top\d+|.*_(?:R@|top)\d+|(?:.*_)?accuracy|(?:text|image|group)_score", metric)
    ):
        return None
    z = 1.96**2 / n
    middle, half = (share + z / 2) / (1 + z), math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def chance_of(record: Record, metric: str) -> float | None:
    """The chance level of a metric: `chance_X` belongs to X or else to the metrics that end in X, `chance` to top1."""
    if f"chance_{metric}" in record:
        return float(record[f"chance_{metric}"])
    for name, value in record.items():
        if name.startswith("chance_") and metric.endswith(name.removeprefix("chance_")):
            return float(value)
    return float(record["chance"]) if metric == "top1" and "chance" in record else None


def by_language(found: Mapping[str, Mapping[str, float]], images: int) -> Iterator[tuple[str, float]]:
    """The metrics of evaluations that differ in the language of their texts.

    Args:
        found: language -> metrics as of `accuracies` or of retrieval; at least one.
        images: number of all images.

    Yields:
        n (images); of the shares among the metrics mean_METRIC, their means over the languages, and languages, their
        number; then of each LANGUAGE_METRIC, n_LANGUAGE and captions_LANGUAGE. `chance_NAME` is the chance level of a
        metric NAME, if known.
    """
    names = [*next(iter(found.values()))]
    counts = [name for name in names if name in ("n", "captions")]
    chances = [name for name in names if name.startswith("chance")]
    shares = [name for name in names if name not in (*counts, *chances) and not name.endswith("median_rank")]
    mean = {name: fmean(metrics[name] for metrics in found.values()) for name in (*shares, *chances)}
    yield "n", images
    for language, metrics in {"mean": mean, **found}.items():
        yield from ((f"{language}_{name}", metrics[name]) for name in shares)
        own = {name: chance for name in shares if (chance := chance_of(metrics, name)) is not None}
        yield from ((f"chance_{language}_{name}", chance) for name, chance in own.items())
        if metrics is mean:
            yield "languages", len(found)
        else:
            yield from ((f"{name}_{language}", metrics[name]) for name in counts)


def format_value(metric: str, value: Any, form: str = ".4g") -> str:
    """A metric as text: in percent if it is a share, else as `form` says."""
    if is_share(metric, value):
        return percent(value)
    return format(value, form) if isinstance(value, (int, float)) else str(value)


def format_chance(record: Record, metric: str) -> str:
    """The chance level of a metric as text: in percent if the metric is; '' if it is not known."""
    chance = chance_of(record, metric)
    return "" if chance is None else percent(chance) if is_share(metric, record[metric]) else f"{chance:.4g}"


def put(found: Evaluations, record: Record) -> None:
    """Add an evaluation, in the place of an earlier one of the same step."""
    key = str(record.get("eval")), record.get("step", 0), "checkpoint" in record, "error" in record
    found.pop(key, None)
    found[key] = record


def groups(made: Sequence[Record | None]) -> list[tuple[int, str]]:
    """Group runs whose metrics may be compared.

    Args:
        made: the record of each run's evaluation; None if it has none.

    Returns:
        For each run, the number of its group, from 0, and how it differs from the first run.
    """
    leaders: list[Record | None] = []
    found = []
    for one in made:
        number = next((i for i, leader in enumerate(leaders) if not differences(leader, one)), len(leaders))
        if number == len(leaders):
            leaders.append(one)
        found.append((number, ", ".join(differences(leaders[0], one))))
    return found


def differences(one: Record | None, other: Record | None) -> list[str]:
    """How the evaluation `other` differs from `one`, in words; empty if their metrics may be compared."""
    if one is None or other is None or not ("data" in one and "data" in other):
        lacking = [not record or "data" not in record for record in (one, other)]
        return [] if all(lacking) else ["the test set of one of them is not recorded"]
    data, others = one.get("data", []), other.get("data", [])
    if _of(data, "samples", "pictures") != _of(others, "samples", "pictures"):
        counts = (" + ".join(f"{part['samples']:,}" for part in parts) or "no" for parts in (others, data))
        return ["other images ({} samples for {})".format(*counts)]
    # Token ids depend on the tokenizer, class numbers do not.
    same_ids = one.get("tokenizer") == other.get("tokenizer") or "label" in one.get("settings", {})
    found = []
    if same_ids and _of(data, "pairs") != _of(others, "pairs"):
        found.append("other captions or labels")
    if one.get("texts") != other.get("texts"):
        found.append("other class prompts")
    mine, theirs = (dict(_settings(record, caption=not same_ids)) for record in (one, other))
    # A key that one record lacks is from another version of the package.
    found += [f"another {key}" for key in mine if key in theirs and mine[key] != theirs[key]]
    return found


def _of(data: Sequence[Record], *keys: str) -> list[Any]:
    return [[part.get(key) for key in keys] for part in data]


def _settings(record: Record, *, caption: bool) -> Iterator[tuple[str, Any]]:
    """The settings that metrics depend on, except those whose effect the fingerprints show."""
    kept = (*PIXELS, "caption") if caption else PIXELS
    for key, value in record.get("settings", {}).items():
        if isinstance(value, dict) and "shards" in value:
            yield from ((f"{key}.{part}", value[part]) for part in kept if part in value)
        elif key not in (*NO_PART, *FINGERPRINTED):
            yield key, value
