"""Records of a run as lines of metrics.jsonl, and evaluations as tables; both are read back here.

A record is a dictionary of plain values with a step and one of: a training line (loss, ...), the time of the data
stages (stages), an evaluation (eval, metrics), data health (health), unusable samples (quarantine), a skipped step
(nonfinite), a rollback (rollback), a profile of steps (profile), the start of a process (start), the end of the run
(end). Records enter; lines, and tables with a metric per line, leave, and records again. Lines are only appended,
except that a resumed run writes its later ones again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import ConfigDict, Field, InstanceOf
from typing_extensions import NotRequired, TypedDict

from clipstream.errors import SettingsError
from clipstream.evals.statistics import (
    Evaluations,
    bounds,
    chance_of,
    format_chance,
    format_value,
    interval,
    is_count_of_part,
    metrics_of,
    put,
)
from clipstream.text import MESSAGE, printable
from clipstream.utils import atomic_write
from clipstream.utils.section import Count, flat, map_leaves, parse_as

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"
FORMER_FILE = "evaluations.jsonl"  # of runs of 0.1.0: see `with_provenance`
TABLE_FILE = "evaluations.csv"
TABLES = (".csv", ".md")  # suffixes of tables
NO_ROW = ("n", "captions", "languages", "dropped", "seconds")
TABLE = ("run", "checkpoint", "model", "pretrained", "step", "eval", "metric", "value", "low", "high", "chance", "n")
MARKDOWN = ("checkpoint", "model", "step", "eval", "metric", "value", "95% interval", "chance")


def append(file: IO[bytes], data: bytes | bytearray) -> int:
    """Write at the end of an unbuffered file, to which other processes append as well; returns the bytes written.

    Under a lock, as a host looks for the end of a file of NFS anew where it takes one. Another process's is not waited
    for.
    """
    locked = atomic_write.try_lock(file.fileno(), fcntl.LOCK_EX, posix=True)
    try:
        return file.write(data)
    finally:
        if locked:
            atomic_write.try_lock(file.fileno(), fcntl.LOCK_UN, wait=True, posix=True)


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


def table_lines(*evaluations: Record, head: bool, markdown: bool = False) -> str:
    """A line per metric of evaluations, after the names of the columns if `head`.

    CSV has numbers, with the 95% interval of shares as `low` and `high`; Markdown has them as text. The provenance
    is in the JSON lines alone.
    """
    rows = [
        _row(one, metric, markdown)
        for one in evaluations
        for metric in metrics_of(one)
        if metric not in NO_ROW and not is_count_of_part(metric, one) and not metric.startswith("chance")
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


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, by TensorBoard tag."""
    if any(kind in record for kind in ("start", "end", "quarantine", "nonfinite", "profile")):
        return
    prefix = f"eval/{record['eval']}" if "eval" in record else "train"
    numbers = metrics_of(record) if "eval" in record else {key: record[key] for key in record if key != "step"}
    for kind in ("health", "stages"):
        if kind in record:
            prefix, numbers = "", {kind: record[kind]}
    for tag, value in flat(numbers, prefix).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield tag, value


def json_line(record: Record) -> str:
    """A record as a line of JSON; NaN and infinity become null."""

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(map_leaves(record, finite), allow_nan=False) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, which TensorBoard renders. Its cells are texts, without links, images and HTML."""
    texts = [[printable(" ".join(cell.split()), MESSAGE).replace("<", "&lt;") for cell in row] for row in rows]
    cells = [[re.sub(r"[\\`\[|]", r"\\\g<0>", text) for text in row] for row in texts]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *cells])


@dataclass
class Position:
    """How far a file of lines was read."""

    offset: int = 0  # bytes
    number: int = 0  # lines


def lines(path: Path, read: Position | None = None) -> Iterator[tuple[bytes, Record]]:
    """The complete lines with a JSON object after those that were read, and these objects. `read` moves with them.

    Raises SettingsError: a value is of another type than this package writes.
    """
    read = read or Position()
    with path.open("rb") as file:
        file.seek(read.offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            read.offset, read.number = read.offset + len(line), read.number + 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # torn by a kill in the middle of a write
                continue
            if isinstance(record, dict):
                try:
                    parse_as(_Line, record)
                    if "metrics" in record:
                        parse_as(dict[str, float | None], {name: record[name] for name in record["metrics"]})
                except (ValueError, KeyError) as error:
                    where = f"line {read.number} of {path}"
                    raise SettingsError(f"{where} is not what clipstream wrote: {error}") from error
                yield line, record


def with_provenance(found: Evaluations, folder: Path) -> Evaluations:
    """Evaluations of metrics.jsonl, with those that a run of 0.1.0 has in a file of their own.

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


# The schema of a line: strict, as the line itself goes on, and not what pydantic would make of it.
class _StartRecord(TypedDict):
    time: str
    ranks: int
    device: str
    git: NotRequired[dict[str, str | bool | None] | None]
    hardware: NotRequired[dict[str, str | float | list[str] | None]]
    versions: dict[str, str]


class _EarlyStop(TypedDict):
    metric: str
    evaluations: Count
    best: float | None
    best_step: float | None


class _End(TypedDict, total=False):
    early_stop: _EarlyStop


class _Rollback(TypedDict):
    to: Count
    skipped: Count


class _HealthCounts(TypedDict):
    read: Count
    used: Count
    dropped: dict[str, Count]
    examples: NotRequired[dict[str, InstanceOf[str]]]
    shards: Count
    shard_faults: Count
    fault_reasons: NotRequired[dict[str, Count]]


class _Stage(TypedDict):
    seconds: float
    count: Count
    p50: float
    p99: float


class _Operation(TypedDict):
    name: str
    calls: int
    self_device: float
    device: float
    self_cpu: float
    cpu: float


class _Profile(TypedDict):
    device: str
    steps: Annotated[list[int], Field(min_length=2, max_length=2)]
    operations: list[_Operation]


class _Data(TypedDict):
    shards: object
    samples: Count
    pictures: object
    pairs: object
    measured: NotRequired[Count]
    lost_area: NotRequired[float]


class _Cropped(TypedDict):
    images: Count
    training: NotRequired[float]
    evaluation: float


class _Line(TypedDict, total=False):
    """What all records have in common: the position, and mappings by their kind."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    step: Count
    samples: Count
    eval: str
    file: str
    metrics: list[str]
    data: list[_Data]
    settings: dict[str, object]
    model: dict[str, object]
    versions: dict[str, object]
    start: _StartRecord
    end: _End
    rollback: _Rollback
    health: dict[str, _HealthCounts]
    cropped: dict[str, _Cropped]
    stages: dict[str, _Stage]
    profile: _Profile
    seconds: float
