"""Owns files of tensors in the safetensors format: laid out in memory as they will lie in the file, and read again.

A file's body is one stretch of memory, filled in place and written as it is, so no tensor is copied once more to be
written, and the interpreter's lock is not held meanwhile; `safetensors.save_file` does both. Nothing is written here.

The format: the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape, offsets into the body;
`__metadata__`: texts by name), the body (https://huggingface.co/docs/safetensors).
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

from clipstream.durable import BLOCK

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
    """The content of a file to be: room for tensors of these names, types and shapes.

    Args:
        tensors: what it has room for; their content is not taken. Sharded ones have their whole shape.
        pin: whether a GPU should copy into it while it goes on computing: page-locked memory, if the system gives any.
            torch takes it in powers of two, so up to twice what is needed.

    Attributes:
        places: name -> a tensor in the file's body, to be filled.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, pin: bool = False) -> None:
        self._layout = _layout(tensors)
        # Wide types first, as the library has it: everything lies at a multiple of its own width.
        order = sorted(self._layout, key=lambda name: (-self._layout[name][0].itemsize, name))
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            dtype, shape = self._layout[name]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self._offsets[name] = (start, end)
        self._body = _memory(end, pin)
        self.places = {name: self._place(name) for name in order}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether it has room for exactly these."""
        return self._layout == _layout(tensors)

    def parts(self, metadata: Mapping[str, str]) -> list[Any]:
        """The file's content, in order; the body as it is at the time, not a copy."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name, (start, end) in self._offsets.items():
            dtype, shape = self._layout[name]
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % BLOCK)  # so that the body begins at a multiple
        return [struct.pack("<Q", len(text)) + text, self._body.numpy()]

    def nbytes(self) -> int:
        """Bytes of the body."""
        return self._body.numel()

    def _place(self, name: str) -> torch.Tensor:
        dtype, shape = self._layout[name]
        start, end = self._offsets[name]
        return self._body[start:end].view(dtype).view(shape)


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file by name, on the CPU, one after the other.

    Raises:
        OSError, SafetensorError: it is not there, or no such file.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            yield name, file.get_tensor(name)


def metadata(path: Path) -> dict[str, str]:
    """The texts in a file's header."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _layout(tensors: Mapping[str, torch.Tensor]) -> _Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _memory(size: int, pin: bool) -> torch.Tensor:
    """Bytes that begin at a multiple of a disk's blocks."""
    memory = torch.empty(0, dtype=torch.uint8)
    if pin:
        with contextlib.suppress(RuntimeError):  # there is not as much
            memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=True)
    if not len(memory):
        memory = torch.empty(size + BLOCK, dtype=torch.uint8)
    begin = -memory.data_ptr() % BLOCK
    return memory[begin : begin + size]
