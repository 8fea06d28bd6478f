"""The outputs of a run, behind one object: records and images enter, and go to every sink.

The files that resuming and the report read are always written; `log.sinks` adds to them, also the experiment trackers
Weights & Biases and Trackio. These have the figures under the names of TensorBoard: train/loss, health/….
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream.data.decode.tokenizers import Tokenizer, mark_cut, readable
from clipstream.distributed.run_record import command_line, end_record, start_record
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.evals.context import Example
from clipstream.report.html_report import REPORT_FILE, Report
from clipstream.report.records import METRICS_FILE, TABLE_FILE, Position, Record, add, lines
from clipstream.report.settings import LogSettings, TrackioSettings, WandbSettings
from clipstream.report.sinks import (
    NONFINITE_FILE,
    QUARANTINE_FILE,
    EvaluationTable,
    ImageFiles,
    MetricsFile,
    NonfiniteFile,
    QuarantineFile,
    RunInfo,
    Sink,
    SinkGroup,
    TensorBoard,
    trackio_run,
    wandb_run,
)
from clipstream.report.terminal import ProgressDisplay
from clipstream.storage.shard_url import redact_value
from clipstream.text import milliseconds
from clipstream.utils.logs import logger
from clipstream.utils.section import make_part

if TYPE_CHECKING:
    from clipstream.data.batch import Batch

SINK_METHODS = ("write", "show", "status", "close")


def build_sinks(log: LogSettings, run: RunInfo) -> dict[str, Sink]:
    """The built-in sinks that are on, then those of `log.sinks`, by name.

    Raises SettingsError: a class is not found or cannot be constructed.
    """
    sinks: dict[str, Sink] = {}
    with ExitStack() as opened:  # closes them if one cannot be made

        def add_sink(name: str, sink: Sink) -> None:
            sinks[name] = opened.enter_context(closing(sink))

        metrics = MetricsFile(run.folder, run.resume_step, ended=run.repeats_end, owed=run.repeats_evals)
        add_sink("metrics", metrics)
        add_sink(TABLE_FILE, EvaluationTable(run.folder))  # after metrics.jsonl, of which it is made
        display = ProgressDisplay(
            run.total_steps, start=run.resume_step or 0, stage_end=run.stage_end, later=run.later, mode=log.progress,
            every=log.terminal_every, ema_samples=log.loss_ema_samples,
        )  # fmt: skip
        add_sink("terminal", display)
        if log.tensorboard:
            add_sink("tensorboard", TensorBoard(run.folder, run.resume_step))
        made: Any
        for name, section in log.sinks.items():
            if isinstance(section, WandbSettings | TrackioSettings):
                with errors_as(SettingsError, f"log.sinks.{name}", ClipstreamError, ValueError):
                    made = wandb_run(section, run) if isinstance(section, WandbSettings) else trackio_run(section, run)
            else:
                made = make_part(f"log.sinks.{name}", section, run)
            if lacks := [method for method in SINK_METHODS if not callable(getattr(made, method, None))]:
                raise SettingsError(
                    f"log.sinks.{name}: {section.type} has no {', '.join(lacks)}: derive it from "
                    "clipstream.report.sinks.Sink"
                )
            add_sink(name, made)
        opened.pop_all()
    return sinks


class Outputs(SinkGroup):
    """All sinks of a run that trains. Ranks other than 0 write nothing."""

    def __init__(self, settings: LogSettings, world: World, run: RunInfo, ending: Ending | None = None) -> None:
        super().__init__(settings.sinks)
        self._world, self._examples, self._run = world, settings.pictures, run
        self._ending = Ending(run.folder, report=settings.report) if ending is None else ending
        if not world.is_main:
            return
        folder, done = run.folder, run.resume_step
        self.sinks = {
            **build_sinks(settings, run),
            QUARANTINE_FILE: QuarantineFile(folder / QUARANTINE_FILE, done),
            NONFINITE_FILE: NonfiniteFile(folder / NONFINITE_FILE, done),
            "pictures": ImageFiles(folder),
            "data_stall_warning": DataStallWarning(),
        }
        if self._ending.report is not None:
            self.sinks[REPORT_FILE] = self._ending.report  # last: it reads what the others have written

    def begin(self) -> None:
        """Write the record that this process starts or resumes the run: step, time, command, hardware."""
        if self._world.is_main:
            command = [redact_value(part) for part in command_line()]
            self.write(start_record(self._run.resume_step or 0, self._world.size, self._world.device, command))

    def write(self, record: Record) -> None:
        super().write(self._ending.stamp(record))

    def show_batch(self, step: int, batch: Batch, tokenizer: Tokenizer) -> None:
        """Show the first samples of a training batch as the model sees them."""
        if self.sinks and self._examples and batch.pixels is not None:
            rows = batch.weights.nonzero().flatten().tolist()[: self._examples]  # without padding
            if batch.captions is not None:
                texts = [mark_cut(tokenizer, batch.captions[i]) for i in rows]
            else:
                texts = [readable(tokenizer, ids) for ids in batch.ids[rows, : tokenizer.context_length].tolist()]
            self.show(step, "train", list(map(Example, batch.pixels[rows], texts, [batch.keys[i] for i in rows])))

    def step(self, done: int) -> None:
        """Show on the terminal that so many steps are done."""
        if isinstance(display := self.sinks.get("terminal"), ProgressDisplay):
            display.step(done)


TAIL = 1 << 20  # bytes at the end of metrics.jsonl in which there is a line


class Ending:
    """Writes the end of this process, on rank 0.

    Args:
        steps: returns the steps done; None until there is a trainer, and the last step in metrics.jsonl counts.
        report: whether to make the report anew.
    """

    def __init__(self, folder: Path, steps: Callable[[], int | None] = lambda: None, *, report: bool) -> None:
        self.folder, self.report = folder, Report(folder) if report else None
        self._steps, self._began = steps, time.monotonic()

    def stamp(self, record: Record) -> Record:
        """The record; if it is an end, with the seconds that this process took."""
        return {**record, "seconds": round(time.monotonic() - self._began, 1)} if "end" in record else record

    def __call__(self, code: int, error: str) -> None:
        """Write that the process ends with an error. A failed start leaves the end of a finished run unchanged."""
        path = self.folder / METRICS_FILE
        try:
            last: Record = {}
            begin = Position(max(0, path.stat().st_size - TAIL)) if path.is_file() else None
            for _, record in () if begin is None else lines(path, begin):
                last = last if "checkpoint" in record else record  # of the run, not of `clipstream evaluate`
            if (step := self._steps()) is None:
                if last.get("end", {}).get("status") == "done":
                    return
                step = int(last.get("step", 0))
            add(path, self.stamp(end_record(step, code, error)))
            if self.report is not None:
                self.report.close()
        except Exception as failure:  # the process ends with the first error
            logger.warning(f"the end could not be written to {self.folder}: {failure}")


SHARE = 0.2  # of the time, that may be spent waiting
PATIENCE = 3  # training lines in a row that wait too long
MOMENT = 30.0  # s of waiting in these lines before a warning
_ADVICE = {
    "open": "shards arrive slowly: keep them on a local disk (--data.cache FOLDER), use larger shards or a smaller "
    "--data.shuffle.shards, or more --workers",
    "order": "computing the order takes long: use fewer, larger shards",
    "read": "the disk is slow: use a local disk, or more --workers",
    "transform": "your transform (data.sources.NAME.transform) is slow: make it faster, or use more --workers",
    "decode": "decoding is slow: use more --workers, or smaller images in the shards",
    "tokenize": "the tokenizer is slow: use one of the Hub with a tokenizer.json, or more --workers",
}


class DataStallWarning(Sink):
    """Warns once when several training lines in a row wait for data, and again after lines that do not."""

    def __init__(self) -> None:
        self._lines, self._waited, self._warned = 0, 0.0, False  # lines in a row that wait too long, and s

    def write(self, record: Record) -> None:
        """Take a training line with its stages."""
        if "stages" not in record:
            return
        if record["data_wait"] <= SHARE:
            self._lines, self._waited, self._warned = 0, 0.0, False
            return
        self._lines += 1
        self._waited += record["data_wait"] * record["seconds"]
        if self._lines < PATIENCE or self._waited < MOMENT or self._warned:
            return
        self._warned = True
        # Not record["bottleneck"]: below its own threshold for waiting, that is 'training'.
        stage = next(stage for stage in record["stages"] if stage in _ADVICE)
        took = record["stages"][stage]
        times = f"{milliseconds(took['p50'])} at p50, {milliseconds(took['p99'])} at p99"
        logger.warning(
            f"training waits for data {record['data_wait']:.0%} of its time (step {record['step']}): most of the "
            f"workers' time goes into {stage!r}, {times}: {_ADVICE[stage]}"
        )
