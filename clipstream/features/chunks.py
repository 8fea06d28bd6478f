"""The chunk file: safetensors whose body begins at a whole page, with a CRC-32 of its header and body.

Any changed byte is found: the header has to be, byte for byte, the one that its own content gives, and the CRC-32 in
its metadata covers the rest of the header and the body.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from clipstream.errors import DataError
from clipstream.features.manifest import RERUN, TEXTS
from clipstream.utils.atomic_write import BLOCK

ROWS = "rows"
CRC = "crc32"
KEYS = "keys"  # metadata of a chunk of `texts`: digest of its keys
MAX_HEADER = 1 << 20  # bytes
PIECE = 1 << 20  # bytes read at once; they stay in the processor's cache until they are summed
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class DamagedChunk(DataError):
    """A chunk is missing, truncated, changed, or another one."""


def damaged(path: object, reason: str) -> DamagedChunk:
    """The error for the chunk file at `path`."""
    return DamagedChunk(f"the feature store is damaged: {path}: {reason}: {RERUN}")


@dataclass(frozen=True)
class Header:
    """The parsed header of a chunk file."""

    meta: dict[str, str]
    layout: _Layout
    size: int  # bytes of the header

    @property
    def samples(self) -> int:
        """Samples of the shard that the chunk belongs to."""
        return int(self.meta["samples"])

    @property
    def captions(self) -> int:
        """Captions of a chunk of the part `texts`."""
        return self.layout["text_ends"][1][0]

    @property
    def body_bytes(self) -> int:
        """Bytes of the body."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.layout.values())

    def expect(self, meta: Mapping[str, str], path: object) -> None:
        """Raise DamagedChunk unless the header has all of `meta`, as `Manifest.chunk_meta` gives it."""
        if wrong := [name for name, value in meta.items() if self.meta.get(name) != value]:
            raise damaged(path, f"it is a chunk of another store, part or shard ({', '.join(wrong)} differ)")


def render(meta: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """The file as buffers, header first; the same content gives the same bytes."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    bodies = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    crc = zlib.crc32(_header(meta, layout))
    for body in bodies:
        crc = zlib.crc32(body, crc)
    return [_header({**meta, CRC: f"{crc:08x}"}, layout), *bodies]


def _header(meta: Mapping[str, str], layout: _Layout) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(meta)}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % BLOCK)
    return struct.pack("<Q", len(text)) + text


@contextlib.contextmanager
def opened(path: Path, shown: object) -> Iterator[BinaryIO]:
    """An open chunk file, unbuffered. Raises DamagedChunk: it is missing, or cannot be read.

    Args:
        shown: the file's name in messages.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise damaged(shown, error.strerror or "it cannot be read") from error


def read_header(file: BinaryIO, shown: object) -> Header:
    """The header of an open chunk file, checked except for its CRC. Raises DamagedChunk."""
    raw = file.read(BLOCK)
    length = 8 + int.from_bytes(raw[:8], "little")
    if BLOCK < length <= MAX_HEADER:
        raw += file.read(length - BLOCK)
    try:
        values = json.loads(raw[8:])
        meta = values.pop("__metadata__")
        layout = {name: (_DTYPES[item["dtype"]], tuple(item["shape"])) for name, item in values.items()}
        same = _header(meta, layout) == raw and all(type(value) is str for value in meta.values())
        sizes = [int(meta["samples"]), *(size for _, shape in layout.values() for size in shape)]
        same = same and all(type(size) is int and 0 <= size < 1 << 40 for size in sizes)
        if meta["part"] == TEXTS:
            _ = meta[KEYS], layout["text_ends"][1][0]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        same = False
    if not same:
        raise damaged(shown, "its header cannot be read")
    return Header(meta, layout, length)


def verify(file: BinaryIO, shown: object) -> Header:
    """The header of an open chunk file, after its CRC-32 was checked.

    The file is read and not mapped: a failing disk raises OSError instead of killing the process.

    Raises DamagedChunk, OSError.
    """
    header = read_header(file, shown)
    crc = zlib.crc32(_header({name: value for name, value in header.meta.items() if name != CRC}, header.layout))
    left, piece = header.body_bytes, memoryview(bytearray(PIECE))
    while left and (count := file.readinto(piece[: min(PIECE, left)])):  # type: ignore[attr-defined]
        crc = zlib.crc32(piece[:count], crc)
        left -= count
    if left or f"{crc:08x}" != header.meta.get(CRC):
        raise damaged(shown, "it is truncated" if left else "its CRC-32 is wrong")
    return header


def read_texts(file: BinaryIO, shown: object) -> tuple[Header, bytes]:
    """Header and content of an open chunk file of the part `texts`, verified. Raises DamagedChunk, OSError."""
    data = file.read()
    return verify(io.BytesIO(data), shown), data


def texts_tensors(keys: Sequence[str], captions: Sequence[Sequence[str]], reasons: Sequence[str]) -> dict[str, Any]:
    """The tensors of a chunk of the part `texts`: for each sample its key, captions, and why it was dropped or ''."""
    texts = [text for own in captions for text in own]
    tensors: dict[str, torch.Tensor] = {"counts": torch.tensor([len(own) for own in captions], dtype=torch.int64)}
    bodies = {}
    for name, items in (("key", keys), ("text", texts), ("reason", reasons)):
        raw = [item.encode("utf-8", "surrogatepass") for item in items]
        tensors[f"{name}_ends"] = torch.tensor([len(item) for item in raw], dtype=torch.int64).cumsum(0)
        joined = bytearray(b"".join(raw))
        bodies[f"{name}s"] = (
            torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        )
    return {**tensors, **bodies}  # int64 first: all tensors are aligned to their item size


def strings(tensors: Mapping[str, torch.Tensor], name: str) -> list[str]:
    """The keys ('key'), captions ('text') or reasons ('reason') of a chunk of the part `texts`."""
    data = tensors[f"{name}s"].numpy().tobytes()
    ends = tensors[f"{name}_ends"].tolist()
    return [str(data[a:b], "utf-8", "surrogatepass") for a, b in zip([0, *ends[:-1]], ends, strict=False)]


def captions_of(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The captions of each sample of a chunk of the part `texts`."""
    texts = iter(strings(tensors, "text"))
    return [[next(texts) for _ in range(count)] for count in tensors["counts"].tolist()]
