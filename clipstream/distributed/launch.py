"""Start and end of a process that works on a model: device, threads, process group and exit code.

The run's settings and a function enter; an exit code leaves. All verbs that have ranks use it. How the failure of one
rank reaches the others is in `failure`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.signals import SIGNALS, ending_on_signals
from clipstream.distributed.world import DUMP, World, resolve_device
from clipstream.text import counted
from clipstream.utils.logs import logger, on_terminal
from clipstream.utils.processes import cores, many_files
from clipstream.utils.torch_state import restore_matmul_precision

PR_SET_PDEATHSIG = 1
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # which torch's deterministic algorithms need
GPU_THREADS = 4  # of a rank on a GPU, whose share of the cores is for its data workers
SILENT = 20.0  # s that rank 0 waits for the others before it says so


def run_ranks(run: RunSettings, body: Callable[[World, FailureWatch], object], *, embedded: bool = False) -> int:
    """Configure torch, make the process group, and call `body` on this rank; return the exit code.

    An error on any rank ends all ranks with the code of the first cause.

    Args:
        embedded: see `run_embedded`.

    Raises SettingsError: `run.device` does not exist.
    """
    import torch

    world = World.from_env(resolve_device(run.device))
    # torchrun sets OMP_NUM_THREADS=1, which leaves the other cores idle; and the number decides the bits of sums.
    most = GPU_THREADS if world.device.startswith("cuda") else cores()
    torch.set_num_threads(run.threads or min(max(1, cores() // world.local_size), most))
    if run.deterministic:
        os.environ.setdefault(CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True)
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # Save and end when torchrun is killed: a restarted job must not find this one's ranks in its folder.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if not (embedded or faulthandler.is_enabled()):
        faulthandler.enable(2)  # NCCL's watchdog aborts the process: prints where its threads are
    watch = FailureWatch(world, debug=run.debug, embedded=embedded)
    theirs = embedded and world.size > 1 and torch.distributed.is_initialized()  # the program's own process group
    watch.owns_group = not theirs
    try:
        with announce_waiting(world), nullcontext() if embedded else ending_on_signals():
            world.start(timedelta(seconds=run.timeout))
        watch.start()
        body(world, watch)
        watch.stop()
    except BaseException as error:
        code = watch.report(error)
        if not embedded:
            return code
        if (first := watch.first_error(error)) is error:
            raise
        raise first from error
    finally:
        if not theirs:
            world.stop()
        watch.held.close()
    return 0


def run_embedded(run: RunSettings, body: Callable[[World, FailureWatch], object]) -> None:
    """`run_ranks` within a user's program: the error of the first rank that failed is raised, and not printed.

    What is set for the whole process is restored afterwards: signal handlers, torch's threads, determinism, TF32 and
    cuDNN's measuring, the current GPU, variables of torch, and the limit of open files. A process group that the
    program has made is used, and left as it is.

    Raises SettingsError: `run.device` does not exist.
    """
    import torch

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    threads, variables = torch.get_num_threads(), {name: os.environ.get(name) for name in (CUBLAS, DUMP)}
    cuda: Any = torch.cuda  # untyped in torch
    gpu = cuda.current_device() if cuda.is_initialized() else 0
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    world = World.from_env()
    try:
        with many_files(), restore_matmul_precision(), on_terminal(world.rank if world.size > 1 else None):
            run_ranks(run, body, embedded=True)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if cuda.is_initialized():
            cuda._maybe_exchange_device(gpu)  # unlike set_device, takes no memory of a GPU that is not used
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)


@contextmanager
def announce_waiting(world: World) -> Iterator[None]:
    """Print that rank 0 waits for the other ranks, if this takes longer than SILENT."""

    def say() -> None:
        logger.info(f"rank 0 waits for {counted(world.size - 1, 'other rank')} at {world.rendezvous}")

    timer = threading.Timer(SILENT, say)
    timer.daemon = True
    if world.is_main and world.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
