"""The cost of many shards to the command itself: planning them, and handing them to an executor.

    python benchmarks/executors.py [--shards 10000] [--samples 10000] [--executor ray --executor dask://HOST:8786]

Shards are sparse files that share one side index, of real samples. `index` finds every index up to date, so that its
time is that of the bookkeeping and of reading heads; `plan` is the order of an exact epoch. Each part is a process of
its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from clipstream.data.order_plan import order_plan
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, indexes
from clipstream.data.staging import make_indexes
from clipstream.storage.tar import scan
from clipstream.utils.executors import run


def make(folder: Path, shards: int, samples: int) -> None:
    """Write sparse shards of the size of one with so many samples, which have its index."""
    whole = folder / "whole.tar"
    with tarfile.open(whole, "w") as tar:
        for number in range(samples):
            for suffix in ("jpg", "txt"):
                member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                member.size = 9
                tar.addfile(member, io.BytesIO(b"123456789"))
    index, identity = folder / "whole.index", indexes.identity_of(whole)
    indexes.write(index, scan(whole), identity)
    for number in range(shards):
        path = folder / f"{number:05d}.tar"
        with path.open("wb") as file:
            file.truncate(whole.stat().st_size)
        os.utime(path, (identity.mtime or 0, identity.mtime or 0))
        os.link(index, f"{path}{indexes.SUFFIX}")


def nothing(number: int) -> int:
    """A task without work."""
    return number


def hand_over(executor: str, count: int) -> str:
    """Have an executor do tasks without work, after one that starts it."""

    def done(number: int) -> int:
        with contextlib.closing(run(nothing, number, executor)) as events:
            return sum(event is not None for event in events)

    def scheduler() -> float:
        if not executor.startswith("dask"):
            return 0.0
        with importlib.import_module("distributed").Client(executor.replace("dask:", "tcp:")) as client:
            return float(client.run_on_scheduler(time.process_time))

    done(8)
    began, mine, its = time.monotonic(), time.process_time(), scheduler()
    assert done(count) == count
    seconds, mine, its = time.monotonic() - began, time.process_time() - mine, scheduler() - its
    each = f"{1e3 * mine / count:.2f} ms of this process's CPU"
    each += f", {1e3 * its / count:.2f} ms of the scheduler's" if its else ""
    return f"{count:,} tasks in {seconds:.1f} s; a task {1e3 * seconds / count:.2f} ms, {each}"


def reindex(folder: Path, shards: int, executor: str) -> str:
    """Have `clipstream index` look at shards whose indexes are up to date."""
    began, mine = time.monotonic(), time.process_time()
    make_indexes([f"{folder}/{{00000..{shards - 1:05d}}}.tar"], executor=executor)
    seconds, mine = time.monotonic() - began, time.process_time() - mine
    each = f"{1e3 * seconds / shards:.2f} ms, {1e3 * mine / shards:.2f} ms of this process's CPU"
    return f"{seconds:.1f} s; a shard {each}"


def plan(folder: Path, shards: int) -> str:
    """List the shards, count their samples, and compute the order of an exact epoch."""
    began = time.monotonic()
    train = {"shards": f"{folder}/{{00000..{shards - 1:05d}}}.tar"}
    settings = DataSettings.model_validate({"sources": {"train": train}, "lanes": 48, "sampling": {"mode": "indexed"}})
    source = Source(SourceSettings.model_validate(train))
    order_plan(settings, [source], 0)
    return f"{time.monotonic() - began:.1f} s; {sum(source.counts or []):,} samples"


def measured(name: str, function: Callable[..., str], *arguments: object) -> None:
    """Print what a function says, and the peak memory of its process."""

    def work() -> None:
        said = function(*arguments)
        print(f"{name}: {said}; peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--executor", action="append", default=["local:2"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.shards, options.samples)
        measured("plan", plan, Path(folder), options.shards)
        for executor in options.executor:
            measured(f"{executor}, no work", hand_over, executor, options.shards)
            measured(f"{executor}, index", reindex, Path(folder), options.shards, executor)


if __name__ == "__main__":
    main()
