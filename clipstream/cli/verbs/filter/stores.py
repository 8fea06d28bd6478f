"""What `clipstream filter` reads of stores of features, for which it needs torch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from clipstream.features.sample_scores import KINDS, sample_scores
from clipstream.features.store import FeatureStore


def scores_of(where: str) -> Any:
    """The scores of a store's samples as a table: source, shard, key, score. `where` is STORE or STORE:KIND."""
    path, _, kind = where.rpartition(":")
    path, kind = (path, kind) if kind in KINDS else (where, KINDS[0])
    tables = []
    for found in sample_scores(FeatureStore(path), kind):
        names = {name: pa.repeat(getattr(found, name), len(found.keys)) for name in ("source", "shard")}
        tables.append(pa.table({**names, "key": pa.array(found.keys, pa.string()), "score": found.scores}))
    return pa.concat_tables(tables)
