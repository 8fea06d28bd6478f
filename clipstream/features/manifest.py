"""The files of a feature store: store.json, which tells what it holds, chunk files, and the encoding of their rows.

    store.json                                the manifest of a complete store
    draft.json                                the manifest of what is being written
    PART/SOURCE/00003-0001.safetensors        samples [1 * chunk_rows, 2 * chunk_rows) of shard 3
    model/                                    the model whose towers made the parts `image` and `text`

Samples of a shard keep the shard's order, those that were dropped included. Zstd adds `.zst` to the names.

A chunk file is a safetensors file whose body begins at a whole page, with a CRC-32 of its header and body. Any changed
byte is found: the header has to be, byte for byte, the one that its own content gives, and the CRC-32 in its metadata
covers the rest of the header and the body.

Rows are L2-normalised features in float32, float16, bfloat16, or int8 with a scale for each row, or token ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, InstanceOf

from clipstream.errors import DataError, SettingsError
from clipstream.features import CHUNK_ROWS, ROWS_MULTIPLE
from clipstream.text import file_name
from clipstream.utils.atomic_write import BLOCK, note_input, tensors_header
from clipstream.utils.atomic_write import DTYPES as SAFETENSORS
from clipstream.utils.section import parse_as

SCALE_BYTES = 4  # of the float32 scale at the end of an int8 row
FEATURE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
ID_DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
DTYPES = {**FEATURE_DTYPES, **ID_DTYPES}


def stored_width(width: int, dtype: str) -> int:
    """Elements of a stored row of `width` features or ids: those, and the scale of an int8 row."""
    return width + SCALE_BYTES * (dtype == "int8")


def encode_rows(features: torch.Tensor, dtype: str) -> torch.Tensor:
    """Stored rows of features [n, D], on the same device: [n, D] of `dtype`, or int8 [n, D + 4].

    An int8 row x is round(x / scale) with scale = max|x| / 127, so each element is off by at most scale / 2, apart from
    float32's rounding. The last 4 bytes of the row are the scale in float32, little-endian; a row with NaN or infinity
    gets a scale that is not finite.
    """
    if dtype != "int8":
        return features.to(FEATURE_DTYPES[dtype])
    values = features.float()
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    # Of a row of zeros, and of one so small that its scale underflows, all elements are 0.
    quantised = torch.where(scale > 0, values / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([quantised, _copy(scale).view(torch.int8)], dim=1)


def decode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Features float32 [n, D] of rows that `encode_rows` made, on the same device; float32 rows are returned as is."""
    if rows.dtype != torch.int8:
        return rows.float()
    return rows[:, :-SCALE_BYTES].float() * _scale(rows)


def is_finite(rows: torch.Tensor) -> bool:
    """Whether stored rows of features hold no NaN and no infinity."""
    if rows.dtype == torch.int8:
        rows = _scale(rows)
    return bool(torch.isfinite(rows).all())


def _scale(rows: torch.Tensor) -> torch.Tensor:
    return _copy(rows[:, -SCALE_BYTES:]).view(torch.float32)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be viewed as another type; `contiguous` returns a single row as it is, at any offset."""
    return tensor.clone(memory_format=torch.contiguous_format)


VERSION = 1
STORE, DRAFT, MODEL = "store.json", "draft.json", "model"
CRC = "crc32"  # key of store.json and of the metadata of chunks: checksum of all else
SAMPLES, TEXTS, IDS, IMAGE, TEXT = "samples", "texts", "ids", "image", "text"
RERUN = "run the same `clipstream precompute` command again, which makes only what is missing"

RowsPer = Literal["sample", "view", "caption"]
# The types of the classes below are the schema of the files that are read back. InstanceOf: a shard's name may hold
# bytes that are not UTF-8, which pydantic's `str` refuses.
Text = InstanceOf[str]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
Few = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]
Weight = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class PartInfo:
    """A part with rows of features or token ids."""

    __pydantic_config__ = _CLOSED
    width: Annotated[int, Field(strict=True, ge=1, lt=1 << 24)]  # features, or token ids, of a row
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    rows_per: RowsPer
    fingerprint: dict[Text, object] = field(default_factory=dict)  # of what made the rows
    logit_scale: Weight | None = None  # of a teacher
    zstd: Flag = False

    @property
    def row_bytes(self) -> int:
        return stored_width(self.width, self.dtype) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ShardInfo:
    """A shard of a source; without its counts in a draft."""

    __pydantic_config__ = _CLOSED
    name: Text
    samples: Count = 0  # dropped ones included
    keys: Text = ""  # digest of the samples' keys, as `keys_digest` gives it
    captions: tuple[Count, ...] = ()  # caption rows of each chunk
    reason: Text = ""  # why the shard could not be opened, and has no samples
    size: Literal[0] = 0  # of format 1, as `Manifest.kind`

    def chunks(self, chunk_rows: int) -> int:
        return -(-self.samples // chunk_rows)


@dataclass(frozen=True)
class SourceInfo:
    """A source: its shards in order, and how its captions and images were read."""

    __pydantic_config__ = _CLOSED
    shards: tuple[ShardInfo, ...]
    weights: tuple[Weight, ...] | None = None  # of the caption paths, as in the caption setting
    settings: dict[Text, object] = field(default_factory=dict)  # those that captions and images depend on
    paths: Few = 1  # caption paths


@dataclass(frozen=True)
class Manifest:
    """Content of store.json."""

    __pydantic_config__ = _CLOSED
    kind: Literal["mapped"] = field(default="mapped", kw_only=True)
    sources: dict[Text, SourceInfo]
    parts: dict[Text, PartInfo]  # parts with rows; `samples` and `texts` are in every store
    chunk_rows: Annotated[int, Field(strict=True, ge=1, lt=1 << 32, multiple_of=ROWS_MULTIPLE)] = CHUNK_ROWS
    views: Few = 0  # augmented views of each image, K; 0: the image as evaluations preprocess it
    complete: Flag = False
    version: int = VERSION

    @property
    def feature_parts(self) -> list[str]:
        """The parts of features, without token ids."""
        return [name for name, part in self.parts.items() if part.dtype in FEATURE_DTYPES]

    def rows_of(self, part: str) -> int:
        """Rows of a sample in a part that has a fixed number: K or 1."""
        return max(self.views, 1) if part in self.parts and self.parts[part].rows_per == "view" else 1

    def per_caption(self, part: str) -> bool:
        return part in self.parts and self.parts[part].rows_per == "caption"

    def chunk_samples(self, samples: int, chunk: int) -> int:
        return min(self.chunk_rows, samples - chunk * self.chunk_rows)

    def chunk_part_rows(self, part: str, source: str, shard: int, chunk: int) -> int:
        """Rows of a chunk of a part of a complete store."""
        info = self.sources[source].shards[shard]
        if self.per_caption(part):
            return info.captions[chunk]
        return self.chunk_samples(info.samples, chunk) * self.rows_of(part)

    def row_bytes(self, part: str, source: str) -> int:
        """Bytes of a row of a part, of `samples` too."""
        if part == SAMPLES:
            return sample_dtype(self.views, self.sources[source].paths).itemsize
        return self.parts[part].row_bytes

    def chunk_path(self, part: str, source: str, shard: int, chunk: int) -> str:
        suffix = ".zst" if part in self.parts and self.parts[part].zstd else ""
        return f"{part_folder(part, source)}/{shard:05d}-{chunk:04d}.safetensors{suffix}"

    def chunk_meta(self, part: str, source: str, shard: int, chunk: int, samples: int | None) -> dict[str, str]:
        """Metadata of a chunk's header: which chunk it is, and a digest of what made its part of the source.

        Args:
            samples: of the shard; left out if None.
        """
        info, read = self.parts.get(part), self.sources[source]
        made = None if info is None else (info.fingerprint, info.width, info.dtype, info.rows_per)
        text = json.dumps([made, read.settings, read.weights, read.paths, self.views], sort_keys=True)
        origin = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        values = {"part": part, "source": source, "shard": shard, "chunk": chunk, "samples": samples, "origin": origin}
        return {name: str(value) for name, value in values.items() if value is not None}

    def to_bytes(self) -> bytes:
        values = json.loads(json.dumps(asdict(self)))  # keys are texts then, as they are when they are read
        return json.dumps({**values, CRC: _checksum(values)}, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path, shown: str = "") -> Manifest:
        """The manifest in a file.

        Raises:
            OSError: the file cannot be read.
            SettingsError: it has another format version, or is damaged.
        """
        shown = shown or str(path)
        note_input(path)
        try:
            values = json.loads(path.read_bytes())
            if values["version"] != VERSION:
                raise SettingsError(
                    f"{shown} has feature store format {values['version']}, and this clipstream reads format "
                    f"{VERSION}: precompute the features again into another folder"
                )
            if values.pop(CRC) != _checksum(values):
                raise ValueError("its content has changed since it was written")
            found = parse_as(cls, values)
            found._check()
            return found
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SettingsError(
                f"the feature store is damaged: {shown}: {' '.join(str(error).split())}: {RERUN}"
            ) from error

    def _check(self) -> None:
        """Raise ValueError: values contradict each other."""
        if odd := [name for name, part in self.parts.items() if (name == IDS) == (part.dtype in FEATURE_DTYPES)]:
            raise ValueError(f"part {odd[0]!r} cannot have dtype {self.parts[odd[0]].dtype}")
        for name, source in self.sources.items():
            if source.weights is not None and len(source.weights) != source.paths:
                raise ValueError(f"source {name!r} has {len(source.weights)} weights of {source.paths} caption paths")
            for shard in source.shards:
                if len(shard.captions) != (count := shard.chunks(self.chunk_rows)):
                    raise ValueError(f"shard {shard.name!r} has captions of {len(shard.captions)} of {count} chunks")

    def without_counts(self) -> Manifest:
        """The draft of this store: shards by name alone."""
        sources = {
            name: replace(source, shards=tuple(ShardInfo(shard.name) for shard in source.shards))
            for name, source in self.sources.items()
        }
        return replace(self, sources=sources, complete=False)


def _checksum(values: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def part_folder(part: str, source: str) -> str:
    return f"{file_name(part)}/{file_name(source)}"


def sample_dtype(views: int, paths: int) -> np.dtype[np.void]:
    """The row of a sample in the part `samples`, packed.

    Fields: `used` (0: the sample was dropped), `pictures` (as Batch.checksums), `start` (the sample's first
    caption row in the chunk), `counts` [paths] (texts of each caption path; rows follow each other in this order), and
    `views` [K] (key of the SampleRNG of each augmented view).
    """
    counts, keys = ("counts", "<i4", (paths,)), ("views", "<u8", (views,))
    return np.dtype([("used", "u1"), ("pictures", "<i8"), ("start", "<i8"), counts, keys])


def keys_digest(keys: Iterable[str], chunk_rows: int) -> str:
    """Digest of the keys of a shard's samples, in order; that of the empty list is ''."""
    found = list(keys)
    return join_digests(chunk_digest(found[at : at + chunk_rows]) for at in range(0, len(found), chunk_rows))


def chunk_digest(keys: Iterable[str]) -> str:
    text = "".join(f"{len(key)}:{key}" for key in keys)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def join_digests(digests: Iterable[str]) -> str:
    """Digest of a shard, of those of its chunks."""
    text = "".join(digests)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def differences(stored: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """`NAME: OLD -> NEW` for each name whose value differs or is missing; nested names are joined by dots."""
    found = []
    for name in sorted({*stored, *now}):
        old, new = stored.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [f"{name}.{text}" for text in differences(old, new)]
        elif _plain(old) != _plain(new):
            found.append(f"{name}: {_shorten(old)} -> {_shorten(new)}")
    return found


def _plain(value: object) -> object:
    """As JSON has it: tuples are lists."""
    return json.loads(json.dumps(value))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


ROWS = "rows"
KEYS = "keys"  # metadata of a chunk of `texts`: digest of its keys
MAX_HEADER = 1 << 20  # bytes
PIECE = 1 << 20  # bytes read at once; they stay in the processor's cache until they are summed
_DTYPES = {name: getattr(torch, dtype) for dtype, name in SAFETENSORS.items()}
_Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class DamagedChunk(DataError):
    """A chunk is missing, truncated, changed, or another one."""


def damaged_chunk(path: object, reason: str) -> DamagedChunk:
    return DamagedChunk(f"the feature store is damaged: {path}: {reason}: {RERUN}")


@dataclass(frozen=True)
class Header:
    """The parsed header of a chunk file."""

    meta: dict[str, str]
    layout: _Layout
    size: int  # bytes of the header

    @property
    def samples(self) -> int:
        """Samples of the shard that the chunk belongs to."""
        return int(self.meta["samples"])

    @property
    def captions(self) -> int:
        """Captions of a chunk of the part `texts`."""
        return self.layout["text_ends"][1][0]

    @property
    def body_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.layout.values())

    def expect(self, meta: Mapping[str, str], path: object) -> None:
        """Raise DamagedChunk unless the header has all of `meta`, as `Manifest.chunk_meta` gives it."""
        if wrong := [name for name, value in meta.items() if self.meta.get(name) != value]:
            raise damaged_chunk(path, f"it is a chunk of another store, part or shard ({', '.join(wrong)} differ)")


def render(meta: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """The file as buffers, header first; the same content gives the same bytes."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    bodies = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    crc = zlib.crc32(tensors_header(meta, layout))
    for body in bodies:
        crc = zlib.crc32(body, crc)
    return [tensors_header({**meta, CRC: f"{crc:08x}"}, layout), *bodies]


@contextlib.contextmanager
def open_chunk(path: Path, shown: object) -> Iterator[BinaryIO]:
    """An open chunk file, unbuffered. Raises DamagedChunk: it is missing, or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise damaged_chunk(shown, error.strerror or "it cannot be read") from error


def read_header(file: BinaryIO, shown: object) -> Header:
    """The header of an open chunk file, checked except for its CRC. Raises DamagedChunk."""
    raw = file.read(BLOCK)
    length = 8 + int.from_bytes(raw[:8], "little")
    if BLOCK < length <= MAX_HEADER:
        raw += file.read(length - BLOCK)
    try:
        values = json.loads(raw[8:])
        meta = values.pop("__metadata__")
        layout = {name: (_DTYPES[item["dtype"]], tuple(item["shape"])) for name, item in values.items()}
        same = tensors_header(meta, layout) == raw and all(type(value) is str for value in meta.values())
        sizes = [int(meta["samples"]), *(size for _, shape in layout.values() for size in shape)]
        same = same and all(type(size) is int and 0 <= size < 1 << 40 for size in sizes)
        if meta["part"] == TEXTS:
            _ = meta[KEYS], layout["text_ends"][1][0]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        same = False
    if not same:
        raise damaged_chunk(shown, "its header cannot be read")
    return Header(meta, layout, length)


def verify(file: BinaryIO, shown: object) -> Header:
    """The header of an open chunk file, after its CRC-32 was checked.

    The file is read and not mapped: a failing disk raises OSError instead of killing the process.

    Raises DamagedChunk, OSError.
    """
    header = read_header(file, shown)
    crc = zlib.crc32(tensors_header({name: value for name, value in header.meta.items() if name != CRC}, header.layout))
    left, piece = header.body_bytes, memoryview(bytearray(PIECE))
    while left and (count := file.readinto(piece[: min(PIECE, left)])):  # type: ignore[attr-defined]
        crc = zlib.crc32(piece[:count], crc)
        left -= count
    if left or f"{crc:08x}" != header.meta.get(CRC):
        raise damaged_chunk(shown, "it is truncated" if left else "its CRC-32 is wrong")
    return header


def texts_tensors(keys: Sequence[str], captions: Sequence[Sequence[str]], reasons: Sequence[str]) -> dict[str, Any]:
    """The tensors of a chunk of the part `texts`: for each sample its key, captions, and why it was dropped or ''."""
    texts = [text for own in captions for text in own]
    tensors: dict[str, torch.Tensor] = {"counts": torch.tensor([len(own) for own in captions], dtype=torch.int64)}
    bodies = {}
    for name, items in (("key", keys), ("text", texts), ("reason", reasons)):
        raw = [item.encode("utf-8", "surrogatepass") for item in items]
        tensors[f"{name}_ends"] = torch.tensor([len(item) for item in raw], dtype=torch.int64).cumsum(0)
        joined = bytearray(b"".join(raw))
        bodies[f"{name}s"] = (
            torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        )
    return {**tensors, **bodies}  # int64 first: all tensors are aligned to their item size


def strings(tensors: Mapping[str, torch.Tensor], name: str) -> list[str]:
    """The keys ('key'), captions ('text') or reasons ('reason') of a chunk of the part `texts`."""
    data = tensors[f"{name}s"].numpy().tobytes()
    ends = tensors[f"{name}_ends"].tolist()
    return [str(data[a:b], "utf-8", "surrogatepass") for a, b in zip([0, *ends[:-1]], ends, strict=False)]


def captions_of(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The captions of each sample of a chunk of the part `texts`."""
    texts = iter(strings(tensors, "text"))
    return [[next(texts) for _ in range(count)] for count in tensors["counts"].tolist()]
