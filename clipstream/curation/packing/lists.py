"""The samples of sources, listed: sources enter; a file per shard, and samples by shard and row, leave."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clipstream.curation.packing.sample import plain_key
from clipstream.data.decode.captions import RawSample
from clipstream.data.decode.key_lists import SampleLists, build_filter
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import OpenShard, SampleRef, ShardIndex, Source, SourceContext
from clipstream.errors import Dropped
from clipstream.storage.download import ShardError, failed
from clipstream.storage.shard_url import parts_of, redact, table_format
from clipstream.storage.tar import BLOCK, Shard
from clipstream.utils import atomic_write
from clipstream.utils.content import file_state
from clipstream.utils.processes import Failed, note

PARTS = ".parts"  # subfolder for lists, downloads and incomplete shards
OPEN = 128  # shards of the sources that a thread keeps open
MEASURED = 20  # samples of a shard that is no tar, by which the bytes of all are estimated


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


def merged_source(spec: str, context: SourceContext) -> Source:
    """The source of further captions: a table with the columns key and caption, or what training reads.

    Raises as Source.
    """
    tables = all(map(table_format, parts_of(spec)))
    return Source(SourceSettings(shards=spec, **({"image_key": "key"} if tables else {})), context)


class Corpus:
    """All shards of the sources, by number, and the samples that are listed of them, by number. Picklable.

    Args:
        folder: of the lists.
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


class ListShard:
    """Lists the samples of a shard, unless there is its list. Called in a process of its own."""

    def __init__(self, corpus: Corpus, *, measured: bool) -> None:
        self.corpus, self.measured = corpus, measured
        self._filters: dict[int, SampleLists | None] = {}  # by source, of this process

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_filters": {}}

    def __call__(self, number: int) -> Listed | Failed:
        corpus = self.corpus
        with contextlib.suppress(OSError, ValueError):
            head = ShardList(corpus.path(number)).head
            if head.path is None or file_state(head.path)[:2] == head.state:
                return head
        source, name = corpus.source_of(number), corpus.shards[number][1]
        try:
            shard = source.open(name)
            refs, fault = shard.index
            if not len(refs) and fault is not None and fault.reason != "empty":
                return Failed(f"{redact(name)}: {fault}")
            rows = list(self._rows(number, shard))
            path, state = (os.path.abspath(shard.path), shard.state) if isinstance(shard, Shard) else (None, [])
            size = sum(_bytes(spans) for _, _, spans, _ in rows) if path else self._estimate(shard, len(rows))
            left, told = len(refs) - len(rows), None if fault is None else str(fault)
            chosen, title = self.lists(corpus.shards[number][0]), source.shard_names[name]
            entries = [] if chosen is None else chosen.entries((f"{title}/{ref.key}", ref.key) for ref in refs)
            head = Listed(len(rows), size, left, told, path, entries, state)
            shard.close()
            ShardList.write(corpus.path(number), head, rows)
        except (ShardError, OSError) as error:
            return failed(error, redact(name), corpus.folder)
        return head

    def lists(self, number: int) -> SampleLists | None:
        """The lists of a source, by its number."""
        if number not in self._filters:
            source = self.corpus.sources[number]
            self._filters[number] = build_filter(source.settings, source.context.key, source)
        return self._filters[number]

    def _rows(self, at: int, shard: OpenShard) -> Iterator[tuple[int, str, Mapping[str, tuple[int, int]], str | None]]:
        number, name = self.corpus.shards[at]
        source = self.corpus.sources[number]
        kind_ = source.types[name]
        chosen = self.lists(number)
        title = source.shard_names[name]
        keyed = kind_.columns and len(shard.index.samples) > 0 and _key_of(shard, shard.index.samples[0]) is not None
        for number, ref in enumerate(shard.index.samples):
            if chosen is None or chosen(f"{title}/{ref.key}", ref.key):
                key = _key_of(shard, ref) if keyed else None
                yield number, ref.key, ref.members, None if key is None else plain_key(key)

    def _estimate(self, shard: OpenShard, count: int) -> int:
        """Bytes of the samples of a shard that is no tar, by some of them; 0 where sizes are not measured."""
        sizes = []
        refs = shard.index.samples
        for at in range(0, len(refs) if self.measured else 0, max(1, -(-len(refs) // MEASURED))):
            with contextlib.suppress(Dropped):
                members = shard.load(refs[at])
                sizes.append(_bytes({name: (0, len(data)) for name, data in members.items()}))
        return count * sum(sizes) // max(1, len(sizes))


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
