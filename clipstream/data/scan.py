"""One pass over all samples of a source: for `sample_table`, `val_split`, and what orders need of samples (`groups`).

What is done with each shard is the caller's; results are kept in the cache by all that they depend on. Shards are
read by one process per core, and by the first process of a node that asks; the others wait. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from clipstream.data.decode.captions import RawSample, SampleTransform, build_transform, image_bytes
from clipstream.data.decode.key_lists import NOT_KEPT, SampleLists, build_filter
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import DataSettings
from clipstream.data.sources import OpenShard, Source, SourceContext
from clipstream.errors import DataError, Dropped, SettingsError
from clipstream.storage.download import ShardError
from clipstream.storage.shard_cache import ShardCache, cache_root
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.text import counted, printable
from clipstream.utils.content import file_state
from clipstream.utils.executors import work_off
from clipstream.utils.plugins import is_plugin
from clipstream.utils.processes import Failed, note

T = TypeVar("T")
Read = Callable[[str, RawSample], T]


@dataclass
class ShardSamples:
    """The samples of an open shard, as training reads them, without augmentation.

    Iterating yields each one's name 'SHARD/KEY', key, and its raw sample, or why training drops it.
    """

    title: str  # of the shard, in messages
    name: str  # of the shard, in the names of its samples
    shard: OpenShard
    members: tuple[str, ...] | None  # that are read; None for all
    transform: SampleTransform | None
    keeps: SampleLists | None

    def __iter__(self) -> Iterator[tuple[str, str, RawSample | Dropped]]:
        for ref in self.shard.index.samples:
            note(where := f"{self.name}/{ref.key}")
            try:
                if self.keeps is not None and not self.keeps(where, ref.key):
                    raise Dropped(NOT_KEPT, "")
                sample: Any = {"__key__": ref.key, "__url__": self.title, **self.shard.load(ref, self.members)}
                yield where, ref.key, sample if self.transform is None else self.transform(sample)
            except Dropped as drop:
                yield where, ref.key, drop


class ShardPass(Generic[T]):
    """Calls `do` with the samples of a shard, by the shard's number: in a process of its own, on any machine.

    Args:
        source: whose shards are read, each once.
        data: settings of transfers.
        members: of a sample that are read; None for all. With (), samples are not transformed.
        do: what is done; called with a shard's number and its samples. Picklable where the executor is not local.
    """

    def __init__(
        self,
        source: Source,
        data: DataSettings,
        members: tuple[str, ...] | None,
        do: Callable[[int, ShardSamples], T],
    ) -> None:
        self.names = list(dict.fromkeys(source.names))
        self.numbers = list(range(len(self.names)))  # of the shards to read
        self._section, self._key, self._data, self._do = source.settings, source.context.key, data, do
        self._members = None if source.settings.transform is not None and members != () else members

    @cached_property
    def opened(self) -> tuple[Source, SampleTransform | None, SampleLists | None]:
        """What opens and filters samples, of this process and those that are forked from it."""
        context = SourceContext(ShardCache(self._data.cache, fetcher=self._data.fetcher), self._data.cache, self._key)
        source = Source(self._section, context)
        transform = None if self._members == () else build_transform(self._section.transform)
        return source, transform, build_filter(self._section, self._key, source)

    def close(self) -> None:
        """Remove what was downloaded to a temporary folder."""
        if "opened" in self.__dict__ and (store := self.opened[0].context.store) is not None:
            store.close()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "opened"}

    def run(self, label: str, count: Callable[[T], int], executor: str = "local") -> list[T | Failed]:
        """The results of `numbers`; see `work_off`. `count` gives the samples of one."""
        _ = self.opened  # before processes are forked
        names = [printable(redact(self.names[number])) for number in self.numbers]
        with closing(self):
            return work_off(label, self, names, executor, lambda done: f"{sum(map(count, done)):,} samples")

    def __call__(self, place: int) -> T | Failed:
        """What `do` returned for a shard, by its place in `numbers`, or why it cannot be read."""
        source, transform, keeps = self.opened
        name = self.names[number := self.numbers[place]]
        try:
            shard = source.open(name)
        except (ShardError, OSError) as error:
            return Failed(str(error))
        try:
            title = source.types[name].title(name)
            samples = ShardSamples(title, source.shard_names[name], shard, self._members, transform, keeps)
            return self._do(number, samples)
        except DataError as error:  # of a file that has changed
            return Failed(str(error))
        finally:
            shard.close()
            source.types[name].release(name)


class ImageReader:
    """Reads image files of a source's samples. The last shard stays open."""

    def __init__(self, source: Source) -> None:
        self._source, self._open, self._last = source, "", ExitStack()

    def __call__(self, name: str, sample: str | int) -> bytes | None:
        """The image file of a sample of the shard `name`, by its key or its number; None if it cannot be read."""
        try:
            if self._open != name:
                self._open = ""
                self._last.close()
                self._shard = self._last.enter_context(closing(self._source.open(name)))
                self._open, self._numbers = name, dict[str, int]()
            if isinstance(sample, str):
                self._numbers = self._numbers or {ref.key: n for n, ref in enumerate(self._shard.index.samples)}
                sample = self._numbers[sample]
            ref = self._shard.index.samples[sample]
            members = {"__key__": ref.key, "__url__": "", **self._shard.load(ref)}
            return image_bytes(members, self._source.settings.image_key)
        except (OSError, LookupError, ShardError, Dropped):
            return None


def scanned(
    setting: str,
    source: Source,
    data: DataSettings,
    members: tuple[str, ...],
    read: Read[T],
    missing: T,
    *how: object,
    left_out: Callable[[str, str], T] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """By shard, in the order of `source.names`, the number that `read` gives for each sample; one pass, whose result is
    kept in the cache.

    Args:
        setting: that asks for it, for messages.
        members: of a sample that are read; None for all. With () only names are.
        read: called with the name 'SHARD/KEY' and the raw sample; may raise Dropped.
        missing: number of the samples that training cannot use, if `left_out` does not give it from name and key.
        how: all that `read` depends on; the first value is the folder of the cache.

    Raises SettingsError: a shard cannot be read, or the result cannot be kept.
    """
    names, title = list(dict.fromkeys(source.names)), str(how[0])

    def do(_: int, samples: ShardSamples) -> np.ndarray[Any, Any]:
        found = list[T]()
        for where, key, sample in samples:
            found.append(left_out(where, key) if left_out is not None and isinstance(sample, Dropped) else missing)
            if not isinstance(sample, Dropped):
                with suppress(Dropped):  # as in training, which counts it
                    found[-1] = read(where, sample)
        return np.array([missing, *found])[1:]

    def fill(part: Path) -> None:
        results = ShardPass(source, data, members, do).run(title, len)
        values = [one for one in results if not isinstance(one, Failed)]
        if faults := [one.error for one in results if isinstance(one, Failed)]:
            some = f"{len(faults):,} of {counted(len(results), 'shard', ',')} cannot be read"
            raise ShardError(title, f"{some}: {faults[0]}: mend it, or leave it out of the training data")
        with part.open("wb") as file:
            np.savez(file, values=np.concatenate(values), ends=np.cumsum([*map(len, values)]))

    with np.load(cached(setting, title, identity(source, *how), fill), allow_pickle=False) as held:
        by_name = dict(zip(names, np.split(held["values"], held["ends"][:-1]), strict=True))
    return [by_name[name] for name in source.names]


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
    """What a pass depends on: names and states of the files, and `how` they are read."""
    section = source.settings
    lists = [section.keep, section.drop]
    titles = dict.fromkeys(source.types[name].title(name) for name in source.names)
    files = [path for one in (*titles, *lists) if one and (path := ShardURL(one).path) and os.path.isfile(path)]
    names = list(dict.fromkeys(source.names))  # in order, as results of a pass are by number
    if not is_plugin(section.type):  # the same however a URL is signed
        names = [ShardURL(name).unsigned if ShardURL(name).is_remote else name for name in names]
    states = [(path, file_state(path)) for path in files]
    parts: list[object] = [names, states, lists, section.folder, *how, list(_files(source))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _files(source: Source) -> Iterator[object]:
    """A hash of each shard whose samples are files of their own: of their names and states."""
    for name in dict.fromkeys(source.names):
        if source.types[name].has_files:
            shard = source.open(name)
            paths = (path for ref in shard.index.samples for path in shard.files(ref))
            yield hash_of(json.dumps([(path, file_state(path)) for path in paths]).encode())
