"""Owns the way of a batch from its slab to the device, and when the slab may be filled again.

On a GPU the copy runs on a stream of its own, beside the step before it; the step's stream waits for it, the process
does not. It never allocates slabs (`slab` does) and never asks for a batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from clipstream.batch import Batch
from clipstream.data.slab import SlabRing


class Copies(Protocol):
    """How batches come to the device.

    Attributes:
        ahead: whether a batch may be copied before it is asked for.
    """

    ahead: bool

    def start(self, batch: Batch) -> Batch:
        """Begin to copy a batch; it is not to be used before `finish`."""
        ...

    def finish(self, batch: Batch) -> Batch:
        """The batch that `start` gave, for use on the present stream."""
        ...

    def reading(self, step: int, wait: bool = False) -> bool:
        """Whether the slab of batch number `step` is still read; with `wait`, not any more."""
        ...


class InPlace:
    """On the CPU a batch stays in its slab, and is read there until the next one is asked for."""

    ahead = False

    def start(self, batch: Batch) -> Batch:
        """The batch."""
        return batch

    def finish(self, batch: Batch) -> Batch:
        """The batch."""
        return batch

    def reading(self, step: int, wait: bool = False) -> bool:
        """Never: who asks for the next batch has done with this one."""
        return False


class OnStream:
    """Copies to a GPU on a stream of its own, out of pinned slabs.

    Args:
        device: torch's name of the GPU.
        ring: the slabs, which are registered as pinned memory here.
    """

    ahead = True

    def __init__(self, device: str, ring: SlabRing) -> None:
        self._device = torch.device(device)
        cuda: Any = torch.cuda  # untyped in torch
        self._stream = cuda.Stream(self._device)
        self._done: dict[int, Any] = {}  # step -> event behind its copy
        _register_pinned(ring)

    def start(self, batch: Batch) -> Batch:
        """The batch on the device, while it is copied."""
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
            self._done[batch.step] = self._stream.record_event()
        return moved

    def finish(self, batch: Batch) -> Batch:
        """The same batch: the present stream waits, and the memory is not given to another copy before it is read."""
        present = torch.cuda.current_stream(self._device)
        present.wait_stream(self._stream)
        for tensor in batch.moving():
            tensor.record_stream(present)
        return batch

    def reading(self, step: int, wait: bool = False) -> bool:
        """Whether the copy still runs."""
        event = self._done.get(step)
        if event is None:
            return False
        if wait:
            event.synchronize()
        elif not event.query():
            return True
        del self._done[step]
        return False


def copies_to(device: str, ring: SlabRing) -> Copies:
    """What suits the device."""
    return OnStream(device, ring) if device.startswith("cuda") else InPlace()


def _register_pinned(ring: SlabRing) -> None:
    """Let CUDA copy from the slabs without a copy of its own in between."""
    memory = ring.bytes()
    cuda: Any = torch.cuda
    code = cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with code {int(code)}")
