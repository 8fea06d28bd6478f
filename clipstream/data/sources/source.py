"""A source: the shards of all entries of its setting `shards`, each listed and opened by its type.

Settings enter; names of shards, numbers of samples and open shards leave. Listing reads tables; tars are read when they
are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from clipstream.config.plugins import raised
from clipstream.data.settings import SourceSettings
from clipstream.data.sources.protocol import OpenShard, SourceContext, SourceType
from clipstream.data.sources.registry import entries, source_type
from clipstream.data.tar import SampleRef
from clipstream.data.transport.shard_cache import ShardCache
from clipstream.data.transport.transfer import ShardError
from clipstream.errors import ClipstreamError, Dropped, SettingsError

Result = TypeVar("Result")


class Source:
    """The shards of a source.

    Args:
        settings: of the source.
        store: downloads shards; None if shards are only listed.
        cache: folder for the Arrow files of tables; in clipstream's cache folder unless given.
        place: dotted key of the source in the settings, for messages.

    Attributes:
        names: the shards, in order.
        samples: how many samples they hold; None if that takes opening them.
        counts: samples of each shard in the order of `names`, set by `count_samples`.
        empty: number of a shard without samples -> its fault, set by `count_samples`.

    Raises:
        SettingsError: the shards cannot be listed.
        DataError: a table does not exist, cannot be read, or names no images.
    """

    def __init__(
        self,
        settings: SourceSettings,
        store: ShardCache | None,
        *,
        cache: str | None = None,
        place: str = "data.sources",
    ) -> None:
        self.type = settings.type
        self._key, self._is_plugin = place, ":" in settings.type
        listed = list(entries(settings.shards, settings.type))
        types: dict[str, SourceType] = {}
        for name in dict.fromkeys(name for name, _ in listed):
            own = settings.model_copy(update={"shards": [entry for other, entry in listed if other == name]})
            types[name] = self._call(source_type(name), own, SourceContext(store, cache, place))
        self.names: list[str] = []
        self._types: dict[str, SourceType] = {}
        for name, entry in listed:
            shards = self._call(types[name].list_shards, entry)
            self.names += shards
            self._types.update(dict.fromkeys(shards, types[name]))
        self._parts = [(kind, [name for name in self.names if self._types[name] is kind]) for kind in types.values()]
        totals = [self._call(kind.total_samples, names) for kind, names in self._parts]
        self.samples = None if None in totals else sum(total for total in totals if total is not None)
        self.counts: list[int] | None = None
        self.empty: dict[int, str] = {}

    def _call(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a method of a type; what a user's own raises becomes a SettingsError."""
        try:
            return function(*args)
        except (ClipstreamError, ShardError):
            raise
        except Exception as error:
            if not self._is_plugin:
                raise
            raise SettingsError(f"{self._key}: {raised(self.type, error)}") from error

    def open(self, name: str) -> OpenShard:
        """Open a shard; a remote one is downloaded first.

        Raises:
            ShardError, OSError: it cannot be read.
        """
        if not self._is_plugin:
            return self._types[name].open(name)
        try:
            return _PluginShard(self._types[name].open(name), self.type)
        except (ClipstreamError, ShardError, OSError):
            raise
        except Exception as error:
            raise ShardError("source_error", raised(self.type, error)) from error

    def release(self, name: str, *, keep: bool = True) -> None:
        """Mark a shard as closed by this process; `keep` is False if its download was not usable."""
        self._types[name].release(name, keep=keep)

    def prefetch(self, name: str) -> bool:
        """Download a remote shard ahead of `open`; True if it must be released.

        Raises:
            ShardError, OSError, SettingsError: it cannot be downloaded now.
        """
        return self._types[name].prefetch(name)

    def is_remote(self, name: str) -> bool:
        """Whether opening the shard downloads it."""
        return self._types[name].is_remote(name)

    def is_cheap(self, name: str) -> bool:
        """Whether opening the shard neither downloads nor scans a file."""
        return self._types[name].cheap

    def is_tar(self, name: str) -> bool:
        """Whether the shard is a tar, which may have a side index."""
        return self._types[name].tars

    def title(self, name: str) -> str:
        """The shard's name in messages and sample keys, without credentials."""
        return self._types[name].title(name)

    def summary(self) -> str:
        """What the source holds, in words."""
        parts = " and ".join(self._call(kind.describe, names) for kind, names in self._parts)
        return parts + ("" if self.samples is None else f", {self.samples:,} samples")

    def num_samples(self, name: str) -> int | None:
        """Samples of a shard as its type knows them; None for a tar."""
        return self._call(self._types[name].num_samples, name)

    @property
    def missing(self) -> list[str]:
        """Local shards that do not exist."""
        return [shard for kind, names in self._parts for shard in kind.missing(names)]


class _PluginShard(OpenShard):
    """A shard of a user's own type: what it raises drops the sample as `source_error`."""

    def __init__(self, shard: OpenShard, type: str) -> None:
        self._shard, self._type = shard, type
        self.index = shard.index

    def _call(self, function: Callable[..., dict[str, bytes]], *args: object) -> dict[str, bytes]:
        try:
            return function(*args)
        except Dropped:
            raise
        except Exception as error:
            raise Dropped("source_error", raised(self._type, error)) from error

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        return self._call(self._shard.load, ref, suffixes)

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        return self._call(self._shard.look, ref)

    def close(self) -> None:
        self._shard.close()
