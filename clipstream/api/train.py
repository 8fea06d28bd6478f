"""`clipstream.train`, and the run on one rank that it and the verb `clipstream train` share.

Settings enter; the run's folder leaves, trained by the recipe in `clipstream.train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipstream.api.run import Run
from clipstream.checkpoint.store import occupied
from clipstream.config.plan import Survey, agree, draft
from clipstream.config.settings import Config, Overrides, require_equal, settings_from
from clipstream.config.validate import prepare_run
from clipstream.distributed.launch import FailureWatch, run_embedded
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, Interrupted, Stopped
from clipstream.report.outputs import Ending
from clipstream.report.terminal import run_log
from clipstream.train import Run as RankRun
from clipstream.train import recipe
from clipstream.training.precision import same_randomness
from clipstream.utils import atomic_write
from clipstream.utils.logs import lossy_output, on_terminal, set_level

FREE_SPACE = 64 << 10  # bytes that a run writes before its first step


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
        Stopped: SIGTERM, SIGUSR1 or SIGHUP stopped the run, which is saved.
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
    folders = []

    def body(world: World, watch: FailureWatch) -> None:
        with same_randomness(world.device):
            folders.append(train_rank(found, world, watch))
        world.barrier()  # rank 0 writes the folder that every rank returns

    with on_terminal():
        written = settings_from(config, overrides, flags)
        set_level(written.settings.log.level)
        found = prepare_run(written)
        try:
            run_embedded(found.settings.run, body)
        except Stopped as stopped:
            if stopped.signal != "SIGINT":
                raise
            text = str(stopped).replace("the same command with --resume latest", 'the same call with resume="latest"')
            raise KeyboardInterrupt(text.replace("--resume latest", 'resume="latest"')) from None
    return Run(folders[0])


def train_rank(found: Survey, world: World, watch: FailureWatch) -> Path:
    """A whole run on this rank; returns the run's folder. Collective.

    Raises ClipstreamError: settings, data or training failed, or a signal stopped the run.
    """
    plan = draft(agree(found, world), world.size)
    settings, folder = plan.settings, plan.settings.run_folder
    require_equal(settings, world, found.split)
    on_exit = None if watch.embedded else watch.run_cleanups
    signals = StopSignals(deferring=False, broadcast=watch.broadcast_stop, on_exit=on_exit, announce=world.is_main)
    watch.on_stop(signals.receive)
    try:
        with signals:
            ending = None
            watch.held.enter_context(lossy_output())  # nobody has to look on while a run trains
            if world.is_main:  # the folder is locked until the process ends
                watch.held.enter_context(occupied(folder))
                atomic_write.require_space(folder, FREE_SPACE)
                watch.held.enter_context(run_log(folder))
                watch.on_end = ending = Ending(folder, lambda: watch.steps, report=settings.log.report)
            if settings.log.local:
                world.barrier()  # rank 0 has made the folder
                if world.local_rank == 0 and not world.is_main:
                    watch.held.enter_context(run_log(folder, f"out-{world.rank}.log"))
            recipe(RankRun(plan, world, folder, signals, watch, ending))
            return folder
    except Interrupted:
        raise Stopped.before_training(signals.received) from None
    except Stopped as stopped:
        stopped.signal = signals.received
        raise
    except OSError as error:
        if not atomic_write.is_full(error):
            raise
        # During training a full disk is a warning; before the first step, nothing can be written later.
        text = f"cannot write {error.filename or folder}: the disk is full"
        raise ClipstreamError(text) from error
