"""`data.workers: auto`: limited by the cores, equal on all ranks, without effect on batches."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
from multiprocessing.process import BaseProcess

import pytest
import torch

from clipstream.data.loader import workers as auto_workers
from clipstream.data.settings import MAX_AUTO_WORKERS
from clipstream.distributed import world
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from tests.support.loaders import data, loader
from tests.support.ranks import TIMEOUT


@pytest.mark.parametrize(
    ("cores", "ranks", "lanes", "workers", "reason"),
    [
        (1, 1, 8, 1, "1 core for 1 rank"), (16, 4, 8, 3, "16 cores for 4 ranks"), (3, 8, 8, 1, "3 cores for 8 ranks"),
        (16, 1, 99, 15, "16 cores for 1 rank"), (5, 1, 3, 3, "5 cores for 1 rank"),
        (256, 2, 99, MAX_AUTO_WORKERS, "256 cores for 2 ranks"),
        (64, 0, 8, auto_workers.ON_CPU, "64 cores, which train as well"),
        (64, 0, 1, 1, "64 cores, which train as well"),
    ],
)  # fmt: skip
def test_a_core_of_each_rank_is_left_to_training(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, lanes: int, workers: int, reason: str
) -> None:
    """There are no more workers than lanes; a model on the CPU (ranks 0 here) leaves two."""
    monkeypatch.setattr(auto_workers, "cores", lambda: cores)
    world = World(local_size=ranks, device="cuda:0") if ranks else World()
    settings = data("a.tar", workers="auto", lanes=lanes, global_batch_size=99)
    assert auto_workers.resolve_workers(settings, world) == (workers, reason)


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(world.VARIABLE, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    for quota, count in [(float("inf"), 12), (2.5, 3), (0.5, 1), (64, 12)]:
        monkeypatch.setattr(world, "_quota", lambda quota=quota: quota)
        assert world.cores() == count
    monkeypatch.setenv(world.VARIABLE, "cores=40")
    assert world.cores() == 40


def test_bfloat16_is_found_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for allowed in (True, False):  # to oneDNN, by $ONEDNN_MAX_CPU_ISA
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda allowed=allowed: allowed)
        for text, computed in {"cores=4": allowed, "": allowed, "bf16": True, "no-bf16,cores=4": False}.items():
            monkeypatch.setenv(world.VARIABLE, text)
            assert world.computes_bf16("cpu") == computed
    for text in ("fast", "bf16,no-bf16", "bf16=no", "cores=0", "cores=x", "cores"):
        monkeypatch.setenv(world.VARIABLE, text)
        with pytest.raises(SettingsError, match=f"is '{text}': expected bf16 or no-bf16, and cores=N"):
            world.computes_bf16("cpu")


def test_workers_that_cannot_all_be_started_are_told_and_none_is_left(shards: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir("/dev/fd")}
    few = next(itertools.islice((fd for fd in itertools.count() if fd not in opened), 20, None))
    before = set(multiprocessing.active_children())
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with pytest.raises(DataError, match=r"of 24 data workers could be started .*use fewer --workers"):
            loader(data(shards, workers=24, lanes=24, global_batch_size=24))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(multiprocessing.active_children()) <= before


def test_workers_end_by_themselves(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """None holds the pipe of another, else each would have to be killed after its patience."""
    processes: list[BaseProcess] = []

    def end(process: BaseProcess, _: float) -> None:
        process.join(TIMEOUT)
        process.kill()  # one that has not ended
        processes.append(process)

    monkeypatch.setattr(auto_workers, "end", end)
    stream = loader(data(shards, workers=12, lanes=12))
    next(stream)
    stream.close()
    assert [process.exitcode for process in processes] == [0] * 12
