"""The verb `python -m clipstream.index SHARDS`: notes what each shard holds, for the mode `indexed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from clipstream.cli import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Index shards, and give the exit code: 0, 2 for wrong usage, 3 where a shard could not be read."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m clipstream.index",
        description="Write a small file for each shard that says what the shard holds: its samples are counted for "
        "--data.sampling.mode indexed, and local ones are opened at once. What is indexed already, and has not "
        "changed, is passed over.",
    )
    parser.add_argument(
        "shards", nargs="+", metavar="SHARDS", help="tars: braces, '::', globs, pipe:, http(s):, s3:, …"
    )
    parser.add_argument(
        "--into", metavar="FOLDER", help="folder for the indexes (beside the shards, if they are local)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--again", action="store_true", help="also what is indexed already")
    options = parser.parse_intermixed_args(argv)  # flags may stand between shards
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers must be 1 or more, not {options.workers}")
    # Late, so that --help and wrong usage answer at once.
    from clipstream.tools.index import make_indexes

    make_indexes(options.shards, folder=options.into, workers=options.workers, again=options.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
