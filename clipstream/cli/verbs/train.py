"""The verb train: train a model, evaluate it, save it.

It is also started by `python -m clipstream.train`, and by torchrun.
"""

from __future__ import annotations

from functools import partial

from clipstream.config.command_line import CommandLine, Verb
from clipstream.config.help import THEMES
from clipstream.config.validate import prepare_run
from clipstream.distributed.launch import run_ranks
from clipstream.utils.logs import loading
from clipstream.utils.section import Section


class TrainFlags(Section):
    """Train, evaluate and save a model."""


def run(command: CommandLine[TrainFlags]) -> int:
    written = command.load()
    loading.show("loading the data")
    found = prepare_run(written)
    loading.show("loading torch")
    from clipstream.train import train_rank  # imports torch

    return run_ranks(found.settings.run, partial(train_rank, found))


main = Verb("train", TrainFlags, run, tuple(THEMES))
