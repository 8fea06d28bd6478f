"""Making of side indexes: names of shards enter; one small file per shard is written by several processes.

Indexes that exist and are not stale are kept. Remote shards are downloaded. Never imports torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

from clipstream.data.shard_url import local_path, redact
from clipstream.data.sources import side_index
from clipstream.data.sources.registry import typed_shards
from clipstream.data.tar import scan
from clipstream.data.transport.downloader import file_info
from clipstream.data.transport.pipe import end_commands
from clipstream.data.transport.shard_cache import ShardCache
from clipstream.data.transport.transfer import ShardError
from clipstream.errors import DataError, SettingsError
from clipstream.utils.escape import printable
from clipstream.utils.logs import logger
from clipstream.utils.process_lifetime import END, end_with

REPORT_SECONDS = 5.0
LISTED = 10  # shards that a message names


class Outcome(NamedTuple):
    """The result for a shard.

    Attributes:
        url: of the shard.
        samples: in the shard; 0 if it could not be read.
        made: whether its index was written now.
        fault: of the shard, whose complete samples are indexed.
        error: why it has no index.
    """

    url: str
    samples: int = 0
    made: bool = False
    fault: str = ""
    error: str = ""


@dataclass(frozen=True)
class Indexer:
    """Makes the index of one shard.

    Attributes:
        store: downloads and decompresses shards.
        folder: of the indexes; None to write them beside local shards.
        again: whether to replace indexes that are not stale.
    """

    store: ShardCache
    folder: str | None
    again: bool

    def __call__(self, url: str) -> Outcome:
        """Index a shard; its errors are part of the result."""
        path, local = side_index.path_of(url, self.folder), local_path(url)
        assert path is not None
        try:
            if local is not None:
                identity = side_index.identity_of(local)
            else:  # before the download, so that a change in between makes the index stale
                identity = side_index.Identity(version=file_info(url, self.store.fetcher.timeout).version)
            if not self.again:
                with contextlib.suppress(OSError, ValueError):
                    head = side_index.read_head(path)
                    if head.of == identity:
                        return Outcome(url, head.samples, fault="" if head.fault is None else str(head.fault))
            try:
                found = scan(self.store.local(url))
            finally:
                self.store.release(url)
            side_index.write(path, found, identity)
        except FileNotFoundError as error:
            return Outcome(url, error=f"missing: {error.filename} is not there")
        except (ShardError, OSError) as error:
            return Outcome(url, error=str(error))
        return Outcome(url, len(found.samples), True, "" if found.fault is None else str(found.fault))


def make_indexes(
    specs: Sequence[str], *, folder: str | None = None, workers: int | None = None, again: bool = False
) -> int:
    """Index the shards that `specs` name; returns the number of samples.

    Args:
        folder: of the indexes; None to write them beside local shards.
        workers: number of processes, at most one per shard; the number of cores unless given.
        again: whether to replace indexes that are not stale.

    Raises:
        SettingsError: there is nothing to index, or no folder for the indexes of remote shards.
        DataError: some shards could not be indexed; the others are.
    """
    shards = dict(typed_shards(list(specs)))
    if others := [url for url, kind in shards.items() if not kind.tars]:
        raise SettingsError(f"{redact(others[0])} needs no index: only tars do")
    remote = [url for url in shards if local_path(url) is None]
    if remote and folder is None:
        raise SettingsError(f"{redact(remote[0])} is remote: say in which folder the indexes go by --into FOLDER")
    urls = list(shards)
    store = ShardCache(None)
    done: list[Outcome] = []
    reported = began = time.monotonic()
    try:
        for outcome in _outcomes(Indexer(store, folder, again), urls, workers or os.cpu_count() or 1):
            done.append(outcome)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                logger.info(_count(done, len(urls)))
    finally:
        store.close()
    faults = [_line(one.url, one.fault) for one in done if one.fault]
    if faults:
        print(f"{len(faults):,} shards are broken; their whole samples are indexed:", *_some(faults), sep="\n")
    made = sum(one.made for one in done)
    print(f"{_count(done, len(urls))}; {made:,} indexes made, {time.monotonic() - began:.1f} s", flush=True)
    if errors := [_line(one.url, one.error) for one in done if one.error]:
        raise DataError("\n".join([f"{len(errors):,} of {len(urls):,} shards could not be indexed:", *_some(errors)]))
    return sum(one.samples for one in done)


def _outcomes(indexer: Indexer, urls: Sequence[str], workers: int) -> Iterator[Outcome]:
    """The results as they are done; with one worker, in this process.

    Few shards are submitted at a time, as the pool's exit waits for those.
    """
    context = multiprocessing.get_context("spawn")  # a forked process with threads may hang
    workers = min(workers, len(urls))
    if workers == 1:
        yield from map(indexer, urls)
        return
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(indexer, os.getpid())) as pool:
        rest = iter(urls)
        running = {pool.submit(_run, url) for _, url in zip(range(2 * workers), rest, strict=False)}
        try:
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_run, url) for _, url in zip(ended, rest, strict=False)}
                yield from (one.result() for one in ended)
        except BrokenProcessPool as error:
            raise DataError("a process was killed while it indexed: the next start goes on where it ended") from error


_indexers: list[Indexer] = []  # one per process of the pool, so that a host that does not answer is asked once


def _begin(indexer: Indexer, parent: int) -> None:
    _indexers.append(indexer)
    for number in (signal.SIGINT, signal.SIGTERM, END):
        signal.signal(number, _end)
    end_with(parent)


def _run(url: str) -> Outcome:
    return _indexers[0](url)


def _end(*_: object) -> None:
    """Exit at once, and end the running command."""
    end_commands()
    os._exit(1)


def _count(done: Sequence[Outcome], total: int) -> str:
    return f"{len(done):,} of {total:,} shards, {sum(one.samples for one in done):,} samples"


def _line(url: str, what: str) -> str:
    return f"  {printable(redact(url))}: {printable(what, 500)}"


def _some(lines: Sequence[str]) -> list[str]:
    return [*lines[:LISTED], *([f"  … and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else [])]
