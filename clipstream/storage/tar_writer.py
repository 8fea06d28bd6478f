"""Writing of tar files: names and bytes of members enter; a tar leaves, the same for the same members."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

from clipstream.storage.tar import BLOCK
from clipstream.utils import atomic_write

RECORD = 20 * BLOCK
WRITTEN_AT_ONCE = 1 << 20  # bytes
_MODE = b"0000644\0" + 2 * b"0000000\0"  # and the owner: the fields between a header's name and size
_TIME = b"\0" + 11 * b"0" + b"\0"  # between size and checksum
_REST = b"0" + bytes(100) + b"ustar\00000" + bytes(247)
_PLAIN_SUM = sum(_MODE + _TIME + b" " * 8 + _REST)


def header(name: str, size: int) -> bytes:
    """The header of a regular file of `size` bytes, without owner and time: the same for the same arguments."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > 100 or size >= 1 << 33:
        made = tarfile.TarInfo(name)
        made.size = size
        return made.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o" % size
    checksum = b"%06o\0 " % (_PLAIN_SUM + sum(raw) + sum(digits))
    return b"".join((raw.ljust(100, b"\0"), _MODE, digits, _TIME, checksum, _REST))


def end_blocks(size: int) -> bytes:
    """The end of an archive whose members take `size` bytes: zeros up to the end of a record."""
    return bytes(-(size + 2 * BLOCK) % RECORD + 2 * BLOCK)


class TarWriter:
    """A tar being written, with the checksum of its bytes."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum = path, hashlib.sha256()
        self._held: list[bytes] = []
        self._size = self._written = 0

    def __enter__(self) -> TarWriter:
        self._file = open(self._path, "wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, data: bytes) -> int:
        """Add a file; the offset of its data."""
        head = header(name, len(data))
        offset = self._size + len(head)
        self._held += [head, data, bytes(-len(data) % BLOCK)]
        self._size = offset + -(-len(data) // BLOCK) * BLOCK
        if self._size - self._written > WRITTEN_AT_ONCE:
            self._flush()
        return offset

    def close(self) -> tuple[int, str]:
        """Write the end, and flush the file to the disk: its size and SHA-256."""
        self._held.append(end := end_blocks(self._size))
        self._size += len(end)
        self._flush()
        atomic_write.sync(self._file.fileno(), Path(self._path))
        return self._size, self._sum.hexdigest()

    def _flush(self) -> None:
        data = memoryview(b"".join(self._held))
        self._held, self._written = [], self._size
        self._sum.update(data)
        while data:  # a nearly full disk may take only a part
            data = data[self._file.write(data) :]
