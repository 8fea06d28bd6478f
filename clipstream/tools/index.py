"""Making of side indexes: names of shards enter; one small file per shard is written by several processes.

Indexes that exist and are not stale are kept. Remote shards are downloaded. Never imports torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clipstream.data.sources import indexes
from clipstream.data.sources.registry import typed_shards
from clipstream.distributed.capabilities import cores
from clipstream.errors import DataError, SettingsError
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan
from clipstream.storage.transfer import ShardError
from clipstream.text import printable
from clipstream.utils.logs import logger
from clipstream.utils.processes import Crashed, Done, run

REPORT_SECONDS = 5.0
LISTED = 10  # shards that a message names


class Outcome(NamedTuple):
    """The result for a shard."""

    url: str  # of the shard
    samples: int = 0  # in the shard; 0 if it could not be read
    made: bool = False  # whether its index was written now
    fault: str = ""  # of the shard, whose complete samples are indexed
    error: str = ""  # why it has no index


def make_indexes(
    specs: Sequence[str], *, folder: str | None = None, workers: int | None = None, again: bool = False
) -> int:
    """Index the shards that `specs` name; returns the number of samples.

    Args:
        folder: of the indexes; None to write them beside local shards.
        workers: number of processes; the number of cores unless given.
        again: whether to replace indexes that are not stale.

    Raises:
        SettingsError: there is nothing to index, or no folder for the indexes of remote shards.
        DataError: some shards could not be indexed; the others are.
    """
    shards = dict(typed_shards(list(specs)))
    if others := [url for url, kind in shards.items() if not kind.tars]:
        raise SettingsError(f"{redact(others[0])} needs no index: only tars do")
    remote = [url for url in shards if ShardURL(url).path is None]
    if remote and folder is None:
        raise SettingsError(f"{redact(remote[0])} is remote: say in which folder the indexes go by --into FOLDER")
    urls = list(shards)
    store = ShardCache(None)  # of each process, so that a host that does not answer is asked once
    done: list[Outcome] = []
    reported = began = time.monotonic()

    def index(number: int, report: Callable[[int], None]) -> Outcome:
        return index_shard(urls[number], store, folder, again)

    def summary() -> str:
        return f"{len(done):,} of {len(urls):,} shards, {sum(one.samples for one in done):,} samples"

    try:
        with contextlib.closing(run(index, len(urls), workers or cores())) as events:
            for event in events:
                if isinstance(event, Done):
                    done.append(event.result)
                elif isinstance(event, Crashed):
                    done.append(Outcome(urls[event.number], error=event.how))
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    logger.info(summary())
    finally:
        store.close()
    if faults := [_line(one.url, one.fault) for one in done if one.fault]:
        print(f"{len(faults):,} shards are broken; their whole samples are indexed:", *_some(faults), sep="\n")
    made = sum(one.made for one in done)
    print(f"{summary()}; {made:,} indexes made, {time.monotonic() - began:.1f} s", flush=True)
    if errors := [_line(one.url, one.error) for one in done if one.error]:
        raise DataError("\n".join([f"{len(errors):,} of {len(urls):,} shards could not be indexed:", *_some(errors)]))
    return sum(one.samples for one in done)


def index_shard(url: str, store: ShardCache, folder: str | None, again: bool) -> Outcome:
    """Index a shard, which `store` downloads and decompresses; its errors are part of the result.

    A damaged tar is indexed with its fault; a file that is no tar at all is an error.
    """
    path, local = indexes.path_of(url, folder), ShardURL(url).path
    assert path is not None
    try:
        if local is not None:
            identity = indexes.identity_of(local)
        else:  # before the download, so that a change in between makes the index stale
            identity = indexes.Identity(version=store.fetcher.info(ShardURL(url)).version)
        if not again:
            with contextlib.suppress(OSError, ValueError):
                head = indexes.read_head(path)
                if head.of == identity:
                    return Outcome(url, head.samples, fault="" if head.fault is None else str(head.fault))
        try:
            found = scan(store.local(url))
        finally:
            store.release(url)
        if found.fault is not None and (found.fault.reason == "not_a_tar" or identity.size == 0):
            return Outcome(url, error=str(found.fault))
        indexes.write(path, found, identity)
    except FileNotFoundError as error:
        return Outcome(url, error=f"missing: {error.filename} is not there")
    except (ShardError, OSError) as error:
        return Outcome(url, error=str(error))
    return Outcome(url, len(found.samples), True, "" if found.fault is None else str(found.fault))


def _line(url: str, what: str) -> str:
    return f"  {printable(redact(url))}: {printable(what, 500)}"


def _some(lines: Sequence[str]) -> list[str]:
    return [*lines[:LISTED], *([f"  … and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else [])]
