"""Reading of tar files: a local file enters; its samples, the bytes of their members and the file's fault leave.

The checksum and size of every header and the end-of-archive blocks are verified, so that a shard cut at any byte is
noticed, unlike by `tarfile` and webdataset. The formats are ustar, PAX and GNU tar (POSIX.1-2017, pax, "ustar
Interchange Format"; GNU tar manual, "Basic Tar Format"). A hard link is read as the earlier member that it names.

Files are read by pread, not mmap: a file that shrinks or a failing disk then raises an error instead of killing the
worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tarfile
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, overload

from clipstream.errors import DataError, Dropped
from clipstream.text import printable
from clipstream.utils.content import MOST_MEMBER, MOST_TEXT, check_bytes, describe, file_state

BLOCK = 512
AHEAD = 1 << 16  # bytes read at once if headers are close to each other
NEAR = 1 << 13  # mean distance of close headers, in bytes
ZERO = bytes(BLOCK)
ADLER = 65521
SPARSE_FIELDS = (b"GNU.sparse", b"GNU.sparse.name")  # of PAX; the first stands for any other one of them
PAX_FIELDS = (b"path", b"size", b"linkpath", SPARSE_FIELDS[1])
_FILE = ord("0")
_SPACES = b" " * 8  # in place of the checksum field when the checksum is computed
BEHIND_ALL = "\0.end"  # the name of a fault behind all members: its key is that of no sample
MAX_EXTRA = 1 << 20  # bytes of a PAX or long-name header; a larger one is damage
TOGETHER = 1 << 13  # a sample of at most so many bytes is read at once, a larger one member by member
LINK = 1 << 63  # in place of the size of a link whose data are not in the tar; its offset is that of the header
# A sparse member, as which bsdtar writes every file with holes, has the offset of its first header, and LINK plus the
# bytes from there to its end.
TEXTS = {"txt.gz": "txt", "json.gz": "json"}  # suffixes of compressed members, which are read as the others
SCATTERED = "scattered_sample"
UNPACKING = "mkdir out && tar -xf SHARD.tar -C out && "  # commands for users, of GNU tar
PACKING = r"tar -cf NEW.tar --sort=name --transform='s,^\./,,' -C out ."
META = re.compile(r"__[^/]*__($|[./])")  # webdataset's own members, which are no samples


class Fault(NamedTuple):
    """The fault of a shard.

    Reasons: `truncated_header`, `truncated_member`, `missing_end` (no end-of-archive blocks), `bad_checksum`,
    `bad_header` (an unreadable size or PAX record), `not_a_tar`, `empty` (no samples), `duplicate_member` (samples with
    the same member twice, left out), `scattered_sample` (a key occurs again behind other keys with other members, read
    as another sample), `trailing_archive` (a second archive behind the end of the first, not read).
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {printable(self.detail, 500)}"


class ShardIndex(NamedTuple):
    """The complete samples of a shard in file order, and its fault if it has one."""

    samples: Sequence[SampleRef]
    fault: Fault | None = None


class _Broken(Exception):
    """The rest of the file cannot be read. `name` is the damaged member, if it is known."""

    def __init__(self, reason: str, detail: str, name: str = "") -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail)
        self.name = name


def scan(path: str | Path) -> ShardIndex:
    """Read the headers of a local tar and group its members into samples as webdataset does.

    The key of a member is its path up to the first dot of the base name, its suffix the rest in lower case; consecutive
    members with the same key are a sample. Directories, webdataset's `__…__` members and names that start with a dot
    are skipped. Members that were appended for a sample (`tar -r`) replace those of the same names, as GNU tar extracts
    them. Samples before a fault are kept, except a last one that may lack members.

    Raises OSError: the file cannot be opened or read.
    """
    shard = Shard(path)
    shard.close()
    return shard.index


def fault_at_start(head: bytes) -> Fault | None:
    """The fault of a file that starts with this block of 512 bytes, if the block shows one. Zeros are an empty tar."""
    try:
        if head != ZERO:
            _parse_size(head, 0, BLOCK)
    except _Broken as broken:
        return broken.fault
    return None


def _scan(fd: int) -> ShardIndex:
    samples = SampleRefs()
    key: str | None = None
    members: dict[str, None] = {}  # suffixes of the current sample
    spans: list[int] = []  # offset and size of each
    doubles: dict[int, str] = {}
    seen: dict[str, int] = {}  # key -> number of its first sample
    again: list[tuple[str, int, int]] = []  # keys that occur again, with the numbers of both samples
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
                    samples.add(str(key), members, spans)
                key, members, spans = stem, {}, []
                number = len(samples)
                if seen.setdefault(key, number) != number:
                    again.append((key, seen[key], number))
            suffix = suffixes.get(end)
            if suffix is None:
                suffix = end[1:].lower()
                suffix = suffixes[end] = sys.intern(TEXTS.get(suffix, suffix))
            if suffix in members:
                doubles.setdefault(len(samples), f"{key}.{suffix}")
            elif suffix:
                members[suffix] = None
                spans += (offset, size)
    except _Broken as broken:
        fault = broken.fault
        # A sample is complete only if a header with another key follows it.
        dot = broken.name.find(".", broken.name.rfind("/") + 1)
        if dot <= 0 or broken.name[:dot] == key:
            members = {}
    if members:
        samples.add(str(key), members, spans)
    if doubles:
        first = next(iter(doubles.values()))
        fault = fault or Fault("duplicate_member", f"{len(doubles)} samples have a member twice, the first is {first}")
    suffixes_of = cache(lambda number: samples[number].members.keys())  # of a first sample, which may be large
    if fault is None and (
        apart := [
            key for key, first, second in again
            if second < len(samples) and not suffixes_of(first) & samples[second].members.keys()
        ]
    ):  # fmt: skip
        fault = Fault(
            SCATTERED,
            f"{len(apart)} keys occur twice, with other keys between, the first is {printable(apart[0])}: the members "
            f"of a sample are not adjacent; sort the tar: {UNPACKING}{PACKING}",
        )
    changed = _find_replaced(samples, again)
    if doubles or changed:
        kept = ((number, ref) for number, ref in enumerate(samples) if number not in doubles)
        every = (SampleRef(ref.key, own) for n, ref in kept if (own := changed.get(n, ref.members)))
        samples = SampleRefs(every)
    if not samples and fault is None:
        fault = Fault("empty", "it is a whole tar without one member named KEY.SUFFIX")
    return ShardIndex(samples, fault)


def _find_replaced(
    samples: Sequence[SampleRef], again: Iterable[tuple[str, int, int]]
) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Numbers of samples whose members were replaced by later ones of the same names -> all members, as GNU tar would
    extract them; and of the later ones -> none.

    A key that occurs again with all suffixes of the first sample, as in shards that were joined, is another sample.
    """
    found: dict[int, Mapping[str, tuple[int, int]]] = {}
    latest: dict[str, int] = {}
    held: dict[int, dict[str, tuple[int, int]]] = {}  # all members of the samples that `latest` or `again` names
    for key, first, number in again:
        if number < len(samples):
            first, later = latest.get(key, first), dict(samples[number].members)
            if first not in held:
                held[first] = dict(samples[first].members)
            members = held[first]
            if members.keys() <= later.keys():
                latest[key], held[number] = number, later
            elif members.keys() & later.keys():
                members.update(later)
                found |= {first: members, number: {}}
    return found


def _members(fd: int, links: bool = True) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each regular file and, with `links`, of each link; raises _Broken at the first fault."""
    length = os.fstat(fd).st_size
    position = 0
    long_name = long_link = None
    spans: dict[str, tuple[int, int]] | None = None  # of all regular files by name, from the first hard link on
    pax: dict[bytes, bytes] = {}
    shared_pax: dict[bytes, bytes] = {}
    first: int | None = None  # position of the first header of a member that has several
    held, begin, headers = b"", 0, 0  # bytes of the file, their offset, and the number of headers so far
    while True:
        header = held[position - begin : position - begin + BLOCK]
        if len(header) < BLOCK:
            near = position <= headers * NEAR
            held, begin = os.pread(fd, AHEAD if near else BLOCK, position), position
            header = held[:BLOCK]
        headers += 1
        if header == ZERO:
            break
        size = _parse_size(header, position, length)
        kind = header[156]
        start = position + BLOCK
        if (kind == _FILE or kind == 0) and not (long_name or pax or shared_pax):  # nearly all
            name = _name(header)
            position = start + (size + BLOCK - 1) // BLOCK * BLOCK
            if position > length:
                raise _truncation(name, position, length)
            if name[-1:] != "/":
                yield name, start, size
            first = None
            continue
        name, sparse = "", kind in b"S"
        if kind in b"0\0007123456S":
            name = long_name or _name(header)
        start = _behind_map(fd, header, start) if sparse else start
        if pax or shared_pax:
            fields = shared_pax | pax if kind not in b"xgX" else {}
            name = _text(fields[b"path"]) if b"path" in fields and name else name
            if b"size" in fields:
                if not fields[b"size"].isdigit():
                    raise _Broken("bad_header", f"the header at byte {position:,} has no readable size")
                size = int(fields[b"size"])
            long_link = _text(fields[b"linkpath"]) if b"linkpath" in fields else long_link
            sparse = sparse or not fields.keys().isdisjoint(SPARSE_FIELDS)
            name = _text(fields[b"GNU.sparse.name"]) if b"GNU.sparse.name" in fields else name
        # Links, devices and directories have no data, whatever their size field holds.
        data = 0 if kind in b"123456" else size
        end = start + (data + BLOCK - 1) // BLOCK * BLOCK
        if end > length:
            raise _truncation(name, end, length)
        if sparse:
            begins = position if first is None else first
            yield name, begins, LINK + end - begins
        elif kind in b"0\0007":
            if not name.endswith("/"):
                yield name, start, size
        elif kind in b"12":
            target, own = (os.path.normpath(path).lstrip("/") for path in (long_link or _text(header[157:257]), name))
            if links and target != own:  # a file that was given twice is a link to itself
                found = (position, LINK)
                if kind == ord("1"):
                    spans = _spans(fd) if spans is None else spans
                    earlier = spans.get(target, found)
                    found = spans[own] = earlier if earlier[0] < position else found
                yield name, *found
        elif kind in b"LKxgX":
            extra, position = _extra(fd, start, size), end
            first = start - BLOCK if first is None else first
            if kind in b"L":
                long_name = _text(extra)
            elif kind in b"K":
                long_link = _text(extra)
            elif kind in b"g":
                shared_pax |= _pax(extra, start - BLOCK)
            else:
                pax = _pax(extra, start - BLOCK)
            continue
        long_name, long_link, pax, first = None, None, {}, None
        position = end
    _check_end(fd, position)


def _extra(fd: int, start: int, size: int) -> bytes:
    """The content of an extended header."""
    if size > MAX_EXTRA:
        raise _Broken("bad_header", f"the extended header at byte {start - BLOCK:,} claims {size:,} bytes")
    return os.pread(fd, size, start)


def _behind_map(fd: int, header: bytes, start: int) -> int:
    """Where the data of a sparse member in old GNU's form begin, behind a header with as many more as its map takes."""
    more = header[482]
    while more:
        block, start = os.pread(fd, BLOCK, start), start + BLOCK
        more = block[504] if len(block) == BLOCK else 0
    return start


def _check_end(fd: int, position: int) -> None:
    """Check what follows the first block of zeros, at `position`. Raises _Broken."""
    if os.pread(fd, BLOCK, position + BLOCK) != ZERO:
        raise _Broken("missing_end", f"only one zero block at byte {position:,}, where two end an archive", BEHIND_ALL)
    # Only zeros may follow, up to the end of the last record.
    rest = os.pread(fd, 1 << 20, position + 2 * BLOCK)
    start = (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK * BLOCK
    if rest[start + 257 : start + 262] == b"ustar":
        at = position + 2 * BLOCK + start
        detail = f"a second archive begins at byte {at:,} and is not read; join shards with tar -A, not with cat"
        raise _Broken("trailing_archive", detail, BEHIND_ALL)


def _spans(fd: int) -> dict[str, tuple[int, int]]:
    """Offset and size of each regular file by its name, up to the first fault."""
    spans: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(_Broken):
        for name, offset, size in _members(fd, links=False):
            spans.setdefault(os.path.normpath(name).lstrip("/"), (offset, size))
    return spans


def _truncation(name: str, end: int, length: int) -> _Broken:
    shown = name or "an extended header"
    return _Broken("truncated_member", f"{shown} needs bytes up to {end:,} of {length:,}", name)


def _parse_size(header: bytes, position: int, length: int) -> int:
    """The size field of a header, after a check of its checksum."""
    if len(header) < BLOCK:
        if length == 0:
            raise _Broken("empty", "the file has no bytes")
        if position == 0:
            raise _Broken("not_a_tar", _content(header) or f"the file has only {length} bytes: {header[:60]!r}")
        if not header:
            raise _Broken("missing_end", f"the file ends at byte {length:,} without the end-of-archive blocks")
        raise _Broken("truncated_header", f"the file ends at byte {length:,}, inside a header")
    try:
        noted = int(header[148:156].partition(b"\0")[0], 8)
        summed = header[:148] + _SPACES + header[156:]
        # The low half of Adler-32 is 1 + the sum of the bytes, modulo a prime: twenty times as fast as sum().
        right = ((zlib.adler32(summed) & 0xFFFF) - 1 - noted) % ADLER == 0
        right = right or noted == sum(byte - 256 if byte > 127 else byte for byte in summed)  # as some old tars have it
    except ValueError:
        right = False
    if not right:
        if position == 0:
            raise _Broken("not_a_tar", _content(header) or f"it begins with {header[:60]!r}, which is no tar header")
        raise _Broken("bad_checksum", f"the header at byte {position:,} does not agree with its checksum")
    try:
        size = int(header[124:135], 8)
    except ValueError:
        field = header[124:136]
        octal = field.partition(b"\0")[0].strip() or b"0"
        try:
            size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(octal, 8)  # GNU's form from 8 GiB
        except ValueError:
            size = -1
    if size < 0:
        raise _Broken("bad_header", f"the header at byte {position:,} has no readable size")
    return size


def _content(head: bytes) -> str:
    return f"it is {what}" if (what := describe(head)) and not what.startswith("a tar") else ""


def _name(header: bytes) -> str:
    end = header.find(0, 0, 100)
    name = header[: end if end >= 0 else 100]
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return str(name, "utf-8", "backslashreplace")


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _pax(data: bytes, position: int) -> dict[bytes, bytes]:
    """The records `LENGTH NAME=VALUE\\n` of a PAX header that are used here."""
    fields, at = {}, 0
    while at < len(data) and data[at]:
        digits = data[at : at + 8].partition(b" ")[0]
        end = at + int(digits) if digits.isdigit() and len(digits) < 8 else at
        name, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(data):
            raise _Broken("bad_header", f"the PAX header at byte {position:,} has a damaged record")
        if name in PAX_FIELDS:
            fields[name] = value[:-1]
        elif name.startswith(b"GNU.sparse"):
            fields[b"GNU.sparse"] = b""
        at = end
    return fields


def _gunzip(data: bytes, name: str) -> bytes:
    """A text without its compression by gzip. Raises Dropped."""
    unpacking = zlib.decompressobj(wbits=31)
    with contextlib.suppress(zlib.error):
        text = unpacking.decompress(data, MOST_TEXT)
        if unpacking.eof:
            return text
    raise Dropped("unreadable_member", f"{name}: damaged or too large: it is compressed by gzip")


class ShardChanged(DataError, OSError):
    """A local tar is not the one whose samples were listed: their offsets are those of another file."""


class Shard:
    """An open local tar with its `index`, by default from a scan. Forked processes may share it, as it reads
    by offset. `state`: bytes and time of change (ns) of the file that was listed; by default those of this one.

    Raises OSError, of which `ShardChanged`: the file is another one.
    """

    def __init__(self, path: str | Path, index: ShardIndex | None = None, state: Sequence[int] = ()) -> None:
        self.path = Path(path)
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.state = list(state) or file_state(self._fd)[:2]
            self.index = _scan(self._fd) if index is None else index
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        stat = os.stat(self._fd)  # at each sample: without the time of `file_state`
        if stat.st_size != self.state[0] or stat.st_mtime_ns != self.state[1]:
            raise ShardChanged(f"{self.path} has changed since its samples were listed: run the command again")

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The bytes of a sample's members by suffix: all, or those of `suffixes` (lower case) that it has.

        Texts that are compressed by gzip are unpacked.

        Raises:
            Dropped: `unreadable_member`: the disk fails; `member_too_large`, before it is read; `symbolic_link`,
                `broken_link`: a member is a link whose data are not in the tar.
            ShardChanged: the file was written since it was opened.
        """
        found: Mapping[str, tuple[int, int]] = ref.members
        if suffixes is not None:
            found = {suffix: ref.members[suffix] for suffix in suffixes if suffix in ref.members}
        if not found:
            return {}
        start, end = sys.maxsize, 0
        for offset, size in found.values():
            start, end = min(start, offset), max(end, offset + size)
        # The members of a sample are adjacent. Copying few bytes costs less than another call; copying an image more.
        if end - start > TOGETHER:
            data = {suffix: self._read(f"{ref.key}.{suffix}", *span) for suffix, span in found.items()}
        else:
            block = self._read(ref.key, start, end - start)
            data = {suffix: block[offset - start : offset - start + size] for suffix, (offset, size) in found.items()}
        self._check()
        for suffix in TEXTS.values():
            if data.get(suffix, b"")[:2] == b"\x1f\x8b":
                data[suffix] = _gunzip(data[suffix], f"{self.path}: {ref.key}.{suffix}")
        return data

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        return self.load(ref, [name for name, (_, size) in ref.members.items() if not MOST_MEMBER < size <= LINK])

    def files(self, ref: SampleRef) -> list[str]:
        return []

    def place(self, ref: SampleRef, keys: Collection[str]) -> Place | None:
        """Where the member of the first of `keys` that a sample has is; None without one, and for links."""
        span = next((ref.members[key] for key in keys if key in ref.members), (0, LINK))
        return None if span[1] >= LINK else Place(str(self.path), *span)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, name: str, offset: int, size: int) -> bytes:
        if size > LINK:
            return self._read_sparse(name, self._read(name, offset, size - LINK))
        if size == LINK:
            header = os.pread(self._fd, BLOCK, offset)
            detail = f"{self.path}: {name}: {_name(header)} is a {{}} link to {_text(header[157:257])}, {{}}"
            if header[156] == ord("2"):
                advice = "which no tar contains: pack the files themselves by tar -h (--dereference)"
                raise Dropped("symbolic_link", detail.format("symbolic", advice))
            advice = "which is no member before it: pack the files themselves by tar --hard-dereference"
            raise Dropped("broken_link", detail.format("hard", advice))
        if size > MOST_TEXT:
            check_bytes(size, f"{self.path}: {name}")
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as error:
            raise Dropped("unreadable_member", f"{self.path}: {name}: {error}") from error
        if len(data) < size:
            self._check()
            raise Dropped("unreadable_member", f"{self.path}: {name}: the file ends before it")
        return data

    def _read_sparse(self, name: str, data: bytes) -> bytes:
        """The bytes of a sparse member with its holes, of its headers and data in the tar."""
        try:
            with tarfile.open(fileobj=io.BytesIO(data + 2 * ZERO), mode="r:") as tar:
                if (member := tar.next()) is not None:
                    check_bytes(member.size, f"{self.path}: {name}")
                    if file := tar.extractfile(member):
                        return file.read()
        except (tarfile.TarError, ValueError, LookupError, OSError):
            pass
        raise Dropped("unreadable_member", f"{self.path}: {name}: damaged sparse file: pack it by GNU tar without -S")


class Place(NamedTuple):
    path: str  # of a file
    offset: int = 0  # in the file
    size: int = 0  # bytes; 0 for the whole file


class SampleRef(NamedTuple):
    key: str  # its name, unique in the shard
    members: Mapping[str, tuple[int, int]] = {}  # in a tar, suffix in lower case -> (offset, size) in bytes


class SampleRefs(Sequence[SampleRef]):
    """A compact list of samples that can be appended to."""

    def __init__(self, samples: Iterable[SampleRef] = ()) -> None:
        self._keys, self._key_ends = bytearray(), array("Q", [0])  # all keys in UTF-8, joined
        self._kinds: dict[tuple[str, ...], int] = {}  # suffixes of a sample's members -> number
        self._suffixes: list[tuple[str, ...]] = []  # by that number
        self._kind = array("I")
        self._spans, self._span_ends = array("Q"), array("Q", [0])  # offset and size of each member
        for key, members in samples:
            self.append(key, members)

    def append(self, key: str, members: Mapping[str, tuple[int, int]]) -> None:
        self.add(key, members, list(chain.from_iterable(members.values())))

    def add(self, key: str, members: Iterable[str], spans: list[int]) -> None:
        """Add a sample by the suffixes of its members, and offset and size of each in turn."""
        suffixes = tuple(members)
        kind = self._kinds.get(suffixes)
        if kind is None:
            kind = self._kinds[suffixes] = len(self._suffixes)
            self._suffixes.append(suffixes)
        self._kind.append(kind)
        self._keys += key.encode()
        self._key_ends.append(len(self._keys))
        self._spans.fromlist(spans)
        self._span_ends.append(len(self._spans))

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, number: int) -> SampleRef: ...
    @overload
    def __getitem__(self, number: slice) -> list[SampleRef]: ...
    def __getitem__(self, number: int | slice) -> SampleRef | list[SampleRef]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        suffixes = self._suffixes[self._kind[number]]  # raises IndexError
        if number < 0:
            number += len(self)
        key = self._keys[self._key_ends[number] : self._key_ends[number + 1]].decode()
        spans = iter(self._spans[self._span_ends[number] : self._span_ends[number + 1]])
        return SampleRef(key, dict(zip(suffixes, zip(spans, spans, strict=True), strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
