"""The outputs of a run, behind one object: records and images enter, and go to every sink.

The files that resuming and the report read are always written; `log.sinks` adds to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream.distributed.run_record import command_line, end_record, start_record
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.report.eval_results import FIGURES_FILE, FiguresFile, traced
from clipstream.report.html_report import REPORT_FILE, Report, write_report
from clipstream.report.settings import LogSettings
from clipstream.report.sinks import (
    METRICS_FILE,
    NONFINITE_FILE,
    QUARANTINE_FILE,
    ImageFiles,
    MetricsFile,
    NonfiniteFile,
    QuarantineFile,
    Record,
    RunInfo,
    Sink,
    SinkGroup,
    TensorBoard,
    json_line,
    lines,
)
from clipstream.report.terminal import ProgressDisplay
from clipstream.report.trackers import trackio_run, wandb_run
from clipstream.storage.shard_url import redact_value
from clipstream.text import counted, duration, milliseconds
from clipstream.utils.logs import logger
from clipstream.utils.plugins import make_plugin

if TYPE_CHECKING:
    from clipstream.data.batch import Batch
    from clipstream.utils.timing.step_profile import StepProfiler

SINK_METHODS = ("write", "show", "status", "close")
TRACKERS: dict[str, Callable[[Any, RunInfo], Sink]] = {"wandb": wandb_run, "trackio": trackio_run}


def build_sinks(log: LogSettings, run: RunInfo, *, trains: bool = True) -> dict[str, Sink]:
    """The built-in sinks that are on, then those of `log.sinks`, by name.

    Args:
        trains: whether there are training lines, for metrics.jsonl and the terminal.

    Raises SettingsError: a class is not found or cannot be constructed.
    """
    makers: dict[str, Callable[[], Sink]] = {}
    if trains:
        makers["metrics"] = lambda: MetricsFile(
            run.folder, run.resume_step, ended=run.repeats_end, owed=run.repeats_evals
        )
        makers["terminal"] = lambda: ProgressDisplay(
            run.total_steps,
            start=run.resume_step or 0,
            mode=log.progress,
            every=log.terminal_every,
            ema_samples=log.loss_ema_samples,
        )
    if log.tensorboard:
        makers["tensorboard"] = lambda: TensorBoard(run.folder, run.resume_step)
    for name, section in log.sinks.items():
        makers[name] = partial(TRACKERS.get(section.type) or partial(make_plugin, section.type), section, run)
    sinks: dict[str, Sink] = {}
    for name, make in makers.items():
        try:
            made = make()
            if lacks := [method for method in SINK_METHODS if not callable(getattr(made, method, None))]:
                raise SettingsError(
                    f"{log.sinks[name].type} has no {', '.join(lacks)}: derive it from clipstream.report.sinks.Sink"
                )
            sinks[name] = made
        except BaseException as error:
            for sink in sinks.values():
                sink.close()
            if isinstance(error, (SettingsError, ValueError)):
                raise SettingsError(f"log.sinks.{name}: {error}") from error
            raise
    return sinks


def build_profiler(settings: LogSettings, run: RunInfo, world: World) -> StepProfiler | None:
    """The profiler of the steps that `log.profile` names; None if this process trains none of them."""
    from clipstream.utils.timing.step_profile import StepProfiler  # imports torch

    done = run.resume_step or 0
    steps = settings.profiled(done, run.total_steps)
    if world.is_main and settings.profile is not None and not steps and done < run.total_steps:
        logger.info(f"log.profile: no step of {settings.profile} is left after step {done}")
    return StepProfiler(steps, run.folder, world.device, records=world.is_main) if steps else None


class Outputs(SinkGroup):
    """All sinks of a run that trains, and its files of figures.

    Args:
        world: ranks other than 0 write nothing.
        run: the run, and where it resumes.
        subject: what trains, for the files of figures: run, model.

    """

    def __init__(self, settings: LogSettings, world: World, run: RunInfo, *, subject: Record | None = None) -> None:
        super().__init__(settings.sinks)
        self._world, self._examples, self._run, self._subject = world, settings.pictures, run, subject or {}
        if not world.is_main:
            return
        folder, done = run.folder, run.resume_step
        self.sinks = {
            **build_sinks(settings, run),
            QUARANTINE_FILE: QuarantineFile(folder / QUARANTINE_FILE, done),
            NONFINITE_FILE: NonfiniteFile(folder / NONFINITE_FILE, done),
            "pictures": ImageFiles(folder),
            "data_stall_warning": DataStallWarning(world.size),
        }
        if settings.report:
            self.sinks[REPORT_FILE] = Report(folder)  # last: it reads what the others have written
        self._figures = FiguresFile(folder, done, ended=run.repeats_end or run.repeats_evals)

    def begin(self) -> None:
        """Write the record that this process starts or resumes the run: step, time, command, hardware."""
        if self._world.is_main:
            command = [redact_value(part) for part in command_line()]
            self.write(start_record(self._run.resume_step or 0, self._world.size, self._world.device, command))

    def trace(self, record: Record, about: Record) -> None:
        """Add an evaluation to the files of figures, with what it was made with; on rank 0 only."""
        self._figures.add(traced(record, about, self._subject))

    def show_batch(self, step: int, batch: Batch, decode: Callable[[Sequence[int]], str]) -> None:
        """Show the first samples of a training batch as the model sees them.

        Args:
            decode: the ids of a text -> the text.
        """
        if self.sinks and self._examples and batch.pixels is not None:
            from clipstream.evals.context import Example

            rows = batch.weights.nonzero().flatten().tolist()[: self._examples]  # without padding
            texts = [decode(ids) for ids in batch.ids[rows].tolist()]
            self.show(step, "train", list(map(Example, batch.pixels[rows], texts, [batch.keys[i] for i in rows])))

    def close(self) -> None:
        if self._world.is_main:
            self.call(FIGURES_FILE, self._figures.close)
        super().close()


class Ending:
    """Writes the end of this process, on rank 0.

    Args:
        report: whether to write report.html.

    Attributes:
        step: returns the steps done; None until there is a trainer, and the last step in metrics.jsonl counts.
    """

    def __init__(self, folder: Path, *, report: bool) -> None:
        self.folder, self._report = folder, report
        self.step: Callable[[], int] | None = None
        self._began = time.monotonic()

    def stamped(self, record: Record) -> Record:
        """The record; if it is an end, with the seconds that this process took."""
        return {**record, "seconds": round(time.monotonic() - self._began, 1)} if "end" in record else record

    def __call__(self, code: int, error: str) -> None:
        """Write that the process ends with an error. A failed start leaves the end of a finished run unchanged."""
        path = self.folder / METRICS_FILE
        try:
            last: Record = {}
            for _, last in lines(path) if path.is_file() else ():  # noqa: B007, the last one is wanted
                pass
            if self.step is None and last.get("end", {}).get("status") == "done":
                return
            step = int(last.get("step", 0)) if self.step is None else self.step()
            with path.open("ab+") as file:
                torn = file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n"
                line = json_line(self.stamped(end_record(step, code, error)))
                file.write(("\n" * bool(torn) + line).encode())
            if self._report:
                write_report(self.folder, self.folder / REPORT_FILE)
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
    """Warns once when several training lines in a row wait for data, and reports when that is over.

    Args:
        ranks: of the run; while one waits, all do.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lost = 0.0  # s, of the run
        self._lines, self._streak = 0, 0.0  # lines in a row that wait too long, and their waiting in s
        self._warned = False

    def write(self, record: Record) -> None:
        """Take a training line with its stages."""
        if "stages" not in record:
            return
        waited = record["data_wait"] * record["seconds"]
        self._lost += waited
        if record["data_wait"] <= SHARE:
            if self._warned:
                logger.info(f"training no longer waits for data (step {record['step']}); {self._cost()}")
            self._lines, self._streak, self._warned = 0, 0.0, False
            return
        self._lines += 1
        self._streak += waited
        if self._lines < PATIENCE or self._streak < MOMENT or self._warned:
            return
        self._warned = True
        # Not record["bottleneck"]: below its own threshold for waiting, that is 'training'.
        stage = next(stage for stage in record["stages"] if stage in _ADVICE)
        took = record["stages"][stage]
        times = f"{milliseconds(took['p50'])} at p50, {milliseconds(took['p99'])} at p99"
        logger.warning(
            f"training waits for data {record['data_wait']:.0%} of its time (step {record['step']}): most of the "
            f"workers' time goes into {stage!r}, {times}; {self._cost()}. {_ADVICE[stage]}"
        )

    def close(self) -> None:
        """Report the cost, if training still waits."""
        if self._warned:
            logger.info(f"training waited for data to the end; {self._cost()}")

    def _cost(self) -> str:
        return f"{duration(self._lost * self._ranks)} of {counted(self._ranks, 'rank')} lost so far"
