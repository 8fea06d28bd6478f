"""New shards: a plan and listed samples enter; tars with side indexes leave."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from clipstream.data.decode.captions import build_caption, candidates
from clipstream.data.order.lanes import Numbers
from clipstream.data.order.rng import hash_of
from clipstream.data.packing.lists import PARTS, Corpus, Listed
from clipstream.data.packing.plan import Plan
from clipstream.data.packing.sample import Recording, SamplePacker
from clipstream.data.sources import ShardIndex, indexes
from clipstream.errors import Dropped
from clipstream.storage.download import ShardError, failed
from clipstream.storage.tar import SampleTable
from clipstream.storage.tar_writer import TarWriter
from clipstream.utils.processes import Failed


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
