"""Owns the files that metrics go to: metrics.jsonl and TensorBoard's events; never talks to the terminal.

A sink takes records: a training line (step, loss, …), what the data's stages took in it (step, stages), an evaluation
(step, eval, metrics), the data's health (step, health), what could not be used (step, quarantine), a step that was left
out (step, nonfinite), a return to a checkpoint's weights (step, rollback), the start of a process (step, start) or the
end of the run (step, end). One process writes: rank 0. A run that is resumed at step s keeps what was written up to s
and loses the rest, so that a file holds each step once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clipstream import durable
from clipstream.errors import SettingsError
from clipstream.example import Example, Table

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"
QUARANTINE_FILE = "quarantine.jsonl"
NONFINITE_FILE = "nonfinite.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
LISTED = 1_000_000  # losses that a run lists, some 250 MB; all are counted


class Growing:
    """A file that texts are added to, handed to the system at once.

    What a full disk does not take is kept and written with the next text: a checkpoint that was too large for it may be
    gone by then.

    Args:
        path: the file; the first text makes it, if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._waiting = b""

    def add(self, text: str) -> None:
        """Write a text at the end."""
        told = bool(self._waiting)
        self._waiting += text.encode()
        try:
            self._write()
        except OSError as error:
            if not durable.is_full(error):
                raise
            if not told:
                print(f"warning: the disk of {self.path} is full: its lines wait", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file."""
        self.add("")
        if self._waiting:
            lost = self._waiting.count(b"\n")
            print(f"warning: the disk of {self.path} is full: {lost} lines are lost", file=sys.stderr, flush=True)
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        if self._waiting and self._file is None:
            self._file = self.path.open("ab", buffering=0)
        while self._waiting and self._file is not None:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


class JsonLines(Growing):
    """A file with a JSON object a line. JSON has no word for NaN and infinity: they become null.

    Args:
        path: the file.
        resume_step: the checkpoint's step of a resumed run: later lines, and a line that a kill tore, are cut off.
            None starts the file anew.
        ended: whether that step is the run's last, after which it evaluates again: those lines are cut off, too.
        keep: which lines stay all the same.

    Attributes:
        count: lines in it.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None = None,
        *,
        ended: bool = False,
        keep: Callable[[Record], bool] = lambda record: False,
    ) -> None:
        super().__init__(path)
        kept = []
        if resume_step is not None and self.path.exists():
            for line, record in lines(self.path):
                step = record.get("step", 0)
                if step < resume_step or (step == resume_step and (not ended or "loss" in record)) or keep(record):
                    kept.append(line)
        if self.path.exists():
            durable.replace(self.path, b"".join(kept))
        self.count = len(kept)

    def append(self, *records: Record) -> None:
        """Add a line for each."""
        self.count += len(records)
        self.add("".join(map(json_line, records)))


class MetricsFile(JsonLines):
    """FOLDER/metrics.jsonl: all records but those of single samples. Arguments as for JsonLines."""

    def __init__(self, folder: str | Path, resume_step: int | None = None, *, ended: bool = False) -> None:
        super().__init__(Path(folder) / METRICS_FILE, resume_step, ended=ended)
        self.path.touch()

    def write(self, record: Record) -> None:
        """Append a record."""
        if "quarantine" not in record and "nonfinite" not in record:
            self.append(record)


class QuarantineFile(JsonLines):
    """FOLDER/quarantine.jsonl: samples and shards that could not be used, with reason. Arguments as for JsonLines."""

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        super().__init__(Path(folder) / QUARANTINE_FILE, resume_step)

    def write(self, record: Record) -> None:
        """Append the record's losses; once the list is full, a last line that says so."""
        losses, room = record.get("quarantine", ()), LISTED - self.count
        if room < 0:  # it was said
            return
        self.append(*({"step": record["step"], **loss} for loss in losses[:room]))
        if len(losses) > room:
            self.append({"step": record["step"], "reason": "full", "detail": f"the rest is in {METRICS_FILE}, counted"})


class NonfiniteFile(JsonLines):
    """FOLDER/nonfinite.jsonl: steps that were left out, with their samples. Arguments as for JsonLines."""

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        super().__init__(Path(folder) / NONFINITE_FILE, resume_step)

    def write(self, record: Record) -> None:
        """Append what the record says of its step."""
        if "nonfinite" in record:
            self.append({"step": record["step"], **record["nonfinite"]})


class TensorBoard:
    """FOLDER/tensorboard: scalars train/KEY, eval/NAME/METRIC, health/SOURCE/… and stages/STAGE/…

    Args:
        folder: the run's.
        resume_step: as for `MetricsFile`; TensorBoard then hides what was written for later steps.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(f"no tensorboard here ({error}): install it, or --log.tensorboard false") from error
        purge = 0 if resume_step is None else resume_step + 1
        make: Any = SummaryWriter  # untyped in torch
        self._writer = make(str(Path(folder) / TENSORBOARD_FOLDER), purge_step=purge, flush_secs=20)

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Add examples as a grid of pictures, and their words as a table; and tables."""
        import torch

        if examples:
            pixels = torch.stack([example.pixels.cpu() for example in examples])
            self._writer.add_images(f"pictures/{name}", pixels, step)
            rows = [
                (str(n), e.text, "; ".join(text for text, _ in e.guesses), e.note, e.group)
                for n, e in enumerate(examples, 1)
            ]
            self._writer.add_text(f"pictures/{name}", _markdown(("", "text", "guesses", "", ""), rows), step)
        for table in tables:
            self._writer.add_text(f"tables/{name}/{table.title}", _markdown(table.header, table.rows), step)

    def write(self, record: Record) -> None:
        """Add the record's numbers at its step."""
        step = record["step"]
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write out what is left and close the file."""
        self._writer.close()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record with their TensorBoard tags."""
    if any(kind in record for kind in ("start", "end", "quarantine", "nonfinite")):
        return
    prefix = f"eval/{record['eval']}" if "eval" in record else "train"
    numbers = {key: value for key, value in record.items() if key not in ("step", "eval")}
    for kind in ("health", "stages"):
        if kind in record:
            prefix, numbers = "", {kind: record[kind]}
    for tag, value in flat(numbers, prefix).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield tag, value


def json_line(record: Record) -> str:
    """A record as one line of JSON; numbers that are not finite are null."""
    return json.dumps(_jsonable(record), allow_nan=False) + "\n"


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Nested mappings as one, keys joined by the separator."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{separator}{key}" if prefix else str(key)
        leaves.update(flat(value, path, separator) if isinstance(value, Mapping) else {path: value})
    return leaves


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, as TensorBoard shows texts."""
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines that hold a JSON object."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # torn by a kill in the middle of a write
                continue
            if isinstance(record, dict) and line.endswith(b"\n"):
                yield line, record


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
