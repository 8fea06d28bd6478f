"""Copies batches from their shared buffer to the device, and tells when the buffer may be reused.

On a GPU the copy runs on its own stream, during the step before; the step's stream waits for it, the process does not.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from clipstream.data.batch import Batch
from clipstream.data.loader.shared_buffers import BufferRing


class DevicePrefetch(Protocol):
    """Brings batches to the device.

    Attributes:
        ahead: whether a batch may be copied before it is asked for.
    """

    ahead: bool

    def start(self, batch: Batch) -> Batch:
        """Begin to copy a batch; the result may be used after `finish`."""
        ...

    def finish(self, batch: Batch) -> Batch:
        """The batch that `start` returned, ready for the current stream."""
        ...

    def reading(self, step: int, wait: bool = False) -> bool:
        """Whether the buffer of batch number `step` is still being read; with `wait`, wait until it is not."""
        ...


class HostBatches:
    """Batches for the CPU: copies, or views of the shared buffer, which are valid until the next batch is asked for.

    Args:
        views: whether they are views.
    """

    ahead = False

    def __init__(self, views: bool = False) -> None:
        self._views = views

    def start(self, batch: Batch) -> Batch:
        """The batch itself."""
        return batch

    def finish(self, batch: Batch) -> Batch:
        """The batch, or a copy."""
        return batch if self._views else batch.clone()

    def reading(self, step: int, wait: bool = False) -> bool:
        """False: the caller has finished with a batch when it asks for the next one."""
        return False


class CudaPrefetch:
    """Copies to a GPU on its own stream, from pinned memory.

    Args:
        device: torch's name of the GPU.
        ring: the buffers; their memory is pinned here.

    Raises:
        RuntimeError: CUDA cannot pin the memory.
    """

    ahead = True

    def __init__(self, device: str, ring: BufferRing) -> None:
        self._device = torch.device(device)
        cuda: Any = torch.cuda  # untyped in torch
        self._stream = cuda.Stream(self._device)
        self._done: dict[int, Any] = {}  # step -> event after its copy
        memory = ring.bytes()
        code = int(cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with code {code}")

    def start(self, batch: Batch) -> Batch:
        """The batch on the device, while it is being copied."""
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
            self._done[batch.step] = self._stream.record_event()
        return moved

    def finish(self, batch: Batch) -> Batch:
        """The same batch. The current stream waits for the copy, and its memory is not reused before it is read."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in batch.tensors():
            tensor.record_stream(current)
        return batch

    def reading(self, step: int, wait: bool = False) -> bool:
        """Whether the copy is still running."""
        event = self._done.get(step)
        if event is None:
            return False
        if wait:
            event.synchronize()
        elif not event.query():
            return True
        del self._done[step]
        return False


def device_prefetch_for(device: str, ring: BufferRing, views: bool = False) -> DevicePrefetch:
    """The prefetch that suits the device; `views`: see HostBatches."""
    return CudaPrefetch(device, ring) if device.startswith("cuda") else HostBatches(views)
