"""Settings of exact epochs."""

from __future__ import annotations

from typing import Any

from clipstream.data.settings import DataSettings
from tests.support.loaders import data


def indexed(shards: Any, tail: str = "drop", batch: int = 12, **changes: Any) -> DataSettings:
    sampling = {"mode": "indexed", "remainder": tail, **changes.pop("sampling", {})}
    return data(shards, sampling=sampling, global_batch_size=batch, **changes)
