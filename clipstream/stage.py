"""Owns the verb `python -m clipstream.stage FOLDER`: its help and its exit code; `tools` do the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli import load_or_help, run_main, wants_help
from clipstream.tools.stage import OWN_FLAGS, stage


def main(argv: Sequence[str] | None = None) -> int:
    """Stage, and give the exit code; errors for users go to stderr."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if wants_help(argv):
        print("Copies the shards of a run's sources and evaluators into FOLDER, and says how the run reads them there.")
        for flag, meaning in OWN_FLAGS.items():
            print(f"{flag:<14}{meaning}")
        print()
        load_or_help("stage FOLDER", argv)
        return 0
    return stage(argv)


if __name__ == "__main__":
    sys.exit(main())
