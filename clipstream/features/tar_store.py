"""Tar shards of features: the chunks of a shard become a WebDataset tar, and chunks again when it is read.

    __store__.json            parts, what made them, and the CRC-32 of each chunk, by which the way back is verified
    KEY.sample.json           key, used, pictures, start, counts, views (as manifest.sample_dtype), reason
    KEY.captions.json         list of captions
    KEY.image.npy             stored rows of the views, [max(K, 1), W]; bfloat16 as uint16
    KEY.text.npy KEY.ids.npy  stored rows of the captions, [c, W]; likewise KEY.NAME.image.npy of a teacher

KEY is the sample's key, so that the tar can be joined with the pictures' by key; a key that no tar member can have is
replaced by `sample-NUMBER`. The same chunks give the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.data.tar import Shard
from clipstream.data.transport.transfer import Monitor
from clipstream.errors import Dropped
from clipstream.features import chunks
from clipstream.features.chunks import CRC, KEYS, ORIGIN, ROWS, ChunkID, DamagedChunk
from clipstream.features.codec import DTYPES, stored_width
from clipstream.features.manifest import SAMPLES, TEXTS, Manifest, chunk_digest, sample_dtype
from clipstream.utils.atomic_write import BLOCK

META = "__store__.json"
_USABLE = re.compile(r"(?!__)(?:[^\0\ud800-\udfff]*/)?[^./\0\ud800-\udfff][^./\0\ud800-\udfff]*")
_NPY = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2", torch.int8: "|i1"}
_NPY |= {torch.uint16: "<u2", torch.int32: "<i4"}


def pack(out: Any, manifest: Manifest, source: str, shard: int, samples: int, paths: Mapping[str, list[Path]]) -> None:
    """Write the tar of a shard to a binary stream.

    Args:
        manifest: kind, chunk rows, views and parts.
        paths: files of the chunks of each part, `samples` and `texts` included.

    Raises DamagedChunk, OSError.
    """
    crcs = {part: [chunks.verify_file(path, crc=False).meta[CRC] for path in found] for part, found in paths.items()}
    captions = [chunks.verify_file(path, crc=False).layout["text_ends"][1][0] for path in paths[TEXTS]]
    parts = {
        name: {"width": part.width, "dtype": part.dtype, "rows_per": part.rows_per}
        for name, part in manifest.parts.items()
        if name in paths
    }
    meta = {
        "source": source, "shard": shard, "samples": samples, "chunk_rows": manifest.chunk_rows,
        "views": manifest.views, "paths": manifest.sources[source].paths, "captions": captions,
        "keys": [chunks.verify_file(path, crc=False).meta[KEYS] for path in paths[TEXTS]], "parts": parts, CRC: crcs,
        ORIGIN: {part: manifest.origin(part, source) for part in paths},
    }  # fmt: skip
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, META, json.dumps(meta).encode())
        for chunk in range(len(paths[TEXTS])):
            tensors = {part: _verified(found[chunk]) for part, found in paths.items()}
            for name, data in _members(manifest, source, chunk, tensors):
                _add(tar, name, data)


def _verified(path: Path) -> dict[str, torch.Tensor]:
    with chunks.opened(path, path) as handle:
        return chunks.read_tensors(handle, chunks.verify(handle, path))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _members(
    manifest: Manifest, source: str, chunk: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member of a chunk."""
    dtype = sample_dtype(manifest.views, manifest.sources[source].paths)
    rows = tensors[SAMPLES][ROWS].numpy().view(dtype).reshape(-1)
    texts = tensors[TEXTS]
    keys, captions = chunks.strings(texts, "key"), chunks.captions_of(texts)
    reasons = chunks.strings(texts, "reason")
    caption = 0
    for number, key in enumerate(keys):
        stem = key if _USABLE.fullmatch(key) else f"sample-{chunk * manifest.chunk_rows + number:08d}"
        row = rows[number]
        values = {name: row[name].tolist() for name in dtype.names or ()}
        yield f"{stem}.sample.json", json.dumps({"key": key, "reason": reasons[number], **values}).encode()
        yield f"{stem}.captions.json", json.dumps(captions[number]).encode()
        for part, found in tensors.items():
            if part in (SAMPLES, TEXTS):
                continue
            times = len(captions[number]) if manifest.per_caption(part) else manifest.rows_of(part)
            start = caption if manifest.per_caption(part) else number * times
            taken = found[ROWS][start : start + times]
            body = taken.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            yield f"{stem}.{part}.npy", _npy_header(_NPY[taken.dtype], *taken.shape) + body
        caption += len(captions[number])


@lru_cache(maxsize=1024)
def _npy_header(descr: str, rows: int, width: int) -> bytes:
    out = io.BytesIO()
    values = {"descr": descr, "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(out, values)
    return out.getvalue()


def read_meta(stream: Any, shown: object) -> dict[str, Any]:
    """The content of `__store__.json` of an uncompressed tar, read from its beginning. Raises DamagedChunk."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            member = tar.next()
            file = None if member is None or member.name != META else tar.extractfile(member)
            if file is None:
                raise DamagedChunk.at(shown, f"is no tar of features (it does not begin with {META})")
            found: dict[str, Any] = json.loads(file.read())
            return found
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DamagedChunk.at(shown, f"is damaged ({error})") from error


def unpack(path: Path, out: Path, shown: str, monitor: Monitor | None = None) -> None:
    """Write the chunks of an uncompressed tar to one file, each chunk at a whole page.

    Every chunk is compared with the CRC-32 that was noted when the tar was packed.

    Raises:
        DamagedChunk: a chunk is not what it was, or the tar is damaged.
        OSError: the disk is full.
    """
    monitor = monitor or Monitor()
    with open(path, "rb") as stream:
        meta = read_meta(stream, shown)
    shard = Shard(path)
    try:
        if shard.index.fault is not None:
            raise DamagedChunk.at(shown, f"is damaged ({shard.index.fault})")
        with open(out, "wb") as file:
            for chunk in range(-(-meta["samples"] // meta["chunk_rows"])):
                for buffers in _rebuilt(shard, meta, chunk, shown):
                    for buffer in buffers:
                        file.write(buffer)
                    file.write(bytes(-file.tell() % BLOCK))
                    monitor.received(file.tell())
    except (LookupError, TypeError, ValueError, ArithmeticError, Dropped) as error:
        raise DamagedChunk.at(shown, f"is damaged ({error})") from error
    finally:
        shard.close()


def _rebuilt(shard: Shard, meta: dict[str, Any], chunk: int, shown: str) -> Iterator[list[Any]]:
    """The files of the chunks of all parts, as buffers."""
    parts, views, size = meta["parts"], max(meta["views"], 1), meta["chunk_rows"]
    keys, captions, reasons = [], [], []
    dtype = sample_dtype(meta["views"], meta["paths"])
    refs = shard.index.samples[chunk * size : min((chunk + 1) * size, meta["samples"])]
    rows = np.zeros(len(refs), dtype)
    bodies: dict[str, bytearray] = {part: bytearray() for part in parts}
    for number, ref in enumerate(refs):
        members = shard.load(ref)
        values = json.loads(members["sample.json"])
        keys.append(values["key"])
        reasons.append(values["reason"])
        captions.append(json.loads(members["captions.json"]))
        for name in dtype.names or ():
            rows[name][number] = values[name]
        for part, info in parts.items():
            count = {"caption": len(captions[-1]), "view": views}.get(info["rows_per"], 1)
            data = members[f"{part}.npy".lower()]
            header = _npy_header(_NPY[DTYPES[info["dtype"]]], count, stored_width(info["width"], info["dtype"]))
            if not data.startswith(header):
                raise DamagedChunk.at(shown, f"is damaged ({ref.key}.{part}.npy has another shape)")
            bodies[part] += memoryview(data)[len(header) :]
    tensors: dict[str, dict[str, torch.Tensor]] = {
        SAMPLES: {ROWS: torch.from_numpy(rows.view(np.uint8).reshape(len(rows), dtype.itemsize))},
        TEXTS: chunks.texts_tensors(keys, captions, reasons),
    }
    for part, info in parts.items():
        kind, width = DTYPES[info["dtype"]], stored_width(info["width"], info["dtype"])
        flat = torch.frombuffer(bodies[part], dtype=kind) if bodies[part] else torch.empty(0, dtype=kind)
        tensors[part] = {ROWS: flat.reshape(-1, width)}
    for part, found in tensors.items():
        chunk_id = ChunkID(part, meta["source"], meta["shard"], chunk, meta["samples"])
        more = {ORIGIN: meta[ORIGIN][part], **({KEYS: chunk_digest(keys)} if part == TEXTS else {})}
        buffers = chunks.render(chunk_id, found, more)
        if json.loads(buffers[0][8:])["__metadata__"][CRC] != meta[CRC][part][chunk]:
            raise DamagedChunk.at(shown, f"is damaged (chunk {chunk} of part {part} has another CRC-32)")
        yield buffers


@dataclass(frozen=True)
class Unpacked:
    """A file that `unpack` wrote."""

    path: Path
    shown: str  # the tar's name in messages

    def offsets(self, handle: int) -> dict[tuple[str, int], int]:
        """(part, chunk) -> offset in the open file."""
        found, offset, size = {}, 0, os.fstat(handle).st_size
        while offset < size:
            header = chunks.read_header(handle, self.shown, offset)
            found[header.id.part, header.id.chunk] = offset
            offset += len(header.raw) + header.body_bytes
            offset += -offset % BLOCK
        return found
