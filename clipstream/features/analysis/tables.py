"""Tables that are written part by part: Parquet, CSV, JSON, or text with a line 'SHARD/KEY' for each row.

The kind follows from the suffix. A file appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import pyarrow as pa
from pyarrow import csv, parquet

from clipstream.errors import ClipstreamError, SettingsError
from clipstream.utils import atomic_write

SUFFIXES = (".parquet", ".csv", ".json", ".jsonl", ".txt")
GROUP = 1 << 16  # rows of a row group of Parquet, at most


class TableWriter:
    """A table under construction; as a context, it is complete at the end and removed after an error.

    Args:
        path: where it is written; the suffix is one of `SUFFIXES`.
        schema: pyarrow schema of the columns. A text file needs the columns shard and key.

    Raises:
        SettingsError: another suffix, or the file cannot be created.
        ClipstreamError: it cannot be written (later).
    """

    def __init__(self, path: Path, schema: Any) -> None:
        check_suffix(path)
        self.path, self.schema, self.rows = path, schema, 0
        self._draft = path.with_name(f"{path.name}.tmp")
        self._text: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                self._file: Any = parquet.ParquetWriter(self._draft, schema)
            elif path.suffix == ".csv":
                self._file = csv.CSVWriter(self._draft, schema)
            else:
                self._file = self._text = self._draft.open("w", encoding="utf-8", errors="backslashreplace")
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._draft.unlink()
            if not isinstance(error, OSError):
                raise
            raise SettingsError(f"{path} cannot be written: {error.strerror or error}") from error

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append rows, given as a sequence or a pyarrow array for each column."""
        named = {name: columns[name] for name in self.schema.names}
        try:
            batch = pa.table(named, schema=self.schema)
        except UnicodeEncodeError:  # a key of bytes that are not UTF-8
            batch = pa.table({name: _printable(column) for name, column in named.items()}, schema=self.schema)
        try:
            if self._text is not None:
                self._text.writelines(self._lines(batch.to_pylist()))
            else:
                for part in batch.to_batches(max_chunksize=GROUP):
                    self._file.write(part)
        except OSError as error:
            raise ClipstreamError(f"{self.path} could not be written: {error.strerror or error}") from error
        self.rows += batch.num_rows

    def _lines(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        if self.path.suffix == ".txt":
            return [f"{row['shard']}/{row['key']}\n" for row in rows]
        if self.path.suffix == ".jsonl":
            return [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows]
        first = self.rows == 0
        return [
            f"{'[' if first and i == 0 else ','}\n{json.dumps(row, ensure_ascii=False)}" for i, row in enumerate(rows)
        ]

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._text is not None and self.path.suffix == ".json":
                self._text.write("\n]\n" if self.rows else "[]\n")
            self._file.close()
            if kind is None:
                atomic_write.flush(self._draft)
                self._draft.replace(self.path)
        except OSError as fault:
            raise ClipstreamError(f"{self.path} could not be written: {fault.strerror or fault}") from fault
        finally:
            self._draft.unlink(missing_ok=True)


def check_suffix(path: Path) -> None:
    """Raises SettingsError: the suffix is none of `SUFFIXES`."""
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{path}: the suffix says how it is written: one of {', '.join(SUFFIXES)}")


def _printable(column: Any) -> Any:
    """A column with lone surrogates of its texts escaped; a column without texts as it is."""
    if not isinstance(column, list) or not any(isinstance(value, str) for value in column):
        return column
    return [value if value is None else value.encode(errors="backslashreplace").decode() for value in column]
