"""The rows of a CSV whose quotes may be wrong.

Lines of text enter; the fields of each row, with the number of its last line, leave.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence

from clipstream.utils.logs import logger

SEPARATORS = "\t,;|"  # of equally many, the first one: names have commas, and no tabs
LONGEST_FIELD = 1 << 28  # characters of a field
MOST_LINES = 100  # of a row


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
