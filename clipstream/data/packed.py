"""Owns packed files: what a file is packed with, told from its first bytes, and the way to the bytes inside.

A packed file is whole or nothing: its checksum is of all that is in it, so nothing of a broken one is known to be
right.
"""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable
from pathlib import Path

from clipstream.data.transfer import ShardError

CHUNK = 1 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def packing(path: Path) -> str | None:
    """'gzip', 'zstd', or None for what is not packed.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(4)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def packed_version(path: Path) -> str | None:
    """For a packed file, what changes when the file does; None for any other readable file.

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


def unpack(packed: Path, part: Path, came: Callable[[int], None]) -> None:
    """Write what is inside to `part`, all of it.

    Args:
        came: called with the bytes that are written, as they are.

    Raises:
        ShardError: `bad_gzip` or `bad_zstd`, also for a cut file.
        OSError: it cannot be read or written.
    """
    (_unpack_zstd if packing(packed) == "zstd" else _unpack_gzip)(packed, part, came)


def _unpack_gzip(packed: Path, part: Path, came: Callable[[int], None]) -> None:
    try:
        with gzip.open(packed, "rb") as source, open(part, "wb") as file:
            while data := source.read(CHUNK):
                file.write(data)
                came(file.tell())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ShardError("bad_gzip", f"{packed.name}: {error}") from error


def _unpack_zstd(packed: Path, part: Path, came: Callable[[int], None]) -> None:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        detail = f"{packed.name} is packed with zstd: pip install 'clipstream[zstd]', or unpack it"
        raise ShardError("bad_zstd", detail) from error
    frames = zstandard.ZstdDecompressor()
    frame = frames.decompressobj()
    try:
        with open(packed, "rb") as source, open(part, "wb") as file:
            while chunk := source.read(CHUNK):
                while chunk:
                    if frame.eof:
                        frame = frames.decompressobj()
                    file.write(frame.decompress(chunk))
                    chunk = frame.unused_data
                came(file.tell())
    except zstandard.ZstdError as error:
        raise ShardError("bad_zstd", f"{packed.name}: {error}") from error
    if not frame.eof:
        raise ShardError("bad_zstd", f"{packed.name}: it ends before the end of its last frame")
