"""The conditions of `clipstream filter`: texts in SQL and columns of samples enter; which samples hold them leaves.

Each condition is an expression of DuckDB over the table `samples`, computed for all samples at once: aggregates, window
functions and subqueries see all of them. A missing value (null or NaN) is NULL, and a condition that is NULL does not
hold. A JSON path is a field of nested structs: `json.exif.width`, `json.tags."0"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.errors import SettingsError, did_you_mean
from clipstream.text import listed

ROW = "row of the sample"  # in the table beside the fields


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
