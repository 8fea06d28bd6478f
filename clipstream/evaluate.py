"""Owns the verb `python -m clipstream.evaluate --checkpoint RUN | --watch RUN`: help and exit code; `tools` work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli import load_or_help, run_main, wants_help
from clipstream.tools.evaluate import OWN_FLAGS, evaluate
from clipstream.tools.follow import OWN_FLAGS as WATCH_FLAGS
from clipstream.tools.follow import follow


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and give the exit code; errors for users go to stderr."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if wants_help(argv):
        for flag, meaning in {**OWN_FLAGS, **WATCH_FLAGS}.items():
            print(f"{flag:<14}{meaning}")
        load_or_help("evaluate", argv)
        return 0
    if any(token.partition("=")[0] in WATCH_FLAGS for token in argv):
        return follow(argv)
    return evaluate(argv)


if __name__ == "__main__":
    sys.exit(main())
