"""Shared memory into which workers write the samples of coming batches, each at its final position.

A ring of buffers, each of one batch of a rank: pixels, ids, weights, sources and checksums as arrays over all slots.
The memory is an anonymous shared map made before the workers are forked, so it is no file, and a small /dev/shm
(Docker's 64 MB) does not limit it. Nothing is locked: a slot has one writer, and the loader decides when a buffer is
reused.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

_ALIGN = 4096


@dataclass(frozen=True)
class BufferShape:
    """The size of a batch buffer.

    Attributes:
        samples: n, number of slots.
        height, width: of the pixels.
        text_width: T, ids of a sample.
    """

    samples: int
    height: int
    width: int
    text_width: int

    def arrays(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Name -> (dtype, shape) of the arrays of a buffer."""
        n = self.samples
        return {
            "pixels": (np.uint8, (n, self.height, self.width, 3)),
            "ids": (np.int32, (n, self.text_width)),
            "weights": (np.float32, (n,)),
            "sources": (np.uint8, (n,)),
            "pictures": (np.int64, (n,)),
        }


class BatchBuffer:
    """The arrays of one batch, as numpy views of the shared memory.

    Attributes:
        pixels: uint8 [n, H, W, 3].
        ids: int32 [n, T].
        weights: float32 [n].
        sources: uint8 [n].
        pictures: int64 [n], checksums of the picture files.
    """

    pixels: np.ndarray[Any, Any]
    ids: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]
    sources: np.ndarray[Any, Any]
    pictures: np.ndarray[Any, Any]

    def __init__(self, memory: mmap.mmap, offset: int, shape: BufferShape) -> None:
        for name, (dtype, dims) in shape.arrays().items():
            flat: np.ndarray[Any, Any] = np.frombuffer(memory, dtype, int(np.prod(dims)), offset)
            setattr(self, name, flat.reshape(dims))
            offset += _aligned(flat.nbytes)

    def clear(self, slot: int) -> None:
        """Empty a slot: nothing of an earlier sample stays in it."""
        for values in (self.pixels, self.ids, self.weights, self.pictures):
            values[slot] = 0


class BufferRing:
    """`depth` batch buffers in one shared map; batch number t is in buffer t modulo depth."""

    def __init__(self, shape: BufferShape, depth: int) -> None:
        sizes = (int(np.prod(dims)) * np.dtype(dtype).itemsize for dtype, dims in shape.arrays().values())
        one = sum(map(_aligned, sizes))
        self.memory = mmap.mmap(-1, max(one * depth, 1))
        self.buffers = [BatchBuffer(self.memory, i * one, shape) for i in range(depth)]

    def __getitem__(self, step: int) -> BatchBuffer:
        return self.buffers[step % len(self.buffers)]

    def bytes(self) -> np.ndarray[Any, Any]:
        """All of the memory, uint8."""
        return np.frombuffer(self.memory, dtype=np.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
