"""Remote shards are downloaded ahead of use; of thousands none needlessly, and in little memory."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipstream.data.pipeline import SampleBatches
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import DataError
from clipstream.storage.download import GIB
from clipstream.storage.shard_cache import ShardCache
from tests.support.forks import wait_until
from tests.support.loaders import data, digest, digests, evaluation_of, loader
from tests.support.pictures import picture
from tests.support.ranks import command_ends, command_runs
from tests.support.sites import Site
from tests.support.tars import tar_bytes
from tests.support.watched import private_bytes


@pytest.fixture
def site(shards: list[str]) -> Iterator[Site]:
    """A server of the shards."""
    running = Site()
    for shard in shards:
        running.put(Path(shard).name, Path(shard).read_bytes())
    yield running
    running.close()


def test_remote_shards_are_fetched_before_they_are_needed(shards: list[str], site: Site) -> None:
    urls = [f"{site.root}/{name}" for name in site.bodies]
    changes: dict[str, Any] = {"lanes": 1, "global_batch_size": 2, "shuffle": {"window": 100, "shards": 1}}
    changes |= {"sampling": {"mode": "epoch"}, "workers": 1, "prefetch": 1}
    kept = [0, 2, 4, 5]  # whose samples last for some batches
    expected = digests(data([shards[i] for i in kept], **changes), 1, 60)
    with loader(data([urls[i] for i in kept], **changes)) as stream:
        assert isinstance(stream.source, SampleBatches)
        folder = stream.source.cache.folder
        found = [digest([next(stream)])]
        # The next group is fetched while this one lasts.
        wait_until(lambda: sum("GET" in name for name in site.asked) >= 2)
        found += [digest([next(stream)]) for _ in range(59)]
        assert len(list(folder.glob("*.tar"))) <= 2, "a shard goes with its last lane"
    assert found == expected


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_command_that_fetches_ahead_ends_with_who_wants_it(shards: list[str], tmp_path: Path, workers: int) -> None:
    seconds = f"3602.{os.getpid()}"
    slow = f"pipe:cat '{shards[0]}'; test -e '{tmp_path}/first' && sleep {seconds}; touch '{tmp_path}/first'"
    changes: dict[str, Any] = {"lanes": 1, "global_batch_size": 2, "shuffle": {"window": 100, "shards": 1}}
    changes |= {"workers": workers, "cache": str(tmp_path / "cache")}
    others = set(threading.enumerate())
    with loader(data([slow, f"{slow}; true"], sampling={"mode": "epoch"}, **changes)) as stream:
        next(stream)
        wait_until(lambda: command_runs(seconds))  # else nothing is fetched ahead
    command_ends(seconds)
    assert not list(tmp_path.glob("cache/*.failed")), "another run that waits for the shard must not take it for broken"
    wait_until(lambda: all("_run" not in repr(thread) for thread in set(threading.enumerate()) - others))


def test_what_gave_no_sample_is_not_kept(shards: list[str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("<html>503, come back later</html>" * 100)
    settings = data(f"pipe:cat '{source}'", cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="not_a_tar"), loader(settings) as stream:
        next(stream)
    source.write_bytes(Path(shards[0]).read_bytes())
    with loader(settings) as stream:
        assert len(next(stream)) == 12


def test_a_shard_that_cannot_be_opened_is_not_held(tmp_path: Path, shards: list[str]) -> None:
    store = ShardCache(None)
    source = Source(SourceSettings(shards=f"pipe:cat '{shards[0]}'"), SourceContext(store))
    (name,) = source.names
    assert source.types[name].prefetch(name)
    local = store.local(name)
    store.release(name)
    local.unlink()
    with pytest.raises(FileNotFoundError):
        source.open(name)
    source.types[name].release(name)
    source.open(name).close()  # fetched anew, as nobody holds it
    store.close()


def test_caches_keep_to_their_limit_which_local_shards_need_not(shards: list[str], site: Site, tmp_path: Path) -> None:
    urls, limit = [f"{site.root}/{name}" for name in site.bodies], 120_000
    with evaluation_of(SourceSettings(shards=urls), cache=str(tmp_path), cache_gib=limit / GIB) as stream:
        assert sum(len(batch) for batch in stream) == 66
    kept = [path.stat().st_size for path in tmp_path.glob("*.tar")]
    assert kept and sum(kept) <= limit, "all of them take more"
    largest = max(Path(shard).stat().st_size for shard in shards)
    sources = {"near": {"shards": shards}, "far": {"shards": urls[:2]}}
    with loader(data(None, sources=sources, cache=str(tmp_path / "small"), cache_gib=2 * largest / GIB)) as both:
        assert len(next(both)) == 12


MIB = 1 << 20


@pytest.fixture
def many() -> Iterator[Site]:
    """Serves one and the same small shard under 10,000 names."""
    running = Site()
    body = tar_bytes([{"__key__": f"{i}", "jpg": picture(i), "txt": "x"} for i in range(20)])
    running.bodies = dict.fromkeys((f"{i:05d}.tar" for i in range(10_000)), body)
    yield running
    running.close()


def settings(many: Site, count: int, **changes: Any) -> DataSettings:
    shards = f"{many.root}/{{00000..{count - 1:05d}}}.tar"
    return data(shards, **{"workers": 2, "lanes": 8, "global_batch_size": 64, **changes})


@pytest.mark.parametrize("mode", ["resampled", "epoch"])
def test_a_run_of_10000_shards_asks_for_those_it_needs(many: Site, tmp_path: Path, mode: str) -> None:
    with loader(settings(many, 10_000, sampling={"mode": mode}, cache=str(tmp_path))) as stream:
        next(stream)
        # A lane holds two shards, and two more may be on their way.
        assert len(many.asked) <= 2 * 8 * 2 * 2, "a GET and a HEAD each"
        assert len(stream.health.sources["train"].shards) <= 8 * 2 * 2


def test_workers_take_no_more_memory_for_10000_shards_than_for_100(many: Site) -> None:
    sizes = []
    for count in (100, 10_000):
        with loader(settings(many, count)) as stream:
            taken = []
            for _ in range(2):
                for _ in range(30):
                    next(stream)
                taken.append([private_bytes(pid) for pid in stream.worker_pids()])
        assert max(after - before for before, after in zip(*taken, strict=True)) < 3 * MIB
        sizes.append(statistics.mean(taken[1]))
    assert sizes[1] - sizes[0] < 8 * MIB, sizes
