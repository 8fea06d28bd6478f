"""Owns the course of a run: steps, training lines, evaluations, checkpoints, the end; and its position.

Everything it does is done by parts that it is given; it knows no model, no shard and no file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from clipstream.batch import Batch
from clipstream.data.health import Loss
from clipstream.data.stages import StageTimes, merged
from clipstream.errors import ClipstreamError, DataError, Stopped
from clipstream.training.early_stop import EarlyStop
from clipstream.training.recovery import Recovery
from clipstream.training.settings import EarlyStopSettings
from clipstream.training.step import StepResult
from clipstream.training.stopping import StopSignals
from clipstream.world import World

Record = dict[str, Any]
TRAINING = "training"  # the bottleneck that one wishes for
NEGLIGIBLE = 0.05  # share of the time that is waited for data, below which training is the bottleneck
HEALTH_LINES = 10  # training lines between two of the data's health


class Step(Protocol):
    """One training step; `clipstream.training.step.TrainStep` is one."""

    def __call__(self, batch: Batch, lr: float, stop: Callable[[], bool]) -> StepResult:
        """Train on a batch; the same result on all ranks."""


class Batches(Protocol):
    """An endless stream of this rank's batches; `clipstream.data.loader.Loader` is one."""

    wait_seconds: float
    health: Any

    def __next__(self) -> Batch:
        """The next batch."""

    def state(self) -> dict[str, Any]:
        """Position after the last batch that was handed out; JSON-able."""

    def take_times(self) -> StageTimes:
        """What the stages of the data took since the last take."""


class Saves(Protocol):
    """Where checkpoints are made; `clipstream.training.saving.Saver` is one. Every rank calls all but `check`."""

    def due(self, step: int) -> bool:
        """Whether to save after so many steps; the same on all ranks."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save."""

    def check(self) -> None:
        """Raise what went wrong since; it costs nothing."""

    def finish(self) -> bool:
        """Wait for the end of it; whether the last save was written."""


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def close(self) -> None:
        """Write out what is left."""


class Trainer:
    """The run on one rank, step by step.

    Args:
        step: trains on a batch.
        loader: gives batches, from the position of `state`.
        lr: learning rate of a step (from 0).
        world: this rank among the others.
        total_steps: of the whole run.
        log_every: steps between training lines.
        sinks: rank 0's take the records; the other ranks' are not used.
        evaluate: called as evaluate(steps_done, last) on all ranks after each step, and decides itself what is due.
        saves: makes checkpoints, when they are due and at the end.
        signals: entered by the caller.
        recovery: decides what becomes of steps that are not finite.
        state: what `state()` gave, of a resumed run.
        epoch_samples: adds `epoch` to the training lines.
        show: called as show(step, batch) with the first batch and then each `show_every` steps, before its step; None
            shows nothing.
        early_stop: hears what `evaluate` does, and may end the run before its last step; None never does.

    Attributes:
        step: steps done.
        samples: samples trained on, over all ranks.
    """

    def __init__(
        self,
        step: Step,
        loader: Batches,
        *,
        lr: Callable[[int], float],
        world: World,
        total_steps: int,
        log_every: int,
        sinks: Sequence[Sink],
        evaluate: Callable[[int, bool], object],
        saves: Saves,
        signals: StopSignals,
        recovery: Recovery,
        state: dict[str, Any] | None = None,
        epoch_samples: int | None = None,
        show: Callable[[int, Batch], None] | None = None,
        show_every: int = 1000,
        early_stop: EarlyStop | None = None,
    ) -> None:
        self.train_step, self.loader, self.lr, self.world = step, loader, lr, world
        self.total_steps, self.log_every = total_steps, log_every
        self.sinks, self.evaluate, self.saves, self.signals = sinks, evaluate, saves, signals
        self.recovery, self.epoch_samples, self.show, self.show_every = recovery, epoch_samples, show, show_every
        self.early_stop = EarlyStop(EarlyStopSettings()) if early_stop is None else early_stop
        state = state or {}
        self.step, self.samples = int(state.get("step", 0)), int(state.get("samples", 0))
        self._interval = _Interval(**state.get("interval", {}))
        self._saved_step = -1
        if state:
            self._saved_step = self.step
            recovery.saved(self.step)
        self._health_before: list[dict[str, Any]] = [state["health"]] if "health" in state else []
        self._health_step = -1

    def run(self) -> None:
        """Train to the end: the last step, or until evaluations get no better.

        Raises:
            Stopped: a signal came on some rank; the run is saved.
            DataError, DivergedError: as loader and recovery raise them.
        """
        self._interval.begin(self.loader.wait_seconds)
        while self.step < self.total_steps and not self.early_stop.over:
            lr = self.lr(self.step)
            batch = self._next_batch()
            if self.show is not None and self.step % self.show_every == 0:
                with self._interval.paused():
                    self.show(self.step, batch)
            result = self.train_step(batch, lr, self._asked_to_stop)
            self._count(result)
            if result.skipped:
                self._write_skipped(batch, result)
            if self.step % self.log_every == 0 or self.step == self.total_steps:
                self._log(result, lr)
            with self._interval.paused():
                self._recover(result)
                if self.step == self.total_steps:
                    break
                self.saves.check()
                self.evaluate(self.step, False)
                if result.stop:
                    self._stop()
                # Weights that give nothing finite must not take the place of good ones.
                if self.saves.due(self.step) and not self.recovery.row:
                    self._save()
        if self._health_step != self.step:
            self._write_health()
        self._save()  # first: the last evaluation may be long
        self.evaluate(self.step, True)
        if not self.saves.finish():
            raise ClipstreamError(f"the last checkpoint, of step {self.step}, could not be written")
        why = {"early_stop": self.early_stop.why()} if self.early_stop.over else {}
        self._write({"step": self.step, "end": {"total_steps": self.total_steps, **why}})

    def state(self) -> dict[str, Any]:
        """Position of the run, JSON-able; the data's is this rank's part."""
        return {
            "step": self.step,
            "samples": self.samples,
            "interval": self._interval.state(),
            "recovery": self.recovery.state(),
            "early_stop": self.early_stop.state(),
            "data": self.loader.state(),
        }

    def _asked_to_stop(self) -> bool:
        return self.signals.received is not None

    def _next_batch(self) -> Batch:
        try:
            return next(self.loader)
        except DataError:
            self._write_losses(self.loader.health.take_losses())  # this rank's; the others cannot be asked any more
            raise
        except StopIteration:
            raise DataError(f"the training data ended after {self.step} of {self.total_steps} steps") from None

    def _count(self, result: StepResult) -> None:
        self.step += 1
        self.samples += result.n
        self._interval.add(result)

    def _log(self, result: StepResult, lr: float) -> None:
        """Write a training line: means over the interval of loss and gradient norm, the rest of its last step."""
        mine = (*self._interval.times(self.loader.wait_seconds), self.loader.take_times())
        times = self.world.gather_objects(mine)
        seconds = max(wall for wall, *_ in times)
        waited = max(wait / wall for wall, wait, _ in times)
        stages = merged(stages for *_, stages in times)
        bottleneck = TRAINING if waited < NEGLIGIBLE else stages.longest() or TRAINING
        loss, grad_norm = self._interval.means()
        record: Record = {
            "step": self.step,
            "samples": self.samples,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "logit_scale": result.logit_scale,
            "samples_per_s": self._interval.timed_samples / seconds,
            "data_wait": waited,
            "bottleneck": bottleneck,
            "skipped": self._interval.skipped,
        }
        if result.loss_scale is not None:
            record |= {"loss_scale": result.loss_scale, "overflow_rate": self._interval.overflow_rate()}
        if self.epoch_samples:
            record["epoch"] = self.samples / self.epoch_samples
        self._write(record)
        about = {"data_wait": waited, "seconds": seconds, "bottleneck": bottleneck}
        self._write({"step": self.step, **about, "stages": stages.summary()})
        self._write_all_losses()
        if self.step % (self.log_every * HEALTH_LINES) == 0 or self.step == self.log_every:
            self._write_health()
        self._interval = _Interval()
        self._interval.begin(self.loader.wait_seconds)

    def _write_health(self) -> None:
        """Write the data's health, summed over the ranks."""
        self._health_step = self.step
        self._write({"step": self.step, "health": self._health()})

    def _health(self) -> dict[str, Any]:
        """The counts of all ranks since the run began, also of those before it was resumed. Collective."""
        return dict(_sum([*self._health_before, *self.world.gather_objects(self.loader.health.summary())]))

    def _write_all_losses(self) -> None:
        """Write what no rank could use since the last time. Collective."""
        self._write_losses(
            [loss for part in self.world.gather_objects(self.loader.health.take_losses()) for loss in part]
        )

    def _write_losses(self, losses: list[Loss]) -> None:
        if losses:
            self._write({"step": self.step, "quarantine": [loss._asdict() for loss in losses]})

    def _write_skipped(self, batch: Batch, result: StepResult) -> None:
        """Write which samples a step had that was left out, of all ranks."""
        keys = [key for part in self.world.gather_objects(batch.keys) for key in part]
        figures = {"loss": f"{result.loss:g}", "grad_norm": f"{result.grad_norm:g}"}  # JSON has no word for them
        self._write({"step": self.step, "nonfinite": {**figures, "keys": keys}})

    def _recover(self, result: StepResult) -> None:
        row = self.recovery.row + 1
        if (step := self.recovery.take(self.step, result)) is not None:
            self._write({"step": self.step, "rollback": {"to": step, "skipped": row}})

    def _write(self, record: Record) -> None:
        if self.world.is_main:
            for sink in self.sinks:
                sink.write(record)

    def _save(self) -> None:
        if self._saved_step != self.step:
            self._write_all_losses()  # a run that goes on from here does not see them again
            self.saves.save(self.step, {**self.state(), "health": self._health()})
            self._saved_step = self.step
            self.recovery.saved(self.step)

    def _stop(self) -> None:
        by = self.signals.received or "a signal to another rank"
        self._save()
        if not self.saves.finish():
            raise Stopped(f"stopped by {by} after step {self.step}, which could not be saved; --resume latest goes on")
        raise Stopped(f"stopped by {by}, step {self.step} is saved; the same command with --resume latest goes on")


class _Interval:
    """What happened since the last training line.

    Its sums are saved, so that a resumed run writes the same lines; its clock is not: speed and waiting are those of
    the present process, and leave out evaluations and saves.
    """

    def __init__(
        self, loss: float = 0.0, grad_norm: float = 0.0, steps: int = 0, overflows: int = 0, skipped: int = 0
    ) -> None:
        self.loss, self.grad_norm, self.steps = loss, grad_norm, steps
        self.overflows, self.skipped = overflows, skipped
        self.timed_samples = 0
        self._began = self._wait_began = self._pause = 0.0

    def state(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "steps": self.steps,
            "overflows": self.overflows,
            "skipped": self.skipped,
        }

    def begin(self, wait_seconds: float) -> None:
        self._began, self._wait_began = time.perf_counter(), wait_seconds

    def add(self, result: StepResult) -> None:
        self.loss += 0.0 if result.skipped else result.loss
        self.grad_norm += 0.0 if result.skipped or result.overflow else result.grad_norm
        self.overflows += result.overflow
        self.skipped += result.skipped
        self.steps += 1
        self.timed_samples += result.n

    def means(self) -> tuple[float, float]:
        """Of the loss over the steps that were not left out, of the gradients' norm over those that changed weights;
        nan where there were none.
        """
        finite = self.steps - self.skipped
        applied = finite - self.overflows
        return self.loss / finite if finite else math.nan, self.grad_norm / applied if applied else math.nan

    def overflow_rate(self) -> float:
        return self.overflows / self.steps

    def times(self, wait_seconds: float) -> tuple[float, float]:
        """Seconds of training since `begin`, and how many of them this rank waited for data."""
        return time.perf_counter() - self._began - self._pause, wait_seconds - self._wait_began

    def paused(self) -> _Pause:
        return _Pause(self)

    def leave_out(self, seconds: float) -> None:
        self._pause += seconds


class _Pause:
    """Context whose time an interval leaves out."""

    def __init__(self, interval: _Interval) -> None:
        self.interval = interval

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.interval.leave_out(time.perf_counter() - self.began)


def _sum(trees: list[Any]) -> Any:
    """Sum the numbers of equally meant trees of dicts, leaf by leaf (of texts, the first); a leaf may be missing."""
    if isinstance(trees[0], str):
        return trees[0]
    if not isinstance(trees[0], dict):
        return sum(trees)
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: _sum([tree[key] for tree in trees if key in tree]) for key in keys}
