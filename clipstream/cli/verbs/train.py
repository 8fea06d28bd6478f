"""The verb train, also started by `python -m clipstream.train` and by torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from clipstream.config.entry import command_line, handle_signals, run_main
from clipstream.config.validate import prepare_run
from clipstream.distributed.launch import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    if argv is None:
        handle_signals("train")
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    settings = prepare_run(command_line("train", argv).load())
    from clipstream.api.train import train_rank  # imports torch

    return run_ranks(settings.run, partial(train_rank, settings))
