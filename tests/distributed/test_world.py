"""Rank of a process: from torchrun's variables, Slurm's, or none; and ranks that never meet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from clipstream.distributed import launch
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import FIRST_PORT, PORTS, World, first_node, meet
from clipstream.errors import SettingsError
from tests.support.ranks import TIMEOUT, end_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
# As srun sets them: 5 tasks on three nodes.
STEP = {
    "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_JOB_ID": "200505", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gnode[010,020-021]", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gnode[003-021]",
}  # fmt: skip


def test_torchruns_variables_stand_above_slurms() -> None:
    world = World.from_env("cuda", {**STEP, **TORCHRUN})
    assert world == World(rank=3, size=4, local_rank=1, local_size=2, device="cuda:1")
    # A process that sees one GPU calls it 0, whoever starts it.
    assert World.from_env("cuda", {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "5"}).device == "cuda:0"
    assert World.from_env("cuda", {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "4,5"}).device == "cuda:1"


def test_without_any_it_is_alone() -> None:
    assert World.from_env("cuda", {}) == World(device="cuda:0")
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}  # srun --pty in a larger job
    assert World.from_env("cpu", alone) == World()
    assert World.from_env("cpu", {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"}) == World()


def test_sruns_variables() -> None:
    world = World.from_env("cpu", STEP)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (4, 5, 0, 1)
    host, _, port = world.address.partition(":")
    assert host == "gnode010" and FIRST_PORT <= int(port) < FIRST_PORT + PORTS
    assert World.from_env("cpu", {**STEP, "SLURM_STEP_ID": "1"}).address != world.address
    first = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert World.from_env("cuda", first) == World(1, 5, 1, 2, "cuda:1", world.address)
    # srun --gpus-per-task 1
    assert World.from_env("cuda", {**first, "CUDA_VISIBLE_DEVICES": "3"}).device == "cuda:0"
    told = World.from_env("cpu", {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert told.address == "10.0.0.1:29500"


def test_the_jobs_variables_stand_in_for_the_steps() -> None:
    job = {
        "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODELIST": "a,b",
    }  # fmt: skip
    world = World.from_env("cpu", job)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 2)
    assert world.address == f"a:{FIRST_PORT}"
    here = World.from_env("cpu", {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"})
    assert (here.local_size, here.address) == (2, f"127.0.0.1:{FIRST_PORT}")


def test_the_first_node() -> None:
    for nodes, first in {"node7": "node7", "a,b": "a", "gpu[003-005,9],login1": "gpu003", "c[7]": "c7", "": "",
                         "rack[2,4]-node[1-3],x": "rack2-node1", "n-1.org,n-2.org": "n-1.org"}.items():  # fmt: skip
        assert first_node(nodes) == first


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4), st.data())
def test_the_tasks_of_a_node(groups: list[tuple[int, int]], data: st.DataObject) -> None:
    counts = [count for count, times in groups for _ in range(times)]
    written = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    node = data.draw(st.integers(0, len(counts) - 1))
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(sum(counts) + 1), "SLURM_NODEID": str(node)}
    env |= {"SLURM_STEP_TASKS_PER_NODE": f"{written},1"}
    assert World.from_env("cpu", env).local_size == counts[node]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"RANK": "1"}, "start the run with torchrun, or unset RANK and WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "in the environment: start the run with torchrun"),
        ({**STEP, "SLURM_PROCID": "x"}, "invalid SLURM_PROCID 'x': unset it"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_LOCALID is missing: start the run with srun"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"},
            "SLURM_JOB_NODELIST is not set: set MASTER_ADDR",
        ),
    ],
)
def test_variables_that_no_launcher_sets(env: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        World.from_env("cpu", env)
    assert told in str(caught.value)


def test_ranks_meet_in_a_store_that_holds_what_was_left_there() -> None:
    """Five attempts with more and fewer ranks, which come at different times; the last one is short of a rank."""
    store = HashStore()
    words = []
    for size, late in [(3, 0), (3, 2), (2, 1), (5, 4), (4, 0)]:

        def come(rank: int, size: int = size, late: int = late) -> str:
            time.sleep(0.2 * (rank == late) + 0.01 * rank)
            return meet(store, rank, size, timedelta(seconds=TIMEOUT))

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(come, range(size)))
        assert found == [found[0]] * size
        words.append(found[0])
    assert len(set(words)) == len(words)
    with pytest.raises(TimeoutError, match="2 of 2 other ranks did not arrive"):
        meet(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        meet(store, 1, 3, timedelta(seconds=0.1))


def lonely(world: World, address: str) -> int:
    """A rank 0 whose others never come."""
    try:
        World(rank=0, size=2, address=address).start(timedelta(seconds=2))
    except SettingsError as error:
        words = ("the 2 ranks did not connect at", "--run.timeout is 2 s", "MASTER_ADDR and MASTER_PORT set")
        return 7 if all(word in str(error) for word in words) else 1
    return 0


@pytest.mark.parametrize("address", ["127.0.0.1:0", "no-such-host.invalid:29500"])
def test_ranks_that_do_not_come_together_are_told(address: str) -> None:
    assert [end.code for end in end_ranks(1, lonely, address)] == [7]


@pytest.mark.parametrize(("device", "threads", "expected"), [("cpu", None, 12), ("cuda", None, 4), ("cuda", 7, 7)])
def test_threads_of_a_rank(device: str, threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    world = World(device=device, local_size=2)
    monkeypatch.setattr(World, "from_env", lambda device: world)
    monkeypatch.setattr(World, "start", lambda *_: None)
    monkeypatch.setattr(launch, "cores", lambda: 24)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for name in ("is_available", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: True)
    assert launch.run_ranks(RunSettings(device=device, threads=threads), lambda *_: None) == 0
    assert found == [expected]
