"""The registry of source types, and `Source`: the shards of all entries of a setting `shards`, each of its type.

Settings enter; names of shards, numbers of samples and open shards leave. Without `type`, the name of an entry decides:
`SCHEME:` as in TYPES, a table by its suffix, anything else is a tar. Types are imported on first use. Listing reads
tables; tars are read when they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import cache
from typing import TypeVar

from clipstream.data.settings import AUTO, SourceSettings
from clipstream.data.sources import OpenShard, SourceContext, SourceType
from clipstream.errors import ClipstreamError, Dropped, SettingsError
from clipstream.storage.shard_url import (
    TABLE_FORMATS,
    ShardURL,
    expand_pattern,
    expand_pipe,
    parts_of,
    table_format,
    with_variables,
)
from clipstream.storage.tar import SampleRef, ShardIndex
from clipstream.storage.transfer import ShardError
from clipstream.text import printable
from clipstream.utils.plugins import load_plugin, raised
from clipstream.utils.section import with_home

Result = TypeVar("Result")

TYPES = {
    "tar": "clipstream.data.sources.tars:TarSource",
    "table": "clipstream.data.sources.tables:TableSource",
    "folder": "clipstream.data.sources.folders:FolderSource",
    "imagenet": "clipstream.data.sources.folders:FolderSource",
    "benchmark": "clipstream.data.sources.tars:BenchmarkSource",
    "toy": "clipstream.data.sources.toy_data:ToySource",
    "synthetic": "clipstream.data.sources.toy_data:SyntheticSource",
}


@cache
def source_type(name: str) -> type[SourceType]:
    """The class of a built-in type or of a `module:Name`. Raises SettingsError if it is none."""
    try:
        found = load_plugin(TYPES.get(name, name))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if not isinstance(found, type) or SourceType not in found.__mro__:
        raise SettingsError(f"{name}: derive it from clipstream.data.sources.SourceType")
    return found


def entries(spec: str | list[str], type: str = AUTO) -> Iterator[tuple[str, str]]:
    """(name of a type, entry for its `list_shards`) of all that `spec` names, in order, duplicates kept.

    Braces and `::` have webdataset's meaning, `*` and `~` the shell's (matches are sorted). `${NAME}` is an environment
    variable, or WDS_NAME as in webdataset; in a `pipe:` command the shell replaces it. A local file need not exist.
    A `module:Name` receives the items of `spec` unchanged.

    Raises:
        SettingsError: a pattern matches nothing, a local folder is named, a variable is not set, nothing is named, or
            a command is named although WDS_SECURE forbids commands.
    """
    parts = parts_of(spec) if ":" not in type else [spec] if isinstance(spec, str) else spec
    if not parts:
        raise SettingsError(f"{spec!r} matches no shard")
    for part in parts:
        if ":" in type:
            yield type, part
        elif part.startswith("pipe:"):
            yield from (("tar", command) for command in expand_pipe(part))
        elif (scheme := ShardURL(text := with_home(with_variables(part))).scheme) in TYPES:
            yield str(scheme), text
        elif type not in (AUTO, "tar", "table"):
            yield type, f"{type}:{text}"
        else:
            for url in expand_pattern(text):
                if type == "table" and table_format(url) is None:
                    raise SettingsError(f"{url}: expected a table with the suffix {', '.join(TABLE_FORMATS)}")
                yield ("tar" if table_format(url) is None else "table") if type == AUTO else type, url


def typed_shards(
    spec: str | list[str], type: str = AUTO, *, write: bool = True
) -> Iterator[tuple[str, type[SourceType]]]:
    """The shards that `spec` names, each with its type; a table, and an item for a `module:Name`, is one name.

    Without `write`, entries whose listing writes files are left out. Raises as `entries`.
    """
    for name, entry in entries(spec, type):
        cls = source_type(name)
        if name in ("tar", "table") or ":" in name:
            yield entry, cls
        elif write or not cls.writes:
            made = cls(SourceSettings(shards=entry), SourceContext())
            yield from ((shard, cls) for shard in made.list_shards(entry))


def expand(spec: str | list[str], type: str = AUTO, *, write: bool = True) -> list[str]:
    """The names alone of `typed_shards`."""
    return [shard for shard, _ in typed_shards(spec, type, write=write)]


class Source:
    """The shards of a source.

    Attributes:
        names: the shards, in order.
        types: shard -> its type.
        samples: how many samples they hold; None if that takes opening them.
        counts: samples of each shard in the order of `names`, set by `count_samples`.
        factors: how often each shard is drawn, in proportion; None for equally often.
        empty: number of a shard without samples -> its fault, set by `count_samples`.

    Raises:
        SettingsError: the shards cannot be listed.
        DataError: a table does not exist, cannot be read, or names no images.
    """

    def __init__(self, settings: SourceSettings, context: SourceContext | None = None) -> None:
        self.settings, self.context = settings, context or SourceContext()
        self._is_plugin = ":" in settings.type
        factors = settings.upsampling_factors
        parts = [settings.shards] if factors is None else settings.parts
        listed = [
            (*found, factor)
            for part, factor in zip(parts, factors or [1.0], strict=True)
            for found in entries(part, settings.type)
        ]
        made: dict[str, SourceType] = {}
        for name in dict.fromkeys(name for name, _, _ in listed):
            own = settings.model_copy(update={"shards": [entry for other, entry, _ in listed if other == name]})
            made[name] = self._call(source_type(name), own, self.context)
        self.names: list[str] = []
        each: list[float] = []
        self.types: dict[str, SourceType] = {}
        for name, entry, factor in listed:
            shards = self._call(self._list, made[name], entry)
            self.names += shards
            each += [factor] * len(shards)
            self.types.update(dict.fromkeys(shards, made[name]))
        self._parts = [(kind, [name for name in self.names if self.types[name] is kind]) for kind in made.values()]
        totals = [self._call(kind.total_samples, names) for kind, names in self._parts]
        self.samples = None if None in totals else sum(total or 0 for total in totals)
        self.counts: list[int] | None = None
        self.factors = None if factors is None else tuple(each)
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
            raise SettingsError(f"{self.context.key}: {raised(self.settings.type, error)}") from error

    def _list(self, kind: SourceType, entry: str) -> list[str]:
        found = kind.list_shards(entry)
        if not self._is_plugin:
            return list(found)
        names = list(found) if isinstance(found, Iterable) and not isinstance(found, str | Set | Mapping) else []
        if not names or not all(isinstance(name, str) for name in names):
            gave = printable(repr(names or found), 200)
            raise SettingsError(
                f"{self.context.key}: {self.settings.type}: list_shards({entry!r}) returned {gave}, not a list of "
                f"shard names (str)"
            )
        return names

    def open(self, name: str) -> OpenShard:
        """Open a shard; a remote one is downloaded first.

        Raises:
            ShardError, OSError: it cannot be read.
        """
        if not self._is_plugin:
            return self.types[name].open(name)
        try:
            return _PluginShard(self.types[name].open(name), self.settings.type)
        except (ClipstreamError, ShardError, OSError):
            raise
        except Exception as error:
            raise ShardError("source_error", raised(self.settings.type, error)) from error

    def num_samples(self, name: str) -> int | None:
        """Samples of a shard as its type knows them; None for a tar."""
        return self._call(self.types[name].num_samples, name)

    def summary(self) -> str:
        """What the source holds, in words."""
        parts = " and ".join(self._call(kind.describe, names) for kind, names in self._parts)
        return parts + ("" if self.samples is None else f", {self.samples:,} samples")

    @property
    def missing(self) -> list[str]:
        """Local shards that do not exist."""
        return [shard for kind, names in self._parts for shard in kind.missing(names)]


class _PluginShard(OpenShard):
    """A shard of a user's own type: what it raises drops the sample as `source_error`."""

    def __init__(self, shard: OpenShard, type: str) -> None:
        index = getattr(shard, "index", None)
        if OpenShard not in shard.__class__.__mro__ or not isinstance(index, ShardIndex):
            raise ShardError(
                "source_error",
                f"{type}: open returned {shard.__class__.__name__} with {index.__class__.__name__} as `index`: derive "
                "it from clipstream.data.sources.OpenShard, and make `index` a ShardIndex",
            )
        self._shard, self._type = shard, type
        self.index = index

    def _call(self, function: Callable[..., dict[str, bytes]], *args: object) -> dict[str, bytes]:
        try:
            members = function(*args)
        except Dropped:
            raise
        except Exception as error:
            raise Dropped("source_error", raised(self._type, error)) from error
        mapping = isinstance(members, Mapping)
        odd = {name: value for name, value in members.items() if not isinstance(value, bytes)} if mapping else members
        if odd or not mapping:
            gave = f"{self._type}: load returned {printable(repr(odd), 80)}"
            raise Dropped("source_error", f"{gave}: return members as bytes by suffix")
        return members

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        return self._call(self._shard.load, ref, suffixes)

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        return self._call(self._shard.look, ref)

    def close(self) -> None:
        self._shard.close()
