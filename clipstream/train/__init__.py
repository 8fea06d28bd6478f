"""The verb `python -m clipstream.train --config configs/quickstart.yaml`, and the function `clipstream.train`.

A command line, or settings in Python, enter; a run's folder leaves. Settings are checked and missing weights are found
here, before torch is imported; `run` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from clipstream.config.entry import handle_signals, load_or_help, make_callable, run_main
from clipstream.config.python_settings import Config, Overrides, settings_from
from clipstream.config.settings import Settings, with_known_epoch
from clipstream.config.validate import validate_run
from clipstream.distributed.launch import run_embedded, run_ranks
from clipstream.distributed.world import World
from clipstream.errors import Stopped
from clipstream.losses.settings import chosen_loss_type
from clipstream.train.run import train_rank
from clipstream.utils.logs import on_terminal, set_level

if TYPE_CHECKING:
    from clipstream.api.run import Run
    from clipstream.distributed.failure import FailureWatch


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    if argv is None:
        handle_signals("train")
    return run_main(_main, argv)


def train(config: Config = None, overrides: Overrides = None, /, **flags: Any) -> Run:
    """Train a model, evaluate it and save it, as `clipstream train` does, in this process.

    The process may be a script, which needs no `if __name__ == "__main__"`, a notebook, or a rank of torchrun: then
    every rank calls it, and gets the run once rank 0 has written all of its files. Ctrl-C, or "interrupt" in a
    notebook, saves the last completed step and raises KeyboardInterrupt; a second one ends at once. Signal handlers,
    log handlers, torch's threads and random states are afterwards what they were before.

    Args:
        config: a YAML file, several of them, a mapping of sections, or `Settings`.
        overrides: keys of the settings and their values, which replace those of `config`: `{"optim.lr": 1e-3}`, or
            nested as in YAML. A class of your own may stand where settings take `module:Name`.
        flags: short flags of the command line, with underscores: `train_data="shards/*.tar"`, `batch_size=256`. They
            replace values of `config` and `overrides`; None stands for a flag that is not given.

    Returns:
        The run: its folder, metrics, checkpoints and report.

    Raises:
        SettingsError: the settings are wrong; the message has a line for each mistake.
        DataError: the data have no usable sample, fail too often or stall.
        DivergedError: the loss is not finite.
        Stopped: SIGTERM or SIGUSR1 stopped the run, which is saved.
        KeyboardInterrupt: Ctrl-C stopped the run, which is saved if a step was completed.

    Examples:
        >>> import clipstream
        >>> run = clipstream.train(
        ...     "my.yaml", {"optim.lr": 1e-3}, train_data="shards/*.tar", steps=3, name="first"
        ... )
        >>> run
        Run('runs/first')
        >>> [line["step"] for line in run.metrics]
        [3]
        >>> run.latest
        PosixPath('runs/first/checkpoints/step_00000003')
    """
    from clipstream.api.run import Run
    from clipstream.training.precision import same_randomness

    with on_terminal():
        settings = settings_from(config, overrides, flags)
        set_level(settings.log.level)
        settings, folders = _prepared(settings), []

        def body(world: World, watch: FailureWatch) -> None:
            with same_randomness(world.device):
                folders.append(train_rank(settings, world, watch))
            world.barrier()  # rank 0 writes the folder that every rank returns

        try:
            run_embedded(settings.run, body)
        except Stopped as stopped:
            if stopped.signal != "SIGINT":
                raise
            text = str(stopped).replace("the same command with --resume latest", 'the same call with resume="latest"')
            raise KeyboardInterrupt(text.replace("--resume latest", 'resume="latest"')) from None
    return Run(folders[0])


def _main(argv: list[str]) -> int:
    settings = load_or_help("train", argv)
    if settings is None:
        return 0
    settings = _prepared(settings)
    return run_ranks(settings.run, partial(train_rank, settings))


def _prepared(settings: Settings) -> Settings:
    """The settings with the length of an epoch, checked together with the files that they name.

    Raises SettingsError: they are wrong, or a model's files are missing.
    """
    settings = with_known_epoch(settings)
    validate_run(settings, World.from_env())
    from clipstream.models.pretrained import preflight

    loss_type, ask = chosen_loss_type(settings.loss), World.from_env().local_rank == 0
    teacher = settings.distill.teacher(settings.model.cache_dir)
    preflight(settings.model, settings.tokenizer, loss_type=loss_type, teacher=teacher, ask=ask)
    return settings


make_callable(__name__)
