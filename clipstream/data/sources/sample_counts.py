"""Samples per shard of a source, before training opens a shard.

The source type, clipstream's side indexes and other tools' indexes are asked in this order; small local tars without an
index are scanned. Many or large ones are not, as every rank would scan them at every start.

    INDEX.json               wids: `shardlist`, each with `url`, `nsamples` and `filesize`
    00000.tar.idx            Megatron-Energon: start of each sample and end of the last one, 8 bytes each
    .nv-meta/.info.json      Megatron-Energon: `shard_counts` by the shard's path (or .info.yaml, of its older versions)

An entry whose file size is not the shard's is ignored. Energon's counts have no sizes: a wrong one is found when the
shard is opened. The MD5 sums of wids are not compared, as that would read every shard.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import yaml

from clipstream.data.settings import SourceSettings
from clipstream.data.shard_url import local_path, redact
from clipstream.data.sources import side_index
from clipstream.data.sources.source import Source
from clipstream.data.tar import scan
from clipstream.data.transport.compression import packing
from clipstream.errors import SettingsError

SMALL = 256 << 20  # most bytes of tars without an index that are scanned at the start
READERS = 16  # threads: on a network file system, opening a file takes far longer than reading a line of it
NAMED = 5  # shards that a message lists
NONE, STALE, GONE = "there is none", "the shard has changed since", "the shard is not there"
WIDS = "shardindex.json"  # the name that wids gives an index beside shards
END_BLOCKS = 2 * 10240  # most bytes of zeros behind the last member of a tar

Wids = dict[str, tuple[int, int | None]]  # URL, or unique base name -> (samples, bytes)


def count_samples(source: Source, settings: SourceSettings, place: str) -> list[int]:
    """Samples of each shard, in the order of `source.names`; also sets `source.counts`.

    Args:
        settings: of the source.
        place: dotted key of the source in the settings, for messages.

    Raises:
        SettingsError: the samples of some shards are unknown; the message has the command that makes their indexes.
    """
    names = list(dict.fromkeys(source.names))
    folder, wids = settings.index, Wids()
    if folder is not None and (folder.endswith(".json") or os.path.isfile(folder)):
        try:
            wids, folder = read_wids(Path(folder)), None
        except SettingsError as error:
            raise SettingsError(f"{place}.index: {error}") from error
    neighbours = NeighbourIndexes()

    def look(name: str) -> int | str:
        """The samples of a shard, or why they are unknown."""
        if (known := source.num_samples(name)) is not None:
            return known
        if not source.is_tar(name):
            raise SettingsError(f"{place}.type: {settings.type} does not know the samples of {source.title(name)}")
        return _look(name, folder, wids, neighbours)

    with ThreadPoolExecutor(READERS) as threads:
        found: dict[str, int | str] = dict(zip(names, threads.map(look, names), strict=True))
    unknown = {name: why for name, why in found.items() if isinstance(why, str)}
    if unknown and _are_small(list(unknown)):
        try:
            found |= {name: len(scan(str(local_path(name))).samples) for name in unknown}
        except OSError as error:
            first = error.filename or next(iter(unknown))
            raise SettingsError(f"{place}.shards: {first} cannot be read: {error.strerror}") from error
    elif unknown:
        raise SettingsError(_advice(settings, place, unknown, len(names)))
    source.counts = [count for name in source.names if isinstance(count := found[name], int)]
    empty = (number for number, count in enumerate(source.counts) if not count)
    source.empty = {number: _empty_fault(source, source.names[number]) for number in empty}
    return source.counts


def _empty_fault(source: Source, name: str) -> str:
    """The fault of a shard without samples."""
    local = local_path(name) if source.is_tar(name) else None
    try:
        fault = None if local is None or packing(Path(local)) is not None else scan(local).fault
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return str(fault or "empty: no sample in it")


def _look(name: str, folder: str | None, wids: Wids, neighbours: NeighbourIndexes) -> int | str:
    """The samples of a tar by an index, or why they are unknown."""
    local = local_path(name)
    try:
        identity = None if local is None else side_index.identity_of(local)
    except OSError:
        return GONE
    why = NONE
    for path in side_index.paths_of(name, folder):
        try:
            head = side_index.read_head(path)
        except OSError:
            continue
        except ValueError as error:
            why = f"{path}: {error}"
            continue
        if identity is None or head.of == identity:
            return head.samples
        why = STALE
    size = None if identity is None else identity.size
    count = wids_count(wids, name, size)
    if count is None and local is not None and size is not None:
        count = neighbours.count(Path(local), size)
    return why if count is None else count


def _are_small(names: list[str]) -> bool:
    """Whether all are local uncompressed tars, together at most SMALL bytes."""
    total = 0
    for name in names:
        local = local_path(name)
        try:
            if local is None or (total := total + os.path.getsize(local)) > SMALL or packing(Path(local)) is not None:
                return False
        except OSError:
            return False
    return True


def _advice(settings: SourceSettings, place: str, unknown: dict[str, str], total: int) -> str:
    first, why = next(iter(unknown.items()))
    if gone := [name for name, why in unknown.items() if why == GONE]:
        return f"{place}.shards: {len(gone):,} of {total:,} shards are not there, e.g. {redact(gone[0])}"
    shards = [settings.shards] if isinstance(settings.shards, str) else settings.shards
    words = ["python", "-m", "clipstream.index", *(redact(spec) for spec in shards)]
    folder = settings.index
    advice = ""
    if folder is None and any(local_path(name) is None for name in unknown):
        folder, advice = "FOLDER", f", and name that folder by --{place.replace('_', '-')}.index"
    words += [] if folder is None or folder.endswith(".json") else ["--into", folder]
    return (
        f"{place}.shards: the mode 'indexed' needs an index of each shard, and {len(unknown):,} of {total:,} have none "
        f"that can be used, e.g. {redact(first)}: {why}. Make them by\n  {shlex.join(words)}{advice}\n"
        f"A shard that this command cannot index is broken: replace it, or leave it out of --{place}.shards. "
        f"Without an index: {', '.join(map(redact, list(unknown)[:NAMED]))}{', …' * (len(unknown) > NAMED)}"
    )


def read_wids(index: Path) -> Wids:
    """The entries of an index of wids.

    Raises:
        SettingsError: the file is not one.
    """
    try:
        shards = json.loads(index.read_bytes())["shardlist"]
        rows = [(str(one["url"]), int(one["nsamples"]), one.get("filesize")) for one in shards]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{index} is no wids index that can be read: {type(error).__name__}: {error}") from error
    bases = Counter(os.path.basename(url) for url, *_ in rows)
    found = Wids()
    for url, samples, size in rows:
        found[url] = (samples, size)
        if bases[base := os.path.basename(url)] == 1:
            found[base] = (samples, size)
    return found


def wids_count(wids: Wids, url: str, size: int | None) -> int | None:
    """The samples of a shard of `size` bytes (None: unknown)."""
    samples, bytes_ = wids.get(url) or wids.get(os.path.basename(url.partition("?")[0])) or (None, None)
    return None if size is not None and bytes_ is not None and size != bytes_ else samples


class NeighbourIndexes:
    """Other tools' indexes beside local shards; each is read once."""

    def __init__(self) -> None:
        self._energon, self._wids = cache(_energon_counts), cache(_wids_beside)

    def count(self, path: Path, size: int) -> int | None:
        """The samples of a shard of `size` bytes; None if no index has them."""
        path = path.absolute()
        try:
            data = path.with_name(f"{path.name}.idx").read_bytes()
        except OSError:
            data = b""
        # The last offset of Energon's is the end of the last sample.
        if data and len(data) % 8 == 0 and 0 <= size - struct.unpack("<Q", data[-8:])[0] <= END_BLOCKS:
            return len(data) // 8 - 1
        for root in list(path.parents)[:3]:  # shards may be in folders of the data set
            if (counts := self._energon(root / ".nv-meta")) is not None:
                count = counts.get(path.relative_to(root).as_posix())
                if isinstance(count, int):
                    return count
                break
        return wids_count(self._wids(path.parent), str(path), size)


def _energon_counts(folder: Path) -> dict[str, object] | None:
    for name in (".info.json", ".info.yaml"):
        try:
            text = (folder / name).read_bytes()
        except OSError:
            continue
        try:
            tree = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
            return dict(tree["shard_counts"])
        except (ValueError, KeyError, TypeError, yaml.YAMLError):
            return None
    return None


def _wids_beside(folder: Path) -> Wids:
    try:
        return read_wids(folder / WIDS)
    except SettingsError:
        return {}
