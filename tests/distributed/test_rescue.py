"""A rank that dies in the middle of a step costs no step: those that are left save the last whole one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.checkpoint.async_writer import Snapshot
from clipstream.checkpoint.state import OPTIMIZER, RANDOM, metadata
from clipstream.distributed.world import World
from clipstream.evals.runner import EvalRunner
from clipstream.training import step
from clipstream.training.gradcache import GradCache
from clipstream.training.rescue import Rescue
from tests.support.ranks import at_call, die, end_ranks, set_timeout
from tests.support.runs import flags, lines, same_weights, train_on, weights

STEPS = 6
# Where a rank dies: before the exchange of positions, in a forward pass, before and after the last exchange of a step,
# in an evaluation and in a save.
POINTS: dict[str, tuple[Any, str]] = {
    "batch": (Rescue, "exchange"),
    "forward": (GradCache, "__call__"),
    "gradients": (step, "gradient_norm"),
    "update": (step, "clip_gradients"),
    "evaluation": (EvalRunner, "__call__"),
    "save": (Snapshot, "take"),
}
# The call in which it happens; the steps done by then. An evaluator is called after each step, and runs after steps 3
# and 6; a save is made after each second one.
CALLS = {
    "batch": (6, 4),
    "forward": (5, 4),
    "gradients": (5, 4),
    "update": (5, 5),
    "evaluation": (3, 3),
    "save": (2, 3),
}


def train_and_die(world: World, argv: list[str], dying: int, point: str, call: int) -> int:
    if world.rank == dying:
        die(*POINTS[point], call)
    return train_on(world, argv)


def train_and_tear(world: World, argv: list[str]) -> int:
    """Rank 1 dies when it has all of step 5; on rank 3, which has the same shard, the last exchange fails."""
    if world.rank == 1:
        die(*POINTS["update"], 5)
    if world.rank == 3:
        norm, exchange, steps = step.gradient_norm, World.all_reduce_sum, 0

        def last(self: World, tensor: torch.Tensor) -> torch.Tensor:
            World.all_reduce_sum = exchange  # type: ignore[method-assign]
            exchange(self, tensor.clone())
            raise RuntimeError("Connection closed by peer")

        def counting(*args: Any) -> torch.Tensor:
            nonlocal steps
            steps, found = steps + 1, norm(*args)
            if steps == 5:  # what follows is the last exchange of the step
                World.all_reduce_sum = last  # type: ignore[method-assign]
            return found

        step.gradient_norm = counting
    return train_on(world, argv)


def train_and_break(world: World, argv: list[str]) -> int:
    """Rank 1 loses its connections in the forward pass of step 5."""
    if world.rank == 1:
        at_call(GradCache, "__call__", 5, world.abort)
    return train_on(world, argv)


def train_and_stick(world: World, argv: list[str]) -> int:
    """Rank 1 does not come to the exchange in the forward pass of step 5, for which rank 0 waits 2 s."""

    def stick() -> None:
        while world.rank == 1:
            time.sleep(0.1)
        set_timeout(2)

    at_call(GradCache, "__call__", 5, stick)
    return train_on(world, argv)


def run(place: Path, name: str, *more: str, steps: int = STEPS) -> list[str]:
    """A run with averages and dropout, whose random numbers differ between the ranks."""
    model = ["--force-patch-dropout", "0.25"] if "ddp" in name else []
    evals = ["--evals.val.type", "loss", "--evals.val.data.shards", f"{place}/val/*.tar", "--evals.val.every", "3"]
    own = ["--train.ema", "0.9", "--run.deterministic", "true", *model, *evals]
    return flags(place, name, *own, *more, steps=steps)


def goes_on(place: Path, argv: list[str], one: str, other: str, ranks: int = 2, steps: int = STEPS) -> None:
    """The run `one` is done after its command is started again, and its last checkpoint is that of `other`."""
    ends = end_ranks(ranks, train_on, [*argv, "--resume", "latest"])
    assert [end.code for end in ends] == [0] * ranks, ends[0].stderr
    for file in ("open_clip_model", "optimizer", "averaged"):
        assert same_weights(*(weights(place, name, steps, file) for name in (one, other))), file
    folders = [place / "runs" / name / "checkpoints" / f"step_{steps:08d}" for name in (one, other)]
    assert metadata(folders[0] / OPTIMIZER) == metadata(folders[1] / OPTIMIZER)
    for name in (one, other):
        assert lines(place, name, "end")[-1]["end"]["status"] == "done"
    states = [torch.load(folder / RANDOM) for folder in folders]
    for mine, theirs in zip(*states, strict=True):
        assert torch.equal(mine["cpu"], theirs["cpu"])
    assert lines(place, one, "eval") == lines(place, other, "eval")


WAYS = {
    "ddp": (2, []),
    "hsdp": (4, ["--train.parallel", "fsdp", "--train.fsdp-replicas", "2"]),
}


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    for way, (ranks, more) in WAYS.items():
        ends = end_ranks(ranks, train_on, run(place, f"{way}-whole", *more))
        assert [end.code for end in ends] == [0] * ranks, ends[0].stderr
    return place


SOME = {("ddp", 0, "update"), ("ddp", 1, "save")}  # the others take their time


@pytest.mark.parametrize(
    ("way", "dying", "point"),
    [
        pytest.param(way, dying, point, marks=() if (way, dying, point) in SOME else pytest.mark.ci)
        for way, dying in (("ddp", 0), ("ddp", 1), ("hsdp", 1))
        for point in POINTS
    ],
)
def test_a_killed_rank_costs_no_step(undisturbed: Path, way: str, dying: int, point: str) -> None:
    (ranks, more), (call, done), name = WAYS[way], CALLS[point], f"{way}-{dying}-{point}"
    argv = run(undisturbed, name, *more)
    ends = end_ranks(ranks, train_and_die, argv, dying, point, call)
    assert [end.code for end in ends] == [-9 if rank == dying else 75 for rank in range(ranks)], ends
    first = min({0, 1} - {dying})
    said = re.search(r"rank (\d+) saved step (\d+); the same command with --resume latest goes on", ends[first].stderr)
    assert said is not None and int(said[1]) != dying and int(said[2]) == done, ends[first].stderr
    assert f"rank {dying}" in ends[first].stderr
    goes_on(undisturbed, argv, name, f"{way}-whole", ranks)


def test_a_shard_that_is_a_step_behind_is_brought_to_it(undisturbed: Path) -> None:
    ranks, more = WAYS["hsdp"]
    argv = run(undisturbed, "hsdp-torn", *more)
    ends = end_ranks(ranks, train_and_tear, argv)
    assert [end.code for end in ends] == [75, -9, 75, 75], ends
    assert "saved step 5; the same command" in ends[0].stderr, ends[0].stderr
    goes_on(undisturbed, argv, "hsdp-torn", "hsdp-whole", ranks)


def test_a_shard_that_only_the_lost_rank_had_is_named(place: Path) -> None:
    argv = run(place, "fsdp", "--train.parallel", "fsdp")
    ends = end_ranks(2, train_and_die, argv, 1, "forward", 5)
    assert [end.code for end in ends] == [1, -9], ends
    told = "no rank has shard 1 of the weights: --train.fsdp-replicas 2 keeps two copies"
    assert told in ends[0].stderr, ends[0].stderr
    newest = (place / "runs" / "fsdp" / "checkpoints" / "latest").read_text()
    assert newest == "step_00000004\n"


@pytest.mark.ci
def test_broken_connections_of_ranks_that_live_cost_no_step(undisturbed: Path) -> None:
    argv = run(undisturbed, "ddp-broken")
    ends = end_ranks(2, train_and_break, argv)
    assert [end.code for end in ends] == [75, 75], "\n".join(end.stderr for end in ends)
    assert "the connection to another rank broke" in ends[0].stderr and "rank 0 saved step 4;" in ends[0].stderr
    goes_on(undisturbed, argv, "ddp-broken", "ddp-whole")


@pytest.mark.ci
def test_a_rank_that_is_stuck_costs_no_step(undisturbed: Path) -> None:
    argv = run(undisturbed, "ddp-stuck")
    ends = end_ranks(2, train_and_stick, [*argv, "--train.rescue-seconds", "20"])
    assert [end.code for end in ends] == [75, 1], ends
    assert "waited longer than --run.timeout for another rank" in ends[0].stderr
    assert "rank 0 saved step 4; the same command" in ends[0].stderr, ends[0].stderr
    assert "rank 1 is at:" in ends[1].stderr and "in stick\n" in ends[1].stderr
    goes_on(undisturbed, argv, "ddp-stuck", "ddp-whole")


@pytest.mark.ci
def test_random_states_after_a_return_to_older_weights_are_those_of_the_run(place: Path) -> None:
    """After step 6 the run returns to step 2; its rank dies in step 7."""
    more = ["--loss.type", "tests.training.test_rollback:Broken", "--loss.steps", "[4, 5, 6]", "--train.max-nonfinite"]
    for name in ("ddp-returned", "ddp-returned-killed"):
        argv = run(place, name, *more, "3", "--checkpoint.keep-last", "9", steps=8)
        ends = end_ranks(2, train_and_die, argv, 1, "forward", 7 if "killed" in name else 0)
        assert lines(place, name, "rollback") == [{"step": 6, "rollback": {"to": 2, "skipped": 3}}]
    assert [end.code for end in ends] == [75, -9] and "saved step 6;" in ends[0].stderr, ends
    goes_on(place, argv, "ddp-returned-killed", "ddp-returned", steps=8)
