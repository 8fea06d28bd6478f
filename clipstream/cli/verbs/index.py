"""The verb `clipstream index SHARDS`: writes the side index of each shard, for the mode `indexed`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clipstream.config.entry import run_main
from clipstream.utils.section import own_path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if a shard could not be read."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream index",
        description="Write a small file for each shard that says what the shard holds: its samples are counted for "
        "--data.sampling.mode indexed, and local ones are opened at once. Shards that have an index and have not "
        "changed are skipped.",
    )
    parser.add_argument(
        "shards", nargs="+", metavar="SHARDS", help="tars: braces, '::', globs, pipe:, http(s):, s3:, …"
    )
    parser.add_argument(
        "--into", type=own_path, metavar="FOLDER", help="folder for the indexes (beside the shards, if they are local)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--again", action="store_true", help="also shards that have an index")
    return parser


def _main(argv: list[str]) -> int:
    parser = build_parser()
    options = parser.parse_intermixed_args(argv)  # flags may stand between shards
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers must be 1 or more, not {options.workers}")
    if options.into == "":
        parser.error("--into must name a folder")
    # Not before, so that --help and wrong usage answer at once.
    from clipstream.tools.index import make_indexes

    make_indexes(options.shards, folder=options.into, workers=options.workers, again=options.again)
    return 0
