"""Owns report.html: a run, or several side by side, as one file that needs no network. Never reads data or a model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clipstream import __version__, durable
from clipstream.report.album import Page
from clipstream.report.charts import COLOURS, Chart, Series, short
from clipstream.report.progress import chance_of, duration, early_stop_line, is_share, milliseconds, percent
from clipstream.report.reading import Points, Run, read_run, take
from clipstream.report.sinks import Record

REPORT_FILE = "report.html"
TEMPLATE = "page.html"
MEANING = {  # in the order of the page; others follow
    "loss": "loss",
    "samples_per_s": "samples a second",
    "data_wait": "waiting for data",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
    "logit_scale": "logit scale",
    "overflow_rate": "steps whose gradients overflowed",
    "skipped": "steps left out, as loss or gradients were not finite",
}
RARE = ("skipped",)  # not shown where nothing happened
SHARES = ("data_wait", "overflow_rate")
MOST_OFTEN = 60.0  # seconds between two reports of a run that goes on
COUNTS = ("n", "dropped", "seconds", "captions", "n_train", "batch_size", "batches", "left_out")


class Report:
    """FOLDER/report.html, made anew after evaluations and at the end.

    A report that fails is told on stderr and never ends a run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._made = float("-inf")

    def write(self, record: Record) -> None:
        """Make the report after an evaluation, not too often."""
        if "eval" in record and time.monotonic() - self._made > MOST_OFTEN:
            self._make()

    def close(self) -> None:
        """Make it as the run ends, however it ends."""
        self._make()

    def _make(self) -> None:
        try:
            write_report([self.folder], self.folder / REPORT_FILE)
        except Exception as error:
            print(f"warning: {self.folder / REPORT_FILE} could not be written: {error}", file=sys.stderr, flush=True)
        self._made = time.monotonic()


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the report of one run, or the comparison of several.

    Raises:
        SettingsError: a folder holds no run.
        OSError: the file cannot be written.
    """
    durable.replace(path, render([read_run(folder) for folder in folders]).encode(errors="backslashreplace"))


def write_evaluations(path: Path, name: str, records: Sequence[Record], pages: Sequence[Page]) -> None:
    """Write a page of evaluations that belong to no training.

    Args:
        path: the file.
        name: of what was evaluated.
        records: of the evaluations, as metrics.jsonl has them.
        pages: what they show.

    Raises:
        OSError: the file cannot be written.
    """
    run = Run(name, pages=[*pages])
    for record in records:
        take(run, record)
    durable.replace(path, render([run], trained=False).encode(errors="backslashreplace"))


def render(runs: Sequence[Run], *, trained: bool = True) -> str:
    """The page; `trained` says whether there is a training to tell of."""
    names = _distinct([run.name for run in runs])
    evaluations = _evaluations(runs, names)
    shown = {evaluation["name"] for evaluation in evaluations}
    return str(
        _template().render(
            title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
            version=__version__,
            runs=list(zip(names, runs, strict=True)),
            colours=COLOURS,
            curves=_curves(runs, names),
            evaluations=evaluations,
            pages=[(name, page) for name, page in _pages(runs, names) if page.name not in shown],
            settings=_settings(runs),
            several=len(runs) > 1,
            trained=trained,
            short=short,
            percent=percent,
            milliseconds=milliseconds,
            early_stop_line=early_stop_line,
        )
    )


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("clipstream.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(TEMPLATE)


def _curves(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    there = dict.fromkeys(
        metric
        for run in runs
        for metric, points in run.curves.items()
        if metric not in RARE or any(value for _, value in points)
    )
    metrics = [metric for metric in MEANING if metric in there] + [metric for metric in there if metric not in MEANING]
    return [
        Chart(
            MEANING.get(metric, metric.replace("_", " ")),
            _series(names, [run.curves.get(metric, []) for run in runs]),
            share=metric in SHARES,
        )
        for metric in metrics
    ]


def _series(names: Sequence[str], points: Sequence[Points]) -> tuple[Series, ...]:
    return tuple(
        Series(name, line, number) for number, (name, line) in enumerate(zip(names, points, strict=True)) if line
    )


def _evaluations(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each evaluator: charts of its metrics over the steps, and a row for each metric with a cell for each run."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in (*run.evaluations, *run.failed)):
        of_runs = [run.evaluations.get(name, {}) for run in runs]
        last = {metric: points[-1][1] for metrics in of_runs for metric, points in metrics.items()}
        charts, rows = [], []
        for metric in last:
            if metric.startswith("chance") or metric in COUNTS:
                continue
            lines = [metrics.get(metric, []) for metrics in of_runs]
            share = all(is_share(metric, float(y)) for points in lines for _, y in points)
            chance = chance_of(last, metric)
            said = "" if chance is None else percent(chance)
            cells = [_cell(points, share, lines[0] if number else []) for number, points in enumerate(lines)]
            rows.append({"metric": metric, "chance": said, "cells": cells})
            charts.append(Chart(metric, _series(names, lines), chance, share))
        about = list(dict.fromkeys(_about(metrics) for metrics in of_runs if metrics))
        pages = [(of, page) for of, page in _pages(runs, names) if page.name == name]
        failed = [(of, *run.failed[name]) for of, run in zip(names, runs, strict=True) if name in run.failed]
        found.append({"name": name, "about": about, "failed": failed, "rows": rows, "charts": charts, "pages": pages})
    return found


def _pages(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, Page]]:
    """The pictures of all runs, with the runs' names."""
    return [(name, page) for name, run in zip(names, runs, strict=True) for page in run.pages]


def _about(metrics: dict[str, Points]) -> str:
    """When the newest evaluation was, on how many samples, and how long it took."""
    step = max(points[-1][0] for points in metrics.values())
    parts = [f"step {short(step)}"]
    if metrics.get("n"):
        parts.append(f"{short(metrics['n'][-1][1])} samples")
    if metrics.get("dropped") and metrics["dropped"][-1][1]:
        parts.append(f"{short(metrics['dropped'][-1][1])} dropped")
    if metrics.get("seconds"):
        parts.append(duration(metrics["seconds"][-1][1]))
    return ", ".join(parts)


def _cell(points: Points, share: bool, first: Points) -> dict[str, str]:
    """The last value, the best one where that was an earlier one, and by how much it is more than the first run's."""
    if not points:
        return {"last": "", "best": "", "more": ""}
    say = percent if share else short
    best_step, best = max(points, key=lambda point: point[1])
    earlier = share and best > points[-1][1]
    more = points[-1][1] - first[-1][1] if first else math.nan
    told = f"{100 * more:+.1f} points" if share else f"{'+' * (more >= 0)}{short(more)}"
    return {
        "last": say(points[-1][1]),
        "best": f"best {say(best)} at {short(best_step)}" if earlier else "",
        "more": told if math.isfinite(more) else "",
    }


def _settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a key: its value in each run; of several runs, those that differ come first."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, "") for run in runs]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of runs; equal ones numbered."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return found
