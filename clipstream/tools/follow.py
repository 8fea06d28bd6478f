"""Owns the follower, `clipstream evaluate --watch RUN`: evaluates a run's checkpoints as they appear, in their order.

    RUN/watch/evaluations.jsonl, evaluations.csv, tensorboard/, pictures/, report.html

Each evaluation of each checkpoint is made once, also over several followers one after the other: what was made stands
in `evaluations.jsonl`. It writes to no file that the run writes to, and never changes a checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from clipstream import durable
from clipstream.cli import own_flags
from clipstream.config import Settings, load
from clipstream.contradictions import validate_evals
from clipstream.errors import ClipstreamError, SettingsError, Stopped
from clipstream.evals.settings import Weights, eval_name
from clipstream.failure import FailureWatch
from clipstream.folder import held as locked
from clipstream.model.pretrained import preflight
from clipstream.report.album import Album
from clipstream.report.figures import FIGURES_FILE, TABLE_FILE, WATCH_FOLDER, add, traced
from clipstream.report.page import REPORT_FILE, write_report
from clipstream.report.progress import evaluation_line
from clipstream.report.sinks import TensorBoard, lines
from clipstream.tools import suites
from clipstream.tools.evaluate import context_for, model_in
from clipstream.tools.watched import Found, WatchedRun, fault
from clipstream.training.stopping import StopSignals
from clipstream.world import World

if TYPE_CHECKING:
    from clipstream.evals.agreement import Failure
    from clipstream.evals.context import EvalContext
    from clipstream.evals.protocol import EvalRunner
    from clipstream.example import Example, Table

POLL = 2.0  # s between two looks at the run's folder
OWN_FLAGS = {
    "--watch": "a run's folder: its checkpoints are evaluated as they appear, each once, until the run has ended",
    "--idle": "seconds without a change in that folder after which to end all the same (3600)",
}
OF_ONE = ("--checkpoint", "--weights", "--output", "--out", "--report")  # flags of the evaluation of one checkpoint


def follow(argv: Sequence[str]) -> int:
    """Follow the run that the command line names, on all ranks; the exit code.

    Raises:
        SettingsError: wrong settings, or nothing to evaluate on.
        Stopped: a signal came, or the run lay still for too long.
    """
    own, flags = own_flags(argv, {**OWN_FLAGS, **suites.OWN_FLAGS}, many=(suites.SUITE,))
    asked = suites.Suites.of(own)
    if other := [flag for flag in OF_ONE if any(token.partition("=")[0] == flag for token in flags)]:
        raise SettingsError(f"{other[0]} belongs to the evaluation of one checkpoint, --watch takes all: leave one out")
    run, idle = WatchedRun(Path(own["--watch"]).expanduser()), _seconds(own.get("--idle", "3600"))
    with StopSignals() as signals:
        _wait_for_a_checkpoint(run, signals, idle)
        config = ["--config", str(run.folder / "config.yaml")]
        settings = asked.chosen(load([*config, *asked.flags, *flags], trains=False), config[1:])
        if not settings.evals:
            raise SettingsError(
                "nothing to evaluate on: give --val-data SHARDS, --suite FILE, or --config with a section evals"
            )
        validate_evals(settings, shown=True)
        fits = load(config).tokenizer == settings.tokenizer
        from clipstream.session import run_ranks

        def body(world: World, watch: FailureWatch) -> None:
            suites.check_same(settings, world)
            busy = f"{run.folder} is being followed by {{}}: one follower is enough"
            lock = locked(run.folder / WATCH_FOLDER, "--watch: the folder", busy.format)
            try:
                with lock if world.is_main else nullcontext(), _Files(run.folder, settings, world) as files:
                    _Follower(run, settings, fits, world, files).run(signals, idle)
            except OSError as error:
                if not durable.is_full(error):
                    raise
                text = f"the disk of {run.folder / WATCH_FOLDER} is full: free some space; the same command goes on"
                raise ClipstreamError(text) from error

        return run_ranks(settings.run, body)


class _Follower:
    """Evaluates on all ranks what rank 0 sees."""

    def __init__(self, run: WatchedRun, settings: Settings, fits: bool, world: World, files: _Files) -> None:
        self.run_, self.settings, self.fits, self.world, self.files = run, settings, fits, world, files
        self.failures: list[Failure] = []
        self._gone: set[Found] = set()  # what was seen, and cannot be evaluated any more
        self._expected: list[Found] = []  # what was there the last time

    def run(self, signals: StopSignals, idle: float) -> None:
        """Until the run has ended and all is evaluated.

        Raises:
            Stopped: a signal came on some rank, or nothing happened in the run's folder for `idle` seconds.
            ClipstreamError: the first failure of an evaluation, at the end.
        """
        while True:
            look = self.world.broadcast_object(self._look() if self.world.is_main else None)
            self._end_if_asked(signals)
            if look.next is not None:
                self._evaluate(look.next, signals)
            elif look.ended:
                break
            elif look.still > idle:
                raise Stopped(_still(self.run_, idle))
            else:
                time.sleep(POLL)
        self._say(f"the run has ended, and all of its checkpoints are evaluated: {self.files.folder}")
        for failure in self.failures:  # the first: what ends the process must not be lost among figures
            raise failure.kind(failure.message)

    def _look(self) -> _Look:
        """On rank 0."""
        ended = self.run_.ended()  # first: the last checkpoint is there when the run says so
        found = self.run_.found()
        for one in self._expected:
            if one not in found and one not in self._gone and self._left(one):
                self._leave_out(one, "the run removed it before its turn; --checkpoint.keep-last keeps more")
        self._expected = found
        return _Look(next((o for o in found if o not in self._gone and self._left(o)), None), ended, self.run_.still())

    def _left(self, found: Found) -> list[tuple[Weights, str]]:
        """Weights and evaluators that a checkpoint was not evaluated with."""
        return [
            (kind, name)
            for kind in get_args(Weights)
            for name, section in self.settings.evals.items()
            if kind in section.kinds and (found.weights, found.step, eval_name(name, kind)) not in self.files.done
        ]

    def _done(self, found: Found, kind: Weights) -> dict[str, dict[str, Any]]:
        """What evaluators gave of a checkpoint before."""
        told = {name: (found.weights, found.step, eval_name(name, kind)) for name in self.settings.evals}
        return {name: self.files.done[key] for name, key in told.items() if key in self.files.done}

    def _leave_out(self, found: Found, why: str) -> None:
        self._gone.add(found)
        self._say(f"warning: {found.path.name} is left out: {why}", sys.stderr)

    def _evaluate(self, found: Found, signals: StopSignals) -> None:
        held = self.world.on_main(lambda: self._hold(found))
        if held is None:
            return
        left: list[tuple[Weights, str]] = self.world.broadcast_object(self._left(found))
        try:
            for kind in dict.fromkeys(kind for kind, _ in left):
                runner = self._runner(self._context(held, kind), found, kind)
                for _ in runner.each(found.step, last=True):
                    self._end_if_asked(signals)
                self.failures += runner.failures
                del runner  # one model at a time
        finally:
            if self.world.is_main:
                self.run_.release()
        if self.world.is_main:
            self.files.report()

    def _hold(self, found: Found) -> Path | None:
        """On rank 0: the checkpoint's files, if they are there and whole."""
        held = self.run_.hold(found)
        if held is None:
            self._leave_out(found, "the run removed it while it was read; --checkpoint.keep-last keeps more")
        elif (told := fault(held)) is not None:
            self._leave_out(found, f"it is damaged: {told}")
            held = None
        return held

    def _context(self, held: Path, kind: Weights) -> EvalContext:
        from clipstream.model.pretrained import fetch

        model = model_in(held, self.settings.model, self.fits, kind)
        preflight(model, self.settings.tokenizer, ask=self.world.local_rank == 0)
        fetch(model, self.settings.tokenizer, self.world)
        context = context_for(self.settings, model, self.world)
        context.examples_wanted = self.settings.log.pictures
        return context

    def _runner(self, context: EvalContext, found: Found, kind: Weights) -> EvalRunner:
        """For what a checkpoint was not evaluated with."""
        from clipstream.evals.protocol import EvalRunner

        about = {
            "run": self.run_.folder.resolve().name,
            "checkpoint": found.path.name,
            "model": self.settings.model.label,
            "file": found.weights,
        }
        runner = EvalRunner(
            self.settings.evals,
            context,
            self.files.write,
            self.files.show,
            {kind: nullcontext},
            lambda record, made_with: self.files.trace(traced(record, made_with, about)),
        )
        runner.took(found.step, kind, self.world.broadcast_object(self._done(found, kind)))
        return runner

    def _end_if_asked(self, signals: StopSignals) -> None:
        if by := next(filter(None, self.world.gather_objects(signals.received)), None):
            raise Stopped(f"stopped by {by}; the same command goes on with what is not evaluated yet")

    def _say(self, text: str, stream: Any = None) -> None:
        if self.world.is_main:
            print(text, file=stream or sys.stdout, flush=True)


@dataclass(frozen=True)
class _Look:
    """What rank 0 sees: what is to be evaluated next, whether the run has ended, for how long nothing has changed."""

    next: Found | None
    ended: bool
    still: float


class _Files:
    """What a follower writes, in RUN/watch, on rank 0. Context manager.

    Attributes:
        done: of what was evaluated, by (weights, step, evaluation): its metrics, or its error.
    """

    def __init__(self, run: Path, settings: Settings, world: World) -> None:
        self.run, self.folder, self.settings, self.world = run, run / WATCH_FOLDER, settings, world
        self.done: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._album = Album(self.folder)
        self._board: TensorBoard | None = None

    def __enter__(self) -> _Files:
        if not self.world.is_main:
            return self
        there = self.folder / FIGURES_FILE
        for _, record in lines(there) if there.is_file() else ():
            self._note(record)
        if self.settings.log.tensorboard:
            # Later steps than those would be hidden.
            self._board = TensorBoard(self.folder, max((step for _, step, _ in self.done), default=None))
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def trace(self, evaluation: dict[str, Any]) -> None:
        """Add an evaluation, which then is done."""
        for name in (FIGURES_FILE, TABLE_FILE):
            add(self.folder / name, evaluation)
        self._note(evaluation)

    def _note(self, evaluation: dict[str, Any]) -> None:
        metrics = {name: evaluation[name] for name in evaluation["metrics"]}
        error = {"error": evaluation["error"]} if "error" in evaluation else {}
        self.done[evaluation["file"], evaluation["step"], evaluation["eval"]] = {**metrics, **error}

    def write(self, record: dict[str, Any]) -> None:
        """Say an evaluation's figures."""
        print(evaluation_line(record), flush=True)
        if self._board is not None:
            self._board.write(record)

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table]) -> None:
        """Keep the pictures of an evaluation."""
        for shows in (self._album, self._board):
            if shows is not None:
                shows.show(step, name, examples, tables)

    def report(self) -> None:
        """Make the report of the run with what was found here."""
        if not self.settings.log.report:
            return
        try:
            write_report([self.run], self.folder / REPORT_FILE)
        except Exception as error:
            print(f"warning: {self.folder / REPORT_FILE} could not be written: {error}", file=sys.stderr, flush=True)


def _wait_for_a_checkpoint(run: WatchedRun, signals: StopSignals, idle: float) -> None:
    """Wait, and write nothing: a run cannot begin in a folder where others wrote.

    Raises:
        Stopped: a signal came, or nothing happened for `idle` seconds.
        SettingsError: the run has ended without any checkpoint.
    """
    told = False
    while not run.found() or not (run.folder / "config.yaml").is_file():
        if signals.received is not None:
            raise Stopped(f"stopped by {signals.received}, before {run.folder} had a checkpoint")
        if run.ended():
            raise SettingsError(f"--watch: {run.folder} has ended, and has no whole checkpoint")
        if run.still() > idle:
            raise Stopped(_still(run, idle))
        if not told and World.from_env().is_main:
            print(f"waiting for the first checkpoint of {run.folder}", flush=True)
        told = True
        time.sleep(POLL)


def _still(run: WatchedRun, idle: float) -> str:
    return f"nothing has changed in {run.folder} for {idle:g} s, and the run has not ended; the same command goes on"


def _seconds(told: str) -> float:
    try:
        seconds = float(told)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise SettingsError(f"--idle: expected seconds, not {told!r}")
    return seconds
