"""The verb `clipstream index SHARDS`: writes the side index of each shard, for the mode `indexed`.

Names of shards enter; one small file per shard is written, by the workers of an executor. Indexes that exist and are
not stale are kept. Remote shards are downloaded. Never imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from clipstream.config.entry import entry_point
from clipstream.data.sources import indexes, typed_shards
from clipstream.errors import SettingsError
from clipstream.storage.download import ShardError
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan
from clipstream.text import listed_lines, printable
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.executors import SHOWN, add_flag, checked, require_all, work_off
from clipstream.utils.processes import Failed
from clipstream.utils.section import own_path


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream index",
        description="Write an index for each shard, which lists its samples. Mode indexed (--data.sampling.mode) "
        "requires indexes, and local shards with an index open faster. Shards with an up-to-date index are skipped.",
    )
    parser.add_argument(
        "shards", nargs="+", metavar="SHARDS", help="tars: braces, '::', globs, pipe:, http(s):, s3:, …"
    )
    parser.add_argument(
        "--into", type=own_path, metavar="FOLDER", help="folder for the indexes (default: beside local shards)"
    )
    add_flag(parser)
    parser.add_argument("--again", action="store_true", help="also shards that have an index")
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if a shard could not be read."""
    parser = build_parser()
    options = parser.parse_intermixed_args(argv)  # flags may stand between shards
    if options.into == "":
        parser.error("--into must name a folder")
    if options.into:
        claim_output(options.into, "--into")
    make_indexes(options.shards, folder=options.into, executor=checked(options.executor), again=options.again)
    return 0


class Indexed(NamedTuple):
    """The result for a shard."""

    samples: int
    made: bool = False  # whether its index was written now
    fault: str = ""  # of the shard, whose complete samples are indexed


def make_indexes(
    specs: Sequence[str], *, folder: str | None = None, executor: str = "local", again: bool = False
) -> int:
    """Index the shards that `specs` name; returns the number of samples.

    Args:
        folder: of the indexes; None to write them beside local shards.
        executor: what indexes the shards, as `executors.checked` has it.
        again: whether to replace indexes that are not stale.

    Raises:
        SettingsError: there is nothing to index, or no folder for the indexes of remote shards.
        DataError: some shards could not be indexed; the others are.
    """
    shards = dict(typed_shards(list(specs)))
    if others := [url for url, kind in shards.items() if not kind.tars]:
        raise SettingsError(f"{redact(others[0])}: only tars can be indexed")
    urls = list(shards)
    remote = [url for url in urls if ShardURL(url).path is None]
    if remote and folder is None:
        raise SettingsError(f"{redact(remote[0])} is remote: set a folder for the indexes with --into FOLDER")
    began, names = time.monotonic(), [printable(redact(url)) for url in urls]

    def words(done: Sequence[Indexed]) -> str:
        return f"{sum(one.samples for one in done):,} samples"

    for parent in {path.parent for url in urls if (path := indexes.path_of(url, folder)) is not None}:
        indexes.remove_drafts(parent)
    # The cache is one of each process, so that a host that does not answer is asked once.
    with contextlib.closing(ShardCache(None)) as store:
        results = work_off("indexing", partial(index_shard, urls, store, folder, again), names, executor, words)
    done = {name: one for name, one in zip(names, results, strict=True) if isinstance(one, Indexed)}
    if faults := [f"  {name}: {printable(one.fault, 500)}" for name, one in done.items() if one.fault]:
        told = f"{len(faults):,} shards are damaged; their intact samples are indexed:"
        print(told, *listed_lines(faults, SHOWN), sep="\n")
    made, took = sum(one.made for one in done.values()), time.monotonic() - began
    print(
        f"{len(done):,} of {len(urls):,} shards, {words([*done.values()])}; {made:,} indexes made, {took:.1f} s",
        flush=True,
    )
    require_all("indexing", results, "the others are indexed")
    return sum(one.samples for one in done.values())


def index_shard(
    urls: Sequence[str], store: ShardCache, folder: str | None, again: bool, number: int
) -> Indexed | Failed:
    """Index one of the shards, which `store` downloads and decompresses; its errors are part of the result.

    A damaged tar is indexed with its fault; a file that is no tar at all is an error.
    """
    url = urls[number]
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
                if head.of == identity and indexes.checked_count(head.samples, local, identity.size) == head.samples:
                    return Indexed(head.samples, fault="" if head.fault is None else str(head.fault))
        try:
            found = scan(store.local(url))
        finally:
            store.release(url)
        if found.fault is not None and (found.fault.reason == "not_a_tar" or identity.size == 0):
            return Failed(str(found.fault))
        indexes.write(path, found, identity)
    except FileNotFoundError as error:
        return Failed(f"missing: {error.filename} does not exist")
    except (ShardError, OSError) as error:
        return Failed(str(error))
    return Indexed(len(found.samples), True, "" if found.fault is None else str(found.fault))
