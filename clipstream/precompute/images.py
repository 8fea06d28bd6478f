"""The images of a store's samples: a store and the data that it was computed of enter, the bytes of images leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipstream.config.settings import load
from clipstream.data.order_plan import stable_names
from clipstream.data.shard_pass import ImageReader
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import SettingsError
from clipstream.features.store import FeatureStore
from clipstream.storage.shard_cache import ShardCache


class StoredImages:
    """Images of the samples of a store. Reading those of a shard in a row opens it once.

    Args:
        data: as --train-data names them.
        flags: of training, on how these are read.

    Raises SettingsError: the data lack the shards of the store.
    """

    def __init__(self, store: FeatureStore, data: str, cache: ShardCache, flags: Sequence[str] = ()) -> None:
        read = load(["--train-data", data, *flags]).data.sources["train"].model_dump()
        self._sources: dict[str, tuple[ImageReader, dict[str, str]]] = {}
        for name, info in store.manifest.sources.items():
            given: dict[str, Any] = {**read, **info.settings}
            source = Source(SourceSettings.model_validate(given), SourceContext(cache))
            names = dict(zip(stable_names(source.names), source.names, strict=True))
            if missing := [shard.name for shard in info.shards if shard.name not in names]:
                raise SettingsError(f"--images {data}: there is no shard {missing[0]}, of which the store has features")
            self._sources[name] = ImageReader(source), names

    def read(self, name: str, shard: str, key: str) -> bytes | None:
        """The image file of a sample of the source `name` and of the shard as the store names it; None if it cannot be
        read."""
        read, names = self._sources[name]
        return read(names[shard], key) if shard in names else None
