"""Owns the reading of other tools' indexes, of which the numbers of samples are taken, and no places of members.

    INDEX.json               wids: `shardlist`, each with `url`, `nsamples` and `filesize`
    00000.tar.idx            Megatron-Energon: where each sample begins and the last one ends, 8 bytes each
    .nv-meta/.info.json      Megatron-Energon: `shard_counts` by the shard's path (or .info.yaml, of its older versions)

A size that is not the shard's makes an entry worthless. Energon's list of counts has none: where it is wrong, that is
found when the shard is opened. wids' sums (md5) are not compared: that would read every shard.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from clipstream.errors import SettingsError

WIDS = "shardindex.json"  # its own name for an index, which is looked for beside shards
END_BLOCKS = 2 * 10240  # bytes of zeros that tars have behind their last member, at most


def of_wids(index: Path) -> dict[str, tuple[int, int | None]]:
    """Shard -> (samples, bytes), by its URL as it is listed, and by its base name where that is no other's too.

    Raises:
        SettingsError: it is no such index.
    """
    try:
        shards = json.loads(index.read_bytes())["shardlist"]
        rows = [(str(one["url"]), int(one["nsamples"]), one.get("filesize")) for one in shards]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{index} is no wids index that can be read: {type(error).__name__}: {error}") from error
    bases = Counter(os.path.basename(url) for url, *_ in rows)
    told: dict[str, tuple[int, int | None]] = {}
    for url, samples, size in rows:
        base = os.path.basename(url)
        told[url] = (samples, size)
        if bases[base] == 1:
            told[base] = (samples, size)
    return told


def count_of(told: dict[str, tuple[int, int | None]], url: str, size: int | None) -> int | None:
    """The samples of a shard of `size` bytes (None: not known here) in what `of_wids` gave."""
    samples, bytes_ = told.get(url) or told.get(os.path.basename(url.partition("?")[0])) or (None, None)
    return None if size is not None and bytes_ is not None and size != bytes_ else samples


class Beside:
    """What files beside local shards tell; each is read once."""

    def __init__(self) -> None:
        self._infos: dict[Path, dict[str, Any] | None] = {}
        self._wids: dict[Path, dict[str, tuple[int, int | None]]] = {}

    def count(self, path: Path, size: int) -> int | None:
        """The samples of a shard of `size` bytes; None where no file tells."""
        for look in (_of_itar, self._of_info, self._of_wids):
            told = look(path.absolute(), size)
            if told is not None:
                return told
        return None

    def _of_info(self, path: Path, size: int) -> int | None:
        for root in list(path.parents)[:3]:  # shards may lie in folders of the data set
            if root not in self._infos:
                self._infos[root] = _shard_counts(root / ".nv-meta")
            counts = self._infos[root]
            if counts is not None:
                count = counts.get(path.relative_to(root).as_posix())
                return count if isinstance(count, int) else None
        return None

    def _of_wids(self, path: Path, size: int) -> int | None:
        folder = path.parent
        if folder not in self._wids:
            try:
                self._wids[folder] = of_wids(folder / WIDS)
            except SettingsError:
                self._wids[folder] = {}
        return count_of(self._wids[folder], str(path), size)


def _of_itar(path: Path, size: int) -> int | None:
    """Of Energon's offsets: the last one is the end of the last sample."""
    try:
        data = path.with_name(f"{path.name}.idx").read_bytes()
    except OSError:
        return None
    if len(data) < 8 or len(data) % 8:
        return None
    (end,) = struct.unpack("<Q", data[-8:])
    return len(data) // 8 - 1 if 0 <= size - end <= END_BLOCKS else None


def _shard_counts(folder: Path) -> dict[str, Any] | None:
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
