"""Unusable data, or a killed worker, ends a run on two ranks at once, with exit code 3 and the reason.

The runs have no time limits of their own, so that they end because what is wrong is noticed and passed on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from clipstream.distributed.world import World
from tests.support.forks import wait_until
from tests.support.ranks import end_ranks
from tests.support.runs import NO_LIMITS, flags, train_on

RANKS = 2


@pytest.fixture(scope="module")
def broken(place: Path) -> str:
    """A folder of shards that are cut off."""
    for path in (place / "pairs").glob("*.tar"):
        (place / "cut").mkdir(exist_ok=True)
        (place / "cut" / path.name).write_bytes(path.read_bytes()[:700])
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
    assert told in ends[0].stderr and "truncated_" in ends[0].stderr, ends[0].stderr
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
