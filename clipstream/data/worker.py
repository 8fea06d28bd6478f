"""Owns a worker process: it fills its part of the batches that the loader asks for, and dies with its parent.

Workers are forked, because they share the slabs, the tokenizer and the users' own objects that the parent has built,
without importing or pickling anything. They use one thread each, ignore signals that ask a run to end (the parent saves
first, and ends them), and end, with the commands that they run, when the parent is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from clipstream.data.commands import end_commands
from clipstream.data.ending import END, Ended, end, end_with, listen
from clipstream.data.feeder import Feeder
from clipstream.data.slab import SlabRing
from clipstream.data.stages import IDLE, Stopwatch
from clipstream.errors import ClipstreamError

PATIENCE = 0.2  # s for a worker to see by itself that its loader was closed


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
    watch: Stopwatch
    asked_last: int = -1
    filled_last: int = -1
    useful_at: float = 0.0

    @classmethod
    def start(cls, make_feeder: Callable[[Callable[[Any], None], Stopwatch], Feeder], ring: SlabRing) -> Worker:
        """Fork a worker; `make_feeder` is called in it with what sends a report, and with its stopwatch."""
        ours, theirs = multiprocessing.Pipe()
        watch = Stopwatch()
        process = multiprocessing.get_context("fork").Process(
            target=_main, args=(make_feeder, ring, theirs, ours, watch, os.getpid()), daemon=True
        )
        sys.stdout.flush()
        sys.stderr.flush()
        process.start()
        theirs.close()
        return cls(process, ours, watch)

    def stop(self) -> None:
        """End the process, and the commands that it runs, and wait for it."""
        self.connection.close()
        end(self.process, PATIENCE)

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
        doing, _ = self.watch.doing()
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
    make_feeder: Callable[[Callable[[Any], None], Stopwatch], Feeder],
    ring: SlabRing,
    connection: Connection,
    parents_end: Connection,
    watch: Stopwatch,
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
        feeder = make_feeder(connection.send, watch)
        while True:
            step = connection.recv()
            connection.send(feeder.fill(step, ring[step]))
            watch.begin(IDLE)
    except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
        return  # the loader was closed, or the parent died
    except ClipstreamError as error:
        connection.send(error)
    except BaseException:
        doing, _ = watch.doing()
        connection.send(RuntimeError(f"while it was at: {doing}\n{traceback.format_exc()}"))
    finally:
        end_commands()  # of threads that fetch ahead
