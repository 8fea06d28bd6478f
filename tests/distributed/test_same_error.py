"""Wrong settings are printed once for all ranks, and by a rank that alone has them; all exit with the same code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from clipstream.cli.main import run_main
from clipstream.distributed import same_error
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World, slurm_world, step_store
from clipstream.errors import SettingsError
from tests.support.ranks import ROOT, TIMEOUT, end_ranks
from tests.support.slurm import slurm_environment

WRONG = "error: --run.sed: there is no such key; did you mean 'seed'?"


def end_with(world: World, texts: list[str], wait: float = 30.0) -> int:
    """A verb whose settings are wrong in a way of each rank's own, or right where the text is empty."""
    same_error.WAIT = wait
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}

    def verb(argv: list[str]) -> int:
        if texts[world.rank]:
            raise SettingsError(texts[world.rank])
        return 0

    time.sleep(0.3 * (world.rank == 0))  # the others have to wait for rank 0
    return run_main(verb, [])


def test_an_error_of_all_ranks_is_printed_by_rank_0_alone() -> None:
    ends = end_ranks(3, end_with, ["no such file\nx.yaml"] * 3)
    assert [end.code for end in ends] == [2, 2, 2]
    assert [end.stderr for end in ends] == ["[rank 0] error: no such file\nx.yaml\n", "", ""]


def test_another_error_than_rank_0s_is_printed_too() -> None:
    ends = end_ranks(3, end_with, ["a", "b", "a"])
    assert [end.code for end in ends] == [2, 2, 2]
    assert [end.stderr for end in ends] == ["[rank 0] error: a\n", "[rank 1] error: b\n", ""]


def test_an_error_of_one_rank_is_printed_by_it() -> None:
    ends = end_ranks(2, end_with, ["", "no such file here"], 0.5)
    assert [end.code for end in ends] == [0, 2]
    assert [end.stderr for end in ends] == ["", "[rank 1] error: no such file here\n"]


def meet_or_fail(world: World) -> int:
    """A Slurm step whose rank 1 has wrong settings, while rank 0 waits for it in the rendezvous."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    # The reserved port alone: rank 0 may listen there although a socket is bound to it.
    os.environ |= {
        "SLURM_PROCID": str(world.rank), "SLURM_LOCALID": str(world.rank), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "47",
    }  # fmt: skip
    of_slurm = slurm_world(os.environ)
    assert of_slurm is not None
    step = World(**{**vars(of_slurm), "address": f"127.0.0.1:{os.environ.pop('MASTER_PORT')}", "step": "47.0.0"})
    if world.rank == 0:
        step_store(step.address, step.step, 0, timedelta(seconds=60))
        time.sleep(5)
        return 0
    began = time.monotonic()
    same_error.WAIT = 600.0
    same_error.tell_once(step, "no such file", lambda: print("told", file=sys.stderr))
    assert time.monotonic() - began < 300
    return 2


def test_under_slurm_a_rank_learns_from_the_rendezvous_that_rank_0_has_no_error() -> None:
    ends = end_ranks(2, meet_or_fail)
    assert ends[1].code == 2 and ends[1].stderr == "told\n"


def fail_connected(world: World, failing: list[int]) -> int:
    """Ranks that find wrong settings once they are connected."""
    world.start()
    watch = FailureWatch(world)
    watch.start()
    try:
        world.barrier()
        if world.rank in failing:
            raise SettingsError("this model has batch norm")
        world.barrier()
    except BaseException as error:
        return watch.report(error)
    return 0


@pytest.mark.parametrize("failing", [[0, 1, 2], [1]])
def test_connected_ranks_leave_wrong_settings_to_rank_0(failing: list[int]) -> None:
    ends = end_ranks(3, fail_connected, failing)
    assert [end.code for end in ends] == [2, 2, 2]
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0] in ends[0].stderr
    assert lines[0].endswith(": this model has batch norm")
    assert len(failing) > 1 or lines[0] == "error: rank 1: this model has batch norm"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_under_launchers(launcher: str, tmp_path: Path) -> None:
    env = slurm_environment(tmp_path, tasks=2)
    command = ["srun", "python"]
    if launcher == "torchrun":
        env = {key: text for key, text in env.items() if "SLURM" not in key}
        command = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [f"{tmp_path}/bin/{command[0]}", *command[1:], "-m", "clipstream.train", "--run.sed", "3"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if WRONG in line] == [f"[rank 0] {WRONG}"]
    if launcher == "srun":
        assert done.returncode == 2
    else:
        assert "exitcode  : 2" in done.stderr and "exitcode  : -15" not in done.stderr
