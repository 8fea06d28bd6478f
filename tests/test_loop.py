"""The course of a run: its lines, checkpoints, evaluations, signals, and going on from where it was."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from clipstream.batch import Batch
from clipstream.data.health import Loss as Lost
from clipstream.data.stages import StageTimes
from clipstream.errors import ClipstreamError, DataError, Stopped
from clipstream.training.loop import Trainer
from clipstream.training.optim import build_optimizer
from clipstream.training.passes import Loss
from clipstream.training.recovery import Recovery
from clipstream.training.settings import OptimSettings, TrainSettings
from clipstream.training.step import TrainStep
from clipstream.training.stopping import StopSignals
from clipstream.world import World
from tests.ranks import run_ranks
from tests.test_stages import lap
from tests.test_step import LOSSES, TinyTowers, make_batch


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Put the handler back that a failed run leaves for its launcher's SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Health:
    """Counts as clipstream.data.health has them."""

    def __init__(self) -> None:
        self.used, self.dropped = 0, {"no_caption": 1}
        self.losses = [Lost("train", "a/00.tar", "k1", "no_caption", "no txt")]

    def take_losses(self) -> list[Lost]:
        """One, the first time."""
        taken, self.losses = self.losses, []
        return taken

    def summary(self) -> dict[str, Any]:
        """By source."""
        return {"train": {"used": self.used, "dropped": self.dropped}}


class Batches:
    """A rank's stream of batches; every one takes 10 ms."""

    def __init__(self, world: World, start: int = 0, end: int = 1000, kill_at: int = -1) -> None:
        self.world, self.step, self.end, self.kill_at = world, start, end, kill_at
        self.wait_seconds, self.health = 0.0, Health()

    def __next__(self) -> Batch:
        if self.step == self.end:
            raise StopIteration
        if self.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        self.wait_seconds += 0.01
        batch = make_batch(self.step, self.world.rank, self.world.size)
        self.step += 1
        self.health.used += len(batch)
        return batch

    def state(self) -> dict[str, Any]:
        """Position."""
        return {"step": self.step}

    def take_times(self) -> StageTimes:
        """One stage, which takes all of the waiting."""
        times = StageTimes()
        times.add([lap("decode", 0.01)])
        return times


class Lines(list[dict[str, Any]]):
    """A sink that keeps the records."""

    def write(self, record: dict[str, Any]) -> None:
        """Keep it."""
        self.append(record)


class Run:
    """A trainer with its parts, which makes its checkpoints, and what came out of it."""

    has_room = True

    def __init__(
        self,
        world: World,
        total: int,
        state: dict[str, Any] | None = None,
        save_every: int = 0,
        loss: Loss = LOSSES["clip"],
        **batches: int,
    ) -> None:
        self.model = TinyTowers()
        optimizer = build_optimizer(self.model, OptimSettings(lr=0.01), batch_norm=False)
        self.lines, self.saves, self.evaluations = Lines(), [], []
        self.save_every, self.checks = save_every, 0
        if state:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(deepcopy(state["optimizer"]))  # which would train on the save's own tensors
        position = {k: v for k, v in state.items() if k not in ("model", "optimizer")} if state else None
        self.signals = StopSignals()
        self.optimizer = optimizer
        recovery = Recovery(TrainSettings(max_nonfinite=3), self.restore, position and position["recovery"])
        self.trainer = Trainer(
            TrainStep(self.model, loss, optimizer, world),
            Batches(world, start=state["data"]["step"] if state else 0, **batches),
            lr=lambda step: 0.01 / (step + 1),
            world=world,
            total_steps=total,
            log_every=3,
            sinks=[self.lines],
            evaluate=lambda step, last: self.evaluations.append((step, last)),
            saves=self,
            signals=self.signals,
            recovery=recovery,
            state=position,
            epoch_samples=20,
        )

    def due(self, step: int) -> bool:
        """At multiples."""
        return bool(self.save_every) and step % self.save_every == 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keep a copy of everything, as a checkpoint has it."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.saves.append({**json.loads(json.dumps(state)), **deepcopy(parts)})

    def check(self) -> None:
        """Count how often it is asked."""
        self.checks += 1

    def finish(self) -> bool:
        """Whether the disk has room."""
        return self.has_room

    def restore(self, good: Sequence[int]) -> int | None:
        """Put back the newest of these saves."""
        found = next((save for save in reversed(self.saves) if save["step"] in good), None)
        if found is None:
            return None
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(deepcopy(found["optimizer"]))
        return int(found["step"])

    def go(self) -> Run:
        """Train."""
        with self.signals:
            self.trainer.run()
        return self

    def training_lines(self) -> list[dict[str, Any]]:
        """Without what depends on the clock."""
        timed = ("samples_per_s", "data_wait", "bottleneck")
        return [{k: v for k, v in line.items() if k not in timed} for line in self.lines if "loss" in line]


def test_lines_saves_and_evaluations() -> None:
    run = Run(World(), 10, save_every=4).go()
    training = [line for line in run.lines if "loss" in line]
    assert [line["step"] for line in training] == [3, 6, 9, 10]
    assert [line["samples"] for line in training] == [30, 60, 90, 100]
    assert [line["epoch"] for line in training] == [1.5, 3.0, 4.5, 5.0]
    assert training[0]["lr"] == 0.01 / 3
    assert all(0 < line["data_wait"] <= 1 and line["samples_per_s"] > 0 for line in training)
    assert set(training[0]) >= {"loss", "grad_norm", "logit_scale"}
    health = [line for line in run.lines if "health" in line]
    assert [line["step"] for line in health] == [3, 10]
    assert health[-1]["health"] == {"train": {"used": 100, "dropped": {"no_caption": 1}}}
    assert [save["step"] for save in run.saves] == [4, 8, 10] and run.checks == 9
    assert run.evaluations == [(step, False) for step in range(1, 10)] + [(10, True)]


def test_a_line_has_the_mean_of_its_interval() -> None:
    every, model = [], TinyTowers()
    step = TrainStep(model, LOSSES["clip"], build_optimizer(model, OptimSettings(), batch_norm=False), World())
    for number in range(3):
        every.append(step(make_batch(number), 0.01 / (number + 1)).loss)
    assert Run(World(), 3).go().lines[0]["loss"] == pytest.approx(sum(every) / 3, abs=1e-12)


def test_a_resumed_run_writes_the_same_lines() -> None:
    whole = Run(World(), 10, save_every=4).go()
    resumed = Run(World(), 10, state=whole.saves[0]).go()
    assert resumed.training_lines() == [line for line in whole.training_lines() if line["step"] > 4]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    done = Run(World(), 10, state=whole.saves[-1]).go()
    assert done.training_lines() == [] and done.saves == [] and done.evaluations == [(10, True)]


def test_a_last_save_without_room_is_an_error() -> None:
    run = Run(World(), 3)
    run.has_room = False
    with pytest.raises(ClipstreamError, match="the last checkpoint, of step 3, could not be written"):
        run.go()
    run = Run(World(), 9, kill_at=4)
    run.has_room = False
    with pytest.raises(Stopped, match="step 5, which could not be saved"):
        run.go()


def test_no_steps() -> None:
    run = Run(World(), 0).go()
    assert run.evaluations == [(0, True)] and [save["step"] for save in run.saves] == [0]


def test_the_end_of_the_data_is_an_error() -> None:
    with pytest.raises(DataError, match="after 5 of 10 steps"):
        Run(World(), 10, end=5).go()


def stopped(world: World) -> tuple[str, list[int]]:
    """A run whose last rank gets a signal in step 4 of 10."""
    run = Run(world, 10, kill_at=3 if world.rank == world.size - 1 else -1)
    try:
        run.go()
    except Stopped as stop:
        return str(stop), [save["step"] for save in run.saves]
    return "", []


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_on_one_rank_stops_all_after_a_save(size: int) -> None:
    found = run_ranks(size, stopped)
    assert [saves for _, saves in found] == [[4]] * size
    assert "SIGUSR1" in found[-1][0] and all("step 4 is saved" in text for text, _ in found)


def test_what_could_not_be_used_is_listed_by_a_run_that_is_stopped_before_its_first_line() -> None:
    run = Run(World(), 10, kill_at=0)
    with pytest.raises(Stopped):
        run.go()
    assert [line["quarantine"][0]["key"] for line in run.lines] == ["k1"]


def summed(world: World) -> list[dict[str, Any]]:
    """The lines of a short run."""
    return Run(world, 3).go().lines


def test_two_ranks_write_one_file() -> None:
    lines = run_ranks(2, summed)
    assert lines[1] == []
    assert lines[0][0]["samples"] == 30
    assert lines[0][-2]["health"] == {"train": {"used": 30, "dropped": {"no_caption": 2}}}
    assert lines[0][-1] == {"step": 3, "end": {"total_steps": 3}}


def resumed_counts(world: World) -> Any:
    """The last counts of a run that goes on from step 4, at step 10."""
    saved = Run(world, 10, save_every=4).go().saves[0]
    again = Run(world, 10, state=saved).go()
    return [line["health"] for line in again.lines if "health" in line][-1:]


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_counts_from_where_it_was(size: int) -> None:
    counts = run_ranks(size, resumed_counts)[0]
    assert counts == [{"train": {"used": 100, "dropped": {"no_caption": 2 * size}}}]


def test_ctrl_c_twice_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
