"""Worker processes: each fills its part of the batches that the loader asks for, and ends with its parent; and how
many there are where the settings leave it open (`data.workers: auto`).

Workers are forked, because they share the buffers, the tokenizer and the user's own objects that the parent has built,
without importing or pickling anything. They use one thread each and ignore the signals that ask a run to end: the
parent saves first, then ends them. When the parent is killed, they end too, with the commands that they run.

A GPU's rank gets a worker for each of its cores but one, which the training process needs; on a CPU, where the model
takes the cores itself, two. The order of samples does not depend on the number. Workers that wait for a slow disk may
be worth more than that: `clipstream bench` measures several numbers.
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

from clipstream.data.loader.batch_buffers import BufferRing
from clipstream.data.loader.pipeline import Pipeline
from clipstream.data.loader.stage_timing import IDLE, OPEN, Stopwatch
from clipstream.data.order.lanes import lanes_of_rank
from clipstream.data.settings import MAX_AUTO_WORKERS, DataSettings
from clipstream.distributed.capabilities import cores
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.storage.pipe import end_commands
from clipstream.text import counted
from clipstream.utils.processes import END, Ended, end, end_with, listen

ON_CPU = 2  # workers of a rank whose model is on the CPU
PATIENCE = 0.2  # s that a worker has to notice that its loader was closed

MakePipeline = Callable[[Callable[[Any], None], Stopwatch], Pipeline]  # (report, stopwatch) -> pipeline


@dataclass
class Worker:
    """The loader's side of a worker process."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    stopwatch: Stopwatch
    asked_last: int = -1  # number of the last batch that it was asked for
    filled_last: int = -1  # number of the last batch whose part it filled
    useful_at: float = 0.0  # time.monotonic() when it last reported a used sample

    @classmethod
    def start(cls, make_pipeline: MakePipeline, ring: BufferRing) -> Worker:
        """Fork a worker; `make_pipeline` is called in it."""
        ours, theirs = multiprocessing.Pipe()
        stopwatch = Stopwatch()
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(make_pipeline, ring, theirs, ours, stopwatch, os.getpid()), daemon=True
        )
        sys.stdout.flush()
        sys.stderr.flush()
        process.start()
        theirs.close()
        return cls(process, ours, stopwatch)

    def stop(self) -> None:
        """End the process and the commands that it runs, and wait for it."""
        self.connection.close()
        end(self.process, PATIENCE)

    def quiet(self, since: float, now: float) -> float:
        """Seconds from `since` to `now` in which the worker neither used a sample nor received bytes of a shard."""
        doing, age = self.stopwatch.doing()
        quiet = now - max(since, self.useful_at)
        return min(quiet, age) if doing.startswith(OPEN) else quiet

    def killed(self) -> str:
        """How a signal ended the process, in words; '' if none did. May be called from any thread."""
        try:
            # WNOWAIT: the exit code stays for the thread that joins the process.
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
        doing, _ = self.stopwatch.doing()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (the system kills the largest process when memory runs out)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint} while it was at: {doing}"
        return f"ended with code {code} while it was at: {doing}"


def _run(
    make_pipeline: MakePipeline,
    ring: BufferRing,
    connection: Connection,
    parents_end: Connection,
    stopwatch: Stopwatch,
    parent: int,
) -> None:
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
            pipeline = make_pipeline(connection.send, stopwatch)
            while True:
                step = connection.recv()
                connection.send(pipeline.fill(step, ring[step]))
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
    """Workers of this rank, at most one for each lane; and the reason, in a few words.

    Args:
        settings: with `lanes` resolved.
    """
    lanes = min(len(lanes_of_rank(rank, world.size, int(settings.lanes))) for rank in range(world.size))
    have, ranks = cores(), world.local_size
    why = counted(have, "core")
    why += ", which train as well" if world.device == "cpu" else f" for {counted(ranks, 'rank')}"
    return min(auto_workers(world), lanes), why


def auto_workers(world: World) -> int:
    """Workers of a rank by the cores of its node alone."""
    share = max(1, cores() // world.local_size)
    return min(ON_CPU, share) if world.device == "cpu" else min(max(1, share - 1), MAX_AUTO_WORKERS)
