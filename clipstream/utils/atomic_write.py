"""Atomic writes: after a crash a file has its old content or its new one, never a part; and safetensors headers.

No output is an input: within `keep_inputs` (each verb), local files that are read pass `note_input`, and files and
folders that the user names as outputs pass `claim_output`, both before anything is written; whichever is second raises.

File systems lack calls: CIFS and sshfs cannot flush a folder (EINVAL), NFS without its daemon has no locks (ENOLCK), or
none for files opened to be read (EBADF). `sync` and `try_lock` do without, and say so once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import mmap
import os
import re
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clipstream.errors import SettingsError, errors_as
from clipstream.utils.logs import logger

if TYPE_CHECKING:
    import torch

LOCK = ".lock"
WORKERS_END = 30.0  # s for a dead process's data workers to end; they hold its lock as well
CHUNK = 16 << 20  # bytes of one write: large enough for other threads to run and the disk to work meanwhile
BLOCK = 4096  # bytes: content that begins at a multiple of it can be mapped
DTYPES = {  # torch's name -> safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of a folder that was moved, deleted or unmounted, became read-only, or whose server does not answer.
_AWAY = (
    errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ENODEV,
    errno.ENXIO, errno.EHOSTDOWN, errno.ETIMEDOUT,
)  # fmt: skip
_UNFLUSHED = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_told = mmap.mmap(-1, 2)  # shared with forked workers: whether flushing and locking are told


_Files = Callable[[], Collection[str]] | None


class _Output(NamedTuple):
    flag: str  # that names it
    path: str
    key: object  # see `_key`
    holds: bool  # whether it is a folder in which files are removed

    def check(self, source: str, files: _Files) -> None:
        """Raises SettingsError: the output is this input, or in it, or holds it."""
        real, why = os.path.realpath, ""
        if _key(source) == self.key or (files and os.path.relpath(real(self.path), real(source)) in files()):
            why = f"is read by this command, as {source}"
        elif self.holds and real(source).startswith(os.path.join(real(self.path), "")):
            why = f"holds {source}, which is read by this command"
        elif glob.has_magic(source) and Path(real(self.path)).match(real(source)):
            why = f"would be read by the next call, as {source}"
        if why:
            raise SettingsError(f"{self.flag}: {self.path} {why}; nothing was written: name another place")


_inputs: dict[str, _Files] = {}
_outputs: list[_Output] | None = None  # None outside of verbs


@contextlib.contextmanager
def keep_inputs() -> Iterator[None]:
    """The context of a verb, in which no file that is read is written."""
    global _outputs
    _outputs = []
    try:
        yield
    finally:
        _outputs = None
        _inputs.clear()


def _key(path: str) -> object:
    """Device and inode; the path of what does not exist."""
    with contextlib.suppress(OSError):
        return (stat := os.stat(path)).st_dev, stat.st_ino
    return os.path.realpath(path)


def note_input(path: str | os.PathLike[str], files: _Files = None) -> None:
    """Note a local file, folder, or pattern of files that is read; `files` gives those of a folder, relative to it.

    Raises SettingsError: it is an output.
    """
    if _outputs is not None and (source := os.fspath(path)):
        _inputs[source] = files
        for output in _outputs:
            output.check(source, files)


def claim_output(path: str | os.PathLike[str], flag: str, *, holds: bool = False, words: Iterable[bytes] = ()) -> None:
    """Name a file or folder that a verb writes, before it writes anything.

    Args:
        flag: that names it.
        holds: whether it is a folder in which the verb removes files.
        words: in each file that the verb writes, near the start (of Parquet, in the schema).

    Raises SettingsError: it is read as well, is another output, or is a file that the verb did not write.
    """
    if _outputs is None or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
        return  # also of devices and pipes
    output = _Output(flag, os.fspath(path), _key(os.fspath(path)), holds)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(CHUNK)
        if output.path.endswith(".parquet") and head[:4] == b"PAR1":
            file.seek(max(0, os.path.getsize(path) - CHUNK))
            head = file.read().replace(b"\0", b"")
        if head and (b"\0" in head or not all(word in head for word in words)):
            raise SettingsError(f"{flag}: {path} is a file of other content; nothing was written: name another file")
    for other in _outputs:
        if other.key == output.key and other.flag != flag:
            raise SettingsError(f"{flag}: {path} is also the file of {other.flag}: name another file")
    for source, files in _inputs.items():
        output.check(source, files)
    _outputs.append(output)


def replace(path: Path, content: bytes | list[Any], *, private: bool = False, shared: bool = False) -> None:
    """Write `content` to the draft `path.tmp`, flush it to the disk, and rename it to `path`.

    Args:
        content: bytes, or a list of buffers.
        private: only the owner can read the file (mode 0600), from the beginning.
        shared: another process may write the same file, as a lost worker does whose task is done again: the draft is
            `path.HEX.part`, of this call alone.

    Raises OSError: the disk is full, or the folder does not exist; `path` is unchanged.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part" if shared else f"{path.name}.tmp")
    if private:
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        write(draft, content if isinstance(content, list) else [content])
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush(path.parent)


def probe(path: Path) -> None:
    """Check that a file can be created or appended to, without changing or leaving anything.

    Raises OSError: it cannot.
    """
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()


def require_space(folder: Path, size: int) -> None:
    """Check that `size` bytes can be written into a folder, without leaving anything.

    Raises OSError: they cannot; its file name is the folder's.
    """
    path = folder / ".space.tmp"
    try:
        write(path, [bytes(size)])
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        path.unlink(missing_ok=True)


def write(path: Path, parts: Iterable[Any]) -> tuple[int, str]:
    """Write buffers to a file and flush it to the disk; its name in the folder is not flushed.

    The interpreter's lock is released during each write, so that a writing thread hardly slows down the others.

    Returns:
        (size in bytes, checksum of the buffers as from `checksum`).

    Raises OSError: the disk is full, or the folder does not exist.
    """
    size = sum_ = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                sum_ = zlib.crc32(chunk, sum_)
                while chunk:  # a nearly full disk may take only a part
                    chunk = chunk[os.write(handle, chunk) :]
            size += len(view)
        sync(handle, path)
    except OSError as error:
        error.filename = str(path)  # write() and fsync() do not know it
        raise
    finally:
        os.close(handle)
    return size, f"crc32:{sum_:08x}"


def checksum(path: Path) -> str:
    """The checksum of a file as 'crc32:HEX'.

    CRC-32 detects the errors of disks and networks, in 0.4 s a GB (2.3 GB/s, zlib 1.2.13); sha256 takes 0.65 s.
    """
    sum_, buffer = 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sum_ = zlib.crc32(buffer[:count], sum_)
    return f"crc32:{sum_:08x}"


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle, path)
    finally:
        os.close(handle)


def sync(handle: int, path: Path) -> None:
    """Flush an open file, or the names in an open folder, to the disk, if its file system can.

    Raises OSError: the disk is full, or fails.
    """
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNFLUSHED:
            raise
        _tell(0, f"{path} cannot be flushed to the disk ({error.strerror}): a crash of the machine may lose new files")


def try_lock(handle: int, kind: int, *, wait: bool = False, posix: bool = False) -> bool | None:
    """Take or release a lock of an open file; False if another process has it; None if its file system has no locks.

    Args:
        kind: of `fcntl.flock`.
        wait: until another process releases it.
        posix: as `fcntl.lockf` locks, for this process alone: forked ones do not have the lock.
    """
    try:
        (fcntl.lockf if posix else fcntl.flock)(handle, kind if wait else kind | fcntl.LOCK_NB)
        return True
    except (BlockingIOError, PermissionError):  # EACCES, of locks that the server of a CIFS share keeps
        return False
    except OSError as error:
        _tell(1, f"files cannot be locked ({error.strerror}): let no two runs write to the same folder or cache")
        return None


@contextlib.contextmanager
def lock_folder(folder: Path, called: str, advice: str) -> Iterator[None]:
    """Make the folder, and lock it while the context is open. Messages describe it as `called`, and end with advice for
    while another process has it.

    Raises SettingsError: the folder cannot be made, or another process holds the lock.
    """
    with errors_as(SettingsError, f"{called} {folder} cannot be created", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        limit = time.monotonic() + WORKERS_END
        while try_lock(lock, fcntl.LOCK_EX) is False:
            holder = ""
            with contextlib.suppress(OSError):  # a CIFS share lets nobody else read a locked file
                holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            if not _is_dead(holder) or time.monotonic() > limit:
                raise SettingsError(f"{folder} is in use by {holder or 'another process'}: {advice}") from None
            time.sleep(0.1)
        with contextlib.suppress(OSError):  # the disk is full: the holder stays unnamed
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _is_dead(holder: str) -> bool:
    """Whether the process named in a lock file ran on this machine and has ended."""
    match = re.fullmatch(r"process (\d+) on (.+)", holder)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        pass
    return False


def _tell(number: int, text: str) -> None:
    if not _told[number]:
        _told[number] = 1
        logger.warning(text)


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def obstacle(error: BaseException, path: Path) -> str | None:
    """Why a write to `path` failed that may succeed later, in words; None for other errors."""
    if is_full(error):
        return f"the disk of {path} is full"
    if isinstance(error, OSError) and error.errno in _AWAY:
        return f"{path} cannot be written ({error.strerror})"
    return None


def tensors_header(meta: Mapping[str, str], layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header of a safetensors file whose tensors follow each other, as name -> dtype and shape; its body begins at
    a multiple of `BLOCK`.
    """
    header: dict[str, object] = {"__metadata__": dict(meta)}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        about = {"dtype": DTYPES[str(dtype).removeprefix("torch.")], "shape": list(shape)}
        header[name] = {**about, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % BLOCK)
    return struct.pack("<Q", len(text)) + text
