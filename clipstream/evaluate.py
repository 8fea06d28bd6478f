"""The verb `python -m clipstream.evaluate --checkpoint RUN | --watch RUN` (see `tools.evaluate` and `tools.watch`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli.main import run_main, show_help
from clipstream.tools.evaluate import OWN_FLAGS, evaluate
from clipstream.tools.watch import OWN_FLAGS as WATCH_FLAGS
from clipstream.tools.watch import follow


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if show_help("evaluate", argv, {**OWN_FLAGS, **WATCH_FLAGS}):
        return 0
    if any(token.partition("=")[0] in WATCH_FLAGS for token in argv):
        return follow(argv)
    return evaluate(argv)


if __name__ == "__main__":
    sys.exit(main())
