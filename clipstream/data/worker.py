"""Owns a worker process: it fills its part of the batches that the loader asks for, and dies with its parent.

Workers are forked, because they share the slabs, the tokenizer and the users' own objects that the parent has built,
without importing or pickling anything. They use one thread each, ignore signals that ask a run to end (the parent saves
first, and ends them), and end, with the commands that they run, when the parent is killed.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from clipstream.data.ending import END, Ended, end, end_with, listen
from clipstream.data.feeder import Feeder
from clipstream.data.slab import SlabRing
from clipstream.data.stages import IDLE
from clipstream.data.transfer import end_commands
from clipstream.errors import ClipstreamError

_HEAD = struct.Struct("<dQ")  # when, bytes that came
_STAGE = struct.Struct("<dQ12sH")  # the same, the stage, length of the sample's name
_LONGEST = 1000  # bytes of the name


class Status:
    """A worker's last word on what it is doing, in shared memory, readable also when the worker hangs or is dead."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _STAGE.size + _LONGEST)
        self._sample, self._length = "", 0  # whose name stands there

    def set(self, stage: str, sample: str) -> None:
        """Say what is being done now: a stage of at most 12 bytes."""
        # Several times for each sample, so what stands there already is not written again.
        if sample and sample is not self._sample:
            name = sample.encode(errors="backslashreplace")[:_LONGEST]
            self._sample, self._length = sample, len(name)
            self._memory[_STAGE.size : _STAGE.size + len(name)] = name
        length = self._length if sample else 0
        _STAGE.pack_into(self._memory, 0, time.monotonic(), 0, stage.encode(), length)

    def touch(self, size: int) -> None:
        """Say that what is being done goes on, and how many bytes have come."""
        _HEAD.pack_into(self._memory, 0, time.monotonic(), size)

    def get(self) -> tuple[str, float]:
        """What was said last, and how many seconds ago it was said or a byte came."""
        since, size, stage, length = _STAGE.unpack_from(self._memory, 0)
        if not since:
            return "start", 0.0
        name = self._memory[_STAGE.size : _STAGE.size + length].decode(errors="replace")
        text = f"{stage.rstrip(bytes(1)).decode()} {name}".rstrip()
        return f"{text}{f' ({size:,} bytes came)' if size else ''}", time.monotonic() - since


@dataclass
class Worker:
    """The loader's side of a worker process.

    Attributes:
        asked_last: number of the batch that it was asked for last.
        filled_last: number of the batch whose part it filled last.
        useful_at: time.monotonic() when it last said that it used a sample.
    """

    process: multiprocessing.process.BaseProcess
    connection: Connection
    status: Status
    asked_last: int = -1
    filled_last: int = -1
    useful_at: float = 0.0

    @classmethod
    def start(cls, make_feeder: Callable[[Callable[[Any], None], Status], Feeder], ring: SlabRing) -> Worker:
        """Fork a worker; `make_feeder` is called in it with what sends a report, and with its status."""
        ours, theirs = multiprocessing.Pipe()
        status = Status()
        process = multiprocessing.get_context("fork").Process(
            target=_main, args=(make_feeder, ring, theirs, ours, status, os.getpid()), daemon=True
        )
        sys.stdout.flush()
        sys.stderr.flush()
        process.start()
        theirs.close()
        return cls(process, ours, status)

    def stop(self) -> None:
        """End the process, and the commands that it runs, and wait for it."""
        self.connection.close()
        end(self.process, patience=0.2)

    def killed(self) -> str:
        """How a signal ended the process, in words; '' where none did. It may be asked from any thread."""
        try:
            # It leaves the process to the one that waits for its end.
            end = os.waitid(os.P_PID, self.process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        by_signal = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return self._end(-end.si_status) if end is not None and by_signal else ""

    def death(self) -> str:
        """How the process ended, in words."""
        self.process.join(timeout=5)
        return self._end(self.process.exitcode)

    def _end(self, code: int | None) -> str:
        doing, _ = self.status.get()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (the system kills the largest process when memory runs out)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint} while it was at: {doing}"
        return f"ended with code {code} while it was at: {doing}"


def _main(*args: Any) -> None:
    """A worker's life. Its end may be asked for at any moment, also while it ends by itself."""
    try:
        _work(*args)
    except (Ended, BrokenPipeError, ConnectionResetError):
        end_commands()
    signal.signal(END, signal.SIG_IGN)


def _work(
    make_feeder: Callable[[Callable[[Any], None], Status], Feeder],
    ring: SlabRing,
    connection: Connection,
    parents_end: Connection,
    status: Status,
    parent: int,
) -> None:
    """Wait for a batch number, fill it, report."""
    try:
        listen()
        end_with(parent)
        parents_end.close()
        gc.freeze()  # or the collector writes to all that was inherited, which is the parent's memory until then
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        feeder = make_feeder(connection.send, status)
        while True:
            step = connection.recv()
            connection.send(feeder.fill(step, ring[step]))
            feeder.trace(IDLE, "")
    except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
        return  # the loader was closed, or the parent died
    except ClipstreamError as error:
        connection.send(error)
    except BaseException:
        doing, _ = status.get()
        connection.send(RuntimeError(f"while it was at: {doing}\n{traceback.format_exc()}"))
    finally:
        end_commands()  # of threads that fetch ahead
