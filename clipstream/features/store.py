"""Reading of a feature store: sample numbers and rows enter, stored rows leave.

Rows of a part are one array over all chunks of a source (`region`), so that a batch is one `np.take`, without Python
for each sample. A shard has to be held while its rows are read; holding it checks each chunk's CRC-32 once per process.
Local uncompressed chunks are mapped where they are; all others become local files first, in the cache or in a temporary
folder (`storage.shard_cache`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.errors import DataError, SettingsError, did_you_mean
from clipstream.features import chunks
from clipstream.features.chunks import DamagedChunk, Header
from clipstream.features.codec import DTYPES, decode_rows, stored_width
from clipstream.features.manifest import (
    DRAFT,
    RERUN,
    ROWS_MULTIPLE,
    SAMPLES,
    STORE,
    TEXTS,
    Manifest,
    keys_digest,
    part_folder,
    sample_dtype,
)
from clipstream.features.region import Changes, Region
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL
from clipstream.storage.transfer import ShardError
from clipstream.utils.atomic_write import BLOCK

AHEAD = 1024  # rows whose beginnings are read before they are copied
WIDE = 256  # bytes of a row from which that is of use
PASSING = (
    "unreachable",
    "timeout",
    "truncated_download",
    "unreadable",
    "disk",
    "http_429",
    "http_503",
)  # of ShardError
WATCHED = 1.0  # s between two looks at the files of the chunks that are held; changes on this machine are seen at once
Version = tuple[int, int, int]  # of a file: inode, bytes, time of the last change
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_changes = Changes()


class FeatureStore:
    """An open store. Use `FeatureStore.open`.

    Attributes:
        path: folder or URL.
        manifest: content of store.json.
    """

    def __init__(self, path: str, manifest: Manifest, cache: str | ShardCache | None = None) -> None:
        self.path, self.manifest = path, manifest
        self._url = ShardURL(path)
        self._root = None if self._url.path is None else Path(self._url.path)
        self._cache = ShardCache(cache) if isinstance(cache, str) else cache
        self._lock = threading.Lock()
        self.verified: dict[str, Version] = {}  # chunks whose CRC this process has checked

    @classmethod
    def open(cls, path: str | os.PathLike[str], cache: str | ShardCache | None = None) -> FeatureStore:
        """Open a folder, or a URL (http, https, or an object store).

        Args:
            cache: folder that keeps downloaded and unpacked files for later runs, or the cache of the shards; None for
                a temporary folder.

        Raises:
            SettingsError: no complete store is there, or chunks are missing or of the wrong size.
            DataError: a remote store cannot be reached.
        """
        store = cls(os.fspath(path), Manifest({}, {}), cache)
        store.manifest = store._read_manifest()
        for name in store.manifest.sources if store._root is not None else ():
            store._check_files(name)
        return store

    def source(self, name: str, parts: Sequence[str] | None = None) -> StoredSource:
        """One source.

        Args:
            parts: the parts to read, without `samples` and `texts`, which are always there; None for all.

        Raises SettingsError: the store has no such source or part.
        """
        for wanted, known in (([name], self.manifest.sources), (parts or (), self.manifest.parts)):
            for word in wanted:
                if word not in known:
                    kind = "source" if word == name and known is self.manifest.sources else "part"
                    raise SettingsError(
                        f"the feature store {self.shown} has no {kind} {word!r}, only {', '.join(known) or 'none'}"
                        f"{did_you_mean(word, known)}"
                    )
        return StoredSource(self, name, list(self.manifest.parts if parts is None else parts))

    def blocks(self, part: str, rows: int = 65536) -> Iterator[tuple[str, int, int, torch.Tensor]]:
        """All rows of a part in order, decoded, at most `rows` at a time.

        Returns:
            (source, shard, first sample or caption row of the shard, float32 [m, D]); of a part with K views of a
            sample, m is a multiple of K and the views of a sample follow each other. No block spans two chunks.
        """
        times = self.manifest.rows_of(part)
        step = max(rows // times, 1) * times
        for name in self.manifest.sources:
            source = self.source(name, [part])
            for shard in range(len(source.shards)):
                with source.holding(shard):
                    before = 0
                    for first, count in source.chunk_rows(part, shard):
                        for at in range(0, count, step):
                            taken = np.arange(first + at, first + min(at + step, count))
                            yield name, shard, (before + at) // times, decode_rows(source.gather(part, taken))
                        before += count

    @property
    def shown(self) -> str:
        """The store's path or URL without credentials, for messages."""
        return str(self._url)

    def shown_file(self, relative: str) -> str:
        """Path or URL of a file of the store, for messages."""
        return f"{self.shown.rstrip('/')}/{relative}"

    def local(self, relative: str, most: int | None = None) -> Path:
        """A file of the store as a local file, uncompressed; to be given back by `release`.

        Args:
            most: bytes that it may have; None for the limit of shards.

        Raises DataError: it is missing, too large, or cannot be downloaded or unpacked.
        """
        if self._root is not None and not relative.endswith(".zst"):
            return self._root / relative
        try:
            return self.cache().local(self.name_of(relative), tar=False, most=most)
        except ShardError as error:
            if error.reason == "too_large" and most is not None:
                raise DamagedChunk.at(self.shown_file(relative), f"has more than its {most:,} bytes") from error
            advice = "run again once it can be read" if error.reason in PASSING else RERUN
            raise DataError(f"feature store: {self.shown_file(relative)}: {error}: {advice}") from error

    def owns(self, path: Path) -> bool:
        """Whether a file is the store's own, and not a copy."""
        return self._root is not None and self._root in path.parents

    def release(self, relative: str) -> None:
        """Give back a file that `local` gave."""
        if self._cache is not None:
            self._cache.release(self.name_of(relative))

    def name_of(self, relative: str) -> str:
        """A file's full path or URL, with credentials."""
        return str(self._root / relative) if self._root is not None else f"{self.path.rstrip('/')}/{relative}"

    def cache(self) -> ShardCache:
        """What downloads and unpacks."""
        with self._lock:
            if self._cache is None:
                self._cache = ShardCache(None)
            return self._cache

    def _read_manifest(self) -> Manifest:
        shown = self.shown_file(STORE)
        try:
            manifest = Manifest.read(self.local(STORE), shown)
        except OSError as error:
            if self._root is not None and (self._root / DRAFT).exists():
                raise SettingsError(f"the feature store {self.shown} is incomplete: {RERUN}") from error
            detail = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise SettingsError(
                f"{self.shown} is no feature store ({STORE} {detail}): `clipstream precompute` writes one"
            ) from error
        finally:
            self.release(STORE)
        if not manifest.complete:
            raise SettingsError(f"the feature store {self.shown} is incomplete: {RERUN}")
        return manifest

    def _check_files(self, name: str) -> None:
        """Check that the files of a source are there and have the size that the manifest implies."""
        assert self._root is not None
        manifest, source = self.manifest, self.manifest.sources[name]
        for part in (SAMPLES, TEXTS, *manifest.parts):
            sizes: dict[str, int] = {}
            with contextlib.suppress(OSError):  # then all of its chunks are missing
                sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self._root / part_folder(part, name))}
            for number, shard in enumerate(source.shards):
                for chunk in range(shard.chunks(manifest.chunk_rows)):
                    relative = manifest.chunk_path(part, name, number, chunk)
                    size = sizes.pop(relative.rpartition("/")[2], None)
                    if size is None:
                        raise SettingsError(f"feature store: {self.shown_file(relative)} is missing: {RERUN}")
                    if part == TEXTS or manifest.zstd(part):
                        continue
                    rows = _rows(manifest, part, name, number, chunk) * manifest.row_bytes(part, name)
                    if size <= rows or (size - rows) % BLOCK or size - rows > chunks.MOST_HEADER:
                        raise SettingsError(
                            f"feature store: {self.shown_file(relative)} has {size:,} bytes, which is not the size of "
                            f"its {rows:,} bytes of rows and a header: {RERUN}"
                        )
            if part == SAMPLES and (
                others := sorted(other for other in sizes if re.fullmatch(r"[\d-]+\.safetensors", other))
            ):
                other = self.shown_file(f"{part_folder(part, name)}/{others[0]}")
                raise SettingsError(f"feature store: {other} is of no shard that {STORE} lists: {RERUN}")


class StoredSource:
    """One source of a store: its samples by number, and its rows. Use `FeatureStore.source`.

    Samples are numbered so that sample i of a shard has the number base(shard) + i, and sample number // chunk_rows is
    its chunk among all chunks of the source; numbers behind the last sample of a shard's last chunk are unused. `hold`
    and `release` may be called in any thread.

    Attributes:
        info: SourceInfo. shards: its shards.
    """

    def __init__(self, store: FeatureStore, name: str, parts: Sequence[str]) -> None:
        self.store, self.name, self.parts = store, name, tuple(parts)
        manifest = store.manifest
        self.info = manifest.sources[name]
        self.shards = self.info.shards
        counts = [shard.chunks(manifest.chunk_rows) for shard in self.shards]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # first chunk of each shard
        self._chunk_rows, self._views = manifest.chunk_rows, max(manifest.views, 1)
        captions = max((rows for shard in self.shards for rows in shard.captions), default=0)
        self._caption_rows = max(-(-captions // ROWS_MULTIPLE), 1) * ROWS_MULTIPLE  # of a slot
        self._dtype = sample_dtype(manifest.views, self.info.paths)
        self._tables = {part: _Table(self, part) for part in (SAMPLES, *self.parts)}
        self._held: dict[int, int] = {}
        self._files: dict[int, list[str]] = {}  # what to release, by shard
        self._mapped: dict[tuple[str, int, int], tuple[Path, str]] = {}  # chunk -> file, its name in messages
        self._looked, self._seen = 0.0, -1
        self._lock = threading.Lock()

    def samples_of(self, shard: int) -> int:
        """Samples of a shard, dropped ones included."""
        return self.shards[shard].samples

    def base(self, shard: int) -> int:
        """Number of the shard's first sample."""
        return int(self._first[shard]) * self._chunk_rows

    def hold(self, shard: int) -> None:
        """Make the rows of a shard readable until as many calls of `release`.

        Raises DataError: a chunk is missing, damaged or cannot be downloaded; names the file.
        """
        with self._lock:
            if shard not in self._held:
                try:
                    self._map(shard)
                except BaseException:
                    self._unmap(shard)
                    raise
            self._held[shard] = self._held.get(shard, 0) + 1

    def release(self, shard: int) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._held[shard] -= 1
            if not self._held[shard]:
                del self._held[shard]
                self._unmap(shard)

    @contextlib.contextmanager
    def holding(self, shard: int) -> Iterator[None]:
        """Hold a shard for the duration of a `with` block."""
        self.hold(shard)
        try:
            yield
        finally:
            self.release(shard)

    def sample_rows(self, numbers: Numbers) -> np.ndarray[Any, np.dtype[np.void]]:
        """The rows of samples as a structured array [n] of type `manifest.sample_dtype`."""
        self._check_changes()
        found: np.ndarray[Any, np.dtype[np.void]] = self._tables[SAMPLES].take(numbers).view(self._dtype).reshape(-1)
        return found

    def view_rows(self, numbers: Numbers, views: Numbers) -> Numbers:
        """Rows of the parts with a row for each view, int64 [n]."""
        return numbers * self._views + views

    def caption_rows(self, numbers: Numbers, choices: Numbers) -> Numbers:
        """Rows of the parts with a row for each caption, int64 [n]; choices count all captions of a sample."""
        starts: Numbers = self.sample_rows(numbers)["start"]
        return numbers // self._chunk_rows * self._caption_rows + starts + choices

    def gather(self, part: str, rows: Numbers, out: torch.Tensor | None = None) -> torch.Tensor:
        """Stored rows [n, W], without the interpreter's lock.

        Args:
            out: contiguous tensor [n, W] of the stored type on the CPU, which is filled and returned.

        Raises:
            IndexError: a row is of no shard that is held.
            DataError: the file of a chunk that is held was damaged meanwhile.
        """
        self._check_changes()
        info = self.store.manifest.parts[part]
        if out is None:
            out = torch.empty((len(rows), stored_width(info.width, info.dtype)), dtype=DTYPES[info.dtype])
        self._tables[part].take(rows, out.view(torch.uint8).numpy())
        return out

    def chunk_rows(self, part: str, shard: int) -> list[tuple[int, int]]:
        """(first row, number of rows) of each chunk of a shard, in the numbering of `gather`."""
        slot_rows = self.slot_rows(part)
        first = int(self._first[shard])
        count = int(self._first[shard + 1]) - first
        manifest = self.store.manifest
        return [((first + c) * slot_rows, _rows(manifest, part, self.name, shard, c)) for c in range(count)]

    def keys(self, shard: int) -> list[str]:
        """The keys of a shard's samples."""
        return [key for texts in self._texts(shard) for key in chunks.strings(texts, "key")]

    def captions(self, shard: int) -> list[list[str]]:
        """The captions of each sample, in the order of its caption rows."""
        return [own for texts in self._texts(shard) for own in chunks.captions_of(texts)]

    def find(self, shard: int, keys: Sequence[str]) -> Numbers:
        """The samples of a shard that have one of these keys, int64 [n]."""
        found = [chunks.find_key(texts, key) + chunk * self._chunk_rows
                 for chunk, texts in enumerate(self._texts(shard)) for key in keys]  # fmt: skip
        return np.sort(np.concatenate([*found, np.empty(0, np.int64)]))

    def texts_of(self, shard: int, samples: Numbers) -> dict[int, tuple[str, list[str]]]:
        """Key and captions of some samples of a shard."""
        found: dict[int, tuple[str, list[str]]] = {}
        for chunk, texts in enumerate(self._texts(shard)):
            if len(own := samples[samples // self._chunk_rows == chunk]):
                both = list(zip(chunks.strings(texts, "key"), chunks.captions_of(texts), strict=True))
                found |= {sample: both[sample % self._chunk_rows] for sample in own.tolist()}
        return found

    def reasons(self, shard: int) -> list[str]:
        """Why each sample was dropped; '' for those in use."""
        return [reason for texts in self._texts(shard) for reason in chunks.strings(texts, "reason")]

    def has_keys(self, shard: int, keys: Sequence[str]) -> bool:
        """Whether the samples of the shard had these keys, in this order, when the features were computed."""
        return keys_digest(keys, self._chunk_rows) == self.shards[shard].keys

    def slot_rows(self, part: str) -> int:
        """Rows between the first rows of two chunks."""
        if self.store.manifest.per_caption(part):
            return self._caption_rows
        return self._chunk_rows * self.store.manifest.rows_of(part)

    @property
    def n_chunks(self) -> int:
        """Chunks of each part over all shards."""
        return int(self._first[-1])

    def _map(self, shard: int) -> None:
        files = self._files[shard] = []
        for part, chunk, path, handle, shown in self._open(shard, list(self._tables), files):
            if self.store.owns(path):
                _changes.watch(path.parent)
            header, rows = self._verify(part, shard, chunk, handle, shown)
            self._tables[part].map(int(self._first[shard]) + chunk, handle, len(header.raw), rows)
            self._mapped[part, shard, chunk] = path, shown

    def _open(self, shard: int, parts: Sequence[str], files: list[str]) -> Iterator[tuple[str, int, Path, int, str]]:
        """(part, chunk, file, descriptor, name in messages) of each chunk of a shard.

        Args:
            files: gets the names to release.
        """
        manifest, count = self.store.manifest, self.shards[shard].chunks(self._chunk_rows)
        for part in parts:
            for chunk in range(count):
                relative = manifest.chunk_path(part, self.name, shard, chunk)
                shown = self.store.shown_file(relative)
                rows = None if part == TEXTS else _rows(manifest, part, self.name, shard, chunk)
                most = None if rows is None else chunks.MOST_HEADER + rows * manifest.row_bytes(part, self.name)
                path = self.store.local(relative, most)
                files.append(relative)
                with chunks.opened(path, shown) as handle:
                    yield part, chunk, path, handle, shown

    def _verify(self, part: str, shard: int, chunk: int, handle: int, shown: str) -> tuple[Header, int]:
        """Header and rows of a chunk, whose content is verified once per process and version of its file."""
        name = f"{part}/{self.name}/{shard}/{chunk}"
        manifest, verified = self.store.manifest, self.store.verified
        try:
            stat = os.fstat(handle)
            version = _version(stat)
            known = verified.get(name) == version
            header = (chunks.read_header if known else chunks.verify)(handle, shown)
        except OSError as error:
            raise DataError(f"feature store: {shown} cannot be read: {error.strerror}") from error
        rows, row_bytes = _rows(manifest, part, self.name, shard, chunk), self._tables[part].row_bytes
        chunks.expect(header, shown, manifest, part, self.name, shard, chunk, rows)
        if header.body_bytes != rows * row_bytes or stat.st_size - len(header.raw) < header.body_bytes:
            raise DamagedChunk.at(shown, f"does not have {rows:,} rows of {row_bytes} bytes")
        if part == SAMPLES and not known:
            body = chunks.read_tensors(handle, header)[chunks.ROWS].numpy().tobytes()
            found = np.frombuffer(body, self._dtype)
            counts = found["counts"].sum(axis=1, dtype=np.int64)
            captions = self.shards[shard].captions[chunk]
            starts = counts.cumsum() - counts
            odd = (found["used"] > 1).any() or (found["counts"] < 0).any() or (found["start"] != starts).any()
            if odd or counts.sum() != captions:
                raise DamagedChunk.at(shown, f"is damaged (its samples do not have {captions:,} captions)")
        verified[name] = version
        return header, rows

    def _check_changes(self) -> None:
        """Verify the held chunks whose files were changed in place. Raises DataError: one is damaged now."""
        count, now = _changes.count(), time.monotonic()
        if count == self._seen and now - self._looked < WATCHED:
            return
        for (part, shard, chunk), (path, shown) in list(self._mapped.items()):
            known = self.store.verified[f"{part}/{self.name}/{shard}/{chunk}"]
            with contextlib.suppress(FileNotFoundError):  # removed or replaced: what is mapped stays
                version = _version(os.stat(path))
                if version != known and version[0] == known[0]:
                    with chunks.opened(path, shown) as handle:
                        self._verify(part, shard, chunk, handle, shown)
        self._seen, self._looked = count, now

    def _unmap(self, shard: int) -> None:
        for chunk in range(int(self._first[shard]), int(self._first[shard + 1])):
            for part, table in self._tables.items():
                self._mapped.pop((part, shard, chunk - int(self._first[shard])), None)
                table.unmap(chunk)
        for name in self._files.pop(shard, ()):
            self.store.release(name)

    def _texts(self, shard: int) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of the part `texts`, verified, chunk by chunk."""
        files: list[str] = []
        try:
            for part, chunk, _, handle, shown in self._open(shard, [TEXTS], files):
                header, manifest, info = chunks.verify(handle, shown), self.store.manifest, self.shards[shard]
                chunks.expect(header, shown, manifest, part, self.name, shard, chunk, None)
                tensors = chunks.read_tensors(handle, header)
                chunks.check_texts(tensors, shown, manifest.chunk_samples(info.samples, chunk), info.captions[chunk])
                yield tensors
        finally:
            for name in files:
                self.store.release(name)


def _version(stat: os.stat_result) -> Version:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Table:
    """The rows of one part of a source over all of its chunks."""

    def __init__(self, source: StoredSource, part: str) -> None:
        self.row_bytes = source.store.manifest.row_bytes(part, source.name)
        self._slot_rows = source.slot_rows(part)
        self._region = Region(source.n_chunks, self._slot_rows * self.row_bytes)
        self._rows = self._region.array.reshape(-1, self.row_bytes)
        self._held = np.zeros(source.n_chunks + 1, np.int64)  # rows of each chunk that is mapped, else 0

    def take(self, rows: Numbers, out: Bytes | None = None) -> Bytes:
        """Bytes [n, row_bytes] of rows. Raises IndexError: a row is not held."""
        found = rows // self._slot_rows
        if len(rows) and (found.min() < 0 or found.max() >= len(self._held)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all in 0 to {len(self._rows) - 1}")
        if (rows - found * self._slot_rows >= self._held[found]).any():
            raise IndexError("rows of a shard that is not held, or behind its end")
        if out is None:
            out = np.empty((len(rows), self.row_bytes), np.uint8)
        for at in range(0, len(rows), AHEAD):
            some = rows[at : at + AHEAD]
            if self.row_bytes >= WIDE:
                # Loads of single bytes do not wait for each other: the rows' first lines arrive together, 10% faster.
                np.take(self._region.array, some * self.row_bytes, mode="clip")
            # With mode 'raise', numpy would copy into a buffer first.
            np.take(self._rows, some, axis=0, out=out[at : at + AHEAD], mode="clip")
        return out

    def map(self, chunk: int, handle: int, offset: int, rows: int) -> None:
        self._region.map(chunk, handle, offset, rows * self.row_bytes)
        self._held[chunk] = rows

    def unmap(self, chunk: int) -> None:
        if self._held[chunk]:
            self._held[chunk] = 0
            self._region.unmap(chunk)


def _rows(manifest: Manifest, part: str, source: str, shard: int, chunk: int) -> int:
    """Rows of a chunk."""
    info = manifest.sources[source].shards[shard]
    if manifest.per_caption(part):
        return info.captions[chunk]
    return manifest.chunk_samples(info.samples, chunk) * manifest.rows_of(part)
