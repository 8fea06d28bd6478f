"""New shards: lists of samples enter; which samples each one gets, and tars with side indexes leave."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.curation.packing.lists import PARTS, Corpus, Listed
from clipstream.curation.packing.sample import Recording, SamplePacker
from clipstream.curation.val_split import choose, compared
from clipstream.data.decode.captions import build_caption, candidates
from clipstream.data.decode.labels import compare_groups
from clipstream.data.groups import group_labels
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import hash_of, mix, permuted
from clipstream.data.settings import DataSettings
from clipstream.data.sources import ShardIndex, indexes
from clipstream.errors import DataError, Dropped
from clipstream.storage.download import ShardError, failed
from clipstream.storage.tar import BLOCK, SampleTable
from clipstream.utils import atomic_write
from clipstream.utils.logs import logger
from clipstream.utils.processes import Failed

RECORD = 20 * BLOCK  # of a tar
WRITTEN_AT_ONCE = 1 << 20  # bytes
_MODE = b"0000644\0" + 2 * b"0000000\0"  # and the owner: the fields between a header's name and size
_TIME = b"\0" + 11 * b"0" + b"\0"  # between size and checksum
_REST = b"0" + bytes(100) + b"ustar\00000" + bytes(247)
_PLAIN_SUM = sum(_MODE + _TIME + b" " * 8 + _REST)


@dataclass(frozen=True)
class Plan:
    """Which samples each new shard gets. Samples are numbered in the order of the sources, from 0."""

    ends: Numbers  # number behind the last sample of each shard of the sources, int64
    size: int | None  # most samples of a new shard; None for one new shard for each of the sources
    shuffled: bool
    seed: int
    unique: bool  # whether keys are unique over all samples, and stay as they are
    held: Numbers | None = None  # the samples for validation, sorted, int64

    @cached_property
    def _parts(self) -> list[tuple[str, int, int]]:
        """(folder, samples, shards) of each split."""
        total = int(self.ends[-1])
        held = 0 if self.held is None else len(self.held)
        split = [("", total)] if self.held is None else [("train/", total - held), ("val/", held)]
        if self.size is None:
            return [("", total, len(self.ends))]
        return [(folder, count, -(-count // self.size)) for folder, count in split]

    def __len__(self) -> int:
        return sum(shards for _, _, shards in self._parts)

    def shard(self, number: int) -> tuple[str, Numbers]:
        """The file of a new shard, and the numbers of its samples in order."""
        for turn, (folder, count, shards) in enumerate(self._parts):
            if number < shards:
                if self.size is None:
                    return f"{number:05d}.tar", np.arange(self.ends[number - 1] if number else 0, self.ends[number])
                positions = np.arange(count * number // shards, count * (number + 1) // shards)
                if self.shuffled:
                    positions = permuted(positions, count, mix(self.seed, turn))
                if self.held is not None:
                    positions = self.held[positions] if turn else _without(positions, self.held)
                return f"{folder}{number:05d}.tar", positions
            number -= shards
        raise IndexError(number)

    def places(self, numbers: Numbers) -> Iterator[tuple[int, int]]:
        """(shard of the sources, row in its list) of samples."""
        shards = np.searchsorted(self.ends, numbers, side="right")
        rows = numbers - np.concatenate([[0], self.ends])[shards]
        return zip(shards.tolist(), rows.tolist(), strict=True)


def _without(positions: Numbers, held: Numbers) -> Numbers:
    """The numbers at some positions among all that are not in `held`."""
    return positions + np.searchsorted(held - np.arange(len(held)), positions, side="right")


def plan_of(corpus: Corpus, listed: Sequence[Listed], size: int | None, shuffled: bool, seed: int) -> Plan:
    """The plan without a split for validation."""
    ends = np.cumsum([one.samples for one in listed], dtype=np.int64)
    hashes = corpus.hashes()
    hashes.sort()
    return Plan(ends, size, shuffled, seed, not bool((hashes[1:] == hashes[:-1]).any()))


def held_out(corpus: Corpus, data: DataSettings, share: float, group: str | None, kept: Path, executor: str) -> Numbers:
    """The numbers of the samples for validation, sorted, as `val_split.choose` chooses them; int64.

    Args:
        group: field whose equal values stay on one side; None for none.
        kept: the file of an earlier call, or for the next one.

    Raises:
        SettingsError: a shard cannot be read, or no sample has the field.
        DataError: too few samples can be held out.
    """
    with contextlib.suppress(OSError, ValueError):
        found: Numbers = np.load(kept)
        return found
    tables = []
    for source in corpus.sources:
        labels = dict[str, Numbers]()
        if group is not None:
            labels = dict(zip(source.names, group_labels(source, group, data, "--group"), strict=True))
            if few := compare_groups("--group", group, np.concatenate([*labels.values()]))[1]:
                logger.warning(few)
        tables.append(compared(source, data, [*labels.values()], kept.parent / "samples", executor))
    rows = pa.concat_tables(tables, promote_options="default")  # of the samples that are listed
    usable = pc.equal(rows["reason"], "")
    names, said = choose(np.flatnonzero(usable).astype(str).tolist(), rows.filter(usable), share)
    if names is None:
        raise DataError(f"--val-split: {said}")
    held = np.array(sorted(map(int, names)), np.int64)
    with open(draft := kept.with_suffix(".part"), "wb") as file:
        np.save(file, held)
    draft.replace(kept)
    return held


def header(name: str, size: int) -> bytes:
    """The header of a regular file of `size` bytes, without owner and time: the same for the same arguments."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > 100 or size >= 1 << 33:
        made = tarfile.TarInfo(name)
        made.size = size
        return made.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o" % size
    checksum = b"%06o\0 " % (_PLAIN_SUM + sum(raw) + sum(digits))
    return b"".join((raw.ljust(100, b"\0"), _MODE, digits, _TIME, checksum, _REST))


def end_blocks(size: int) -> bytes:
    """The end of an archive whose members take `size` bytes: zeros up to the end of a record."""
    return bytes(-(size + 2 * BLOCK) % RECORD + 2 * BLOCK)


class TarWriter:
    """A tar being written, with the checksum of its bytes."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum = path, hashlib.sha256()
        self._held: list[bytes] = []
        self._size = self._written = 0

    def __enter__(self) -> TarWriter:
        self._file = open(self._path, "wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, data: bytes) -> int:
        """Add a file; the offset of its data."""
        head = header(name, len(data))
        offset = self._size + len(head)
        self._held += [head, data, bytes(-len(data) % BLOCK)]
        self._size = offset + -(-len(data) // BLOCK) * BLOCK
        if self._size - self._written > WRITTEN_AT_ONCE:
            self._flush()
        return offset

    def close(self) -> tuple[int, str]:
        """Write the end, and flush the file to the disk: its size and SHA-256."""
        self._held.append(end := end_blocks(self._size))
        self._size += len(end)
        self._flush()
        atomic_write.sync(self._file.fileno(), Path(self._path))
        return self._size, self._sum.hexdigest()

    def _flush(self) -> None:
        data = memoryview(b"".join(self._held))
        self._held, self._written = [], self._size
        self._sum.update(data)
        while data:  # a nearly full disk may take only a part
            data = data[self._file.write(data) :]


class Packed(NamedTuple):
    """A new shard; one without samples is not written."""

    samples: int
    size: int  # bytes
    sha256: str
    drops: dict[str, int]  # number of samples left out, by reason
    images: dict[str, int]  # number of images, by the result of `recode`
    suffixes: dict[str, int]  # number of members
    merged: int = 0  # samples that got captions of the merged source
    made: bool = False  # whether it was written now


class Merged:
    """Further captions by the keys of samples. Picklable.

    Args:
        corpus: what has them, listed.
        listed: its lists.
    """

    def __init__(self, corpus: Corpus, listed: Sequence[Listed]) -> None:
        self.corpus, self.path = corpus, corpus.folder / "keys.npy"
        self.ends = np.cumsum([one.samples for one in listed], dtype=np.int64)
        hashes = corpus.hashes()
        order = np.argsort(hashes, kind="stable")
        np.save(self.path, np.stack([hashes[order], order.astype(np.uint64)]))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}

    @cached_property
    def _table(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        table: np.ndarray[Any, np.dtype[np.uint64]] = np.load(self.path, mmap_mode="r")
        return table

    def matches(self, corpus: Corpus) -> int:
        """How many samples have a key that is here."""
        return int(np.isin(corpus.hashes(), self._table[0]).sum())

    def texts(self, key: str) -> list[str]:
        """The captions of a packed key; none where there is no such sample, or it has none."""
        hashes, texts = self._table[0], list[str]()
        mark = np.uint64(hash_of(key.encode()))
        for at in range(int(hashes.searchsorted(mark)), len(hashes)):
            if hashes[at] != mark:
                break
            number = int(self._table[1, at])
            shard = int(np.searchsorted(self.ends, number, side="right"))
            row = number - (int(self.ends[shard - 1]) if shard else 0)
            caption = build_caption(self.corpus.source_of(shard).settings.caption)
            with contextlib.suppress(Dropped):
                sample = self.corpus.load(shard, row, caption.members, image=False)
                texts += [text for path in candidates(caption, sample) for text in path]
        return texts


class Remote(Protocol):
    """Remote storage for new shards. Picklable."""

    def put(self, name: str, file: Path) -> None:
        """Upload a file. Raises ShardError."""
        ...

    def index(self, name: str, target: Path) -> int | None:
        """Download the side index of a shard, if there are both; the bytes of the shard. Raises ShardError."""
        ...


def packed_before(folder: Path, name: str, digest: str, remote: Remote | None) -> Packed | None:
    """A shard, if it is complete and of the plan of this digest. Raises ShardError: remote storage cannot be read."""
    index, size = folder / f"{name}{indexes.SUFFIX}", None
    draft = folder / PARTS / f"{secrets.token_hex(8)}.part"  # of this call, as another worker may look, too
    try:
        if remote is not None and (size := remote.index(name, index := draft)) is None:
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            head = indexes.read_head(index)
            origin = dict(head.origin or {})
            whole = head.of == indexes.identity_of(folder / name) if size is None else head.size == size
            if origin.pop("pack", None) == digest and whole:
                return Packed(**origin)  # type: ignore[arg-type]
        return None
    finally:
        draft.unlink(missing_ok=True)


@dataclass
class PackShard:
    """Writes a new shard, unless it is there. Called in a process of its own."""

    folder: Path  # of the new shards; if they are remote, for incomplete ones
    corpus: Corpus
    plan: Plan
    recording: Recording
    digest: str  # of what the bytes depend on
    merged: Merged | None = None
    remote: Remote | None = None
    _packers: dict[int, SamplePacker] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_packers": {}}

    def __call__(self, number: int) -> Packed | Failed:
        """Pack a shard by its number in the plan."""
        name, numbers = self.plan.shard(number)
        # A lost worker may still write the same shard: drafts have names of their own.
        part = self.folder / PARTS / f"{number:06d}.{secrets.token_hex(8)}.part"
        index = part.with_suffix(".index.part")
        if not part.parent.exists():
            where = f"{self.folder} is not on {socket.gethostname()}"
            return Failed(f"{name}: {where}: use a folder that all workers share")
        try:
            if (packed := packed_before(self.folder, name, self.digest, self.remote)) is not None:
                return packed
            table, packed = self._write(part, numbers)
            if not packed.samples:
                return packed
            origin: dict[str, object] = {"pack": self.digest, **packed._asdict()}
            indexes.write(index, ShardIndex(table), indexes.identity_of(part), origin)
            if self.remote is not None:  # the index last
                self.remote.put(name, part)
                self.remote.put(f"{name}{indexes.SUFFIX}", index)
            else:
                indexes.place(part, index, self.folder / name)
        except (ShardError, OSError) as error:
            return failed(error, name, self.folder)
        finally:
            part.unlink(missing_ok=True)
            index.unlink(missing_ok=True)
        return packed._replace(made=True)

    def _write(self, part: Path, numbers: Numbers) -> tuple[SampleTable, Packed]:
        """Write samples into a tar. Raises ShardError, OSError."""
        drops, images, suffixes = Counter[str](), Counter[str](), Counter[str]()
        table, merged = SampleTable(), 0
        with TarWriter(part) as writer:
            for number, (shard, row) in zip(numbers.tolist(), self.plan.places(numbers), strict=True):
                source, columns = self._about(shard)
                packer = self._packers.get(source)
                if packer is None:
                    settings = self.corpus.sources[source].settings
                    packer = self._packers[source] = SamplePacker(settings, self.recording)
                try:
                    sample = self.corpus.load(shard, row, packer.needed(columns))
                    key = sample["__key__"]
                    more = [] if self.merged is None else self.merged.texts(key)
                    members, what = packer(sample, columns, more)
                except Dropped as drop:
                    drops[drop.reason] += 1
                    continue
                merged += bool(more)
                images.update([what] if what else [])
                suffixes.update(list(members))
                key = key if self.plan.unique else f"{number:09d}-{key}"
                spans = []
                for suffix, data in members.items():
                    spans += [writer.add(f"{key}.{suffix}", data), len(data)]
                table.add(key, members, spans)
            at, digest = writer.close()
        return table, Packed(len(table), at, digest, dict(drops), dict(images), dict(suffixes), merged)

    def _about(self, shard: int) -> tuple[int, bool]:
        """The number of a shard's source, and whether members are columns."""
        source, name = self.corpus.shards[shard]
        return source, self.corpus.sources[source].types[name].columns
