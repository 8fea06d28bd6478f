"""Reads a run's folder into `RunContents`: curves, evaluations, data health, profile, settings, starts, pictures."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from typing_extensions import TypedDict

from clipstream.checkpoint.run_lock import is_occupied
from clipstream.errors import SettingsError
from clipstream.report.eval_results import FIGURES_FILE, WATCH_FOLDER, way_of
from clipstream.report.sinks import AUDIT_FILE, METRICS_FILE, Page, PictureFiles, Record, flat, lines
from clipstream.storage.shard_url import redact
from clipstream.utils.section import checked

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
    pages: list[Page] = field(default_factory=list)  # pictures
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
        raise SettingsError(f"{folder} holds no run: there is no {METRICS_FILE} in it")
    pages = [*PictureFiles(folder).pages(), *PictureFiles(folder / WATCH_FOLDER).pages()]
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
