"""Waiting for data is reported: a stalled body, a slow source and a killed worker are named in time."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipstream.data.loader import loader as loading
from clipstream.data.settings import SourceSettings
from clipstream.errors import DataError
from tests.support.clocks import START, Clock
from tests.support.forks import TIMEOUT, wait_until
from tests.support.loaders import data, evaluation_of, is_filled, loader
from tests.support.pictures import make_shards
from tests.support.unruly import FaultyFile, Unruly


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20])


@pytest.fixture
def site() -> Iterator[Unruly]:
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
    url = stalling(site, shards[0])
    settings = data([*shards, url], workers=2, lanes=2, transfer_timeout=0.5, sampling={"mode": "epoch"},
                    max_shard_failures=0.5)  # fmt: skip
    with loader(settings) as stream:
        while not stream.health.sources["train"].faults:
            next(stream)
        loss, *_ = stream.health.take_dropped()  # the next epoch may have begun
    assert (loss.shard, loss.reason) == (url, "timeout") and "no byte in 0.5 s after " in loss.detail
    wait_until(lambda: site.files["/slow.tar"].done["stall"] >= 4)  # it was tried again


def test_evaluations_have_the_same_patience(site: Unruly, shards: list[str]) -> None:
    source = SourceSettings(shards=stalling(site, shards[0]))
    with (
        pytest.raises(DataError, match=r"no byte in 0\.3 s"),
        evaluation_of(source, transfer_timeout=0.3) as stream,
    ):
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


def test_a_killed_worker_is_named_though_nobody_asks_for_a_batch(
    shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with loader(data(shards, workers=2, prefetch=1)) as stream:
        next(stream)
        pid = stream.worker_pids()[1]
        os.kill(pid, signal.SIGKILL)
        said = ""

        def told() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return f"data worker 1 (pid {pid}) was killed by SIGKILL" in said

        wait_until(told)
        with pytest.raises(DataError, match=r"data worker 1 .*SIGKILL"):
            next(stream)


def test_a_killed_worker_ends_the_run_though_its_batches_are_here(shards: list[str]) -> None:
    with loader(data(shards, workers=2, prefetch=6)) as stream:
        next(stream)
        wait_until(lambda: is_filled(stream))
        pid = stream.worker_pids()[0]
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(DataError, match=r"data worker 0 .*SIGKILL"):
            next(stream)
