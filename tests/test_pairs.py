"""Pairs of settings: a run with any two values equals its plain run and goes on where it ended, or is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import pairs
from tests.support.runs import lines  # starts processes

SEED = 0
QUICK = (0, 4)  # runs of this seed, without compilation, that `make test` takes

assert lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, models and stores."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs.furnish(folder)
    return folder


def take(place: Path, runs: dict[int, pairs.Row], table: str | None) -> str:
    """Take runs, write the table of them, and return what failed."""
    told = []
    for number, row in runs.items():
        try:
            said = pairs.check(place, row, str(number))
        except AssertionError as error:
            said = f"FAILED: {error}"
        told.append(f"{number:3d}  {pairs.shown(row)}\n     -> {said}")
        print(told[-1], flush=True)
    if table is not None:
        with open(table, "a", encoding="utf-8") as file:
            file.write("\n".join(told) + "\n")
    return "\n".join(line for line in told if "-> FAILED" in line)


@pytest.mark.parametrize("compiled", [False, True])
def test_each_pair_of_values_occurs(compiled: bool) -> None:
    assert len(pairs.FACTORS) >= 22
    for seed in range(3):
        assert not pairs.missing(pairs.rows(seed, compiled=compiled), compiled=compiled)


def test_some_runs_equal_their_plain_runs(place: Path, request: pytest.FixtureRequest) -> None:
    runs = pairs.rows(SEED, compiled=False)
    failed = take(place, {number: runs[number] for number in QUICK}, request.config.getoption("--pairs-table"))
    assert not failed, failed


@pytest.mark.parametrize("precision", ["pure_bf16", "fp64"])
def test_nadam_resumes_with_the_bits_of_the_undisturbed_run(precision: str, place: Path) -> None:
    row = pairs.simplest() | {"optimizer": "nadamw", "precision": precision, "resume": "checkpoint"}
    assert pairs.check(place, row, f"nadam-{precision}").endswith("resumed bit-equal")


@pytest.mark.slow
def test_each_run_of_another_seed_equals_its_plain_run(place: Path, request: pytest.FixtureRequest) -> None:
    given = request.config.getoption("--pairs-seed")
    seed = random.randrange(1 << 30) if given is None else int(given)
    print(f"--pairs-seed {seed}")
    failed = take(place, dict(enumerate(pairs.rows(seed))), request.config.getoption("--pairs-table"))
    assert not failed, f"--pairs-seed {seed}\n{failed}"
