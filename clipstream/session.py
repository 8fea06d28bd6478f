"""Owns the start and the end of a process that works on a model: device, threads, process group, the end by an error.

It is the same for every verb that has ranks. It never reads settings from anywhere and knows no model.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from clipstream.errors import SettingsError
from clipstream.failure import FailureWatch
from clipstream.training.settings import RunSettings
from clipstream.world import World

PR_SET_PDEATHSIG = 1
SILENT = 20.0  # s that rank 0 waits for the others without a word


def run_ranks(run: RunSettings, body: Callable[[World, FailureWatch], None]) -> int:
    """Set torch up, make the process group, call `body` on this rank; the exit code.

    An error on any rank ends all ranks with the code of the first cause.

    Raises:
        SettingsError: `run.device` is not there.
    """
    device = _device(run.device)
    world = World.from_env(device)
    _set_up_torch(run, world)
    _end_with_launcher()
    watch = FailureWatch(world, debug=run.debug)
    try:
        with _told_waiting(world):
            world.start(timedelta(seconds=run.timeout))
        watch.start()
        body(world, watch)
        watch.stop()
    except BaseException as error:
        return watch.report(error)
    finally:
        world.stop()
    return 0


@contextmanager
def _told_waiting(world: World) -> Iterator[None]:
    """Say that the other ranks are waited for, where they take long."""

    def say() -> None:
        others = f"{world.size - 1} other rank{'s' * (world.size > 2)}"
        print(f"rank 0 waits for {others} at {world.meeting_point}", file=sys.stderr, flush=True)

    timer = threading.Timer(SILENT, say)
    timer.daemon = True
    if world.is_main and world.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_with_launcher() -> None:
    """Save and end when torchrun is killed: a job that starts anew must not meet this one's ranks in its folder."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _device(name: str) -> str:
    """The device that the settings name; 'auto' is a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(
            f"run.device is {name!r}, but torch sees no GPU here: use --device cpu, or look at nvidia-smi"
        )
    return name


def _set_up_torch(run: RunSettings, world: World) -> None:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun sets OMP_NUM_THREADS=1, which would leave the other cores idle, and the count decides the bits of sums.
    torch.set_num_threads(run.threads or max(1, cores // world.local_size))
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
