"""Evaluations of a run, and their tables: metrics with their provenance (model, weights, data, settings, versions).

Records of evaluations enter, as `evals.runner` makes them; lines of metrics.jsonl and tables (a metric per line) leave.
Lines are only appended, except that a resumed run writes its later ones again. `differences` says whether two
evaluations may be compared: they need the same test set and settings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clipstream.evals.statistics import bounds, chance_of, format_chance, format_value, interval, metrics_of
from clipstream.report.sinks import (
    METRICS_FILE,
    AppendedFile,
    Record,
    Sink,
    append,
    flat,
    json_line,
    lines,
    markdown_table,
)
from clipstream.utils import atomic_write

TABLE_FILE = "evaluations.csv"
FORMER_FILE = "evaluations.jsonl"  # of runs of before 0.2: see `with_provenance`
TABLES = (".csv", ".md")  # suffixes of tables
# Settings that do not affect metrics.
NO_PART = ("every", "every_epochs", "fetch", "on_error", "weights", "batch_size", "prompts", "role")
NO_ROW = ("n", "captions", "dropped", "seconds")
TABLE = ("run", "checkpoint", "model", "pretrained", "step", "eval", "metric", "value", "low", "high", "chance", "n")
MARKDOWN = ("checkpoint", "model", "step", "eval", "metric", "value", "95% interval", "chance")
# Oldest first, the last one by evaluator, step, whether `clipstream evaluate` made it, and whether it failed.
Evaluations = dict[tuple[str, int, bool, bool], Record]


def put(found: Evaluations, record: Record) -> None:
    """Add an evaluation, in the place of an earlier one of the same step."""
    key = str(record.get("eval")), record.get("step", 0), "checkpoint" in record, "error" in record
    found.pop(key, None)
    found[key] = record


def with_provenance(found: Evaluations, folder: Path) -> Evaluations:
    """Evaluations of metrics.jsonl, with those that a run of before 0.2 has in a file of their own.

    There it has the provenance of its evaluations, and all of those by `clipstream evaluate`.
    """
    former: Evaluations = {}
    path = folder / FORMER_FILE
    for _, record in lines(path) if path.is_file() else ():
        put(former, record)
    later = {key: record for key, record in former.items() if "checkpoint" in record}
    return later | {key: one if "metrics" in one else former.get(key, one) for key, one in found.items()}


def read_evaluations(folder: Path) -> list[Record]:
    """The evaluations of a run, oldest first, with those of its checkpoints by `clipstream evaluate`.

    Raises SettingsError: see `lines`.
    """
    found: Evaluations = {}
    path = folder / METRICS_FILE
    for _, record in lines(path) if path.is_file() else ():
        if "eval" in record:
            put(found, record)
    return list(with_provenance(found, folder).values())


def add(path: Path, *records: Record) -> None:
    """Append records to a file: a line per metric to a `.csv` or `.md` file, else a JSON line each.

    A line that a killed process left torn is ended first. Raises OSError: the file cannot be written, and is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        before = file.seek(0, io.SEEK_END)
        if path.suffix.lower() in TABLES:
            text = table_lines(*records, head=not before, markdown=path.suffix.lower() == ".md")
        else:
            text = "".join(map(json_line, records))
        if before:
            file.seek(-1, io.SEEK_END)
            text = "\n" * (file.read(1) != b"\n") + text
        left = text.encode()
        try:
            while left:
                left = left[append(file, left) :]
        except OSError:  # the next line must not continue a torn one
            file.truncate(before)
            raise


class EvaluationTable(AppendedFile, Sink):
    """FOLDER/evaluations.csv: the evaluations of metrics.jsonl, of which a run writes those that it finds anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / TABLE_FILE)
        if found := read_evaluations(folder):
            atomic_write.replace(self.path, table_lines(*found, head=True).encode())
        else:
            self.path.unlink(missing_ok=True)
        self._headed = bool(found)

    def write(self, record: Record) -> None:
        if "eval" in record:
            self.add(table_lines(record, head=not (self._headed or self.path.exists())))
            self._headed = True


def table_lines(*evaluations: Record, head: bool, markdown: bool = False) -> str:
    """A line per metric of evaluations, after the names of the columns if `head`.

    CSV has numbers, with the 95% interval of shares as `low` and `high`; Markdown has them as text. The provenance
    is in the JSON lines alone.
    """
    rows = [
        _row(one, metric, markdown)
        for one in evaluations
        for metric in metrics_of(one)
        if metric not in NO_ROW and not metric.startswith("chance")
    ]
    if markdown:
        cells = [["" if row.get(key) is None else str(row[key]) for key in MARKDOWN] for row in rows]
        lines = markdown_table(MARKDOWN, cells).splitlines()
        return "".join(f"{line}\n" for line in (lines if head else lines[2:]))
    out = io.StringIO()
    writer = csv.DictWriter(out, TABLE, extrasaction="ignore", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(one: Record, metric: str, markdown: bool) -> dict[str, Any]:
    model, value = one.get("model", {}), one[metric]
    row = {**one, "model": model.get("name"), "pretrained": model.get("pretrained"), "metric": metric, "value": value}
    if markdown:
        row["value"] = format_value(metric, value)
        return {**row, "95% interval": interval(one, metric), "chance": format_chance(one, metric)}
    low, high = (round(end, 4) for end in found) if (found := bounds(one, metric)) else (None, None)
    return {**row, "low": low, "high": high, "chance": chance_of(one, metric)}


def _is_source(value: Any) -> bool:
    return isinstance(value, dict) and "shards" in value


PIXELS = ("transform", "background", "orientation")  # settings of a source that change the pixels of the same files

FINGERPRINTED = ("classes", "templates", "label", "max_samples")  # settings whose effect the fingerprints show


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
        if _is_source(value):
            yield from flat({key: {part: value[part] for part in kept if part in value}}, separator=".").items()
        elif key not in (*NO_PART, *FINGERPRINTED):
            yield key, value
