"""Files of evaluations: lines of metrics.jsonl, and tables of their metrics.

Records of evaluations enter, as `evals.runner` makes them; lines, and tables with a metric per line, leave.
Lines are only appended, except that a resumed run writes its later ones again.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from clipstream.evals.statistics import bounds, chance_of, format_chance, format_value, interval, metrics_of
from clipstream.report.sinks import AppendedFile, Record, Sink, append, json_line, markdown_table, read_evaluations
from clipstream.utils import atomic_write

TABLE_FILE = "evaluations.csv"
TABLES = (".csv", ".md")  # suffixes of tables
NO_ROW = ("n", "captions", "dropped", "seconds")
TABLE = ("run", "checkpoint", "model", "pretrained", "step", "eval", "metric", "value", "low", "high", "chance", "n")
MARKDOWN = ("checkpoint", "model", "step", "eval", "metric", "value", "95% interval", "chance")


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
