"""store.json: what a store holds, and the names of its files.

    store.json                                the manifest of a complete store
    draft.json                                the manifest of what is being written
    PART/SOURCE/00003-0001.safetensors        samples [1 * chunk_rows, 2 * chunk_rows) of shard 3
    model/                                    the model whose towers made the parts `image` and `text`

Samples of a shard keep the shard's order, those that were dropped included. Zstd adds `.zst` to the names.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, InstanceOf

from clipstream.errors import SettingsError
from clipstream.features.codec import DTYPES, FEATURE_DTYPES, row_bytes
from clipstream.text import file_name
from clipstream.utils.section import checked

VERSION = 1
STORE, DRAFT, MODEL = "store.json", "draft.json", "model"
CRC = "crc32"  # key in the file: checksum of all other values
SAMPLES, TEXTS, IDS, IMAGE, TEXT = "samples", "texts", "ids", "image", "text"
CHUNK_ROWS = 8192  # default samples of a chunk
ROWS_MULTIPLE = 4096  # of chunk_rows: rows of any width then fill whole pages
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
        """Bytes of a stored row."""
        return row_bytes(self.width, self.dtype)


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
        """Number of chunks of each part."""
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
        """Whether the part has a row for each caption."""
        return part in self.parts and self.parts[part].rows_per == "caption"

    def chunk_samples(self, samples: int, chunk: int) -> int:
        """Samples of a chunk of a shard that has `samples`."""
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
        """Path of a chunk's file below the store."""
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

    def to_json(self) -> dict[str, Any]:
        """As nested dictionaries and lists."""
        return asdict(self)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        values = json.loads(json.dumps(self.to_json()))  # keys are texts then, as they are when they are read
        return json.dumps({**values, CRC: _checksum(values)}, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path, shown: str = "") -> Manifest:
        """The manifest in a file.

        Args:
            shown: the file's name in messages.

        Raises:
            OSError: the file cannot be read.
            SettingsError: it has another format version, or is damaged.
        """
        shown = shown or str(path)
        try:
            values = json.loads(path.read_bytes())
            if values["version"] != VERSION:
                raise SettingsError(
                    f"{shown} has feature store format {values['version']}, and this clipstream reads format "
                    f"{VERSION}: precompute the features again into another folder"
                )
            if values.pop(CRC) != _checksum(values):
                raise ValueError("its content has changed since it was written")
            found = checked(cls, values)
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
    """Folder of a part's chunks of a source, below the store."""
    return f"{file_name(part)}/{file_name(source)}"


def sample_dtype(views: int, paths: int) -> np.dtype[np.void]:
    """The row of a sample in the part `samples`, packed.

    Fields: `used` (0: the sample was dropped), `pictures` (checksum, as in Batch.pictures), `start` (the sample's first
    caption row in the chunk), `counts` [paths] (texts of each caption path; rows follow each other in this order), and
    `views` [K] (key of the SampleRNG of each augmented view).
    """
    counts, keys = ("counts", "<i4", (paths,)), ("views", "<u8", (views,))
    return np.dtype([("used", "u1"), ("pictures", "<i8"), ("start", "<i8"), counts, keys])


def keys_digest(keys: Iterable[str], chunk_rows: int) -> str:
    """Digest of the keys of a shard's samples, in order; that of the empty list is ''."""
    found = list(keys)
    return joined_digest(chunk_digest(found[at : at + chunk_rows]) for at in range(0, len(found), chunk_rows))


def chunk_digest(keys: Iterable[str]) -> str:
    """Digest of the keys of a chunk."""
    text = "".join(f"{len(key)}:{key}" for key in keys)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def joined_digest(digests: Iterable[str]) -> str:
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
            found.append(f"{name}: {_shown(old)} -> {_shown(new)}")
    return found


def _plain(value: object) -> object:
    """As JSON has it: tuples are lists."""
    return json.loads(json.dumps(value))


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
