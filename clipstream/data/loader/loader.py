"""The loader: a rank's stream of batches, from its workers to the training loop; and the workers.

The loader asks its workers for batch t as soon as buffer t modulo depth is free; a batch is complete when every worker
has reported its part. On a GPU a batch that is complete in time is copied while the step before it runs. The state of
the loader is that of the last batch handed out, whatever was prefetched.

Worker processes are forked, because they share the buffers, the tokenizer and the user's own objects that the parent
has built, without importing or pickling anything. They use one thread each and ignore the signals that ask a run to
end: the parent saves first, then ends them. When the parent is killed, they end too, with the commands that they run.
With `workers: 0`, and for stored features, a thread of the training process is the only worker.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Protocol

from clipstream.data.batch import Batch
from clipstream.data.loader.batch_buffers import (
    BatchBuffer,
    BufferRing,
    BufferShape,
    HostBatches,
    JpegBatches,
    device_prefetch_for,
)
from clipstream.data.loader.health import FIRST_SAMPLES, Budget, DroppedSample, FilledPart, Health, WorkerReport
from clipstream.data.loader.stage_timing import IDLE, OPEN, StageIntervals, StageTimes, Stopwatch
from clipstream.data.order.lanes import DataState, Fingerprint, Stream
from clipstream.data.sources import Source
from clipstream.errors import ClipstreamError, DataError, Interrupted
from clipstream.storage.backends import end_command, end_commands
from clipstream.text import Lines, lines
from clipstream.utils.logs import logger
from clipstream.utils.processes import END, Ended, end, end_with, listen
from clipstream.utils.timing import COPY, time_part

POLL = 0.2  # s between checks for interruption and stalls while a batch is waited for
WATCH = 2.0  # s between checks for killed workers while no batch is asked for
MAX_UNCOUNTED = 50_000  # stages that may wait to be counted, of nine bytes each
WAIT_WARNING = 60.0  # s of waiting for a batch before the first warning; doubled for each further one
MAX_WARNINGS = 10  # broken shards that a rank names on stderr; the rest are only counted
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


class BatchSource(Protocol):
    """What fills the buffers of a rank's batches: `pipeline.SampleBatches` or `features.FeatureBatches`."""

    @property
    def sources(self) -> Sequence[Source]:
        """Whose shards are read."""
        ...

    @property
    def shape(self) -> BufferShape:
        """Of the buffers."""
        ...

    def filler(
        self, worker: int, ring: BufferRing, report: Callable[[WorkerReport], None], stopwatch: Stopwatch
    ) -> Filler:
        """What fills a worker's part of a batch; called in the worker, with what reports early."""
        ...

    def batch(self, parts: Any, buffer: BatchBuffer) -> Batch:
        """The batch in a buffer that the workers have filled; called in the loader."""
        ...

    def close(self) -> None:
        """Release what this process holds."""


@dataclass(frozen=True)
class Hosting:
    """Where a rank's batches are made.

    Attributes:
        workers: number of processes; 0 for a thread of this one.
        depth: number of batch buffers.
        device: torch's name of the device of the batches.
        zero_copy: whether batches on the CPU are views of the buffers, valid until the next one, which saves a copy.
        stall_timeout: seconds without a batch after which the run ends.
    """

    workers: int
    depth: int
    device: str = "cpu"
    zero_copy: bool = False
    stall_timeout: float = 300.0


class Loader:
    """Iterator over a rank's batches; a context manager that ends its workers.

    On the CPU a batch's tensors are copies, or with `Hosting.zero_copy` views of a buffer, valid until the next batch.

    Args:
        stream: which samples.
        source: what fills the buffers.
        hosting: where.
        budget: failures that end the run.
        found: faults of shards that are known before any is opened; given to one rank only, which counts them.
        interrupt: called while a batch is waited for; if it returns True, `Interrupted` is raised, and only `state` and
            `close` may be called afterwards.

    Attributes:
        health: counts of this rank since the start, with those of batches that are filled ahead.
        trained: the same of the batches that `mark_trained` was called for, as checkpoints keep them.
        wait_seconds: total time that the caller waited for batches.
        parts: what the workers reported of the batch that was handed out last.

    Raises DataError: a worker died, stalled or cannot be started, or the budget of failures is exceeded.
    """

    def __init__(
        self,
        stream: Stream,
        source: BatchSource,
        hosting: Hosting,
        budget: Budget,
        found: Health | None = None,
        interrupt: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stream, self.source, self.hosting, self.budget = stream, source, hosting, budget
        self._pid = os.getpid()
        self.health, self.trained = Health(stream.names), Health(stream.names)
        self._early: dict[int, Health] = {}  # by worker, counts of the batch that it is filling
        self.wait_seconds = 0.0
        self._interrupt = interrupt
        self._times = StageTimes()  # since the last `take_times`
        self._intervals: list[StageIntervals] = []  # still to be added to them
        self._uncounted = 0  # stages in these
        self._step = stream.start.step  # number of the next batch to hand out
        self._asked = self._step  # number of the next batch to ask workers for
        self.parts: Sequence[FilledPart] = ()  # the parts of the last batch that was handed out
        self._parts: dict[int, list[FilledPart]] = {}
        self._warnings = 0
        self._data_checked: set[str] = set()
        self._ahead: tuple[Sequence[FilledPart], Batch] | None = None  # the next batch, while it is copied to the GPU
        self._workers: list[Worker] = []
        self._prefetch = HostBatches()
        self._closed = threading.Event()
        if found is not None:
            self._merge(found)
            self.trained.merge(found)
            self.health.take_dropped()  # which `trained` lists
        self._start()

    def _start(self) -> None:
        """Make the buffers, and start the workers."""
        hosting = self.hosting
        self._ring = BufferRing(self.source.shape, hosting.depth)
        if hosting.workers:
            atexit.register(self.close)  # before multiprocessing's, which waits for workers that were not asked to end
        try:
            for number in range(hosting.workers):
                self._workers.append(ProcessWorker(self._maker(number), number))
            # Locks memory: not before a fork.
            self._prefetch = device_prefetch_for(hosting.device, self._ring, hosting.zero_copy)
            if self.source.shape.jpegs:
                self._prefetch = JpegBatches(self._prefetch, hosting.device, told=0 in self.stream.slots.lanes)
            if not hosting.workers:
                self._workers.append(ThreadWorker(self._maker(0)))
        except BaseException as error:
            started = len(self._workers)
            self.close()
            if not isinstance(error, OSError):
                raise
            raise DataError(
                f"only {started} of {hosting.workers} data workers could be started ({error.strerror}): use fewer "
                f"--workers, or raise the system's limit"
            ) from error
        if hosting.workers:
            self._refill()
            threading.Thread(target=self._watch, args=(list(self._workers),), daemon=True).start()

    def _maker(self, number: int) -> MakeFiller:
        return partial(self.source.filler, number, self._ring)

    @property
    def fingerprint(self) -> Fingerprint:
        """The settings and shards that fix the order of samples."""
        return self.stream.start.fingerprint

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if os.getpid() != self._pid:
            raise DataError(
                f"this loader belongs to process {self._pid} and cannot be used in a forked process: build a loader "
                f"in each process"
            )
        began = time.perf_counter()
        parts, batch = self._ahead or self._start_copy(self._collect(self._step))
        self._ahead, batch = None, self._prefetch.wait(batch)
        self.wait_seconds += time.perf_counter() - began
        if self.stream.ends and all(part.ended for part in parts):
            raise StopIteration
        self.parts = parts
        for name, counts in self.stream.remainder_of(self._step).items():
            self.health.sources[name].remainder.update(counts)
        self._step += 1
        with time_part(COPY):
            batch = self._prefetch.finish(batch)
        if self._prefetch.broken:
            self._drop(batch, self._prefetch.broken)
        if self._prefetch.ahead:  # begin to copy the next batch, if it is complete
            self._refill()
            if self._receive_all(timeout=0):
                self._ahead = self._start_copy(self._parts.pop(self._step))
        return batch

    def mark_trained(self) -> None:
        """Add the batch that was handed out last to `trained`, as the caller has trained on it."""
        for part in self.parts:
            self.trained.merge(part.health)
        for name, counts in self.stream.remainder_of(self._step - 1).items():
            self.trained.sources[name].remainder.update(counts)
        waiting = [*self._early.values(), *(part.health for parts in self._parts.values() for part in parts)]
        waiting += [part.health for part in self._ahead[0]] if self._ahead is not None else []
        for name, source in self.health.sources.items():
            source.listed = [one for health in waiting for one in health.sources[name].listed]

    def state(self) -> DataState:
        """Position after the last batch that was handed out, with this rank's lanes."""
        lanes = dict(self.stream.start.lanes)
        for part in self.parts:
            lanes.update(part.lane_states())
        return replace(self.stream.start, step=self._step, lanes=lanes)

    def take_times(self) -> StageTimes:
        """Times of this rank's stages since the last call."""
        self._count()
        taken, self._times = self._times, StageTimes()
        return taken

    def _count(self) -> None:
        self._times.add(self._intervals)
        self._intervals, self._uncounted = [], 0

    def close(self) -> None:
        """End the workers and release the shards; in a process that was forked from the loader's, do nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        self._closed.set()
        self._warn_of_data(1)  # for sources that gave too few samples so far
        for worker in reversed(self._workers):  # later workers inherited the pipes of earlier ones
            worker.stop()
        self._workers = []
        self._prefetch.close()
        self.source.close()

    def worker_pids(self) -> list[int]:
        pids = [worker.process.pid for worker in self._workers if isinstance(worker, ProcessWorker)]
        return [pid for pid in pids if pid is not None]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refill(self) -> None:
        """Ask the workers for the batches whose buffers are free; always for the one that is handed out next."""
        depth = self.hosting.depth
        while self._asked < self._step + depth:
            if self._prefetch.reading(self._asked - depth, wait=self._asked == self._step):
                return
            for worker in self._workers:
                worker.ask(self._asked)
            self._asked += 1

    def _collect(self, step: int) -> Sequence[FilledPart]:
        """The parts of batch `step`, when it is complete."""
        self._refill()
        began, warn_after = time.monotonic(), WAIT_WARNING
        now = began
        while not self._receive_all(timeout=POLL):
            if self._interrupt():
                raise Interrupted
            owing = [worker for worker in self._workers if worker.asked_last >= step > worker.filled_last]
            limit = self.hosting.stall_timeout
            # `now` is of before the last messages: the time until they are looked at is not the workers'.
            if any(worker.quiet(began, now) > limit for worker in owing):
                waited = f"{limit:.0f} s (--data.stall-timeout)"
                raise DataError(lines(f"no data for {waited}, batch {step} is incomplete:", *self._doing()))
            waiting = now - began
            if owing and waiting > warn_after:
                warn_after *= 2
                logger.info(lines(f"waiting for batch {step} for {waiting:.0f} s:", *self._doing()))
            now = time.monotonic()
        return self._parts.pop(step)

    def _receive_all(self, timeout: float) -> bool:
        """Receive the reports of workers, within `timeout` s; whether the next batch is complete."""
        if len(self._parts.get(self._step, ())) == len(self._workers):
            timeout = 0.0  # still receive: the death of a worker matters before its parts run out
        workers: dict[Any, tuple[int, Worker]] = {one.connection: (n, one) for n, one in enumerate(self._workers)}
        while ready := wait(workers, timeout=timeout):
            for connection in ready:  # the end of a connection comes after all messages in it
                number, worker = workers[connection]
                report = worker.receive()
                if isinstance(report, FilledPart):
                    worker.filled_last = report.step
                    self._parts.setdefault(report.step, []).append(report)
                if isinstance(report, FilledPart) or any(source.used for source in report.health.sources.values()):
                    worker.useful_at = time.monotonic()
                self._merge_and_check(report, number)
            timeout = 0.0
        return len(self._parts.get(self._step, ())) == len(self._workers)

    def _watch(self, workers: list[Worker]) -> None:
        """A thread: reports a worker that is killed while the caller is busy for a long time."""
        while not self._closed.wait(WATCH):
            for worker in workers:
                if how := worker.describe_kill():
                    logger.error(f"data {worker.name} {how}; the run ends at its next batch")
                    return

    def _merge_and_check(self, report: WorkerReport, worker: int) -> None:
        self._intervals.append(report.intervals)
        self._uncounted += len(report.intervals.numbers)
        if self._uncounted >= MAX_UNCOUNTED:
            self._count()
        self._merge(report.health)
        early = self._early.pop(worker, Health(self.stream.names))
        for name, source in early.sources.items():
            source.merge(report.health.sources[name])
        if isinstance(report, FilledPart):
            report.health = early
        else:
            self._early[worker] = early
        self._warn_of_data(FIRST_SAMPLES)
        self.budget.check(self.health)

    def _merge(self, health: Health) -> None:
        for line in self.health.merge(health)[: max(0, MAX_WARNINGS - self._warnings)]:
            self._warnings += 1
            logger.warning(line)

    def _drop(self, batch: Batch, broken: Mapping[int, str]) -> None:
        """Count samples of the batch that is handed out whose images cannot be decoded; their slots are empty."""
        late = Health(self.stream.names)
        for row, detail in broken.items():
            number = int(batch.sources[row])
            source, (shard, key) = self.stream.names[number], self.source.sources[number].split_name(batch.keys[row])
            late.sources[source].used -= 1
            late.sources[source].drop(DroppedSample(source, shard, key, "undecodable_image", detail))
        self._merge(late)
        self.parts[0].health.merge(late)
        self.budget.check(self.health)

    def _warn_of_data(self, enough: int) -> None:
        """Warn once of each source, on the first rank, of odd captions and images, and of lists without a match."""
        for name, health in self.health.sources.items():
            if name not in self._data_checked and health.read >= enough:
                self._data_checked.add(name)
                captions, caption = health.captions, self.budget.hints[name][1]
                texts = [captions.warning(), captions.flat_warning(), self.budget.list_warning(name, health)]
                for text in (*texts, captions.languages_warning(caption, least=0.5)):
                    if text and 0 in self.stream.slots.lanes:
                        logger.warning(f"source {name!r}: {text}")

    def complaint(self) -> str:
        """Why no sample of this rank was usable, with advice; '' if some were, or none was read."""
        for name, health in self.health.sources.items():
            if health.read and not health.used:
                return self.budget.nothing_usable(name, health)
        return ""

    def _doing(self) -> list[str]:
        """The current stage of each worker, and the counts of each source."""
        found = []
        for worker in self._workers:
            doing, age = worker.stopwatch.doing()
            found.append(f"  {worker.name}: {doing}, for {age:.0f} s")
        return found + [f"  source {name!r}: {health.funnel()}" for name, health in self.health.sources.items()]

    def _start_copy(self, parts: Sequence[FilledPart]) -> tuple[Sequence[FilledPart], Batch]:
        """The parts, and their batch on its way to the device."""
        return parts, self._prefetch.start(self.source.batch(parts, self._ring[parts[0].step]))


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
            at, trace = report.args
            raise DataError(lines(f"data {self.name} failed {at}", Lines(trace.rstrip())))
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
            connection.send(RuntimeError(f"while it was at: {doing}", traceback.format_exc()))
        finally:
            end_commands()  # of threads that download ahead
    except (Ended, BrokenPipeError, ConnectionResetError):
        end_commands()
    signal.signal(END, signal.SIG_IGN)
