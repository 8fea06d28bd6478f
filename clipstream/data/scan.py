"""One pass over all samples of a source: for `data.val_split` and for groups of samples (`groups`).

What is read of each sample is the caller's; results are kept in the cache by all that they depend on. Shards are read
by one process per core, and by the first process of a node that asks; the others wait. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from clipstream.data.decode.captions import RawSample, build_transform
from clipstream.data.decode.key_lists import build_filter
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source
from clipstream.data.sources.folders import FolderShard, FolderSource, PairShard
from clipstream.distributed.world import cores
from clipstream.errors import Dropped, SettingsError
from clipstream.storage.download import GIB, ShardError
from clipstream.storage.schemes import Fetcher
from clipstream.storage.shard_cache import ShardCache, cache_root
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.text import counted
from clipstream.utils.console import ProgressBar
from clipstream.utils.processes import Crashed, run

T = TypeVar("T")
Read = Callable[[str, RawSample], T]


class _Look(Generic[T]):
    """Reads the samples of a shard as training does, without augmentation; called in a process of its own."""

    def __init__(self, source: Source, members: tuple[str, ...] | None, read: Read[T]) -> None:
        self.source, self.read, section = source, read, source.settings
        self.transform = build_transform(section.transform)
        self.filter = build_filter(source.context.key.rpartition(".")[2], section)
        self.members = None if self.transform is not None else members

    def __call__(self, name: str) -> list[T | None] | Crashed:
        """What is kept of each sample of a shard, or why it cannot be read."""
        kind = self.source.types[name]
        title, found = kind.title(name), list[T | None]()
        try:
            shard = self.source.open(name)
        except (ShardError, OSError) as error:
            return Crashed(str(error))
        for ref in shard.index.samples:
            where = f"{title.rstrip('/').rpartition('/')[2]}/{ref.key}"
            found.append(None)
            if self.filter is not None and not self.filter(where, ref.key):
                continue
            with contextlib.suppress(Dropped):  # as in training, which counts it
                sample: Any = {"__key__": ref.key, "__url__": title, **shard.load(ref, self.members)}
                found[-1] = self.read(where, sample if self.transform is None else self.transform(sample))
        shard.close()
        kind.release(name)
        return found


def scan(
    title: str, source: Source, data: DataSettings, members: tuple[str, ...] | None, read: Read[T]
) -> dict[str, list[T | None]]:
    """By shard, what `read` gives for each of its samples, in stored order; None for those that training cannot use.

    Args:
        title: of the pass, for people.
        members: of a sample that are read; None for all.
        read: called with the name 'SHARD/KEY' and the raw sample; may raise Dropped.

    Raises ShardError: a shard cannot be read.
    """
    fetcher = Fetcher(timeout=data.transfer_timeout, most=int(data.max_shard_gib * GIB))
    names, found, faults = list(dict.fromkeys(source.names)), dict[int, list[T | None]](), list[str]()
    with closing(ShardCache(data.cache, fetcher=fetcher)) as store, ProgressBar(title) as bar:
        look = _Look(Source(source.settings, replace(source.context, store=store)), members, read)
        with closing(run(lambda number: look(names[number]), len(names), min(cores(), len(names)))) as events:
            for event in events:
                if event is not None:
                    number, result = event
                    found[number] = result if isinstance(result, list) else []
                    faults += [] if isinstance(result, list) else [f"{redact(names[number])}: {result.how}"]
                samples = sum(map(len, found.values()))
                bar.update(len(found), len(names), f"{samples:,} samples, {len(found):,} of {len(names):,} shards")
    if faults:
        some = f"{len(faults):,} of {counted(len(names), 'shard', ',')} cannot be compared with the others"
        raise ShardError(title, f"{some}: {faults[0]}: mend it, or leave it out of the training data")
    return {name: found[number] for number, name in enumerate(names)}


def cached(setting: str, folder: str, identity: str, fill: Callable[[Path], None]) -> Path:
    """The file that `fill` writes to a path, or wrote before for the same `identity`.

    Args:
        setting: that needs it, for messages.
        folder: of the cache.

    Raises SettingsError: `fill` failed, or there is no place for the file.
    """
    try:
        store = ShardCache(str(cache_root() / folder))
    except SettingsError as error:
        detail = str(error).removeprefix("data.cache: ")
        raise SettingsError(f"{setting}: {detail}: set another folder with CLIPSTREAM_CACHE") from error
    try:
        return store.get_or_make(setting, identity, lambda part, _: fill(part))
    except (ShardError, OSError) as error:
        raise SettingsError(f"{setting}: {getattr(error, 'detail', error)}") from error


def identity(source: Source, *how: object) -> str:
    """What a pass depends on: names, times and sizes of the files, and `how` they are read."""
    section = source.settings
    lists = [section.keep, section.drop]
    titles = dict.fromkeys(source.types[name].title(name) for name in source.names)
    files = [path for one in (*titles, *lists) if one and (path := ShardURL(one).path) and os.path.isfile(path)]
    parts: list[object] = [sorted(set(source.names)), [_stat(path) for path in files], lists, section.folder, *how]
    return hashlib.sha256(json.dumps([*parts, list(_folders(source))]).encode()).hexdigest()


def _folders(source: Source) -> Iterator[object]:
    """A hash of each shard that is a folder or a part of one: of names, times and sizes of its files."""
    for name in dict.fromkeys(source.names):
        if isinstance(source.types[name], FolderSource):
            shard = source.open(name)
            assert isinstance(shard, FolderShard | PairShard)
            stats = [_stat(path) for ref in shard.index.samples for path in shard.files(ref)]
            yield hash_of(json.dumps(stats).encode())


def _stat(path: str) -> tuple[str, int, int]:
    try:
        stat = os.stat(path)
    except OSError:  # as a link to nowhere
        return path, 0, 0
    return path, stat.st_mtime_ns, stat.st_size
