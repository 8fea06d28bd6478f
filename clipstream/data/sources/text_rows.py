"""The rows of tables of text: a CSV, whose quotes may be wrong, and JSON.

Lines or a file enter; fields of rows with the number of the last line, or the texts of JSON objects, leave.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from clipstream.utils.content import HEAD, describe, kind, open_text, rows_of
from clipstream.utils.logs import logger

SEPARATORS = "\t,;|"  # of equally many, the first one: names have commas, and no tabs
LONGEST_FIELD = 1 << 28  # characters of a field
MOST_LINES = 100  # of a row
MOST_JSON = 1 << 30  # bytes of a JSON list or object, which is read at once


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
            text, used, found = line, 0, _quoted(line, separator)
            while found is True and used < MOST_LINES - 1:
                if used == len(ahead) and not (more := next(rest, "")):
                    break
                ahead += [more] if used == len(ahead) else []
                text, used = text + ahead[used], used + 1
                found = _quoted(text, separator) if '"' in ahead[used - 1] else found
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


def _quoted(text: str, separator: str) -> list[str] | bool:
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
