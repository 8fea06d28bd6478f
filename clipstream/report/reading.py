"""Owns reading a run's folder for people: curves, evaluations, health, settings, starts. Never writes, never trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from clipstream.data.shards import redact
from clipstream.errors import SettingsError
from clipstream.report.album import Album, Page
from clipstream.report.figures import FIGURES_FILE, WATCH_FOLDER, way_of
from clipstream.report.sinks import METRICS_FILE, flat, lines

_NO_CURVE = ("step", "samples", "epoch")

Points = list[tuple[float, float]]


@dataclass
class Run:
    """What a run's folder says.

    Attributes:
        name: of the folder.
        curves: metric of the training lines -> (step, value).
        evaluations: evaluator -> metric -> (step, value).
        health: the newest counts of the data, by source.
        stages: what the data's stages took in the last training line's steps.
        starts: one for each process that began or resumed the run: step, time, versions, …
        end: what the run said as it ended: step, total_steps, early_stop (see `EarlyStop.why`); empty before.
        failed: of evaluators whose newest evaluation failed: its step, and why.
        rollbacks: returns to a checkpoint's weights: step, to, skipped.
        settings: the resolved settings, key -> value.
        pages: pictures.
    """

    name: str
    curves: dict[str, Points] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Points]] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, tuple[float, str]] = field(default_factory=dict)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    pages: list[Page] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Of the last training line."""
        return int(self.curves["loss"][-1][0]) if self.curves.get("loss") else 0


def read_run(folder: Path) -> Run:
    """Read a run's folder, as far as it is there: a run that goes on, or was killed, is no error.

    Raises:
        SettingsError: the folder holds no run.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise SettingsError(f"{folder} holds no run: there is no {METRICS_FILE} in it")
    pages = [*Album(folder).pages(), *Album(folder / WATCH_FOLDER).pages()]
    newest = {page.name: page for page in sorted(pages, key=lambda page: page.step)}
    run = Run(name=folder.resolve().name, pages=[newest[name] for name in dict.fromkeys(page.name for page in pages)])
    for _, record in lines(metrics):
        take(run, record)
    _take_afterwards(run, folder)
    config = folder / "config.yaml"
    if config.is_file():
        try:
            tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            tree = {}
        run.settings = {key: _shown(value) for key, value in flat(tree or {}, separator=".").items()}
    return run


def take(run: Run, record: Mapping[str, Any]) -> None:
    """Add a record, as metrics.jsonl has it."""
    step = record.get("step", 0)
    if "start" in record:
        run.starts.append({"step": step, **record["start"]})
        run.end = {}
    elif "end" in record:
        run.end = {"step": step, **record["end"]}
    elif "rollback" in record:
        run.rollbacks.append({"step": step, **record["rollback"]})
    elif "health" in record:
        run.health = record["health"]
    elif "stages" in record:
        run.stages = record["stages"]
    elif "error" in record:
        run.failed[str(record["eval"])] = step, str(record["error"])
    else:
        run.failed.pop(str(record.get("eval")), None)
        into = run.evaluations.setdefault(str(record["eval"]), {}) if "eval" in record else run.curves
        for key, value in record.items():
            number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            if number and key not in _NO_CURVE and key != "eval":
                into.setdefault(key, []).append((step, math.nan if value is None else value))


def _records(file: Path) -> list[dict[str, Any]]:
    return [record for _, record in lines(file)] if file.is_file() else []


def _take_afterwards(run: Run, folder: Path) -> None:
    """Add what `clipstream evaluate` and a follower found, the last of a step, beside the run's own evaluations.

    Figures of one name are one curve only if they were made of the same data in the same way: that of the run's own, or
    else of the newest.
    """
    told, watched = (_records(file) for file in (folder / FIGURES_FILE, folder / WATCH_FOLDER / FIGURES_FILE))
    others = [*(record for record in told if "checkpoint" in record), *watched]
    own = [record for record in told if "checkpoint" not in record]
    ways = {str(record["eval"]): way_of(record) for record in (*others, *own) if "error" not in record}
    found: dict[tuple[str, str], dict[float, float]] = {}
    failed: dict[str, tuple[float, str]] = {}
    for record in others:
        step, name = record["step"], str(record["eval"])
        if "error" in record:
            failed[name] = step, str(record["error"])
        elif way_of(record) == ways[name]:
            failed.pop(name, None)
            for metric in record["metrics"]:
                value = record[metric]
                found.setdefault((name, metric), {})[step] = math.nan if value is None else value
    for (name, metric), by_step in found.items():
        metrics = run.evaluations.setdefault(name, {})
        metrics[metric] = sorted({**by_step, **dict(metrics.get(metric, []))}.items())
    run.failed = {**failed, **run.failed}


def _shown(value: Any) -> str:
    """As people read it, and without credentials: a report is shown around."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else redact(str(value))


def fewer(points: Points, most: int = 400) -> Points:
    """At most so many points: means over equal spans of the steps; the first and the last stay as they are."""
    if len(points) <= most:
        return points
    first, last = points[0][0], points[-1][0]
    spans: dict[int, Points] = {}
    for x, y in points[1:-1]:
        spans.setdefault(int((x - first) / (last - first or 1) * (most - 2)), []).append((x, y))
    means = []
    for span in spans.values():
        finite = [y for _, y in span if math.isfinite(y)]
        means.append((span[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return [points[0], *means, points[-1]]
