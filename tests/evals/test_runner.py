"""A failing evaluator is reported and training continues, on all ranks alike; by setting it ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.distributed.world import AgreeingWorld, Failure, RankFailed, Torn, World
from clipstream.errors import DataError
from clipstream.evals.context import EvalContext
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.evals.settings import EvalSettings
from clipstream.report.records import json_line
from clipstream.report.terminal import evaluation_line
from tests.support.evaluating import context_of
from tests.support.pictures import make_shards
from tests.support.ranks import run_ranks


class Clumsy:
    """Fails on one rank, in the middle of the collectives of the others."""

    class Settings(EvalSettings):
        type: str = "tests.evals.test_runner:Clumsy"
        rank: int = 0
        after: int = 1

    def __init__(self, settings: Settings) -> None:
        self.rank, self.after = settings.rank, settings.after

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        world = context.world
        rows = torch.ones(2 + world.rank, 3)
        for turn in range(4):
            if turn == self.after and world.rank == self.rank:
                raise KeyError("no such thing")
            yield f"sum_{turn}", float(world.gather_rows(rows).sum())
            world.gather_objects(turn)
            world.all_reduce_sum(rows.sum())
            world.broadcast_object(turn)


class Careless:
    """Yields what is no plain number."""

    class Settings(EvalSettings):
        type: str = "tests.evals.test_runner:Careless"
        number: int = 0

    def __init__(self, settings: Settings) -> None:
        self.number = settings.number

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, Any]]:
        whole = [("a", torch.tensor(0.5)), ("b", np.float32(0.5)), ("c", np.int64(3)), ("d", 2)]
        yield from (whole, [("text", "0.5")], [("none", None)], [("rows", torch.ones(2))], [("error", 0.5)])[
            self.number
        ]


def test_what_is_no_number_is_a_failure_and_a_scalar_a_number() -> None:
    kind = Careless.Settings.model_fields["type"].default
    sections = {f"e{n}": EvalSettings.model_validate({"type": kind, "number": n}) for n in range(5)}
    told: list[str] = []
    runner = EvalRunner(sections, context_of(World()), Listeners(lambda record: told.append(json_line(record))))
    whole, *others = runner(5, last=True)
    assert list(map(json.loads, told)) == [whole, *others]
    assert [whole[name] for name in "abcd"] == [0.5, 0.5, 3, 2] and type(whole["c"]) is int
    said = ["'text' with '0.5', which is not a number", "'none' with None", "Error: ", "the reserved metric 'error'"]
    for record, words in zip(others, said, strict=True):
        assert words in record["error"], record


def run(world: World, folder: str, on_error: str = "report") -> tuple[list[dict[str, Any]], list[str]]:
    """Evaluators of which the last two fail on one rank; the records, and the failures."""
    data = {"shards": f"{folder}/*.tar"}
    sections = {
        "good": {"type": "retrieval", "data": data, "batch_size": 4},
        "clumsy": {"type": Clumsy.Settings.model_fields["type"].default, "rank": world.size - 1, "on_error": on_error},
        "first": {"type": Clumsy.Settings.model_fields["type"].default, "rank": 0, "after": 3},
        "again": {"type": "retrieval", "data": data, "batch_size": 4},
    }
    context = context_of(world)
    runner = EvalRunner({k: EvalSettings.model_validate(v) for k, v in sections.items()}, context)
    records = [
        {key: one[key] for key in ("step", "eval", "error", *one["metrics"]) if key in one and key != "seconds"}
        for one in runner(5, last=True)
    ]
    return records, [f"{failure.rank}: {failure.message}" for failure in runner.failures]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pairs")
    make_shards(folder, [9, 8])
    return folder


def test_all_ranks_go_on_where_one_fails(pairs: Path) -> None:
    results = run_ranks(3, run, str(pairs))
    records, failures = results[0]
    assert all(result == (records, failures) for result in results)
    good, clumsy, first, again = records
    assert good["n"] == again["n"] == 17 and good.items() - again.items() == {("eval", "good")}
    message = "KeyError: 'no such thing'"
    assert clumsy == {"step": 5, "eval": "clumsy", "error": message, "dropped": 0}
    assert first == {**clumsy, "eval": "first"}
    assert failures == [f"2: {message}", f"0: {message}"]


def test_a_failure_ends_the_run_by_setting(pairs: Path) -> None:
    with pytest.raises(KeyError, match="no such thing"):
        run(World(), str(pairs), on_error="raise")


def test_one_rank_agrees_with_itself() -> None:
    world = AgreeingWorld.of(World())
    assert world.gather_objects(3) == [3]
    world.exchange()
    with pytest.raises(RankFailed, match="out"):
        world.exchange(Failure.of(DataError("out"), 0))
    assert Failure.of(DataError("out"), 0).kind is DataError and Failure.of(OSError("x"), 0).message == "OSError: x"


def test_a_collective_that_breaks_is_no_failure_of_an_evaluator(pairs: Path) -> None:
    with pytest.raises(Torn) as caught:
        AgreeingWorld(size=2).gather_objects(1)  # without a process group
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failed_evaluation_in_words() -> None:
    record = {"step": 5, "eval": "val", "error": "no data:\n none", "dropped": 0, "seconds": 0.1}
    assert evaluation_line(record) == "val at step 5: failed: no data:"
