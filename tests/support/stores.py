"""A shard cache, and the failure of a shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipstream.errors import ShardError
from clipstream.storage.download import Fetcher
from clipstream.storage.shard_cache import ShardCache
from tests.support.tars import tar_bytes

BODY = tar_bytes([{"__key__": f"{i}", "jpg": bytes([i]) * 9000, "txt": "x"} for i in range(20)])


def make_store(folder: Path | None = None, **options: float) -> ShardCache:
    fetcher = Fetcher(**{"backoff": 0.01, **options})  # type: ignore[arg-type]
    return ShardCache(None if folder is None else str(folder), fetcher=fetcher)


def failure(store: ShardCache, url: str) -> ShardError:
    with pytest.raises(ShardError) as caught:
        store.local(url)
    leftover = [path.name for path in store.folder.iterdir() if path.suffix not in (".lock", ".failed")]
    assert leftover == [], "a failed transfer left a file that looks like a shard"
    return caught.value
