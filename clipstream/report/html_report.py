"""report.html: the folder of a run, or of several, becomes one HTML file that needs no network.

`read_run` reads a run's records, settings and images; `render` makes the page.
"""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from typing_extensions import TypedDict

from clipstream.checkpoint.store import is_locked
from clipstream.data.decode.key_lists import LEFT_OUT
from clipstream.data.decode.tokenizers import CUT
from clipstream.data.loader.health import LARGE_CROP, lost_area_note
from clipstream.errors import SettingsError
from clipstream.evals.statistics import (
    Evaluations,
    chance_of,
    differences,
    groups,
    interval,
    is_count_of_part,
    is_minor,
    is_of_language,
    is_share,
    metrics_of,
    put,
)
from clipstream.report.pages import Chart, Points, Series, fill, means, short, step_times
from clipstream.report.records import METRICS_FILE, Position, Record, lines, with_provenance
from clipstream.report.sinks import LARGEST, ImageFiles, Page, Sink
from clipstream.report.terminal import early_stop_line
from clipstream.storage.shard_url import redact
from clipstream.text import duration, milliseconds, percent
from clipstream.training.settings import AUDIT_FILE
from clipstream.utils import atomic_write
from clipstream.utils.section import flat, parse_as

REPORT_FILE = "report.html"
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
MACHINE = ("samples_per_s", "tokens_per_s", "tflops", "mfu", "data_wait", "gpu/", "cpu/")  # folded, behind the results
# Not shown as charts of their own: the parts of a step, and memory at the moment of a line.
HIDDEN = ("time/", "gpu/memory_allocated", "cpu/memory_peak")
MOST_POINTS = 4000  # of a curve in memory; then it has at least half of them, means over equal spans of steps
INTERVAL = 60.0  # minimum seconds between two reports of a running run
HEADINGS = {  # of groups of images
    "best": "Found: images whose own caption ranks best",
    "worst": "Missed: images whose own caption ranks worst",
    "right": "Classified correctly",
    "wrong": "Classified wrongly",
}
ROW = 3  # charts side by side
ODD = 0.05  # share of dropped samples that is marked
TILES = 8  # metrics shown as large figures
COUNTS = ("n", "dropped", "seconds", "captions", "n_train", "batch_size", "batches", "left_out", "languages")
_NO_CURVE = ("step", "samples", "epoch")


class _Finding(TypedDict):
    severity: str
    where: str
    what: str
    advice: str
    count: int


class _Audit(TypedDict):
    precision: str
    findings: list[_Finding]


@dataclass(frozen=True)
class Evaluated:
    """What one evaluator found in a run."""

    curves: dict[str, Points]  # (step, value) by metric
    newest: Record | None  # the newest evaluation that did not fail, of the run itself if there is one
    failed: tuple[float, str] | None  # step and error, if the newest one failed

    @classmethod
    def of(cls, records: Sequence[Record]) -> Evaluated:
        """The run's own evaluations, and those by `clipstream evaluate` that may be compared with the newest of them,
        or else with the newest of all. Of a step, the run's own counts.
        """
        own = [record for record in records if "checkpoint" not in record]
        others = [record for record in records if "checkpoint" in record]
        newest = next((one for one in (*own[::-1], *others[::-1]) if "error" not in one), None)
        alike = [one for one in others if "error" in one or not differences(newest, one)]
        values: dict[str, dict[float, float]] = {}
        failed = None
        for group in (alike, own):
            for one in group:
                step = one.get("step", 0)
                for metric, value in () if "error" in one else metrics_of(one).items():
                    values.setdefault(metric, {})[step] = math.nan if value is None else value
            if group and "error" in group[-1]:
                failed = group[-1].get("step", 0), str(group[-1]["error"])
        return cls({metric: sorted(points.items()) for metric, points in values.items()}, newest, failed)


@dataclass
class RunContents:
    name: str  # of the folder
    # (step, value) by metric of the training lines; metrics within others as time/data
    curves: dict[str, Points] = field(default_factory=dict)
    records: Evaluations = field(default_factory=dict)
    health: Record = field(default_factory=dict)  # the newest counts of data health, by source
    cropped: Record = field(default_factory=dict)  # what crops leave out, by source (see `lost_areas`)
    # time of the data stages in the last training line's steps
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    profile: Record = field(default_factory=dict)  # the newest one (see `StepProfiler.finish`)
    # one for each process that started or resumed the run: step, time, versions, …
    starts: list[Record] = field(default_factory=list)
    # of the last process: step, time, seconds, status, code, error, total_steps, early_stop (see `EarlyStop.summary`);
    # empty if it has not ended, or was killed
    end: Record = field(default_factory=dict)
    seconds: float = 0.0  # total time of the processes that recorded it
    running: bool = False  # whether a process holds the folder
    rollbacks: list[Record] = field(default_factory=list)  # step, to, skipped
    settings: dict[str, str] = field(default_factory=dict)  # the resolved settings, by dotted key
    pages: list[Page] = field(default_factory=list)  # images and tables
    audit: Record = field(default_factory=dict)  # of the precision of a step; empty if there was none
    read: Position = field(default_factory=Position)  # of metrics.jsonl
    span: float = 0.0  # steps of which the points of a curve are means; 0 as long as all points are kept

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

    @cached_property
    def evaluated(self) -> dict[str, Evaluated]:
        """The evaluations by evaluator."""
        by_name: dict[str, list[Record]] = {}
        for (name, *_), record in self.records.items():
            by_name.setdefault(name, []).append(record)
        return {name: Evaluated.of(records) for name, records in by_name.items()}

    def crops(self) -> dict[str, Record]:
        """What crops leave out of the images of sources, and of evaluations where it is not zero."""
        made = {
            name: {"images": data["measured"], "evaluation": data["lost_area"]}
            for name, one in self.evaluated.items()
            for data in (one.newest or {}).get("data", [])[:1]
            if data.get("lost_area", 0) >= 0.005
        }
        return {**self.cropped, **made}


def read_run(folder: Path, seen: RunContents | None = None) -> RunContents:
    """Read the folder of a run that is finished, running or was killed.

    Args:
        seen: what was taken from metrics.jsonl before; its new lines are added.

    Raises SettingsError: the folder holds no run.
    """
    metrics, name = folder / METRICS_FILE, folder.resolve().name
    if not metrics.is_file():
        raise SettingsError(f"{folder} is not a run folder: {METRICS_FILE} is missing")
    for path in (path for form in ("*.jsonl", "*.json", "*.yaml") for path in folder.glob(form)):
        atomic_write.note_input(path)
    seen = RunContents(name) if seen is None else seen
    if metrics.stat().st_size < seen.read.offset:  # another file
        vars(seen).update(vars(RunContents(name)))
    for _, record in lines(metrics, seen.read):
        take(seen, record)
    run = replace(seen, name=name, pages=ImageFiles(folder).pages(), running=is_locked(folder), settings={})
    run.records = with_provenance(seen.records, folder)
    if (audit := folder / AUDIT_FILE).is_file():
        with suppress(OSError, ValueError):  # torn by a kill
            run.audit = parse_as(_Audit, audit.read_bytes())
    config = folder / "config.yaml"
    if config.is_file():
        try:
            tree = parse_as(dict[str, object], yaml.safe_load(config.read_text(encoding="utf-8")) or {})
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
        run.health, run.cropped = record["health"], record.get("cropped", {})
    elif "stages" in record:
        run.stages = record["stages"]
    elif "profile" in record:
        run.profile = record["profile"]
    elif "eval" in record:
        put(run.records, record)
    else:
        for key, value in flat(record).items():
            number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            if number and key not in _NO_CURVE:
                run.curves.setdefault(key, []).append((step, math.nan if value is None else value))
        if len(run.curves.get("loss", ())) > MOST_POINTS:
            steps = sorted(step for step, _ in run.curves["loss"])
            needed = max(2 * (steps[-1] - steps[0]) / MOST_POINTS, 1.0)
            while run.span < needed:
                run.span = 2 * run.span or needed
            for name, points in run.curves.items():
                if name.startswith("time/"):  # of a part that took no time, lines have none
                    of = dict(points)
                    points = [(step, of.get(step, 0.0)) for step in steps]
                run.curves[name] = means(sorted(points, key=lambda point: point[0]), run.span)


class Report(Sink):
    """The report of a run, written after evaluations and at the end. Of metrics.jsonl, it reads what is new."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / REPORT_FILE
        self._made, self._seen = float("-inf"), RunContents("")

    def write(self, record: Record) -> None:
        """Write the report after an evaluation, if the last one is old enough."""
        if "eval" in record and time.monotonic() - self._made > INTERVAL:
            self.close()

    def close(self) -> None:
        self._made = time.monotonic()
        write_page(self.path, [read_run(self.folder, self._seen)])


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
    settings = []  # a row per key with its value in each run; those that differ come first
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, "") for run in runs]
        settings.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    settings.sort(key=lambda row: not row["differs"])
    shown = {**_results(runs, names, evaluations), **_details(runs, names)}
    sections = {
        "results": ("Results", shown["headlines"] or shown["kinds"]),
        "images": ("Images", shown["pages"]),
        "curves": ("Curves and metrics", shown["curves"] or evaluations),
        "data": ("Data", shown["health"] or shown["crops"] or shown["trained_on"]),
        "precision": ("Precision", any(run.audit for run in runs)),
        "settings": ("Settings", settings),
        "machine": ("Machine", shown["machine"] or any(run.stages or run.profile for run in runs)),
        "environment": ("Environment", any(run.starts for run in runs)),
    }
    return fill(
        "runs",
        names[0] if len(runs) == 1 else f"{len(runs)} runs",
        **shown,
        names=names,
        runs=list(zip(names, runs, strict=True)),
        environment=_environment,
        contents={id_: called for id_, (called, there) in sections.items() if there},
        evaluations=evaluations,
        settings=settings,
        differing=sum(row["differs"] is True for row in settings),
        several=len(runs) > 1,
        trained=trained,
        short=short,
        duration=duration,
        milliseconds=milliseconds,
        early_stop_line=early_stop_line,
        image_size=image_size,
        lost_area_note=lost_area_note,
        LARGE_CROP=LARGE_CROP,
        LEFT_OUT=LEFT_OUT,
        ODD=ODD,
        CUT=CUT,
        HEADINGS=HEADINGS,
        TILES=TILES,
    )


def _results(runs: Sequence[RunContents], names: Sequence[str], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of metrics: rows of the main ones, kinds of losses, and charts."""
    headlines = []  # the main metrics of each evaluation, or else its first one
    for one in evaluations:
        rows = [row for row in one["rows"] if not is_minor(row["metric"])] or one["rows"][:1]
        headlines += [{**row, "name": one["name"]} for row in rows]
    headlines.sort(key=lambda row: row["metric"] != "mean")  # means first
    main = [row["chart"] for row in headlines]
    kinds = list(dict.fromkeys(loss_kind(run) for run in runs if "loss" in run.curves))
    losses = [
        Chart(
            f"loss ({kind})" if len(kinds) > 1 else "loss",
            _series(names, [run.curves.get("loss", []) if loss_kind(run) == kind else [] for run in runs]),
        )
        for kind in kinds
    ]
    charts = _training_charts(runs, names)
    machine = [metric for metric in charts if metric.startswith(MACHINE)]
    minor = [chart for metric, chart in charts.items() if metric not in ("loss", *machine)]
    others = [row for one in evaluations for row in one["rows"] if row["chart"] not in main]
    minor += [row["chart"] for row in others if not is_of_language(row["metric"])]  # these are in the table alone
    drawn = {"curves": [*losses, *main], "minor": minor, "machine": [charts[metric] for metric in machine]}
    shown = {name: [chart for chart in those if chart.svg()] for name, those in drawn.items()}
    few = max(0, ROW - len(shown["curves"]))
    shown["curves"], shown["minor"] = shown["curves"] + shown["minor"][:few], shown["minor"][few:]
    return {"headlines": headlines, "kinds": kinds, **shown}


def _details(runs: Sequence[RunContents], names: Sequence[str]) -> dict[str, Any]:
    """What the page shows of images, data and the machine, with the run's name, or of several that of the source."""
    named = list(zip(names, runs, strict=True))
    pages = [(name, page) for name, run in named for page in run.pages]

    def of(name: str, source: str) -> str:
        return source if len(runs) == 1 else f"{name}: {source}"

    return {
        "pages": [(name, page) for name, page in pages if page.name != "train"],
        "trained_on": [(name, page) for name, page in pages if page.name == "train"],
        "health": [(of(name, one), counts) for name, run in named for one, counts in sorted(run.health.items())],
        "crops": [(of(name, one), crop) for name, run in named for one, crop in run.crops().items()],
        "steps": [(name, *times) for name, run in named if (times := step_times(run.curves))[1]],
    }


def _training_charts(runs: Sequence[RunContents], names: Sequence[str]) -> dict[str, Chart]:
    """The charts of training lines by metric, in the order of the page."""
    charts = {}
    for metric in dict.fromkeys((*TITLES, *(metric for run in runs for metric in run.curves))):
        points = [run.curves.get(metric, []) for run in runs]
        if not metric.startswith(HIDDEN) and (metric not in RARE or any(y for line in points for _, y in line)):
            title = TITLES.get(metric, metric.replace("_", " "))
            charts[metric] = Chart(title, _series(names, points), share=metric in SHARES)
    return charts


def _environment(start: Record) -> list[tuple[str, str]]:
    """Command, code, hardware and versions of a start, by name."""
    rows = [(key, start[key]) for key in ("command", "folder") if start.get(key)]
    if git := start.get("git"):
        rows.append(("git", f"{git.get('commit')}{', with changes that are not committed' * bool(git.get('dirty'))}"))
    for key, value in (start.get("hardware") or {}).items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        rows += [(key.replace("_gib", ", GiB"), shown)] if value else []
    return [*rows, *sorted(start["versions"].items())]


def loss_kind(run: RunContents) -> str:
    """The kind of a run's loss, in words: losses of different kinds have different scales."""
    of = run.settings.get
    kind, model = of("loss.type", "auto"), of("model.name", "")
    if kind == "auto":
        biased = of("model.config.model_cfg.init_logit_bias", "null") != "null" or "siglip" in model.lower()
        kind = "siglip" if biased else "clip"
    distilled = any(metric.startswith("loss_") and metric != "loss_scale" for metric in run.curves)
    batch = f", batch {size}" if (size := of("data.global_batch_size")) else ""
    return {"clip": "softmax", "siglip": "sigmoid"}.get(kind, kind) + batch + ", distillation" * distilled


def image_size(src: str) -> tuple[int, int]:
    """(width, height) of the image in a data: URL, so that a browser leaves its place before it is decoded."""
    with suppress(Exception):  # of any kind, where the file was changed by hand
        return Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))).size
    return LARGEST, LARGEST


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
    kinds = [{"kind of loss": loss_kind(run)} for run in runs]
    for name in dict.fromkeys(name for run in runs for name in run.evaluated):
        each = [run.evaluated.get(name) for run in runs]
        of_runs = [{} if one is None else one.curves for one in each]
        last = [{metric: points[-1][1] for metric, points in metrics.items()} for metrics in of_runs]
        having = [i for i, one in enumerate(each) if one is not None and one.curves]
        made = [one.newest for one in each if one is not None and one.curves]
        if any("val_loss" in metrics for metrics in last):
            made = [
                one and {**one, "settings": {**one.get("settings", {}), **kinds[i]}}
                for i, one in zip(having, made, strict=True)
            ]
        grouped = dict(zip(having, groups(made), strict=True))
        marks = [f"≠{grouped[i][0]}" if i in grouped and grouped[i][0] else "" for i in range(len(runs))]
        others = {}
        for mark in dict.fromkeys(filter(None, marks)):
            members = [i for i, other in enumerate(marks) if other == mark]
            who = ", ".join(names[i] for i in members)
            others[mark] = f"{who} with {names[having[0]]}: {grouped[members[0]][1]}"
        rows = []
        for metric in (present := dict.fromkeys(metric for metrics in last for metric in metrics)):
            if metric.startswith("chance") or metric in COUNTS or is_count_of_part(metric, present):
                continue
            lines = [metrics.get(metric, []) for metrics in of_runs]
            share = all(is_share(metric, float(y)) for points in lines for _, y in points)
            chances = [chance for values in last if (chance := chance_of(values, metric)) is not None]
            first = [[], *(lines[0] if mark == marks[0] else [] for mark in marks[1:])]
            cells = [
                {**_cell(points, share, of), "mark": mark, "interval": metric in values and interval(values, metric)}
                for points, of, mark, values in zip(lines, first, marks, last, strict=True)
            ]
            shown = percent if share else short
            chart = Chart(f"{name} · {metric}", _series(names, lines, marks), chances[0] if chances else None, share)
            told = " / ".join(dict.fromkeys(map(shown, chances)))
            rows.append({"metric": metric, "chance": told, "cells": cells, "chart": chart})
        about = [
            f"{of}: {_about(metrics)}" if len(runs) > 1 else _about(metrics)
            for of, metrics in zip(names, of_runs, strict=True)
            if metrics
        ]
        failed = [(of, *one.failed) for of, one in zip(names, each, strict=True) if one is not None and one.failed]
        found.append({"name": name, "about": about, "failed": failed, "others": others, "rows": rows})
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


def _cell(points: Points, share: bool, first: Points) -> dict[str, Any]:
    """The last value, the best one if it was earlier, and the difference from the first run's last value."""
    if not points:
        return {"last": "", "best": "", "more": "", "value": math.nan}
    say = percent if share else short
    best_step, best = max(points, key=lambda point: point[1])
    earlier = share and best > points[-1][1]
    more = points[-1][1] - first[-1][1] if first else math.nan
    told = f"{100 * more:+.1f} points" if share else f"{'+' * (more >= 0)}{short(more)}"
    return {
        "value": points[-1][1],
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
