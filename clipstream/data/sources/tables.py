"""Tables (CSV, TSV, JSONL, JSON, Parquet, Arrow) as a source type: a row is a sample, a block of rows is a shard.

A table is converted once, in row order, into an Arrow file that all processes of a node map into memory, so that rows
are found by number. Text is kept as the bytes of the table and rows of JSON as they are: a broken row costs that row
alone, when it is read. Images are read from the files or the bytes that a row holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipstream.data.decode.captions import json_object, split_keys
from clipstream.data.decode.sample_profile import CAPTION_NAMES, SHORT_FLAGS
from clipstream.data.json_path import structure
from clipstream.data.source_settings import CSV_CAPTION, IMAGE_KEY, SourceSettings, TextCaption
from clipstream.data.sources import MISSING_IMAGE, OpenShard, SourceContext, SourceType
from clipstream.data.sources.file_names import COLUMNS, IMAGE_NAMES, SPLITS, TRAIN, split_of_cell, splits_to_read
from clipstream.data.sources.table_rows import FAULT, RAW, RowKeys, to_arrow
from clipstream.errors import DataError, Dropped, SettingsError, ShardError, did_you_mean
from clipstream.storage.backends import Monitor
from clipstream.storage.download import Guard
from clipstream.storage.shard_cache import ShardCache, cache_root
from clipstream.storage.shard_url import ShardURL, redact, table_format
from clipstream.storage.tar import Place, SampleRef, ShardIndex
from clipstream.text import counted, listed, printable
from clipstream.utils import content
from clipstream.utils.content import HEAD, IMAGE_NAME, TEXTS, describe, kind
from clipstream.utils.logs import logger
from clipstream.utils.section import part

BLOCK = 1000  # most rows of a shard
BLOCKS = 192  # fewest shards of a source with at least as many rows
FORM = 5  # of the Arrow files, part of their identity: those of another form are written anew
LOOKED = 16  # record batches by which it is decided whether rows are of several splits
LONGEST_PATH = 4096  # characters, of Linux
ARCHIVE = re.compile(r"(?i)\.(?:zip|7z|rar|tar|tgz|tar\.\w+)(?:\.\d+|\.part\w+)?$")
VALUE = "; the text of a value, not a path: write the bytes as Parquet, or files and their paths"
DOWNLOAD = "the images of a table must be files: download them first (img2dataset)"
URLS = ("url", "urls", "image_url", "img_url", "image_link")  # columns of addresses in place of files
_PLAIN = re.compile(r"[\w./-]+\.\w+")  # a path that can mean one file


@part(SourceSettings, "table")
class TableSource(SourceType):
    """The blocks of rows of tables, named `TABLE#FIRST-LAST`. Listing reads the tables."""

    cheap = columns = has_files = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self._settings, self._context = settings, context
        self._keys = split_keys(settings.image_key)
        self._arrows: dict[str, Path] = {}
        self._folders: dict[str, str] = {}  # table -> what its relative paths start from
        self._blocks: dict[str, tuple[str, Sequence[int]]] = {}
        self._usual: dict[str, dict[str, str]] = {}  # table -> its columns of usual names, see `usual_columns`
        self._images: dict[str, Collection[str]] = {}  # table -> columns that may have the image
        self._splits: list[str] = []  # in words, of the tables of which only the rows of a split are read
        shards = settings.shards
        self._rows = {url: self._read(url) for url in dict.fromkeys([shards] if isinstance(shards, str) else shards)}
        self._block = max(1, min(BLOCK, -(-sum(map(len, self._rows.values())) // BLOCKS)))

    def list_shards(self, spec: str) -> Sequence[str]:
        rows = self._rows[spec]
        blocks = [rows[first : first + self._block] for first in range(0, len(rows), self._block)]
        self._blocks |= (named := {f"{spec}#{block[0]}-{block[-1]}": (spec, block) for block in blocks})
        return list(named)

    def open(self, shard: str) -> OpenShard:
        url, rows = self._blocks[shard]
        return RowShard(self._arrows[url], rows, self._images[url], self._folders[url], self._usual[url])

    def describe(self, shards: Sequence[str]) -> str:
        usual = {f"{member} from column {name}": 0 for one in self._usual.values() for member, name in one.items()}
        told = ", ".join([*usual, *self._splits])
        return counted(len(self._rows), "manifest", ",") + (f" ({told})" if told else "")

    def num_samples(self, shard: str) -> int:
        return len(self._blocks[shard][1])

    def keys(self, shard: str) -> Container[str]:
        return RowKeys(self._rows[self._blocks[shard][0]])

    def title(self, shard: str) -> str:
        return redact(self._blocks[shard][0])

    def _read(self, url: str) -> Sequence[int]:
        """Write the table's Arrow file if there is none; the numbers of the rows to read.

        Raises DataError: the table cannot be read, or no column holds images.
        """
        settings, key, cache = self._settings, self._context.key, self._context.cache
        try:
            rows = ShardCache(cache or str(cache_root() / "manifests"))
        except SettingsError as error:
            if cache is not None:
                raise
            raise SettingsError(f"{error}: set another folder with --data.cache or CLIPSTREAM_CACHE") from error
        try:
            if (named := ShardURL(url).path) is None:
                version = content.file_digest(_local(url, cache))
            else:
                state = content.file_state(named) or content.file_state(_local(url, cache))
                version = f"{Path(named).absolute()}:{state}"
            identity = ":".join(map(str, [version, settings.separator, settings.quoting, FORM]))

            def fill(part: Path, monitor: Monitor) -> None:
                logger.info(f"reading {printable(redact(url))} once, into {rows.folder}")
                guard = Guard(monitor, ShardURL(url), part, sys.maxsize, tar=False)
                to_arrow(_local(url, cache), url, part, settings.separator, settings.quoting, guard.receive)
                if named is not None and content.file_state(named) != state:
                    raise ShardError("changed", "it was written while it was read: run the command again")

            arrow = self._arrows[url] = rows.get_or_make(f"{url}#rows", identity, fill)
        except (ShardError, OSError) as error:
            raise DataError(f"{key}.shards: {redact(url)}: {error}") from error
        own = os.path.dirname(named or "") if settings.folder is None else settings.folder
        names, is_csv = columns(arrow), table_format(url) == "csv"
        usual = self._usual[url] = usual_columns(names, settings, partial(_is_image, arrow), is_csv)
        keys = self._images[url] = (usual["image"],) if "image" in usual else self._keys
        urls = [name for name in names if name in (URLS if not set(names) & set(keys) else keys)]
        if _are_addresses(arrow, urls):
            told = f"the images are addresses (column {urls[0]}): download them with img2dataset"
            raise DataError(f"{key}.shards: {redact(url)}: {told}")
        if not set(names) & set(keys):
            with open(_local(url, cache), "rb") as file:
                head = file.read(HEAD)
            what = "" if kind(head) in (None, *TEXTS, "Parquet", "Arrow") else f"it is {describe(head)}; "
            if is_csv and any(map(IMAGE_NAME.search, names)):
                what = "the header is missing: insert a line such as filepath,title; "
            if "image_ids" in names or any(map(content.is_base64, names)):
                what = (
                    "as Chinese-CLIP has it, images and texts are two tables, joined by image_ids: write one with a "
                    "row for each pair and a header, e.g. image (the base64 text) and title; "
                )
            if urls:
                what = f"the images are addresses (column {urls[0]}): download them with img2dataset; "
            seen = listed([printable(name, 60) for name in names], 20) or "no columns"
            flag = "--image-key" if key == SHORT_FLAGS else f"--{key}.image-key"
            raise DataError(
                f"{key}.shards: {redact(url)}: {what}no column has images: looked for {', '.join(self._keys)} among "
                f"{seen} (the first row of a CSV, or the keys of a JSON object); set the "
                f"column of image paths with {flag}{did_you_mean(self._keys[0], names)}"
            )
        # Relative paths start from the setting, the table's folder, or the working folder if only it fits.
        folders = [own, ""] if settings.folder is None else []
        self._folders[url] = next((folder for folder in folders if _finds_image(arrow, keys, folder)), own)
        held = [name for name in keys if name in names]
        there = any(_is_image(arrow, name) or _finds_image(arrow, (name,), self._folders[url]) for name in held)
        if other := "" if there else next((one for one in names if one not in keys and _is_image(arrow, one)), ""):
            told = f"column {held[0]} has no name of an image, but {printable(other)} has: set --image-key to it"
            logger.warning(f"{redact(url)}: {told}")
        return self._of_split(arrow, names, held)

    def _of_split(self, arrow: Path, names: Sequence[str], images: Sequence[str]) -> Sequence[int]:
        """The rows of a table that are read: all, or where a column tells of splits, those of one, as of folders."""
        last = (reader := open_mapped(arrow)).num_record_batches - 1
        spread = sorted({last * part // LOOKED for part in range(LOOKED + 1)})
        for name in [one for one in (*COLUMNS, *images[:1]) if one in names]:
            find = split_of_cell(list(cells(arrow, name, spread)), name in images)
            if find is None:
                continue
            found = np.array([SPLITS.index(find(cell) or TRAIN) for cell in cells(arrow, name, range(last + 1))])
            split = next(one for one in splits_to_read(self._context.evaluates) if SPLITS.index(one) in found)
            rows: Sequence[int] = np.flatnonzero(found == SPLITS.index(split))  # type: ignore[assignment]
            self._splits.append(f"split {split}, {len(rows):,} of {len(found):,} rows, by column {name}")
            return rows
        return range(int(last * len(reader.get_batch(0)) + len(reader.get_batch(last))))


def usual_columns(
    names: Sequence[str], source: SourceSettings, is_image: Callable[[str], bool], is_csv: bool
) -> dict[str, str]:
    """Member (`image`, `txt`) -> the column of a usual name that is read as it: where settings are the defaults, and
    a table with the columns `names` has none that they name. Of a CSV, `title` is first, also if a folder names it.

    Args:
        is_image: whether a column has images or their paths.
    """
    image = text = None
    if source.image_key == IMAGE_KEY and not set(names) & set(split_keys(IMAGE_KEY)):
        image = next((name for name in IMAGE_NAMES if name in names and is_image(name)), None)
    caption = getattr(source.caption, "of", source.caption)  # `AnyCaption` of a search
    read = caption.key if isinstance(caption, TextCaption) else ""
    if is_csv and read == "txt" and "title" in names and "key" not in caption.model_fields_set:
        text = "title"
    elif read in ("txt", CSV_CAPTION) and not set(names) & set(split_keys(read)):
        text = next((name for name in CAPTION_NAMES if name in names), None)
    if is_csv and "caption" in names and (text == "title" or (read == CSV_CAPTION and "title" in names)):
        logger.warning("the column title is read, as open_clip does; for the column caption: --caption-key caption")
    return {member: name for member, name in (("image", image), ("txt", text)) if name is not None}


def _is_image(arrow: Path, name: str) -> bool:
    """Whether the first row has an image, or a path with the suffix of one, in a column."""
    for keys in ((name,), ()):  # the file that is named may not be there
        with contextlib.suppress(Dropped):
            data = RowShard(arrow, range(1), keys, "").load(SampleRef("0"), (name,)).get(name, b"")
            return kind(data[:HEAD]) in content.IMAGES or bool(IMAGE_NAME.search(data[-HEAD:].decode(errors="replace")))
    return False


def _are_addresses(arrow: Path, names: Sequence[str]) -> bool:
    """Whether the first row has no image, but the address of one."""
    try:
        RowShard(arrow, range(1), names, "").load(SampleRef("0"), names)
    except Dropped as drop:
        return drop.detail.endswith(DOWNLOAD)
    return False


def _finds_image(arrow: Path, keys: Collection[str], folder: str) -> bool:
    """Whether the image of the first row is found from this folder."""
    with contextlib.suppress(Dropped):
        return bool(RowShard(arrow, range(1), keys, folder).load(SampleRef("0"), keys))
    return False


def _local(url: str, cache: str | None) -> Path:
    """The table as a local, unpacked file; without a cache it is downloaded or unpacked once per process."""
    return _downloads(cache).local(url, tar=False)


@lru_cache(maxsize=8)
def _downloads(cache: str | None) -> ShardCache:
    """The cache for remote and compressed tables, for the life of the process."""
    return ShardCache(cache)


@lru_cache(maxsize=256)
def open_mapped(arrow: Path) -> pa.RecordBatchFileReader:
    """The reader of the memory-mapped file, one per process; a fork shares its parent's."""
    return pa.ipc.open_file(pa.memory_map(str(arrow)))


def columns(arrow: Path) -> list[str]:
    """Names of the columns; for rows of JSON, of the fields in the first batch."""
    reader = open_mapped(arrow)
    names = [name for name in reader.schema.names if name != FAULT]
    if names != [RAW]:
        return names
    seen: dict[str, None] = {}
    for raw in reader.get_batch(0).column(0):
        seen.update(dict.fromkeys(_fields(raw.as_py())))
    return list(seen)


def cells(arrow: Path, name: str, batches: Iterable[int]) -> Iterator[str]:
    """The texts in a column, of these record batches; '' for other values."""
    for batch in map(open_mapped(arrow).get_batch, batches):
        if batch.schema.names == [RAW]:
            values: list[object] = [_fields(raw).get(name) for raw in batch.column(0).to_pylist()]
        else:
            column = batch.column(name)
            is_text = FAULT in batch.schema.names or str(column.type) in ("string", "large_string", "string_view")
            values = column.cast(pa.binary()).to_pylist() if is_text else [None] * len(column)
        for value in values:
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            yield text if isinstance(text, str) else ""


class _Refs(Sequence[SampleRef]):
    """References to rows, made on access; the key of a row is its number in the table."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return _Refs(self._rows[number]) if isinstance(number, slice) else SampleRef(str(self._rows[number]))


class RowShard(OpenShard):
    """A block of rows.

    Args:
        arrow: the file of all rows of the table.
        rows: those of this shard.
        keys: columns that may hold the path or the bytes of the image; the first one present is taken.
        folder: what relative paths start from.
        usual: member -> the column that it is read from as well.
    """

    def __init__(
        self,
        arrow: Path,
        rows: Sequence[int],
        keys: Collection[str],
        folder: str,
        usual: Mapping[str, str] | None = None,
    ) -> None:
        self._arrow, self._keys, self._folder, self._usual = arrow, keys, folder, usual or {}
        self._reader = open_mapped(arrow)
        self._names, self._each = self._reader.schema.names, len(self._reader.get_batch(0))  # rows of a batch
        self.index = ShardIndex(_Refs(rows))
        self._paths: tuple[int, list[Any]] = -1, []  # number of a batch, and what its column of images has

    def load(
        self, ref: SampleRef, suffixes: Collection[str] | None = None, read: Callable[[str], bytes] = content.read_file
    ) -> dict[str, bytes]:
        """The columns of a row by name; `json` is the whole row. `read` reads the file of an image.

        Raises Dropped: `row_fields`, `json_invalid`, `json_not_object`, `missing_picture`.
        """
        number = int(ref.key)
        batch, row = self._reader.get_batch(number // self._each), number % self._each
        wanted = {*self._names, "json"} if suffixes is None else set(suffixes)
        wanted |= {column for member, column in self._usual.items() if member in wanted}
        raw: bytes | None = None
        values: dict[str, object] = {}
        if self._names == [RAW]:
            raw = batch.column(0)[row].as_py()
            values = _object(raw)
        else:
            for name in self._names:
                if name in wanted or "json" in wanted or name == FAULT:
                    values[name] = _value(batch.column(name)[row])
            if fault := values.pop(FAULT, None):
                raise Dropped("row_fields", str(fault))
        found = self._image(values, read)
        for name, value in values.items():
            missing = value is None or value != value  # NaN: what pandas makes of a missing value
            if missing or name in self._keys or (suffixes is not None and name not in wanted):
                continue
            if isinstance(value, (bool, int, float, list, dict)):
                value = json.dumps(value, default=content.plain)
            # Half a character is found with the caption.
            found[name] = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        if "json" in wanted and "json" not in values:
            # The whole row as a JSON object; bytes that are not text, such as images, are null.
            found["json"] = json.dumps(values, default=content.plain).encode() if raw is None else raw
        return found | {member: found[column] for member, column in self._usual.items() if column in found}

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """All members; where the image file cannot be read, its path as a member."""
        try:
            return self.load(ref)
        except Dropped as drop:
            if drop.reason != MISSING_IMAGE:
                raise
        read = {"txt": self._usual["txt"]} if "txt" in self._usual else {}
        return RowShard(self._arrow, range(0), (), "", read).load(ref)

    def place(self, ref: SampleRef, keys: Collection[str]) -> Place | None:
        """See OpenShard; None for an image in the table itself, and for one that is not there."""
        found = self.files(ref)[-1:]
        return Place(found[0]) if found and os.path.exists(found[0]) else None

    def files(self, ref: SampleRef) -> list[str]:
        batch, row = divmod(int(ref.key), self._each)
        if batch != self._paths[0]:
            there = [name for name in self._keys if name in self._names]
            held = self._reader.get_batch(batch)
            self._paths = batch, held.column(there[0]).to_pylist() if len(there) == 1 else [None] * len(held)
        value = self._paths[1][row]
        text = os.fsdecode(value) if isinstance(value, bytes) and FAULT in self._names else value
        if isinstance(text, str) and _PLAIN.fullmatch(text):  # of many rows, `load` takes ten times as long
            return [os.path.join(self._folder, text)]
        tried: list[str] = []

        def note(path: str) -> bytes:
            tried.append(path)
            os.stat(path)
            return b""

        with contextlib.suppress(Dropped):
            self.load(ref, self._keys, note)
        return tried

    def _image(self, values: Mapping[str, object], read: Callable[[str], bytes]) -> dict[str, bytes]:
        """The member with the image, named as its column."""
        for name in self._keys:
            value = values.get(name)
            if isinstance(value, bytes) and FAULT in self._names:  # a field of a CSV is text
                value = os.fsdecode(value)
            if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
                value = structure(value) or value
            if isinstance(value, list) and not isinstance(next(iter(value), None), int):
                value = next(iter(value), None)  # the first of several
            if isinstance(value, dict):  # an image as Hugging Face's datasets store it
                value = value.get("bytes") or value.get("path")
            if isinstance(value, list):  # of the numbers of bytes, as a list<uint8>, or signed, as Java's
                with contextlib.suppress(TypeError, ValueError):
                    value = bytes(byte + 256 * (byte < 0) for byte in value)
            if not value:
                continue
            if isinstance(value, bytes):
                return {name: value}
            text = str(value)
            if content.is_base64(text):
                return {name: content.from_base64(text)}
            if (printed := content.from_repr(text)) is not None:
                return {name: printed}
            url = ShardURL(text)
            if url.path is None:
                raise Dropped(MISSING_IMAGE, f"{url}: {DOWNLOAD}")
            # As it stands, without spaces around it, of Windows, and with accents apart, as macOS has them, or not.
            clean = url.path.strip().replace("\\", "/")
            forms = (unicodedata.normalize(form, clean) for form in ("NFD", "NFC"))
            for path in dict.fromkeys((url.path, url.path.strip(), clean, *forms)):
                where = os.path.join(self._folder, os.path.expanduser(path))
                try:
                    return {name: read(where)}
                except (OSError, ValueError) as error:  # ValueError: a null byte in the path
                    fault = getattr(error, "strerror", None) or str(error)
            way_out = _way_out(text, where)
            raise Dropped(MISSING_IMAGE, f"{printable(where, 60 if way_out == VALUE else 400)}: {fault}{way_out}")
        return {}


def _way_out(text: str, where: str) -> str:
    """What to do about a cell whose image file is not there: `; ADVICE`, or ''."""
    if text.lstrip().startswith(("<", "[", "{", "(")) or len(text) > LONGEST_PATH:
        return VALUE
    if len(paths := re.findall(IMAGE_NAME.pattern.replace("$", r"(?:[;,|\s]+|$)"), text)) > 1:
        return f"; {len(paths)} paths in a cell: write a row for each"
    others = (IMAGE_NAME.sub("", where) + one for suffix in content.SUFFIXES for one in (suffix, suffix.upper()))
    if there := os.path.basename(next(filter(os.path.isfile, others), "")):
        return f"; the file's name is {there}: write that"
    folder = os.path.dirname(where)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return f"; unpack {archive}, which lies in {folder}, if it has the images" if (archive := _archive(folder)) else ""


@lru_cache(maxsize=64)
def _archive(folder: str) -> str:
    """The first archive among the files of a folder, '' without one."""
    with contextlib.suppress(OSError):
        return min(filter(ARCHIVE.search, os.listdir(folder or ".")), default="")
    return ""


def _object(raw: bytes | None) -> dict[str, object]:
    """The row's fields by name in lower case."""
    return {name.lower(): inner for name, inner in json_object(raw).items()}


def _fields(raw: bytes | None) -> dict[str, object]:
    """As `_object`; empty for a broken row."""
    with contextlib.suppress(Dropped):
        return _object(raw)
    return {}


def _value(scalar: Any) -> Any:
    """A value of Arrow for Python: maps as dict; as text what Python has no type for, as bytes what is no UTF-8."""
    if not _holds_map(scalar.type):
        try:
            return scalar.as_py()
        except Exception:  # text that is not UTF-8, nanoseconds, a time out of Python's range, …
            if hasattr(scalar, "as_buffer"):
                return scalar.as_buffer().to_pybytes()
    elif not scalar.is_valid:
        return None
    if pa.types.is_struct(scalar.type):
        return {field.name: _value(scalar[n]) for n, field in enumerate(scalar.type)}
    if pa.types.is_map(scalar.type):
        return {str(_value(pair[0])): _value(pair[1]) for pair in scalar.values}
    if hasattr(scalar, "values"):
        return [_value(one) for one in scalar.values]
    with contextlib.suppress(pa.ArrowException):
        return scalar.cast(pa.string()).as_py()
    return None


@lru_cache(maxsize=256)
def _holds_map(type: pa.DataType) -> bool:
    return "map<" in str(type)
