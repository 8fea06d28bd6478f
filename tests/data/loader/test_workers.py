"""Workers: their number; those that die, hang or are slow, and shards that stall, are named in time; their end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipstream.data import order_plan
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.loader import loader as loading
from clipstream.data.settings import MAX_AUTO_WORKERS
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.models.precision import computes_bf16
from clipstream.text import message
from clipstream.utils import processes as machine
from tests.support.clocks import START, Clock
from tests.support.forks import TIMEOUT, wait_until
from tests.support.loaders import data, evaluation_of, is_filled, loader
from tests.support.pictures import picture
from tests.support.ranks import command_ends, command_runs
from tests.support.unruly import FaultyFile, Unruly


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unruly]:
    """A server that clients try again without a pause."""
    monkeypatch.setattr("clipstream.storage.download.time", SimpleNamespace(sleep=lambda _: None))
    running = Unruly(stall=TIMEOUT)
    yield running
    running.close()


def stalling(site: Unruly, shard: str) -> str:
    """The URL of a shard whose body never comes whole."""
    return site.put("slow.tar", FaultyFile([Path(shard).read_bytes()], "etag", random.Random(2), 1.0, ("stall",)))


def test_a_body_that_stalls_ends_the_run_by_worker_and_url(
    site: Unruly, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, limit, clock = stalling(site, shards[0]), 3.0, Clock(monkeypatch)
    site.on_stall = clock.run
    settings = data([*shards, url], workers=2, lanes=2, stall_timeout=limit, sampling={"mode": "epoch"})
    with pytest.raises(DataError) as caught, loader(settings) as stream:
        while True:
            next(stream)
    said = str(caught.value)
    assert clock.now() - START > limit
    assert "--data.stall-timeout" in said and "worker 0 (pid " in said and "worker 1 (pid " in said
    assert f"open {url} (" in said and re.search(r"bytes came\), for \d+ s", said)


def test_a_body_that_stalls_is_a_broken_shard_after_the_last_try(site: Unruly, shards: list[str]) -> None:
    url, limits = stalling(site, shards[0]), {"transfer_timeout": 0.3, "max_shard_failures": 0.5}
    settings = data([*shards, url], workers=2, lanes=2, sampling={"mode": "epoch"}, **limits)
    with loader(settings) as stream:
        while not stream.health.sources["train"].faults:
            next(stream)
        loss, *_ = stream.health.take_dropped()  # the next epoch may have begun
    assert (loss.shard, loss.reason) == (url, "timeout") and "no byte in 0.3 s after " in loss.detail
    wait_until(lambda: site.files["/slow.tar"].done["stall"] >= 4)  # it was tried again


def test_evaluations_have_the_same_patience(site: Unruly, shards: list[str]) -> None:
    source = SourceSettings(shards=stalling(site, shards[0]))
    with pytest.raises(DataError, match=r"no byte in 0\.3 s"), evaluation_of(source, transfer_timeout=0.3) as stream:
        next(stream)


def test_a_long_wait_is_told_before_it_ends_the_run(
    site: Unruly, shards: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loader's clock goes on by a tenth of a second whenever it is read."""
    clock, stalled = Clock(monkeypatch), threading.Event()

    def tick() -> float:
        clock.advance(0.1 * stalled.is_set())
        return clock.now()

    monkeypatch.setattr(loading.time, "monotonic", tick)
    monkeypatch.setattr(loading, "WAIT_WARNING", 0.5)
    monkeypatch.setattr(loading, "POLL", 0.01)
    url, site.on_stall = stalling(site, shards[0]), stalled.set
    with pytest.raises(DataError), loader(data(url, workers=1, stall_timeout=4.0)) as stream:
        next(stream)
    said = capsys.readouterr().err
    assert 3 <= said.count("waiting for batch 0 for ") <= 4, "after half a second, one, two and perhaps four"
    assert f": open {url} (" in said


def test_a_killed_worker_is_named_though_nobody_waits_for_it(
    shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def told() -> bool:
        said.append(capfd.readouterr().err)
        return f"data worker 1 (pid {pid}) was killed by SIGKILL" in "".join(said)

    with loader(data(shards, workers=2, prefetch=6)) as stream:
        next(stream)
        wait_until(lambda: is_filled(stream))
        pid = stream.worker_pids()[1]
        os.kill(pid, signal.SIGKILL)
        wait_until(told)
        with pytest.raises(DataError, match=r"data worker 1 .*SIGKILL"):
            next(stream)


def test_a_worker_that_dies_on_an_image_names_the_sample(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code of a decoder may end the process; the sample is in shared memory then."""
    real, last = TrainTransform.__call__, picture(7)

    def deadly(self: TrainTransform, data: bytes, *rest: Any) -> Any:
        if data == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, data, *rest)

    monkeypatch.setattr(TrainTransform, "__call__", deadly)
    with (
        pytest.raises(DataError, match=r"data worker \d .* was killed by SIGKILL .*during: decode \d+\.tar/000007"),
        loader(data(shards, workers=2)) as stream,
    ):
        for _ in range(1000):
            next(stream)


def test_a_worker_that_raises_shows_the_traceback_in_lines(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(TrainTransform, "__call__", raising)
    with pytest.raises(DataError) as caught, loader(data(shards, workers=1)) as stream:
        next(stream)
    said = message(caught.value).splitlines()
    assert re.match(r"data worker 0 \(pid \d+\) failed while it was at: ", said[0])
    assert said[1].startswith("Traceback") and said[-1] == "KeyError: 'a bug'"


CLOCKS: list[Clock] = []  # of the test that runs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The pipeline's, which `slow` and `sleepy` move."""
    CLOCKS[:] = [Clock(monkeypatch)]
    monkeypatch.setattr("clipstream.data.loader.loader.POLL", 0.01)
    return CLOCKS[0]


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    """A user's transform that takes a second, and during which the loader looks."""
    CLOCKS[0].advance(1.0)
    time.sleep(0.03)
    return sample


def sleepy(sample: dict[str, Any]) -> None:
    """A user's transform that hangs."""
    CLOCKS[0].advance(7.0)
    time.sleep(600)


def test_a_slow_source_is_no_stall(shards: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipstream.data.pipeline.INTERIM_SECONDS", 0.5)
    sources = {"train": {"shards": shards, "transform": f"{__name__}:slow"}}
    sizes = {"lanes": 24, "global_batch_size": 24}
    with loader(data(None, workers=1, stall_timeout=8.0, sources=sources, prefetch=1, **sizes)) as stream:
        next(stream)
    assert clock.now() - START >= 24


@pytest.mark.usefixtures("clock")
def test_a_stall_names_worker_stage_and_sample(shards: list[str]) -> None:
    sources = {"train": {"shards": shards, "transform": f"{__name__}:sleepy"}}
    stream = loader(data(None, workers=1, stall_timeout=6.0, sources=sources))
    with pytest.raises(DataError, match=r"worker 0 .*transform 0000\d\.tar/.*, for 7 s"):
        next(stream)


@pytest.mark.usefixtures("commands")
def test_a_pipes_command_ends_with_its_worker(tmp_path: Path) -> None:
    mark = f"3608.{os.getpid()}"
    stream = loader(data(f"pipe:sleep {mark}", workers=1))
    wait_until(lambda: command_runs(mark))
    stream.close()
    command_ends(mark)
    assert not command_runs(mark)


@pytest.mark.parametrize(
    ("cores", "ranks", "lanes", "workers", "reason"),
    [
        (1, 1, 8, 1, "1 core for 1 rank"), (16, 4, 8, 3, "16 cores for 4 ranks"), (3, 8, 8, 1, "3 cores for 8 ranks"),
        (16, 1, 99, 15, "16 cores for 1 rank"), (5, 1, 3, 3, "5 cores for 1 rank"),
        (256, 2, 99, MAX_AUTO_WORKERS, "256 cores for 2 ranks"),
        (64, 0, 8, order_plan.ON_CPU, "64 cores, which train as well"),
        (64, 0, 1, 1, "64 cores, which train as well"),
    ],
)  # fmt: skip
def test_a_core_of_each_rank_is_left_to_training(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, lanes: int, workers: int, reason: str
) -> None:
    """There are no more workers than lanes; a model on the CPU (ranks 0 here) leaves two."""
    monkeypatch.setattr(order_plan, "cores", lambda: cores)
    world = World(local_size=ranks, device="cuda:0") if ranks else World()
    settings = data("a.tar", workers="auto", lanes=lanes, global_batch_size=99)
    assert order_plan.resolve_workers(settings, world) == (workers, reason)


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.CAPABILITIES, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    for quota, count in [(float("inf"), 12), (2.5, 3), (0.5, 1), (64, 12)]:
        monkeypatch.setattr(machine, "_quota", lambda quota=quota: quota)
        assert machine.cores() == count
    monkeypatch.setenv(machine.CAPABILITIES, "cores=40")
    assert machine.cores() == 40


def test_bfloat16_is_found_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for allowed in (True, False):  # to oneDNN, by $ONEDNN_MAX_CPU_ISA
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda allowed=allowed: allowed)
        for text, computed in {"cores=4": allowed, "": allowed, "bf16": True, "no-bf16,cores=4": False}.items():
            monkeypatch.setenv(machine.CAPABILITIES, text)
            assert computes_bf16("cpu") == computed
    for text in ("fast", "bf16,no-bf16", "bf16=no", "cores=0", "cores=x", "cores"):
        monkeypatch.setenv(machine.CAPABILITIES, text)
        with pytest.raises(SettingsError, match=f"is '{text}': expected bf16 or no-bf16, and cores=N"):
            computes_bf16("cpu")


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

    monkeypatch.setattr(loading, "end", end)
    stream = loader(data(shards, workers=12, lanes=12))
    next(stream)
    stream.close()
    assert [process.exitcode for process in processes] == [0] * 12
