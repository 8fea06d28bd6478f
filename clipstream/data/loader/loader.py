"""The loader: a rank's stream of batches, from its worker processes to the training loop.

The loader asks its workers for batch t as soon as buffer t modulo depth is free; a batch is complete when every worker
has reported its part. On a GPU a batch that is complete in time is copied while the step before it runs. The state of
the loader is that of the last batch handed out, whatever was prefetched. With workers = 0 the training process fills
the buffer itself when a batch is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.loader.batch_buffers import BufferRing, BufferShape, HostBatches, device_prefetch_for
from clipstream.data.loader.health import FIRST_SAMPLES, Budget, Health
from clipstream.data.loader.pipeline import BatchPart, FilledPart, Lane, Pipeline, Reader, WorkerReport
from clipstream.data.loader.sampler import LaneSampler, OpenShards
from clipstream.data.loader.stage_timing import IDLE, StageIntervals, StageTimes, Stopwatch
from clipstream.data.loader.stored import BatchRows, StoredData, StoredSamples
from clipstream.data.loader.workers import Worker
from clipstream.data.order.lanes import DataState, Fingerprint, LaneSlots, Mix
from clipstream.data.sources.registry import Source
from clipstream.errors import ClipstreamError, DataError, Interrupted
from clipstream.features.manifest import IMAGE
from clipstream.storage.shard_cache import ShardCache
from clipstream.text import printable_lines
from clipstream.utils.logs import logger
from clipstream.utils.timing.parts import COPY
from clipstream.utils.timing.step_timer import timed

POLL = 0.2  # s between checks for interruption and stalls while a batch is waited for
WATCH = 2.0  # s between checks for killed workers while no batch is asked for
MAX_UNCOUNTED = 50_000  # stages that may wait to be counted, of nine bytes each
WAIT_WARNING = 60.0  # s of waiting for a batch before the first warning; doubled for each further one
MAX_WARNINGS = 10  # broken shards that a rank names on stderr; the rest are only counted


@dataclass(frozen=True)
class LoaderPlan:
    """The parts of a rank's loader, which its pipelines share, and its limits."""

    sources: list[Source]
    readers: list[Reader]
    mix: Mix
    make_sampler: Callable[[int, int, OpenShards], LaneSampler]  # (source, lane, shards) -> sampler
    slots: LaneSlots  # of this rank's lanes, with the sizes of the global batch
    start: DataState  # position of the first batch, with this rank's lanes
    tokenizer: Tokenizer
    store: ShardCache
    image: ImageSpec
    samples: int  # of this rank in the largest batch
    budget: Budget  # of failures
    stall_timeout: float  # seconds
    workers: int  # processes; 0 for none
    depth: int  # number of batch buffers
    traced: int = 0  # samples whose stages are printed
    ends: bool = False  # whether the stream ends (evaluation)
    device: str = "cpu"  # torch's name of the device of the batches
    # by source, what the end of an epoch with batch number `step` of the order left out, repeated or padded; given to
    # one rank only, which counts it
    remainder: Callable[[int], dict[str, dict[str, int]]] | None = None
    # whether batches on the CPU are views of the buffers, each valid until the next one, which saves a copy
    views: bool = False
    teacher_image: ImageSpec | None = None  # of a live teacher's pixels; None for no pixels of its own
    teacher_tokenizer: Tokenizer | None = None  # of a live teacher; None for no ids of its own
    image_views: int | None = None  # see Pipeline
    # of ids on the CPU, gives the true lengths of the texts; None where they are not known
    text_lengths: Callable[[torch.Tensor], tuple[int, ...] | None] | None = None
    # faults of shards that are known before any is opened; given to one rank only, which counts them
    found: Health | None = None
    features: StoredData | None = None  # stores of precomputed features
    stored: Sequence[StoredSamples] = ()  # by source, where there are such stores
    opened: list[OpenShards] = field(default_factory=list)  # by this process

    @property
    def names(self) -> list[str]:
        """Of the sources."""
        return [reader.name for reader in self.readers]

    @property
    def shape(self) -> BufferShape:
        """Of the batch buffers."""
        teacher_size = (0, 0) if self.teacher_image is None else self.teacher_image.size
        teacher_text_width = 0 if self.teacher_tokenizer is None else self.teacher_tokenizer.context_length
        stored = {} if self.features is None else self.features.row_bytes()
        size = (0, 0) if IMAGE in stored else self.image.size
        views = max(1, self.image_views or 1)
        rows = tuple(stored.items())
        width = self.tokenizer.context_length
        return BufferShape(self.samples, *size, width, *teacher_size, teacher_text_width, rows, views)

    def pipeline(self, worker: int, report: Callable[[WorkerReport], None], stopwatch: Stopwatch) -> Pipeline:
        """The pipeline of a worker: every `workers`-th lane of the rank."""
        self.store.alive = stopwatch.touch
        traced = self.traced if worker == 0 else 0
        pipeline = Pipeline(
            [],
            self.slots,
            self.readers,
            self.mix,
            self.tokenizer,
            Health(self.names),
            report,
            stopwatch,
            traced,
            self.teacher_tokenizer,
            self.image_views,
        )
        shards = [
            OpenShards(
                source,
                lambda name=name: pipeline.health.sources[name],  # type: ignore[misc]
                stopwatch.begin,
                partial(pipeline.report_early, name),
                reader.stored,
            )
            for name, source, reader in zip(self.names, self.sources, self.readers, strict=True)
        ]
        self.opened.extend(shards)
        for lane in self.slots.lanes[worker :: max(1, self.workers)]:
            samplers = [self.make_sampler(i, lane, one) for i, one in enumerate(shards)]
            drawn = self.start.lanes[lane].drawn if lane in self.start.lanes else 0
            pipeline.lanes.append(Lane(lane, samplers, drawn))
        return pipeline

    def close(self) -> None:
        """Release what this process holds."""
        for shards in self.opened:
            shards.prefetcher.close()
        self.store.close()


class Loader:
    """Iterator over a rank's batches; a context manager that ends its workers.

    On the CPU a batch's tensors are copies, or with `plan.views` views of a buffer, valid until the next batch.

    Attributes:
        health: counts of this rank since the start, with those of batches that are filled ahead.
        trained: the same of the batches that `mark_trained` was called for, as checkpoints keep them.
        wait_seconds: total time that the caller waited for batches.
        parts: what the workers reported of the batch that was handed out last.
        interrupt: called while a batch is waited for; if it returns True, `Interrupted` is raised, and only `state` and
            `close` may be called afterwards.

    Raises:
        DataError: a worker died, stalled or cannot be started, or the budget of failures is exceeded.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self.plan = plan
        self._pid = os.getpid()
        self.health, self.trained = Health(plan.names), Health(plan.names)
        self._early: dict[int, Health] = {}  # by worker, counts of the batch that it is filling
        self.wait_seconds = 0.0
        self.interrupt: Callable[[], bool] = lambda: False
        self._times = StageTimes()  # since the last `take_times`
        self._intervals: list[StageIntervals] = []  # still to be added to them
        self._uncounted = 0  # stages in these
        self._step = plan.start.step  # number of the next batch to hand out
        self._asked = self._step  # number of the next batch to ask workers for
        self.parts: Sequence[FilledPart] = ()  # the parts of the last batch that was handed out
        self._parts: dict[int, list[BatchPart]] = {}
        self._warnings = 0
        self._data_checked: set[str] = set()
        self._ahead: tuple[Sequence[Any], Batch] | None = None  # the next batch, while it is copied to the GPU
        self._workers: list[Worker] = []
        self._prefetch = HostBatches()
        self._closed = threading.Event()
        self._rows: BatchRows | None = None  # of precomputed features
        self._pipeline: Pipeline | None = None
        if plan.found is not None:
            self._merge(plan.found)
            self.trained.merge(plan.found)
            self.health.take_dropped()  # which `trained` lists
        self._start()

    def _start(self) -> None:
        """Make the buffers, and start the workers."""
        plan = self.plan
        self._ring = BufferRing(plan.shape, plan.depth if plan.workers else 1)
        if plan.features is not None:
            self._rows = BatchRows(plan.features, plan.stored)
        if plan.workers:
            atexit.register(self.close)  # before multiprocessing's, which waits for workers that were not asked to end
        try:
            for number in range(plan.workers):
                self._workers.append(Worker.start(partial(plan.pipeline, number), self._ring))
            self._prefetch = device_prefetch_for(plan.device, self._ring, plan.views)  # locks memory: not before a fork
        except BaseException as error:
            started = len(self._workers)
            self.close()
            if not isinstance(error, OSError):
                raise
            raise DataError(
                f"{started} of {plan.workers} data workers could be started ({error.strerror}): "
                "use fewer --workers, or raise the system's limit"
            ) from error
        if plan.workers:
            self._refill()
            threading.Thread(target=self._watch, args=(list(self._workers),), daemon=True).start()
        else:
            self._pipeline = plan.pipeline(0, self._merge_and_check, Stopwatch())

    @property
    def fingerprint(self) -> Fingerprint:
        """The settings and shards that fix the order of samples."""
        return self.plan.start.fingerprint

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if os.getpid() != self._pid:
            raise DataError(
                f"this loader belongs to process {self._pid}: a process that was forked from it (os.fork, "
                "multiprocessing) would take its batches; build a loader in each process"
            )
        began = time.perf_counter()
        parts, batch = self._ahead or self._start_copy(self._collect(self._step))
        self._ahead = None
        self.wait_seconds += time.perf_counter() - began
        if self.plan.ends and all(part.ended for part in parts):
            raise StopIteration
        self.parts = parts
        for name, counts in self._remainder(self._step).items():
            self.health.sources[name].remainder.update(counts)
        self._step += 1
        with timed(COPY):
            batch = self._prefetch.finish(batch)
        if self._prefetch.ahead:
            self._copy_ahead()
        return batch

    def mark_trained(self) -> None:
        """Add the batch that was handed out last to `trained`, as the caller has trained on it."""
        for part in self.parts:
            self.trained.merge(part.health)
        for name, counts in self._remainder(self._step - 1).items():
            self.trained.sources[name].remainder.update(counts)
        waiting = [*self._early.values(), *(part.health for parts in self._parts.values() for part in parts)]
        waiting += [part.health for part in self._ahead[0]] if self._ahead is not None else []
        for name, source in self.health.sources.items():
            source.listed = [one for health in waiting for one in health.sources[name].listed]

    def _remainder(self, step: int) -> dict[str, dict[str, int]]:
        """By source, the remainder of the exact epoch that ends with a batch; {} if none does, and on other ranks."""
        return {} if self.plan.remainder is None else self.plan.remainder(step - self.plan.start.restarted_at)

    def state(self) -> DataState:
        """Position after the last batch that was handed out, with this rank's lanes."""
        lanes = dict(self.plan.start.lanes)
        for part in self.parts:
            lanes.update(part.lane_states())
        return replace(self.plan.start, step=self._step, lanes=lanes)

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
        if self._rows is not None:
            self._rows.close()
        self.plan.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy_ahead(self) -> None:
        """Begin to copy the next batch, if it is complete."""
        if self._workers:
            self._refill()
            if self._receive_all(timeout=0):
                self._ahead = self._start_copy(self._parts.pop(self._step))

    def _refill(self) -> None:
        """Ask the workers for the batches whose buffers are free; always for the one that is handed out next."""
        while self._asked < self._step + self.plan.depth:
            if self._prefetch.reading(self._asked - self.plan.depth, wait=self._asked == self._step):
                return
            for worker in self._workers:
                # The death of a worker is reported, with its reason, when its part is collected.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.connection.send(self._asked)
                worker.asked_last = self._asked
            self._asked += 1

    def _collect(self, step: int) -> Sequence[Any]:
        """The parts of batch `step`, when it is complete."""
        if self._pipeline is not None:
            self._prefetch.reading(step - 1, wait=True)  # there is one buffer
            with self._interrupting(self._pipeline, step):
                part = self._pipeline.fill(step, self._ring[step])
            self._pipeline.stopwatch.begin(IDLE)
            self._merge_and_check(part)
            return [part]
        self._refill()
        began, warn_after = time.monotonic(), WAIT_WARNING
        now = began
        while not self._receive_all(timeout=POLL):
            if self.interrupt():
                raise Interrupted
            owing = [worker for worker in self._workers if worker.asked_last >= step > worker.filled_last]
            # `now` is of before the last messages: the time until they are looked at is not the workers'.
            if any(worker.quiet(began, now) > self.plan.stall_timeout for worker in owing):
                raise self._stalled(step, self._doing())
            waited = now - began
            if owing and waited > warn_after:
                warn_after *= 2
                self._tell_waiting(step, waited)
            now = time.monotonic()
        return self._parts.pop(step)

    def _tell_waiting(self, step: int, waited: float) -> None:
        logger.info(printable_lines(f"waiting for batch {step} for {waited:.0f} s:\n{self._doing()}"))

    def _stalled(self, step: int, doing: str) -> DataError:
        limit = f"{self.plan.stall_timeout:.0f} s (--data.stall-timeout)"
        return DataError(f"no data for {limit}, batch {step} is not whole:\n{doing}")

    @contextlib.contextmanager
    def _interrupting(self, pipeline: Pipeline, step: int) -> Iterator[None]:
        """Break off this process's own reading, by a timer's signal, if it stalls or `interrupt` says so.

        Signals reach the main thread only: in another thread a loader without workers has no time limit.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stuck, over = "", False  # `stuck`: the stage, noted before the exception unwinds it

        def check(number: int, frame: object) -> None:
            nonlocal stuck
            if over:
                return
            doing, age = pipeline.stopwatch.doing()
            if age > self.plan.stall_timeout:
                stuck = f"{doing}, for {age:.0f} s"
            if stuck or self.interrupt():
                raise Interrupted

        handler = signal.signal(signal.SIGALRM, check)
        try:
            signal.setitimer(signal.ITIMER_REAL, POLL, POLL)
            yield
        except Interrupted:
            if not stuck:
                raise
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise self._stalled(step, f"  this process: {stuck}") from None
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)

    def _receive_all(self, timeout: float) -> bool:
        """Receive the messages of workers, within `timeout` s; whether the next batch is complete."""
        if len(self._parts.get(self._step, ())) == len(self._workers):
            timeout = 0.0  # still receive: the death of a worker matters before its parts run out
        workers: dict[Any, tuple[int, Worker]] = {one.connection: (n, one) for n, one in enumerate(self._workers)}
        while ready := wait(workers, timeout=timeout):
            for connection in ready:  # the end of a connection comes after all messages in it
                number, worker = workers[connection]
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    raise DataError(f"data worker {number} (pid {worker.process.pid}) {worker.death()}") from None
                if isinstance(message, ClipstreamError):
                    raise message
                if not isinstance(message, WorkerReport):
                    raise DataError(f"data worker {number} (pid {worker.process.pid}) failed {message}")
                if isinstance(message, BatchPart):
                    worker.filled_last = message.step
                    self._parts.setdefault(message.step, []).append(message)
                if isinstance(message, BatchPart) or any(source.used for source in message.health.sources.values()):
                    worker.useful_at = time.monotonic()
                self._merge_and_check(message, number)
            timeout = 0.0
        return len(self._parts.get(self._step, ())) == len(self._workers)

    def _watch(self, workers: list[Worker]) -> None:
        """A thread: reports a worker that is killed while the caller is busy for long."""
        while not self._closed.wait(WATCH):
            for number, worker in enumerate(workers):
                if how := worker.killed():
                    what = f"data worker {number} (pid {worker.process.pid}) {how}"
                    logger.error(f"{what}; the run ends at its next batch")
                    return

    def _merge_and_check(self, report: WorkerReport, worker: int = 0) -> None:
        self._intervals.append(report.intervals)
        self._uncounted += len(report.intervals.numbers)
        if self._uncounted >= MAX_UNCOUNTED:
            self._count()
        self._merge(report.health)
        early = self._early.pop(worker, Health(self.plan.names))
        for name, source in early.sources.items():
            source.merge(report.health.sources[name])
        if isinstance(report, FilledPart):
            report.health = early
        else:
            self._early[worker] = early
        self._warn_of_data(FIRST_SAMPLES)
        self.plan.budget.check(self.health)

    def _merge(self, health: Health) -> None:
        for line in self.health.merge(health)[: max(0, MAX_WARNINGS - self._warnings)]:
            self._warnings += 1
            logger.warning(line)

    def _warn_of_data(self, enough: int) -> None:
        """Warn once of each source, on the first rank, of odd captions and pictures, and of lists without a match."""
        for name, health in self.health.sources.items():
            if name not in self._data_checked and health.read >= enough:
                self._data_checked.add(name)
                for text in (
                    health.captions.warning(),
                    health.captions.flat_warning(),
                    self.plan.budget.list_warning(name, health),
                ):
                    if text and 0 in self.plan.slots.lanes:
                        logger.warning(f"source {name!r}: {text}")

    def complaint(self) -> str:
        """Why no sample of this rank was usable, with advice; '' if some were, or none was read."""
        for name, health in self.health.sources.items():
            if health.read and not health.used:
                return self.plan.budget.nothing_usable(name, health)
        return ""

    def _doing(self) -> str:
        """The current stage of each worker, and the counts of each source."""
        lines = []
        for number, worker in enumerate(self._workers):
            doing, age = worker.stopwatch.doing()
            lines.append(f"  worker {number} (pid {worker.process.pid}): {doing}, for {age:.0f} s")
        lines += [f"  source {name!r}: {health.funnel()}" for name, health in self.health.sources.items()]
        return "\n".join(lines)

    def _start_copy(self, parts: Sequence[BatchPart]) -> tuple[Sequence[BatchPart], Batch]:
        """The parts, and their batch on its way to the device."""
        step, slots = parts[0].step, self.plan.slots
        buffer = self._ring[step]
        keys = {slot: key for part in parts for slot, key in part.keys.items()}
        order = sorted(keys)

        contiguous = order == list(range(len(order)))

        def tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:  # without the empty slots of a stream that ended
            return torch.from_numpy(values[: len(order)] if contiguous else values[order])

        def pixels(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return tensor(values).flatten(0, -4).permute(0, 3, 1, 2)

        ids = tensor(buffer.ids)
        batch = Batch(
            pixels=pixels(buffer.pixels),
            ids=ids,
            weights=tensor(buffer.weights),
            keys=tuple(keys[slot] for slot in order),
            sources=tensor(buffer.sources),
            step=step,
            global_size=slots.batch_size(step),
            features={} if self._rows is None else self._rows.fill(buffer, len(order)),
            pictures=tensor(buffer.pictures),
            teacher_pixels=pixels(buffer.teacher_pixels) if self.plan.teacher_image else None,
            teacher_ids=tensor(buffer.teacher_ids) if self.plan.teacher_tokenizer else None,
            # Counted before the copy to the device, as ids there would have to be waited for.
            lengths=None if self.plan.text_lengths is None else self.plan.text_lengths(ids),
        )
        return parts, self._prefetch.start(batch)
