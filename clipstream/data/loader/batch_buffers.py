"""The memory of batches: a ring of buffers that workers fill, and the way of a full one to the device.

A ring of buffers, each of one batch of a rank: pixels, ids, weights, sources and checksums as arrays over
all slots, with each sample at its final position. The memory is an anonymous shared map made before the workers are
forked, so it is no file, and a small /dev/shm (Docker's 64 MB) does not limit it. Nothing is locked: a slot has one
writer, and the loader decides when a buffer is reused.

On a GPU the copy runs on its own stream, during the step before; the step's stream waits for it, the process does not.
The memory is page-locked for it if CUDA can do that, after the workers are forked.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.gpu_jpeg import LEAST_DB, JpegDecoder, crop_and_resize, decode_by_pillow
from clipstream.errors import Dropped, SettingsError
from clipstream.text import printable
from clipstream.utils.logs import announce, logger
from clipstream.utils.torch_state import page_lock, page_unlock

UNLOCK_SECONDS = 3.0  # to wait for cudaHostUnregister, which waits for the GPU, where a kernel may hang
_ALIGN = 4096  # bytes
_warn_once = functools.cache(logger.warning)


@dataclass(frozen=True)
class BufferShape:
    """The size of a batch buffer."""

    samples: int  # n, number of slots
    height: int  # of the pixels; 0 where there are none
    width: int
    text_width: int  # T, ids of a sample
    teacher_height: int = 0  # of the pixels of a live teacher; 0 where it takes the model's
    teacher_width: int = 0
    teacher_text_width: int = 0  # ids of a live teacher's tokenizer; 0 where it takes the model's
    stored: tuple[tuple[str, int], ...] = ()  # names of precomputed features, bytes of a row
    views: int = 1  # V, images of a sample
    roles: int = 0  # M, texts of a sample; 0 for one
    jpegs: bool = False  # whether slots of pixels may hold the files of JPEGs

    def arrays(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Name -> (dtype, shape) of the arrays of a buffer."""
        n = self.samples
        views = () if self.views == 1 else (self.views,)
        return {
            "pixels": (np.uint8, (n, *views, self.height, self.width, 3)),
            "ids": (np.int32, (n, self.text_width)),
            "weights": (np.float32, (n,)),
            "sources": (np.int32, (n,)),
            "checksums": (np.int64, (n,)),
            "groups": (np.int64, (n,)),
            "teacher_pixels": (np.uint8, (n, self.teacher_height, self.teacher_width, 3)),
            "teacher_ids": (np.int32, (n, self.teacher_text_width)),
            "roles": (np.int32, (n, self.roles)),
            "jpegs": (np.int32, (n, 7 if self.jpegs else 0)),
        }

    def rows(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Name -> (dtype, shape) of the stored rows of features, as bytes."""
        return {name: (np.uint8, (self.samples, size)) for name, size in self.stored}

    @property
    def nbytes(self) -> int:
        arrays = (*self.arrays().values(), *self.rows().values())
        return sum(_align(math.prod(dims) * np.dtype(dtype).itemsize) for dtype, dims in arrays)


class BatchBuffer:
    """The arrays of one batch, as numpy views of the shared memory."""

    pixels: np.ndarray[Any, Any]  # uint8 [n, H, W, 3], with several views [n, V, H, W, 3]
    ids: np.ndarray[Any, Any]  # int32 [n, T]
    weights: np.ndarray[Any, Any]  # float32 [n]
    sources: np.ndarray[Any, Any]  # int32 [n]
    checksums: np.ndarray[Any, Any]  # int64 [n], checksums of the image files
    groups: np.ndarray[Any, Any]  # int64 [n], labels of the samples' groups
    teacher_pixels: np.ndarray[Any, Any]  # uint8 [n, H', W', 3]
    teacher_ids: np.ndarray[Any, Any]  # int32 [n, T']
    roles: np.ndarray[Any, Any]  # int32 [n, M], of several texts
    jpegs: np.ndarray[Any, Any]  # int32 [n, 7], see Batch.jpegs
    stored: dict[str, np.ndarray[Any, Any]]  # stored rows by name, uint8 [n, bytes]

    def __init__(self, memory: mmap.mmap, offset: int, shape: BufferShape) -> None:
        def array(dtype: type, dims: tuple[int, ...]) -> np.ndarray[Any, Any]:
            nonlocal offset
            values: np.ndarray[Any, Any] = np.ndarray(dims, dtype, memory, offset)
            offset += _align(values.nbytes)
            return values

        for name, (dtype, dims) in shape.arrays().items():
            setattr(self, name, array(dtype, dims))
        self.stored = {name: array(dtype, dims) for name, (dtype, dims) in shape.rows().items()}

    def clear(self, slot: Any) -> None:
        """Empty a slot, or several: nothing of an earlier sample stays in it."""
        own = (self.pixels, self.ids, self.weights, self.checksums, self.groups, self.jpegs)
        for values in (*own, self.teacher_pixels, self.teacher_ids, self.roles, *self.stored.values()):
            values[slot] = 0


class BufferRing:
    """`depth` batch buffers in one shared map; batch number t is in buffer t modulo depth.

    Raises SettingsError: the machine has not so much memory.
    """

    def __init__(self, shape: BufferShape, depth: int) -> None:
        one = shape.nbytes
        if one * depth > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise SettingsError(
                f"{depth:,} batches of {shape.samples:,} samples take {one * depth / 2**30:,.1f} GiB, more than the "
                "memory of this machine: lower --data.prefetch, --data.global-batch-size or the evaluator's batch_size"
            )
        self.memory = mmap.mmap(-1, max(one * depth, 1))
        self.buffers = [BatchBuffer(self.memory, i * one, shape) for i in range(depth)]

    def __getitem__(self, step: int) -> BatchBuffer:
        return self.buffers[step % len(self.buffers)]

    def bytes(self) -> np.ndarray[Any, Any]:
        """All of the memory, uint8."""
        return np.frombuffer(self.memory, dtype=np.uint8)


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class HostBatches:
    """Brings batches to the CPU: copies, or views of the shared buffer, valid until the next batch is asked for.

    Attributes:
        ahead: whether a batch may be copied before it is asked for.
        zero_copy: whether batches are views.
        broken: of the batch that was waited for last, rows of images that cannot be decoded, with the error. Their
            pixels and weights are 0.
    """

    ahead = False
    broken: Mapping[int, str] = {}

    def __init__(self, zero_copy: bool = False) -> None:
        self.zero_copy = zero_copy

    def start(self, batch: Batch) -> Batch:
        """Begin to copy a batch; the result may be used after `finish`."""
        return batch

    def wait(self, batch: Batch) -> Batch:
        """Wait until the images of a batch from `start` are decoded."""
        return batch

    def finish(self, batch: Batch) -> Batch:
        """The batch that `wait` returned, ready for the current stream."""
        return batch if self.zero_copy else batch.clone()

    def reading(self, step: int, wait: bool = False) -> bool:
        """Whether the buffer of batch number `step` is still being read; with `wait`, wait until it is not."""
        return False  # the caller has finished with a batch when it asks for the next one

    def close(self) -> None:
        """Release what was acquired; no batch may be started afterwards."""


class CudaPrefetch(HostBatches):
    """Copies to a GPU on its own stream, from page-locked memory; where CUDA cannot lock it, a warning says so.

    Args:
        device: torch's name of the GPU.
        ring: the buffers; their memory is page-locked here, so that processes are to be forked before.
    """

    ahead = True

    def __init__(self, device: str, ring: BufferRing) -> None:
        super().__init__()
        self._device = torch.device(device)
        cuda: Any = torch.cuda  # untyped in torch
        self.stream = cuda.Stream(self._device)
        self._done: dict[int, Any] = {}  # step -> event after its copy
        memory = torch.from_numpy(ring.bytes())
        self._address: int | None = None  # of page-locked memory
        if error := page_lock(memory, self._device):
            _warn_once(
                f"batch memory cannot be pinned ({error}): copies to the GPU are slower; `ulimit -l` may be too low"
            )
        else:
            self._address = memory.data_ptr()

    def close(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            page_unlock(address, self._device, UNLOCK_SECONDS)

    def start(self, batch: Batch) -> Batch:
        with torch.cuda.stream(self.stream):
            moved = batch.to(self._device)
            self._done[batch.step] = self.stream.record_event()
        return moved

    def finish(self, batch: Batch) -> Batch:
        # The current stream waits for the copy, and the memory is not reused before it is read.
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.stream)
        for tensor in batch.tensors():
            tensor.record_stream(current)
        return batch

    def reading(self, step: int, wait: bool = False) -> bool:
        event = self._done.get(step)
        if event is None:
            return False
        if wait:
            event.synchronize()
        elif not event.query():
            return True
        del self._done[step]
        return False


class JpegBatches(HostBatches):
    """Batches of which workers left JPEGs undecoded: a thread decodes them, and `copies` brings all to the device.

    Args:
        copies: for a GPU, on whose stream the thread decodes.
        device: torch's name of it.
        told: whether to print which decoder it is, and what workers left to it of the first batch.

    Raises SettingsError: as JpegDecoder.
    """

    def __init__(self, copies: HostBatches, device: str, told: bool) -> None:
        super().__init__(copies.zero_copy)
        self.ahead = copies.ahead
        self._copies, self._decoder = copies, (decoder := JpegDecoder(device))
        self._pool = ThreadPoolExecutor(1, "decoder")
        self._decoding: dict[int, Future[tuple[Batch, dict[int, str]]]] = {}  # by step
        self._untold, self._refused = told, 0
        if told:
            announce(f"decoder  {decoder.name}; a test image has {decoder.decibels:.0f} dB to Pillow's pixels")
            if decoder.device.type == "cpu":
                logger.warning("data.decoder gpu: without a GPU, this process decodes, which is slow: for tests")
            elif decoder.decibels < LEAST_DB:
                said = f"its pixels are below {LEAST_DB:.0f} dB: chroma may be repeated in place of interpolated"
                logger.warning(f"data.decoder gpu: {said}; fast is closer to open_clip's")

    def start(self, batch: Batch) -> Batch:
        self._decoding[batch.step] = self._pool.submit(self._decode, batch)
        return batch

    def wait(self, batch: Batch) -> Batch:
        decoded, self.broken = self._decoding.pop(batch.step).result()
        return decoded

    def finish(self, batch: Batch) -> Batch:
        return self._copies.finish(batch)

    def reading(self, step: int, wait: bool = False) -> bool:
        if (decoding := self._decoding.get(step)) is not None:
            if not wait and not decoding.done():
                return True
            decoding.result()
        return self._copies.reading(step, wait)

    def close(self) -> None:
        self._pool.shutdown()
        self._decoder.close()
        self._copies.close()

    def _decode(self, batch: Batch) -> tuple[Batch, dict[int, str]]:
        with torch.cuda.stream(getattr(self._copies, "stream", None)):  # None: a context without effect
            return self._decode_on_stream(batch)

    def _decode_on_stream(self, batch: Batch) -> tuple[Batch, dict[int, str]]:
        assert batch.pixels is not None and batch.jpegs is not None
        rows, broken = batch.jpegs[:, 0].nonzero().flatten().tolist(), dict[int, str]()
        if self._untold:
            self._untold = False
            announce(f"decoder  gets {len(rows)} of the first batch's {len(batch)} images, workers decode the others")
        slots, weights = batch.pixels.permute(0, 2, 3, 1).reshape(len(batch), -1).numpy(), batch.weights
        files = [slots[row, :size] for row, size in zip(rows, batch.jpegs[rows, 0].tolist(), strict=True)]
        images = self._decoder(files)
        for place, row in enumerate(rows):
            if images[place] is None:
                self._refused += 1
                if str(self._refused).strip("0") == "1":  # 1, 10, 100
                    name = printable(batch.keys[row], 200)
                    logger.warning(f"decoder gpu: {self._refused} images refused, and left to Pillow: {name}")
                try:
                    images[place] = decode_by_pillow(files[place]).to(self._decoder.device)
                except Dropped as drop:
                    broken[row] = drop.detail
        whole = [place for place, image in enumerate(images) if image is not None]
        pixels = batch.pixels.to(self._decoder.device, non_blocking=self.ahead, copy=True)
        if broken:
            weights = weights.clone()
            weights[list(broken)] = 0
            pixels[list(broken)] = 0
        if whole:
            into = [rows[place] for place in whole]
            size = (pixels.shape[2], pixels.shape[3])
            made = crop_and_resize([image for image in images if image is not None], batch.jpegs[into], size)
            pixels[torch.tensor(into, device=pixels.device)] = made
        decoded = replace(batch, pixels=pixels, weights=weights, jpegs=None)
        return self._copies.start(decoded), broken


def device_prefetch_for(device: str, ring: BufferRing, zero_copy: bool = False) -> HostBatches:
    """The prefetch that suits the device; `zero_copy`: see HostBatches."""
    return CudaPrefetch(device, ring) if device.startswith("cuda") else HostBatches(zero_copy)
