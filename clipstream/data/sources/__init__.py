"""Sources: the setting `shards` becomes shards that can be opened.

Settings enter; names of shards, samples per shard and open shards leave. Each type of source (tars, tables, folders,
CLIP_benchmark, toy and synthetic data, or a user's own) has a class, and `Source` combines the types of one setting.
Only this package knows which type a shard has. Without `type`, the name of an entry decides: `TYPE:`, a
table by its suffix, anything else is a tar. Listing reads tables; tars are read when they are opened.

A source type is named by `data.sources.NAME.type`: a registered one, or your own `module:Name`
(docs/plugins.md has an example). Its class is called with the source's settings and a `SourceContext`, lists its shards
in the main process, and opens them in the workers, which are forked: open files, connections and the like in `open`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from zlib import crc32

from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import AUTO, IMAGE_KEY, SourceSettings
from clipstream.errors import ClipstreamError, Dropped, SettingsError, ShardError, errors_as
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import (
    ONLY_NAMED,
    TABLE_FORMATS,
    WITHHELD,
    ShardURL,
    expand_pattern,
    expand_pipe,
    parts_of,
    redact,
    shard_names,
    table_format,
    whole_file,
    with_variables,
)
from clipstream.storage.tar import Place as Place
from clipstream.storage.tar import SampleRef as SampleRef
from clipstream.storage.tar import ShardIndex as ShardIndex
from clipstream.text import counted, printable
from clipstream.utils.atomic_write import note_input
from clipstream.utils.plugins import call_plugin, describe_error, load_plugin
from clipstream.utils.section import builtin_parts, types_of, with_home

if TYPE_CHECKING:
    import numpy as np

PROBED, BLOCK = 256, 4096  # shards of which hosts compare more than the size, and bytes of these
MISSING_IMAGE = "missing_picture"  # the reason for a row whose image file cannot be read


class OpenShard(Protocol):
    """An open shard, with its samples in order in `index`; keys are unique in the shard."""

    index: ShardIndex

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The members of a sample as bytes by suffix in lower case: all, or at least those of `suffixes` that exist.

        Raises Dropped: the sample cannot be read; it is counted under the reason.
        """
        ...

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """The members shown in diagnostics, also of samples that `load` drops, where some can be read."""
        return self.load(ref)

    def place(self, ref: SampleRef, keys: Collection[str]) -> Place | None:
        """Where the image of a sample is; None if it is nowhere as bytes of a file of the user's.

        Args:
            keys: suffixes of the image member, as `image_key` has them; the first present counts.
        """
        return None

    def files(self, ref: SampleRef) -> list[str]:
        """The files of its own that a sample is read from, or would be if they were there."""
        return []

    def close(self) -> None:
        """Release what `open` acquired."""
        return


def with_file(shard: OpenShard, ref: SampleRef, detail: str) -> str:
    """Why a sample was dropped, behind the path of its file where it has one of its own."""
    file = next(iter(shard.files(ref)), "")
    return detail if not file or file in detail else f"{file}: {detail}" if detail else file


@dataclass
class SourceContext:
    """What a source type may use besides its settings."""

    shard_cache: ShardCache | None = None  # downloads shards; None as long as shards are only listed
    cache: str | None = None  # folder for files kept between runs; None for the default one
    key: str = "data.sources"  # dotted key of the source in the settings, for messages

    @property
    def evaluates(self) -> bool:
        """Whether the data are those of an evaluation."""
        return self.key.startswith("evals.") and not self.key.endswith(".train")


class SourceType(Protocol):
    """The shards of one type."""

    tars: bool = False  # shards are tar files, which may have a side index
    staged: bool = False  # a copy of a shard can be used in its place
    writes: bool = False  # listing writes the shards, if they do not exist
    cheap: bool = False  # `open` neither transfers nor scans a file
    has_files: bool = False  # a sample has files of its own, see `OpenShard.files`
    generated: bool = False  # what follows `TYPE:` is no path
    columns: bool = False  # members are columns of a table, which the member `json` has as well

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        """Take the settings; `settings.shards` holds the entries of this type alone."""

    def list_shards(self, spec: str) -> Sequence[str]:
        """The names of the shards that `spec`, one entry of `settings.shards`, stands for, in order.

        Names are unique and stay the same from run to run: the data order is computed from them.
        """
        ...

    @classmethod
    def entries(cls, part: str, type: str, evaluates: bool, image_key: str) -> Sequence[tuple[str, str]]:
        """(type, entry) of what a name without a scheme of its own stands for; nothing if it is no name of this type.

        Arguments as of `entries`. Raises SettingsError: what it names holds nothing to read.
        """
        return ()

    def open(self, shard: str) -> OpenShard:
        """Open a shard.

        Raises ShardError, OSError: it cannot be read; it is counted and skipped, up to `data.max_shard_failures`.
        """
        ...

    def describe(self, shards: Sequence[str]) -> str:
        """These shards in a few words, for the start of a run."""
        return counted(len(shards), "shard", ",")

    def num_samples(self, shard: str) -> int | None:
        """Samples of a shard, exactly; None if that is not known. `data.sampling.mode indexed` needs it."""
        return None

    def total_samples(self, shards: Sequence[str]) -> int | None:
        """Samples of these shards together; None if that takes opening them."""
        counts = [self.num_samples(shard) for shard in shards]
        return None if None in counts else sum(count or 0 for count in counts)

    def keys(self, shard: str) -> Container[str] | None:
        """The keys of all samples of the file or folder that the shard is of; None if they take reading it."""
        return None

    def title(self, shard: str) -> str:
        """The path of the file or folder that the shard is of, in messages and sample names, without credentials."""
        return redact(shard)

    def missing(self, shards: Sequence[str]) -> list[str]:
        """Those of the shards that are local files and do not exist."""
        return []

    def is_remote(self, shard: str) -> bool:
        """Whether opening the shard downloads it."""
        return False

    def prefetch(self, shard: str) -> bool:
        """Download a remote shard ahead of `open`; True if it must be released.

        Raises ShardError, OSError, SettingsError: it cannot be downloaded now.
        """
        return False

    def release(self, shard: str, *, keep: bool = True) -> None:
        """Mark a shard as closed by this process; `keep` is False if its download was not usable."""
        return


Result = TypeVar("Result")


@cache
def source_type(name: str) -> type[SourceType]:
    """The class of a built-in type or of a `module:Name`. Raises SettingsError: it is no such class."""
    with errors_as(SettingsError, "", ValueError):
        found = builtin_parts(SourceSettings).get(name) or load_plugin(name)
    if not isinstance(found, type) or SourceType not in found.__mro__:
        raise SettingsError(f"{name}: derive it from clipstream.data.sources.SourceType")
    return found


def scheme_of(part: str) -> str | None:
    """The registered type that a part of `shards` names as `TYPE:`; None without one."""
    name, colon, _ = part.partition(":")
    return name if colon and name not in (AUTO, "tar", "table") and name in builtin_parts(SourceSettings) else None


def entries(
    spec: str | list[str], type: str = AUTO, *, evaluates: bool = False, image_key: str = IMAGE_KEY
) -> Iterator[tuple[str, str]]:
    """(name of a type, entry for its `list_shards`) of all that `spec` names, in order, duplicates kept.

    Braces and `::` have webdataset's meaning, `*` and `~` the shell's (matches are sorted). `${NAME}` is an environment
    variable, or WDS_NAME as in webdataset; in a `pipe:` command the shell replaces it. A local file need not exist.
    A `module:Name` receives the items of `spec` unchanged. A folder, also as `folder:PATH`, stands for what it holds.

    Args:
        evaluates: whether the data are those of an evaluation: see `folders.contents`.
        image_key: suffixes of images in a folder.

    Raises SettingsError: a pattern matches nothing, a folder holds nothing to read, a variable is not set, nothing is
    named, or a command is named although WDS_SECURE forbids commands.
    """
    parts = parts_of(spec) if ":" not in type else [spec] if isinstance(spec, str) else spec
    types = dict.fromkeys(found for name, found in builtin_parts(SourceSettings).items() if name != AUTO)
    if not parts:
        raise SettingsError(f"{spec!r} matches no shard")
    for part in parts:
        if ":" in type:
            yield type, part
        elif part.startswith(WITHHELD):
            place = part.removeprefix(WITHHELD)
            raise SettingsError(f"{place}: these shards are {ONLY_NAMED.format(place.rpartition(':')[0])}")
        elif part.startswith("pipe:"):
            yield from (("tar", command) for command in expand_pipe(part))
        elif held := [one for cls in types for one in cls.entries(part, type, evaluates, image_key)]:
            yield from held
        elif (scheme := scheme_of(text := with_home(with_variables(part)))) is not None:
            yield scheme, text
        elif type not in (AUTO, "tar", "table"):
            yield type, f"{type}:{text}"
        else:
            note_input(ShardURL(text).path or "")  # a pattern
            for url in expand_pattern(text):
                note_input(ShardURL(url).path or "")
                if type == "table" and table_format(url) is None:
                    raise SettingsError(f"{url}: expected a table with the suffix {', '.join(TABLE_FORMATS)}")
                yield ("tar" if table_format(url) is None else "table") if type == AUTO else type, url


def typed_shards(
    spec: str | list[str], settings: SourceSettings | None = None, *, write: bool = True, evaluates: bool = False
) -> Iterator[tuple[str, type[SourceType]]]:
    """The shards that `spec` names, each with its type; a table, and an item for a `module:Name`, is one name.

    Args:
        settings: of the source; the defaults without them.
        write: whether to list entries, too, whose listing writes files.

    Raises SettingsError: as `entries` and `settings_of`.
    """
    given, context = settings or SourceSettings.model_construct(shards=spec), SourceContext()
    for name, entry in entries(spec, given.type, evaluates=evaluates, image_key=given.image_key):
        cls = source_type(name)
        if name in ("tar", "table") or ":" in name:
            yield entry, cls
        elif write or not cls.writes:
            made = cls(settings_of(given, name, [entry], context.key), context)
            yield from ((shard, cls) for shard in made.list_shards(entry))


def expand(
    spec: str | list[str], settings: SourceSettings | None = None, *, write: bool = True, evaluates: bool = False
) -> list[str]:
    """The names alone of `typed_shards`."""
    return [shard for shard, _ in typed_shards(spec, settings, write=write, evaluates=evaluates)]


def settings_of(settings: SourceSettings, name: str, shards: list[str], key: str) -> SourceSettings:
    """The settings for the entries of a type: where `NAME:PATH` alone names it, with the defaults of its own keys.

    Raises SettingsError: one of these has no default; the message begins with `key`.
    """
    cls = types_of(SourceSettings).get(name, SourceSettings)
    if isinstance(settings, cls):
        return settings.model_copy(update={"shards": shards})
    given: dict[str, Any] = {field: getattr(settings, field) for field in settings.model_fields_set}
    given |= {"type": name, "shards": shards}
    if missing := [own for own, field in cls.model_fields.items() if field.is_required() and own not in given]:
        raise SettingsError(f"{key}: {shards[0]} requires {', '.join(missing)}: set type {name} as well")
    made = cls.model_validate(given)
    assert isinstance(made, SourceSettings)
    return made


class Source:
    """The shards of a source.

    Attributes:
        names: the shards, in order.
        types: shard -> its type.
        samples: how many samples they hold; None if that takes opening them.
        counts: samples of each shard in the order of `names`, set by `count_samples`.
        factors: how often each shard is drawn, in proportion; None for equally often.
        empty: number of a shard without samples -> its fault, set by `count_samples`.
        labels, neighbours, probabilities: what the order needs of each sample; set by `groups.look_up`, if at all.

    Raises:
        SettingsError: the shards cannot be listed.
        DataError: a table does not exist, cannot be read, or names no images.
    """

    def __init__(self, settings: SourceSettings, context: SourceContext | None = None) -> None:
        self.settings, self.context = settings, context or SourceContext()
        self._is_plugin = ":" in settings.type
        factors, evaluates = settings.upsampling_factors, self.context.evaluates
        parts = [settings.shards] if factors is None else settings.parts
        listed = [
            (*found, factor)
            for part, factor in zip(parts, factors or [1.0], strict=True)
            for found in entries(part, settings.type, evaluates=evaluates, image_key=settings.image_key)
        ]
        made: dict[str, SourceType] = {}
        for name in dict.fromkeys(name for name, _, _ in listed):
            own = [entry for other, entry, _ in listed if other == name]
            made[name] = self._call(source_type(name), settings_of(settings, name, own, self.context.key), self.context)
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
        self.samples = (
            None if None in totals or settings.probability is not None else sum(total or 0 for total in totals)
        )
        self.counts: list[int] | None = None
        self.factors = None if factors is None else tuple(each)
        self.empty: dict[int, str] = {}
        self.labels: list[np.ndarray[Any, Any]] | None = None
        self.neighbours: np.ndarray[Any, Any] | None = None
        self.probabilities: list[np.ndarray[Any, Any]] | None = None

    def _call(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a method of a type; what a user's own raises becomes a SettingsError."""
        try:
            return function(*args)
        except (ClipstreamError, ShardError):
            raise
        except Exception as error:
            if not self._is_plugin:
                raise
            raise SettingsError(f"{self.context.key}: {describe_error(self.settings.type, error)}") from error

    def _list(self, kind: SourceType, entry: str) -> list[str]:
        found = kind.list_shards(entry)
        if not self._is_plugin:
            return list(found)
        names = list(found) if isinstance(found, Iterable) and not isinstance(found, str | Set | Mapping) else []
        if not names or not all(isinstance(name, str) for name in names):
            gave = printable(repr(names or found), 200)
            raise SettingsError(
                f"{self.context.key}: {self.settings.type}: list_shards({entry!r}) returned {gave}, not a list of "
                "shard names (str)"
            )
        return names

    def open(self, name: str) -> OpenShard:
        """Open a shard; a remote one is downloaded first.

        Raises ShardError, OSError: it cannot be read.
        """
        if not self._is_plugin:
            return self.types[name].open(name)
        try:
            return _PluginShard(self.types[name].open(name), self.settings.type)
        except (ClipstreamError, ShardError, OSError):
            raise
        except Exception as error:
            raise ShardError("source_error", describe_error(self.settings.type, error)) from error

    @cached_property
    def shard_names(self) -> dict[str, str]:
        """Shard -> its name in the names of its samples, SHARD/KEY."""
        titles = {name: self.types[name].title(name) for name in self.names}
        names = shard_names(titles.values())
        return {name: names[title] for name, title in titles.items()}

    def split_name(self, sample: str) -> tuple[str, str]:
        """The shard, without credentials, and the key of a sample of this source by its name, SHARD/KEY."""
        names = self.shard_names
        shard = max((one for one in names if sample.startswith(f"{names[one]}/")), key=lambda one: len(names[one]))
        return redact(self.types[shard].title(shard)), sample[len(names[shard]) + 1 :]

    def known_keys(self, shard: str, *, read: bool = False) -> Container[str] | None:
        """The keys of all samples of the file or folder that a shard is of; those of local tars only with `read`."""
        kind = self.types[shard]
        if not read or not kind.tars or kind.is_remote(shard) or self.context.shard_cache is None:
            return kind.keys(shard)
        try:
            opened = self.open(shard)
        except (ShardError, OSError):  # counted when it is read
            return None
        opened.close()
        kind.release(shard)
        return None if opened.index.fault is not None else dict.fromkeys(ref.key for ref in opened.index.samples)

    def num_samples(self, name: str) -> int | None:
        """Samples of a shard as its type knows them; None for a tar."""
        return self._call(self.types[name].num_samples, name)

    def summary(self) -> str:
        """What the source holds, in words."""
        parts = " and ".join(self._call(kind.describe, names) for kind, names in self._parts)
        return parts + ("" if self.samples is None else f", {self.samples:,} samples")

    def contents(self) -> dict[str, str]:
        """The bytes of each local file of the shards, of up to `PROBED` with the checksum of a block in its middle.

        That tells whether two hosts have the same files, without reading them.
        """
        paths = [ShardURL(file).path for file in dict.fromkeys(map(whole_file, self.names))]
        files = [path for path in paths if path is not None and os.path.isfile(path)]

        def content(number: int) -> str:
            path, size, block = files[number], os.path.getsize(files[number]), ""
            if number % -(-len(files) // PROBED) == 0:
                with open(path, "rb", buffering=0) as file:
                    file.seek(size // 2)
                    block = f", crc32:{crc32(file.read(BLOCK)):08x} in the middle"
            return f"{size:,} bytes{block}"

        with ThreadPoolExecutor(16) as pool:  # a network disk answers several questions at once
            found = list(pool.map(content, range(len(files))))
        return {f"{self.context.key} {n} {os.path.basename(files[n])}": one for n, one in enumerate(found)}

    def begin(self, cache: ShardCache) -> None:
        """From now on, open shards through this cache; they stay as they were listed."""
        self.context.shard_cache = cache

    def with_settings(self, settings: SourceSettings) -> Source:
        """The same shards for settings that read them differently; what is known of their samples is found again."""
        other = copy.copy(self)
        other.settings, other.empty = settings, {}
        other.counts = other.labels = other.neighbours = other.probabilities = None
        return other

    @property
    def missing(self) -> list[str]:
        """Local shards that do not exist."""
        return [shard for kind, names in self._parts for shard in kind.missing(names)]


def list_sources(data: DataSettings, errors: list[ClipstreamError] | None = None) -> dict[str, Source]:
    """The sources of training by name, sorted, with the names of their shards; what `Source` raises is appended to
    `errors` if given, and its source left out.
    """
    found: dict[str, Source] = {}
    for name, section in sorted(data.sources.items()):
        try:
            found[name] = Source(section, SourceContext(cache=data.cache, key=f"data.sources.{name}"))
        except ClipstreamError as error:
            if errors is None:
                raise
            errors.append(error)
    return found


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
        members: dict[str, bytes] = call_plugin("source_error", self._type, function, *args)
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
