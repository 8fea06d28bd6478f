"""One contiguous range of addresses over many files: rows of all chunks are then one array.

The range is reserved without memory (mmap with PROT_NONE, through ctypes, as Python's mmap takes no address), and the
body of each chunk is mapped into its slot (MAP_FIXED) while the chunk is held. Reading a slot that holds nothing ends
the process with a segmentation fault: callers check which slots are mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np

from clipstream.errors import DataError
from clipstream.utils.atomic_write import BLOCK

_MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap has no name for it
_IN_MODIFY = 2
_FAILED = ctypes.c_void_p(-1).value
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Slots of the same size, one behind the other.

    Args:
        slot_bytes: a multiple of 4096.
        page: bytes of a page of memory; where slots are no whole pages, files are read instead of mapped.

    Attributes:
        array: uint8 [slots * slot_bytes], for reading.

    Raises DataError: the process may not have so many addresses.
    """

    def __init__(self, slots: int, slot_bytes: int, page: int = mmap.PAGESIZE) -> None:
        self._slot_bytes = slot_bytes
        self._mapped = slot_bytes % page == 0 and BLOCK % page == 0
        self._size = max(slots * slot_bytes, page)
        if self._size >= 1 << 47:  # ctypes would cut it off
            raise DataError(f"feature store: {self._size:,} bytes are more than a process has addresses for")
        access = 0 if self._mapped else mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _map(None, self._size, access, _RESERVED, -1, 0)
        weakref.finalize(self, _libc.munmap, self._address, self._size).atexit = False  # threads may still read
        memory = (ctypes.c_uint8 * (slots * slot_bytes)).from_address(self._address)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.ctypeslib.as_array(memory)

    def map(self, slot: int, handle: int, offset: int, size: int) -> None:
        """Show bytes of an open file in a slot; the file may be closed then, and must not become shorter.

        Args:
            offset: in the file, a multiple of 4096.

        Raises DataError: the process may not have so many mappings.
        """
        start = slot * self._slot_bytes
        if not self._mapped:
            target = memoryview(self.array[start : start + size].data)
            while target and (count := os.preadv(handle, [target], offset)):
                target, offset = target[count:], offset + count
        elif size:
            _map(self._address + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, handle, offset)

    def unmap(self, slot: int) -> None:
        """Give back the memory of a slot; its addresses stay reserved."""
        address = self._address + slot * self._slot_bytes
        access = 0 if self._mapped else mmap.PROT_READ | mmap.PROT_WRITE
        with contextlib.suppress(DataError):  # what stays mapped is mapped over later
            _map(address, self._slot_bytes, access, _RESERVED | _MAP_FIXED, -1, 0)


class Changes:
    """Counts the changes of files in folders of this machine, by Linux's inotify; where that is missing, none."""

    def __init__(self) -> None:
        self._handle = self._count = -1
        os.register_at_fork(after_in_child=self._forget)  # events that a child reads would be lost to its parent

    def _forget(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def watch(self, folder: str | os.PathLike[str]) -> None:
        """Count changes of this folder's files too, from now on and in this process."""
        if hasattr(_libc, "inotify_init1"):
            if self._handle < 0:
                self._handle = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            _libc.inotify_add_watch(self._handle, os.fsencode(folder), _IN_MODIFY)

    def count(self) -> int:
        """A number that grows with each change."""
        with contextlib.suppress(OSError):  # there is nothing to read
            while self._handle >= 0 and os.read(self._handle, 1 << 16):
                self._count += 1
        return self._count


def _map(address: int | None, size: int, access: int, flags: int, handle: int, offset: int) -> int:
    found: int | None = _libc.mmap(address, size, access, flags, handle, offset)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        advice = ": raise `ulimit -v` or the kernel's vm.max_map_count" if number == errno.ENOMEM else ""
        raise DataError(f"feature store: {size:,} bytes cannot be mapped ({os.strerror(number)}){advice}")
    return found
