"""Wrong settings are printed once for all ranks, and by a rank that alone has them; all exit with the same code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.entry import run_main
from clipstream.distributed import failure, same_error
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World, answers, slurm_world, step_store
from clipstream.errors import SettingsError
from tests.support.forks import ROOT, TIMEOUT, wait_until
from tests.support.ranks import end_ranks, reserved_port
from tests.support.slurm import slurm_environment

# Longer than end_ranks waits for an end.
FOREVER = 4 * TIMEOUT
WRONG = "error: --run.sed: there is no such key; did you mean 'seed'?"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks in this process wait for each other however slow they are."""
    monkeypatch.setattr(same_error, "WAIT", FOREVER)


def end_with(world: World, texts: list[str], wait: float = FOREVER) -> int:
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


def test_without_an_address_no_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with WORLD_SIZE and RANK left in a shell."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(same_error, "listen", lambda ports: pytest.fail("rank 0 waits for ranks that cannot ask"))
    told: list[int] = []
    for rank in (0, 1):
        same_error.tell_once(World(rank=rank, size=2), "x", lambda rank=rank: told.append(rank))  # type: ignore[misc]
    assert told == [0, 1]


def test_a_program_that_says_nothing_is_not_taken_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def strangers(host: str, ports: Sequence[int], timeout: float) -> Iterator[tuple[socket.socket, str]]:
        with socket.socket() as closed:
            yield closed, ""
        yield from answers(host, ports, timeout)

    monkeypatch.setattr(same_error, "answers", strangers)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    told: list[int] = []
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        given = [(World(rank=rank, size=2), "x", lambda rank=rank: told.append(rank)) for rank in (0, 1)]
        thread = threading.Thread(target=same_error.tell_once, args=given[0])
        thread.start()
        same_error.tell_once(*given[1])
        thread.join()
    assert told == [0]


def test_another_error_is_printed_before_rank_0_may_end() -> None:
    """A launcher ends the other ranks once rank 0, which waits for their answers, has ended."""
    told: list[str] = []
    told_at_answer: list[list[str]] = []

    def tell() -> None:
        time.sleep(0.2)
        told.append("mine")

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def rank_0() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"47.0.0/error other")
                assert connection.recv(1)
                told_at_answer.append(list(told))

        thread = threading.Thread(target=rank_0)
        thread.start()
        world = World(rank=1, size=2, address=f"127.0.0.1:{listener.getsockname()[1]}", step="47.0.0")
        same_error.tell_once(world, "mine", tell)
        thread.join()
    assert told == ["mine"] and told_at_answer == [["mine"]]


def test_under_slurm_a_rank_without_an_error_does_not_wait_for_rank_0_that_ended() -> None:
    told: list[str] = []
    with reserved_port() as port:
        first, second = (World(rank=rank, size=2, address=f"127.0.0.1:{port}", step="47.0.0") for rank in (0, 1))
        thread = threading.Thread(target=same_error.tell_once, args=[first, "x", lambda: told.append("x")])
        thread.start()
        with pytest.raises(SettingsError, match="rank 0 has ended with an error"):
            second.start(timedelta(seconds=TIMEOUT))
        same_error.tell_once(second, "y", lambda: told.append("y"))
        thread.join()
    assert told == ["x", "y"]


def meet_or_fail(world: World, done: str) -> int:
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
        step_store(step.address, step.step, 0, timedelta(seconds=FOREVER))
        wait_until(Path(done).exists)
        return 0
    same_error.WAIT = FOREVER
    same_error.tell_once(step, "no such file", lambda: print("told", file=sys.stderr))
    Path(done).touch()
    return 2


def test_under_slurm_a_rank_learns_from_the_rendezvous_that_rank_0_has_no_error(tmp_path: Path) -> None:
    ends = end_ranks(2, meet_or_fail, str(tmp_path / "done"))
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


class FrozenStore:
    """A store whose host does not answer, as after a SIGSTOP."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: time.sleep(TIMEOUT)


def fail_without_answer(world: World) -> int:
    """Wrong settings on rank 1, which does not reach rank 0."""
    failure.PATIENCE, failure.GRACE = 0.3, 0.0
    watch = FailureWatch(World(rank=1, size=2))
    watch._store = FrozenStore()
    return watch.report(SettingsError("this model has batch norm"))


def test_wrong_settings_are_printed_where_rank_0_does_not_answer() -> None:
    (end,) = end_ranks(1, fail_without_answer)
    assert end.code == 2 and end.stderr == "error: rank 1: this model has batch norm\n"


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
