"""Writing of a feature store: chunks enter one at a time, in any order and from any rank; a store can be continued.

Every file is complete or absent (utils.atomic_write), so that a killed process loses only the chunks that it had not
written. What is being written is described by draft.json, and store.json appears once all of it is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.errors import DataError, SettingsError
from clipstream.features import chunks
from clipstream.features.chunks import KEYS, ORIGIN, ROWS, ChunkID, DamagedChunk, Header
from clipstream.features.codec import DTYPES, FEATURE_DTYPES, is_finite, stored_width
from clipstream.features.manifest import (
    DRAFT,
    MODEL,
    RERUN,
    SAMPLES,
    STORE,
    TEXTS,
    Manifest,
    ShardInfo,
    chunk_digest,
    differences,
    joined_digest,
    part_folder,
    sample_dtype,
)
from clipstream.storage.downloader import Fetcher
from clipstream.storage.shard_url import ShardURL
from clipstream.storage.transfer import Monitor, ShardError
from clipstream.text import printable
from clipstream.utils import atomic_write

REASON = "reason"  # metadata of the chunk of a shard that could not be opened
LOCK = ".lock"
CONFIG = "open_clip_config.json"  # in MODEL
LEFT = re.compile(r"\d{5,}-\d{4,}\.safetensors(\.zst)?(\.[0-9a-f]{8})?\.tmp")


class StoreWriter:
    """Creates a store or continues one; parts may be added to a complete store. A context manager that unlocks it.

    Args:
        draft: what the store will hold: shards by name alone, parts, and settings.
        rank: all ranks make a writer of the same draft, rank 0 first. Rank 0 writes draft.json and store.json, and
            locks the store against other processes.
        verify: whether `missing` checks the CRC-32 of the chunks that it finds, and removes damaged ones.

    Attributes:
        manifest: the draft, with the parts that the store has already.

    Raises SettingsError: the folder holds a store of something else (the message names the differences), is used by
        another process, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], draft: Manifest, *, rank: int = 0, verify: bool = True) -> None:
        self.path, self._verify = Path(path), verify
        self._headers: dict[Path, Header] = {}  # of files that are known to be whole
        self._own = tuple(draft.parts)
        self._lock = -1
        try:
            with self._full_disk(self.path / DRAFT):
                if rank == 0:
                    if self.path.exists() and not self.path.is_dir():
                        raise SettingsError(f"{self.path} is a file: name a folder for the feature store")
                    self.path.mkdir(parents=True, exist_ok=True)
                    self._check_folder()
                    self._lock_store()
                found = self._existing()
                self.manifest = (draft if found is None else _merged(found, draft, self.path)).without_counts()
                if rank == 0:
                    self._remove_drafts()
                    atomic_write.replace(self.path / DRAFT, self.manifest.to_bytes())
        except BaseException:
            self.close()
            raise

    def missing(self, source: str, shard: int, chunk: int, part: str, *, shard_samples: int | None = None) -> bool:
        """Whether a chunk has to be written; one that is truncated, damaged, or of another shard length is removed.

        Args:
            shard_samples: samples of the shard, if they are known.
        """
        return self._header(part, source, shard, chunk, shard_samples) is None

    def shard_samples(self, source: str, shard: int) -> int | None:
        """Samples of a shard of which something was written; None for others and for one that could not be opened."""
        header = self._header(TEXTS, source, shard, 0)
        return None if header is None or header.meta.get(REASON) else header.id.shard_samples

    def write(
        self, part: str, source: str, shard: int, chunk: int, rows: torch.Tensor | np.ndarray[Any, Any],
        *, shard_samples: int,
    ) -> None:  # fmt: skip
        """Write a chunk of a part with rows.

        Args:
            rows: stored rows [n, W] on the CPU as from `codec.encode_rows`, or token ids; of the part `samples` a
                structured array [n] of `manifest.sample_dtype`.
            shard_samples: samples of the whole shard, dropped ones included.

        Raises:
            ValueError: shape or type do not fit the part.
            DataError: features are not finite.
            SettingsError: the disk is full.
        """
        tensor = self._rows(part, source, rows)
        samples = self.manifest.chunk_samples(shard_samples, chunk)
        count = samples * self.manifest.rows_of(part)
        if not self.manifest.per_caption(part) and len(tensor) != count:
            raise ValueError(f"chunk {chunk} of {part} of a shard of {shard_samples} samples has {count} rows")
        if part in self.manifest.parts and self.manifest.parts[part].dtype in FEATURE_DTYPES and not is_finite(tensor):
            raise DataError(f"features of part {part} are not finite: chunk {chunk} of shard {shard} of {source}")
        self._write(ChunkID(part, source, shard, chunk, shard_samples), {ROWS: tensor})

    def write_texts(
        self, source: str, shard: int, chunk: int,
        keys: Sequence[str], captions: Sequence[Sequence[str]], reasons: Sequence[str],
        *, shard_samples: int,
    ) -> None:  # fmt: skip
        """Write a chunk of the part `texts`: for each sample its key, its captions in the order of their rows, and why
        it was dropped ('' for those in use).

        Raises SettingsError: the disk is full.
        """
        samples = self.manifest.chunk_samples(shard_samples, chunk)
        if not len(keys) == len(captions) == len(reasons) == samples:
            raise ValueError(f"chunk {chunk} of a shard of {shard_samples} samples has {samples} samples")
        tensors = chunks.texts_tensors(keys, captions, reasons)
        self._write(ChunkID(TEXTS, source, shard, chunk, shard_samples), tensors, {KEYS: chunk_digest(keys)})

    def check_keys(self, source: str, shard: int, chunk: int, keys: Sequence[str], *, shard_samples: int) -> None:
        """Compare a chunk's samples with those of its part `texts`, if that is there.

        Raises DataError: the shard has other samples now.
        """
        header = self._header(TEXTS, source, shard, chunk)
        if header is not None and (header.id.shard_samples, header.meta[KEYS]) != (shard_samples, chunk_digest(keys)):
            name = self.manifest.sources[source].shards[shard].name
            raise DataError(
                f"source {source!r}: {name} has changed since features of it were computed: compute all features of "
                "these shards into another folder"
            )

    def write_empty(self, source: str, shard: int, reason: str = "") -> None:
        """Note that a shard has no samples; with a reason, that it could not be opened, and is missing until it can."""
        more = {KEYS: "", **({REASON: reason} if reason else {})}
        self._write(ChunkID(TEXTS, source, shard, 0, 0), chunks.texts_tensors([], [], []), more)

    def finish(self) -> Manifest:
        """Write store.json with the counts of all shards, in rank 0, after all chunks are written; return its content.

        Raises:
            SettingsError: chunks are missing, all shards are empty, or the disk is full.
        """
        self._verify = False  # what this call has not seen, other ranks have verified or written
        sources = {}
        for name, source in self.manifest.sources.items():
            shards = tuple(self._shard_info(name, number) for number in range(len(source.shards)))
            sources[name] = replace(source, shards=shards)
        full = replace(self.manifest, sources=sources, complete=True)
        parts = {name: part for name, part in full.parts.items() if name in self._own or self._has_all(full, name)}
        full = replace(full, parts=parts)
        with self._full_disk(self.path / STORE):
            atomic_write.replace(self.path / STORE, full.to_bytes())
            if set(parts) == set(self.manifest.parts):
                (self.path / DRAFT).unlink(missing_ok=True)
        return full

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the store; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_folder(self) -> None:
        """Raise SettingsError: the folder is not empty and holds no store."""
        names = set(os.listdir(self.path))
        own = {LOCK, f"{DRAFT}.tmp", "lost+found", *([MODEL] if (self.path / MODEL / CONFIG).exists() else [])}
        if not names & {STORE, DRAFT} and (others := names - own):
            raise SettingsError(
                f"{self.path} is not empty and holds no feature store (it has {printable(min(others))}): name a new "
                "folder for the store, or remove what is in this one"
            )

    def _remove_drafts(self) -> None:
        """Remove what killed processes left: files with the names of this store's files and `.tmp`."""
        sources, parts = self.manifest.sources, (SAMPLES, TEXTS, *self.manifest.parts)
        folders = [self.path]
        folders += [self.path / part_folder(part, source) for source in sources for part in parts]
        for path in (path for folder in folders for path in folder.glob("*.tmp")):
            if LEFT.fullmatch(path.name) if path.parent != self.path else path.name in (f"{STORE}.tmp", f"{DRAFT}.tmp"):
                path.unlink(missing_ok=True)

    def _lock_store(self) -> None:
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SettingsError(
                f"another process writes the feature store {self.path}: wait until it has ended"
            ) from None
        except OSError:  # a file system without locks
            return
        # Data workers, which are forked, must not keep a killed process's store locked.
        writer = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: None if (own := writer()) is None else own.close())

    def _existing(self) -> Manifest | None:
        for name in (DRAFT, STORE):
            with contextlib.suppress(FileNotFoundError):
                return Manifest.read(self.path / name)
        return None

    def _chunk(self, part: str, source: str, shard: int, chunk: int) -> Path:
        return self.path / self.manifest.chunk_path(part, source, shard, chunk)

    def _header(
        self, part: str, source: str, shard: int, chunk: int, shard_samples: int | None = None
    ) -> Header | None:
        """The header of a chunk that is there and whole; one that is not is removed."""
        path = self._chunk(part, source, shard, chunk)
        if not path.exists():
            return None
        try:
            header = self._headers.get(path) or self._read_header(path, part, source, shard, chunk)
            chunks.expect(header, path, self.manifest, part, source, shard, chunk, None)
            if shard_samples not in (None, header.id.shard_samples):
                raise DamagedChunk.at(path, "is of a shard with another number of samples")
        except DamagedChunk:
            path.unlink(missing_ok=True)
            self._headers.pop(path, None)
            return None
        self._headers[path] = header
        return header

    def _read_header(self, path: Path, part: str, source: str, shard: int, chunk: int) -> Header:
        if path.suffix == ".zst":
            rows = self.manifest.chunk_rows * self.manifest.rows_of(part)
            if self.manifest.per_caption(part):
                texts = self._header(TEXTS, source, shard, chunk)
                rows = 0 if texts is None else texts.layout["text_ends"][1][0]
            most = chunks.MOST_HEADER + rows * self.manifest.row_bytes(part, source)
            with self._plain(path, most) as plain:
                return chunks.verify_file(plain, path)
        return chunks.verify_file(path, crc=self._verify)

    def _rows(self, part: str, source: str, rows: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
        if part == SAMPLES:
            dtype = sample_dtype(self.manifest.views, self.manifest.sources[source].paths)
            if not isinstance(rows, np.ndarray) or rows.dtype != dtype:
                raise ValueError(f"rows of part {part} are a structured array of type {dtype}")
            return torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), dtype.itemsize))
        info = self.manifest.parts[part]
        wanted = DTYPES[info.dtype], stored_width(info.width, info.dtype)
        if not isinstance(rows, torch.Tensor) or (rows.dtype, *rows.shape[1:]) != wanted:
            raise ValueError(f"rows of part {part} are a tensor [n, {wanted[1]}] of type {wanted[0]}")
        return rows.detach()

    def _write(self, chunk: ChunkID, tensors: dict[str, torch.Tensor], more: dict[str, str] | None = None) -> None:
        path = self._chunk(chunk.part, chunk.source, chunk.shard, chunk.chunk)
        origin = {ORIGIN: self.manifest.origin(chunk.part, chunk.source)}
        content = chunks.render(chunk, tensors, {**origin, **(more or {})})
        header = content[0]
        if path.suffix == ".zst":
            import pyarrow as pa  # on use, as its import takes long

            content = [pa.compress(b"".join(content), codec="zstd", asbytes=True)]
        with self._full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write.replace(path, content)
        self._headers[path] = chunks.parse_header(header, path)

    @contextlib.contextmanager
    def _full_disk(self, path: Path) -> Iterator[None]:
        """Turn a failed write into a SettingsError that names the file."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
            full = atomic_write.is_full(error)
            advice = "free space on its disk" if full else "make it writable"
            raise SettingsError(
                f"feature store: {path} cannot be written ({error.strerror or error}): {advice} and run the same "
                "`clipstream precompute` command again, which keeps what is there"
            ) from error

    def _has_all(self, manifest: Manifest, part: str) -> bool:
        """Whether all chunks of a part are there."""
        return not any(
            self.missing(name, number, chunk, part)
            for name, source in manifest.sources.items()
            for number, shard in enumerate(source.shards)
            for chunk in range(shard.chunks(manifest.chunk_rows))
        )

    def _shard_info(self, source: str, number: int) -> ShardInfo:
        """Counts of a shard. Raises SettingsError: a chunk is missing."""
        name, manifest = self.manifest.sources[source].shards[number].name, self.manifest
        first = self._header(TEXTS, source, number, 0)
        if first is None:
            raise self._incomplete(TEXTS, source, number, 0)
        info = ShardInfo(name, first.id.shard_samples, reason=first.meta.get(REASON, ""))
        digests, captions = [], []
        for chunk in range(info.chunks(manifest.chunk_rows)):
            for part in (SAMPLES, *self._own):
                if self.missing(source, number, chunk, part, shard_samples=info.samples):
                    raise self._incomplete(part, source, number, chunk)
            texts = self._header(TEXTS, source, number, chunk, info.samples)
            if texts is None:
                raise self._incomplete(TEXTS, source, number, chunk)
            digests.append(texts.meta[KEYS])
            captions.append(texts.layout["text_ends"][1][0])
        return replace(info, keys=joined_digest(digests), captions=tuple(captions))

    def _incomplete(self, part: str, source: str, shard: int, chunk: int) -> SettingsError:
        path = self._chunk(part, source, shard, chunk)
        return SettingsError(f"the feature store {self.path} is incomplete ({path} is missing): {RERUN}")

    @contextlib.contextmanager
    def _plain(self, path: Path, most: int) -> Iterator[Path]:
        """A file of the store, uncompressed, of at most so many bytes. Raises DamagedChunk."""
        if path.suffix != ".zst":
            yield path
            return
        with _temporary(path) as plain:
            with self._full_disk(path):
                try:
                    Fetcher(most=most).unpack(ShardURL(str(path)), path, plain, Monitor(), tar=False)
                except ShardError as error:
                    raise DamagedChunk.at(path, f"is damaged ({error})") from error
            yield plain


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path beside a file that no other rank uses; what is there is removed behind."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _transform_of(parts: Mapping[str, Any]) -> dict[str, object]:
    """How the pictures of parts were augmented, which is the same for all parts of a store: views have one key."""
    found = [part["fingerprint"].get("transform") for part in parts.values() if part["rows_per"] == "view"]
    return {"transform": found[0]} if found else {}


def _merged(found: Manifest, draft: Manifest, path: Path) -> Manifest:
    """The parts of an existing store and of a draft. Raises SettingsError: they do not go together."""
    old, new = found.without_counts().to_json(), draft.without_counts().to_json()
    known: Any = old.pop("parts")
    wanted: Any = new.pop("parts")
    both = known.keys() & wanted.keys()
    changed = differences(old, new)
    changed += differences({"parts": {name: known[name] for name in both}}, {"parts": {n: wanted[n] for n in both}})
    before = _transform_of(known)
    after = _transform_of({name: wanted[name] for name in wanted.keys() - both})
    changed += differences(before, after) if before and after else []
    if changed:
        raise SettingsError(
            f"{path} holds features of something else: {'; '.join(changed)}. Give another folder, or the settings that "
            "the store was begun with"
        )
    return replace(draft, parts={**found.parts, **draft.parts})
