"""The verb `clipstream stage FOLDER`: copies shards to this machine (see `tools.stage`)."""

from __future__ import annotations

from collections.abc import Sequence

from clipstream.config.entry import run_main, show_help
from clipstream.tools.stage import OWN_FLAGS, stage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(lambda argv: 0 if show_help("stage", argv, OWN_FLAGS) else stage(argv), argv)
