"""The rows of tables: a CSV, TSV, JSONL, JSON, Parquet or Arrow file becomes an Arrow IPC file without dictionaries.

A CSV may have wrong quotes, and JSON may be lines, a list or objects: `csv_rows` and `json_rows`.

All record batches of the file but the last one have the same number of rows, at most ROWS: row r is in batch r // that.
Memory holds one batch, of at most BATCH_BYTES unless a single row takes more.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import parquet

from clipstream.errors import ShardError
from clipstream.storage.download import GIB
from clipstream.storage.shard_url import table_format
from clipstream.utils.content import HEAD, describe, kind, open_text, rows_of
from clipstream.utils.logs import logger

SEPARATORS = "\t,;|"  # of equally many, the first one: names have commas, and no tabs
LONGEST_FIELD = 1 << 28  # characters of a field
MOST_LINES = 100  # of a row
MOST_JSON = 1 << 30  # bytes of a JSON list or object, which is read at once
ROWS = 256  # of a record batch, or a sixteenth and so on of it where rows are large
STEP = 16  # rows that are decoded at once, as a dictionary hides how large they are
BATCH_BYTES = 1 << 27  # of a record batch of several rows
MOST_GROWN = 64  # bytes that a byte of a table may become, over 1 GiB: a value of a dictionary can stand in every row
FAULT = "__fault__"  # column of a CSV: the fault of a row whose number of fields is not the header's
RAW = "__json__"  # column of the unparsed rows of JSON
Row = TypeVar("Row")


class _RowsAreLarge(Exception):
    """Batches have to have fewer rows."""


def to_arrow(
    table: Path,
    url: str,
    target: Path,
    separator: str | None = None,
    quoting: bool = True,
    receive: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the rows of a table as an Arrow IPC file.

    Args:
        table: the local file.
        url: its name, whose suffix gives the format.
        separator: between a CSV's fields; None for the most frequent one of SEPARATORS in its header.
        quoting: whether quotes around a CSV's fields are syntax.
        receive: called with the bytes written so far; what it raises ends the conversion.

    Raises:
        ShardError: `bad_manifest`: it is not of the format, or holds no row; `too_large`: see MOST_GROWN.
        OSError: the target cannot be written.
    """
    form, most = table_format(url), GIB + MOST_GROWN * table.stat().st_size

    def read(rows: int) -> Iterator[pa.RecordBatch]:
        try:
            if form == "csv":
                yield from _csv(table, separator, quoting, rows)
            elif form == "json":
                for some in _chunks(json_rows(table), rows, len):
                    yield pa.record_batch([pa.array(some, pa.large_binary())], names=[RAW])
            else:
                yield from (_parquet if form == "parquet" else _arrow)(table, rows)
        except (ValueError, OSError, RecursionError, csv.Error, pa.ArrowException) as error:
            raise ShardError("bad_manifest", f"not a valid {form} file: {error}") from error

    for rows in (ROWS, STEP, 1):
        with contextlib.suppress(_RowsAreLarge):
            batches = read(rows)
            if (first := next(batches, None)) is None:
                raise ShardError("bad_manifest", "no rows")
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
                for batch in itertools.chain([first], batches):
                    writer.write_batch(batch)
                    receive(sink.tell())
                    if sink.tell() > most:
                        said = f"its rows take more than {most / GIB:.3g} GiB, {MOST_GROWN} times its size and 1 GiB"
                        raise ShardError("too_large", f"{said}: write values that recur as files, and their paths")
            return


def _csv(path: Path, separator: str | None, quoting: bool, rows: int) -> Iterator[pa.RecordBatch]:
    with open_text(path) as file:
        header, start = file.readline(), 0
        if said := re.match(r"\"?sep=(.)\"?\s*$", header):  # Excel's first line
            separator, start = separator or said[1], file.tell()
            header = file.readline()
        file.seek(start)
        numbered = csv_rows(file, separator or max(SEPARATORS, key=header.count), quoting)
        names = _names(next(numbered, (0, []))[1])
        schema = pa.schema([*((name, pa.binary()) for name in names), (FAULT, pa.string())])

        def fields(number: int, row: list[str]) -> list[bytes | str | None]:
            if len(row) == len(names):
                return [*(field.encode("utf-8", "surrogateescape") for field in row), None]
            return [*[None] * len(names), f"line {number}: {len(row)} fields, the header has {len(names)}"]

        found = (fields(number, row) for number, row in numbered if row)
        for some in _chunks(found, rows, lambda row: sum(len(field) for field in row if field)):
            columns = zip(*some, strict=True)
            yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _parquet(path: Path, rows: int) -> Iterator[pa.RecordBatch]:
    # Without Arrow's threads, as workers are forked from this process; a column is read in pieces, not at once.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        kept = _columns_to_keep(file.schema_arrow)
        left = len(kept) < len(file.schema_arrow)
        step = min(rows, STEP)
        batches = file.iter_batches(batch_size=step, use_threads=False, columns=kept if left else None)
        yield from _even(batches, kept, rows)


def _arrow(path: Path, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file or stream, as Hugging Face's `save_to_disk` writes them."""
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = file = pa.ipc.open_stream(source)
        kept = _columns_to_keep(file.schema)
        yield from _even((batch.select(kept) for batch in map(check_batch, batches)), kept, rows)


def check_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose offsets and indices stay in its buffers, which Arrow takes at their word.

    Raises pa.ArrowInvalid. Text that is not UTF-8 is found with its row.
    """
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
    return batch


def _columns_to_keep(schema: pa.Schema) -> list[str]:
    """Names of the columns that can be decoded and written again, which nested dictionaries cannot."""
    kept = [field.name for field in schema if _is_readable(field.type)]
    if len(kept) < len(schema):
        left = Counter(schema.names) - Counter(kept)
        logger.warning(f"ignored columns of types that are not read: {', '.join(left)}")
    return kept


def _is_readable(type: pa.DataType) -> bool:
    with contextlib.suppress(pa.ArrowException):
        plain = _decode_column(_decodable(pa.nulls(2, type)))
        pa.concat_arrays([plain, plain])
        return "dictionary<" not in str(plain.type)
    return False


def _decodable(column: pa.Array) -> pa.Array:
    """A column that can be decoded. Arrow (26) takes no values from views, as polars (2.1) writes them."""
    if pa.types.is_dictionary(column.type) and "view" in str((values := column.dictionary).type):
        values = values.cast(pa.large_binary() if pa.types.is_binary_view(values.type) else pa.large_string())
        return pa.DictionaryArray.from_arrays(column.indices, values)
    return column


def _decode_column(column: pa.Array) -> pa.Array:
    """A column without a dictionary at its top."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _even(batches: Iterable[pa.RecordBatch], kept: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of `rows` rows each, without dictionaries, which cannot change from batch to batch in an Arrow file."""
    names, held, size, step = _names(kept), list[pa.Table](), 0, min(rows, STEP)
    for batch in batches:
        columns = [_decodable(column) for column in batch.columns]
        for first in range(0, len(batch), step):
            held.append(pa.table([_decode_column(column.slice(first, step)) for column in columns], names=names))
            size += held[-1].nbytes
            if size > BATCH_BYTES and rows > 1:
                raise _RowsAreLarge
            if sum(map(len, held)) >= rows:
                table = pa.concat_tables(held)
                yield from table.slice(0, rows).combine_chunks().to_batches()
                held, size = [table.slice(rows)], 0
    if held and len(table := pa.concat_tables(held)):
        yield from table.combine_chunks().to_batches()


def _names(header: Sequence[str]) -> list[str]:
    """Columns by name in lower case, like the members of a tar; several of one name are NAME.1, NAME.2, …"""
    names = [name.strip().lower() or f"column_{number}" for number, name in enumerate(header, 1)]
    several, seen = Counter(names), Counter[str]()
    named = []
    for name in names:
        seen[name] += 1
        named.append(f"{name}.{seen[name]}" if several[name] > 1 else name)
    if len(set(named)) < len(named):
        raise ValueError("duplicate column in the header")
    return named


def _chunks(rows: Iterable[Row], count: int, size: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Lists of `count` rows each."""
    some: list[Row] = []
    held = 0
    for row in rows:
        some.append(row)
        held += size(row)
        if held > BATCH_BYTES and count > 1:
            raise _RowsAreLarge
        if len(some) == count:
            yield some
            some, held = [], 0
    if some:
        yield some


def csv_rows(file: Iterable[str], separator: str, quoting: bool) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, fields) of each row.

    A quote that opens a field and is not closed stands for itself in that line alone, if the line or those behind it
    look like rows: as many fields as the header, and with commas also a path or the like at the same place.

    Raises ValueError: a quote stays open to the end, or over very many lines.
    """
    csv.field_size_limit(LONGEST_FIELD)
    number, width, trusted, told = 0, 0, False, False
    ahead: list[str] = []  # lines that were read in search of a quote's end
    rest = iter(file)
    while line := ahead.pop(0) if ahead else next(rest, ""):
        number += 1
        row = plain = _split(line, separator)
        if quoting and '"' in line:
            text, used, found = line, 0, _split_quoted(line, separator)
            while found is True and used < MOST_LINES - 1:
                if used == len(ahead) and not (more := next(rest, "")):
                    break
                ahead += [more] if used == len(ahead) else []
                text, used = text + ahead[used], used + 1
                found = _split_quoted(text, separator) if '"' in ahead[used - 1] else found
            are_rows = used > 0 and _are_rows(plain, ahead[:used], separator, width)
            # A table whose header stands in quotes was written by a program, which closes them.
            if isinstance(found, list) and (trusted or not are_rows):
                row, number = found, number + used
                del ahead[:used]
            elif used or found is True:
                if len(plain) != width and not are_rows:
                    raise ValueError(
                        f"unclosed quote in line {number}: close it, or set quoting: false for this source"
                    )
                if not told:
                    logger.warning(f"unclosed quotes are literal, first in line {number}")
                told = True
            elif separator != "\t":
                row = next(csv.reader([line], delimiter=separator))
        if not width:
            width, trusted = len(row), '"' in line
        yield number, row


def _split(line: str, separator: str) -> list[str]:
    return line.split(separator) if (line := line.rstrip("\r\n")) else []


def _split_quoted(text: str, separator: str) -> list[str] | bool:
    """The fields of a row in which quotes, doubled or behind a backslash, are syntax; else whether one is open."""
    for escape in (None, "\\") if '\\"' in text else (None,):
        try:
            form = {"delimiter": separator, "doublequote": not escape, "escapechar": escape, "skipinitialspace": True}
            return next(csv.reader([text], strict=True, **form))  # type: ignore[arg-type]
        except csv.Error as error:
            is_open = "unexpected end" in str(error)
    return is_open


def _are_rows(first: list[str], lines: Sequence[str], separator: str, width: int) -> bool:
    """Whether lines behind an open quote are rows of their own, as its line, whose fields are `first`."""
    rows = [_split(line, separator) for line in lines if line.strip()]
    full = [row for row in rows if len(row) == width]
    if not full or len(full) * 5 < len(rows) * 4:
        return False
    shapes = [
        {re.sub(r"[\w-]+", "w", row[i].strip('" ')) for row in (first, *full)} for i in range(min(width, len(first)))
    ]
    return separator == "\t" or any(len(shape) == 1 and re.search(r"[./]", max(shape)) for shape in shapes)


def json_rows(path: Path) -> Iterator[bytes]:
    """The objects of a JSON list or of one object that is a table; else the lines that are not blank."""
    large = path.stat().st_size > MOST_JSON
    too_large = f"a JSON list must not exceed {MOST_JSON >> 30} GiB: write one object per line"
    with open_text(path) as text:
        if text.read(HEAD).lstrip().startswith("["):
            if large:
                raise ValueError(too_large)
            text.seek(0)
            yield from _elements(text.read())
            return
        text.seek(0)
        lines = [line for line in itertools.islice(text, MOST_LINES) if line.strip()]
    first, second = (line.lstrip() for line in [*lines, "", ""][:2])
    whole = first.startswith("{") and not second.startswith("{")
    if whole and large:
        raise ValueError(too_large)
    if whole:
        start = "".join(lines)[:HEAD].encode(errors="replace")
        named, found = kind(start) in ("COCO", "wids"), None
        with contextlib.suppress(ValueError), open_text(path) as text:
            found = json.load(text)
        if isinstance(found, dict) and not named and (rows := rows_of(found)) is not None:
            yield from (json.dumps(row).encode() for row in rows)
            return
        with contextlib.suppress(ValueError):
            second = "" if json.loads(first) else second
        if second:
            several = "expected one object per line, or a list of objects, not one object over several lines"
            raise ValueError(describe(start) if named else several)
    with open_text(path) as text:
        yield from (row.encode("utf-8", "surrogateescape") for line in text if (row := line.strip()))


def _elements(text: str) -> Iterator[bytes]:
    """The texts of the objects in a JSON list, as they are written."""
    decoder, skip = json.JSONDecoder(), re.compile(r"[\s,]*")
    at = text.index("[") + 1
    while not text.startswith("]", at := skip.match(text, at).end()):  # type: ignore[union-attr]
        if text[at : at + 1] not in ("{", ""):
            raise ValueError(f"expected a list of objects, not {text[at : at + 20]!r}")
        end = decoder.raw_decode(text, at)[1]
        yield text[at:end].encode("utf-8", "surrogateescape")
        at = end


class RowKeys:
    """The keys of rows: their numbers."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows if isinstance(rows, range) else dict.fromkeys(map(int, rows))

    def __contains__(self, key: object) -> bool:
        text = str(key)
        return text.isdecimal() and int(text) in self._rows and str(int(text)) == text

    def __iter__(self) -> Iterator[str]:
        return map(str, self._rows)
