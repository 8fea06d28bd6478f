"""Time of a training step by part: marks at the places where parts begin enter, seconds by part (`parts`) leave.

A part lasts until the next one begins, so nothing is counted twice and nothing is left out. Marks are taken everywhere
in the package by `begin` and `timed`, which do nothing unless a `StepTimer` is active.

On a GPU a mark is a CUDA event in the stream of the step: a part's time is that of the stream, including the time it
waits for the host. Events are read when they are complete; nothing waits for them. Elsewhere, marks are of the host's
clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from clipstream.utils.timing import OTHER

UNREAD = 64  # steps whose marks are kept at most, while they are complete
RANGE = "clipstream::"  # before the name of a part, in the trace of a profile


class Mark(Protocol):
    """A moment, with the interface of torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Take the moment, in a stream."""

    def query(self) -> bool:
        """Whether the moment has passed, without waiting for it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this moment to `end`."""


class HostMark:
    """A moment of the host's clock."""

    seconds = 0.0

    def record(self, stream: Any) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostMark) -> float:
        return 1e3 * (end.seconds - self.seconds)


class StepTimer:
    """Measures the parts of the steps of this rank.

    Args:
        device: torch's name of the device that the steps run on.

    Attributes:
        ranges: whether parts are named ranges of torch's profiler as well.
    """

    def __init__(self, device: str) -> None:
        cuda: Any = torch.cuda  # untyped in torch
        self._stream: Callable[[], Any] = lambda: None
        self._make_mark: Callable[[], Mark] = HostMark
        if torch.device(device).type == "cuda":
            self._stream = partial(cuda.current_stream, torch.device(device))
            self._make_mark = partial(cuda.Event, enable_timing=True)
        self._free: list[Mark] = []  # read, to be taken again
        self._marks: list[tuple[str | None, Mark]] = []  # and the part that begins; None for a pause
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
    def paused(self) -> Iterator[None]:
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
def timed(name: str) -> Iterator[None]:
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
