"""Lists of samples to use or to leave out, or with numbers: a file of keys enters, what it says of a sample leaves."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from clipstream.data.settings import SourceSettings
from clipstream.errors import SettingsError
from clipstream.utils.content import read_text

NOT_KEPT = "not_kept"  # the reason of samples that a list leaves out
NOT_DRAWN = "not_drawn"  # the reason of samples that their probability leaves out
LEFT_OUT = (NOT_KEPT, NOT_DRAWN)  # reasons of samples with which nothing is wrong
TABLES = (".csv", ".parquet")
_SHARD = re.compile(r"(?:.*?/)?([^/]+\.(?:tar|tgz|[ct]sv|jsonl?|ndjson|parquet|pq|arrow)(?:\.\w+)?/.+)", re.DOTALL)
_FULL = re.compile(r"(?:[\w+.-]+:/)?/(?:.*/)?([^/]+/[^/]+)", re.DOTALL)


SampleFilter = Callable[[str, str], bool]  # name 'SHARD/KEY' and key of a sample -> whether it is used


class KeyList:
    """The keys in a file, as 64-bit hashes: 8 bytes each, shared by forked workers.

    A line of a text file is KEY or SHARD/KEY; folders in front of the shard's name are left out, and so are spaces
    around the line, unless the key has them. A table (.csv, .parquet) has the column key, and may have shard, and
    source, whose other rows are ignored. Text is UTF-8 or UTF-16. With n keys a sample that is not listed is taken for
    a listed one with a probability of n / 2^62.

    Args:
        path: the file.
        source: name of the source that the list is for.
        column: of a table, with a number for each key.

    Attributes:
        values: of `column`, float64, in the order of `place`; None without one.

    Raises SettingsError: the file cannot be read, or holds no key of this source, or `column` is not there, holds no
    numbers, or two for one sample.
    """

    def __init__(self, path: str, source: str, column: str | None = None) -> None:
        self.values, values = None, None
        try:
            if path.endswith(TABLES):
                names, *columns = read_key_table(path, source, *([] if column is None else [column]))
                values = np.array(columns[0], dtype=np.float64) if columns else None
                if values is not None and values.ndim != 1:
                    raise ValueError(f"the column {column!r} has lists, not numbers")
            else:
                names = _of_text(Path(path))
        except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are ValueErrors and KeyErrors
            text = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise SettingsError(f"{path}: cannot read a list of keys: {text}") from error
        if not names:
            raise SettingsError(f"{path}: no keys of source {source!r} in it")
        # Python's own hash, with its secret of this process, which forked workers have too.
        hashes = np.fromiter((hash(storable(form)) for name in names for form in forms(name)), np.int64)
        if values is None:
            self._hashes = np.unique(hashes)
        else:
            rows = np.repeat(np.arange(len(names)), [sum(1 for _ in forms(name)) for name in names])
            self._hashes, first, of = np.unique(hashes, return_index=True, return_inverse=True)
            self.values = values[rows[first]]
            other = np.flatnonzero(~np.isclose(self.values[of], values[rows], rtol=0, atol=0, equal_nan=True))
            if len(other):
                one, other_one = names[rows[first[of[other[0]]]]], names[rows[other[0]]]
                found = f"{self.values[of[other[0]]]:g} for {one!r} and {values[rows[other[0]]]:g} for {other_one!r}"
                hint = "samples are found by KEY or SHARD/KEY, without folders: give shards different names"
                raise SettingsError(f"{path}: {column} {found}: {hint}")

    def holds(self, name: str, key: str) -> bool:
        """Whether a sample is listed, by its name 'SHARD/KEY' or by its key."""
        return self.place(name, key) is not None

    def place(self, name: str, key: str) -> int | None:
        """The place of a listed sample in `values`; None for others."""
        for value in (hash(storable(name)), hash(storable(key))):
            place = int(self._hashes.searchsorted(value))
            if place < len(self._hashes) and int(self._hashes[place]) == value:
                return place
        return None


def build_filter(source: str, settings: SourceSettings) -> SampleFilter | None:
    """What the settings `keep` and `drop` of a source leave; None if it uses all samples. Raises as KeyList."""
    keep, drop = (None if path is None else KeyList(path, source) for path in (settings.keep, settings.drop))
    if keep is None and drop is None:
        return None
    return lambda name, key: (keep is None or keep.holds(name, key)) and not (drop and drop.holds(name, key))


def storable(text: str) -> str:
    r"""A name as tables have it: bytes that are not UTF-8, in names of files, become `\udcXX`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def forms(line: str) -> Iterator[str]:
    """What a line may mean: itself, and without what stands around SHARD/KEY."""
    yield line
    yield (bare := line.strip())
    if found := _SHARD.fullmatch(bare) or _FULL.fullmatch(bare):
        yield found[1]


def _of_text(path: Path) -> list[str]:
    return [line for raw in read_text(path).split("\n") if (line := raw.rstrip("\r")).strip()]


def read_key_table(path: str, source: str, *columns: str) -> list[list[Any]]:
    """The names of a table's samples, KEY or SHARD/KEY, and the values of further columns; of rows of this source.

    Raises OSError, or ValueError or KeyError as pyarrow does: the table cannot be read, or a column is missing.
    """
    from pyarrow import csv, parquet  # on use, as its import takes long

    table: Any
    wanted = ("source", "shard", "key", *columns)
    if path.endswith(".csv"):
        import pyarrow as pa

        texts = csv.ConvertOptions(column_types=dict.fromkeys(("source", "shard", "key"), pa.string()))
        table = csv.read_csv(
            io.BytesIO(read_text(Path(path)).encode("utf-8", "surrogateescape")), convert_options=texts
        )
        table = table.rename_columns([name.strip() for name in table.column_names])
    else:
        schema = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[name for name in wanted if name in schema])
    for column in ("key", *columns):
        if column not in table.column_names:
            raise ValueError(f"no column {column!r}")
    keys = [str(key) for key in table["key"].to_pylist()]
    if "shard" in table.column_names:
        keys = [f"{shard}/{key}" for shard, key in zip(table["shard"].to_pylist(), keys, strict=True)]
    rows = [keys, *(table[column].to_pylist() for column in columns)]
    if "source" in table.column_names:
        mine = [of == source for of in table["source"].to_pylist()]
        rows = [[*compress(values, mine)] for values in rows]
    return rows
