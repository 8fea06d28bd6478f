"""Processes that tests start: several ranks (gloo), and fresh interpreters."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from tests.support.forks import TIMEOUT, fork_server, wait_until


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
    with tempfile.TemporaryDirectory() as folder:
        ends = end_ranks(size, _keep_result, folder, function, args)
        faults = [f"rank {rank}:\n{end.stderr}" for rank, end in enumerate(ends) if end.code]
        assert not faults, "\n".join(faults)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def _keep_result(world: World, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    world.start()
    try:
        # Plain pickle: torch's own way of sending a tensor needs the sender to live until it is read.
        Path(folder, str(world.rank)).write_bytes(pickle.dumps(function(world, *args)))
        with contextlib.suppress(RuntimeError):  # of a group that the function has aborted
            world.barrier()  # rank 0 has the store, from which another may still read the addresses of a group
    finally:
        world.stop()
    return 0


def end_ranks(size: int, function: Callable[..., int], *args: Any, timeout: float = TIMEOUT) -> list[End]:
    """`sys.exit(function(world, *args))` on `size` ranks; how each of them ended. The function starts the world."""
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
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


def watched(world: World, body: Callable[[FailureWatch], object]) -> int:
    """The exit code of a run of ranks that are connected and know of each other's failures."""
    world.start()
    watch = FailureWatch(world)
    watch.start()
    try:
        world.barrier()
        body(watch)
    except BaseException as error:
        return watch.report(error)
    return 0


def set_timeout(seconds: float) -> None:
    """Let collectives of the default process group wait so long, once the ranks have met, which may take long."""
    import torch.distributed as dist

    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timedelta(seconds=seconds), None)


def die(place: Any, name: str, call: int) -> None:
    """The process is killed at the beginning of the `call`-th call of a function."""
    at_call(place, name, call, lambda: os.kill(os.getpid(), signal.SIGKILL))


def at_call(place: Any, name: str, call: int, act: Callable[[], object]) -> None:
    """Let `act` be called at the beginning of the `call`-th call of a function."""
    whole, count = getattr(place, name), 0

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            act()
        return whole(*args, **options)

    setattr(place, name, counting)


def launched(world: World, verb: Callable[[list[str]], int], argv: list[str]) -> int:
    """A rank of a verb, as a launcher starts it."""
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank), LOCAL_WORLD_SIZE=str(world.size)
    )
    return verb(argv)


def command_runs(mark: str) -> bool:
    """Whether a process has `mark` in its command line; one that has ended has none, reaped or not."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in process.read_bytes():
                return True
    return False


def command_ends(mark: str) -> None:
    """Wait until no process has `mark` in its command line; one that is killed has it for a moment more."""
    wait_until(lambda: not command_runs(mark))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which the ranks of one test meet and which the system gives to nobody else meanwhile.

    The socket is bound and does not listen: rank 0 may listen there, as both sockets set SO_REUSEADDR, and the port
    stays out of those that the system picks for port 0 and for outgoing connections.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as held:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _ending_rank(
    errors: str, rank: int, size: int, port: int, function: Callable[..., int], args: tuple[Any, ...]
) -> None:
    import torch

    with open(errors, "wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.exit(function(World(rank=rank, size=size, local_rank=rank, local_size=size), *args))
