"""Owns what a run writes for people, behind one sink: metrics, TensorBoard, the terminal, pictures, report.html."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream import durable
from clipstream.example import Example, Table
from clipstream.report.album import Album, Shows
from clipstream.report.figures import FiguresFile, traced
from clipstream.report.page import Report
from clipstream.report.progress import Progress
from clipstream.report.settings import LogSettings
from clipstream.report.sinks import MetricsFile, NonfiniteFile, QuarantineFile, Record, TensorBoard
from clipstream.report.starving import Starving
from clipstream.versions import versions
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.batch import Batch


class Outputs:
    """A sink that hands every record to all of a run's sinks, and examples to those that show pictures.

    Args:
        folder: the run's.
        settings: what to write.
        world: this rank; others than rank 0 write nothing.
        total: steps of the run.
        done: steps before this process, of a resumed run: what was written after them is cut off; None starts anew.
        ended: whether the run had ended then: it evaluates again.
        subject: what trains, for the files of figures: run, model.
    """

    def __init__(
        self,
        folder: Path,
        settings: LogSettings,
        world: World,
        *,
        total: int,
        done: int | None,
        ended: bool = False,
        subject: Record | None = None,
    ) -> None:
        self._world, self._pictures, self._done, self._subject = world, settings.pictures, done or 0, subject or {}
        self._sinks: list[Any] = []
        self._shows: list[Shows] = []
        self._full: set[str] = set()  # sinks that a full disk keeps from writing
        if not world.is_main:
            return
        self._sinks.append(MetricsFile(folder, done, ended=ended))
        self._sinks += [QuarantineFile(folder, done), NonfiniteFile(folder, done)]
        self._figures = FiguresFile(folder, done, ended=ended)
        self._shows.append(Album(folder))
        if settings.tensorboard:
            board = TensorBoard(folder, done)
            self._sinks.append(board)
            self._shows.append(board)
        self._sinks.append(Progress(total, start=self._done, mode=settings.progress))
        self._sinks.append(Starving(settings.starving, world.size, settings.alert))
        if settings.report:
            self._sinks.append(Report(folder))  # the last: it reads what the others have written

    def begin(self) -> None:
        """Note that this process starts or resumes the run: at which step, when, on what, with which versions."""
        self.write(_start(self._done, self._world))

    def write(self, record: Record) -> None:
        """Hand a record to all sinks."""
        for sink in self._sinks:
            self._spare(sink, partial(sink.write, record))

    def trace(self, record: Record, about: Record) -> None:
        """Add an evaluation to the files of figures, with what it was made with; on rank 0 only."""
        self._figures.add(traced(record, about, self._subject))

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Keep these in place of the name's earlier ones. What cannot be kept is told, and never ends a run."""
        for shows in self._shows:
            try:
                shows.show(step, name, examples, tables)
            except Exception as error:
                print(f"warning: the pictures of {name!r} could not be kept: {error}", file=sys.stderr, flush=True)

    def show_batch(self, step: int, batch: Batch, decode: Callable[[Sequence[int]], str]) -> None:
        """Show the first samples of a training batch as the model sees them.

        Args:
            step: of the run.
            batch: this rank's.
            decode: the ids of a text -> the text.
        """
        count = self._pictures
        if self._shows and count and batch.pixels is not None:
            there = batch.weights.nonzero().flatten().tolist()[:count]  # and not what holds a place
            texts = [decode(ids) for ids in batch.ids[there].tolist()]
            self.show(step, "train", list(map(Example, batch.pixels[there], texts, [batch.keys[i] for i in there])))

    def close(self) -> None:
        """Write out what is left, everywhere."""
        files = [self._figures] if self._world.is_main else []
        for sink in (*files, *self._sinks):
            self._spare(sink, sink.close)

    def _spare(self, sink: object, act: Callable[[], object]) -> None:
        """Have a sink act; a full disk is told once, and never ends a run."""
        name = type(sink).__name__
        try:
            act()
            self._full.discard(name)
        except OSError as error:
            if not durable.is_full(error):
                raise
            if name not in self._full:
                print(f"warning: the disk is full: what {name} could not write is missing", file=sys.stderr, flush=True)
            self._full.add(name)


def _start(step: int, world: World) -> Record:
    return {
        "step": step,
        "start": {
            "time": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "ranks": world.size,
            "device": _device_name(world.device),
            "versions": versions(),
        },
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()})"
