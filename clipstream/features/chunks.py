"""The chunk file: safetensors whose body begins at a whole page, with a CRC-32 of its header and body.

Any changed byte is found: the header has to be, byte for byte, the one that its own content gives, and the CRC-32 in
its metadata covers the rest of the header and the body.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.errors import DataError
from clipstream.features.manifest import RERUN, TEXTS, Manifest
from clipstream.utils.atomic_write import BLOCK

ROWS = "rows"
CRC = "crc32"
KEYS = "keys"  # metadata of a chunk of `texts`: digest of its keys
ORIGIN = "origin"  # metadata: Manifest.origin of the chunk's part
MOST_HEADER = 1 << 20  # bytes
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

    detail = ""

    @classmethod
    def at(cls, path: object, detail: str) -> DamagedChunk:
        """The error of the file at `path`."""
        error = cls(f"feature store: {path} {detail}: {RERUN}")
        error.detail = detail
        return error


@dataclass(frozen=True)
class ChunkID:
    """Which chunk a file is, and of how large a shard."""

    part: str
    source: str
    shard: int
    chunk: int
    shard_samples: int

    def meta(self, more: Mapping[str, str]) -> dict[str, str]:
        """As metadata of the header."""
        own = {"part": self.part, "source": self.source, "shard": self.shard, "chunk": self.chunk}
        return {**{name: str(value) for name, value in own.items()}, "samples": str(self.shard_samples), **more}


@dataclass(frozen=True)
class Header:
    """The parsed header of a chunk file."""

    meta: dict[str, str]
    layout: _Layout
    raw: bytes

    @property
    def id(self) -> ChunkID:
        """Which chunk the file says it is."""
        meta = self.meta
        return ChunkID(meta["part"], meta["source"], int(meta["shard"]), int(meta["chunk"]), int(meta["samples"]))

    @property
    def body_bytes(self) -> int:
        """Bytes of the body."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.layout.values())

    @property
    def rows(self) -> int:
        """Rows of a chunk of a part that has rows."""
        return self.layout[ROWS][1][0] if ROWS in self.layout else 0


def render(chunk: ChunkID, tensors: Mapping[str, torch.Tensor], more: Mapping[str, str] | None = None) -> list[Any]:
    """The file as buffers, header first; the same content gives the same bytes."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    bodies = [_bytes_of(tensor) for tensor in tensors.values()]
    meta = chunk.meta(more or {})
    sum_ = zlib.crc32(_header(meta, layout))
    for body in bodies:
        sum_ = zlib.crc32(body, sum_)
    return [_header({**meta, CRC: f"{sum_:08x}"}, layout), *bodies]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(meta: Mapping[str, str], layout: _Layout) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(meta)}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % BLOCK)
    return struct.pack("<Q", len(text)) + text


def read_header(handle: int, shown: object) -> Header:
    """The header of an open chunk file, checked except for its CRC.

    Args:
        shown: the file's name in messages.

    Raises DamagedChunk: it is none, or was changed.
    """
    raw = os.pread(handle, BLOCK, 0)
    length = 8 + int.from_bytes(raw[:8], "little")
    if len(raw) < BLOCK or length > MOST_HEADER or length % BLOCK:
        raise DamagedChunk.at(shown, "is damaged (its header has no readable length)")
    return parse_header(raw + os.pread(handle, length - BLOCK, BLOCK), shown)


def parse_header(raw: bytes, shown: object) -> Header:
    """The header that these bytes are, checked except for its CRC. Raises DamagedChunk."""
    try:
        values = json.loads(raw[8:])
        meta = values.pop("__metadata__")
        layout = {name: (_DTYPES[item["dtype"]], tuple(item["shape"])) for name, item in values.items()}
        same = _header(meta, layout) == raw
        header = Header(meta, layout, raw)
        same = same and CRC in meta and all(isinstance(value, str) for value in meta.values())
        if header.id.part == TEXTS:
            _ = layout["text_ends"], meta[KEYS]
        same = same and 0 <= header.id.shard_samples < 1 << 32
        sizes = [size for _, shape in layout.values() for size in shape or ("",)]
        same = same and all(type(size) is int and 0 <= size < 1 << 40 for size in sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedChunk.at(shown, f"is damaged (its header cannot be read: {error})") from error
    if not same:
        raise DamagedChunk.at(shown, "is damaged (its header was changed)")
    return header


def verify(handle: int, shown: object) -> Header:
    """The header of an open chunk file, after its CRC-32 was checked.

    Read by pread and not through a mapping: a failing disk raises OSError instead of killing the process.

    Raises DamagedChunk, OSError.
    """
    header = read_header(handle, shown)
    meta = {name: value for name, value in header.meta.items() if name != CRC}
    sum_ = zlib.crc32(_header(meta, header.layout))
    at, end = len(header.raw), len(header.raw) + header.body_bytes
    piece = memoryview(bytearray(PIECE))
    while at < end:
        count = os.preadv(handle, [piece[: min(PIECE, end - at)]], at)
        if count == 0:
            raise DamagedChunk.at(shown, f"is truncated ({end - at:,} of {end:,} bytes are missing)")
        sum_ = zlib.crc32(piece[:count], sum_)
        at += count
    if f"{sum_:08x}" != header.meta[CRC]:
        raise DamagedChunk.at(shown, "is damaged (its CRC-32 is wrong)")
    return header


def verify_file(path: Path, shown: object = "", *, crc: bool = True) -> Header:
    """`verify` for a whole file, which has to end with its body. Raises DamagedChunk: also for a missing file.

    Args:
        crc: whether the CRC-32 is checked.
    """
    shown = shown or path
    with opened(path, shown) as handle:
        try:
            header = (verify if crc else read_header)(handle, shown)
            size = os.fstat(handle).st_size
        except OSError as error:
            raise DamagedChunk.at(shown, f"cannot be read ({error.strerror})") from error
    if size != len(header.raw) + header.body_bytes:
        raise DamagedChunk.at(shown, "is damaged (it does not end where its header says)")
    return header


@contextlib.contextmanager
def opened(path: Path, shown: object) -> Iterator[int]:
    """A descriptor of a chunk file. Raises DamagedChunk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        detail = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise DamagedChunk.at(shown, detail) from error
    try:
        yield handle
    finally:
        os.close(handle)


def read_tensors(handle: int, header: Header) -> dict[str, torch.Tensor]:
    """The tensors of an open chunk file, as copies, not verified."""
    at, found = len(header.raw), {}
    for name, (dtype, shape) in header.layout.items():
        size = math.prod(shape) * dtype.itemsize
        data = bytearray(size)
        read = 0
        while read < size and (count := os.preadv(handle, [memoryview(data)[read:]], at + read)):
            read += count
        flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
        at += size
    return found


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


def find_key(tensors: Mapping[str, torch.Tensor], key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The samples int64 [n] of a chunk of the part `texts` that have a key; makes no object of each sample."""
    wanted = np.frombuffer(key.encode("utf-8", "surrogatepass"), np.uint8)
    ends = tensors["key_ends"].numpy()
    likely = np.flatnonzero(np.diff(ends, prepend=0) == len(wanted))
    rows = tensors["keys"].numpy()[ends[likely, None] + np.arange(-len(wanted), 0)]
    found: np.ndarray[Any, np.dtype[np.int64]] = likely[(rows == wanted).all(axis=1)]
    return found


def captions_of(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The captions of each sample of a chunk of the part `texts`."""
    texts = iter(strings(tensors, "text"))
    return [[next(texts) for _ in range(count)] for count in tensors["counts"].tolist()]


def check_texts(tensors: Mapping[str, torch.Tensor], shown: object, samples: int, captions: int) -> None:
    """Check that a chunk of the part `texts` has the keys and reasons of so many samples, and so many captions.

    Raises DamagedChunk.
    """
    try:
        counts = tensors["counts"].numpy()
        same = counts.shape == (samples,) and (counts >= 0).all() and counts.sum() == captions
        for name, count in (("key", samples), ("text", captions), ("reason", samples)):
            ends, data = tensors[f"{name}_ends"].numpy(), tensors[f"{name}s"]
            same = same and ends.shape == (count,) and data.dtype == torch.uint8 and data.ndim == 1
            steps = np.diff(ends, prepend=0, append=len(data))
            same = same and bool((steps >= 0).all()) and steps[-1] == 0
            if same:
                data.numpy().tobytes().decode("utf-8", "surrogatepass")
                starts = data.numpy()[ends[ends < len(data)]]
                same = not (starts >> 6 == 2).any()  # no text begins within a character
    except (KeyError, TypeError, ValueError) as error:  # a tensor is missing, or a text is not UTF-8
        raise DamagedChunk.at(shown, f"is damaged ({error})") from error
    if not same:
        raise DamagedChunk.at(shown, f"is damaged (it does not have the texts of {samples:,} samples)")


def expect(
    header: Header, shown: object, manifest: Manifest, part: str, source: str, shard: int, chunk: int, rows: int | None
) -> None:
    """Check that a chunk is the one that is looked for.

    Args:
        manifest: of the store.
        rows: of a part with rows.

    Raises DamagedChunk.
    """
    found = header.id
    if (found.part, found.source, found.shard, found.chunk) != (part, source, shard, chunk):
        raise DamagedChunk.at(shown, f"is chunk {found.chunk} of shard {found.shard} of {found.source}/{found.part}")
    if header.meta.get(ORIGIN) != manifest.origin(part, source):
        raise DamagedChunk.at(shown, "is of another feature store: another model or other settings made it")
    if rows is not None and header.rows != rows:
        raise DamagedChunk.at(shown, f"has {header.rows:,} rows, and the store's manifest {rows:,}")
