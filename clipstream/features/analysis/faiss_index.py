"""FAISS indexes of features, which are read in blocks; needs the extra `clipstream[faiss]`.

An index is a file of its own, with a JSON file beside it that says of what features it was made. Products are cosines,
as rows and queries have length 1. The whole index is in memory, while it is made as well as while it is searched.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipstream.errors import SettingsError
from clipstream.features.analysis.search import Found, Rows
from clipstream.utils import atomic_write

EXTRA = "FAISS is not installed: pip install 'clipstream[faiss]'"
TRAINED_ON = 100_000  # rows, at most
PROBED = 16  # one in so many lists of an inverted file is searched, but at least 8 lists


@dataclass(frozen=True)
class FaissIndex:
    """An index in memory."""

    index: Any  # faiss.Index
    factory: str

    def search(self, queries: torch.Tensor, k: int) -> Found:
        """The k nearest rows that the index finds, for queries float32 [q, D]; -1 where it finds fewer."""
        scores, rows = self.index.search(np.ascontiguousarray(queries.numpy()), k)
        return Found(torch.from_numpy(scores), torch.from_numpy(rows))


def default_factory(rows: int) -> str:
    """`IVFn,Flat` with n = 4 sqrt(rows) lists, of at least 39 rows each, as FAISS recommends; 'Flat' for few rows."""
    lists = min(int(4 * math.sqrt(rows)), rows // 39)
    return f"IVF{lists},Flat" if lists > 1 else "Flat"


def open_index(rows: Rows, factory: str, path: Path, identity: dict[str, object]) -> FaissIndex:
    """The index in a file; made and written if it is not there, or if it was made of other features.

    Args:
        factory: FAISS's description of the index, such as 'IVF1024,PQ64' or 'HNSW32'; '' for `default_factory`.
        identity: what the rows are, to be compared with what is written beside the file.

    Raises SettingsError: FAISS is not installed, or cannot make or read such an index, or the file cannot be written.
    """
    try:
        import faiss
    except ImportError as error:
        raise SettingsError(EXTRA) from error
    factory = factory or default_factory(len(rows))
    about = {"factory": factory, "rows": len(rows), **identity}
    beside = path.with_name(f"{path.name}.json")
    known: object = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads(beside.read_bytes())
    if path.exists() and known == about:
        try:
            return FaissIndex(_probing(faiss, faiss.read_index(str(path))), factory)
        except RuntimeError as error:
            raise SettingsError(f"{path} cannot be read ({error}): remove it, and it is made again") from error
    try:
        index = faiss.index_factory(rows.width, factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(_sample(rows))
        for _, block in rows.blocks():
            index.add(np.ascontiguousarray(block.numpy()))
    except RuntimeError as error:
        raise SettingsError(f"--index faiss:{factory}: FAISS cannot make it: {error}") from error
    draft = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        faiss.write_index(index, str(draft))
        atomic_write.flush(draft)
        draft.replace(path)
        atomic_write.replace(beside, json.dumps(about).encode())
    except (OSError, RuntimeError) as error:
        draft.unlink(missing_ok=True)
        raise SettingsError(f"--index: {path} cannot be written: {error}") from error
    return FaissIndex(_probing(faiss, index), factory)


def _sample(rows: Rows) -> np.ndarray[Any, Any]:
    """Evenly spaced rows to train an index on, float32 [n, D]."""
    step = -(-len(rows) // TRAINED_ON)
    return np.concatenate([block[-first % step :: step].numpy() for first, block in rows.blocks()])


def _probing(faiss: Any, index: Any) -> Any:
    """The index, set to search `PROBED` of its lists if it is an inverted file."""
    found = faiss.try_extract_index_ivf(index)
    if found is not None:
        found.nprobe = min(found.nlist, max(8, found.nlist // PROBED))
    return index


def recall(found: Found, exact: Found) -> float:
    """The share of the exact rows that are among those found."""
    hits = (found.rows[:, :, None] == exact.rows[:, None, :]).any(dim=1)
    return float(hits.float().mean()) if hits.numel() else 1.0
