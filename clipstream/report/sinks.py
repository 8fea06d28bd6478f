"""Sinks: what a run's records and images are handed to. The protocol, metrics.jsonl, pictures/.

A record is a dictionary of plain values with a step and one of: a training line (loss, ...), the time of the data
stages (stages), an evaluation (eval, metrics), data health (health), unusable samples (quarantine), a skipped step
(nonfinite), a rollback (rollback), a profile of steps (profile), the start of a process (start), the end of the run
(end). Only rank 0 has sinks. A run that resumes at step s keeps what was written up to s and drops the rest, so that a
file holds each step once.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, ConfigDict, Field, InstanceOf
from typing_extensions import NotRequired, TypedDict

from clipstream.errors import SettingsError
from clipstream.evals.statistics import Evaluations, metrics_of, put
from clipstream.text import MESSAGE, printable
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.plugins import describe_error
from clipstream.utils.section import Count, map_leaves, parse_as

if TYPE_CHECKING:
    from clipstream.evals.context import Example, Table

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"
FORMER_FILE = "evaluations.jsonl"  # of runs of before 0.2: see `with_provenance`
QUARANTINE_FILE = "quarantine.jsonl"
NONFINITE_FILE = "nonfinite.jsonl"
IMAGES_FOLDER = "pictures"
LARGEST = 160  # pixels of a thumbnail's longer side
WAITING = 64 << 20  # bytes that wait for a file that cannot be written
LISTED = 1_000_000  # dropped samples listed per run, about 250 MB; further ones are only counted


@dataclass(frozen=True)
class RunInfo:
    """What a sink is constructed with, beside its settings."""

    folder: Path  # of the run; `folder.name` is the run's name
    total_steps: int  # of the whole run; 0 where only its checkpoints are evaluated
    # steps done before this process, of a resumed run: drop what you wrote for later steps. None starts anew
    resume_step: int | None = None
    world_size: int = 1  # ranks of the run
    repeats_end: bool = False  # whether `resume_step` is the last step of a finished run, which evaluates again
    repeats_evals: bool = False  # whether the evaluations of `resume_step` were interrupted and run again
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, as nested mappings, without credentials


class Sink(Protocol):
    """A destination of a run's records, on rank 0. Constructed as `Name(settings, run)` with `run` a `RunInfo`.

    Derive from this class to implement only what you need. A sink that raises is reported once and does not end the
    run.
    """

    def write(self, record: Record) -> None:
        """Take a record. The same dictionary goes to the other sinks: do not change it."""
        return None

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Take images with their texts, and tables, of the evaluator `name` or of training batches ('train')."""
        return None

    def status(self, text: str) -> None:
        """Take what the run does besides training, such as 'saving'; '' when it is over."""
        return None

    def close(self) -> None:
        """Flush and close, at the end of the run or after an error."""
        return None


class SinkGroup(Sink):
    """Passes everything to several sinks, and keeps a failing one from ending the run.

    Attributes:
        failures: why the last failed call of a sink failed, by its name.

    Args:
        plugins: names of the sinks of `log.sinks`.
    """

    def __init__(self, plugins: Collection[str]) -> None:
        self.sinks: dict[str, Sink] = {}  # by name, in the order in which they are called
        self.failures: dict[str, str] = {}
        self._plugins = plugins
        self._failing: set[str] = set()  # sinks whose last call failed

    def write(self, record: Record) -> None:
        for name, sink in self.sinks.items():
            own = deepcopy(record) if name in self._plugins else record  # which a user's sink may change
            self.call(name, partial(sink.write, own))

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        for key, sink in self.sinks.items():
            self.call(key, partial(sink.show, step, name, examples, tables))

    def status(self, text: str) -> None:
        for name, sink in self.sinks.items():
            self.call(name, partial(sink.status, text))

    def close(self) -> None:
        for name, sink in self.sinks.items():
            self.call(name, sink.close)

    def call(self, name: str, method: Callable[[], object]) -> None:
        """Call a method of the sink `name`; a failure is reported once in a row, and not raised."""
        try:
            method()
            self._failing.discard(name)
        except Exception as error:
            called = f"log.sinks.{name}" if name in self._plugins else name
            self.failures[called] = describe_error(called, error) if name in self._plugins else str(error)
            if name not in self._failing:
                logger.warning(f"{called} failed, and the run goes on: {self.failures[called]}")
            self._failing.add(name)


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


class AppendedFile:
    """A file to which is appended, unbuffered. The first text creates it, or follows a file that was replaced.

    What cannot be written waits in memory, WAITING bytes at most, and is written before the next text: the disk is
    full, or the folder is moved, deleted, read-only or does not answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._pending = bytearray()
        self._lost = 0  # bytes that did not fit into memory

    def add(self, text: str | bytes) -> None:
        waited, data = bool(self._pending), text.encode() if isinstance(text, str) else text
        if waited and len(self._pending) + len(data) > WAITING:
            self._lost += len(data)
        else:
            self._pending += data
        try:
            while self._pending:
                self._file = self._open()
                del self._pending[: append(self._file, self._pending)]
        except OSError as error:
            if not waited:
                why = atomic_write.obstacle(error, self.path) or f"{self.path} cannot be written ({error})"
                logger.warning(f"{why}: its lines wait in memory, {WAITING >> 20} MiB of them at most")
        else:
            if waited:
                logger.info(f"{self.path} is written again")

    def _open(self) -> IO[bytes]:
        with suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return self._file
        return self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. Raises OSError: something could not be written."""
        self.add(b"")
        if self._file is not None:
            self._file.close()
        if lost := self._lost + len(self._pending):
            raise OSError(f"{lost:,} bytes of {self.path} are lost")


class JsonLines(AppendedFile):
    """A file with a JSON object per line; NaN and infinity become null.

    Args:
        resume_step: step of the checkpoint that the run resumes from: later and torn lines are removed. None empties
            the file.
        ended: whether that step is the last one of a finished run: lines of its evaluations are removed as well.
        owed: whether the evaluations of that step were interrupted: likewise. Evaluations by `clipstream evaluate`,
            which name a checkpoint, stay in any case.

    Attributes:
        count: of lines.
    """

    def __init__(self, path: Path, resume_step: int | None = None, *, ended: bool = False, owed: bool = False) -> None:
        super().__init__(path)
        kept = []
        if resume_step is not None and self.path.exists():
            for line, record in lines(self.path):
                step = record.get("step", 0)
                again = (ended and "loss" not in record) or (owed and "eval" in record)
                if step < resume_step or (step == resume_step and not again) or "checkpoint" in record:
                    kept.append(line)
        if self.path.exists():
            atomic_write.replace(self.path, b"".join(kept))
        self.count = len(kept)

    def append(self, *records: Record) -> None:
        self.count += len(records)
        self.add("".join(map(json_line, records)))


class MetricsFile(JsonLines, Sink):
    """FOLDER/metrics.jsonl: all records except those about single samples. Arguments as for JsonLines."""

    def __init__(
        self, folder: str | Path, resume_step: int | None = None, *, ended: bool = False, owed: bool = False
    ) -> None:
        super().__init__(Path(folder) / METRICS_FILE, resume_step, ended=ended, owed=owed)
        self.path.touch()

    def write(self, record: Record) -> None:
        if "quarantine" not in record and "nonfinite" not in record:
            self.append(record)


class QuarantineFile(JsonLines, Sink):
    """The file quarantine.jsonl: samples and shards that could not be used, with reason."""

    def write(self, record: Record) -> None:
        """Append the record's dropped samples; once the list is full, a last line that says so."""
        dropped, left = record.get("quarantine", ()), LISTED - self.count
        if left < 0:  # the last line is written
            return
        self.append(*({"step": record["step"], **sample} for sample in dropped[:left]))
        if len(dropped) > left:
            self.append({"step": record["step"], "reason": "full", "detail": f"the rest is in {METRICS_FILE}, counted"})


class NonfiniteFile(JsonLines, Sink):
    """The file nonfinite.jsonl: skipped steps with their samples."""

    def write(self, record: Record) -> None:
        if "nonfinite" in record:
            self.append({"step": record["step"], **record["nonfinite"]})


def _data_url(src: str) -> str:
    """An image as this module writes it; an empty one instead of an address that a page would load."""
    return src if re.fullmatch(r"data:image/jpeg;base64,[A-Za-z0-9+/=]*", src) else "data:,"


class ShownImage(TypedDict):
    """An `Example` whose pixels are a JPEG thumbnail, in a data: URL."""

    src: Annotated[str, AfterValidator(_data_url)]
    text: str
    key: str
    guesses: list[tuple[str, float]]
    group: str
    note: str


@dataclass(frozen=True)
class Page:
    """Images and tables (title, header, rows) of an evaluator, or of 'train', at one step."""

    name: str
    step: int
    pictures: list[ShownImage]
    tables: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> Page:
        from PIL import Image

        images: list[ShownImage] = []
        for example in examples:
            image = Image.fromarray(example.pixels.permute(1, 2, 0).cpu().numpy())
            image.thumbnail((LARGEST, LARGEST))
            file = io.BytesIO()
            image.save(file, "JPEG", quality=85)
            src = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
            guesses = [(text, round(float(score), 4)) for text, score in example.guesses]
            images.append(
                ShownImage(
                    src=src, text=example.text, key=example.key, guesses=guesses, group=example.group, note=example.note
                )
            )
        return cls(name, step, images, [asdict(table) for table in tables])

    @property
    def groups(self) -> dict[str, list[ShownImage]]:
        """The images by heading, in their order."""
        groups: dict[str, list[ShownImage]] = {}
        for image in self.pictures:
            groups.setdefault(image["group"], []).append(image)
        return groups


class ImageFiles(Sink):
    """FOLDER/pictures/NAME.json: the newest images and tables of each evaluator, and of training ('train')."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / IMAGES_FOLDER

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Replace the images and tables of `name`. Raises OSError: they cannot be written."""
        self.folder.mkdir(exist_ok=True)  # but not the run's, which may return
        page = Page.of(step, name, examples, tables)
        file = re.sub(r"[^\w.-]", lambda character: f"%{ord(character[0]):x}", name)
        atomic_write.replace(self.folder / f"{file}.json", json.dumps(asdict(page)).encode())

    def pages(self) -> list[Page]:
        """All pages, the training data first; other files are skipped."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(parse_as(Page, path.read_bytes()))
            except (OSError, ValueError):
                continue
        return sorted(found, key=lambda page: (page.name != "train", page.name))


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


def flat(tree: Record, prefix: str = "", separator: str = "/") -> Record:
    """Flatten nested mappings; keys are joined by the separator."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}{separator}{key}" if prefix else str(key)
        leaves.update(flat(value, path, separator) if isinstance(value, Mapping) else {path: value})
    return leaves


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


# The schema of a line: strict, as the line itself goes on, and not what pydantic would make of it.
class _Start(TypedDict):
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


class _Counts(TypedDict):
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
    start: _Start
    end: _End
    rollback: _Rollback
    health: dict[str, _Counts]
    cropped: dict[str, _Cropped]
    stages: dict[str, _Stage]
    profile: _Profile
    seconds: float
