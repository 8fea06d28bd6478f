"""Where the time of a step goes: its parts, their times, profiles of some steps, and the use of the machine.

`StepTimer` measures the parts of a step, by marks at the places where parts begin. The parts, by their names in
metrics.jsonl:

data            the loader's next batch, until every rank has one
copy            the batch is copied to the device, as far as the step waits for it
image_forward   the image tower, in all its forward passes but those of activation checkpointing
text_forward    the text tower, likewise
forward         of a forward pass, what is in neither tower; all of it where both are compiled as one
loss            the loss and the gradients of the features, with its communication
backward        the backward passes of the towers
communication   gradients are complete on this rank, and their sums over the ranks are not (DDP)
optimizer       gradient norm, clipping, update, averaged weights
other           the rest of the host's work, without training lines, evaluations and checkpoints

A part lasts until the next one begins, so nothing is counted twice and nothing is left out. Marks are taken everywhere
in the package by `begin` and `time_part`, which do nothing unless a `StepTimer` is active. On a GPU a mark is a CUDA
event in the stream of the step, and nothing waits for it; elsewhere, marks are of the host's clock.

`StepProfiler` records a few steps by torch's profiler on rank 0, with the parts as named ranges: a trace for Perfetto
or chrome://tracing, and the dearest operations, in RUN/profile/steps_FIRST-LAST.json.gz and .txt.

`Usage` reads the use of the device by a rank: utilisation, power and memory (of torch's allocator) of its GPU, else
processor time and memory of processes. Without `nvidia-ml-py` (`clipstream[gpu]`), utilisation and power are left out.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from clipstream.utils import atomic_write
from clipstream.utils.logs import logger

DATA, COPY = "data", "copy"
IMAGE_FORWARD, TEXT_FORWARD, FORWARD = "image_forward", "text_forward", "forward"
LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER = "loss", "backward", "communication", "optimizer", "other"
PARTS = (DATA, COPY, IMAGE_FORWARD, TEXT_FORWARD, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER)

UNREAD = 64  # steps whose marks are kept at most, while they are complete
RANGE = "clipstream::"  # before the name of a part, in the trace of a profile
FOLDER = "profile"
SHOWN = 20  # operations in the record; the text file has all
_OWN = (RANGE, "ProfilerStep")  # of names that are ranges, not operations


class HostMark:
    """A moment of the host's clock, with the interface of torch.cuda.Event, in ms."""

    seconds = 0.0

    def record(self, stream: Any) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostMark) -> float:
        return 1e3 * (end.seconds - self.seconds)


class StepTimer:
    """Measures the parts of the steps of this rank; with `ranges`, they are named ranges of torch's profiler, too."""

    def __init__(self, device: str) -> None:
        cuda: Any = torch.cuda  # untyped in torch
        self._stream: Callable[[], Any] = lambda: None
        self._make_mark: Callable[[], Any] = HostMark
        if torch.device(device).type == "cuda":
            self._stream = partial(cuda.current_stream, torch.device(device))
            self._make_mark = partial(cuda.Event, enable_timing=True)
        self._free: list[Any] = []  # read, to be taken again
        self._marks: list[tuple[str | None, Any]] = []  # and the part that begins; None for a pause
        self._ends: list[int] = []  # places in `_marks` at which steps end
        self._totals: dict[str, float] = {}  # of the steps whose marks were read
        self._steps = 0  # number of these
        self._thread = threading.get_ident()
        self.part: str | None = None  # the current one
        self.ranges = False
        self._range: Any = None

    def begin(self, name: str | None) -> None:
        """Begin a part; with None, nothing is measured until the next one begins."""
        if name != self.part:
            self._mark(name)

    def end_step(self) -> None:
        """End a step; what follows belongs to the next one."""
        self._mark(OTHER)
        self._ends.append(len(self._marks) - 1)
        if len(self._ends) >= UNREAD:
            self._read()

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds by part of the steps that are complete and were not taken yet, and the number of these steps."""
        self._read()
        taken = self._totals, self._steps
        self._totals, self._steps = {}, 0
        return taken

    def _mark(self, name: str | None) -> None:
        mark = self._free.pop() if self._free else self._make_mark()
        mark.record(self._stream())
        self._marks.append((name, mark))
        self.part = name
        # Ranges belong to a thread; a backward pass on a GPU has threads of its own.
        if (self.ranges or self._range is not None) and threading.get_ident() == self._thread:
            self._change_range(name)

    def _read(self) -> None:
        """Read the marks of complete steps; the newest steps may still be in the device's queue."""
        steps = len(self._ends)
        while steps and not self._marks[self._ends[steps - 1]][1].query():
            steps -= 1
        if not steps:
            return
        end = self._ends[steps - 1]
        for (name, mark), (_, following) in itertools.pairwise(self._marks[: end + 1]):
            if name is not None:
                self._totals[name] = self._totals.get(name, 0.0) + mark.elapsed_time(following) / 1e3
        self._free += [mark for _, mark in self._marks[:end]]
        self._marks, self._ends = self._marks[end:], [at - end for at in self._ends[steps:]]
        self._steps += steps

    def _change_range(self, name: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.ranges and name is not None:
            self._range = torch.profiler.record_function(RANGE + name)
            self._range.__enter__()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Take the marks of this process, within the context."""
        global _active
        before, _active = _active, self
        self.begin(OTHER)
        try:
            yield
            self.begin(None)  # not after an error, which may be one of the device
        finally:
            _active = before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure nothing within the context, and take no marks."""
        global _active
        before, _active = _active, None
        part = self.part
        self.begin(None)
        try:
            yield
        finally:
            _active = before
            self.begin(part)


_active: StepTimer | None = None


def begin(name: str) -> None:
    """Begin a part of the step, if a timer is active. Within a compiled function, marks do nothing."""
    if not torch.compiler.is_compiling() and _active is not None:
        _active.begin(name)


@contextmanager
def time_part(name: str) -> Iterator[None]:
    """A context that is a part of the step; afterwards, the part before it goes on."""
    timer = _active
    if torch.compiler.is_compiling() or timer is None:
        yield
        return
    before = timer.part
    timer.begin(name)
    try:
        yield
    finally:
        timer.begin(before)


def begin_when_backward_ends(name: str, output: torch.Tensor) -> None:
    """Begin a part when the backward pass through `output`, the next one, has all gradients of this rank.

    Callbacks at the end of a backward pass run in the order in which they were requested; DDP requests its own, which
    waits for the sums over the ranks, with its last gradient.
    """
    if torch.compiler.is_compiling() or _active is None:
        return
    engine: Any = torch.autograd.Variable._execution_engine
    hooked: Any = output  # untyped in torch
    hooked.register_hook(lambda gradient: engine.queue_callback(lambda: begin(name)))


class Operation(NamedTuple):
    """An operation in all its calls, in seconds. Self time is the time without that of operations it calls."""

    name: str
    calls: int
    self_device: float  # of kernels on the GPU; 0 without one
    device: float
    self_cpu: float
    cpu: float


class StepProfiler:
    """Profiles steps of a run, by their consecutive numbers from 1, on rank 0. Other ranks have one as well, which
    records nothing (`records`).
    """

    def __init__(self, steps: range, folder: Path, device: str, *, records: bool) -> None:
        self.steps, self._folder, self._records = steps, folder, records
        self._device = torch.device(device)
        self._profile: Any = None

    def begin_step(self, step: int) -> bool:
        """Begin a step, recording if it is to be profiled; whether it is recorded, or warms the profiler up."""
        if not self.steps or not self._records or not self.steps.start - 1 <= step < self.steps.stop:
            return False
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages about its own work
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, kinds.CUDA] if self._device.type == "cuda" else [kinds.CPU]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Profiler won't be using warmup")
                options = {"wait": 0, "warmup": self.steps.start - step, "active": len(self.steps), "repeat": 1}
                schedule = torch.profiler.schedule(**options)
                self._profile = torch.profiler.profile(activities=activities, schedule=schedule)
                self._profile.start()
        return True

    def end_step(self, step: int) -> bool:
        """End a step; whether the profile is complete: then all ranks call `finish`."""
        last = bool(self.steps) and step == self.steps[-1]
        if self._profile is not None and not last:
            self._profile.step()
        return last

    def finish(self) -> dict[str, object] | None:
        """Write the files; returns the record of the profile: steps, device, trace, operations. None if not recorded.
        Files that cannot be written are a warning, and missing.
        """
        if self._profile is None:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of the last step
        profile = self._profile
        self.close()
        averages = profile.key_averages()
        found = dearest(averages)
        name = f"steps_{self.steps[0]}-{self.steps[-1]}"
        record: dict[str, object] = {"steps": [self.steps[0], self.steps[-1]], "device": self._device.type}
        folder = self._folder / FOLDER
        draft = folder / f".{name}.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(draft))
            draft.replace(folder / f"{name}.json.gz")
            record["trace"] = f"{FOLDER}/{name}.json.gz"
            by = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
            text: str = averages.table(sort_by=by, row_limit=-1, max_name_column_width=100)
            atomic_write.replace(folder / f"{name}.txt", text.encode())
        except (OSError, RuntimeError) as error:
            reason = "its disk is full" if atomic_write.is_full(error) else str(error)
            logger.warning(f"the profile could not be written to {folder}: {reason}")
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return {**record, "operations": [one._asdict() for one in found[:SHOWN]]}

    def close(self) -> None:
        """Stop recording; what was recorded is dropped unless `finish` is called."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def dearest(averages: Iterable[Any]) -> list[Operation]:
    """The operations of `torch.profiler.profile.key_averages()`, the dearest first: by self time on the GPU, if any."""
    times = [f"{name}_time_total" for name in Operation._fields[2:]]  # in µs
    found = [
        Operation(event.key, int(event.count), *(getattr(event, name) / 1e6 for name in times))
        for event in averages
        if not event.key.startswith(_OWN)
    ]
    by_device = any(one.self_device for one in found)
    return sorted(found, key=lambda one: one.self_device if by_device else one.self_cpu, reverse=True)


GIB = 1 << 30
Figures = dict[str, float]


class Usage:
    """Reads the use of a device. `workers` returns the process ids of this rank's data workers; `kind`, 'gpu' or 'cpu',
    is the key of the figures in a training line.
    """

    def __init__(self, device: str, workers: Callable[[], Sequence[int]] = lambda: ()) -> None:
        self._device, self._workers = torch.device(device), workers
        self.kind = "gpu" if self._device.type == "cuda" else "cpu"
        # Of NVML, those that work here: key, function, its value for 1.
        self._nvml: list[tuple[str, Callable[[torch.device], int], float]] = [
            ("utilization", torch.cuda.utilization, 100),
            ("power_w", torch.cuda.power_draw, 1e3),
        ]
        self._began, self._spent = time.perf_counter(), _processor_seconds(())

    def read(self) -> Figures:
        """The figures of this rank since the last call; see `over_ranks`. Waits for nothing on the device."""
        return self._gpu() if self.kind == "gpu" else self._cpu()

    def _gpu(self) -> Figures:
        found: Figures = {}
        for one in list(self._nvml):
            key, read, unit = one
            try:
                found[key] = read(self._device) / unit
            except Exception as error:  # no nvidia-ml-py, no driver, or a GPU without this figure
                self._nvml.remove(one)
                logger.debug(f"training lines have no gpu.{key}: {error}")
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for name, key in (("allocated", "allocated_bytes.all.current"), ("reserved", "reserved_bytes.all.current"),
                          ("peak", "allocated_bytes.all.peak")):  # fmt: skip
            found[f"memory_{name}_gib"] = stats.get(key, 0) / GIB
        return found

    def _cpu(self) -> Figures:
        found: Figures = {}
        workers = self._workers()
        now, spent = time.perf_counter(), _processor_seconds(workers)
        if now > self._began:
            # A worker that began meanwhile counts from its beginning.
            new = sum(seconds - self._spent.get(pid, 0.0) for pid, seconds in spent.items())
            found["cores"] = new / (now - self._began)
        self._began, self._spent = now, spent
        own = memory_of(os.getpid())
        if "VmRSS" in own:
            found["memory_gib"] = own["VmRSS"] / GIB
            found["memory_peak_gib"] = own["VmHWM"] / GIB
        if rows := [memory["VmRSS"] for memory in map(memory_of, workers) if "VmRSS" in memory]:
            found["workers_memory_gib"] = sum(rows) / GIB
        return found


class PeakMemory:
    """Peak of a device's memory: CUDA's allocator, or on the CPU resident memory of the process (Linux).

    Its construction frees what is not used, and begins a new peak.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # not permitted: the peak is that of the process's life
            Path("/proc/self/clear_refs").write_text("5")
        self._before = memory_of("self").get("VmRSS", 0)

    def peak(self) -> int:
        """Most bytes in use since the construction, above those that were in use then."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device) - self._before)
        return memory_of("self").get("VmHWM", 0) - self._before


def over_ranks(figures: Iterable[Mapping[str, float]]) -> Figures:
    """Figures of all ranks as one: the largest of memory, the mean of the others."""
    by_key: dict[str, list[float]] = {}
    for of_rank in figures:
        for key, value in of_rank.items():
            by_key.setdefault(key, []).append(value)
    return {key: round(max(own) if "memory" in key else fmean(own), 3) for key, own in by_key.items()}


def _processor_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Processor time of this process, all threads, and of others that are there."""
    found = {os.getpid(): time.process_time()}
    for pid in pids:
        try:
            # Behind the name, which may contain spaces: fields 14 and 15 of proc(5) are user and system time.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):  # not Linux, or it has ended
            continue
    return found


def memory_of(pid: int | str) -> dict[str, int]:
    """Resident memory of a process in bytes, now (VmRSS) and at most (VmHWM); empty where Linux's /proc is not."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    rows = [line.split() for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:"))]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}
