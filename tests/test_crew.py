"""`data.workers: auto`: what the cores allow, the same on all ranks, and no other batches for it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from clipstream.batch import ImageSpec
from clipstream.data import crew
from clipstream.data.settings import MOST_AUTO_WORKERS, DataSettings
from clipstream.data.worker import PATIENCE
from clipstream.errors import DataError
from clipstream.world import World
from tests.pictures import ByteTokenizer, make_shards
from tests.test_loader import data, loader

IMAGE = ImageSpec((16, 16))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20])


def settled(settings: DataSettings, world: World) -> crew.Crew:
    return crew.settle(settings, world, ByteTokenizer(), IMAGE)


def on_gpu(ranks: int = 1) -> World:
    return World(local_size=ranks, device="cuda:0")


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"),
    [(1, 1, 1), (2, 1, 1), (16, 1, 15), (16, 4, 3), (3, 8, 1), (256, 2, MOST_AUTO_WORKERS)],
)
def test_a_core_of_each_rank_is_left_to_training(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, workers: int
) -> None:
    monkeypatch.setattr(crew, "cores", lambda: cores)
    assert crew.without_trial(on_gpu(ranks)) == workers


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    for quota, count in [(float("inf"), 12), (2.5, 3), (0.5, 1), (64, 12)]:
        monkeypatch.setattr(crew, "_quota", lambda quota=quota: quota)
        assert crew.cores() == count


def test_a_trial_tells_how_fast_a_worker_is(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "cores", lambda: 5)
    found = settled(data(shards, workers="auto"), on_gpu())
    assert 4 <= found.workers <= 8 and "5 cores for 1 rank; one makes " in found.why


def test_workers_that_wait_for_the_disk_are_more(monkeypatch: pytest.MonkeyPatch, shards: list[str]) -> None:
    monkeypatch.setattr(crew, "cores", lambda: 5)
    for waiting, workers in [(0.0, 4), (0.05, 4), (0.5, 8), (0.99, 8)]:
        monkeypatch.setattr(crew, "tried", lambda *_, waiting=waiting: (100.0, waiting))
        assert settled(data(shards, workers="auto"), on_gpu()).workers == workers  # there are 8 lanes


def test_nothing_is_fetched_or_failed_for_a_trial(shards: list[str], tmp_path: Path) -> None:
    for absent in (f"pipe:touch {tmp_path}/fetched; cat {shards[0]}", str(tmp_path / "absent.tar")):
        settings = data(absent, workers="auto")
        assert settled(settings, on_gpu()).workers == crew.without_trial(on_gpu())
    assert not (tmp_path / "fetched").exists()


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, shards: list[str]) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(crew, "tried", never)
    monkeypatch.setattr(crew, "cores", lambda: 64)
    assert settled(data(shards, workers="auto"), World()).workers == crew.ON_CPU
    assert settled(data(shards, workers="auto", lanes=1), World()).workers == 1


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
    assert set(multiprocessing.active_children()) == before


def test_many_workers_are_not_ended_one_after_the_other_by_force(shards: list[str]) -> None:
    took = []
    for _ in range(3):
        stream = loader(data(shards, workers=12, lanes=12))
        next(stream)
        began = time.monotonic()
        stream.close()
        took.append(time.monotonic() - began)
    assert min(took) < 11 * PATIENCE, took
