"""Writing of a feature store: chunks enter one at a time, in any order and from any rank; a store can be continued.

Every file is complete or absent (utils.atomic_write), so that a killed process loses only the chunks that it had not
written. What is being written is described by draft.json, and store.json appears once all of it is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load

from clipstream.errors import DataError, SettingsError, errors_as
from clipstream.features.manifest import (
    DRAFT,
    DTYPES,
    FEATURE_DTYPES,
    KEYS,
    RERUN,
    ROWS,
    SAMPLES,
    STORE,
    TEXTS,
    DamagedChunk,
    Header,
    Manifest,
    ShardInfo,
    chunk_digest,
    damaged_chunk,
    differences,
    is_finite,
    join_digests,
    open_chunk,
    read_header,
    render,
    sample_dtype,
    stored_width,
    texts_tensors,
    verify,
)
from clipstream.text import printable
from clipstream.utils import atomic_write

ADVICE = (
    "free space on its disk, or name another folder, and rerun the same `clipstream precompute` command to continue"
)
REASON = "reason"  # metadata of the chunk of a shard that could not be opened
LOCK = ".lock"


class Chunk(NamedTuple):
    source: str
    shard: int
    number: int  # in its shard
    shard_samples: int  # samples of the whole shard, dropped ones included


class Texts(NamedTuple):
    """The part `texts` of a chunk: for each sample its key, its captions in the order of their rows, and why it was
    dropped ('' for those in use)."""

    keys: Sequence[str]
    captions: Sequence[Sequence[str]]
    reasons: Sequence[str]


class StoreWriter:
    """Creates a store or continues one; parts may be added to a complete store. A context manager that unlocks it.

    Args:
        draft: what the store will hold: shards by name alone, parts, and settings.
        rank: all ranks make a writer of the same draft, rank 0 first. Rank 0 writes draft.json and store.json, and
            locks the store against other processes.

    Attributes:
        manifest: the draft, with the parts that the store has already.

    Raises SettingsError: the folder holds a store of something else (the message names the differences), is used by
        another process, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], draft: Manifest, *, rank: int = 0) -> None:
        self.path, self._verify = Path(path), True
        self._headers: dict[Path, Header] = {}  # of files that are known to be whole
        self._own = tuple(draft.parts)
        self._lock = -1
        try:
            with self._writing(self.path / DRAFT):
                if rank == 0:
                    self.path.mkdir(parents=True, exist_ok=True)
                    self._lock_folder()
                self.manifest = self._with_stored_parts(draft.without_counts())
                if rank == 0:
                    atomic_write.replace(self.path / DRAFT, self.manifest.to_bytes())
        except BaseException:
            self.close()
            raise

    def missing(self, source: str, shard: int, chunk: int, part: str) -> bool:
        """Whether a chunk has to be written; one that is truncated or damaged is removed."""
        return self._header(part, source, shard, chunk) is None

    def shard_samples(self, source: str, shard: int) -> int | None:
        """Samples of a shard of which something was written; None for others and for one that could not be opened."""
        header = self._header(TEXTS, source, shard, 0)
        return None if header is None or header.meta.get(REASON) else header.samples

    def read_dropped(self, source: str, shard: int, chunk: int) -> tuple[list[int], int]:
        """The numbers in its chunk of the samples that were dropped, and when the chunk was written, in ns."""
        path = self._path(SAMPLES, source, shard, chunk)
        rows = load(path.read_bytes())[ROWS].numpy()
        dtype = sample_dtype(self.manifest.views, self.manifest.sources[source].paths)
        return np.flatnonzero(rows.view(dtype)["used"] == 0).tolist(), path.stat().st_mtime_ns

    def remove(self, source: str, shard: int, chunk: int) -> None:
        """Remove all parts of a chunk, so that it is missing."""
        for part in (SAMPLES, TEXTS, *self.manifest.parts):
            path = self._path(part, source, shard, chunk)
            path.unlink(missing_ok=True)
            self._headers.pop(path, None)

    def write(self, chunk: Chunk, rows: Mapping[str, torch.Tensor | np.ndarray[Any, Any]], texts: Texts) -> None:
        """Write the parts of a chunk that are missing.

        Args:
            rows: part -> stored rows [n, W] on the CPU as from `codec.encode_rows`, or token ids; of the part
                `samples` a structured array [n] of `manifest.sample_dtype`.

        Raises:
            ValueError: shape or type do not fit the part.
            DataError: features are not finite, or the shard has changed since other parts of it were written.
            SettingsError: the disk is full.
        """
        source, shard, number, shard_samples = chunk
        found = self._header(TEXTS, source, shard, number)
        if found is not None and REASON in found.meta:  # the shard could not be opened, and now it could
            found = None
        if found is not None and (found.samples, found.meta[KEYS]) != (shard_samples, chunk_digest(texts.keys)):
            raise DataError(
                f"source {source!r}: {self.manifest.sources[source].shards[shard].name} has changed since features of "
                "it were computed: compute all features of these shards into another folder"
            )
        for part, values in rows.items():
            if self.missing(source, shard, number, part):
                self._write(chunk, part, {ROWS: self._check_rows(chunk, part, values, texts)})
        if found is None:
            self._write(chunk, TEXTS, texts_tensors(*texts), {KEYS: chunk_digest(texts.keys)})

    def write_empty(self, source: str, shard: int, reason: str = "") -> None:
        """Note that a shard has no samples; with a reason, that it could not be opened, and is missing until it can."""
        more = {KEYS: "", **({REASON: reason} if reason else {})}
        self._write(Chunk(source, shard, 0, 0), TEXTS, texts_tensors([], [], []), more)

    def finish(self) -> Manifest:
        """Write store.json with the counts of all shards, in rank 0, after all chunks are written; return its content.

        Raises:
            SettingsError: chunks are missing, or the disk is full.
            DataError: no sample of a source is in use.
        """
        self._verify = False  # what this call has not seen, other ranks have verified or written
        sources = {}
        for name, source in self.manifest.sources.items():
            shards = tuple(self._shard_info(name, number) for number in range(len(source.shards)))
            if (samples := sum(shard.samples for shard in shards)) and not any(sum(one.captions) for one in shards):
                raise DataError(
                    f"source {name!r}: {self.path} has no rows: all {samples:,} samples were dropped when they were "
                    "read: see `clipstream check`; what is mended is computed by the same command"
                )
            sources[name] = replace(source, shards=shards)
        full = replace(self.manifest, sources=sources, complete=True)
        parts = {name: part for name, part in full.parts.items() if name in self._own or self._has_all(full, name)}
        full = replace(full, parts=parts)
        with self._writing(self.path / STORE):
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

    def _lock_folder(self) -> None:
        """Raise SettingsError: the folder holds something else than a store, or another process writes it."""
        names = set(os.listdir(self.path))
        if not names & {STORE, DRAFT} and (others := names - {LOCK, f"{DRAFT}.tmp", "lost+found"}):
            raise SettingsError(
                f"{self.path} is not empty and holds no feature store (it has {printable(min(others))}): name a new "
                "folder for the store, or remove what is in this one"
            )
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        if atomic_write.try_lock(self._lock, fcntl.LOCK_EX, posix=True) is False:  # forked data workers do not hold it
            raise SettingsError(f"another process writes the feature store {self.path}: wait until it has ended")

    def _with_stored_parts(self, draft: Manifest) -> Manifest:
        """The draft with the parts that the store has already. Raises SettingsError: they do not go together."""
        for name in (DRAFT, STORE):
            with contextlib.suppress(FileNotFoundError):
                found = Manifest.read(self.path / name).without_counts()
                break
        else:
            return draft
        old, new = asdict(found), asdict(draft)
        known, wanted = old.pop("parts"), new.pop("parts")
        both = known.keys() & wanted.keys()
        changed = differences(old, new)
        changed += differences({"parts": {name: known[name] for name in both}}, {"parts": {n: wanted[n] for n in both}})
        # The keys of views are stored once, so that images are augmented alike in all parts.
        before, after = _transform_of(known), _transform_of({name: wanted[name] for name in wanted.keys() - both})
        changed += differences(before, after) if before and after else []
        if changed:
            raise SettingsError(
                f"{self.path} holds features of something else: {'; '.join(changed)}. Give another folder, or the "
                "settings that the store was begun with"
            )
        return replace(draft, parts={**found.parts, **draft.parts})

    def _path(self, part: str, source: str, shard: int, chunk: int) -> Path:
        return self.path / self.manifest.chunk_path(part, source, shard, chunk)

    def _header(self, part: str, source: str, shard: int, chunk: int, samples: int | None = None) -> Header | None:
        """The header of a chunk that is there and whole; one that is not is removed.

        Args:
            samples: of the shard, if they are known.
        """
        path = self._path(part, source, shard, chunk)
        if not path.exists():
            return None
        try:
            header = self._headers.get(path) or self._read_header(path)
            header.expect(self.manifest.chunk_meta(part, source, shard, chunk, samples), path)
        except DamagedChunk:
            path.unlink(missing_ok=True)
            self._headers.pop(path, None)
            return None
        self._headers[path] = header
        return header

    def _read_header(self, path: Path) -> Header:
        with open_chunk(path, path) as file:
            packed = path.suffix == ".zst"
            plain = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd") if packed else file
            # A compressed file is unpacked in pieces, no further than its header says.
            header = (verify if self._verify or packed else read_header)(plain, path)
            end = header.size + header.body_bytes
            whole = not plain.read(1) if packed else os.fstat(file.fileno()).st_size == end
        if not whole:
            raise damaged_chunk(path, "it does not end where its header says")
        return header

    def _check_rows(self, chunk: Chunk, part: str, rows: Any, texts: Texts) -> torch.Tensor:
        """The rows of a part as a tensor. Raises ValueError, DataError."""
        manifest, count = self.manifest, len(texts.keys)
        if part == SAMPLES:
            size = sample_dtype(manifest.views, manifest.sources[chunk.source].paths).itemsize
            rows = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))
            wanted = torch.uint8, (count, size)
        else:
            info = manifest.parts[part]
            count = sum(map(len, texts.captions)) if manifest.per_caption(part) else count * manifest.rows_of(part)
            wanted = DTYPES[info.dtype], (count, stored_width(info.width, info.dtype))
        if (rows.dtype, tuple(rows.shape)) != wanted:
            raise ValueError(f"rows of part {part} are {rows.dtype} {list(rows.shape)} instead of {wanted}")
        if part != SAMPLES and info.dtype in FEATURE_DTYPES and not is_finite(rows):
            raise DataError(
                f"features of part {part} are not finite: chunk {chunk.number} of shard {chunk.shard} of {chunk.source}"
            )
        found: torch.Tensor = rows.detach()
        return found

    def _write(
        self, chunk: Chunk, part: str, tensors: dict[str, torch.Tensor], more: Mapping[str, str] | None = None
    ) -> None:
        source, shard, number, shard_samples = chunk
        path = self._path(part, source, shard, number)
        meta = {**self.manifest.chunk_meta(part, source, shard, number, shard_samples), **(more or {})}
        content = render(meta, tensors)
        header = read_header(io.BytesIO(content[0]), path)
        if path.suffix == ".zst":
            content = [pa.compress(b"".join(content), codec="zstd", asbytes=True)]
        with self._writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write.replace(path, content)
        self._headers[path] = header

    def _writing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        return errors_as(SettingsError, f"feature store: {path} cannot be written", OSError, advice=ADVICE)

    def _has_all(self, manifest: Manifest, part: str) -> bool:
        return not any(
            self.missing(name, number, chunk, part)
            for name, source in manifest.sources.items()
            for number, shard in enumerate(source.shards)
            for chunk in range(shard.chunks(manifest.chunk_rows))
        )

    def _shard_info(self, source: str, number: int) -> ShardInfo:
        """Counts of a shard. Raises SettingsError: a chunk is missing."""

        def header(part: str, chunk: int, samples: int | None) -> Header:
            if (found := self._header(part, source, number, chunk, samples)) is None:
                path = self._path(part, source, number, chunk)
                raise SettingsError(f"the feature store {self.path} is incomplete ({path} is missing): {RERUN}")
            return found

        first = header(TEXTS, 0, None)
        name = self.manifest.sources[source].shards[number].name
        info = ShardInfo(name, first.samples, reason=first.meta.get(REASON, ""))
        texts = []
        for chunk in range(info.chunks(self.manifest.chunk_rows)):
            for part in (SAMPLES, *self._own):
                header(part, chunk, info.samples)
            texts.append(header(TEXTS, chunk, info.samples))
        keys = join_digests(one.meta[KEYS] for one in texts)
        return replace(info, keys=keys, captions=tuple(one.captions for one in texts))


def _transform_of(parts: Mapping[str, Any]) -> dict[str, object]:
    """How the images of the parts with a row for each view were augmented."""
    found = [part["fingerprint"].get("transform") for part in parts.values() if part["rows_per"] == "view"]
    return {"transform": found[0]} if found else {}
