"""Owns a rank's stream of batches: its slabs, its workers, what was prefetched and what was consumed.

The loader asks its workers for batch t as soon as slab t modulo depth is free; a batch is whole when every worker has
reported its part. To a GPU a batch is copied while the step before it runs, if it is whole by then. The loader hands
batches out in order, keeps the lanes' states of the last one handed out (never of what was prefetched), checks the
health, and turns a dead or stalled worker into a DataError. It never looks into a sample.

With workers = 0 the training process fills the slab itself, when the batch is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import numpy as np
import torch

from clipstream.batch import Batch
from clipstream.data.copies import copies_to
from clipstream.data.feeder import Feeder, Part, Report
from clipstream.data.health import Budget, Health
from clipstream.data.order import Slots
from clipstream.data.slab import Slab, SlabRing, SlabShape
from clipstream.data.stages import IDLE, OPEN, Laps, StageTimes, Stopwatch
from clipstream.data.worker import Worker
from clipstream.errors import ClipstreamError, DataError

DataState = dict[str, Any]
WATCH = 2.0  # s between two looks after the workers while no batch is asked for
UNCOUNTED = 50_000  # stages whose times wait to be counted, of nine bytes each
WORRY = 60.0  # s that a batch is waited for before a word is said, and the first of the times it is said again
FAULTS_TOLD = 10  # broken shards that a rank names on stderr; the rest are counted only

MakeFeeder = Callable[[int, Callable[[Any], None], Stopwatch], Feeder]


@dataclass(frozen=True)
class LoaderPlan:
    """What a loader is made of.

    Attributes:
        make_feeder: (worker number, report, stopwatch) -> the feeder of that worker's lanes.
        workers: processes; 0 for none.
        depth: slabs.
        shape: of a slab.
        slots: of this rank, and the size of the global batch.
        names: of the sources.
        budget: of failures.
        stall_timeout: seconds.
        lanes_total: L.
        order: what fixes the order of samples, by the setting's name.
        on_close: called when the workers have ended.
        ends: whether the stream ends (evaluation).
        device: torch's name of what batches are copied to.
        tail: what the tail of an epoch that ends with batch number `step` of the order does, by source; for one rank to
            count.
        salt: how often the order began anew under other settings.
        began: number of the batch with which it did.
    """

    make_feeder: MakeFeeder
    workers: int
    depth: int
    shape: SlabShape
    slots: Slots
    names: list[str]
    budget: Budget
    stall_timeout: float
    lanes_total: int
    order: dict[str, Any]
    on_close: Callable[[], None]
    ends: bool = False
    device: str = "cpu"
    tail: Callable[[int], dict[str, dict[str, int]]] | None = None
    salt: int = 0
    began: int = 0


class Loader:
    """Iterator over a rank's batches.

    On the CPU a batch's tensors are views of its slab, valid until the next batch is asked for.

    Attributes:
        health: counts of this rank since the start.
        wait_seconds: total time that the caller waited for batches.
    """

    def __init__(self, plan: LoaderPlan, start: DataState | None = None) -> None:
        self.plan = plan
        self.health = Health(plan.names)
        self.wait_seconds = 0.0
        self._times = StageTimes()  # since they were taken last
        self._laps: list[Laps] = []  # what is still to be added to them
        self._uncounted = 0  # stages in these
        self._step = int(start["step"]) if start else 0  # the batch that is handed out next
        self._asked = self._step  # the batch that workers are asked for next
        self._lanes: dict[str, Any] = dict(start["lanes"]) if start else {}  # after the last batch handed out
        self._parts: dict[int, list[Part]] = {}
        self._faults_told = 0
        self._ring = SlabRing(plan.shape, plan.depth if plan.workers else 1)
        self._copies = copies_to(plan.device, self._ring)
        self._ahead: tuple[list[Part], Batch] | None = None  # the batch that is handed out next, on its way to the GPU
        self._workers: list[Worker] = []
        self._closed = threading.Event()
        self._feeder: Feeder | None = None
        if plan.workers:
            atexit.register(self.close)  # before multiprocessing, which would wait for workers that nobody asked to end
            try:
                for number in range(plan.workers):
                    self._workers.append(Worker.start(_bind(plan.make_feeder, number), self._ring))
            except OSError as error:
                started = len(self._workers)
                self.close()
                raise DataError(
                    f"{started} of {plan.workers} data workers could be started ({error.strerror}): "
                    "use fewer --workers, or raise the system's limit"
                ) from error
            self._refill()
            threading.Thread(target=self._watch, args=(list(self._workers),), daemon=True).start()
        else:
            self._feeder = plan.make_feeder(0, self._merge_and_check, Stopwatch())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        parts, batch = self._ahead or self._made(self._collect(self._step))
        self._ahead = None
        self.wait_seconds += time.perf_counter() - began
        if self.plan.ends and all(part.ended for part in parts):
            raise StopIteration
        for part in parts:
            self._lanes.update({str(lane): state for lane, state in part.lanes.items()})
        if self.plan.tail is not None:
            for name, counts in self.plan.tail(self._step - self.plan.began).items():
                self.health.sources[name].tail.update(counts)
        self._step += 1
        batch = self._copies.finish(batch)
        if self._copies.ahead and self._workers:
            self._refill()
            if self._receive_all(timeout=0):
                self._ahead = self._made(self._parts.pop(self._step))
        return batch

    def state(self) -> DataState:
        """This rank's part of the data's state, after the last batch that was handed out."""
        return {
            "step": self._step,
            "lanes_total": self.plan.lanes_total,
            "plan": self.plan.order,
            "salt": self.plan.salt,
            "began": self.plan.began,
            "lanes": dict(self._lanes),
        }

    def take_times(self) -> StageTimes:
        """What this rank's stages took since the last take."""
        self._count()
        taken, self._times = self._times, StageTimes()
        return taken

    def _count(self) -> None:
        self._times.add(self._laps)
        self._laps, self._uncounted = [], 0

    def close(self) -> None:
        """End the workers and give the shards back."""
        atexit.unregister(self.close)
        self._closed.set()
        for worker in reversed(self._workers):  # who was forked later holds the others' pipes open, too
            worker.stop()
        self._workers = []
        self.plan.on_close()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refill(self) -> None:
        """Ask for the next batches, as far as their slabs are free; for the one that is handed out next in any case."""
        while self._asked < self._step + self.plan.depth:
            if self._copies.reading(self._asked - self.plan.depth, wait=self._asked == self._step):
                return
            for worker in self._workers:
                # The death of a worker is told, with the reason, when its part is collected.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.connection.send(self._asked)
                worker.asked_last = self._asked
            self._asked += 1

    def _collect(self, step: int) -> list[Part]:
        """The parts of batch `step`, when it is whole."""
        if self._feeder is not None:
            self._copies.reading(step - 1, wait=True)  # there is one slab
            part = self._feeder.fill(step, self._ring[step])
            self._feeder.watch.begin(IDLE)
            self._merge_and_check(part)
            return [part]
        self._refill()
        began, worry = time.monotonic(), WORRY
        while not self._receive_all(timeout=1.0):
            owing = [worker for worker in self._workers if worker.asked_last >= step > worker.filled_last]
            if any(self._hangs(worker, began) for worker in owing):
                limit = f"{self.plan.stall_timeout:.0f} s (--data.stall-timeout)"
                raise DataError(f"no data for {limit}, batch {step} is not whole:\n{self._doing()}")
            if owing and time.monotonic() - began > worry:
                worry *= 2
                waited = f"{time.monotonic() - began:.0f} s"
                print(f"waiting for batch {step} for {waited}:\n{self._doing()}", file=sys.stderr, flush=True)
        return self._parts.pop(step)

    def _receive_all(self, timeout: float) -> bool:
        """Take what workers have sent, or send within `timeout` s; whether the next batch is whole."""
        if len(self._parts.get(self._step, ())) == len(self._workers):
            timeout = 0.0  # looked at all the same: the death of a worker is news before its parts run out
        workers: dict[Any, tuple[int, Worker]] = {one.connection: (n, one) for n, one in enumerate(self._workers)}
        while ready := wait(workers, timeout=timeout):
            for connection in ready:  # a worker's death stands behind all that it filled before
                self._receive(*workers[connection])
            timeout = 0.0
        return len(self._parts.get(self._step, ())) == len(self._workers)

    def _watch(self, workers: list[Worker]) -> None:
        """The thread: names a worker that was killed while the caller is at something else for long."""
        while not self._closed.wait(WATCH):
            for number, worker in enumerate(workers):
                if how := worker.killed():
                    said = f"data worker {number} (pid {worker.process.pid}) {how}"
                    print(f"error: {said}; the run ends at its next batch", file=sys.stderr, flush=True)
                    return

    def _hangs(self, worker: Worker, began: float) -> bool:
        """Whether a worker neither used a sample nor got a byte of a shard for too long."""
        doing, age = worker.watch.doing()
        quiet = time.monotonic() - max(began, worker.useful_at)
        if doing.startswith(OPEN):
            quiet = min(quiet, age)
        return quiet > self.plan.stall_timeout

    def _receive(self, number: int, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise DataError(f"data worker {number} (pid {worker.process.pid}) {worker.death()}") from None
        if isinstance(message, Part):
            worker.filled_last = message.step
            worker.useful_at = time.monotonic()
            self._parts.setdefault(message.step, []).append(message)
            self._merge_and_check(message)
        elif isinstance(message, Report):
            if any(source.used for source in message.health.sources.values()):
                worker.useful_at = time.monotonic()
            self._merge_and_check(message)
        elif isinstance(message, ClipstreamError):
            raise message
        else:
            raise DataError(f"data worker {number} (pid {worker.process.pid}) failed {message}")

    def _merge_and_check(self, report: Report) -> None:
        self._laps.append(report.laps)
        self._uncounted += len(report.laps.numbers)
        if self._uncounted >= UNCOUNTED:
            self._count()
        for line in self.health.merge(report.health)[: max(0, FAULTS_TOLD - self._faults_told)]:
            self._faults_told += 1
            print(f"warning: {line}", file=sys.stderr, flush=True)
        self.plan.budget.check(self.health)

    def complaint(self) -> str:
        """What to say where this rank read samples and none of them was usable; '' where some were, or none read."""
        for name, health in self.health.sources.items():
            if health.read and not health.used:
                return self.plan.budget.nothing_usable(name, health)
        return ""

    def _doing(self) -> str:
        """What each worker is at, and what became of what was read."""
        lines = []
        for number, worker in enumerate(self._workers):
            doing, age = worker.watch.doing()
            lines.append(f"  worker {number} (pid {worker.process.pid}): {doing}, for {age:.0f} s")
        lines += [f"  source {name!r}: {health.funnel()}" for name, health in self.health.sources.items()]
        return "\n".join(lines)

    def _made(self, parts: list[Part]) -> tuple[list[Part], Batch]:
        """The parts, and their batch on its way to the device."""
        keys = {slot: key for part in parts for slot, key in part.keys.items()}
        step = parts[0].step
        return parts, self._copies.start(_batch(self._ring[step], keys, step, self.plan.slots))


def merge_states(states: list[DataState]) -> DataState:
    """The whole run's data state, from the states of all ranks."""
    lanes = {lane: state for part in states for lane, state in part["lanes"].items()}
    return {**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def _batch(slab: Slab, keys: dict[int, str], step: int, slots: Slots) -> Batch:
    """The slab as a batch; without its empty slots where a stream ended in it."""
    order, count = sorted(keys), slots.count(step)

    def plane(values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values[:count] if len(order) == count else values[order])

    return Batch(
        pixels=plane(slab.pixels).permute(0, 3, 1, 2),
        ids=plane(slab.ids),
        weights=plane(slab.weights),
        keys=tuple(keys[slot] for slot in order),
        sources=plane(slab.sources),
        step=step,
        global_size=slots.batch_size(step),
        pictures=plane(slab.pictures),
    )


def _bind(make_feeder: MakeFeeder, number: int) -> Callable[[Callable[[Any], None], Stopwatch], Feeder]:
    def make(report: Callable[[Any], None], watch: Stopwatch) -> Feeder:
        return make_feeder(number, report, watch)

    return make
