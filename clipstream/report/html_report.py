"""report.html: the folder of a run, or of several, becomes one HTML file that needs no network.

`read_run` reads a run's records, settings and images; `render` makes the page.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import TypedDict

from clipstream import __version__
from clipstream.checkpoint.store import is_occupied
from clipstream.errors import SettingsError
from clipstream.report.eval_results import FIGURES_FILE, WATCH_FOLDER, groups, way_of
from clipstream.report.sinks import AUDIT_FILE, METRICS_FILE, ImageFiles, Page, Record, Sink, flat, lines
from clipstream.report.terminal import chance_of, early_stop_line, is_minor, is_share
from clipstream.storage.shard_url import redact
from clipstream.text import duration, milliseconds, percent
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.section import checked
from clipstream.utils.timing import PARTS

REPORT_FILE = "report.html"
TEMPLATE = "page.html"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # which no page has, though names of runs may
TITLES = {  # of curves, in the order of the page; others follow
    "loss": "loss",
    "samples_per_s": "samples a second",
    "tokens_per_s": "text tokens a second",
    "tflops": "TFLOP/s of a device",
    "mfu": "model FLOPs utilisation (MFU)",
    "data_wait": "waiting for data",
    "gpu/utilization": "GPU utilisation",
    "gpu/power_w": "GPU power, W",
    "gpu/memory_peak_gib": "GPU memory at most, GiB",
    "gpu/memory_reserved_gib": "GPU memory reserved, GiB",
    "cpu/cores": "busy processor cores",
    "cpu/memory_gib": "memory of a rank, GiB",
    "cpu/workers_memory_gib": "memory of a rank's data workers, GiB",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
    "logit_scale": "logit scale",
    "overflow_rate": "steps whose gradients overflowed",
    "skipped": "skipped steps (loss or gradients not finite)",
}
RARE = ("skipped",)  # not shown if all values are 0
SHARES = ("mfu", "data_wait", "gpu/utilization", "overflow_rate")
# Not shown as charts of their own: the parts of a step, and memory at the moment of a line.
HIDDEN = ("time/", "gpu/memory_allocated", "cpu/memory_peak")
INTERVAL = 60.0  # minimum seconds between two reports of a running run
COUNTS = ("n", "dropped", "seconds", "captions", "n_train", "batch_size", "batches", "left_out")
WIDTH, HEIGHT = 360, 190  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22  # its margins
COLOURS = 8


_NO_CURVE = ("step", "samples", "epoch")

Points = list[tuple[float, float]]


class _Finding(TypedDict):
    severity: str
    where: str
    what: str
    advice: str
    count: int


class _Audit(TypedDict):
    precision: str
    findings: list[_Finding]


@dataclass
class RunContents:
    """The contents of a run's folder."""

    name: str  # of the folder
    # (step, value) by metric of the training lines; metrics within others as time/data
    curves: dict[str, Points] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Points]] = field(default_factory=dict)  # (step, value) by evaluator and metric
    health: Record = field(default_factory=dict)  # the newest counts of data health, by source
    # time of the data stages in the last training line's steps
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    profile: Record = field(default_factory=dict)  # the newest one (see `StepProfiler.finish`)
    # one for each process that started or resumed the run: step, time, versions, …
    starts: list[Record] = field(default_factory=list)
    # of the last process: step, time, seconds, status, code, error, total_steps, early_stop (see `EarlyStop.why`);
    # empty if it has not ended, or was killed
    end: Record = field(default_factory=dict)
    seconds: float = 0.0  # total time of the processes that recorded it
    running: bool = False  # whether a process holds the folder
    made: dict[str, Record] = field(default_factory=dict)  # the newest traced record of each evaluation
    # step and error of evaluators whose newest evaluation failed
    failed: dict[str, tuple[float, str]] = field(default_factory=dict)
    rollbacks: list[Record] = field(default_factory=list)  # step, to, skipped
    settings: dict[str, str] = field(default_factory=dict)  # the resolved settings, by dotted key
    pages: list[Page] = field(default_factory=list)  # images and tables
    audit: Record = field(default_factory=dict)  # of the precision of a step; empty if there was none

    @property
    def status(self) -> str:
        """done, stopped, failed, diverged, running, or unrecorded (it was killed)."""
        if self.end:
            return str(self.end.get("status", "done"))
        return "running" if self.running else "unrecorded"

    @property
    def steps(self) -> int:
        """Step of the last training line."""
        return int(self.curves["loss"][-1][0]) if self.curves.get("loss") else 0


def read_run(folder: Path) -> RunContents:
    """Read the folder of a run that is finished, running or was killed.

    Raises SettingsError: the folder holds no run.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise SettingsError(f"{folder} is not a run folder: {METRICS_FILE} is missing")
    pages = [*ImageFiles(folder).pages(), *ImageFiles(folder / WATCH_FOLDER).pages()]
    newest = {page.name: page for page in sorted(pages, key=lambda page: page.step)}
    run = RunContents(
        name=folder.resolve().name, pages=[newest[name] for name in dict.fromkeys(page.name for page in pages)]
    )
    for _, record in lines(metrics):
        take(run, record)
    run.running = is_occupied(folder)
    _take_later_evaluations(run, folder)
    if (audit := folder / AUDIT_FILE).is_file():
        with suppress(OSError, ValueError):  # torn by a kill
            run.audit = checked(_Audit, audit.read_bytes())
    config = folder / "config.yaml"
    if config.is_file():
        try:
            tree = checked(dict[str, object], yaml.safe_load(config.read_text(encoding="utf-8")) or {})
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            tree = {}
        for key, value in flat(tree, separator=".").items():
            plain = value is None or isinstance(value, bool)
            run.settings[key] = str(value).lower() if plain else redact(str(value))
    return run


def take(run: RunContents, record: Record) -> None:
    """Add a record of metrics.jsonl."""
    step = record.get("step", 0)
    if "start" in record:
        run.starts.append({"step": step, **record["start"]})
        run.end = {}
    elif "end" in record:
        run.seconds += record.get("seconds", 0.0)
        run.end = {**record["end"], **{key: value for key, value in record.items() if key != "end"}}
    elif "rollback" in record:
        run.rollbacks.append({"step": step, **record["rollback"]})
    elif "health" in record:
        run.health = record["health"]
    elif "stages" in record:
        run.stages = record["stages"]
    elif "profile" in record:
        run.profile = record["profile"]
    elif "error" in record:
        run.failed[str(record.get("eval"))] = step, str(record["error"])
    else:
        run.failed.pop(str(record.get("eval")), None)
        into = run.evaluations.setdefault(str(record["eval"]), {}) if "eval" in record else run.curves
        for key, value in (record if "eval" in record else flat(record)).items():
            number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            if number and key not in _NO_CURVE and key != "eval":
                into.setdefault(key, []).append((step, math.nan if value is None else value))


def _take_later_evaluations(run: RunContents, folder: Path) -> None:
    """Add the evaluations by `clipstream evaluate`, with and without --watch; of a step, the last one counts.

    Evaluations of one name form a curve only if they used the same data and settings: those of the run's own
    evaluations, or else of the newest one.
    """
    files = (folder / FIGURES_FILE, folder / WATCH_FOLDER / FIGURES_FILE)
    records, watched = ([record for _, record in lines(file)] if file.is_file() else [] for file in files)
    others = [*(record for record in records if "checkpoint" in record), *watched]
    own = [record for record in records if "checkpoint" not in record]
    run.made = {str(record.get("eval")): record for record in (*others, *own) if "error" not in record}
    ways = {name: way_of(record) for name, record in run.made.items()}
    found: dict[tuple[str, str], dict[float, float]] = {}
    failed: dict[str, tuple[float, str]] = {}
    for record in others:
        step, name = record.get("step", 0), str(record.get("eval"))
        if "error" in record:
            failed[name] = step, str(record["error"])
        elif way_of(record) == ways[name]:
            failed.pop(name, None)
            for metric in record.get("metrics", ()):
                value = record.get(metric)
                found.setdefault((name, metric), {})[step] = math.nan if value is None else value
    for (name, metric), by_step in found.items():
        metrics = run.evaluations.setdefault(name, {})
        metrics[metric] = sorted({**by_step, **dict(metrics.get(metric, []))}.items())
    run.failed = {**failed, **run.failed}


def fewer(points: Points, most: int = 400) -> Points:
    """Reduce points to at most `most`: means over equal spans of steps; the first and last are kept."""
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


class Report(Sink):
    """The report of a run, written after evaluations and at the end. A failure is a warning and never ends a run.

    Args:
        folder: of the run.
        into: folder of report.html; that of the run unless given.
    """

    def __init__(self, folder: str | Path, into: Path | None = None) -> None:
        self.folder = Path(folder)
        self.path = (into or self.folder) / REPORT_FILE
        self._made = float("-inf")

    def write(self, record: Record) -> None:
        """Write the report after an evaluation, if the last one is old enough."""
        if "eval" in record and time.monotonic() - self._made > INTERVAL:
            self.close()

    def close(self) -> None:
        try:
            write_page(self.path, [read_run(self.folder)])
        except Exception as error:
            logger.warning(f"{self.path} could not be written: {error}")
        self._made = time.monotonic()


def write_page(path: Path, runs: Sequence[RunContents], *, trained: bool = True) -> list[str]:
    """Write the page of runs, see `render`; returns which of their metrics may not be compared, in words.

    Raises OSError: the file cannot be written.
    """
    atomic_write.replace(path, render(runs, trained=trained).encode(errors="backslashreplace"))
    names = _distinct([run.name for run in runs])
    return [f"{one['name']} of {told}" for one in _evaluations(runs, names) for told in one["others"].values()]


def render(runs: Sequence[RunContents], *, trained: bool = True) -> str:
    """The page; `trained` says whether the runs trained, or were evaluated only."""
    names = _distinct([run.name for run in runs])
    evaluations = _evaluations(runs, names)
    known = [*TITLES]
    metrics = dict.fromkeys(
        metric
        for run in runs
        for metric, points in run.curves.items()
        if not metric.startswith(HIDDEN) and (metric not in RARE or any(value for _, value in points))
    )
    curves = [
        Chart(
            TITLES.get(metric, metric.replace("_", " ")),
            _series(names, [run.curves.get(metric, []) for run in runs]),
            share=metric in SHARES,
        )
        for metric in sorted(metrics, key=lambda metric: known.index(metric) if metric in known else len(known))
    ]
    settings = []  # a row per key with its value in each run; those that differ come first
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, "") for run in runs]
        settings.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    settings.sort(key=lambda row: not row["differs"])
    pages = [(name, page) for name, run in zip(names, runs, strict=True) for page in run.pages]
    pages.sort(key=lambda named: named[1].name == "train")  # last
    headlines = []  # the main metrics of each evaluation, or else its first one
    for one in evaluations:
        rows = [row for row in one["rows"] if not is_minor(row["metric"])] or one["rows"][:1]
        headlines += [{**row, "name": one["name"]} for row in rows]
    sections = {
        "figures": ("Figures", trained and headlines),
        "training": ("Training", trained),
        "precision": ("Precision", any(run.audit for run in runs)),
        "evaluations": ("Evaluations", evaluations),
        "data": ("Data", any(run.stages or run.health for run in runs)),
        "pictures": ("Images", pages),
        "settings": ("Settings", settings),
        "environment": ("Environment", any(run.starts for run in runs)),
    }
    rendered: str = template(TEMPLATE).render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        runs=list(zip(names, runs, strict=True)),
        colours=COLOURS,
        contents=[(id_, called) for id_, (called, there) in sections.items() if there],
        headlines=headlines,
        curves=curves,
        steps=[(name, StepTimes.of(run)) for name, run in zip(names, runs, strict=True)],
        evaluations=evaluations,
        pages=pages,
        settings=settings,
        several=len(runs) > 1,
        trained=trained,
        short=short,
        percent=percent,
        duration=duration,
        milliseconds=milliseconds,
        early_stop_line=early_stop_line,
    )
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", rendered)


@cache
def template(name: str) -> Any:
    """A page's template; a process that writes several pages compiles it once."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("clipstream.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(name)


def _series(names: Sequence[str], points: Sequence[Points], marks: Sequence[str] = ()) -> tuple[Series, ...]:
    return tuple(
        Series(name, line, number, other=bool(mark))
        for number, (name, line, mark) in enumerate(zip(names, points, marks or [""] * len(names), strict=True))
        if line
    )


def _evaluations(runs: Sequence[RunContents], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each evaluator: charts of its metrics, and a row per metric with a cell per run.

    Runs have the same mark if their metrics may be compared, those comparable with the first run none; `others`
    explains the marks.
    """
    found = []
    for name in dict.fromkeys(name for run in runs for name in (*run.evaluations, *run.failed)):
        of_runs = [run.evaluations.get(name, {}) for run in runs]
        last = [{metric: points[-1][1] for metric, points in metrics.items()} for metrics in of_runs]
        having = [i for i, run in enumerate(runs) if name in run.evaluations]
        grouped = dict(zip(having, groups([runs[i].made.get(name) for i in having]), strict=True))
        marks = [f"≠{grouped[i][0]}" if i in grouped and grouped[i][0] else "" for i in range(len(runs))]
        others = {}
        for mark in dict.fromkeys(filter(None, marks)):
            members = [i for i, other in enumerate(marks) if other == mark]
            who = ", ".join(names[i] for i in members)
            others[mark] = f"{who} with {names[having[0]]}: {grouped[members[0]][1]}"
        charts, rows = [], []
        for metric in dict.fromkeys(metric for metrics in last for metric in metrics):
            if metric.startswith("chance") or metric in COUNTS:
                continue
            lines = [metrics.get(metric, []) for metrics in of_runs]
            share = all(is_share(metric, float(y)) for points in lines for _, y in points)
            chances = [chance for values in last if (chance := chance_of(values, metric)) is not None]
            first = [[], *(lines[0] if mark == marks[0] else [] for mark in marks[1:])]
            cells = [
                {**_cell(points, share, of), "mark": mark} for points, of, mark in zip(lines, first, marks, strict=True)
            ]
            rows.append({"metric": metric, "chance": " / ".join(dict.fromkeys(map(percent, chances))), "cells": cells})
            charts.append(Chart(metric, _series(names, lines, marks), chances[0] if chances else None, share))
        about = [
            f"{of}: {_about(metrics)}" if len(runs) > 1 else _about(metrics)
            for of, metrics in zip(names, of_runs, strict=True)
            if metrics
        ]
        failed = [(of, *run.failed[name]) for of, run in zip(names, runs, strict=True) if name in run.failed]
        found.append({"name": name, "about": about, "failed": failed, "others": others, "rows": rows, "charts": charts})
    return found


def _about(metrics: dict[str, Points]) -> str:
    """Step, samples and duration of the newest evaluation."""
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
    """The last value, the best one if it was earlier, and the difference from the first run's last value."""
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


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of runs, with a number if they are equal."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return found


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str  # of the run, for the legend
    points: Points  # (step, value)
    number: int = 0  # of its colour
    other: bool = False  # whether its values may not be compared with those of the first line


@dataclass(frozen=True)
class Chart:
    """One chart."""

    title: str  # of the chart
    series: tuple[Series, ...]  # its lines
    chance: float | None = None  # value for random guesses, if it is known
    share: bool = False  # whether values are shown in percent

    def svg(self) -> str:
        """The chart as SVG; '' if no line has two points."""
        lines = [fewer(series.points) for series in self.series]
        ys = [y for points in lines for _, y in points if math.isfinite(y)]
        xs = [x for points in lines for x, _ in points]
        if not ys or max(len(points) for points in lines) < 2:
            return ""
        if self.chance is not None:
            ys.append(self.chance)
        ticks = nice_ticks(min(ys), max(ys))
        x0, x1, y0, y1 = min(xs), max(xs), min(*ticks, *ys), max(*ticks, *ys)

        def at(x: float, y: float) -> tuple[float, float]:
            """The position of a value in the drawing."""
            right = LEFT + (x - x0) / (x1 - x0 or 1) * (WIDTH - LEFT - RIGHT)
            return right, HEIGHT - BOTTOM - (y - y0) / (y1 - y0 or 1) * (HEIGHT - TOP - BOTTOM)

        # The page's script turns positions back into values by the data attributes.
        inner = f"{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM}"
        spans = f'data-x0="{x0}" data-x1="{x1}" data-y0="{y0}" data-y1="{y1}"'
        label = f'role="img" aria-label="{escape(self.title)}" data-share="{str(self.share).lower()}"'
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label} {spans} data-inner="{inner}">']
        labels = (f"{100 * tick:.3g}%" if self.share else short(tick) for tick in ticks)
        parts += _axes({at(x0, tick)[1]: label for tick, label in zip(ticks, labels, strict=True)}, x0, x1)
        if self.chance is not None:
            y = at(x0, self.chance)[1]
            parts.append(f'<line class="chance" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for series, points in zip(self.series, lines, strict=True):
            about = f'class="s{series.number % COLOURS}{" other" * series.other}" data-name="{escape(series.name)}"'
            for finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
                if not finite:
                    continue
                positions = [at(x, y) for x, y in run]
                if len(positions) == 1:
                    parts.append(f'<circle {about} cx="{positions[0][0]:.1f}" cy="{positions[0][1]:.1f}" r="2"/>')
                else:
                    parts.append(f'<polyline {about} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in positions)}"/>')
        return "".join([*parts, "</svg>"])


def _axes(ticks: dict[float, str], first: float, last: float) -> Iterator[str]:
    """SVG of the y axis, with labels by their height in the drawing, and of the first and the last step below."""
    for y, shown in ticks.items():
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>'
    for step, x, anchor in ((first, LEFT, "start"), (last, WIDTH - RIGHT, "end")):
        yield f'<text class="tick" x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">{short(step)}</text>'


@dataclass(frozen=True)
class StepTimes:
    """Time of the training step by part, as a stacked chart and a table."""

    parts: dict[str, Points]  # part -> (step, seconds), all of the same steps

    @classmethod
    def of(cls, run: RunContents) -> StepTimes:
        found = {key.removeprefix("time/"): dict(run.curves[key]) for key in run.curves if key.startswith("time/")}
        steps = sorted(set().union(*found.values()))
        known = [part for part in PARTS if part in found]
        order = [*known, *(part for part in found if part not in known)]
        return cls({part: [(step, found[part].get(step, 0.0)) for step in steps] for part in order})

    def rows(self) -> list[tuple[str, float, float]]:
        """(part, mean seconds, share) over all training lines but the first, which has the warm-up."""
        means = {}
        for part, points in self.parts.items():
            values = [seconds for _, seconds in points[1:] or points]
            means[part] = sum(values) / len(values)
        whole = sum(means.values()) or 1.0
        return [(part, mean, mean / whole) for part, mean in means.items()]

    def svg(self) -> str:
        """The shares of the parts over the steps as SVG; '' if there are not two training lines."""
        lines = {part: fewer(points) for part, points in self.parts.items()}
        steps = [step for step, _ in next(iter(lines.values()), [])]
        if len(steps) < 2:
            return ""
        wholes = [sum(points[n][1] for points in lines.values()) or 1.0 for n in range(len(steps))]
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

        def at(n: int, share: float) -> str:
            x = LEFT + (steps[n] - steps[0]) / (steps[-1] - steps[0]) * (right - LEFT)
            return f"{x:.1f},{bottom - share * (bottom - TOP):.1f}"

        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="time of a step by part">']
        below = [0.0] * len(steps)
        for part, points in lines.items():
            above = [low + points[n][1] / wholes[n] for n, low in enumerate(below)]
            outline = [at(n, share) for n, share in enumerate(above)]
            outline += [at(n, below[n]) for n in reversed(range(len(steps)))]
            shape = f'<polygon class="part {escape(part)}" points="{" ".join(outline)}">'
            parts.append(f"{shape}<title>{escape(part.replace('_', ' '))}</title></polygon>")
            below = above
        ticks = {bottom - share * (bottom - TOP): f"{share:.0%}" for share in (0.0, 0.5, 1.0)}
        parts += _axes(ticks, steps[0], steps[-1])
        return "".join([*parts, "</svg>"])


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About `about` round values from `low` to `high`, with a step of 1, 2 or 5 times a power of ten."""
    if low > 0 and low < 0.35 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size + 1e-15 else max(size, 1e-15) if size else 1.0
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # hides rounding errors of the product
    return [round(step * k, digits) for k in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A number in few characters: 0.00012 as 1.2e-4, 12000 as 12k."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e4:
        for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g}{letter}"
    if 0 < size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"
