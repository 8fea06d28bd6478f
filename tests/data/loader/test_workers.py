"""Workers that die, hang or are slow, and their end with the loader."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from clipstream.errors import DataError
from tests.support.clocks import START, Clock
from tests.support.forks import wait_until
from tests.support.loaders import data, loader
from tests.support.ranks import command_ends, command_runs

CLOCKS: list[Clock] = []  # of the test that runs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The pipeline's, which `slow` and `sleepy` move."""
    CLOCKS[:] = [Clock(monkeypatch)]
    monkeypatch.setattr("clipstream.data.loader.loader.POLL", 0.01)
    return CLOCKS[0]


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    """A user's transform that takes a second."""
    CLOCKS[0].advance(1.0)
    time.sleep(0.03)  # so that the loader looks meanwhile
    return sample


def test_a_slow_source_is_no_stall(shards: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipstream.data.loader.pipeline.INTERIM_SECONDS", 0.5)
    sources = {"train": {"shards": shards, "transform": "tests.data.loader.test_workers:slow"}}
    sizes = {"lanes": 24, "global_batch_size": 24}
    settings = data(shards, workers=1, stall_timeout=8.0, sources=sources, prefetch=1, **sizes)
    with loader(settings) as stream:
        next(stream)
    assert clock.now() - START >= 24


def test_a_killed_worker_is_named(shards: list[str]) -> None:
    with loader(data(shards, workers=2, prefetch=1)) as stream:
        next(stream)
        os.kill(stream.worker_pids()[1], signal.SIGKILL)
        with pytest.raises(DataError, match=r"data worker 1 .*SIGKILL"):
            for _ in range(5):
                next(stream)


def sleepy(sample: dict[str, Any]) -> dict[str, Any]:
    """A user's transform that hangs."""
    CLOCKS[0].advance(7.0)
    time.sleep(600)
    return sample


@pytest.mark.usefixtures("clock")
def test_a_stall_names_worker_stage_and_sample(shards: list[str]) -> None:
    sources = {"train": {"shards": shards, "transform": "tests.data.loader.test_workers:sleepy"}}
    with (
        pytest.raises(DataError, match=r"worker 0 .*transform 0000\d\.tar/.*, for 7 s"),
        loader(data(shards, workers=1, stall_timeout=6.0, sources=sources)) as stream,
    ):
        next(stream)


@pytest.mark.usefixtures("commands")
def test_a_pipes_command_ends_with_its_worker(tmp_path: Path) -> None:
    mark = f"3608.{os.getpid()}"
    stream = loader(data(f"pipe:sleep {mark}", workers=1))
    wait_until(lambda: command_runs(mark))
    stream.close()
    command_ends(mark)
    assert not command_runs(mark)


def test_no_worker_outlives_its_loader(shards: list[str]) -> None:
    stream = loader(data(shards, workers=3))
    pids = stream.worker_pids()
    next(stream)
    stream.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
