"""Tables of results (samples with scores, lists of samples to keep) as files that other programs read.

Columns enter part by part; a Parquet, CSV, JSON Lines or text file leaves, under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.utils import atomic_write

SUFFIXES = (".parquet", ".csv", ".jsonl", ".txt")
GROUP = 1 << 16  # rows of a row group of Parquet, at most
SAMPLE = (("source", pa.string()), ("shard", pa.string()), ("key", pa.string()))  # columns


class TableWriter:
    """A table that is written part by part; as a context, it is complete at the end and removed after an error.

    Args:
        path: the file; its suffix is the format: Parquet, CSV, JSON Lines, or text with a line 'SHARD/KEY' for each
            row, which needs the columns shard and key.
        schema: pyarrow schema of the columns.

    Raises:
        SettingsError: another suffix, or the file cannot be created.
        ClipstreamError: it cannot be written (later).
    """

    def __init__(self, path: Path, schema: Any) -> None:
        check_suffix(path, None)
        self.path, self.schema, self.rows = path, schema, 0
        self._draft = path.with_name(f"{path.name}.tmp")
        make = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}.get(path.suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = open(self._draft, "wb") if make is None else make(self._draft, schema)  # noqa: SIM115
        except BaseException as error:  # also a signal
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
        with errors_as(ClipstreamError, f"{self.path} could not be written", OSError):
            if self.path.suffix == ".txt":
                lines = [f"{row['shard']}/{row['key']}\n" for row in batch.select(["shard", "key"]).to_pylist()]
                self._file.write("".join(lines).encode())
            elif self.path.suffix == ".jsonl":
                lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in batch.to_pylist()]
                self._file.write("".join(lines).encode())
            else:
                for part in batch.to_batches(max_chunksize=GROUP):
                    self._file.write(part)
        self.rows += batch.num_rows

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                atomic_write.flush(self._draft)
                self._draft.replace(self.path)
        except OSError as fault:
            raise ClipstreamError(f"{self.path} could not be written: {fault.strerror or fault}") from fault
        finally:
            self._draft.unlink(missing_ok=True)


def check_suffix(path: Path, flag: str | None) -> None:
    """Raises SettingsError: the suffix is not one of `SUFFIXES`, or as `claim_output` of a file that a flag names."""
    if flag is not None:
        atomic_write.claim_output(path, flag, words=() if path.suffix == ".txt" else (b"shard", b"key"))
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{path}: expected a file with the suffix {', '.join(SUFFIXES)}")


def _printable(column: Any) -> Any:
    """A column with lone surrogates of its texts escaped; a column without texts as it is."""
    if not isinstance(column, list) or not any(isinstance(value, str) for value in column):
        return column
    return [value if value is None else value.encode(errors="backslashreplace").decode() for value in column]
