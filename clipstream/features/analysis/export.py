"""Export of a store's features to Parquet or NumPy: a store enters, files leave.

    OUT/PART/SOURCE-00000.parquet     a row a picture's view or a caption: source, shard, key, its features, …
    OUT/PART.npy                      the features [N, D]
    OUT/PART.keys.parquet             what the rows of PART.npy belong to: the columns of above without features

Samples that were dropped have no row. A file appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipstream.errors import ClipstreamError, SettingsError
from clipstream.features.analysis.rows import StoredRows
from clipstream.features.analysis.tables import TableWriter
from clipstream.features.store import FeatureStore
from clipstream.text import file_name
from clipstream.utils import atomic_write

FORMATS = ("parquet", "npy")
DTYPES = ("float16", "float32")


def export(
    store: FeatureStore,
    part: str,
    out: Path,
    form: str,
    *,
    dtype: str | None = None,
    captions: bool = False,
    file_rows: int | None = None,
) -> list[Path]:
    """Export a part, and return the files.

    Args:
        form: 'parquet' or 'npy'.
        dtype: 'float16' or 'float32'; float16 for features that are stored so, float32 for all others.
        captions: whether to write the captions of each picture or text too.
        file_rows: rows of a Parquet file, about; all of a source unless set.

    Raises:
        SettingsError: no such part, or the folder cannot be written.
        ClipstreamError: a file cannot be written, as when the disk is full.
    """
    rows = StoredRows(store, part)
    kind = np.dtype(dtype or ("float16" if store.manifest.parts[part].dtype == "float16" else "float32"))
    files = _parquet if form == "parquet" else _numpy
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be made: {error.strerror}") from error
    return list(files(rows, out, kind, captions, file_rows))


def _columns(rows: StoredRows, captions: bool) -> dict[str, Any]:
    """Type of each column besides the features."""
    columns = {"source": pa.string(), "shard": pa.string(), "key": pa.string()}
    if rows.store.manifest.per_caption(rows.part):
        return columns | {"choice": pa.int32()} | ({"caption": pa.string()} if captions else {})
    columns |= {"view": pa.int32()} if rows.views > 1 else {}
    return columns | ({"captions": pa.list_(pa.string())} if captions else {})


def _blocks(rows: StoredRows, captions: bool) -> Iterator[tuple[str, dict[str, list[Any]], np.ndarray[Any, Any]]]:
    """(source, its columns, features float32 [m, D] as stored) of blocks of rows, in order."""
    names_of = _columns(rows, captions)
    for number, shard in enumerate(rows.shards):
        keys = shard.source.keys(shard.number)
        texts = shard.source.captions(shard.number) if captions else []
        for block in shard.blocks(rows.step(number)):
            samples, choices = block.samples.tolist(), block.choices.tolist()
            values: dict[str, list[Any]] = {
                "source": [shard.source.name] * len(samples),
                "shard": [shard.name] * len(samples),
                "key": [keys[i] for i in samples],
                "choice": choices,
                "view": choices,
            }
            if "caption" in names_of:
                values["caption"] = [texts[i][choice] for i, choice in zip(samples, choices, strict=True)]
            elif captions:
                values["captions"] = [texts[i] for i in samples]
            yield shard.source.name, {name: values[name] for name in names_of}, block.features.numpy()


def _parquet(rows: StoredRows, out: Path, kind: np.dtype[Any], captions: bool, file_rows: int | None) -> Iterator[Path]:
    features_type = pa.list_(pa.from_numpy_dtype(kind), rows.width)
    schema = pa.schema([*_columns(rows, captions).items(), ("features", features_type)])
    folder = out / file_name(rows.part)
    with contextlib.ExitStack() as stack:
        writer: TableWriter | None = None
        before = ""
        number = 0
        for source, columns, features in _blocks(rows, captions):
            full = writer is not None and file_rows is not None and writer.rows >= file_rows
            if writer is None or source != before or full:
                stack.close()
                number = number + 1 if source == before else 0
                path = folder / f"{file_name(source)}-{number:05d}.parquet"
                writer, before = stack.enter_context(TableWriter(path, schema)), source
                yield path
            flat = pa.array(features.astype(kind).reshape(-1))
            writer.write({**columns, "features": pa.FixedSizeListArray.from_arrays(flat, rows.width)})


def _numpy(rows: StoredRows, out: Path, kind: np.dtype[Any], captions: bool, file_rows: int | None) -> Iterator[Path]:
    path, keys = out / f"{file_name(rows.part)}.npy", out / f"{file_name(rows.part)}.keys.parquet"
    draft = path.with_name(f"{path.name}.tmp")
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
    try:
        with TableWriter(keys, pa.schema(list(_columns(rows, captions).items()))) as table, draft.open("wb") as file:
            shape = (len(rows) * rows.views, rows.width)
            np.lib.format.write_array_header_2_0(file, {**header, "shape": shape})
            for _, columns, features in _blocks(rows, captions):
                table.write(columns)
                file.write(features.astype(kind).data)
        atomic_write.flush(draft)
        draft.replace(path)
    except OSError as error:
        raise ClipstreamError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    yield from (path, keys)
