"""Owns the way from a manifest (CSV, TSV, JSONL, JSON, Parquet) to an Arrow file of its rows; opens no picture.

The Arrow file is made once, in row order, and mapped into memory by whoever reads it: rows are found by their number,
and all processes of a node share the pages. Text is kept as the bytes that the manifest holds, and rows of JSON as
they stand, so that a row which is broken costs that row alone, when it is read.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clipstream.data.transfer import ShardError

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = {
    **{".csv": "csv", ".tsv": "csv"},
    **{".jsonl": "json", ".ndjson": "json", ".json": "json"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
ROWS = 256  # of a record batch: row r lies in batch r // ROWS
FAULT = "__fault__"  # column of a CSV's rows that do not have the header's number of fields
RAW = "__json__"  # column of rows of JSON, as they stand
SEPARATORS = ",\t;|"
LONGEST_FIELD = 1 << 28  # characters of a CSV's field
MOST_LINES = 100  # of a CSV's row
CHUNK = 1 << 20  # characters of a JSON list that are read at once
BETWEEN = re.compile(r"[\s,]*")


def kind_of(url: str) -> str | None:
    """`csv`, `json` or `parquet` by the name's ending (also before `.gz`); None for what is no manifest."""
    if url.startswith("pipe:"):
        return None
    name = url.partition("?")[0].lower().removesuffix(".gz")
    return KINDS.get(name[name.rfind(".") :]) if "." in name.rpartition("/")[2] else None


def to_arrow(manifest: Path, url: str, target: Path, *, separator: str | None = None, quoting: bool = True) -> None:
    """Write the rows of a manifest as an Arrow IPC file.

    Args:
        manifest: the local file.
        url: its name, whose ending says what it is.
        target: the Arrow file.
        separator: of a CSV's fields; None for the one that its header holds most of.
        quoting: whether a CSV's fields may stand in quotes.

    Raises:
        ShardError: `bad_manifest`: it cannot be read as what its name says, or holds no row.
        OSError: the target cannot be written.
    """
    import pyarrow as pa

    kind = kind_of(url)
    if kind == "csv":
        batches = _csv(manifest, separator, quoting)
    elif kind == "json":
        batches = _json(manifest)
    else:
        batches = _parquet(manifest)
    batches = _read(batches, kind)
    first = next(batches, None)
    if first is None:
        raise ShardError("bad_manifest", "it holds no row")
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)


def _read(batches: Iterator[pa.RecordBatch], kind: str | None) -> Iterator[pa.RecordBatch]:
    """The batches; whatever goes wrong with reading them is the manifest's fault, and not the target's disk's."""
    import pyarrow as pa

    try:
        yield from batches
    except (ValueError, OSError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise ShardError("bad_manifest", f"it is no {kind} that can be read to its end: {error}") from error


def _csv(path: Path, separator: str | None, quoting: bool) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    csv.field_size_limit(LONGEST_FIELD)
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        header = file.readline()
        file.seek(0)
        lines = _Lines(file, quoting)
        reader = csv.reader(
            lines,
            delimiter=separator or max(SEPARATORS, key=header.count),
            quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
        )
        checked = lines.checked(reader)
        names = _names(next(checked, []))
        schema = pa.schema([*((name, pa.binary()) for name in names), (FAULT, pa.string())])
        rows = (_fields(row, len(names), reader.line_num) for row in checked if row)
        for some in _chunks(rows):
            columns = zip(*some, strict=True)
            yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


class _Lines:
    """A CSV's lines on their way to Python's reader, which takes a quote that nobody closes for a very long field."""

    def __init__(self, file: TextIO, quoting: bool) -> None:
        self._file, self._quoting = file, quoting
        self._number = self._first = 0
        self._quotes = 0  # in the lines of the present row
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self._number += 1
            self._quotes += line.count('"')
            if self._quoting and self._number - self._first > MOST_LINES:
                raise self._open()
            yield line
        self._ended = True

    def checked(self, reader: Iterator[list[str]]) -> Iterator[list[str]]:
        """The reader's rows.

        Raises:
            ValueError: a quote stays open to the end, or over very many lines.
        """
        for row in reader:
            # A row that is whole is given out with its last line, before the end of the file is seen.
            if self._quoting and self._ended and self._quotes % 2:
                raise self._open()
            yield row
            self._first, self._quotes = self._number, 0

    def _open(self) -> ValueError:
        return ValueError(
            f"a quote opens in line {self._first + 1} and is not closed: close it, or take quotes as they stand by "
            "the source's setting quoting: false"
        )


def _fields(row: list[str], count: int, line: int) -> list[bytes | str | None]:
    """The row's fields as bytes, and what is wrong with it."""
    if len(row) != count:
        return [*[None] * count, f"line {line}: {len(row)} fields, the header has {count}"]
    return [*(field.encode("utf-8", "surrogateescape") for field in row), None]


def _json(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    schema = pa.schema([(RAW, pa.large_binary())])
    for rows in _chunks(_json_rows(path)):
        yield pa.record_batch([pa.array(rows, pa.large_binary())], schema=schema)


def _json_rows(path: Path) -> Iterator[bytes]:
    """The objects of a list, or the lines that hold anything."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as text:
        start = text.read(CHUNK).lstrip()
        text.seek(0)
        if start.startswith("["):
            yield from (row.encode("utf-8", "surrogateescape") for row in _elements(text))
            return
        lines = [line.strip() for line in start.splitlines() if line.strip()]
        several = len(lines) > 1 and not lines[1].startswith("{")
        if several and lines[0].startswith("{") and not _is_object(lines[0]):
            raise ValueError("one object a line, or a list of objects, is read; this is one over several lines")
    with open(path, "rb") as file:
        yield from (row for line in file if (row := line.removeprefix(b"\xef\xbb\xbf").strip()))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _elements(file: TextIO) -> Iterator[str]:
    """The texts of the objects in a JSON list, which need not fit into memory together."""
    decoder = json.JSONDecoder()
    text, at = file.read(CHUNK).lstrip().removeprefix("["), 0
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if text.startswith("]", at):
            return
        if at < len(text) and text[at] != "{":
            raise ValueError(f"a list of objects is read; this one holds {text[at : at + 20]!r}")
        try:
            end = decoder.raw_decode(text, at)[1]
        except ValueError:
            more = file.read(max(CHUNK, len(text) - at))  # in growing steps: a long object is decoded anew each time
            if not more:
                raise
            text, at = text[at:] + more, 0
            continue
        yield text[at:end]
        at = end


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyarrow import parquet

    # Without threads of Arrow's: workers are forked from this process.
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        names = _names(file.schema_arrow.names)
        rest: pa.Table | None = None
        for batch in file.iter_batches(batch_size=ROWS, use_threads=False):
            some = pa.table([_plain(column) for column in batch.columns], names=names)
            table = some if rest is None else pa.concat_tables([rest, some])
            whole = len(table) // ROWS * ROWS
            yield from table.slice(0, whole).combine_chunks().to_batches(max_chunksize=ROWS)
            rest = table.slice(whole)
        if rest is not None and len(rest):
            yield from rest.combine_chunks().to_batches()


def _plain(column: pa.Array) -> pa.Array:
    """The column without a dictionary: those of an Arrow file cannot change from batch to batch."""
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _names(header: Sequence[str]) -> list[str]:
    """Columns by name in lower case, as members of shards are."""
    names = [name.strip().lower() or f"column_{number}" for number, name in enumerate(header, 1)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"its header has {', '.join(twice)} more than once")
    return names


def _chunks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(rows)
    while some := list(itertools.islice(rest, ROWS)):
        yield some
