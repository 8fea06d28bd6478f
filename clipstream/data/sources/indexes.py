"""Side indexes, and the samples per shard of a source, before training opens a shard.

A side index is a small file that lists the samples of a shard:

    00000.tar.index            beside a local shard
    FOLDER/00000-HASH.index    of any shard, in a folder of indexes; HASH is of the shard's whole name

Its first line is `clipstream-index 1 CRC JSON`: the CRC-32 of the JSON, and in the JSON the number of samples, the size
and modification time of a local file or the version of a remote one, the shard's fault, and length and CRC-32 of the
rest: keys and offsets of members, as JSON compressed with zlib. The data order needs the first line only; the rest
opens a local shard without a scan of its headers.

`count_samples` asks the source type, side indexes and other tools' indexes in this order; small local tars without an
index are scanned. Many or large ones are not, as every rank would scan them at every start.

    INDEX.json               wids: `shardlist`, each with `url`, `nsamples` and `filesize`
    00000.tar.idx            Megatron-Energon: start of each sample and end of the last one, 8 bytes each
    .nv-meta/.info.json      Megatron-Energon: `shard_counts` by the shard's path (or .info.yaml, of its older versions)

An entry whose file size is not the shard's is ignored. Energon's counts have no sizes: a wrong one is found when the
shard is opened. The MD5 sums of wids are not compared, as that would read every shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import struct
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import InstanceOf
from typing_extensions import NotRequired, TypedDict

from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source
from clipstream.errors import SettingsError
from clipstream.storage.download import compression_of
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import BLOCK, LINK, Fault, SampleRefs, ShardIndex, scan
from clipstream.text import lines, listed, printable
from clipstream.utils import atomic_write
from clipstream.utils.section import Count, parse_as

SUFFIX = ".index"
MAGIC = b"clipstream-index 1 "
LONGEST_HEAD = 1 << 16
MOST_PACKED = 256  # bytes that a byte of an index unpacks to at most, which shards' are far below: zlib allows 1,032
MOST_SAMPLES = (1 << 31) - 1  # of a shard: windows hold their numbers as int32
SMALL = 256 << 20  # most bytes of tars without an index that are scanned at the start
READERS = 16  # threads: on a network file system, opening a file takes far longer than reading a line of it
OLD = 3600  # s after which a draft is nobody's
NAMED = 5  # shards that a message lists
NONE, STALE, GONE = "there is none", "the shard has changed since", "the shard does not exist"
WIDS = "shardindex.json"  # the name that wids gives an index beside shards
END_BLOCKS = 2 * 10240  # most bytes of zeros behind the last member of a tar

Wids = dict[str, tuple[int, int | None]]  # URL, or unique base name -> (samples, bytes)


class Identity(NamedTuple):
    """What identifies the version of a shard."""

    size: int | None = None  # bytes of a local file
    mtime: int | None = None  # its modification time in whole seconds, as copying may drop fractions
    version: str | None = None  # of a remote one, if the server gives one


@dataclass(frozen=True)
class Head:
    """The first line of an index, as its JSON has it."""

    samples: Count  # complete ones
    size: int | None  # these three: the version of the shard that was indexed, see Identity
    mtime: int | None
    version: str | None
    fault: Fault | None  # of the shard
    length: Count  # of the rest of the index
    crc32: int  # of the rest
    origin: dict[str, object] | None = None  # of a copy: what it was made from, and how

    @property
    def of(self) -> Identity:
        """The version of the shard that was indexed."""
        return Identity(self.size, self.mtime, self.version)


class _Entry(TypedDict):
    """An entry of wids' `shardlist`."""

    url: InstanceOf[str]
    nsamples: Count
    filesize: NotRequired[int | None]


def path_of(name: str, folder: str | None) -> Path | None:
    """The index of a shard: in `folder`, or else beside a local shard; None for a remote shard without a folder."""
    url = ShardURL(name)
    if folder is None:
        return None if url.path is None else Path(f"{url.path}{SUFFIX}")
    full = url.unsigned
    words = re.findall(r"[\w.-]+(?=\.(?:tar|tgz)\b)", full)
    stem = words[-1][-60:] if words else "shard"
    return Path(folder) / f"{stem}-{hashlib.sha256(full.encode()).hexdigest()[:16]}{SUFFIX}"


def paths_of(name: str, folder: str | None) -> list[Path]:
    """The files that may be the index of a shard: in `folder`, beside it."""
    return list(dict.fromkeys(path for path in (path_of(name, folder), path_of(name, None)) if path is not None))


def identity_of(path: str | Path) -> Identity:
    """The version of a local file. Raises OSError."""
    stat = os.stat(path)
    return Identity(stat.st_size, int(stat.st_mtime))


def write(path: Path, index: ShardIndex, of: Identity, origin: dict[str, object] | None = None) -> None:
    """Write a shard's index atomically; `origin` is what a copy was made from, and how. Raises OSError."""
    kinds: dict[tuple[str, ...], int] = {}
    rows, expected = [], 0
    for key, members in index.samples:
        row: list[str | int] = [key, kinds.setdefault(tuple(members), len(kinds))]
        for offset, size in members.values():
            # Relative to the offset expected after the previous member: 0 in most tars, which compresses well.
            row += [offset - expected, size]
            expected = _next(offset, size)
        rows.append(row)
    body = zlib.compress(json.dumps({"kinds": list(kinds), "samples": rows}, separators=(",", ":")).encode())
    rest: dict[str, object] = {"fault": index.fault, "length": len(body), "crc32": zlib.crc32(body)}
    rest |= {} if origin is None else {"origin": origin}
    head = json.dumps({"samples": len(index.samples), **of._asdict(), **rest}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.replace(path, [MAGIC + b"%08x %s\n" % (zlib.crc32(head), head), body], shared=True)


def place(shard: Path, index: Path, target: Path) -> None:
    """Rename a finished shard, and its index, to `target` and its side index. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.flush(shard)
    index.replace(f"{target}{SUFFIX}")  # first: it names the version of its file, and is ignored beside another one
    shard.replace(target)
    atomic_write.flush(target.parent)


def remove_drafts(folder: Path) -> None:
    """Remove what killed calls of `write` have left in a folder, when it is an hour old."""
    for draft in folder.glob(f"*{SUFFIX}.{'[0-9a-f]' * 16}.part"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > OLD:
                draft.unlink()


def read_head(path: Path) -> Head:
    """The first line of an index.

    Raises:
        OSError: it does not exist or cannot be read.
        ValueError: it is damaged, or of another format.
    """
    with open(path, "rb") as file:
        return parse_head(file.readline(LONGEST_HEAD))


def read(path: Path, size: int | None = None) -> tuple[Head, ShardIndex]:
    """A whole index; `size` is that of its tar, in which all members must end. Raises as `read_head`."""
    with open(path, "rb") as file:
        head = parse_head(file.readline(LONGEST_HEAD))
        body = file.read()
    if len(body) != head.length or zlib.crc32(body) != head.crc32:
        raise ValueError("its checksum is wrong")
    samples, expected = SampleRefs(), 0
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(body, MOST_PACKED * len(body))
        if not unpacker.eof:
            raise ValueError(f"truncated, or unpacks to more than {MOST_PACKED} times its size")
        packed = json.loads(text)
        for key, kind, *numbers in packed["samples"]:
            members = {}
            for i, suffix in enumerate(packed["kinds"][kind]):
                offset, length = expected + numbers[2 * i], numbers[2 * i + 1]
                if size is not None and offset + length % LINK > size:
                    raise ValueError(f"member {suffix} of {printable(str(key))} ends behind the shard")
                members[suffix] = (offset, length)
                expected = _next(offset, length)
            samples.append(key, members)
    except (zlib.error, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    if len(samples) != head.samples:
        raise ValueError(f"{len(samples)} samples instead of {head.samples}")
    return head, ShardIndex(samples, head.fault)


def open_index(name: str, folder: str | None) -> ShardIndex | None:
    """The index of a local tar; None if there is none that is intact and of this version of the file."""
    local = ShardURL(name).path
    for path in [] if local is None else paths_of(name, folder):
        with contextlib.suppress(OSError, ValueError):
            identity = identity_of(str(local))
            head, index = read(path, identity.size)
            later = os.stat(str(local)).st_mtime_ns > os.stat(path).st_mtime_ns  # written again within the same second
            if head.of == identity and not later:
                return index
    return None


def parse_head(line: bytes) -> Head:
    """The first line of an index, with its end. Raises ValueError: it is damaged, or of another format."""
    checksum, _, text = line.removeprefix(MAGIC).rstrip(b"\n").partition(b" ")
    if not line.startswith(MAGIC) or not line.endswith(b"\n") or b"%08x" % zlib.crc32(text) != checksum:
        raise ValueError("damaged, or not an index of this version")
    head = parse_as(Head, text)
    if head.samples > MOST_SAMPLES:
        raise ValueError(f"it claims {head.samples:,} samples")
    return head


def _next(offset: int, size: int) -> int:
    """Offset of the data of the next member, behind a plain header."""
    return offset + -(-size // BLOCK) * BLOCK + BLOCK


def count_samples(source: Source) -> list[int]:
    """Samples of each shard, in the order of `source.names`; also sets `source.counts` and `source.empty`.

    Raises SettingsError: the samples of some shards are unknown; the message has the command that makes their indexes.
    """
    if source.counts is not None:
        return source.counts
    settings, key = source.settings, source.context.key
    names = list(dict.fromkeys(source.names))
    folder, wids = settings.index, Wids()
    if folder is not None and (folder.endswith(".json") or os.path.isfile(folder)):
        if isinstance(read_wids := _read_wids(Path(folder)), str):
            raise SettingsError(f"{key}.index: {read_wids}")
        wids, folder = read_wids, None
    neighbours = _NeighbourIndexes()

    def look(name: str) -> int | str:
        """The samples of a shard, or why they are unknown."""
        if (known := source.num_samples(name)) is not None:
            return known
        if not (kind := source.types[name]).tars:
            raise SettingsError(f"{key}.type: {settings.type} does not know the samples of {kind.title(name)}")
        return _by_index(name, folder, wids, neighbours)

    with ThreadPoolExecutor(READERS) as threads:
        found: dict[str, int | str] = dict(zip(names, threads.map(look, names), strict=True))
    unknown = {name: why for name, why in found.items() if isinstance(why, str)}
    if unknown and _are_small(list(unknown)):
        try:
            found |= {name: len(scan(str(ShardURL(name).path)).samples) for name in unknown}
        except OSError as error:
            first = error.filename or next(iter(unknown))
            raise SettingsError(f"{key}.shards: cannot read {first}: {error.strerror}") from error
    elif unknown:
        raise SettingsError(_advice(settings, key, unknown, len(names)))
    source.counts = [count for name in source.names if isinstance(count := found[name], int)]
    for number, count in enumerate(source.counts):
        if not count:
            name = source.names[number]
            local = ShardURL(name).path if source.types[name].tars else None
            try:
                fault = None if local is None or compression_of(Path(local)) is not None else scan(local).fault
                source.empty[number] = str(fault or "empty: no samples")
            except OSError as error:
                source.empty[number] = f"unreadable: {error.strerror}"
    return source.counts


def _by_index(name: str, folder: str | None, wids: Wids, neighbours: _NeighbourIndexes) -> int | str:
    """The samples of a tar by an index, or why they are unknown."""
    local = ShardURL(name).path
    try:
        identity = None if local is None else identity_of(local)
    except OSError:
        return GONE
    why = NONE
    for path in paths_of(name, folder):
        try:
            head = read_head(path)
        except OSError:
            continue
        except ValueError as error:
            why = f"{path}: {error}"
            continue
        if identity is None or head.of == identity:
            return check_count(head.samples, local, head.size)
        why = STALE
    size = None if identity is None else identity.size
    count = _wids_count(wids, name, size)
    if count is None and local is not None and size is not None:
        count = neighbours.count(Path(local), size)
    return why if count is None else check_count(count, local, size)


def check_count(count: int, local: str | None, size: int | None) -> int | str:
    """The count of an index, or why it cannot be that of a tar of `size` bytes, in which each sample has a header."""
    dense = local is not None and size is not None and count * BLOCK > size and compression_of(Path(local)) is None
    return f"an index claims {count:,} samples" if dense or count > MOST_SAMPLES else count


def _are_small(names: list[str]) -> bool:
    """Whether all are local uncompressed tars, together at most SMALL bytes."""
    paths = [path for name in names if (path := ShardURL(name).path) is not None]
    with contextlib.suppress(OSError):
        # Up to the first one too many: asking for the sizes of all would take long.
        small = len(paths) == len(names) and all(size <= SMALL for size in accumulate(map(os.path.getsize, paths)))
        return small and all(compression_of(Path(path)) is None for path in paths)
    return False


def _advice(settings: SourceSettings, key: str, unknown: dict[str, str], total: int) -> str:
    """Why the mode `indexed` cannot start, and the command that makes the indexes."""
    first, why = next(iter(unknown.items()))
    if gone := [name for name, why in unknown.items() if why == GONE]:
        return f"{key}.shards: {len(gone):,} of {total:,} shards do not exist, e.g. {redact(gone[0])}"
    shards = [settings.shards] if isinstance(settings.shards, str) else settings.shards
    words = ["clipstream", "index", *(redact(spec) for spec in shards)]
    folder = settings.index
    advice = ""
    if folder is None and any(ShardURL(name).path is None for name in unknown):
        folder, advice = "FOLDER", f", and name that folder by --{key.replace('_', '-')}.index"
    words += [] if folder is None or folder.endswith(".json") else ["--into", folder]
    return lines(
        f"{key}.shards: the mode 'indexed' requires an index of each shard, but {len(unknown):,} of {total:,} have no "
        f"valid index, e.g. {redact(first)}: {why}. Create them with",
        f"  {shlex.join(words)}{advice}",
        f"If this command cannot index a shard, replace it, or remove it from --{key}.shards. Without an index: "
        f"{listed([redact(name) for name in unknown], NAMED)}",
    )


def _read_wids(index: Path) -> Wids | str:
    """The entries of an index of wids, or why it cannot be read."""
    try:
        entries = parse_as(list[_Entry], json.loads(index.read_bytes())["shardlist"])
        rows = [(one["url"], one["nsamples"], one.get("filesize")) for one in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{index} is not a valid wids index: {type(error).__name__}: {error}"
    bases = Counter(os.path.basename(url) for url, *_ in rows)
    found = Wids()
    for url, samples, size in rows:
        found[url] = (samples, size)
        if bases[base := os.path.basename(url)] == 1:
            found[base] = (samples, size)
    return found


def _wids_count(wids: Wids, url: str, size: int | None) -> int | None:
    """The samples of a shard of `size` bytes (None: unknown)."""
    samples, bytes_ = wids.get(url) or wids.get(os.path.basename(url.partition("?")[0])) or (None, None)
    return None if size is not None and bytes_ is not None and size != bytes_ else samples


class _NeighbourIndexes:
    """Other tools' indexes beside local shards; each is read once."""

    def __init__(self) -> None:
        self._energon, self._wids = cache(_energon_counts), cache(_read_wids)

    def count(self, path: Path, size: int) -> int | None:
        """The samples of a shard of `size` bytes; None if no index has them."""
        path = path.absolute()
        data, beside = b"", path.with_name(f"{path.name}.idx")
        with contextlib.suppress(OSError):
            data = beside.read_bytes() if beside.stat().st_size < size else b""
        # The last offset of Energon's is the end of the last sample.
        if data and len(data) % 8 == 0 and 0 <= size - struct.unpack("<Q", data[-8:])[0] <= END_BLOCKS:
            return len(data) // 8 - 1
        for root in list(path.parents)[:3]:  # shards may be in folders of the data set
            if (counts := self._energon(root / ".nv-meta")) is not None:
                if (count := counts.get(path.relative_to(root).as_posix())) is not None:
                    return count
                break
        wids = self._wids(path.parent / WIDS)
        return None if isinstance(wids, str) else _wids_count(wids, str(path), size)


def _energon_counts(folder: Path) -> dict[str, int] | None:
    for name in (".info.json", ".info.yaml"):
        with contextlib.suppress(OSError):
            text = (folder / name).read_bytes()
            try:
                values = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
                return parse_as(dict[str, Count], values["shard_counts"])
            except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
                return None
    return None
