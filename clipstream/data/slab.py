"""Owns the ring of shared slabs: memory in which workers write the samples of coming batches at their final places.

One slab holds one batch of a rank: pixels, ids, weights, sources and checksums, each a plane over all slots. The
memory is an anonymous shared map made before the workers are forked, so it is no file, and a small /dev/shm (Docker's
64 MB) does not limit it. It never locks: a slot has one writer, and the loader says when a slab may be filled again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

_ALIGN = 4096


@dataclass(frozen=True)
class SlabShape:
    """What a slab holds.

    Attributes:
        samples: n, slots.
        height, width: pixels.
        text_width: T, ids a sample.
    """

    samples: int
    height: int
    width: int
    text_width: int


class Slab:
    """One batch's planes, as numpy views of the shared memory.

    Attributes:
        pixels: uint8 [n, H, W, 3].
        ids: int32 [n, T].
        weights: float32 [n].
        sources: uint8 [n].
        pictures: int64 [n], checksums of the picture files.
    """

    def __init__(self, memory: mmap.mmap, offset: int, shape: SlabShape) -> None:
        n = shape.samples

        def plane(dtype: type, *dims: int) -> np.ndarray[Any, Any]:
            nonlocal offset
            count = int(np.prod(dims))
            flat: np.ndarray[Any, Any] = np.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            view = flat.reshape(dims)
            offset += _aligned(view.nbytes)
            return view

        self.pixels = plane(np.uint8, n, shape.height, shape.width, 3)
        self.ids = plane(np.int32, n, shape.text_width)
        self.weights = plane(np.float32, n)
        self.sources = plane(np.uint8, n)
        self.pictures = plane(np.int64, n)

    def clear(self, slot: int) -> None:
        """Leave nothing in a slot of what was there: it holds no sample."""
        for values in (self.pixels, self.ids, self.weights, self.pictures):
            values[slot] = 0


class SlabRing:
    """`depth` slabs in one shared map; batch number t lies in slab t modulo depth."""

    def __init__(self, shape: SlabShape, depth: int) -> None:
        sizes = (shape.samples * shape.height * shape.width * 3, shape.samples * shape.text_width * 4)
        one = sum(_aligned(size) for size in (*sizes, shape.samples * 4, shape.samples, shape.samples * 8))
        self.memory = mmap.mmap(-1, max(one * depth, 1))
        self.slabs = [Slab(self.memory, i * one, shape) for i in range(depth)]

    def __getitem__(self, step: int) -> Slab:
        return self.slabs[step % len(self.slabs)]

    def bytes(self) -> np.ndarray[Any, Any]:
        """All of the memory, uint8."""
        return np.frombuffer(self.memory, dtype=np.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
