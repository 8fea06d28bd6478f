"""Files of tensors in the safetensors format, laid out in memory exactly as they are written.

Tensors enter between two steps; buffers to write while the next steps run leave. The memory is allocated at the first
copy and reused: as much as the files of a checkpoint take.

On a GPU, weights and moments are copied on a stream of their own while the next step computes: forward and backward
passes only read them, and the optimizer's next update waits for the copy. Other tensors (batch norm statistics, weight
averages, gathered shards) may be written to earlier, and are copied in order with the computation.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from clipstream.training.parallel import full_tensor
from clipstream.utils.atomic_write import BLOCK

Tensors = Mapping[str, torch.Tensor]


class Snapshot:
    """The contents of files, copied from tensors.

    Args:
        device: of this rank.
        optimizer: the only code that changes its parameters and moments.
        kept: whether this rank keeps the copies; other ranks only take part in gathering sharded tensors.

    Attributes:
        files: the last copy, by file name.
    """

    def __init__(self, device: str, optimizer: torch.optim.Optimizer, *, kept: bool) -> None:
        self.files: dict[str, TensorFile] = {}
        self._device, self._optimizer, self._kept = device, optimizer, kept
        self._stream: Any = None
        self._copied: list[Any] = []  # CUDA events to wait for
        if kept and device.startswith("cuda"):
            stream: Any = torch.cuda.Stream  # untyped in torch
            self._stream = stream(device)
            optimizer.register_step_pre_hook(lambda *_: self._delay_update())

    def take(self, files: Mapping[str, Tensors]) -> None:
        """Copy the tensors of files over the last copy. Collective if tensors are sharded."""
        if self._kept:
            for name in [name for name in self.files if name not in files or not self.files[name].fits(files[name])]:
                del self.files[name]
            for name, tensors in files.items():
                if name not in self.files:
                    self.files[name] = TensorFile(tensors, pin=self._stream is not None)
        stable: set[int] = set()  # addresses that only the optimizer's update writes to
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            parameters = (p for group in self._optimizer.param_groups for p in group["params"])
            moments = (v for state in self._optimizer.state.values() for v in state.values() if torch.is_tensor(v))
            stable = {t.data_ptr() for t in (*parameters, *moments) if t.is_cuda and not isinstance(t, DTensor)}
        with torch.no_grad():
            for name, tensors in files.items():
                for key, tensor in tensors.items():
                    whole = full_tensor(tensor)
                    if self._kept:
                        aside = whole is tensor and tensor.data_ptr() in stable
                        with torch.cuda.stream(self._stream) if aside else contextlib.nullcontext():
                            target = self.files[name].views[key]
                            target.copy_(whole, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._copied = [self._stream.record_event(), torch.cuda.current_stream(self._device).record_event()]

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread."""
        for event in self._copied:
            event.synchronize()

    def _delay_update(self) -> None:
        """Let the GPU finish the copies before the optimizer's update, without blocking this thread."""
        for event in self._copied:
            torch.cuda.current_stream(self._device).wait_event(event)


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class TensorFile:
    """The content of a file: memory for tensors of these names, types and shapes.

    Args:
        tensors: names, types and shapes, without their values; of sharded tensors the full shape.
        pin: whether to use page-locked memory, if available, so that a GPU can copy into it asynchronously. torch
            allocates it in powers of two: up to twice the size.

    Attributes:
        views: name -> a tensor in the file's body, to be filled.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, pin: bool = False) -> None:
        self._layout = _layout(tensors)
        # Wide types first, as in safetensors: every tensor is aligned to its item size.
        order = sorted(self._layout, key=lambda name: (-self._layout[name][0].itemsize, name))
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            dtype, shape = self._layout[name]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self._offsets[name] = (start, end)
        memory = torch.empty(0, dtype=torch.uint8)
        if pin:
            with contextlib.suppress(RuntimeError):  # not enough page-locked memory
                memory = torch.empty(end + BLOCK, dtype=torch.uint8, pin_memory=True)
        if not len(memory):
            memory = torch.empty(end + BLOCK, dtype=torch.uint8)
        begin = -memory.data_ptr() % BLOCK  # direct I/O needs memory aligned to the disk's blocks
        self._body = memory[begin : begin + end]
        self.views: dict[str, torch.Tensor] = {}
        for name, (start, stop) in self._offsets.items():
            dtype, shape = self._layout[name]
            self.views[name] = self._body[start:stop].view(dtype).view(shape)

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these have the same names, types and shapes."""
        return self._layout == _layout(tensors)

    def parts(self, metadata: Mapping[str, str]) -> list[Any]:
        """Header and body of the file, as buffers; the body is no copy.

        Args:
            metadata: texts for the header.
        """
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name, (start, end) in self._offsets.items():
            dtype, shape = self._layout[name]
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % BLOCK)  # so that the body is aligned in the file
        return [struct.pack("<Q", len(text)) + text, self._body.numpy()]

    def nbytes(self) -> int:
        """Size of the body in bytes."""
        return self._body.numel()


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file with their names, on the CPU, one at a time.

    Raises:
        OSError, SafetensorError: the file does not exist, or is no safetensors file.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)


def metadata(path: Path) -> dict[str, str]:
    """The metadata in a file's header."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _layout(tensors: Mapping[str, torch.Tensor]) -> _Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
