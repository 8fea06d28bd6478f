"""Owns the reading of a manifest's rows out of their Arrow file: a block of rows is a shard, a row is a sample.

A row's columns are its members, by name in lower case: text as UTF-8, anything else as JSON. The column that names the
picture's file holds that file's bytes, so all that reads samples of tars reads these too. The member `json`, where it
is asked for, is the row as a JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from clipstream.data.fields import json_object
from clipstream.data.manifest import FAULT, RAW, ROWS
from clipstream.data.shards import local_path, redact
from clipstream.data.tarstream import SampleRef, ShardIndex
from clipstream.errors import Dropped

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = "missing_picture"  # the reason of a sample whose picture is named, and not there


@lru_cache(maxsize=256)
def mapped(arrow: Path) -> pa.RecordBatchFileReader:
    """The file's reader over its map, one a process; a fork shares its parent's."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(arrow)))


def count_rows(arrow: Path) -> int:
    """Rows of the file: all its batches but the last hold ROWS."""
    reader = mapped(arrow)
    last = reader.num_record_batches - 1
    return int(last * ROWS + len(reader.get_batch(last)))


def columns(arrow: Path) -> list[str]:
    """Names of the columns; for rows of JSON, of the fields of the first ones."""
    reader = mapped(arrow)
    names = [name for name in reader.schema.names if name != FAULT]
    if names != [RAW]:
        return names
    seen: dict[str, None] = {}
    for raw in reader.get_batch(0).column(0):
        try:
            seen.update(dict.fromkeys(_object(raw.as_py())))
        except Dropped:
            continue
    return list(seen)


class _Refs(Sequence[SampleRef]):
    """References to a range of rows, made when they are asked for; a row's key is its number in the manifest."""

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> SampleRef: ...
    @overload
    def __getitem__(self, place: slice) -> _Refs: ...
    def __getitem__(self, place: int | slice) -> SampleRef | _Refs:
        if isinstance(place, slice):
            return _Refs(self._rows[place])
        return SampleRef(str(self._rows[place]), {})


@dataclass(frozen=True)
class Pictures:
    """Where a row's picture is.

    Attributes:
        keys: columns that may hold its path or its bytes, the first present one is taken.
        folder: what relative paths begin at.
    """

    keys: tuple[str, ...]
    folder: str


class RowShard:
    """A block of rows, with an open shard's protocol."""

    def __init__(self, arrow: Path, rows: range, pictures: Pictures) -> None:
        self._arrow = arrow
        self._reader = mapped(arrow)
        self._pictures = pictures
        self._names = self._reader.schema.names
        self.index = ShardIndex(_Refs(rows), None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The members of a row by name: all, or those of `suffixes` that it has.

        Raises:
            Dropped: `row_fields`, `row_invalid`, `json_invalid`, `json_not_object`, or `missing_picture` for a file
                that cannot be read.
        """
        number = int(ref.key)
        batch, row = self._reader.get_batch(number // ROWS), number % ROWS
        raw: bytes | None = None
        if self._names == [RAW]:
            raw = batch.column(0)[row].as_py()
            values = _object(raw)
        else:
            wanted = self._names if suffixes is None or "json" in suffixes else [*suffixes, FAULT]
            values = {name: _value(batch, name, row) for name in self._names if name in wanted}
            if fault := values.pop(FAULT, None):
                raise Dropped("row_fields", fault)
        found = self._picture(values)
        for name, value in values.items():
            if value is not None and name not in self._pictures.keys and (suffixes is None or name in suffixes):
                found[name] = _text(value)
        if "json" not in values and (suffixes is None or "json" in suffixes):
            found["json"] = _whole(values) if raw is None else raw
        return found

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """All members for people: where the picture's file cannot be read, its path in its place.

        Raises:
            Dropped: as `load`, but for that.
        """
        try:
            return self.load(ref)
        except Dropped as drop:
            if drop.reason != MISSING:
                raise
        pathless = RowShard(self._arrow, range(0), Pictures((), ""))
        return pathless.load(ref)

    def close(self) -> None:
        """Nothing: the map is the process's."""

    def _picture(self, values: Mapping[str, Any]) -> dict[str, bytes]:
        """The member with the picture, under its column's name."""
        for name in self._pictures.keys:
            value = values.get(name)
            if isinstance(value, dict):  # a picture as Hugging Face's datasets store it
                value = value.get("bytes") or value.get("path")
            if not value:
                continue
            if isinstance(value, bytes) and FAULT not in self._names:
                return {name: value}
            return {name: self._file(os.fsdecode(value) if isinstance(value, (bytes, str)) else str(value))}
        return {}

    def _file(self, path: str) -> bytes:
        local = local_path(path)
        if local is None:
            shown = redact(path)
            raise Dropped(MISSING, f"{shown}: a manifest's pictures are files; bring them here first (img2dataset)")
        where = os.path.join(self._pictures.folder, os.path.expanduser(local))
        try:
            with open(where, "rb") as file:
                return file.read()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            shown = where.encode(errors="backslashreplace").decode()  # a name that is no UTF-8
            raise Dropped(MISSING, f"{shown}: {getattr(error, 'strerror', None) or error}") from error


def _value(batch: pa.RecordBatch, name: str, row: int) -> Any:
    try:
        return batch.column(name)[row].as_py()
    except Exception as error:  # text that is no UTF-8, a time that Python cannot hold, …
        raise Dropped("row_invalid", f"{name}: {error}") from error


def _object(raw: bytes) -> dict[str, Any]:
    """The row's fields by name in lower case."""
    return {name.lower(): inner for name, inner in json_object(raw).items()}


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # halves of characters are found with the caption
    return json.dumps(value, default=str).encode()


def _whole(values: Mapping[str, Any]) -> bytes:
    """The row as a JSON object; bytes that are no text, such as pictures, are left out."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bytes):
            try:
                shown[name] = value.decode()
            except UnicodeDecodeError:
                continue
        else:
            shown[name] = value
    return json.dumps(shown, default=lambda inner: None if isinstance(inner, bytes) else str(inner)).encode()
