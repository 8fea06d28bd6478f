"""The verb train, also started by `python -m clipstream.train` and by torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from clipstream.config.entry import handle_signals, load_or_help, run_main
from clipstream.config.validate import prepare_run
from clipstream.distributed.launch import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    if argv is None:
        handle_signals("train")
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    settings = load_or_help("train", argv)
    if settings is None:
        return 0
    settings = prepare_run(settings)
    from clipstream.api.train import train_rank  # imports torch

    return run_ranks(settings.run, partial(train_rank, settings))
