"""The first failure ends every rank with its exit code, also ranks inside a collective, and without unusable data."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from clipstream.data.loader import batch_buffers
from clipstream.data.loader.batch_buffers import BufferRing, BufferShape, device_prefetch_for
from clipstream.distributed import failure
from clipstream.distributed.failure import POLL, Cause, FailureWatch
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.shared_keys import SharedKeys
from clipstream.distributed.world import World
from clipstream.errors import DataError, Stopped
from clipstream.text import Lines
from tests.support.fake_cuda import FakeCuda
from tests.support.forks import wait_until
from tests.support.ranks import TIMEOUT, end_ranks, set_timeout, watched
from tests.support.runs import NO_LIMITS, flags, lines, train_on

HOST = socket.gethostname()
MESSAGE = Lines("source 'train': no caption\n  members seen: json, png")
FAULTY = "{type: 'tests.distributed.test_failure:Faulty', every: 1, on_error: raise}"


def fail(world: World, kind: str, failing: int) -> int:
    """A run whose rank `failing` ends as `kind` says while the others are in an all_reduce."""

    def body(watch: FailureWatch) -> None:
        if world.rank == failing:
            if kind == "data":
                raise DataError(MESSAGE)
            if kind == "bug":
                raise KeyError("oops")
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce_sum(torch.ones(1))

    return watched(world, body)


@pytest.mark.parametrize(
    ("kind", "size", "failing", "code", "said"),
    [
        ("data", 2, 0, 3, MESSAGE),
        ("data", 3, 1, 3, MESSAGE),
        ("bug", 2, 1, 1, "KeyError: 'oops'"),
        ("kill", 3, 2, 1, f"rank 2 on {HOST} ended without an error message"),
    ],
)
def test_a_failure_ends_all_ranks_with_its_code_and_its_cause(
    kind: str, size: int, failing: int, code: int, said: str
) -> None:
    ends = end_ranks(size, fail, kind, failing)
    assert [end.code for end in ends] == [-9 if kind == "kill" and rank == failing else code for rank in range(size)]
    for rank, end in enumerate(ends):
        told = said if rank in (0, failing) else said.partition("\n")[0]
        assert end.code == -9 or f"error: rank {failing}: {told}" in end.stderr, end.stderr
        assert ("Traceback" in end.stderr) == (kind == "bug" and rank == failing), "where it arose"


def hang(world: World) -> int:
    """A run in which a kernel of the GPU waits for ever when rank 1 fails, and rank 0 waits in its main thread too."""
    patches = pytest.MonkeyPatch()
    patches.setattr(failure, "CLEANUP", 6.0)
    patches.setattr(batch_buffers, "UNLOCK_SECONDS", 0.1)
    FakeCuda(patches)  # its unregistration blocks

    def body(watch: FailureWatch) -> None:
        prefetch = device_prefetch_for("cuda:0", BufferRing(BufferShape(2, 4, 4, 3), 1))
        watch.on_exit(prefetch.close)
        watch.on_exit(lambda: print("the next cleanup", file=sys.stderr))
        watch.on_exit(threading.Event().wait)
        with closing(prefetch):
            world.barrier()
            if world.rank == 1:
                raise DataError(MESSAGE)
            threading.Event().wait()

    return watched(world, body)


def test_a_hanging_gpu_does_not_keep_ranks_from_ending() -> None:
    ends = end_ranks(2, hang, timeout=120)
    assert [end.code for end in ends] == [3, 3]
    assert "the next cleanup" in ends[0].stderr
    assert all(f"error: rank 1: {MESSAGE}\n" in end.stderr for end in ends)


def miss_a_collective(world: World) -> int:
    """A run whose rank 1 does not come to the second collective."""

    def stuck(watch: FailureWatch) -> None:
        while world.rank == 1:
            time.sleep(0.1)
        set_timeout(2)
        world.all_reduce_sum(torch.ones(1))

    return watched(world, stuck)


def test_a_rank_that_is_waited_for_too_long_says_where_it_is() -> None:
    ends = end_ranks(2, miss_a_collective)
    assert [end.code for end in ends] == [1, 1]
    assert "rank 1 is at:" in ends[1].stderr and "in stuck" in ends[1].stderr and "time.sleep(0.1)" in ends[1].stderr
    assert "rank 0 is at:" not in ends[0].stderr
    for end in ends:
        assert end.stderr.splitlines()[-1].startswith(
            "error: rank 0: waited longer than --run.timeout for another rank"
        )


def test_a_program_whose_connections_broke_learns_that_the_step_is_saved() -> None:
    watch, error = FailureWatch(World()), RuntimeError("Connection closed by peer")
    watch.cause = Cause(0, 1, "the connection to another rank broke", broken=True)
    assert watch.first_error(error) is error
    watch.set_outcome(Stopped.exit_code, "rank 0 saved step 4")
    told = watch.first_error(error)
    assert isinstance(told, Stopped) and "broke; rank 0 saved step 4" in str(told)


def behind(world: World, kind: str) -> int:
    """As `miss_a_collective`, where gloo stands in for nccl: it waits, and breaks no connection."""
    world.start()
    watch = FailureWatch(replace(world, device="cuda:0"))
    watch.note_step(18 - world.rank)
    watch.start()
    if watch.limit != 0.9 * 1800:
        return 5
    watch.limit = 1.0
    if kind == "dead":
        failure.LONG_SILENCE = 3.0
    if world.rank == 0:
        with suppress(RuntimeError):  # gloo's, where rank 1 has ended first
            world.all_reduce_sum(torch.ones(1))
    elif kind == "dead":
        watch._stopped.set()  # beats no more
        watch._thread.join()
        with suppress(RuntimeError):  # until rank 0, which holds the store, has ended
            while not watch.store.check(["never"]):
                time.sleep(0.1)
        os._exit(9)
    time.sleep(TIMEOUT)
    return 6


@pytest.mark.parametrize("kind", ["stuck", "dead"])
def test_a_rank_that_nccl_waits_for_is_named_before_its_watchdog_aborts(kind: str) -> None:
    ends = end_ranks(2, behind, kind)
    if kind == "dead":
        assert [end.code for end in ends] == [1, 9]
        assert f"error: rank 1: rank 1 on {HOST} ended without an error message" in ends[0].stderr
        return
    assert [end.code for end in ends] == [1, 1]
    for rank, end in enumerate(ends):
        assert f"rank {rank} is at:" in end.stderr and "in behind" in end.stderr
        assert end.stderr.splitlines()[-1].startswith(
            f"error: rank 0: waited longer than 90% of --run.timeout for rank 1 on {HOST}, stuck or busy after step "
            "17, collective 0 (this rank: step 18, collective 1)"
        )


def test_ranks_that_called_as_many_collectives_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "LONG_SILENCE", POLL)
    calls, store = [7, 7, 6], HashStore()
    watches = [FailureWatch(World(rank, 3)) for rank in range(3)]
    for rank, watch in enumerate(watches):
        watch._keys, watch.limit = SharedKeys(store), 3 * POLL
        watch._backend = SimpleNamespace(_get_sequence_number_for_group=partial(calls.__getitem__, rank))
    found = []
    for look in range(8):  # rank 2 is behind in the first one alone, and the others in the last one
        calls[2] = 6 if look == 0 else 8 if look == 7 else 7
        found += [watch._compare() for watch in watches]
    assert found == [None] * 24
    for _ in range(2):
        found = [watch._compare() for watch in watches]
    assert (
        found[:2] == [None, None] and found[2] is not None and found[2].dead == [0, 1]
    )  # as their threads are not there


def abort(world: World) -> int:
    """A run that is aborted, as by NCCL's watchdog, in a thread that has no Python stack."""
    return run_ranks(RunSettings(device="cpu"), lambda world, watch: os.abort())


def test_an_aborted_rank_prints_where_its_threads_are() -> None:
    (end,) = end_ranks(1, abort)
    assert end.code == -signal.SIGABRT and "in run_ranks" in end.stderr


class Faulty:
    """An evaluator that fails on the last rank, while the others wait for it."""

    def __init__(self, settings: Any) -> None:
        """No settings of its own."""

    def __call__(self, context: Any) -> Iterator[tuple[str, float]]:
        if context.world.rank == context.world.size - 1:
            raise ZeroDivisionError("of my own making")
        context.world.barrier()
        yield "nothing", 0.0


def test_an_error_in_a_run_ends_all_ranks_with_it_and_not_with_what_comes_of_it(place: Path) -> None:
    ends = end_ranks(2, train_on, flags(place, "evaluation", "--evals.mine", FAULTY))
    assert [end.code for end in ends] == [1, 1]
    for rank, end in enumerate(ends):
        cause = next(line for line in end.stderr.splitlines() if line.startswith("error: rank "))
        assert cause.startswith("error: rank 1: ") and "of my own making" in cause, (rank, end.stderr)
        assert "Timed out" not in end.stderr
        assert rank == 1 or "Connection" not in end.stderr, end.stderr
    (line,) = lines(place, "evaluation", "end")
    assert line["end"]["status"] == "failed"
    assert line["end"]["error"].startswith("rank 1: ZeroDivisionError: of my own making; rank 0 saved step 1; ")


RANKS = 2


@pytest.fixture(scope="module")
def broken(place: Path) -> str:
    """A folder of shards that begin with a header that is none."""
    for path in (place / "pairs").glob("*.tar"):
        (place / "cut").mkdir(exist_ok=True)
        (place / "cut" / path.name).write_bytes(b"x" * 512 + path.read_bytes()[512:])
    return "cut"


def train_where(world: World, argv: list[str], folders: list[str]) -> int:
    """A rank's run, whose shards are in a folder of its own."""
    os.environ["SHARDS"] = folders[world.rank]
    return train_on(world, argv)


@pytest.mark.parametrize(("folders", "mode"), [(["pairs", "cut"], "resampled"), (["cut", "pairs"], "epoch")])
def test_nothing_usable_on_a_rank_ends_all(place: Path, broken: str, folders: list[str], mode: str) -> None:
    more = ["--train-data", f"{place}/${{SHARDS}}/{{00000..00003}}.tar", "--data.sampling.mode", mode]
    ends = end_ranks(RANKS, train_where, flags(place, mode, *more, *NO_LIMITS, steps=1000), folders)
    assert [end.code for end in ends] == [3] * RANKS, ends
    told = f"rank {folders.index('cut')}: source 'train': none of the 4 shards tried (of 4)"
    assert told in ends[0].stderr and "not_a_tar" in ends[0].stderr, ends[0].stderr
    assert all("Traceback" not in end.stderr for end in ends)


def train_and_lose_a_worker(world: World, argv: list[str], metrics: str, killed: str) -> int:
    """A rank's run; rank 1's second data worker is killed after some steps."""

    def kill() -> None:
        wait_until(lambda: Path(metrics).exists() and '"step": 3,' in Path(metrics).read_text())
        worker = sorted(multiprocessing.active_children(), key=lambda child: child.name)[1]  # their numbers
        Path(killed).write_text(str(worker.pid))
        os.kill(worker.pid or 0, signal.SIGKILL)

    if world.rank == 1:
        threading.Thread(target=kill, daemon=True).start()
    return train_on(world, argv)


def test_a_killed_worker_ends_all_ranks(place: Path, tmp_path: Path) -> None:
    shards = ["--train-data", f"{place}/pairs/*.tar", "--workers", "2", "--checkpoint.every", "1000000"]
    argv = flags(place, "killed", *shards, *NO_LIMITS, steps=1_000_000)
    metrics = str(place / "runs" / "killed" / "metrics.jsonl")
    ends = end_ranks(RANKS, train_and_lose_a_worker, argv, metrics, str(tmp_path / "killed"))
    pid = (tmp_path / "killed").read_text()
    assert [end.code for end in ends] == [3] * RANKS, ends
    for end in ends:
        assert f"error: rank 1: data worker 1 (pid {pid}) was killed by SIGKILL" in end.stderr, end.stderr
        assert "Traceback" not in end.stderr
