"""New shards of the samples of sources: sources enter; tars of a chosen size and order, with side indexes, leave.

Two walks over shards, each of which is worked on by itself and renamed into place:

1. `Corpus.list_samples` lists the usable samples of the shards of the sources: key, and in a tar where its members are.
2. `PackShard` writes a new shard. `PackPlan` says which samples it gets, a function of the numbers of samples listed,
   the settings and the seed, so that any process can write any shard, and always the same bytes.

Samples are read where they are, in the order in which they are written: a process holds one sample. Remote and
compressed shards are downloaded by the first walk, and stay until the last shard is written. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tarfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.checkpoint.remote_sync import RemoteDir, with_retries
from clipstream.curation.pack_sample import Recording, SamplePacker, plain_key
from clipstream.curation.val_split import choose, select_compared
from clipstream.data.decode.captions import RawSample, build_caption, candidates
from clipstream.data.decode.labels import compare_groups
from clipstream.data.groups import group_labels
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import hash_of, mix, permute
from clipstream.data.settings import DataSettings
from clipstream.data.shard_pass import PARTS, SamplePass, ShardSamples, draft_in, spread
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import OpenShard, SampleRef, ShardIndex, Source, SourceContext, indexes
from clipstream.errors import DataError, Dropped, ShardError
from clipstream.storage.shard_url import ShardURL, parts_of, redact, table_format
from clipstream.storage.tar import BLOCK, SampleRefs, Shard
from clipstream.utils import atomic_write
from clipstream.utils.content import file_state
from clipstream.utils.executors import require_all
from clipstream.utils.logs import logger
from clipstream.utils.processes import TaskFailure, note

T = TypeVar("T")
MEND = "mend them or leave them out; shards that are done are kept"
OPEN = 128  # shards of the sources that a thread keeps open
MEASURED = 20  # samples of a shard that is no tar, by which the bytes of all are estimated
RECORD = 20 * BLOCK  # of a tar
WRITTEN_AT_ONCE = 1 << 20  # bytes
_MODE = b"0000644\0" + 2 * b"0000000\0"  # and the owner: the fields between a header's name and size
_TIME = b"\0" + 11 * b"0" + b"\0"  # between size and checksum
_REST = b"0" + bytes(100) + b"ustar\00000" + bytes(247)
_PLAIN_SUM = sum(_MODE + _TIME + b" " * 8 + _REST)


Row = tuple[int, str, Mapping[str, tuple[int, int]], str | None]  # of a `ShardList`


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


class Out:
    """The folder or the remote storage of the new shards; the latter through fsspec, connected in each process anew.

    Args:
        url: of the storage, or the folder.
        folder: that folder; for a URL one of this machine, for what is not complete.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.is_remote = url, folder, ShardURL(url).path is None

    def names(self) -> list[str]:
        """Names of what is there. Raises ShardError."""
        return self._do(lambda out: out.names()) if self.is_remote else [p.name for p in self.folder.glob("[!.]*")]

    def read(self, name: str) -> bytes | None:
        """A small file; None if it does not exist. Raises ShardError."""
        if self.is_remote:
            return self._do(lambda out: (out / name).read())
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_bytes()
        return None

    def write(self, name: str, content: str) -> None:
        """Write a small file beside the shards. Raises ShardError, OSError."""
        (path := self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write.replace(path, content.encode())
        if self.is_remote:
            self._do(lambda out: (out / name).upload(path))

    def place(self, name: str, shard: Path, index: Path) -> None:
        """Rename or upload a finished shard and its side index. Raises ShardError, OSError."""
        if self.is_remote:  # the index last
            self._do(lambda out: (out / name).upload(shard))
            self._do(lambda out: (out / f"{name}{indexes.SUFFIX}").upload(index))
        else:
            indexes.place(shard, index, self.folder / name)

    def find_packed(self, name: str, digest: str) -> Packed | None:
        """A shard, if it is complete and of the plan of this digest. Raises ShardError."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            if self.is_remote:
                content = self.read(f"{name}{indexes.SUFFIX}") or b""
                head = indexes.parse_head(content[: content.find(b"\n") + 1])
                is_whole = head.size == self._do(lambda out: (out / name).size())
            else:
                head = indexes.read_head(self.folder / f"{name}{indexes.SUFFIX}")
                is_whole = head.of == indexes.identity_of(self.folder / name)
            origin = dict(head.origin or {})
            if origin.pop("pack", None) == digest and is_whole:
                return Packed(**origin)  # type: ignore[arg-type]
        return None

    def _do(self, act: Callable[[RemoteDir], T]) -> T:
        out = RemoteDir(self.url, "OUT")
        try:
            return with_retries(lambda: act(out))
        except Exception as error:  # of fsspec's backends, which have types of their own
            raise ShardError("remote", f"{out.shown}: {redact(str(error)) or type(error).__name__}") from error


class Listed(NamedTuple):
    """The usable samples of a shard of the sources."""

    samples: int
    size: int  # bytes that they take in a tar, in part estimated
    dropped: int  # samples that key lists leave out
    fault: str | None  # of the shard, whose intact samples are used
    path: str | None  # the local file of a tar
    entries: Sequence[Sequence[int]] = ()  # of the source's lists, those of which samples are in the shard
    state: Sequence[int] = ()  # of that file, see `Shard`


def _no_file(path: str) -> bytes:
    """In place of the file of an image that is not needed."""
    return b""


def open_captions(spec: str, context: SourceContext) -> Source:
    """The source of further captions: a table with the columns key and caption, or what training reads.

    Raises as Source.
    """
    tables = all(map(table_format, parts_of(spec)))
    return Source(SourceSettings(shards=spec, **({"image_key": "key"} if tables else {})), context)


class Corpus:
    """All shards of the sources, by number, and the samples that are listed of them, by number. Picklable.

    Args:
        folder: of the lists, in a folder of their plan in that of what is not complete.
    """

    def __init__(self, sources: Sequence[Source], folder: Path) -> None:
        self.sources, self.folder = list(sources), folder
        self.shards = [(number, name) for number, one in enumerate(sources) for name in dict.fromkeys(one.names)]
        # By thread, as those of a worker of Dask share it.
        self._open: dict[int, OrderedDict[int, tuple[ShardList, OpenShard]]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def source_of(self, shard: int) -> Source:
        """The source of a shard."""
        return self.sources[self.shards[shard][0]]

    def path(self, shard: int) -> Path:
        """The list of a shard."""
        return self.folder / f"{shard:06d}.list"

    @property
    def first_key(self) -> str:
        """The packed key of the first sample."""
        lists = (ShardList(self.path(shard)) for shard in range(len(self.shards)))
        _, key, _, plain = next(held.row(0) for held in lists if held.head.samples)
        return plain or plain_key(key)

    def hashes(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Hashes of the packed keys of all samples, uint64 [n]."""
        lists = range(len(self.shards))
        ends = np.cumsum([0, *(ShardList(self.path(shard)).head.samples for shard in lists)])
        found = np.empty(int(ends[-1]), np.uint64)
        for shard in lists:  # one file is open at a time
            found[ends[shard] : ends[shard + 1]] = ShardList(self.path(shard)).hashes
        return found

    def open(self, shard: int) -> tuple[ShardList, OpenShard]:
        """The list of a shard and the shard, which stay open for a while. Raises ShardError, OSError."""
        kept = self._open.setdefault(threading.get_ident(), OrderedDict())
        if shard in kept:
            kept.move_to_end(shard)
            return kept[shard]
        held = ShardList(self.path(shard))
        path = held.head.path
        source, name = self.source_of(shard), self.shards[shard][1]
        made = source.open(name) if path is None else Shard(path, ShardIndex([]), held.head.state)
        kept[shard] = held, made
        if len(kept) > OPEN:
            kept.popitem(last=False)[1][1].close()
        return held, made

    def load(self, shard: int, row: int, members: Collection[str] | None, *, image: bool = True) -> RawSample:
        """A listed sample with its packed key in `__key__`. Raises Dropped, ShardError, OSError."""
        held, opened_shard = self.open(shard)
        number, key, spans, plain = held.row(row)
        kind_ = self.source_of(shard).types[self.shards[shard][1]]
        ref = SampleRef(key, spans) if held.head.path is not None else opened_shard.index.samples[number]
        note(f"{kind_.title(self.shards[shard][1])}/{key}")
        if kind_.columns and not image:
            found = opened_shard.load(ref, members, _no_file)  # type: ignore[call-arg]
        else:
            found = opened_shard.load(ref, members)
        return {"__key__": plain or plain_key(key), "__url__": kind_.title(self.shards[shard][1]), **found}

    def list_samples(self, label: str, data: DataSettings, executor: str, *, measured: bool) -> list[Listed]:
        """List the samples of all shards that have no list yet, and print which ones are damaged.

        Args:
            measured: whether the bytes of samples are needed.

        Raises DataError: shards cannot be read; the others are listed.
        """
        found: list[Listed | TaskFailure] = []
        for source in self.sources:
            first = len(found)
            walk = SamplePass(source, data, (), partial(self._list, first, measured), self.folder.parents[1])
            heads = [self._head(first + number) for number in walk.numbers]
            walk.numbers = [number for number, head in enumerate(heads) if head is None]
            made = iter(walk.run(label, executor) if walk.numbers else ())
            found += [next(made) if head is None else head for head in heads]
            walk.numbers = list(range(len(heads)))
            walk.tell_damaged(found[first:], "of which intact samples are used")
        return require_all(label, found, MEND)

    def _head(self, shard: int) -> Listed | None:
        """What the list of a shard says, if there is one of its file."""
        with contextlib.suppress(OSError, ValueError):
            head = ShardList(self.path(shard)).head
            if head.path is None or file_state(head.path)[:2] == head.state:
                return head
        return None

    def _list(self, first: int, measured: bool, number: int, samples: ShardSamples) -> Listed:
        """List the samples of a shard of a source. Raises ShardError, OSError."""
        shard, keeps = samples.shard, samples.keeps
        refs, fault = shard.index
        if not len(refs) and fault is not None and fault.reason != "empty":
            raise ShardError(*fault)
        columns = self.source_of(first + number).types[self.shards[first + number][1]].columns
        keyed = columns and len(refs) > 0 and _key_of(shard, refs[0]) is not None
        rows: list[Row] = []
        for at, ref in enumerate(refs):
            if keeps is None or keeps(f"{samples.name}/{ref.key}", ref.key):
                key = _key_of(shard, ref) if keyed else None
                rows.append((at, ref.key, ref.members, None if key is None else plain_key(key)))
        path, state = (os.path.abspath(shard.path), shard.state) if isinstance(shard, Shard) else (None, [])
        if path:
            size = sum(_bytes(row[2]) for row in rows)
        else:  # estimated by some samples, where it is needed
            sizes = []
            for ref in spread(refs, MEASURED) if measured else ():
                with contextlib.suppress(Dropped):
                    sizes.append(_bytes({name: (0, len(data)) for name, data in shard.load(ref).items()}))
            size = len(rows) * sum(sizes) // max(1, len(sizes))
        entries = [] if keeps is None else keeps.entries((f"{samples.name}/{ref.key}", ref.key) for ref in refs)
        head = Listed(len(rows), size, len(refs) - len(rows), fault and str(fault), path, entries, state)
        ShardList.write(self.path(first + number), head, rows)
        return head


class ShardList:
    """The list of a shard: a line with `Listed` as JSON, ends of the rows and hashes of the keys, and the rows.

    A row is [number in the shard, key, members in a tar, packed key where it is not made of that key].
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        start = self._map.find(b"\n") + 1
        self.head = Listed(*json.loads(self._map[:start]))
        count = self.head.samples
        table = np.frombuffer(self._map, np.uint64, 2 * count, start)
        self._ends, self.hashes, self._begin = table[:count], table[count:], start + 16 * count

    def row(self, number: int) -> tuple[int, str, dict[str, tuple[int, int]], str | None]:
        first = int(self._ends[number - 1]) if number else 0
        begin = self._begin
        found = json.loads(self._map[begin + first : begin + int(self._ends[number])])
        return found[0], found[1], found[2], found[3]

    @staticmethod
    def write(path: Path, head: Listed, rows: Iterable[tuple[int, str, Mapping[str, Any], str | None]]) -> None:
        texts, hashes = [], []
        for number, key, spans, plain in rows:
            texts.append(json.dumps([number, key, spans, plain], separators=(",", ":")).encode())
            hashes.append(hash_of((plain or plain_key(key)).encode()))
        text = json.dumps(head)
        text += " " * (-(len(text) + 1) % 8) + "\n"
        ends = np.cumsum([len(text) for text in texts], dtype=np.uint64)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = [text.encode(), ends, np.array(hashes, np.uint64), b"".join(texts)]
        atomic_write.replace(path, content, shared=True)


def _key_of(shard: OpenShard, ref: SampleRef) -> str | None:
    """What a row of a table has in its column `key`."""
    with contextlib.suppress(Dropped, ValueError, AttributeError):
        row = json.loads(shard.load(ref, ("json",), _no_file)["json"])  # type: ignore[call-arg]
        found = next((value for name, value in row.items() if name.lower() == "key"), None)
        return None if found in (None, "") else str(found)
    return None


def _bytes(spans: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that members take in a tar."""
    return sum(BLOCK + -(-size // BLOCK) * BLOCK for _, size in spans.values() if size < 1 << 62)


@dataclass(frozen=True)
class PackPlan:
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
                    positions = permute(positions, count, mix(self.seed, turn))
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


def plan_of(corpus: Corpus, listed: Sequence[Listed], size: int | None, shuffled: bool, seed: int) -> PackPlan:
    """The plan without a split for validation."""
    ends = np.cumsum([one.samples for one in listed], dtype=np.int64)
    hashes = corpus.hashes()
    hashes.sort()
    return PackPlan(ends, size, shuffled, seed, not bool((hashes[1:] == hashes[:-1]).any()))


def choose_held_out(
    corpus: Corpus, data: DataSettings, share: float, group: str | None, folder: Path, executor: str
) -> Numbers:
    """The numbers of the samples for validation, sorted, as `val_split.choose` chooses them; int64.

    Args:
        group: field whose equal values stay on one side; None for none.
        folder: of the sample tables, which an interrupted call goes on with.

    Raises:
        SettingsError: a shard cannot be read, or no sample has the field.
        DataError: too few samples can be held out.
    """
    tables = []
    for source in corpus.sources:
        labels = dict[str, Numbers]()
        if group is not None:
            labels = dict(zip(source.names, group_labels(source, group, data, "--group"), strict=True))
            if few := compare_groups("--group", group, np.concatenate([*labels.values()]))[1]:
                logger.warning(few)
        tables.append(select_compared(source, data, [*labels.values()], folder, executor))
    rows = pa.concat_tables(tables, promote_options="default")  # of the samples that are listed
    usable = pc.equal(rows["reason"], "")
    names, said = choose(np.flatnonzero(usable).astype(str).tolist(), rows.filter(usable), share)
    if names is None:
        raise DataError(f"--val-split: {said}")
    return np.array(sorted(map(int, names)), np.int64)


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


@dataclass
class PackShard:
    """Writes a new shard, unless it is there. Called in a process of its own."""

    out: Out
    corpus: Corpus
    plan: PackPlan
    recording: Recording
    digest: str  # of what the bytes depend on
    merged: Merged | None = None
    _packers: dict[int, SamplePacker] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_packers": {}}

    def __call__(self, number: int) -> Packed:
        """Pack a shard by its number in the plan. Raises ShardError, OSError."""
        name, numbers = self.plan.shard(number)
        if (packed := self.out.find_packed(name, self.digest)) is not None:
            return packed
        with draft_in(self.out.folder / PARTS) as (part, index):
            table, packed = self._write(part, numbers)
            if packed.samples:
                origin: dict[str, object] = {"pack": self.digest, **packed._asdict()}
                indexes.write(index, ShardIndex(table), indexes.identity_of(part), origin)
                self.out.place(name, part, index)
        return packed._replace(made=bool(packed.samples))

    def _write(self, part: Path, numbers: Numbers) -> tuple[SampleRefs, Packed]:
        """Write samples into a tar. Raises ShardError, OSError."""
        drops, images, suffixes = Counter[str](), Counter[str](), Counter[str]()
        table, merged = SampleRefs(), 0
        with TarWriter(part) as writer:
            for number, (shard, row) in zip(numbers.tolist(), self.plan.places(numbers), strict=True):
                source, columns = self._about(shard)
                packer = self._packers.get(source)
                if packer is None:
                    settings = self.corpus.sources[source].settings
                    packer = self._packers[source] = SamplePacker(settings, self.recording)
                try:
                    sample = self.corpus.load(shard, row, packer.members_needed(columns))
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
