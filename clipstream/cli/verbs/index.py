"""The verb index: write an index of each shard, for exact epochs; see `data.staging`."""

from __future__ import annotations

import argparse
import time

from clipstream.config.entry import entry_point
from clipstream.data.staging import Indexed, make_indexes
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.executors import add_flag, checked, require_all
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
    parser, began = build_parser(), time.monotonic()
    options = parser.parse_intermixed_args(argv)  # flags may stand between shards
    if options.into == "":
        parser.error("--into must name a folder")
    if options.into:
        claim_output(options.into, "--into")
    results = make_indexes(options.shards, folder=options.into, executor=checked(options.executor), again=options.again)
    done = [one for one in results if isinstance(one, Indexed)]
    made, samples = sum(one.made for one in done), sum(one.samples for one in done)
    told = f"{len(done):,} of {len(results):,} shards, {samples:,} samples; {made:,} indexes made"
    print(f"{told}, {time.monotonic() - began:.1f} s", flush=True)
    require_all("indexing", results, "the others are indexed")
    return 0
