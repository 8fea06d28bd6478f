"""The loader of training from stored features: a rank's stream of batches, without worker processes.

A thread draws the samples of a batch as `loader.Loader` does and gathers their rows into a buffer, `data.prefetch`
batches ahead; numpy copies the rows without the interpreter's lock. Order, positions and counts are those of a run that
reads the pictures, so a run may resume from either with the other.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.loader.batch_buffers import BatchBuffer, BufferRing, device_prefetch_for
from clipstream.data.loader.health import Health
from clipstream.data.loader.lane_windows import LaneWindows, Positions
from clipstream.data.loader.loader import POLL, WAIT_WARNING, Loader, LoaderPlan
from clipstream.data.loader.pipeline import INTERIM_DROPS, FilledPart, WorkerReport
from clipstream.data.loader.stage_timing import IDLE, ORDER, Stopwatch
from clipstream.data.loader.stored import StoredKeys, StoredSamples
from clipstream.data.order.lanes import Cursor, LaneState, Numbers
from clipstream.data.order.windows import Order
from clipstream.errors import Interrupted
from clipstream.features.codec import DTYPES
from clipstream.features.manifest import IDS

READ = "read"
CLOSE_SECONDS = 5.0  # to wait for the thread to end


class _Closed(BaseException):
    """Ends the thread of a loader that was closed."""


@dataclass
class DrawnBatch(FilledPart):
    """A batch in its buffer."""

    sources: Numbers  # of the slots, int64 [n]; -1 for padding
    numbers: Numbers  # of the samples, int64 [n], see StoredSamples
    lanes: range  # of the rank
    drawn: Numbers  # by lane, slots filled or left empty after this batch
    positions: list[Positions]  # by source, after this batch

    def lane_states(self) -> dict[int, LaneState]:
        cursors = zip(*(positions.cursors() for positions in self.positions), strict=True)
        states = map(LaneState, self.drawn.tolist(), map(list, cursors))
        return dict(zip(self.lanes, states, strict=True))


class FeatureLoader(Loader):
    """Iterator over a rank's batches of stored features; see Loader.

    Args:
        plan: of a loader that would read the pictures, with stores; of its workers, readers and samplers nothing is
            used.
        orders: the order of each source, in the order of names.

    Raises:
        DataError: while iterating: a chunk of a store is damaged, or the budget of failures is exceeded.
    """

    def __init__(self, plan: LoaderPlan, orders: Sequence[Order]) -> None:
        assert plan.features is not None
        self._stored, self._orders, self._samples = plan.features, orders, plan.stored
        super().__init__(plan)

    def _start(self) -> None:
        plan = self.plan
        self._ring = BufferRing(plan.shape, plan.depth + 1)
        self._prefetch = device_prefetch_for(plan.device, self._ring, plan.views)
        self._free = threading.Semaphore(plan.depth + 1)  # buffers that may be filled
        self._filled: queue.SimpleQueue[WorkerReport | BaseException] = queue.SimpleQueue()
        self._collected = False  # whether a batch was handed out whose buffer is still in use
        self._began = time.monotonic()
        drawer = _Drawer(self)
        self._thread = threading.Thread(target=drawer.run, daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._collected:
            self._prefetch.reading(self._step - 1, wait=True)
            self._free.release()
            self._collected = False
        batch = super().__next__()
        self._collected = True
        return batch

    def _collect(self, step: int) -> Sequence[DrawnBatch]:
        began, warn_after = time.monotonic(), WAIT_WARNING
        while (part := self._receive(POLL)) is None:
            if self.interrupt():
                raise Interrupted
            waited = time.monotonic() - began
            if waited > self.plan.stall_timeout:
                raise self._stalled(step, self._doing())
            if waited > warn_after:
                warn_after *= 2
                self._tell_waiting(step, waited)
        return [part]

    def _receive(self, timeout: float) -> DrawnBatch | None:
        """The next batch, if it is there within `timeout` s."""
        try:
            message = self._filled.get(timeout=timeout) if timeout else self._filled.get_nowait()
        except queue.Empty:
            return None
        if isinstance(message, BaseException):
            raise message
        self._merge_and_check(message)
        return message if isinstance(message, DrawnBatch) else None

    def _copy_ahead(self) -> None:
        if (part := self._receive(0)) is not None:
            self._ahead = self._start_copy([part])

    def _start_copy(self, parts: Sequence[Any]) -> tuple[Sequence[Any], Batch]:
        part: DrawnBatch = parts[0]
        buffer, count = self._ring[part.step], len(part.numbers)
        ids = torch.from_numpy(buffer.ids[:count])
        batch = Batch(
            pixels=None,
            ids=ids,
            weights=torch.from_numpy(buffer.weights[:count]),
            keys=StoredKeys(self._samples, part.sources, part.numbers),
            sources=torch.from_numpy(buffer.sources[:count]),
            step=part.step,
            global_size=self.plan.slots.batch_size(part.step),
            features={name: self._features(buffer, name, count) for name in self._stored.features},
            pictures=torch.from_numpy(buffer.pictures[:count]),
            lengths=None if self.plan.text_lengths is None else self.plan.text_lengths(ids),
        )
        return parts, self._prefetch.start(batch)

    def _features(self, buffer: BatchBuffer, name: str, count: int) -> torch.Tensor:
        """The first rows of features in a buffer, in their stored type."""
        store, part = self._stored.features[name]
        return torch.from_numpy(buffer.features[name][:count]).view(DTYPES[store.manifest.parts[part].dtype])

    def _doing(self) -> str:
        lines = [f"  source {name!r}: {health.funnel()}" for name, health in self.health.sources.items()]
        return "\n".join(lines)

    def close(self) -> None:
        """End the thread and release the shards."""
        self._closed.set()
        self._free.release()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        super().close()


class _Drawer:
    """Draws and gathers batches, one after the other, in a thread."""

    def __init__(self, loader: FeatureLoader) -> None:
        plan = loader.plan
        self._plan, self._stored, self._samples = plan, loader._stored, loader._samples
        self._ring, self._free, self._filled, self._closed = loader._ring, loader._free, loader._filled, loader._closed
        self._health, self._stopwatch = Health(plan.names), Stopwatch()
        self._lanes: Numbers = np.asarray(plan.slots.lanes, dtype=np.int64)
        start = [plan.start.lanes.get(lane) for lane in plan.slots.lanes]
        self._drawn: Numbers = np.array([0 if one is None else one.drawn for one in start], dtype=np.int64)
        self._threads = ThreadPoolExecutor(1)
        self._windows = [
            LaneWindows(
                order,
                plan.slots.lanes,
                [Cursor() if one is None else one.cursors[source] for one in start],
                samples,
                partial(self._health_of, samples.name),
                partial(self._report, samples.name),
                self._threads,
            )
            for source, (order, samples) in enumerate(zip(loader._orders, self._samples, strict=True))
        ]
        self._slots = lru_cache(maxsize=4)(self._make_slots)

    def run(self) -> None:
        """Fill buffer after buffer, until the loader is closed."""
        step = self._plan.start.step
        try:
            while True:
                self._stopwatch.begin(IDLE)
                self._free.acquire()
                if self._closed.is_set():
                    return
                self._filled.put(self._fill(step))
                step += 1
        except _Closed:
            return
        except BaseException as error:
            self._filled.put(error)
        finally:
            for windows in self._windows:
                windows.close()
            self._threads.shutdown(wait=False)

    def _health_of(self, name: str) -> Any:
        return self._health.sources[name]

    def _report(self, name: str) -> None:
        """Report now if much of a source is bad, as the loader ends the run then."""
        if self._closed.is_set():
            raise _Closed
        health = self._health.sources[name]
        if health.read - health.used >= INTERIM_DROPS or health.unopened:
            self._filled.put(WorkerReport(self._health.take(), self._stopwatch.take()))

    def _make_slots(self, batch_size: int) -> tuple[Numbers, Numbers, Numbers]:
        """Of each slot, its lane in the rank and its number among the lane's slots; of each lane, its slots."""
        total = self._plan.slots.total
        counts = (self._lanes + 1) * batch_size // total - self._lanes * batch_size // total
        lanes = np.repeat(np.arange(len(counts)), counts)
        return lanes, np.arange(len(lanes)) - (np.cumsum(counts) - counts)[lanes], counts

    def _fill(self, step: int) -> DrawnBatch:
        """Draw and gather a batch."""
        self._stopwatch.begin(ORDER)
        lanes, turns, counts = self._slots(self._plan.slots.batch_size(step))
        count, buffer = len(lanes), self._ring[step]
        sources = self._plan.mix.sources(self._lanes[lanes], self._drawn[lanes] + turns)
        self._drawn += counts
        buffer.sources[:count] = np.maximum(sources, 0)
        numbers: Numbers = np.zeros(count, dtype=np.int64)
        empty = sources < 0
        taken = []
        for source, windows in enumerate(self._windows):
            (slots,) = np.nonzero(sources == source)
            if not len(slots):
                continue
            found = windows.take(lanes[slots])
            numbers[slots] = found.numbers
            if not found.used.all():
                empty[slots[~found.used]] = True
                found, slots = found.only_used(), slots[found.used]
            taken.append((self._samples[source], slots, found))
        self._stopwatch.begin(READ)
        buffer.weights[:count] = ~empty
        for samples, slots, found in taken:
            whole = slice(0, count) if len(slots) == count else None
            self._gather(samples, slots if whole is None else whole, found.numbers, found.keys, buffer)
        if empty.any():
            buffer.clear(np.flatnonzero(empty))
        for windows in self._windows:
            windows.release_retired()
        positions = [windows.positions() for windows in self._windows]
        self._stopwatch.begin(IDLE)
        return DrawnBatch(
            self._health.take(),
            self._stopwatch.take(),
            step,
            sources,
            numbers,
            self._plan.slots.lanes,
            self._drawn.copy(),
            positions,
        )

    def _gather(self, samples: StoredSamples, slots: Any, numbers: Numbers, keys: Any, buffer: BatchBuffer) -> None:
        """Write the samples of one source to its slots; a slice are those of a whole batch."""
        buffer.pictures[slots], choices, views = samples.draw(numbers, keys)
        for name, rows in buffer.features.items():
            if isinstance(slots, slice):
                store, part = self._stored.features[name]
                out = torch.from_numpy(rows[slots]).view(DTYPES[store.manifest.parts[part].dtype])
                samples.gather(name, numbers, choices, views, out)
            else:
                rows[slots] = samples.gather(name, numbers, choices, views).view(torch.uint8).numpy()
        if self._stored.ids is not None:
            buffer.ids[slots] = samples.gather(IDS, numbers, choices, views).numpy()
