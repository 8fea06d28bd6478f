"""Decompression of gzip and zstd files, which are recognized by their first bytes.

A compressed file is used completely or not at all: its checksum covers the whole content.
"""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable
from pathlib import Path

from clipstream.data.transport.transfer import CHUNK, ShardError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def packing(file: Path | bytes) -> str | None:
    """'gzip', 'zstd', or None for other files.

    Args:
        file: a path, or the first bytes of a file.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            file = opened.read(4)
    return next((name for magic, name in _MAGIC.items() if file.startswith(magic)), None)


def packed_version(path: Path) -> str | None:
    """A version of a compressed file, which changes with it; None for any other readable file.

    Raises:
        ShardError: `missing` or `unreadable`.
    """
    try:
        stat = path.stat()
        return None if packing(path) is None else f"{stat.st_mtime_ns}-{stat.st_size}"
    except FileNotFoundError as error:
        raise ShardError("missing", f"{path} is not there") from error
    except OSError as error:
        raise ShardError("unreadable", f"{path}: {error.strerror}") from error


def unpack(packed: Path, part: Path, received: Callable[[int], None]) -> None:
    """Decompress a gzip or zstd file into `part`.

    Args:
        received: called with the bytes written so far.

    Raises:
        ShardError: `bad_gzip` or `bad_zstd`, also for a truncated file.
        OSError: it cannot be read or written.
    """
    if packing(packed) == "zstd":
        _unpack_zstd(packed, part, received)
        return
    try:
        with gzip.open(packed, "rb") as source, open(part, "wb") as file:
            while data := source.read(CHUNK):
                file.write(data)
                received(file.tell())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ShardError("bad_gzip", f"{packed.name}: {error}") from error


def _unpack_zstd(packed: Path, part: Path, received: Callable[[int], None]) -> None:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        detail = f"{packed.name} is packed with zstd: pip install 'clipstream[zstd]', or unpack it"
        raise ShardError("bad_zstd", detail) from error
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    try:
        with open(packed, "rb") as source, open(part, "wb") as file:
            while chunk := source.read(CHUNK):
                while chunk:
                    if frame.eof:
                        frame = decompressor.decompressobj()
                    file.write(frame.decompress(chunk))
                    chunk = frame.unused_data
                received(file.tell())
    except zstandard.ZstdError as error:
        raise ShardError("bad_zstd", f"{packed.name}: {error}") from error
    if not frame.eof:
        raise ShardError("bad_zstd", f"{packed.name}: it ends before the end of its last frame")
