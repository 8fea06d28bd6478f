"""Rank of a process: from torchrun's variables, MPI's, Slurm's, or none; and ranks that never meet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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


# What the ranks of a node have from Open MPI 5.0, MVAPICH2 2.3, and MPICH's Hydra 4.2 (Intel MPI 2021).
MPIRUN = (
    *(tuple(f"{name}_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
      for name in ("OMPI", "MV2")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


@pytest.mark.parametrize("names", MPIRUN)
def test_mpiruns_variables(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*values: int, **more: str) -> World:
        return World.from_env("cpu", {**dict(zip(names, map(str, values), strict=True)), **more})

    # On one node, all ranks have the same port, and runs of other command lines or jobs have others.
    world = of(1, 4, 1, 4)
    _, _, port = world.address.partition(":")
    assert world == World(1, 4, 1, 4, address=f"127.0.0.1:{port}") and FIRST_PORT <= int(port) < FIRST_PORT + PORTS
    assert of(3, 4, 3, 4).address == world.address != of(1, 4, 1, 4, PBS_JOBID="7").address
    monkeypatch.setattr("sys.argv", ["another"])
    assert of(1, 4, 1, 4).address != world.address
    assert of(0, 1, 0, 1) == World()
    # Of several nodes, the user names one; the variables that Slurm has set for a batch script or a daemon of mpirun
    # are not those of the rank.
    assert of(2, 4, 0, 2).address == ""
    assert of(2, 4, 0, 2, MASTER_ADDR="n1", MASTER_PORT="9").address == "n1:9"
    assert of(2, 4, 0, 2, **STEP, MASTER_ADDR="n1", MASTER_PORT="9") == World(2, 4, 0, 2, address="n1:9")


def test_a_server_of_pmi_that_does_not_tell_the_node() -> None:
    pals = {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4"}
    assert World.from_env("cpu", {**pals, "MASTER_ADDR": "n1", "MASTER_PORT": "9"}) == World(5, 8, 1, 4, address="n1:9")
    assert World.from_env("cpu", {"PMI_RANK": "1", "PMI_SIZE": "2"}) == World(1, 2, 1, 2)  # nowhere to meet
    # srun --mpi=pmi2 sets them beside its own, also for a step of one task.
    assert World.from_env("cpu", {**STEP, "PMI_RANK": "4", "PMI_SIZE": "5"}) == World.from_env("cpu", STEP)
    assert World.from_env("cpu", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMI_RANK": "0"}) == World()


def test_a_rank_without_a_local_rank() -> None:
    """As in the pods of a PyTorchJob; the ranks of one machine are numbered by hand."""
    pod = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "9"}
    for address in ("job-master-0.invalid", "192.0.2.1"):
        assert World.from_env("cpu", {**pod, "MASTER_ADDR": address}) == World(3, 4, 0, 1)
    for address in ("127.0.0.1", "localhost", "::1"):
        assert World.from_env("cpu", {**pod, "MASTER_ADDR": address}) == World(3, 4, 3, 4)
    assert World.from_env("cpu", {"RANK": "3", "WORLD_SIZE": "4"}) == World(3, 4, 3, 4)


@pytest.mark.parametrize(
    ("world", "env", "told"),
    [
        (World(0, 2), {}, "where the 2 ranks meet is not known: start the ranks with torchrun or srun, or set RANK"),
        (World(), {"MASTER_ADDR": "n1", "JOB_COMPLETION_INDEX": "1"}, "but RANK and WORLD_SIZE are not"),
        (World(), {"MASTER_ADDR": "n1"}, ""),
        (World(), {"MASTER_ADDR": "n1", "JOB_COMPLETION_INDEX": "1", "RANK": "0", "WORLD_SIZE": "1"}, ""),
    ],
)
def test_ranks_that_cannot_meet_are_told(
    world: World, env: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=told) if told else nullcontext():
        world.start()


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
        ({"RANK": "1"}, "but WORLD_SIZE is not: set it, start the run with torchrun, or unset RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"}, "RANK is not: set it to $JOB_COMPLETION_INDEX"),
        (
            {"OMPI_COMM_WORLD_RANK": "1"},
            "OMPI_COMM_WORLD_SIZE is not set in the environment, as by mpirun: start",
        ),
        (
            {"PALS_RANKID": "0"},
            "PMI_SIZE is not set in the environment, as by mpirun: start",
        ),
        # Open MPI 5.0's prterun, whose processes would be as many runs in one folder.
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-1@1", "PRTE_LAUNCHED": "1"}, "PMIX_SIZE is not set"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "invalid PMI_RANK 'x': unset it"),
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
