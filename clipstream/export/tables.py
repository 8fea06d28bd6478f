"""The export of a store's features as files that other programs read.

    OUT/PART/SOURCE-00000.parquet     a row for an image's view or a caption: source, shard, key, its features, …
    OUT/PART.npy                      the features [N, D]
    OUT/PART.keys.parquet             what the rows of PART.npy belong to: the columns of above without features

Samples that were dropped have no row. A file appears under its name when it is complete; the Parquet files of a part
replace those of an older export together.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.features.store import FeatureStore
from clipstream.features.stored_rows import StoredRows
from clipstream.text import file_name
from clipstream.utils import atomic_write
from clipstream.utils.table_files import SAMPLE, TableWriter


class Column(NamedTuple):
    """A further column of an exported part: its type in pyarrow, and the values for the columns of a block of rows."""

    type: Any
    values: Callable[[Mapping[str, list[Any]]], Any]


def export(
    store: FeatureStore,
    part: str,
    out: Path,
    form: str,
    dtype: str | None = None,
    captions: bool = False,
    file_rows: int | None = None,
    *,
    more: Mapping[str, Column] | None = None,
) -> list[Path]:
    """Export a part, and return the files.

    Args:
        form: 'parquet' or 'npy'.
        dtype: 'float16' or 'float32'; float16 for features that are stored so, float32 for all others.
        file_rows: rows of a Parquet file, about; all of a source unless set.
        more: further columns of Parquet files, by name.

    Raises:
        SettingsError: no such part, or the folder cannot be written, or has Parquet files of other sources.
        ClipstreamError: a file cannot be written, as when the disk is full.
    """
    rows = StoredRows(store, part)
    kind = np.dtype(dtype or ("float16" if store.manifest.parts[part].dtype == "float16" else "float32"))
    with errors_as(SettingsError, f"{out} cannot be made", OSError):
        out.mkdir(parents=True, exist_ok=True)
    if form == "npy":
        return _numpy(rows, out, kind, captions)
    folder, own = out / file_name(part), "|".join(re.escape(file_name(one)) for one in store.manifest.sources)
    older = sorted(folder.glob("*.parquet"))
    for path in older:
        if not re.fullmatch(rf"(?:{own})-\d{{5,}}\.parquet", path.name):
            raise SettingsError(f"{path} is of another export, whose rows would be read too: name another folder")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=out) as draft:
        made = list(_parquet(rows, Path(draft), kind, captions, file_rows, more or {}))
        with errors_as(ClipstreamError, f"{folder} could not be written", OSError):
            folder.mkdir(exist_ok=True)
            for path in older:
                path.unlink()
            return [path.rename(folder / path.name) for path in made]


def _columns(rows: StoredRows, captions: bool) -> dict[str, Any]:
    """Type of each column besides the features."""
    if rows.per_caption:
        return {**dict(SAMPLE), "choice": pa.int32(), **({"caption": pa.string()} if captions else {})}
    views = {"view": pa.int32()} if rows.views > 1 else {}
    return {**dict(SAMPLE), **views, **({"captions": pa.list_(pa.string())} if captions else {})}


def _blocks(rows: StoredRows, captions: bool) -> Iterator[tuple[str, dict[str, list[Any]], np.ndarray[Any, Any]]]:
    """(source, its columns, features float32 [m, D] as stored) of blocks of rows, in order."""
    names_of = _columns(rows, captions)
    for number, shard in enumerate(rows.shards):
        texts = shard.source.texts(shard.number)
        for block in shard.blocks(rows.step(number)):
            samples, choices = block.samples.tolist(), block.choices.tolist()
            values: dict[str, list[Any]] = {
                "source": [shard.source.name] * len(samples),
                "shard": [shard.name] * len(samples),
                "stored": [shard.source.shards[shard.number].name] * len(samples),  # its name in the store
                "key": [texts[i][0] for i in samples],
                "choice": choices,
                "view": choices,
            }
            if "caption" in names_of:
                values["caption"] = [texts[i][1][choice] for i, choice in zip(samples, choices, strict=True)]
            elif captions:
                values["captions"] = [texts[i][1] for i in samples]
            yield shard.source.name, values, block.features.numpy()


def _parquet(
    rows: StoredRows,
    out: Path,
    kind: np.dtype[Any],
    captions: bool,
    file_rows: int | None,
    more: Mapping[str, Column],
) -> Iterator[Path]:
    features_type = pa.list_(pa.from_numpy_dtype(kind), rows.width)
    others = [(name, column.type) for name, column in more.items()]
    schema = pa.schema([*_columns(rows, captions).items(), *others, ("features", features_type)])
    with contextlib.ExitStack() as stack:
        writer: TableWriter | None = None
        before, number = "", 0
        for source, columns, features in _blocks(rows, captions):
            full = writer is not None and file_rows is not None and writer.rows >= file_rows
            if writer is None or source != before or full:
                stack.close()
                number = number + 1 if source == before else 0
                path = out / f"{file_name(source)}-{number:05d}.parquet"
                writer, before = stack.enter_context(TableWriter(path, schema)), source
                yield path
            flat = pa.array(features.astype(kind).reshape(-1))
            added = {name: column.values(columns) for name, column in more.items()}
            writer.write({**columns, **added, "features": pa.FixedSizeListArray.from_arrays(flat, rows.width)})


def _numpy(rows: StoredRows, out: Path, kind: np.dtype[Any], captions: bool) -> list[Path]:
    path, keys = out / f"{file_name(rows.part)}.npy", out / f"{file_name(rows.part)}.keys.parquet"
    draft = path.with_name(f"{path.name}.tmp")
    shape = (len(rows) * rows.views, rows.width)
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    try:
        with TableWriter(keys, pa.schema(list(_columns(rows, captions).items()))) as table, draft.open("wb") as file:
            np.lib.format.write_array_header_2_0(file, header)
            for _, columns, features in _blocks(rows, captions):
                table.write(columns)
                file.write(features.astype(kind).data)
        atomic_write.flush(draft)
        draft.replace(path)
    except OSError as error:
        raise ClipstreamError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return [path, keys]
