"""The verb index: write an index of each shard, for exact epochs."""

from __future__ import annotations

import time

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, switch
from clipstream.data.staging import Indexed, make_indexes
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.executors import MEANING, check_executor, require_all
from clipstream.utils.section import Section


class IndexFlags(Section):
    """Write an index for each shard, which lists its samples. Mode indexed (--data.sampling.mode) requires indexes, and
    local shards with an index open faster. Shards with an up-to-date index are skipped.
    """

    shards: list[str] = argument("tars: braces, '::', globs, pipe:, http(s):, s3:, …")
    into: OutPath | None = flag("folder for the indexes (default: beside local shards)", form="FOLDER")
    executor: str | None = flag(MEANING, form="EXECUTOR")
    again: bool = switch("also shards that have an index")


def run(command: CommandLine[IndexFlags]) -> None:
    """Raises SettingsError: wrong usage. Raises DataError: a shard could not be read."""
    own, began = command.own, time.monotonic()
    if own.into:
        claim_output(own.into, "--into")
    results = make_indexes(own.shards, folder=own.into, executor=check_executor(own.executor), again=own.again)
    done = [one for one in results if isinstance(one, Indexed)]
    made, samples = sum(one.made for one in done), sum(one.samples for one in done)
    told = f"{len(done):,} of {len(results):,} shards, {samples:,} samples; {made:,} indexes made"
    print(f"{told}, {time.monotonic() - began:.1f} s", flush=True)
    require_all("indexing", results, "the others are indexed")


main = Verb("index", IndexFlags, run)
