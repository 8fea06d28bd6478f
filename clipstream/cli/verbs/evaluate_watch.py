"""`clipstream evaluate --watch RUN`: evaluates the checkpoints of a run as they appear, in order.

    RUN/watch/evaluations.jsonl, evaluations.csv, tensorboard/, pictures/, report.html

Each evaluation of each checkpoint is made once, also when several watchers run one after another: `evaluations.jsonl`
lists the finished ones. The run's own files and checkpoints are never changed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from clipstream.checkpoint import store
from clipstream.checkpoint.remote_sync import CHECKPOINTS
from clipstream.checkpoint.store import MARKER, Marker, model_in
from clipstream.checkpoint.store import held as locked
from clipstream.config.entry import CommandLine
from clipstream.config.settings import Settings, load, require_equal
from clipstream.config.validate import validate_evals
from clipstream.distributed.launch import FailureWatch, run_ranks
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, Stopped
from clipstream.evals.settings import Weights, eval_name
from clipstream.models.pretrained import preflight
from clipstream.report.eval_results import FIGURES_FILE, TABLE_FILE, WATCH_FOLDER, add, traced
from clipstream.report.html_report import Report
from clipstream.report.outputs import build_sinks
from clipstream.report.sinks import METRICS_FILE, ImageFiles, Record, RunInfo, SinkGroup, lines
from clipstream.report.terminal import evaluation_line
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger

if TYPE_CHECKING:
    from clipstream.distributed.world import Failure

POLL = 2.0  # s between checks of the run's folder
UNREAD = ("optimizer.safetensors", "rng.pt")  # files of a checkpoint that evaluation does not need
TAIL = 1 << 16  # bytes at the end of metrics.jsonl that contain its last line
OWN_FLAGS = {
    "--watch": "run folder: evaluate each of its checkpoints as it appears, until the run ends",
    "--idle": "seconds without a change in that folder before the command ends (default: 3600)",
}


def follow(command: CommandLine, settings_of: Callable[[str], Settings]) -> int:
    """Evaluate the checkpoints of a run on all ranks, and return the exit code.

    Args:
        command: has the flags --watch and --idle.
        settings_of: loads the settings, given the file of the run's own.

    Raises:
        SettingsError: wrong settings, or no evaluators.
        Stopped: by a signal, or because nothing changed in the run's folder for --idle seconds.
        Printed: by --print-config.
    """
    own = command.own
    if "--watch" not in own:
        raise SettingsError("--idle requires --watch")
    run = WatchedRun(Path(own["--watch"]))
    try:
        idle = float(own.get("--idle", "3600"))
    except ValueError:
        idle = math.nan
    if not idle > 0:
        raise SettingsError(f"--idle: expected seconds, not {own['--idle']!r}")
    if run.folder.is_file():
        raise SettingsError(f"--watch: {run.folder} is a file, not a run's folder")
    with StopSignals() as signals:
        if command.print_all is None:
            _wait_for_a_checkpoint(run, signals, idle)
        config = str(run.folder / "config.yaml")
        settings = settings_of(config)
        command.print_settings(settings)
        if not settings.evals:
            ways = "--val-data SHARDS, --suite FILE, or --config with a section evals"
            raise SettingsError(f"no evaluation data: set {ways}")
        validate_evals(settings, shown=True)
        fits = has_own_tokenizer(settings, config)

        def body(world: World, watch: FailureWatch) -> None:
            require_equal(settings, world)
            busy = f"{run.folder} is already watched by {{}}"
            lock = locked(run.folder / WATCH_FOLDER, "--watch: the folder", busy.format)
            try:
                with lock if world.is_main else nullcontext(), closing(_Watcher(run, settings, fits, world)) as watcher:
                    watcher.loop(signals, idle)
            except OSError as error:
                if not atomic_write.is_full(error):
                    raise
                folder = run.folder / WATCH_FOLDER
                text = f"the disk of {folder} is full: free some space and rerun the same command to continue"
                raise ClipstreamError(text) from error

        return run_ranks(settings.run, body)


def has_own_tokenizer(settings: Settings, config: str) -> bool:
    """Whether the tokenizer is that of a run's settings, which fits the run's weights."""
    return load(["--config", config]).tokenizer == settings.tokenizer


class _Watcher(SinkGroup):
    """The loop on all ranks: rank 0 selects checkpoints, all ranks evaluate them, and rank 0 writes RUN/watch."""

    def __init__(self, run: WatchedRun, settings: Settings, fits: bool, world: World) -> None:
        super().__init__(settings.log.sinks)
        self.run, self.settings, self.fits, self.world = run, settings, fits, world
        self.folder = run.folder / WATCH_FOLDER
        self.failures: list[Failure] = []
        # on rank 0: (weights, step, evaluation) -> its metrics, or its error
        self._done: dict[tuple[str, int, str], Record] = {}
        self._skipped: set[Found] = set()
        self._expected: list[Found] = []  # the checkpoints at the last poll
        if not world.is_main:
            return
        there = self.folder / FIGURES_FILE
        for _, record in lines(there) if there.is_file() else ():
            if record.keys() >= {"file", "step", "eval", "metrics"}:
                self._note(record)
        # TensorBoard hides events of later steps than `resume_step`.
        info = RunInfo(self.folder, 0, max((step for _, step, _ in self._done), default=None), world.size)
        self.sinks = {**build_sinks(settings.log, info, trains=False), "pictures": ImageFiles(self.folder)}

    def loop(self, signals: StopSignals, idle: float) -> None:
        """Return when the run has ended and everything is evaluated.

        Raises:
            Stopped: by a signal on some rank, or because nothing changed in the run's folder for `idle` seconds.
            ClipstreamError: the first failure of an evaluation, at the end.
        """
        while True:
            found, ended, still = self.world.broadcast_object(self._poll() if self.world.is_main else None)
            self._stop_on(signals)
            if found is not None:
                self._evaluate(found, signals)
            elif ended:
                break
            elif still > idle:
                raise Stopped(_still(self.run, idle))
            else:
                time.sleep(POLL)
        if self.world.is_main:
            announce(f"the run has ended and all checkpoints are evaluated: {self.folder}")
        for failure in self.failures:  # at the end, so that it is not lost among figures
            raise failure.kind(failure.message)

    def _poll(self) -> tuple[Found | None, bool, float]:
        """On rank 0: (next checkpoint to evaluate, whether the run has ended, seconds since its folder changed)."""
        ended = self.run.ended()  # first: a run that has ended has written its last checkpoint
        found = self.run.found()
        for one in self._expected:
            if one not in found and one not in self._skipped and self._due(one):
                self._skip(one, "deleted by the run before it was evaluated; --checkpoint.keep-last keeps more")
        self._expected = found
        return next((o for o in found if o not in self._skipped and self._due(o)), None), ended, self.run.still()

    def _due(self, found: Found) -> list[tuple[Weights, str]]:
        """(weights, evaluator) of the evaluations of a checkpoint that are not made yet."""
        return [
            (kind, name)
            for kind in get_args(Weights)
            for name, section in self.settings.evals.items()
            if kind in section.kinds and (found.weights, found.step, eval_name(name, kind)) not in self._done
        ]

    def _skip(self, found: Found, why: str) -> None:
        self._skipped.add(found)
        logger.warning(f"{found.path.name} skipped: {why}")

    def _evaluate(self, found: Found, signals: StopSignals) -> None:
        """Run the due evaluations of a checkpoint. Collective."""

        def hold() -> Path | None:
            held = self.run.hold(found)
            if held is None:
                self._skip(found, "deleted by the run while it was read; --checkpoint.keep-last keeps more")
            elif (reason := fault(held)) is not None:
                self._skip(found, f"it is damaged: {reason}")
                held = None
            return held

        if (held := self.world.on_main(hold)) is None:
            return
        due: list[tuple[Weights, str]] = self.world.broadcast_object(self._due(found))
        about = {
            "run": self.run.folder.resolve().name,
            "checkpoint": found.path.name,
            "model": self.settings.model.label,
            "file": found.weights,
        }
        from clipstream.evals.context import context_for
        from clipstream.evals.runner import EvalRunner, Listeners

        try:
            for kind in dict.fromkeys(kind for kind, _ in due):
                model = model_in(held, self.settings.model, self.fits, averaged=kind == "averaged")
                preflight(model, self.settings.tokenizer, ask=self.world.local_rank == 0)
                context = context_for(self.settings, model, self.world, examples=self.settings.log.pictures)
                listeners = Listeners(
                    self.write, self.show, lambda record, made_with: self._trace(traced(record, made_with, about))
                )
                runner = EvalRunner(self.settings.evals, context, listeners, {kind: nullcontext})
                keys = {name: (found.weights, found.step, eval_name(name, kind)) for name in self.settings.evals}
                done = {name: self._done[key] for name, key in keys.items() if key in self._done}
                runner.took(found.step, kind, self.world.broadcast_object(done))
                for _ in runner.each(found.step, last=True):
                    self._stop_on(signals)
                self.failures += runner.failures
                del runner, context  # one model at a time
        finally:
            if self.world.is_main:
                self.run.release()
        if self.world.is_main and self.settings.log.report:
            Report(self.run.folder, self.folder).close()

    def write(self, record: Record) -> None:
        """Print an evaluation, and pass it to the sinks."""
        print(evaluation_line(record), flush=True)
        super().write(record)

    def _trace(self, evaluation: Record) -> None:
        for name in (FIGURES_FILE, TABLE_FILE):
            add(self.folder / name, evaluation)
        self._note(evaluation)

    def _note(self, evaluation: Record) -> None:
        metrics = {name: evaluation[name] for name in evaluation["metrics"]}
        error = {"error": evaluation["error"]} if "error" in evaluation else {}
        self._done[evaluation["file"], evaluation["step"], evaluation["eval"]] = {**metrics, **error}

    def _stop_on(self, signals: StopSignals) -> None:
        """Stop on all ranks when one of them has received a signal. Collective."""
        if by := next(filter(None, self.world.gather_objects(signals.received)), None):
            raise Stopped(f"stopped by {by}; rerun the same command to continue")


def _wait_for_a_checkpoint(run: WatchedRun, signals: StopSignals, idle: float) -> None:
    """Wait without writing anything: a run cannot start in a folder that is not empty."""
    announced = False
    while not run.found() or not (run.folder / "config.yaml").is_file():
        if signals.received is not None:
            raise Stopped(f"stopped by {signals.received} before the first checkpoint of {run.folder}")
        if run.ended():
            raise SettingsError(f"--watch: {run.folder} has ended without a complete checkpoint")
        if run.still() > idle:
            raise Stopped(_still(run, idle))
        if not announced and World.from_env().is_main:
            announce(f"waiting for the first checkpoint of {run.folder}")
        announced = True
        time.sleep(POLL)


def _still(run: WatchedRun, idle: float) -> str:
    return f"no change in {run.folder} for {idle:g} s, and the run has not ended; rerun the same command to continue"


@dataclass(frozen=True)
class Found:
    """A checkpoint of the run."""

    path: Path  # its folder
    weights: str  # identifies the weights, as a later process may save other ones at the same step

    @property
    def step(self) -> int:
        return int(self.path.name[5:13])


class WatchedRun:
    """A run's folder, read by another process; it need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / CHECKPOINTS
        self._held = folder / WATCH_FOLDER / "held"
        self._seen: object = None
        self._since = time.monotonic()

    def found(self) -> list[Found]:
        """The complete checkpoints, in the order in which they were written."""
        newest_first = store.markers(self.checkpoints).items()
        return [Found(self.checkpoints / name, _weights(marker)) for name, marker in reversed(newest_first)]

    def ended(self) -> bool:
        """Whether the run has finished; False for one that was stopped or has died."""
        try:
            with (self.folder / METRICS_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
            end = json.loads(last).get("end")
            return end is not None and end.get("status", "done") == "done"
        except (OSError, ValueError, TypeError, AttributeError):
            return False

    def still(self) -> float:
        """Seconds since a change in the folder was last seen."""
        seen = []
        for name in (METRICS_FILE, CHECKPOINTS, "config.yaml"):
            with suppress(OSError):
                status = (self.folder / name).stat()
                seen.append((name, status.st_mtime_ns, status.st_size))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since

    def hold(self, found: Found) -> Path | None:
        """Hard links to a checkpoint's files, which the run may remove meanwhile, or copies where links are impossible.

        Returns:
            The folder of the links; None if the run has removed or replaced the checkpoint.
        """
        held = self._held / found.path.name
        self.release()
        try:
            marker = Marker.from_json((found.path / MARKER).read_bytes())
            if marker is None or _weights(marker) != found.weights:
                return None
            for name in (MARKER, *(name for name in marker.sizes if name not in UNREAD)):
                path = held / name
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(found.path / name, path)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(found.path / name, path)
        except FileNotFoundError:
            return None
        return held

    def release(self) -> None:
        """Remove the links, also those of an earlier process."""
        shutil.rmtree(self._held, ignore_errors=True)


def fault(held: Path) -> str | None:
    """The damage of a held checkpoint's files; None if there is none."""
    marker = Marker.from_json((held / MARKER).read_bytes())
    assert marker is not None, "a held checkpoint has a marker"
    return store.fault(held, [name for name in marker.sizes if name not in UNREAD], marker)


def _weights(marker: Marker) -> str:
    """The checksums of a checkpoint's weights; the save's number if it has none."""
    files = (name for name in sorted(marker.checksums) if name.endswith(".safetensors") and name not in UNREAD)
    return " ".join(marker.checksums[name] for name in files) or f"save {marker.serial}"
