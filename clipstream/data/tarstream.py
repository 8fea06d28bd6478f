"""Owns the way from the bytes of a local tar to verified samples; never decodes a member, never opens a URL.

Every header's checksum and size is checked and the end-of-archive blocks are asked for, so that a shard cut at any
byte is noticed, which neither `tarfile` nor webdataset do. The formats are ustar, PAX and GNU tar (POSIX.1-2017,
pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar Format").

Reads go through pread, not mmap: a file that shrinks or a failing disk then gives an error, and not a dead worker.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import adler32

from clipstream.data.refs import SampleRef as SampleRef  # whoever opens a shard gets these
from clipstream.data.refs import SampleTable
from clipstream.errors import Dropped

BLOCK = 512
AHEAD = 1 << 16  # bytes that are read at once where headers are near each other
NEAR = 1 << 13  # bytes from one to the next, on average
ZERO = bytes(BLOCK)
ADLER = 65521
_FILE = ord("0")
_SPACES = b" " * 8  # which stand for the checksum while it is made
BEHIND_ALL = "\0.end"  # a name with a key that no sample has: what lies before it is whole
MAX_EXTRA = 1 << 20  # bytes of a PAX or long-name header; a larger one is damage
TOGETHER = 1 << 13  # bytes within which a sample's members are read at once, and copied apart; else each by itself
META = re.compile(r"__[^/]*__($|[./])")  # webdataset's own members, which are no samples


class Fault(NamedTuple):
    """What is wrong with a shard.

    Reasons: `truncated_header`, `truncated_member`, `missing_end` (no end-of-archive blocks), `bad_checksum`,
    `bad_header` (an unreadable size or PAX record), `unsupported_member` (sparse files), `not_a_tar`, `empty` (no
    sample in it), `duplicate_member` (samples with the same member twice, left out), `trailing_archive` (a second
    archive behind the end of the first, not read).
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ShardIndex(NamedTuple):
    """The samples of a shard in file order, whole ones only, and what was found wrong with it, if anything."""

    samples: Sequence[SampleRef]
    fault: Fault | None


class _Broken(Exception):
    """The walk cannot go on. `name` is the member that a fault hit, if it is known."""

    def __init__(self, reason: str, detail: str, name: str = "") -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail)
        self.name = name


def scan(path: str | Path) -> ShardIndex:
    """Walk the headers of a local tar and group its members to samples as webdataset does.

    A member's key is its path up to the first dot of the base name, its suffix the rest in lower case; consecutive
    members with one key are a sample. Directories, links, webdataset's `__…__` members and names that begin with a
    dot are passed over. Samples before a fault stay, save a last one that may lack members.

    Raises:
        OSError: the file cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return _scan(fd)
    finally:
        os.close(fd)


def _scan(fd: int) -> ShardIndex:
    samples = SampleTable()
    key: str | None = None
    members: list[str] = []  # suffixes of the sample that is being read
    places: list[int] = []  # offset and size of each
    doubles: dict[int, str] = {}
    suffixes: dict[str, str] = {}
    fault: Fault | None = None
    try:
        for name, offset, size in _members(fd):
            dot = name.find(".", name.rfind("/") + 1)
            stem, end = name[:dot], name[dot:]
            if stem != key:
                if dot <= 0 or stem[-1] == "/" or end == "." or (stem[:2] == "__" and META.match(name)):
                    continue
                if members:
                    samples.add(str(key), members, places)
                key, members, places = stem, [], []
            suffix = suffixes.get(end)
            if suffix is None:
                suffix = suffixes[end] = sys.intern(end[1:].lower())
            if suffix in members:
                doubles.setdefault(len(samples), f"{key}.{suffix}")
            elif suffix:
                members.append(suffix)
                places += (offset, size)
    except _Broken as broken:
        fault = broken.fault
        # A sample is whole once a header with another key was seen behind it.
        if not broken.name or _key(broken.name) in (None, key):
            members = []
    if members:
        samples.add(str(key), members, places)
    if doubles:
        samples = SampleTable(ref for number, ref in enumerate(samples) if number not in doubles)
        first = next(iter(doubles.values()))
        fault = fault or Fault("duplicate_member", f"{len(doubles)} samples have a member twice, the first is {first}")
    if not samples and fault is None:
        fault = Fault("empty", "it is a whole tar without one member named KEY.SUFFIX")
    return ShardIndex(samples, fault)


def _key(name: str) -> str | None:
    dot = name.find(".", name.rfind("/") + 1)
    return name[:dot] if dot > 0 else None


def _members(fd: int) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each regular file; raises _Broken at the first fault."""
    length = os.fstat(fd).st_size
    position = 0
    long_name = None
    pax: dict[bytes, bytes] = {}
    shared_pax: dict[bytes, bytes] = {}
    held, begin, headers = b"", 0, 0  # some bytes of the file, where they begin, and headers so far
    while True:
        header = held[position - begin : position - begin + BLOCK]
        if len(header) < BLOCK:
            near = position <= headers * NEAR  # then one read gives several
            held, begin = os.pread(fd, AHEAD if near else BLOCK, position), position
            header = held[:BLOCK]
        headers += 1
        if header == ZERO:
            return _check_end(fd, position)
        size = _checked_size(header, position, length)
        kind = header[156]
        start = position + BLOCK
        if (kind == _FILE or kind == 0) and not (long_name or pax or shared_pax):  # nearly all
            name = _name(header)
            position = start + (size + BLOCK - 1) // BLOCK * BLOCK
            if position > length:
                raise _truncated(name, position, length)
            if name[-1:] != "/":
                yield name, start, size
            continue
        name = ""
        if kind in b"0\0007123456S":  # the name of what follows, unless a header before it told it
            name = long_name or _name(header)
        if pax or shared_pax:
            fields = shared_pax | pax if kind not in b"xgX" else {}
            name = _text(fields[b"path"]) if b"path" in fields and name else name
            size = _pax_size(fields[b"size"], position) if b"size" in fields else size
            if any(field.startswith(b"GNU.sparse") for field in fields):
                raise _Broken("unsupported_member", f"{name} is a sparse file; write the shard without them", name)
        # Links, devices and directories have no data, whatever their size field says.
        data = 0 if kind in b"123456" else size
        end = start + (data + BLOCK - 1) // BLOCK * BLOCK
        if end > length:
            raise _truncated(name, end, length)
        if kind in b"0\0007":
            if not name.endswith("/"):
                yield name, start, size
        elif kind in b"LxgX":
            extra = _extra(fd, start, size)
            if kind in b"L":
                long_name = _text(extra)
            elif kind in b"g":
                shared_pax |= _pax(extra, position)
            else:
                pax = _pax(extra, position)
            position = end
            continue
        elif kind in b"S":
            raise _Broken("unsupported_member", f"{name} is a sparse file; write the shard without them", name)
        if kind not in b"K":
            long_name, pax = None, {}
        position = end


def _truncated(name: str, end: int, length: int) -> _Broken:
    shown = name or "an extended header"
    return _Broken("truncated_member", f"{shown} needs bytes up to {end:,} of {length:,}", name)


def _checked_size(header: bytes, position: int, length: int) -> int:
    """The size field of a header whose checksum is right."""
    if len(header) < BLOCK:
        if length == 0:
            raise _Broken("empty", "the file has no bytes")
        if position == 0:
            raise _Broken("not_a_tar", f"the file has only {length} bytes")
        if not header:
            raise _Broken("missing_end", f"the file ends at byte {length:,} without the end-of-archive blocks")
        raise _Broken("truncated_header", f"the file ends at byte {length:,}, inside a header")
    try:
        told = int(header[148:156].partition(b"\0")[0], 8)
        # Adler-32's low half is 1 + the sum of the bytes, modulo a prime: twenty times as fast as sum().
        found = (adler32(header[:148] + _SPACES + header[156:]) & 0xFFFF) - 1
        right = (found - told) % ADLER == 0 or told == _signed_sum(header)
    except ValueError:
        right = False
    if not right:
        if position == 0:
            raise _Broken("not_a_tar", f"it begins with {header[:8]!r}, which is no tar header")
        raise _Broken("bad_checksum", f"the header at byte {position:,} does not agree with its checksum")
    try:
        size = int(header[124:135], 8)
    except ValueError:
        size = _odd_size(header[124:136])
    if size < 0:
        raise _Broken("bad_header", f"the header at byte {position:,} has no readable size")
    return size


def _odd_size(field: bytes) -> int:
    """A size in base 256 (GNU, from 8 GiB) or in octal digits that end early; -1 if it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return -1


def _signed_sum(header: bytes) -> int:
    """The checksum as some old tars made it, of signed bytes."""
    counted = header[:148] + b" " * 8 + header[156:]
    return sum(byte - 256 if byte > 127 else byte for byte in counted)


def _name(header: bytes) -> str:
    end = header.find(0, 0, 100)
    name = header[: end if end >= 0 else 100]
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return str(name, "utf-8", "backslashreplace")


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _extra(fd: int, start: int, size: int) -> bytes:
    if size > MAX_EXTRA:
        raise _Broken("bad_header", f"the extended header at byte {start - BLOCK:,} claims {size:,} bytes")
    return os.pread(fd, size, start)


def _pax(data: bytes, position: int) -> dict[bytes, bytes]:
    """The records `LENGTH NAME=VALUE\\n` of a PAX header."""
    fields = {}
    while data and data[0]:
        digits = data.partition(b" ")[0]
        end = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        name, equals, value = data[len(digits) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(data):
            raise _Broken("bad_header", f"the PAX header at byte {position:,} has a damaged record")
        fields[name] = value[:-1]
        data = data[end:]
    return fields


def _pax_size(value: bytes, position: int) -> int:
    if not value.isdigit():
        raise _Broken("bad_header", f"the header at byte {position:,} has no readable size")
    return int(value)


def _check_end(fd: int, position: int) -> None:
    """Ask for the second zero block, and for nothing but zeros up to the end of the last record."""
    second = os.pread(fd, BLOCK, position + BLOCK)
    if second != ZERO:
        raise _Broken("missing_end", f"only one zero block at byte {position:,}, where two end an archive", BEHIND_ALL)
    rest = os.pread(fd, 1 << 20, position + 2 * BLOCK)
    start = (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK * BLOCK
    if rest[start + 257 : start + 262] == b"ustar":
        at = position + 2 * BLOCK + start
        detail = f"a second archive begins at byte {at:,} and is not read; join shards with tar -A, not with cat"
        raise _Broken("trailing_archive", detail, BEHIND_ALL)


class Shard:
    """An open local tar: its index, and its members' bytes by sample.

    Holds one file descriptor; reads by offset, so that forked processes may share it.

    Args:
        path: the file.
        index: what a walk over its headers would find, where that is known.

    Attributes:
        path: the file.
        index: its samples, in file order, and what is wrong with it.

    Raises:
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str | Path, index: ShardIndex | None = None) -> None:
        self.path = Path(path)
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.index = _scan(self._fd) if index is None else index
        except BaseException:
            self.close()
            raise

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The bytes of a sample's members by suffix: all, or those of `suffixes` (lower case) that it has.

        Raises:
            Dropped: `unreadable_member`, when the file became shorter or the disk fails.
        """
        found: Mapping[str, tuple[int, int]] = ref.members
        if suffixes is not None:
            found = {suffix: ref.members[suffix] for suffix in suffixes if suffix in ref.members}
        if not found:
            return {}
        start, end = sys.maxsize, 0
        for offset, size in found.values():
            start, end = min(start, offset), max(end, offset + size)
        # Members of a sample lie side by side. One call less is worth the copy of few bytes, and not that of a picture.
        if end - start > TOGETHER:
            return {suffix: self._read(ref.key, offset, size) for suffix, (offset, size) in found.items()}
        block = self._read(ref.key, start, end - start)
        return {suffix: block[offset - start : offset - start + size] for suffix, (offset, size) in found.items()}

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """As `load`, all members."""
        return self.load(ref)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, key: str, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            # One pread gives 2 GiB at most.
            while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise Dropped("unreadable_member", f"{self.path}: {key}: {error}") from error
        if len(data) < size:
            raise Dropped("unreadable_member", f"{self.path}: {key}: the file became shorter since it was opened")
        return data
