"""The conditions of `clipstream filter`: texts in SQL and columns of samples enter; which samples hold them leaves; and
MetaCLIP's balancing (arXiv:2309.16671): captions and a list of entries enter, probabilities of samples leave.

Each condition is an expression of DuckDB over the table `samples`, computed for all samples at once: aggregates, window
functions and subqueries see all of them. A missing value (null or NaN) is NULL, and a condition that is NULL does not
hold. A JSON path is a field of nested structs: `json.exif.width`, `json.tags."0"`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.errors import SettingsError, did_you_mean
from clipstream.text import listed
from clipstream.utils.content import read_text

ROW = "row of the sample"  # in the table beside the fields
_WRAPPED, _SPACE = re.compile(r"([,.;:?!`])"), str.maketrans("\t\n\r", "   ")  # of MetaCLIP's matching


class Conditions:
    """Conditions that must all hold.

    Args:
        texts: the conditions.

    Attributes:
        fields: the fields of each condition.

    Raises SettingsError: DuckDB is not installed, or a text is no expression.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise SettingsError("--where and --recipe require DuckDB: pip install 'clipstream[curation]'") from error
        self._error: type[Exception] = duckdb.Error
        self._db = duckdb.connect(config={"enable_external_access": "false"})  # no files but the table
        self.texts = list(texts)
        self.fields = [self._fields_of(text) for text in texts]

    def _fields_of(self, text: str) -> list[str]:
        query = f"SELECT ({text}\n) FROM samples"
        (found,) = self._db.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0]
        parsed = json.loads(found)
        if parsed["error"]:
            raise SettingsError(f"--where {text!r}: {parsed['error_message']}")
        names = (".".join(node["column_names"]) for node in _nodes(parsed) if node.get("class") == "COLUMN_REF")
        return list(dict.fromkeys(name.removeprefix("samples.") for name in names))

    def check_fields(self, known: Sequence[str]) -> None:
        """Raises SettingsError: a field is not among the known ones."""
        for text, names in zip(self.texts, self.fields, strict=True):
            for name in (name for name in names if name not in known):
                near = did_you_mean(name, known, 3)
                raise SettingsError(
                    f"--where {text!r}: unknown field {name!r}{near}; texts stand in single quotes; the fields are "
                    f"{listed(known, 60)}"
                )

    def hold(self, columns: Mapping[str, Any], rows: int) -> Iterator[np.ndarray[Any, Any]]:
        """For each condition, the samples that hold it, bool [rows].

        Args:
            columns: pyarrow arrays [rows] by field.

        Raises SettingsError: a condition has a value that is no test, or compares unlike values.
        """
        tree: dict[str, Any] = {}
        for name, column in columns.items():
            *folders, last = name.split(".")
            at = tree
            for folder in folders:
                at = at.setdefault(folder, {}) if isinstance(at, dict) else at
            if not isinstance(at, dict) or last in at:
                raise SettingsError(f"--where: {name} and a field around or below it are not supported together")
            at[last] = _without_nan(column)
        samples = pa.table({ROW: pa.array(np.arange(rows)), **{name: _nested(one) for name, one in tree.items()}})
        self._db.register("samples", samples)
        for text in self.texts:
            held = np.zeros(rows, bool)
            try:
                found = self._db.sql(f'SELECT "{ROW}", ({text}\n) AS held FROM samples')
                if str(found.types[1]).strip('"') not in ("BOOLEAN", "NULL"):
                    raise SettingsError(
                        f"--where {text!r}: it is {found.types[1]}, not a test: compare it with a value"
                    )
                held[found.filter("held").project(f'"{ROW}"').fetchnumpy()[ROW]] = True
            except self._error as error:
                raise SettingsError(f"--where {text!r}: {str(error).splitlines()[0]}") from error
            yield held


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a parsed query."""
    if isinstance(tree, dict):
        yield tree
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(one)


def _nested(part: Any) -> Any:
    """A column, or the columns below a name as one of structs."""
    if not isinstance(part, dict):
        return part
    return pa.StructArray.from_arrays([_nested(one) for one in part.values()], list(part))


def _without_nan(column: Any) -> Any:
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column


class Balance:
    """MetaCLIP's entries in captions, which are those of MetaCLIP's `substr_matching`: between spaces or `, . ; : ? !`.

    An entry is looked up by its words: those that begin with a caption's word, with as many words as such entries have.

    Args:
        path: the entries: a JSON list or a line each.
        t: captions with an entry beyond which it is thinned.

    Raises SettingsError: the file cannot be read, or has no entries.
    """

    def __init__(self, path: str, t: int) -> None:
        try:
            text = read_text(Path(path))
            entries = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--balance: {path} cannot be read: {error}") from error
        self.t, self._numbers = t, dict[str, int]()
        self._lengths: dict[str, tuple[int, ...]] = {}  # first word -> numbers of words
        for entry in entries:
            if isinstance(entry, str) and entry.strip():
                self._numbers.setdefault(entry, len(self._numbers))
                first, length = entry.split(" ")[0], entry.count(" ") + 1
                self._lengths[first] = tuple({*self._lengths.get(first, ()), length})
        if not self._numbers:
            raise SettingsError(f"--balance: {path} has no entries")
        self._found: list[np.ndarray[Any, Any]] = []
        self._counts: list[int] = []

    def matches(self, caption: str) -> set[int]:
        """The numbers of the entries in a caption."""
        words = _WRAPPED.sub(r" \1 ", caption).translate(_SPACE).split(" ")
        numbers, found = self._numbers, set[int]()
        for place, word in enumerate(words):
            for length in self._lengths.get(word, ()):
                number = numbers.get(word if length == 1 else " ".join(words[place : place + length]))
                if number is not None:
                    found.add(number)
        return found

    def add(self, captions: Iterable[str | None]) -> None:
        """Count the entries of further samples."""
        found = [self.matches(caption or "") for caption in captions]
        self._counts += map(len, found)
        self._found.append(np.fromiter((number for one in found for number in one), np.int32))

    def probabilities(self) -> np.ndarray[Any, Any]:
        """Of each added sample, float64: 1 - prod(1 - min(1, t / captions with the entry)) over its entries."""
        found, counts = np.concatenate([np.zeros(0, np.int32), *self._found]), np.array(self._counts, np.int64)
        share = np.minimum(1, self.t / np.maximum(np.bincount(found, minlength=len(self._numbers)), 1))
        self.head = int((share < 1).sum())  # entries that are thinned
        self.used = len(np.unique(found))
        with np.errstate(divide="ignore"):
            left = np.bincount(np.repeat(np.arange(len(counts)), counts), np.log1p(-share[found]), len(counts))
        return np.asarray(np.abs(np.expm1(left)))
