"""The verb `python -m clipstream.bench --train-data SHARDS`: measures how fast shards are read (see `tools.bench`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli.main import run_main, show_help
from clipstream.tools.bench import OWN_FLAGS, bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(lambda argv: 0 if show_help("bench", argv, OWN_FLAGS) else bench(argv), argv)


if __name__ == "__main__":
    sys.exit(main())
