"""Owns the processes that do many pieces of work side by side; never knows what the work is.

They are forked, and share what the parent holds. One that the system kills costs the piece that it had; all of them
end with the parent, whatever ends that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

from clipstream.data.ending import Ended, end, end_with, listen

Result = TypeVar("Result")
TELLING = 0.2  # s between two words on how a piece gets on
PATIENCE = 5.0  # s that a process may take to end when there is no more work
PULSE = 0.25  # s without any word after which the caller gets its turn


class Came(NamedTuple):
    """A piece gets on: how far it is."""

    number: int
    amount: int


@dataclass(frozen=True)
class Done(Generic[Result]):
    """A piece is done."""

    number: int
    result: Result


class Died(NamedTuple):
    """The process that did a piece is dead."""

    number: int
    how: str


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection


def run(
    do: Callable[[int, Callable[[int], None]], Result], count: int, jobs: int
) -> Generator[Came | Done[Result] | Died | None, None, None]:
    """Do `count` pieces of work by `jobs` processes; what happens, as it happens, and None from time to time.

    To be closed: that ends the processes, also in the middle of their work.

    Args:
        do: called in a process with a piece's number, from 0, and with what tells how far it is.

    Raises:
        RuntimeError: `do` raised, which is a bug.
    """
    waiting = deque(range(count))
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = idle.pop() if idle else _start(do)
                with contextlib.suppress(OSError):  # it died meanwhile: another takes its place
                    worker.connection.send(waiting[0])
                    busy[worker.connection] = worker, waiting.popleft()
            ready = wait(list(busy), timeout=PULSE)
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, number = busy[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    del busy[connection]
                    yield Died(number, _death(worker))
                    continue
                if kind == "came":
                    yield Came(number, value)
                    continue
                del busy[connection]
                idle.append(worker)
                if kind == "bug":
                    raise RuntimeError(value)
                yield Done(number, value)
            if not ready:
                yield None
    finally:
        for worker, _ in busy.values():
            end(worker.process)
        for worker in idle:
            with contextlib.suppress(OSError):  # it is dead
                worker.connection.send(None)
        for worker in idle:
            end(worker.process, PATIENCE)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(do: Callable[..., Any]) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_main, args=(do, theirs, ours, os.getpid()), daemon=True
    )
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _death(worker: _Worker) -> str:
    worker.process.join(timeout=5)
    code = worker.process.exitcode
    if code == -signal.SIGKILL:
        return "its process was killed (the system does that when memory runs out: use fewer of them)"
    return f"its process ended with code {code}"


def _main(do: Callable[..., Any], connection: Connection, parents_end: Connection, parent: int) -> None:
    try:
        listen()
        end_with(parent)
        parents_end.close()
        while (number := connection.recv()) is not None:
            try:
                answer = "done", do(number, _Teller(connection))
            except Exception:
                answer = "bug", traceback.format_exc()
            connection.send(answer)
    except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
        return  # at its word, or because the parent died


class _Teller:
    """Tells the parent how far a piece is, now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = 0.0

    def __call__(self, amount: int) -> None:
        if (now := time.monotonic()) - self._last >= TELLING:
            self._last = now
            self._connection.send(("came", amount))
