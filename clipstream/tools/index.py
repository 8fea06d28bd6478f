"""Owns the making of side indexes: one small file a shard, by several processes, only where it is missing or stale.

It reads tars, fetching remote ones whole, and writes nothing but indexes. Never imports torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clipstream.data import folders, index
from clipstream.data.commands import end_commands
from clipstream.data.ending import END, end_with
from clipstream.data.fetching import about
from clipstream.data.manifest import kind_of
from clipstream.data.remote import ShardError, ShardStore
from clipstream.data.shards import expand, local_path, redact, scheme_of
from clipstream.data.tarstream import scan
from clipstream.errors import DataError, SettingsError

SAY_SECONDS = 5.0
TOLD = 10  # shards that a message names


class Outcome(NamedTuple):
    """What became of a shard.

    Attributes:
        url: its name.
        samples: in it; 0 where it could not be read.
        made: whether its index is new.
        fault: what is wrong with it, though its whole samples are indexed.
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
        store: brings remote and packed shards here.
        folder: for the indexes; None for beside local shards.
        again: whether an index that is there and not stale is made again.
    """

    store: ShardStore
    folder: str | None
    again: bool

    def __call__(self, url: str) -> Outcome:
        """Never raises for what is wrong with the shard."""
        place, local = index.place_of(url, self.folder), local_path(url)
        assert place is not None
        try:
            if local is not None:
                of = index.identity_of(local)
            else:  # before it is fetched: what comes in between is found stale, and not the other way round
                of = index.Identity(version=about(url, self.store.fetcher.timeout).version)
            if not self.again and (head := _fresh(place, of)) is not None:
                return Outcome(url, head.samples, fault="" if head.fault is None else str(head.fault))
            try:
                found = scan(self.store.local(url))
            finally:
                self.store.release(url)
            index.write(place, found, of)
        except FileNotFoundError as error:
            return Outcome(url, error=f"missing: {error.filename} is not there")
        except (ShardError, OSError) as error:
            return Outcome(url, error=str(error))
        return Outcome(url, len(found.samples), True, "" if found.fault is None else str(found.fault))


def make_indexes(
    specs: Sequence[str], *, folder: str | None = None, workers: int | None = None, again: bool = False
) -> int:
    """Index the shards that `specs` name; the number of samples.

    Args:
        folder: for the indexes; None for beside local shards.
        workers: processes; as many as the machine has cores, and no more than there are shards, unless given.
        again: also those whose index is there and not stale.

    Raises:
        SettingsError: nothing to index, or remote shards and no folder.
        DataError: some shards could not be indexed; the others are.
    """
    urls = _tars(specs, folder)
    store = ShardStore(None)
    done: list[Outcome] = []
    said = began = time.monotonic()
    try:
        for outcome in _outcomes(Indexer(store, folder, again), urls, workers or os.cpu_count() or 1):
            done.append(outcome)
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                print(_count(done, len(urls)), file=sys.stderr, flush=True)
    finally:
        store.close()
    faults = [f"  {redact(one.url)}: {one.fault}" for one in done if one.fault]
    if faults:
        print(f"{len(faults):,} shards are broken; their whole samples are indexed:", *_some(faults), sep="\n")
    made = sum(one.made for one in done)
    print(f"{_count(done, len(urls))}; {made:,} indexes made, {time.monotonic() - began:.1f} s", flush=True)
    if errors := [f"  {redact(one.url)}: {one.error}" for one in done if one.error]:
        raise DataError("\n".join([f"{len(errors):,} of {len(urls):,} shards could not be indexed:", *_some(errors)]))
    return sum(one.samples for one in done)


def _tars(specs: Sequence[str], folder: str | None) -> list[str]:
    urls = list(dict.fromkeys(expand(list(specs))))
    others = [url for url in urls if kind_of(url) is not None or scheme_of(url) in ("synthetic", *folders.SCHEMES)]
    if others:
        raise SettingsError(f"{redact(others[0])} needs no index: only tars do")
    remote = [url for url in urls if local_path(url) is None]
    if remote and folder is None:
        raise SettingsError(f"{redact(remote[0])} is remote: say in which folder the indexes go by --into FOLDER")
    return urls


def _fresh(place: Path, of: index.Identity) -> index.Head | None:
    try:
        head = index.read_head(place)
    except (OSError, ValueError):
        return None
    return head if head.of == of else None


def _outcomes(indexer: Indexer, urls: Sequence[str], workers: int) -> Iterator[Outcome]:
    """As they come; of one worker, in this process. Not all are asked for at once, as an end waits for what was."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
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


_indexers: list[Indexer] = []  # of a process of the pool, for its life: a host that does not answer is asked once


def _begin(indexer: Indexer, parent: int) -> None:
    _indexers.append(indexer)
    for number in (signal.SIGINT, signal.SIGTERM, END):
        signal.signal(number, _end)
    end_with(parent)


def _run(url: str) -> Outcome:
    return _indexers[0](url)


def _end(*_: object) -> None:
    """End at once, with the command that runs."""
    end_commands()
    os._exit(1)


def _count(done: Sequence[Outcome], total: int) -> str:
    return f"{len(done):,} of {total:,} shards, {sum(one.samples for one in done):,} samples"


def _some(lines: Sequence[str]) -> list[str]:
    return [*lines[:TOLD], *([f"  … and {len(lines) - TOLD:,} more"] if len(lines) > TOLD else [])]
