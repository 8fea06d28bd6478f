"""Owns the side index of a shard, a small file that says what the shard holds: its form, its name, whether it is stale.

    00000.tar.index            beside a local shard
    FOLDER/00000-HASH.index    of any shard, in a folder of indexes; HASH is of the shard's whole name

The first line is `clipstream-index 1 CRC JSON`: the CRC-32 of the JSON, and in it the number of samples, the size and
time of a local file or the version of a remote one, what is wrong with the shard, and length and CRC-32 of what
follows: keys and the places of members, as JSON packed with zlib. The order of samples takes the first line alone; the
rest opens a local shard without a walk over its headers. Nothing here reads a tar.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clipstream import durable
from clipstream.data.refs import SampleRef, SampleTable
from clipstream.data.shards import local_path, redact, scheme_of
from clipstream.data.tarstream import BLOCK, Fault, ShardIndex

SUFFIX = ".index"
MAGIC = b"clipstream-index 1 "
LONGEST_HEAD = 1 << 16
# Parts of a URL that are anew whenever it is signed.
SIGNED = re.compile(r"(?i)^(?:x-(?:amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|signature|sig|se|st|sp|sv|sr|expires"
                    r"|policy|key-pair-id|.*token.*)=")  # fmt: skip


class Identity(NamedTuple):
    """What changes when a shard does.

    Attributes:
        size: bytes of a local file; None for a remote one.
        mtime: its time in whole seconds, as not every copy keeps more.
        version: what the server tells of a remote one; None where it tells nothing.
    """

    size: int | None = None
    mtime: int | None = None
    version: str | None = None


class Head(NamedTuple):
    """The first line of an index.

    Attributes:
        samples: whole ones.
        of: the shard that was indexed.
        fault: what is wrong with it.
    """

    samples: int
    of: Identity
    fault: Fault | None


def place_of(url: str, folder: str | None) -> Path | None:
    """Where the index of a shard is: in `folder`, or else beside a local shard; None for a remote one without one."""
    local = local_path(url)
    if folder is None:
        return None if local is None else Path(f"{local}{SUFFIX}")
    name = redact(url).replace("***@", "")
    if local is not None:
        name = os.path.abspath(local)
    elif scheme_of(url) != "pipe":
        path, _, query = name.partition("?")
        kept = [part for part in query.split("&") if part and not SIGNED.match(part)]
        name = "?".join([path, "&".join(kept)]) if kept else path
    words = re.findall(r"[\w.-]+(?=\.(?:tar|tgz)\b)", name)
    stem = words[-1][-60:] if words else "shard"
    return Path(folder).expanduser() / f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"


def places_of(url: str, folder: str | None) -> list[Path]:
    """Where the index of a shard may be: in `folder`, beside it."""
    places = (place_of(url, folder), place_of(url, None))
    return list(dict.fromkeys(place for place in places if place is not None))


def identity_of(path: str | Path) -> Identity:
    """Of a local file. Raises OSError."""
    stat = os.stat(path)
    return Identity(stat.st_size, int(stat.st_mtime))


def write(place: Path, index: ShardIndex, of: Identity) -> None:
    """Write a shard's index, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    body = zlib.compress(json.dumps(_packed(index.samples), separators=(",", ":")).encode())
    told = {
        "samples": len(index.samples),
        **of._asdict(),
        "fault": index.fault,
        "length": len(body),
        "crc32": zlib.crc32(body),
    }
    head = json.dumps(told).encode()
    place.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(place, MAGIC + b"%08x %s\n" % (zlib.crc32(head), head) + body)


def read_head(place: Path) -> Head:
    """The first line of an index.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is damaged, or of another form.
    """
    with open(place, "rb") as file:
        return _head(file.readline(LONGEST_HEAD))[0]


def read(place: Path) -> tuple[Head, ShardIndex]:
    """A whole index. Raises as `read_head`."""
    with open(place, "rb") as file:
        head, told = _head(file.readline(LONGEST_HEAD))
        body = file.read()
    if len(body) != told["length"] or zlib.crc32(body) != told["crc32"]:
        raise ValueError("its checksum is wrong")
    samples = _unpacked(json.loads(zlib.decompress(body)))
    return head, ShardIndex(samples, head.fault)


def opened_by(url: str, folder: str | None) -> ShardIndex | None:
    """What a local tar holds, by its index; None where there is none that is whole and of this very file."""
    path = local_path(url)
    for place in [] if path is None else places_of(url, folder):
        with contextlib.suppress(OSError, ValueError):
            head, index = read(place)
            if path is not None and head.of == identity_of(path):
                return index
    return None


def _head(line: bytes) -> tuple[Head, dict[str, Any]]:
    checksum, _, text = line.removeprefix(MAGIC).rstrip(b"\n").partition(b" ")
    if not line.startswith(MAGIC) or not line.endswith(b"\n") or b"%08x" % zlib.crc32(text) != checksum:
        raise ValueError("it is damaged, or no index of this version")
    told = json.loads(text)
    fault = None if told["fault"] is None else Fault(*told["fault"])
    return Head(told["samples"], Identity(told["size"], told["mtime"], told["version"]), fault), told


def _packed(samples: Sequence[SampleRef]) -> dict[str, Any]:
    """Samples as lists; a member's place is told by how far it is from where the last one's end lets expect it, which
    in most tars is always the same, and takes no room when it is packed.
    """
    kinds: dict[tuple[str, ...], int] = {}
    rows, expected = [], 0
    for key, members in samples:
        row: list[Any] = [key, kinds.setdefault(tuple(members), len(kinds))]
        for offset, size in members.values():
            row += [offset - expected, size]
            expected = _next(offset, size)
        rows.append(row)
    return {"kinds": list(kinds), "samples": rows}


def _unpacked(packed: dict[str, Any]) -> SampleTable:
    samples, expected = SampleTable(), 0
    for key, kind, *places in packed["samples"]:
        members = {}
        for i, suffix in enumerate(packed["kinds"][kind]):
            offset, size = expected + places[2 * i], places[2 * i + 1]
            members[suffix] = (offset, size)
            expected = _next(offset, size)
        samples.append(key, members)
    return samples


def _next(offset: int, size: int) -> int:
    """Where the data of the next member begin, behind a plain header."""
    return offset + -(-size // BLOCK) * BLOCK + BLOCK
