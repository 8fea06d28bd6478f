"""The training loop: steps, training lines, evaluations, checkpoints and the end of a run.

Takes batches from a loader and hands them to a step; records go to sinks, state to a checkpoint writer. The loop knows
no model, shard or file: every part is passed in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from clipstream.data.batch import Batch
from clipstream.data.loader.health import lost_areas, merge_counts, without_sets
from clipstream.data.loader.stage_timing import StageTimes, sum_times
from clipstream.data.order.lanes import DataState
from clipstream.distributed.run_record import end_record
from clipstream.distributed.signals import StopSignals
from clipstream.errors import ClipstreamError, DataError, DivergedError, Interrupted, Stopped
from clipstream.models.execution.flops import Throughput, Work
from clipstream.text import counted, lines
from clipstream.training.rescue import Held, Rescue
from clipstream.training.settings import EarlyStop, EarlyStopSettings, TrainSettings
from clipstream.training.state import IntervalState, RollbackState, SourceCounts, TrainState
from clipstream.training.step import StepResult, TrainStep
from clipstream.utils.timing import DATA, PARTS, StepProfiler, StepTimer, Usage, over_ranks, time_part

if TYPE_CHECKING:
    from clipstream.data.loader.loader import Loader

Record = dict[str, object]
TRAINING = "training"  # the bottleneck of a run that does not wait for data
NEGLIGIBLE = 0.05  # share of the time spent waiting for data below which training is the bottleneck
SHOW_EVERY = 1000  # steps
HEALTH_LINES = 10  # training lines between two lines of data health
REMEMBERED = 100  # saves: older ones are rarely kept
Restore = Callable[[Sequence[int]], int | None]

_NEVER = (
    "nothing was trained or saved: look at the weights that --pretrained names and at your own loss, if there is one, "
    "and try --precision fp32"
)
_ADVICE = (
    "lower --lr or raise --warmup, set --grad-clip-norm 1, or use a wider --precision (bf16 instead of fp16, or fp32)"
    "; the samples of these steps are in nonfinite.jsonl in the run's folder"
)


class CheckpointWriter(Protocol):
    """See `checkpoint.async_writer.AsyncWriter`. Other methods than `check` are collective."""

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps; the same on all ranks."""

    def save(self, state: TrainState) -> None:
        """Start to save."""

    def check(self) -> None:
        """Raise an error of the save in progress, without waiting."""

    def finish(self) -> bool:
        """Wait for the save in progress; whether the last one was written."""


class Rollback:
    """Counts non-finite steps, and restores a checkpoint or ends the run when there are too many.

    A single such step is skipped (see `step`): it changes nothing, and the run continues with the next batch. After
    `max_nonfinite` of them in a row the weights are assumed broken: weights, moments, averages, loss scale and random
    states return to the last good checkpoint. The step count, and with it the position in data and schedule, stays, so
    that no batch is seen twice and every metrics line remains valid. A checkpoint is good if its weights gave a finite
    loss later, so it must be older than the first step of the row.

    Without a good checkpoint, or after `max_rollbacks` rollbacks with no newer good checkpoint in between, the run
    ends. All decisions depend on results that are the same on all ranks, and the state is saved, so a resumed run
    decides alike. `restore` loads the newest of the checkpoints with the given steps that still exists, and returns its
    step, or None if there is none. Collective.
    """

    def __init__(self, settings: TrainSettings, restore: Restore, state: RollbackState | None = None) -> None:
        self.settings, self.restore = settings, restore
        self.state = state or RollbackState()

    def on_save(self, step: int) -> None:
        self.state.saves = [*(saved for saved in self.state.saves if saved != step), step][-REMEMBERED:]

    def on_step(self, step: int, result: StepResult) -> int | None:
        """Count a step, of `step` done, and roll back if it is one non-finite step too many; returns the step of the
        checkpoint that was restored, or None.

        Raises DivergedError: a rollback is due and impossible, or did not help before.
        """
        state = self.state
        if result.overflow:  # says something about fp16's loss scale, nothing about the weights
            return None
        if not result.skipped:
            state.nonfinite, state.applied = 0, True
            return None
        if state.nonfinite == 0:
            state.last_finite = step - 1
        state.nonfinite += 1
        count = state.nonfinite
        if count < self.settings.max_nonfinite:
            return None
        what = f"step {step}: loss or gradients were not finite for {counted(count, 'step')} in a row"
        good = [saved for saved in state.saves if saved < state.last_finite]
        in_vain = 0 if max(good, default=-1) > state.rolled_back_at else state.rollbacks
        if in_vain >= self.settings.max_rollbacks:
            again = f", and to go back {counted(in_vain, 'time')} did not help" if in_vain else ""
            raise DivergedError(f"{what}{again}: {_ADVICE}")
        if not state.applied:
            raise DivergedError(f"{what}, from the first one on, so {_NEVER}")
        restored = self.restore(good) if good else None
        if restored is None:
            raise DivergedError(f"{what}, and there is no checkpoint from before to go back to: {_ADVICE}")
        state.saves = good  # the newer ones hold broken weights
        state.rollbacks, state.rolled_back_at, state.nonfinite = in_vain + 1, step, 0
        return restored

    def on_end(self, step: int) -> None:
        """Check a run that ended after `step` steps. Raises DivergedError: no step of the run changed the weights."""
        if step and not self.state.applied:
            raise DivergedError(f"none of {counted(step, 'step')} gave finite gradients, so {_NEVER}")


@dataclass(frozen=True)
class Length:
    """Of a run, or up to the end of a stage: its steps, and what is counted along them."""

    total_steps: int
    lr: Callable[[int], float]  # learning rate of a step (from 0)
    log_every: int = 100  # steps between training lines
    epoch_samples: int | None = None  # samples of an epoch; adds `epoch` to the training lines
    ends: bool = True  # whether the run ends with the last step; else other settings follow


@dataclass(frozen=True)
class Hooks:
    write: Callable[[Record], object]  # takes the records, on rank 0
    evaluate: Callable[[int, bool], object]  # (steps done, last) after each step; runs the evaluators that are due
    evaluation_due: Callable[[int], object] = lambda step: False  # whether `evaluate` does something after a step
    show: Callable[[int, Batch], None] | None = None  # (step, batch) before every SHOW_EVERY steps
    begun: Callable[[int], object] = lambda step: None  # takes the number of steps after each is started
    step: Callable[[int], object] = lambda done: None  # the same, once the result of the step before is counted


@dataclass(eq=False)
class Trainer:
    """The run on one rank, after `step` steps and `samples` samples of all ranks."""

    train_step: TrainStep  # trains on a batch
    loader: Loader  # yields batches, starting at the position of `state`
    writer: CheckpointWriter  # saves checkpoints when they are due and at the end
    length: Length
    hooks: Hooks
    signals: StopSignals  # entered by the caller
    rollback: Rollback  # handles non-finite steps
    early_stop: EarlyStop = field(default_factory=lambda: EarlyStop(EarlyStopSettings()))
    state: InitVar[TrainState | None] = None  # of a resumed run
    rescue: Rescue | None = None  # saves the last whole step where another rank fails
    throughput: Throughput | None = None  # adds `tokens_per_s`, `tflops` and `mfu` to the training lines
    profiler: StepProfiler | None = None  # writes a profile of some steps

    def __post_init__(self, state: TrainState | None) -> None:
        start = state or TrainState()
        self._saved_step = -1 if state is None else state.step
        if state is not None:
            self.rollback.on_save(state.step)
        self.world, self.total_steps = self.train_step.world, self.length.total_steps
        self.step, self.samples = start.step, start.samples
        self._interval, self._evaluation_pending = start.interval, start.evaluation_pending
        self._health_before = [start.health] if start.health else []
        self._counts: list[SourceCounts] = [{}] * self.world.size  # of data in this process, by rank
        self._evaluated_step = -1 if start.evaluation_pending else start.step
        self._health_step = -1
        self._started: list[_Started] = []
        self._clock = _Clock()
        self._timer = StepTimer(self.world.device)
        self._usage = Usage(self.world.device, self.loader.worker_pids)

    def run(self, *, save_first: bool = False) -> None:
        """Train until the last step, or until early stopping. With `save_first`, save the state that the run was
        resumed with, as its checkpoint is of another program.

        Raises:
            Stopped: a signal reached some rank; the run is saved.
            DataError, DivergedError: from loader and rollback.
        """
        self.signals.deferring = True
        with nullcontext() if self.rescue is None else self.rescue.on_failure(self._last_whole):
            self._run(save_first)

    def _run(self, save_first: bool) -> None:
        if save_first:
            self._saved_step = -1
            self._save()
        if self.rescue is not None:
            self.rescue.begin(self.step, self.loader.state(), len(self.loader.stream.names))
        if self._evaluation_pending:
            self._evaluate(last=False)
            self._evaluation_pending = False
            self.writer.finish()  # which may mark it as the best one
        self._clock = _Clock(self.loader.wait_seconds)
        self._usage.read()
        try:
            with self._timer.active():
                self._train()
        finally:
            if self.profiler is not None:
                self.profiler.close()
        if not self.ended:
            self._save()
            self._finish_save()
            return
        self.rollback.on_end(self.step)
        if self._health_step != self.step:
            self._write_health()
        self._save()  # first: the last evaluation may take long
        self._evaluate(last=True)
        self._finish_save()
        why = {"early_stop": self.early_stop.summary()} if self.early_stop.should_stop else {}
        self._write(end_record(self.step, 0, None, total_steps=self.total_steps, **why))

    @property
    def ended(self) -> bool:
        """Whether no step of the run is left, where the loop is over."""
        return self.length.ends or self.early_stop.should_stop

    def _finish_save(self) -> None:
        if not self.writer.finish():
            raise ClipstreamError(f"the last checkpoint, of step {self.step}, could not be written")

    def _train(self) -> None:
        """The steps, with the evaluations and checkpoints between them.

            host     start(n)  settle(n - 1)  start(n + 1)  settle(n)  …
            device   … step n - 1 | step n .............. | step n + 1 …

        A step's result is read while the device is at the next one, unless something follows from it (`_settles`).
        """
        while self.step < self.total_steps and not self.early_stop.should_stop:
            lr = self.length.lr(self.step)
            self._profile(begins=True)
            with time_part(DATA):
                batch = self._next_batch()
            if self.hooks.show is not None and self.step % SHOW_EVERY == 0:
                with self._pause():
                    self.hooks.show(self.step, batch)
            self.train_step.unlock(self.step)
            if self.throughput is not None:
                self.throughput.add(batch)
            result = self.train_step.start(batch, lr)
            self.step += 1
            self.hooks.begun(self.step)
            self._started.append(_Started(self.step, result, batch.keys, lr))
            self.loader.mark_trained()
            if self.rescue is not None:
                self.rescue.end_step(self.step)
            self._timer.end_step()
            self._settle(but=1)  # the step before, while the device is at this one
            self.hooks.step(self.step)
            self._profile(begins=False)
            if self._settles():
                self._settle()
            with self._pause():
                if self.step == self.total_steps and self.length.ends:
                    break
                self.writer.check()
                self._evaluate(last=False)
                # Weights that may be broken must not replace good ones.
                if self.writer.due(self.step) and not self.rollback.state.nonfinite:
                    self._save(must=False)

    def _settles(self) -> bool:
        """Whether the result of the last step is needed now: something is to be written, or to follow from it."""
        due = self.step % self.length.log_every == 0 or self.step == self.total_steps
        due = due or self.writer.due(self.step) or bool(self.hooks.evaluation_due(self.step))
        return due or self.rollback.state.nonfinite + 1 >= self.rollback.settings.max_nonfinite

    def _settle(self, but: int = 0) -> None:
        """Wait for the results of the steps but the last `but`, and count, log and handle them. Collective."""
        while len(self._started) > but:
            result = self._count(self._started[0])
            step, _, keys, lr = self._started.pop(0)
            if result.skipped:
                every = [key for part in self.world.gather_objects(keys) for key in part]
                figures = {"loss": f"{result.loss:g}", "grad_norm": f"{result.grad_norm:g}"}  # JSON has no NaN
                self._write({"step": step, "nonfinite": {**figures, "keys": every}})
            if step % self.length.log_every == 0 or step == self.total_steps:
                with self._timer.pause():  # as the clock begins anew at its end
                    self._log(result, lr)
            with self._pause():
                row = self.rollback.state.nonfinite + 1
                if (restored := self.rollback.on_step(step, result)) is not None:
                    self._write({"step": step, "rollback": {"to": restored, "skipped": row}})
                    if self.rescue is not None:  # the random states are those of another step
                        self.rescue.end_step(self.step)

    def _count(self, started: _Started) -> StepResult:
        result = started.wait()
        self.samples += result.n
        self._clock.samples += result.n
        sums = self._interval
        sums.loss += 0.0 if result.skipped else result.loss
        for name, part in result.parts.items():
            sums.parts[name] = sums.parts.get(name, 0.0) + (0.0 if result.skipped else part)
        sums.grad_norm += 0.0 if result.skipped or result.overflow else result.grad_norm
        sums.overflows += result.overflow
        sums.skipped += result.skipped
        sums.steps += 1
        return result

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Exclude the time spent in the context from the figures of training."""
        with self._timer.pause(), self._clock.pause():
            yield

    def _profile(self, *, begins: bool) -> None:
        """Start and end the profile at the steps it is to have. Collective at its end, which other ranks wait for."""
        if self.profiler is None:
            return
        if begins:
            self._timer.ranges = self.profiler.begin_step(self.step + 1)
        elif self.profiler.end_step(self.step):
            self._timer.ranges = False
            with self._pause():
                if (profile := self.profiler.finish()) is not None:
                    self._write({"step": self.step, "profile": profile})
                self.world.barrier()

    def _next_batch(self) -> Batch:
        """The next batch, once every rank has one and none was asked to stop.

        Otherwise all ranks save, as the weights are between two steps here, and end.

        Raises:
            Stopped: a signal reached some rank.
            ClipstreamError: the first failed rank's, on all ranks.
        """
        before, batch = self.loader.state() if self.rescue is None else self.rescue.position, None
        error: ClipstreamError | None = None
        try:
            batch = None if self.signals.is_stopping() else next(self.loader)
        except Interrupted:
            pass
        except StopIteration:
            error = DataError(f"the training data ended after {self.step} of {self.total_steps} steps")
        except ClipstreamError as raised:
            error = raised
        flags = batch is None or self.signals.is_stopping(), error is not None
        if self.rescue is None:
            stop, failed = self.world.any(*flags)
        else:
            stop, failed = self.rescue.exchange(self.step + 1, before if batch is None else self.loader.state(), *flags)
        if stop or failed:
            self._settle()
        if not failed:
            if stop or batch is None:
                self._stop(before)
            return batch
        errors = self.world.gather_objects(None if error is None else (type(error), str(error)))
        rank, (kind, text) = next((rank, one) for rank, one in enumerate(errors) if one is not None)
        self._write_dropped(ahead=True)
        # Weights that may be broken must not replace good ones.
        if self.step and self._saved_step != self.step and not self.rollback.state.nonfinite:
            try:
                self._save(before)
                if self.writer.finish():
                    done = f"step {self.step} is saved: when the data are mended, --resume latest goes on from it"
                    text = lines(text, done)
            except ClipstreamError as failure:
                text = lines(text, f"step {self.step} could not be saved: {failure}")
        found: ClipstreamError = kind(text)
        found.rank = rank
        raise found from error

    def _stop(self, data: DataState | None = None) -> NoReturn:
        if not self.step:
            raise Stopped.before_training(self.signals.name())
        self._save(data)
        saved, by = self.writer.finish(), f"stopped by {self.signals.name()}"
        if not saved:
            raise Stopped(f"{by} after step {self.step}, which could not be saved; --resume latest continues")
        raise Stopped(f"{by}, step {self.step} is saved; the same command with --resume latest goes on")

    def _evaluate(self, last: bool) -> None:
        try:
            self.hooks.evaluate(self.step, last)
            self._evaluated_step = self.step
        except Stopped:  # interrupted, on all ranks
            self._evaluation_pending = True
            self._stop()

    def _log(self, result: StepResult, lr: float) -> None:
        """Write a training line: loss and gradient norm averaged over the interval, the rest of its last step."""
        wall, waited = self._clock.read(self.loader.wait_seconds)
        work = self.throughput.take() if self.throughput is not None else None
        mine = _Interval(wall, waited, self.loader.take_times(), work, *self._timer.take(), self._usage.read())
        ranks: list[_Interval] = self.world.gather_objects(mine)
        seconds = max(rank.seconds for rank in ranks)
        waited = max(rank.waited / rank.seconds for rank in ranks)
        stages = sum_times(rank.stages for rank in ranks)
        bottleneck = TRAINING if waited < NEGLIGIBLE else stages.longest() or TRAINING
        sums = self._interval
        finite = sums.steps - sums.skipped
        applied = finite - sums.overflows
        record: Record = {
            "step": self.step,
            "samples": self.samples,
            "loss": sums.loss / finite if finite else math.nan,
            "lr": lr,
            "grad_norm": sums.grad_norm / applied if applied else math.nan,
            "logit_scale": result.logit_scale,
            "samples_per_s": self._clock.samples / seconds,
            "data_wait": waited,
            "bottleneck": bottleneck,
            "skipped": sums.skipped,
        }
        record |= {f"loss_{name}": part / finite if finite else math.nan for name, part in sums.parts.items()}
        if self.throughput is not None and (works := [rank.work for rank in ranks if rank.work is not None]):
            record |= self.throughput.figures(works, seconds, self.train_step.towers.unchanging())
        if timed_ranks := [rank for rank in ranks if rank.steps]:
            by_rank = [{part: rank.parts.get(part, 0.0) / rank.steps for part in PARTS} for rank in timed_ranks]
            means = {part: sum(parts[part] for parts in by_rank) / len(by_rank) for part in PARTS}
            record["time"] = {part: mean for part, mean in means.items() if mean}
        record[self._usage.kind] = over_ranks(rank.usage for rank in ranks)
        if result.loss_scale is not None:
            record |= {"loss_scale": result.loss_scale, "overflow_rate": sums.overflows / sums.steps}
        if self.length.epoch_samples:
            record["epoch"] = self.samples / self.length.epoch_samples
        self._interval = IntervalState()  # first: another rank may die while it writes the line
        self._write(record)
        about = {"data_wait": waited, "seconds": seconds, "bottleneck": bottleneck}
        self._write({"step": self.step, **about, "stages": stages.summary()})
        self._write_dropped()
        if self.step % (self.length.log_every * HEALTH_LINES) == 0 or self.step == self.length.log_every:
            self._write_health()
        self._clock = _Clock(self.loader.wait_seconds)

    def _write_health(self) -> None:
        self._health_step = self.step
        lost = {name: list(one.lost.values()) for name, one in self.loader.health.sources.items()}
        cropped = {name: lost_areas(shares) for name, shares in lost.items() if shares}
        self._write({"step": self.step, "health": without_sets(self._health()), "cropped": cropped})

    def _health(self) -> dict[str, SourceCounts]:
        """Data counters of all ranks since the run began, before a resume included. Collective."""
        self._counts = self.world.gather_objects(self.loader.trained.counts())
        return merge_counts([*self._health_before, *self._counts])

    def _write_dropped(self, *, ahead: bool = False) -> None:
        """Write the samples that any rank dropped since the last call, also those of later batches if the run ends
        with them. Collective.
        """
        dropped = self.loader.trained.take_dropped() + (self.loader.health.take_dropped() if ahead else [])
        gathered = self.world.gather_objects(dropped)
        if dropped := [sample._asdict() for part in gathered for sample in part]:
            self._write({"step": self.step, "quarantine": dropped})

    def _write(self, record: Record) -> None:
        if self.world.is_main:
            self.hooks.write(record)

    def _save(self, data: DataState | None = None, *, must: bool = True) -> None:
        """Save, unless the weights are not finite: the next steps decide what happens then. `data` is the position if a
        batch was taken that is not trained on.

        Raises DivergedError: the weights are not finite and no step follows (`must`).
        """
        if self._saved_step == self.step:
            return
        if not self.train_step.has_finite_weights():
            if must:
                what = f"the weights after step {self.step} are NaN or infinite, and are not saved"
                raise DivergedError(f"{what}: {_ADVICE}")
            return
        self._write_dropped()  # a run resumed from here does not see these samples again
        self.writer.save(self._state(self.step, data or self.loader.state(), self._health()))
        self._saved_step = self.step
        self.rollback.on_save(self.step)

    def _state(self, step: int, data: DataState, health: dict[str, SourceCounts]) -> TrainState:
        state = TrainState(
            step=step,
            samples=self.samples,
            data=data,
            health=health,
            evaluation_pending=self._evaluation_pending,
            interval=self._interval,
            rollback=self.rollback.state,
            early_stop=self.early_stop.state,
            train_step=self.train_step.state(),
        )
        return deepcopy(state)

    def _last_whole(self) -> Held:
        """After a failure: the position after the last whole step. Not collective."""
        whole = self.step - len(self._started)
        for started in self._started:
            try:
                result = self._count(started)
            except RuntimeError:  # aborted on the device
                break
            whole = started.step
            if not result.overflow:
                self.rollback.state.nonfinite += result.skipped
                self.rollback.state.applied |= not result.skipped
        self._started.clear()
        if self._evaluated_step != whole and self.hooks.evaluation_due(whole):
            self._evaluation_pending = True
        counts: Any = self.loader.trained.counts()
        self._counts[self.world.rank] = counts
        state = self._state(whole, DataState(), merge_counts(self._health_before))
        return Held(state, self._counts, self._saved_step == whole)


class _Started(NamedTuple):
    """A step whose result is not known yet."""

    step: int  # steps done, this one included
    wait: Callable[[], StepResult]
    keys: Sequence[str]  # of this rank's samples
    lr: float


class _Interval(NamedTuple):
    """What a rank tells of the steps since the last training line."""

    seconds: float
    waited: float  # seconds in which its loader had no batch
    stages: StageTimes
    work: Work | None
    parts: dict[str, float]  # seconds by part of the step
    steps: int  # that `parts` counts
    usage: dict[str, float]


class _Clock:
    """Wall time and samples since the last training line, without evaluations and saves. Not saved with the run."""

    def __init__(self, wait_seconds: float = 0.0) -> None:
        self.samples = 0
        self._began, self._wait_began = time.perf_counter(), wait_seconds

    def read(self, wait_seconds: float) -> tuple[float, float]:
        """Seconds of training, and how many of them this rank waited for data."""
        return time.perf_counter() - self._began, wait_seconds - self._wait_began

    @contextmanager
    def pause(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began
