"""Side indexes: small files that list the samples of a shard.

    00000.tar.index            beside a local shard
    FOLDER/00000-HASH.index    of any shard, in a folder of indexes; HASH is of the shard's whole name

The first line is `clipstream-index 1 CRC JSON`: the CRC-32 of the JSON, and in the JSON the number of samples, the
size and modification time of a local file or the version of a remote one, the shard's fault, and length and CRC-32 of
the rest: keys and offsets of members, as JSON compressed with zlib. The data order needs the first line only; the rest
opens a local shard without a scan of its headers. Nothing here reads a tar.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from clipstream.data.shard_url import local_path, redact, scheme_of
from clipstream.data.tar import BLOCK, Fault, SampleTable, ShardIndex
from clipstream.utils import atomic_write

SUFFIX = ".index"
MAGIC = b"clipstream-index 1 "
LONGEST_HEAD = 1 << 16
# Parts of a URL that differ each time it is signed.
SIGNED = re.compile(r"(?i)^(?:x-(?:amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|signature|sig|se|st|sp|sv|sr|expires"
                    r"|policy|key-pair-id|.*token.*)=")  # fmt: skip


class Identity(NamedTuple):
    """What identifies the version of a shard.

    Attributes:
        size: bytes of a local file; None for a remote one.
        mtime: its modification time in whole seconds, as copying may drop fractions.
        version: of a remote one, as the server gives it; None if it gives none.
    """

    size: int | None = None
    mtime: int | None = None
    version: str | None = None


class Head(NamedTuple):
    """The first line of an index.

    Attributes:
        samples: number of complete samples.
        of: version of the shard that was indexed.
        fault: of the shard.
    """

    samples: int
    of: Identity
    fault: Fault | None


def path_of(url: str, folder: str | None) -> Path | None:
    """The index of a shard: in `folder`, or else beside a local shard; None for a remote shard without a folder."""
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
    return Path(folder) / f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"


def paths_of(url: str, folder: str | None) -> list[Path]:
    """The files that may be the index of a shard: in `folder`, beside it."""
    return list(dict.fromkeys(path for path in (path_of(url, folder), path_of(url, None)) if path is not None))


def identity_of(path: str | Path) -> Identity:
    """The version of a local file. Raises OSError."""
    stat = os.stat(path)
    return Identity(stat.st_size, int(stat.st_mtime))


def write(path: Path, index: ShardIndex, of: Identity) -> None:
    """Write a shard's index atomically.

    Raises:
        OSError: it cannot be written.
    """
    kinds: dict[tuple[str, ...], int] = {}
    rows, expected = [], 0
    for key, members in index.samples:
        row: list[str | int] = [key, kinds.setdefault(tuple(members), len(kinds))]
        for offset, size in members.values():
            # Relative to the offset expected after the previous member: 0 in most tars, which compresses well.
            row += [offset - expected, size]
            expected = _next(offset, size)
        rows.append(row)
    packed = {"kinds": list(kinds), "samples": rows}
    body = zlib.compress(json.dumps(packed, separators=(",", ":")).encode())
    fields = {
        "samples": len(index.samples),
        **of._asdict(),
        "fault": index.fault,
        "length": len(body),
        "crc32": zlib.crc32(body),
    }
    head = json.dumps(fields).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.replace(path, MAGIC + b"%08x %s\n" % (zlib.crc32(head), head) + body)


def read_head(path: Path) -> Head:
    """The first line of an index.

    Raises:
        OSError: it does not exist or cannot be read.
        ValueError: it is damaged, or of another format.
    """
    with open(path, "rb") as file:
        return _head(file.readline(LONGEST_HEAD))[0]


def read(path: Path) -> tuple[Head, ShardIndex]:
    """A whole index. Raises as `read_head`."""
    with open(path, "rb") as file:
        head, fields = _head(file.readline(LONGEST_HEAD))
        body = file.read()
    if len(body) != fields["length"] or zlib.crc32(body) != fields["crc32"]:
        raise ValueError("its checksum is wrong")
    packed = json.loads(zlib.decompress(body))
    samples, expected = SampleTable(), 0
    for key, kind, *numbers in packed["samples"]:
        members = {}
        for i, suffix in enumerate(packed["kinds"][kind]):
            offset, size = expected + numbers[2 * i], numbers[2 * i + 1]
            members[suffix] = (offset, size)
            expected = _next(offset, size)
        samples.append(key, members)
    return head, ShardIndex(samples, head.fault)


def opened_by(url: str, folder: str | None) -> ShardIndex | None:
    """The index of a local tar; None if there is none that is intact and of this version of the file."""
    local = local_path(url)
    for path in [] if local is None else paths_of(url, folder):
        with contextlib.suppress(OSError, ValueError):
            head, index = read(path)
            if local is not None and head.of == identity_of(local):
                return index
    return None


def _head(line: bytes) -> tuple[Head, dict[str, Any]]:
    checksum, _, text = line.removeprefix(MAGIC).rstrip(b"\n").partition(b" ")
    if not line.startswith(MAGIC) or not line.endswith(b"\n") or b"%08x" % zlib.crc32(text) != checksum:
        raise ValueError("it is damaged, or no index of this version")
    fields = json.loads(text)
    fault = None if fields["fault"] is None else Fault(*fields["fault"])
    return Head(fields["samples"], Identity(fields["size"], fields["mtime"], fields["version"]), fault), fields


def _next(offset: int, size: int) -> int:
    """Offset of the data of the next member, behind a plain header."""
    return offset + -(-size // BLOCK) * BLOCK + BLOCK
