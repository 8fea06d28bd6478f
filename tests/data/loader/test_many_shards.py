"""Thousands of shards: none is opened needlessly, and the memory of workers does not grow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipstream.data.settings import DataSettings
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.sites import Site
from tests.support.tars import tar_bytes
from tests.support.watched import private_bytes

MIB = 1 << 20


@pytest.fixture
def site() -> Iterator[Site]:
    """Serves one and the same small shard under 10,000 names."""
    running = Site()
    body = tar_bytes([{"__key__": f"{i}", "jpg": picture(i), "txt": "x"} for i in range(20)])
    running.bodies = dict.fromkeys((f"{i:05d}.tar" for i in range(10_000)), body)
    yield running
    running.close()


def settings(site: Site, count: int, **changes: Any) -> DataSettings:
    shards = f"{site.root}/{{00000..{count - 1:05d}}}.tar"
    return data(shards, **{"workers": 2, "lanes": 8, "global_batch_size": 64, **changes})


@pytest.mark.parametrize("mode", ["resampled", "epoch"])
def test_a_run_of_10000_shards_asks_for_those_it_needs(site: Site, tmp_path: Path, mode: str) -> None:
    with loader(settings(site, 10_000, sampling={"mode": mode}, cache=str(tmp_path))) as stream:
        next(stream)
        # A lane holds two shards, and two more may be on their way.
        assert len(site.asked) <= 2 * 8 * 2 * 2, "a GET and a HEAD each"
        assert len(stream.health.sources["train"].shards) <= 8 * 2 * 2


def test_workers_take_no_more_memory_for_10000_shards_than_for_100(site: Site) -> None:
    sizes = []
    for count in (100, 10_000):
        with loader(settings(site, count)) as stream:
            taken = []
            for _ in range(2):
                for _ in range(30):
                    next(stream)
                taken.append([private_bytes(pid) for pid in stream.worker_pids()])
        assert max(after - before for before, after in zip(*taken, strict=True)) < 3 * MIB
        sizes.append(statistics.mean(taken[1]))
    assert sizes[1] - sizes[0] < 8 * MIB, sizes
