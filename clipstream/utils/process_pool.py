"""A pool of forked processes for independent tasks.

The processes share the parent's memory. One that the system kills loses only its current task; all of them end with
the parent.
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

from clipstream.utils.process_lifetime import Ended, end, end_with, listen

Result = TypeVar("Result")
PROGRESS_INTERVAL = 0.2  # s between progress messages of a task
PATIENCE = 5.0  # s that a process may take to end when there is no more work
PULSE = 0.25  # s without a message after which `run` yields None


class Progress(NamedTuple):
    """The progress of a task, in units of its own."""

    number: int
    amount: int


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of a task."""

    number: int
    result: Result


class Crashed(NamedTuple):
    """The process of a task has died."""

    number: int
    how: str


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection


def run(
    do: Callable[[int, Callable[[int], None]], Result], count: int, jobs: int
) -> Generator[Progress | Done[Result] | Crashed | None, None, None]:
    """Run `count` tasks in `jobs` processes; yields events, and None from time to time.

    Closing the generator ends the processes, also in the middle of their work.

    Args:
        do: called in a process with a task's number, from 0, and a function that reports its progress.

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
                with contextlib.suppress(OSError):  # it has died: another one replaces it
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
                    worker.process.join(timeout=5)
                    how = f"its process ended with code {worker.process.exitcode}"
                    if worker.process.exitcode == -signal.SIGKILL:
                        how = "its process was killed (the system does that when memory runs out: use fewer of them)"
                    yield Crashed(number, how)
                    continue
                if kind == "progress":
                    yield Progress(number, value)
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


def _main(do: Callable[..., Any], connection: Connection, parents_end: Connection, parent: int) -> None:
    try:
        listen()
        end_with(parent)
        parents_end.close()
        while (number := connection.recv()) is not None:
            try:
                answer = "done", do(number, _ProgressSender(connection))
            except Exception:
                answer = "bug", traceback.format_exc()
            connection.send(answer)
    except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
        return  # requested by the parent, or because it died


class _ProgressSender:
    """Sends a task's progress to the parent, at most once in `PROGRESS_INTERVAL`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = 0.0

    def __call__(self, amount: int) -> None:
        if (now := time.monotonic()) - self._last >= PROGRESS_INTERVAL:
            self._last = now
            self._connection.send(("progress", amount))
