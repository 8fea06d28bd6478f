"""One walk over shards: each is worked on by itself, in a process of its own, on this machine or a cluster's.

A function of a shard's number enters; results leave, and why a shard has none (`TaskFailure`). `ShardPass` is the walk:
`index`, `stage` and `pack` do their work in it. `SamplePass` also opens the shards of a source, filters their samples,
closes and releases them: the sample table, `check`, and what orders need of samples (`groups`). Results of a pass may
be kept in the cache by all that they depend on: the first process of a node that asks makes them, the others wait.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from rich.filesize import decimal

from clipstream.data.decode.captions import RawSample, SampleTransform, build_transform, image_bytes
from clipstream.data.decode.key_lists import NOT_KEPT, SampleLists, build_filter
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import DataSettings
from clipstream.data.sources import OpenShard, SampleRef, Source, SourceContext
from clipstream.errors import DataError, Dropped, SettingsError, ShardError, WorkInterrupted
from clipstream.storage.download import DISK_FULL
from clipstream.storage.shard_cache import ShardCache, cache_root, total_size
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.text import counted, duration, listed_lines, printable
from clipstream.utils import atomic_write, executors
from clipstream.utils.console import ProgressBar
from clipstream.utils.content import file_state
from clipstream.utils.plugins import is_plugin
from clipstream.utils.processes import TaskFailure, note

T = TypeVar("T")
Read = Callable[[str, RawSample], T]
SAMPLES = attrgetter("samples")
PARTS = ".parts"  # subfolder of a folder of new shards, for what is incomplete and not kept


class ShardPass(Generic[T]):
    """Works on each shard by its number. Picklable where the executor is not local.

    Args:
        names: of the shards, for people.
        do: the work on one; raises ShardError, OSError or DataError if the shard cannot be read or its result not be
            written, which ends the work on no other shard.
        parts: folder of files that are not complete, which all workers share; None where none are written.
    """

    def __init__(self, names: Sequence[str], do: Callable[[int], T], parts: Path | None = None) -> None:
        self.names = [printable(redact(name)) for name in names]
        self.numbers = list(range(len(names)))  # of the shards to work on
        self.parts, self._do = parts, do

    def run(self, label: str, executor: str = "local", count: Callable[[T], int] = SAMPLES) -> list[T | TaskFailure]:
        """The results for `numbers` in order, with a bar. What failed is told at once, and ends no other shard's work.

        Args:
            label: what is done, for people, as 'packing'.
            executor: as `executors.check_executor` takes it.
            count: the samples of a result.

        Raises:
            DataError: the disk is full.
            WorkInterrupted: by a signal.
        """
        done, began, again = dict[int, T | TaskFailure](), time.monotonic(), "rerun the same command to continue"
        names = [self.names[number] for number in self.numbers]

        def state() -> str:
            return f"{sum(not isinstance(one, TaskFailure) for one in done.values()):,} of {len(names):,} shards"

        def progress() -> str:
            results = [one for one in done.values() if not isinstance(one, TaskFailure)]
            seconds = time.monotonic() - began
            words, left = [state(), f"{sum(map(count, results)):,} samples"], len(names) - len(done)
            if self.parts is not None:
                size = sum(one.size for one in results if getattr(one, "made", False))  # type: ignore[attr-defined]
                size += total_size(self.parts.glob("*.part"))
                words += [decimal(size), f"{decimal(int(size / max(seconds, 1e-3)))}/s"] if size else []
            return "  ".join([*words, *([f"{duration(seconds * left / len(done))} left"] if done and left else [])])

        try:
            events = executors.run(self, len(names), executor)
            with ProgressBar(label) as bar, closing(events):
                for event in events:
                    if event is not None:
                        number, result = event
                        if isinstance(result, TaskFailure):
                            if result.full:
                                raise DataError(f"{result.error}; {state()} are done: free some space, and {again}")
                            if names[number] not in result.error:  # of a process that died
                                result = TaskFailure(f"{names[number]}: {result.error}")
                            bar.say(f"failed: {result.error}")
                        done[number] = result
                    bar.update(len(done), len(names), progress)
        except KeyboardInterrupt:
            raise WorkInterrupted(f"interrupted while {label}; {state()} are done: {again}") from None
        return [done[number] for number in range(len(names))]

    def tell_damaged(self, results: Sequence[Any], about: str) -> None:
        """Print the shards that have a `fault`, and what is done `about` them."""
        names = [self.names[number] for number in self.numbers]
        faults = [(name, getattr(one, "fault", None)) for name, one in zip(names, results, strict=True)]
        if told := [f"  {name}: {printable(fault, 500)}" for name, fault in faults if fault]:
            print(f"damaged shards, {about}: {len(told):,}", *listed_lines(told, executors.SHOWN), sep="\n", flush=True)

    def __call__(self, place: int) -> T | TaskFailure:
        """The result for a shard, by its place in `numbers`, or why there is none."""
        shown, parts = self.names[number := self.numbers[place]], self.parts
        if parts is not None and not parts.exists():
            where = f"{parts.parent} is not on {socket.gethostname()}"
            return TaskFailure(f"{shown}: {where}: use a folder that all workers share")
        try:
            return self._do(number)
        except (ShardError, OSError, DataError) as error:
            said = str(error)
            if parts is not None:
                full = atomic_write.is_full(error) or getattr(error, "reason", None) == "disk"
                # The message of a command that could not write is unknown.
                if full or shutil.disk_usage(parts).free < DISK_FULL:
                    return TaskFailure(f"{shown}: the disk of {parts.parent} is full", full=True)
                said = f"disk: {redact(said)}" if isinstance(error, OSError) else said
            return TaskFailure(said if shown in said else f"{shown}: {said}")


@contextlib.contextmanager
def draft_in(parts: Path) -> Iterator[tuple[Path, Path]]:
    """Paths for a new shard and its index, with names of their own: a worker that was given up may still write the same
    shard. They are removed unless they were renamed.
    """
    shard = parts / f"{secrets.token_hex(8)}.part"
    index = shard.with_suffix(".index.part")
    try:
        yield shard, index
    finally:
        shard.unlink(missing_ok=True)
        index.unlink(missing_ok=True)


@contextlib.contextmanager
def lock_output(folder: Path) -> Iterator[Path]:
    """Lock the folder that a verb writes shards to, and handle SIGTERM, and SIGHUP unless it is ignored, like SIGINT.

    Yields its folder for what is not complete, which exists and holds nothing of a killed call's drafts.

    Raises:
        SettingsError: another process writes to it.
        DataError: it cannot be written.
    """
    advice = "wait for it, or use another folder"
    with atomic_write.lock_folder(folder, "the folder", advice):
        kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
        numbers = (signal.SIGTERM,) if kept else (signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
        try:
            (parts := folder / PARTS).mkdir(exist_ok=True)
            for path in parts.glob("**/*.part"):
                path.unlink(missing_ok=True)
            yield parts
        except BrokenPipeError:  # the reader of our output has ended
            raise
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {error.strerror or error}") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class ShardSamples:
    """The samples of an open shard, as training reads them, without augmentation.

    Iterating yields each one's name 'SHARD/KEY', its place in the shard, and its raw sample, or why training drops it.
    """

    title: str  # of the shard, in messages
    name: str  # of the shard, in the names of its samples
    shard: OpenShard
    members: tuple[str, ...] | None  # that are read; None for all
    transform: SampleTransform | None
    keeps: SampleLists | None
    refs: Sequence[SampleRef]  # of the samples that are read

    def __iter__(self) -> Iterator[tuple[str, SampleRef, RawSample | Dropped]]:
        for ref in self.refs:
            note(where := f"{self.name}/{ref.key}")
            try:
                if self.keeps is not None and not self.keeps(where, ref.key):
                    raise Dropped(NOT_KEPT, "")
                sample: Any = {"__key__": ref.key, "__url__": self.title, **self.shard.load(ref, self.members)}
                yield where, ref, sample if self.transform is None else self.transform(sample)
            except Dropped as drop:
                yield where, ref, drop


class SamplePass(ShardPass[T]):
    """Calls `do` with the number of each shard of a source and its samples.

    Args:
        source: whose shards are read, each once; through its own cache, if it has one.
        data: settings of transfers.
        members: of a sample that are read; None for all. With (), samples are not transformed.
        do: what is done. Picklable where the executor is not local.
        parts: see `ShardPass`.

    Attributes:
        most: samples of a shard that are read, evenly spaced; 0 for all.
    """

    most = 0

    def __init__(
        self,
        source: Source,
        data: DataSettings,
        members: tuple[str, ...] | None,
        do: Callable[[int, ShardSamples], T],
        parts: Path | None = None,
    ) -> None:
        self.shards = list(dict.fromkeys(source.names))
        super().__init__(self.shards, self.work, parts)
        self._section, self._key, self._data, self._with = source.settings, source.context.key, data, do
        self._given = None if source.context.shard_cache is None else source
        self._members = None if source.settings.transform is not None and members != () else members

    @cached_property
    def opened(self) -> tuple[Source, SampleTransform | None, SampleLists | None]:
        """Source, transform and filter, shared by this process and its forks."""
        if (source := self._given) is None:
            cache = ShardCache(self._data.cache, fetcher=self._data.fetcher)
            source = Source(self._section, SourceContext(cache, self._data.cache, self._key))
        transform = None if self._members == () else build_transform(self._section.transform)
        return source, transform, build_filter(self._section, self._key, source)

    def close(self) -> None:
        """Remove what was downloaded to a temporary folder."""
        if self._given is None and "opened" in self.__dict__ and (cache := self.opened[0].context.shard_cache):
            cache.close()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "opened"}

    def run(self, label: str, executor: str = "local", count: Callable[[T], int] = SAMPLES) -> list[T | TaskFailure]:
        _ = self.opened  # before processes are forked
        with closing(self):
            return super().run(label, executor, count)

    def work(self, number: int) -> T:
        source, transform, keeps = self.opened
        shard = source.open(name := self.shards[number])
        try:
            refs, title = spread(shard.index.samples, self.most), source.types[name].title(name)
            return self._with(
                number, ShardSamples(title, source.shard_names[name], shard, self._members, transform, keeps, refs)
            )
        finally:
            shard.close()
            source.types[name].release(name)


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` items, evenly spaced; all for 0."""
    return [items[n * len(items) // most] for n in range(most)] if 0 < most < len(items) else items


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


def scan_numbers(
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
        for where, ref, sample in samples:
            found.append(left_out(where, ref.key) if left_out is not None and isinstance(sample, Dropped) else missing)
            if not isinstance(sample, Dropped):
                with suppress(Dropped):  # as in training, which counts it
                    found[-1] = read(where, sample)
        return np.array([missing, *found])[1:]

    def fill(part: Path) -> None:
        results = SamplePass(source, data, members, do).run(title, count=len)
        values = [one for one in results if not isinstance(one, TaskFailure)]
        if faults := [one.error for one in results if isinstance(one, TaskFailure)]:
            some = f"{len(faults):,} of {counted(len(results), 'shard', ',')} cannot be read"
            raise ShardError(title, f"{some}: {faults[0]}: mend it, or leave it out of the training data")
        with part.open("wb") as file:
            np.savez(file, values=np.concatenate(values), ends=np.cumsum([*map(len, values)]))

    with np.load(get_or_fill(setting, title, identity(source, *how), fill), allow_pickle=False) as held:
        by_name = dict(zip(names, np.split(held["values"], held["ends"][:-1]), strict=True))
    return [by_name[name] for name in source.names]


def get_or_fill(setting: str, folder: str, identity: str, fill: Callable[[Path], None]) -> Path:
    """The file that `fill` writes to a path, or wrote before for the same `identity`.

    Args:
        setting: that needs it, for messages.
        folder: of the cache.

    Raises SettingsError: `fill` failed, or there is no place for the file.
    """
    try:
        cache = ShardCache(str(cache_root() / folder))
    except SettingsError as error:
        detail = str(error).removeprefix("data.cache: ")
        raise SettingsError(f"{setting}: {detail}: set another folder with CLIPSTREAM_CACHE") from error
    try:
        return cache.get_or_make(setting, identity, lambda part, _: fill(part))
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
