"""Sinks, which records and images of a run go to: the protocol, files of the run's folder, TensorBoard, and trackers.

Only rank 0 has sinks. A run that resumes at step s keeps what was written up to s and drops the rest, so that a
file holds each step once.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator
from typing_extensions import TypedDict

from clipstream.errors import SettingsError, errors_as
from clipstream.report.records import (
    METRICS_FILE,
    TABLE_FILE,
    Record,
    append,
    json_line,
    lines,
    markdown_table,
    read_evaluations,
    scalars,
    table_lines,
)
from clipstream.report.settings import TrackioSettings, WandbSettings
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.plugins import describe_error
from clipstream.utils.section import flat, parse_as

if TYPE_CHECKING:
    from clipstream.evals.context import Example, Table

QUARANTINE_FILE = "quarantine.jsonl"
NONFINITE_FILE = "nonfinite.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID = "wandb_id"  # file with the id under which Weights & Biases knows the run
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
    stage_end: int | None = None  # step at which the stage ends that this sink sees; None: the run's last
    later: float = 0.0  # samples of later stages, in those of this stage that have the same FLOPs


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


class TensorBoard(Sink):
    """FOLDER/tensorboard: scalars train/KEY, eval/NAME/METRIC, health/SOURCE/… and stages/STAGE/…

    Not by torch's SummaryWriter, whose thread ends at the first write that fails, and takes its queue with it.

    Args:
        resume_step: TensorBoard hides events of later steps.

    Raises SettingsError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        advice = "install it, or --log.tensorboard false"
        with errors_as(SettingsError, "tensorboard is not installed", ImportError, advice=advice):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = AppendedFile(Path(folder) / TENSORBOARD_FOLDER / name)
        self._make: Any = summary  # untyped in torch
        self._event, self._framed = Event, RecordWriter
        start = 0 if resume_step is None else resume_step + 1
        version, begins = {"file_version": "brain.Event:2"}, SessionLog(status=SessionLog.START)
        self._add(Event(**version), Event(step=start, **version), Event(step=start, session_log=begins))

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Add images as a grid, and their texts and the tables as text."""
        import torch

        shown = []
        if examples:
            pixels = torch.stack([example.pixels.cpu() for example in examples])
            shown.append(self._make.image(f"pictures/{name}", pixels, dataformats="NCHW"))
            rows = [
                (str(n), e.text, "; ".join(text for text, _ in e.guesses), e.note, e.group)
                for n, e in enumerate(examples, 1)
            ]
            shown.append(self._make.text(f"pictures/{name}", markdown_table(("", "text", "guesses", "", ""), rows)))
        for table in tables:
            shown.append(self._make.text(f"tables/{name}/{table.title}", markdown_table(table.header, table.rows)))
        self._add(*(self._event(step=step, summary=one) for one in shown))

    def write(self, record: Record) -> None:
        found = [self._make.scalar(tag, value) for tag, value in scalars(record)]
        self._add(*(self._event(step=record["step"], summary=one) for one in found))

    def close(self) -> None:
        self._file.close()

    def _add(self, *events: Any) -> None:
        """Write events of now, in the format of TensorFlow's records."""
        out = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            self._framed(out).write(event.SerializeToString())
        with suppress(OSError):  # then the file cannot be written either
            self._file.path.parent.mkdir(exist_ok=True)
        self._file.add(out.getvalue())


class Tracker(Sink):
    """A run of a tracker with the interface of Weights & Biases: `log`, `finish`, and images as `Image`.

    Args:
        run: as the module's `init` returns it.
        table: (title, header, rows) -> what the tracker shows as a table.
        images: images of the module with their texts -> what the tracker shows as several images.
    """

    def __init__(
        self, module: Any, run: Any, table: Callable[[Table], Any], images: Callable[[list[tuple[Any, str]]], Any]
    ) -> None:
        self._module, self._run, self._table, self._images = module, run, table, images

    def write(self, record: Record) -> None:
        if metrics := dict(scalars(record)):
            self._run.log(metrics, step=record["step"])

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Log the images with their texts, and the tables."""
        found: dict[str, Any] = {f"tables/{name}/{table.title}": self._table(table) for table in tables}
        if examples:
            found[f"pictures/{name}"] = self._images(
                [
                    (self._module.Image(one.pixels.permute(1, 2, 0).cpu().numpy(), caption=one.text), one.text)
                    for one in examples
                ]
            )
        if found:
            self._run.log(found, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_run(settings: WandbSettings, run: RunInfo) -> Tracker:
    """The run in Weights & Biases. A resumed run goes on under its id, which the run's folder keeps in `wandb_id`.

    Raises SettingsError: the package is missing, or the run cannot be started there, for example without a login.
    """
    wandb = _import("wandb")
    # Without a network, wandb waits for 90 s, and for 30 s a request; its login waits for two times 5 s besides.
    wait = float(os.environ.get("WANDB_INIT_TIMEOUT", "12"))
    path = run.folder / WANDB_ID
    if run.resume_step is None or not path.exists():
        atomic_write.replace(path, uuid.uuid4().hex[:16].encode())
    advice = "run `wandb login`, or set WANDB_MODE=offline"
    with errors_as(SettingsError, "Weights & Biases could not start the run", Exception, advice=advice):
        found = wandb.init(
            project=settings.project,
            name=run.folder.name,
            notes=settings.notes,
            config=dict(run.settings),
            dir=str(run.folder),
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            # `console` would take the terminal's progress bar for a file.
            settings=wandb.Settings(console="off", init_timeout=wait, x_graphql_timeout_seconds=wait),
        )
    return Tracker(
        wandb,
        found,
        table=lambda table: wandb.Table(list(table.header), [list(row) for row in table.rows]),
        images=lambda pairs: [image for image, _ in pairs],
    )


def trackio_run(settings: TrackioSettings, run: RunInfo) -> Tracker:
    """The run in Trackio, under its name in the project; a resumed run goes on there.

    Raises SettingsError: the package is missing, or the run cannot be started there.
    """
    trackio = _import("trackio")
    with errors_as(SettingsError, "Trackio could not start the run", Exception):
        found = trackio.init(
            project=settings.project,
            name=run.folder.name,
            space_id=settings.space,
            config=flat(run.settings, separator="."),  # it shows no nested ones
            resume="never" if run.resume_step is None else "allow",
            embed=False,
        )
    return Tracker(
        trackio,
        found,
        table=lambda table: trackio.Markdown(markdown_table(table.header, table.rows)),
        # Trackio takes several images in a table alone.
        images=lambda pairs: trackio.Table(columns=["picture", "text"], data=[list(pair) for pair in pairs]),
    )


def _import(name: str) -> Any:
    with errors_as(SettingsError, f"{name} is not installed", ImportError, advice=f"pip install 'clipstream[{name}]'"):
        return importlib.import_module(name)
