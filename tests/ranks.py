"""Owns the processes that tests start: several real ranks (gloo), and fresh interpreters; never used by the package."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipstream.world import World

ROOT = Path(__file__).parent.parent
TIMEOUT = 900.0  # s; a busy machine is fifty times slower than an idle one, and only a failure waits this long


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code (negative: the signal that killed it) and what it wrote to stderr."""

    code: int
    stderr: str


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(world, *args)` on `size` ranks, each a process of its own; their results in rank order.

    The function stands at the top of a test module, so that a fresh process finds it.
    """
    if size == 1:
        return [function(World(), *args)]
    context, port = _context(), free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(theirs, rank, size, port, function, args), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT), f"rank {rank} gave no result in {TIMEOUT} s"
            fault, value = pipe.recv()
            assert fault is None, f"rank {rank}:\n{fault}"
            results.append(pickle.loads(value))
        return results
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def end_ranks(size: int, function: Callable[..., int], *args: Any, timeout: float = TIMEOUT) -> list[End]:
    """`sys.exit(function(world, *args))` on `size` ranks; how each of them ended. The function starts the world."""
    context, port = _context(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, str(rank)) for rank in range(size)]
        processes = [
            context.Process(target=_ending_rank, args=(str(errors[rank]), rank, size, port, function, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        try:
            assert all(process.exitcode is not None for process in processes), "a rank did not end"
            return [
                End(process.exitcode or 0, error.read_text()) for process, error in zip(processes, errors, strict=True)
            ]
        finally:
            for process in processes:
                process.kill()


def python(code: str, *arguments: str, **env: str) -> str:
    """What code prints in a fresh process, where the Hub's settings are read from the environment as users set them."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**clean, **env}, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_runs(mark: str) -> bool:
    """Whether a process has `mark` in its command line; one that has ended has none, reaped or not."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in process.read_bytes():
                return True
    return False


def free_port() -> int:
    """A port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # Imported once there, not once a rank: open_clip takes seconds, and so does dynamo, which DDP imports.
    context.set_forkserver_preload(["torch", "torch._dynamo", "clipstream.world", "clipstream.model.towers"])
    return context


def _world(rank: int, size: int, port: int) -> World:
    import torch

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def _rank(pipe: Any, rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = _world(rank, size, port)
    try:
        world.start()
        # Plain pickle: torch's own way of sending a tensor needs the sender to live until it is read.
        pipe.send((None, pickle.dumps(function(world, *args))))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        world.stop()


def _ending_rank(
    errors: str, rank: int, size: int, port: int, function: Callable[..., int], args: tuple[Any, ...]
) -> None:
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(function(_world(rank, size, port), *args))
