"""What a process may use, cores and open files; and child processes: their end, on the parent's request or when it
dies, and a pool of them for independent tasks.

`CLIPSTREAM_CAPABILITIES` overrides what is found of the machine, as `bf16,cores=4` or `no-bf16`; what it does not name
is as it was found. A run can so be repeated as on another machine, and tests can have both answers.

`Ended` runs a child's `finally` blocks; a clean-up that hangs is cut short. The processes of a pool share the parent's
memory, and one that the system kills loses only its current task, which is done again: `concurrent.futures` gives up
all tasks then.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from clipstream.errors import SettingsError
from clipstream.text import printable

Result = TypeVar("Result")
CAPABILITIES = "CLIPSTREAM_CAPABILITIES"
_PR_SET_PDEATHSIG = 1
END = signal.SIGUSR2
_LAST_SECONDS = 2  # for a child to clean up
PATIENCE = 5.0  # s that a process may take to end when there is no more work
PULSE = 0.25  # s without a message after which `run` yields None
RETRIES = 2  # times that a task whose process died is done again


class Ended(BaseException):
    """Raised in a child, at any place, to end it."""


def listen() -> None:
    """In the child: let `END` raise `Ended`, and leave signals that end a whole run to the parent."""

    def end_child(*_: object) -> None:
        signal.signal(END, signal.SIG_IGN)
        signal.alarm(_LAST_SECONDS)  # kills the process if the clean-up hangs
        raise Ended

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END, end_child)


def end_with(parent: int) -> None:
    """In the child: request `END` for the time when the process `parent` dies. Raises Ended: it has died already."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), END)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END)
        if os.getppid() != parent:
            raise Ended  # it died before the request took effect
    else:
        threading.Thread(target=watch, daemon=True).start()


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """In the parent: end the child unless it ends by itself within `patience` seconds, and wait for it."""
    process.join(timeout=patience)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, END)
        process.join(timeout=_LAST_SECONDS + 1)
    if process.is_alive():
        process.kill()
        process.join()


class TaskFailure(NamedTuple):
    """Why a task has no result, such as that its processes have died, RETRIES + 1 times. Other tasks go on."""

    error: str
    full: bool = False  # whether the disk is full


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    memory: mmap.mmap  # what it is at, see `note`


_NOTE = 512  # bytes
_memory: mmap.mmap | None = None  # of this process, if it is one of a pool


def note(name: str) -> None:
    """In a process of a pool: name what it works on, which is told if the process dies; takes 0.2 µs."""
    if _memory is not None:
        _memory[:_NOTE] = name.encode(errors="backslashreplace")[:_NOTE].ljust(_NOTE, b"\0")


def run(do: Callable[[int], Result], count: int, jobs: int) -> Generator[tuple[int, Result | TaskFailure] | None]:
    """Run `count` tasks, numbered from 0, in `jobs` processes; yields (number, result) as tasks end, and None from time
    to time. Closing the generator ends the processes, also in the middle of their work.

    Raises RuntimeError: `do` raised, which is a bug.
    """
    waiting = deque(range(count))
    deaths = Counter[int]()
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
                    deaths[number] += 1
                    if deaths[number] <= RETRIES:
                        waiting.append(number)
                        continue
                    how = f"its process ended with code {worker.process.exitcode}"
                    if worker.process.exitcode == -signal.SIGKILL:
                        how = "its process was killed (the system does that when memory runs out: use fewer of them)"
                    at = worker.memory[:_NOTE].rstrip(b"\0").decode(errors="replace")
                    yield number, TaskFailure(f"{how}{f', at {printable(at)}' if at else ''}")
                    continue
                del busy[connection]
                idle.append(worker)
                if kind == "bug":
                    raise RuntimeError(value)
                yield number, value
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


def _start(do: Callable[..., Any]) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    memory = mmap.mmap(-1, _NOTE)
    own = (do, theirs, ours, os.getpid(), memory)
    process = multiprocessing.get_context("fork").Process(target=_work, args=own, daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    return _Worker(process, ours, memory)


def _work(
    do: Callable[..., Any], connection: Connection, parents_end: Connection, parent: int, memory: mmap.mmap
) -> None:
    """A process of the pool: do the tasks whose numbers arrive, until None does."""
    global _memory
    _memory = memory
    try:
        listen()
        end_with(parent)
        parents_end.close()
        while (number := connection.recv()) is not None:
            try:
                answer = "done", do(number)
            except Exception:
                answer = "bug", traceback.format_exc()
            connection.send(answer)
    except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
        return  # requested by the parent, or because it died


def cores() -> int:
    """Cores that this process may use: its affinity, and the limit of its control group (containers, Slurm)."""
    if (number := capabilities().get("cores")) is not None:
        return int(number)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """The control group's limit in cores; cgroup v2 writes 'max 100000' or '200000 100000'."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def capabilities() -> dict[str, str]:
    """What the variable says, as name -> value. Raises SettingsError: it is not written as 'bf16,cores=4'."""
    text = os.environ.get(CAPABILITIES, "")
    parts = {part.strip() for part in text.split(",")}
    if {"bf16", "no-bf16"} <= parts or not all(re.fullmatch("|(no-)?bf16|cores=[1-9][0-9]*", part) for part in parts):
        raise SettingsError(f"{CAPABILITIES} is {text!r}: expected bf16 or no-bf16, and cores=N, separated by commas")
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files to the system's: 1,024 are few, as each lane keeps shards open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
