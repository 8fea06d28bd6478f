"""Pairs of settings: a run with any two values equals its plain run and goes on where it ended, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from tests.support import pairs
from tests.support.runs import lines  # starts processes

ROWS = pairs.rows(5)
FIRST = 16  # rows, which hold three quarters of all pairs: run before each merge; the others by `make test-all` alone
CHEAP = 3  # the most that the dear values of a row of `make test` cost, by pairs.COSTS

assert lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, models and stores, which the processes of one session of tests share, as they do the plain runs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "of-pairs"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            pairs.furnish(folder)
    return folder


def take(place: Path, row: pairs.Row, name: str) -> str:
    """Take a run, and return what failed."""
    try:
        said = pairs.check(place, row, name)
    except AssertionError as error:
        said = f"FAILED: {error}"
    told = f"{name}  {pairs.shown(row)}\n     -> {said}"
    print(told, flush=True)
    return told if said.startswith("FAILED") else ""


def marks(number: int, row: pairs.Row) -> list[pytest.MarkDecorator]:
    """What is compiled, resumed after a signal and has several ranks takes minutes: twice four or six compilations."""
    if number >= FIRST:
        return [pytest.mark.slow]
    return [] if sum(pairs.COSTS.get(value, 0) for value in row.values()) <= CHEAP else [pytest.mark.ci]


def test_each_pair_of_values_occurs() -> None:
    assert len(pairs.FACTORS) >= 22 and not pairs.missing(ROWS)


@pytest.mark.parametrize("row", [pytest.param(row, id=str(n), marks=marks(n, row)) for n, row in enumerate(ROWS)])
def test_a_run_equals_its_plain_run(row: pairs.Row, place: Path, request: pytest.FixtureRequest) -> None:
    failed = take(place, row, request.node.callspec.id)
    assert not failed, failed


@pytest.mark.parametrize("number", range(len(pairs.REFUSALS)))
def test_what_does_not_go_together_is_refused_in_one_sentence(number: int, place: Path) -> None:
    rule, words = pairs.REFUSALS[number]
    base = pairs.simplest() | (pairs.LOCKED if "cache" in rule else {})  # only locked towers have a cache
    row = base | {factor: values.split("|")[0] for factor, values in rule.items()}
    run = pairs.go(place, row, f"refused-{number}")
    assert run.code == 2 and words in run.error(), run.said
    assert "Traceback" not in run.said
    assert not run.lines


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "nadamw", "precision": "pure_bf16", "resume": "checkpoint"},
        {"adapters": "all", "mode": "groups", "duplicates": "groups", "source": "several", "resume": "kill"},
    ],
    ids=["nadam", "adapters with groups and negatives"],
)
def test_a_run_resumes_with_the_bits_of_the_undisturbed_run(values: dict[str, str], place: Path) -> None:
    name = "again-" + values["resume"]
    assert pairs.check(place, pairs.simplest() | values, name).endswith("resumed bit-equal")


@pytest.mark.slow
def test_each_run_of_another_seed_equals_its_plain_run(
    place: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(request.config.getoption("--pairs-seed"))
    monkeypatch.setattr(pairs, "BACKEND", "aot_eager")
    taken = [take(place, row, f"{seed}-{number}") for number, row in enumerate(pairs.rows(seed))]
    failed = "\n".join(filter(None, taken))
    assert not failed, f"--pairs-seed {seed}\n{failed}"
