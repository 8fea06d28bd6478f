"""Workers: each fills its part of the batches that the loader asks for; and how many there are where the settings leave
it open (`data.workers: auto`).

Worker processes are forked, because they share the buffers, the tokenizer and the user's own objects that the parent
has built, without importing or pickling anything. They use one thread each and ignore the signals that ask a run to
end: the parent saves first, then ends them. When the parent is killed, they end too, with the commands that they run.
With `workers: 0`, and for stored features, a thread of the training process is the only worker.

A GPU's rank gets a worker for each of its cores but one, which the training process needs; on a CPU, where the model
takes the cores itself, two. The order of samples does not depend on the number. Workers that wait for a slow disk may
be worth more than that: `clipstream bench` measures several numbers.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol

from clipstream.data.loader.health import FilledPart, WorkerReport
from clipstream.data.loader.stage_timing import IDLE, OPEN, Stopwatch
from clipstream.data.settings import MAX_AUTO_WORKERS, DataSettings
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, DataError
from clipstream.storage.schemes import end_command, end_commands
from clipstream.text import counted
from clipstream.utils.cores import cores
from clipstream.utils.processes import END, Ended, end, end_with, listen

ON_CPU = 2  # workers of a rank whose model is on the CPU
PATIENCE = 0.2  # s that a worker process has to notice that its loader was closed
CLOSE_SECONDS = 5.0  # to wait for a worker thread to end


class Filler(Protocol):
    """Fills a worker's part of a batch in its buffer."""

    def __call__(self, step: int) -> FilledPart:
        """Fill the part of batch number `step`."""
        ...

    def close(self) -> None:
        """Release what it holds, in the worker."""


MakeFiller = Callable[[Callable[[WorkerReport], None], Stopwatch], Filler]  # (report, stopwatch) -> filler


class Worker:
    """The loader's side of a worker.

    Attributes:
        connection: can be read when `receive` has something.
        stopwatch: names the current stage of the worker.
        asked_last: number of the last batch that it was asked for.
        filled_last: number of the last batch whose part it filled.
        useful_at: time.monotonic() when it last reported a used sample.
        name: for messages.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name, self.stopwatch = connection, name, Stopwatch()
        self.asked_last = self.filled_last = -1
        self.useful_at = 0.0

    def ask(self, step: int) -> None:
        """Ask for the part of batch number `step`."""
        self.asked_last = step

    def receive(self) -> WorkerReport:
        """The next report, of type FilledPart where a part is filled. Raises what the worker raised."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the worker and the commands that it runs, and wait for it."""

    def describe_kill(self) -> str:
        """How a signal ended the worker's process, in words; '' if none did. May be called from any thread."""
        return ""

    def quiet(self, since: float, now: float) -> float:
        """Seconds from `since` to `now` in which the worker neither used a sample nor received bytes of a shard."""
        doing, age = self.stopwatch.doing()
        quiet = now - max(since, self.useful_at)
        return min(quiet, age) if doing.startswith(OPEN) else quiet


class ThreadWorker(Worker):
    """A worker in a thread of this process."""

    def __init__(self, make: MakeFiller) -> None:
        ours, self._bell = multiprocessing.Pipe(duplex=False)
        super().__init__(ours, "this process")
        self._steps: SimpleQueue[int | None] = SimpleQueue()
        self._reports: deque[WorkerReport | BaseException] = deque()
        self._closed = False
        filler = make(self._report, self.stopwatch)
        self.thread = threading.Thread(target=self._run, args=(filler,), daemon=True)
        self.thread.start()

    def ask(self, step: int) -> None:
        super().ask(step)
        self._steps.put(step)

    def receive(self) -> WorkerReport:
        self.connection.recv_bytes()
        report = self._reports.popleft()
        if isinstance(report, BaseException):
            raise report
        return report

    def stop(self) -> None:
        self._closed = True
        self._steps.put(None)
        limit = time.monotonic() + CLOSE_SECONDS
        while self.thread is not threading.current_thread() and self.thread.is_alive() and time.monotonic() < limit:
            end_command(self.thread.ident)  # repeatedly: it may just have started one
            self.thread.join(0.02)
        if not self.thread.is_alive():
            self.connection.close()
            self._bell.close()

    def _report(self, report: WorkerReport | BaseException) -> None:
        if self._closed:
            raise Ended
        self._reports.append(report)
        self._bell.send_bytes(b"")

    def _run(self, filler: Filler) -> None:
        with contextlib.suppress(Ended):
            try:
                while (step := self._steps.get()) is not None and not self._closed:
                    self._report(filler(step))
                    self.stopwatch.begin(IDLE)
            except Ended:
                raise
            except BaseException as error:
                self._report(error)
            finally:
                filler.close()


class ProcessWorker(Worker):
    """A worker process.

    Args:
        make: is called in it.
        number: of the worker.
    """

    def __init__(self, make: MakeFiller, number: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        super().__init__(ours, "")
        self.process = multiprocessing.get_context("fork").Process(
            target=_run, args=(make, theirs, ours, self.stopwatch, os.getpid()), daemon=True
        )
        sys.stdout.flush()
        sys.stderr.flush()
        self.process.start()
        self.name = f"worker {number} (pid {self.process.pid})"
        theirs.close()

    def ask(self, step: int) -> None:
        super().ask(step)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is reported by `receive`
            self.connection.send(step)

    def receive(self) -> WorkerReport:
        try:
            report = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            raise DataError(f"data {self.name} {self._end(self.process.exitcode)}") from None
        if isinstance(report, ClipstreamError):
            raise report
        if not isinstance(report, WorkerReport):
            raise DataError(f"data {self.name} failed {report}")
        return report

    def stop(self) -> None:
        self.connection.close()
        end(self.process, PATIENCE)

    def describe_kill(self) -> str:
        try:
            # WNOWAIT: the exit code stays for the thread that joins the process.
            end = os.waitid(os.P_PID, self.process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        by_signal = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return self._end(-end.si_status) if end is not None and by_signal else ""

    def _end(self, code: int | None) -> str:
        """How the process ended, in words."""
        doing, _ = self.stopwatch.doing()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint} during: {doing}"
        return f"ended with code {code} during: {doing}"


def _run(make: MakeFiller, connection: Connection, parents_end: Connection, stopwatch: Stopwatch, parent: int) -> None:
    """Receive a batch number, fill the worker's part, report; until the connection is closed.

    The worker may be asked to end at any moment, also while it ends by itself.
    """
    try:
        try:
            listen()
            end_with(parent)
            parents_end.close()
            gc.freeze()  # else the collector writes to all inherited objects, whose memory is shared with the parent
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            filler = make(connection.send, stopwatch)
            while True:
                step = connection.recv()
                connection.send(filler(step))
                stopwatch.begin(IDLE)
        except (Ended, EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the loader was closed, or the parent died
        except ClipstreamError as error:
            connection.send(error)
        except BaseException:
            doing, _ = stopwatch.doing()
            connection.send(RuntimeError(f"while it was at: {doing}\n{traceback.format_exc()}"))
        finally:
            end_commands()  # of threads that download ahead
    except (Ended, BrokenPipeError, ConnectionResetError):
        end_commands()
    signal.signal(END, signal.SIG_IGN)


def resolve_workers(settings: DataSettings, world: World) -> tuple[int, str]:
    """Workers of this rank, at most one for each lane; and why it is not the given number, '' if it is.

    Args:
        settings: with `lanes` resolved.
    """
    most = int(settings.lanes) // world.size
    if settings.workers == "auto":
        of = ", which train as well" if world.device == "cpu" else f" for {counted(world.local_size, 'rank')}"
        return min(auto_workers(world), most), f"{counted(cores(), 'core')}{of}"
    if settings.workers <= most:
        return settings.workers, ""
    why = f"{settings.lanes} lanes for {settings.workers} workers on each of {world.size} ranks "
    return most, f"{why}(more with --data.lanes, which changes the order of samples)"


def auto_workers(world: World) -> int:
    """Workers of a rank by the cores of its node alone."""
    share = max(1, cores() // world.local_size)
    return min(ON_CPU, share) if world.device == "cpu" else min(max(1, share - 1), MAX_AUTO_WORKERS)
