"""Owns the verb `python -m clipstream.bench --train-data SHARDS`: its help and its exit code; `tools` do the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli import load_or_help, run_main, wants_help
from clipstream.tools.bench import OWN_FLAGS, bench


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and give the exit code; errors for users go to stderr."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if wants_help(argv):
        for flag, meaning in OWN_FLAGS.items():
            print(f"{flag:<14}{meaning}")
        load_or_help("bench", argv)
        return 0
    return bench(argv)


if __name__ == "__main__":
    sys.exit(main())
