"""Wrong settings are printed by one rank of a node, and by a rank that alone has them; exit codes are equal."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.command_line import run_main
from clipstream.distributed import failure
from clipstream.distributed.failure import FailureWatch, tell_once
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.text import Lines
from tests.support.forks import ROOT, TIMEOUT
from tests.support.ranks import end_ranks, watched
from tests.support.slurm import slurm_environment

WRONG = "error: --run.sed: unknown key; did you mean 'seed'?"


def end_with(world: World, texts: list[str], wait: float) -> int:
    """A verb whose settings are wrong in a way of each rank's own, or right where the text is empty."""
    failure.WAIT = wait
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_WORLD_SIZE": str(world.size)}

    def verb(argv: list[str]) -> int:
        if texts[world.rank]:
            raise SettingsError(texts[world.rank])
        return 0

    time.sleep(0.3 * (world.rank == 0))  # the others wait for rank 0
    return run_main(verb, [])


@pytest.mark.parametrize(
    ("texts", "wait"),
    [([Lines("no such file\nx.yaml")] * 3, 4 * TIMEOUT), (["a", "b", "a"], 6.0), (["", "", "no such file here"], 0.5)],
)
def test_each_error_is_printed_by_one_of_the_ranks_that_have_it(texts: list[str], wait: float) -> None:
    ends = end_ranks(3, end_with, texts, wait)
    assert [end.code for end in ends] == [2 if text else 0 for text in texts]
    said = [(rank, end.stderr) for rank, end in enumerate(ends) if end.stderr]
    assert all(printed == f"[rank {rank}] error: {texts[rank]}\n" for rank, printed in said)
    assert sorted(texts[rank] for rank, _ in said) == sorted({text for text in texts if text})


def test_without_an_address_no_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with WORLD_SIZE and RANK left in a shell."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(failure, "WAIT", 4 * TIMEOUT)
    told: list[int] = []
    for rank in (0, 1):
        tell_once(World(rank=rank, size=2), "x", lambda rank=rank: told.append(rank))  # type: ignore[misc]
    assert told == [0, 1]


def fail_connected(world: World, failing: list[int]) -> int:
    """Ranks that find wrong settings once they are connected."""

    def body(watch: FailureWatch) -> None:
        if world.rank in failing:
            raise SettingsError("this model has batch norm")
        world.barrier()

    return watched(world, body)


@pytest.mark.parametrize("failing", [[0, 1, 2], [1]])
def test_connected_ranks_leave_wrong_settings_to_rank_0(failing: list[int]) -> None:
    ends = end_ranks(3, fail_connected, failing)
    assert [end.code for end in ends] == [2, 2, 2]
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0] in ends[0].stderr
    assert lines[0].endswith(": this model has batch norm")
    assert len(failing) > 1 or lines[0] == "error: rank 1: this model has batch norm"


class FrozenStore:
    """A store whose host does not answer, as after a SIGSTOP."""

    spare, server = False, None

    def __getattr__(self, name: str) -> Any:
        return lambda *given: time.sleep(TIMEOUT)


def fail_without_answer(world: World) -> int:
    """Wrong settings on rank 1, which does not reach rank 0."""
    failure.PATIENCE, failure.GRACE = 0.3, 0.0
    watch = FailureWatch(World(rank=1, size=2))
    watch._keys = FrozenStore()
    return watch.report(SettingsError("this model has batch norm"))


def test_wrong_settings_are_printed_where_rank_0_does_not_answer() -> None:
    (end,) = end_ranks(1, fail_without_answer)
    assert end.code == 2 and end.stderr == "error: rank 1: this model has batch norm\n"


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.ci)])
def test_under_launchers(launcher: str, tmp_path: Path) -> None:
    env = slurm_environment(tmp_path)
    command = ["srun", "python"]
    if launcher == "torchrun":
        env = {key: text for key, text in env.items() if "SLURM" not in key}
        command = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [f"{tmp_path}/bin/{command[0]}", *command[1:], "-m", "clipstream.train", "--run.sed", "3"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    (line,) = (line for line in done.stderr.splitlines() if WRONG in line)
    assert re.fullmatch(rf"\[rank [01]] {re.escape(WRONG)}", line)
    if launcher == "srun":
        assert done.returncode == 2
    else:
        assert "exitcode  : 2" in done.stderr and "exitcode  : -15" not in done.stderr
