"""The training loop: metrics, checkpoints, evaluations, signals, and resuming."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, DataError, Stopped
from clipstream.training.optim import AdamW
from clipstream.training.step import StepResult
from tests.support.ranks import run_ranks
from tests.support.steps import LOSSES, TinyTowers, make_batch, make_step
from tests.support.trainer_runs import Run


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Put the handler back that a failed run leaves for its launcher's SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


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
    assert [save.state.step for save in run.saves] == [4, 8, 10] and run.checks == 9
    assert run.evaluations == [(step, False) for step in range(1, 10)] + [(10, True)]


def test_a_line_has_the_mean_of_its_interval() -> None:
    model = TinyTowers()
    step = make_step(model, optimizer=AdamW.Settings().build(model, "ViT"))
    every = [step(make_batch(number), 0.01 / (number + 1)).loss for number in range(3)]
    assert Run(World(), 3).go().lines[0]["loss"] == pytest.approx(sum(every) / 3, abs=1e-12)


def test_a_resumed_run_writes_the_same_lines() -> None:
    whole = Run(World(), 10, save_every=4).go()
    resumed = Run(World(), 10, save=whole.saves[0]).go()
    assert resumed.training_lines() == [line for line in whole.training_lines() if line["step"] > 4]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    done = Run(World(), 10, save=whole.saves[-1]).go()
    assert done.training_lines() == [] and done.saves == [] and done.evaluations == [(10, True)]


def test_a_last_save_without_room_is_an_error() -> None:
    run = Run(World(), 3)
    run.has_room = False
    with pytest.raises(ClipstreamError, match="the last checkpoint, of step 3, could not be written"):
        run.go()
    run = Run(World(), 9, kill_at=4)
    run.has_room = False
    with pytest.raises(Stopped, match="step 4, which could not be saved"):
        run.go()


def test_ends_of_a_run() -> None:
    run = Run(World(), 0).go()
    assert run.evaluations == [(0, True)] and [save.state.step for save in run.saves] == [0]
    with pytest.raises(DataError, match="after 5 of 10 steps"):
        Run(World(), 10, end=5).go()
    run = Run(World(), 10, kill_at=1)
    with pytest.raises(Stopped):
        run.go()
    assert [line["quarantine"][0]["key"] for line in run.lines] == ["k1"]  # what was lost before the first line


def watch(run: Run, started: Callable[[Batch, Callable[[], StepResult]], Any]) -> Run:
    """Call a function after the start of each step, which returns how its result is read."""
    start = run.trainer.train_step.start
    run.trainer.train_step.start = lambda batch, lr: started(batch, start(batch, lr))
    return run


def stopped(world: World, within: bool) -> tuple[str, int, list[int]]:
    """A run whose last rank gets a signal while the batch of step 4 is made, or within the step."""
    last = world.rank == world.size - 1
    run = Run(world, 10, kill_at=3 if last and not within else -1)

    def started(batch: Batch, wait: Any) -> Any:
        if batch.step == 3 and last and within:
            os.kill(os.getpid(), signal.SIGUSR1)
        return wait

    with pytest.raises(Stopped) as caught:
        watch(run, started).go()
    return str(caught.value), run.saves[-1].state.data.step, [save.state.step for save in run.saves]


@pytest.mark.parametrize(("within", "step"), [(False, 3), (True, 4)])
def test_a_signal_on_one_rank_stops_all_after_a_save(within: bool, step: int) -> None:
    found = run_ranks(2, stopped, within)
    assert [(position, saves) for _, position, saves in found] == [(step, [step])] * 2
    assert "SIGUSR1" in found[-1][0] and all(f"step {step} is saved" in text for text, *_ in found)


def test_evaluations_that_were_broken_off_come_first_after_the_resume() -> None:
    def broken_off(step: int, last: bool) -> None:
        if step == 4:
            raise Stopped("broken off")

    run = Run(World(), 10)
    run.trainer.hooks = replace(run.trainer.hooks, evaluate=broken_off)
    with pytest.raises(Stopped, match="step 4 is saved"):
        run.go()
    again = Run(World(), 10, save=run.saves[-1])
    again.trainer.hooks = replace(again.trainer.hooks, evaluate=broken_off)
    with pytest.raises(Stopped, match="step 4 is saved"):
        again.go()
    assert again.saves == []  # what is saved still owes it
    resumed = Run(World(), 10, save=run.saves[-1], save_every=5).go()
    assert resumed.evaluations == [(step, False) for step in range(4, 10)] + [(10, True)]
    assert not resumed.saves[0].state.evaluation_pending


def counted(world: World) -> Any:
    """The lines of a short run, and the last counts of one that goes on from step 4, at step 10."""
    saved = Run(world, 10, save_every=4).go().saves[0]
    again = Run(world, 10, save=saved).go()
    return Run(world, 3).go().lines, [line["health"] for line in again.lines if "health" in line][-1:]


def test_two_ranks_write_one_file_and_a_resumed_run_counts_on() -> None:
    (lines, counts), (others, _) = run_ranks(2, counted)
    assert others == [] and lines[0]["samples"] == 30
    assert lines[-2]["health"] == {"train": {"used": 30, "dropped": {"no_caption": 2}}}
    assert lines[-1]["end"] == {"status": "done", "code": 0, "error": None, "total_steps": 3}
    assert counts == [{"train": {"used": 100, "dropped": {"no_caption": 4}}}]


def test_ctrl_c_twice_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_result_is_read_while_the_next_step_runs_unless_something_follows_from_it() -> None:
    order: list[str] = []

    def started(batch: Batch, wait: Callable[[], StepResult]) -> Any:
        order.append(str(batch.step))
        return lambda: order.append(f"-{batch.step}") or wait()

    watch(Run(World(), 7, save_every=5), started).go()
    # Lines after 3 and 6, a checkpoint after 5, the end after 7.
    assert " ".join(order) == "0 1 -0 2 -1 -2 3 4 -3 -4 5 -5 6 -6"


class Broken:
    """The softmax loss, but not a number in some steps, from 1."""

    max_logit_scale = None

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        share = LOSSES["clip"](features, batch, world)
        return share * torch.nan if batch.step + 1 in self.steps else share


@pytest.mark.parametrize("end", [1000, 13])  # the data end after a step whose result is not read yet
def test_results_that_are_read_late_change_nothing(end: int) -> None:
    courses = []
    for due in (False, True):  # an evaluation needs the result at once
        run = Run(World(), 14, save_every=4, loss=Broken(2, 5, 6, 9, 10, 11), end=end)
        run.trainer.hooks = replace(run.trainer.hooks, evaluation_due=lambda step, due=due: due)
        with nullcontext() if end > 14 else pytest.raises(DataError):
            run.go()
        order = [line["step"] if "loss" in line or "stages" in line else {**line, "time": None} for line in run.lines]
        states = [asdict(save.state) for save in run.saves]
        courses.append(json.dumps([run.training_lines(), order, states, run.trainer.samples]))
        courses.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert courses[0] == courses[2] and torch.equal(courses[1], courses[3])
    assert '"rollback": {"to": 4' in courses[0]
