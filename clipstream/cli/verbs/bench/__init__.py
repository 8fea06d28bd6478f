"""The verb `clipstream bench`: how fast shards are read here, and with `bench train`, how fast a model trains
under one setting after another.

A command line enters; tables leave. `input` measures reading. `train` measures training by `ladder`: `rungs` is
the table of settings, `turns` a measurement, `open_clip_step` the step of open_clip's trainer, and `results` is what is
printed and written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clipstream.cli.verbs.bench import input, train
from clipstream.config.entry import run_main, show_help
from clipstream.errors import SettingsError, did_you_mean

OWN_FLAGS = {**input.OWN_FLAGS, **train.OWN_FLAGS}  # of both, for completion


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if argv[:1] == ["train"]:
        return 0 if show_help("bench train", argv[1:], train.OWN_FLAGS) else train.bench(argv[1:])
    if argv and not argv[0].startswith("-") and (meant := did_you_mean(argv[0], ["train"])):
        raise SettingsError(f"there is no bench {argv[0]}{meant}")
    return 0 if show_help("bench", argv, input.OWN_FLAGS) else input.bench(argv)


if __name__ == "__main__":
    sys.exit(main())
