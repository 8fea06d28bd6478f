"""The verb train, also started by `python -m clipstream.train` and by torchrun."""

from __future__ import annotations

from functools import partial

from clipstream.config.entry import command_line, entry_point
from clipstream.config.validate import prepare_run
from clipstream.distributed.launch import run_ranks
from clipstream.utils.logs import loading


@entry_point
def main(argv: list[str]) -> int:
    written = command_line("train", argv).load()
    loading.show("loading the data")
    found = prepare_run(written)
    loading.show("loading torch")
    from clipstream.train import train_rank  # imports torch

    return run_ranks(found.settings.run, partial(train_rank, found))
