"""Tars as a source type, local or remote, the type of every name that no other type claims.

URLs enter; open tars leave, downloaded through the store and read by their side index where they have one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clipstream.data.settings import SourceSettings
from clipstream.data.sources import indexes
from clipstream.data.sources.protocol import OpenShard, SourceContext, SourceType
from clipstream.storage.shard_url import ShardURL
from clipstream.storage.tar import Shard
from clipstream.utils.section import Count, checked

SIZES = "sizes.json"  # {"00000.tar": 1000, …}, as open_clip has it
LENGTH = "__len__"  # one number: the samples of all tars of the folder


class TarSource(SourceType):
    """WebDataset shards: local tars, URLs and `pipe:` commands."""

    tars = True
    staged = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self._indexes, self._store = settings.index, context.store

    def list_shards(self, spec: str) -> Sequence[str]:
        return [spec]

    def open(self, shard: str) -> OpenShard:
        assert self._store is not None, "a source without a store only lists shards"
        local = self._store.local(shard)
        # The index describes the file that is named, not an unpacked or downloaded one.
        indexed = ShardURL(shard).path == str(local)
        try:
            return Shard(local, indexes.opened_by(shard, self._indexes) if indexed else None)
        except BaseException:
            self._store.release(shard)
            raise

    def total_samples(self, shards: Sequence[str]) -> int | None:
        """Samples by `sizes.json` or `__len__` of the tars' folders, each tar as often as it is named.

        `__len__` counts only if every tar of its folder is named once.
        """
        total = 0
        folders: dict[Path, list[str]] = {}
        for tar in shards:
            if ShardURL(tar).scheme is not None:
                return None
            path = Path(tar)
            folders.setdefault(path.parent, []).append(path.name)
        for folder, names in folders.items():
            try:
                sizes = checked(dict[str, Count], (folder / SIZES).read_bytes())
            except (OSError, ValueError):
                sizes = {}
            if all(name in sizes for name in names):
                total += sum(sizes[name] for name in names)
                continue
            try:
                length = checked(int, (folder / LENGTH).read_bytes())
            except (OSError, ValueError):
                return None
            if length < 0 or sorted(names) != sorted(path.name for path in folder.glob("*.tar")):
                return None
            total += length
        return total

    def missing(self, shards: Sequence[str]) -> list[str]:
        return [shard for shard in shards if ShardURL(shard).scheme is None and not os.path.exists(shard)]

    def is_remote(self, shard: str) -> bool:
        return ShardURL(shard).is_remote

    def prefetch(self, shard: str) -> bool:
        assert self._store is not None, "a source without a store only lists shards"
        return self._store.prefetch(shard)

    def release(self, shard: str, *, keep: bool = True) -> None:
        if self._store is not None:
            self._store.release(shard, keep=keep)
