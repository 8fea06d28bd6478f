"""Lists of samples to use or to leave out, or with numbers: a file of names enters, what it says of a sample leaves.

The name of a sample is SHARD/KEY: the shard's name in its source (`shard_url.shard_names`: a tar, a table, the folder
of images or of a class), and the sample's key in it (the members' name in a tar, the number of a row, the path of an
image in a folder). Whatever writes or reads a list uses these names; `ListedSamples` finds the samples of entries.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from clipstream.data.source_settings import SourceSettings
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import stable_name, whole_file
from clipstream.text import printable
from clipstream.utils.atomic_write import note_input
from clipstream.utils.content import read_text
from clipstream.utils.logs import logger

NOT_KEPT = "not_kept"  # the reason of samples that a list leaves out
NOT_DRAWN = "not_drawn"  # the reason of samples that their probability leaves out
LEFT_OUT = (NOT_KEPT, NOT_DRAWN)  # reasons of samples with which nothing is wrong
TABLES = (".csv", ".parquet", ".jsonl")
SHOWN = 100  # characters of an entry in a message
LOOKED = 2  # tars whose keys are read before training, of those that a list names
_FILE = r"tar|tgz|[ct]sv|jsonl?|ndjson|parquet|pq|arrow"  # suffixes of shards, by which a line tells where they end
_SHARD = re.compile(rf"((?:.*?/)?[^/]+\.(?:{_FILE})(?:\.\w+)?(?:#\d+-\d+)?)/(.+)", re.DOTALL)


class ListedSource(Protocol):
    """A source, as lists of its samples need it."""

    @property
    def shard_names(self) -> Mapping[str, str]:
        """Shard -> its name in names of samples."""

    def known_keys(self, shard: str, *, read: bool = False) -> Container[str] | None:
        """The keys of the file that a shard is of, as `storable`; None where reading them takes long, or, without
        `read`, is needed."""
        ...


class Meaning(NamedTuple):
    """What an entry of a list may mean."""

    names: list[str]  # SHARD/KEY, and for an entry without a shard the entry itself
    is_absent: bool  # whether the source has no such sample, as far as its keys are known
    is_elsewhere: bool  # whether the source has no such shard


class ListedSamples:
    """Finds the samples of a source that entries of lists name: KEY, SHARD/KEY, or with any folders before the shard.

    Of several shards with the same name, the entry names those that share most folders with it.

    Args:
        source: None where nothing is known of its shards, and each entry means what it says.
    """

    def __init__(self, source: ListedSource | None) -> None:
        self._source, self._found = source, dict[str, list[str]]()
        self._shards: dict[str, list[tuple[list[str], str]]] = {}  # last part of a path -> paths, shards
        self._names = {} if source is None else dict(source.shard_names)
        files = {whole_file(shard): shard for shard in reversed(self._names)}
        for file, shard in reversed(files.items()):
            self._shards.setdefault(stable_name(file.rstrip("/")), []).append((file.rstrip("/").split("/"), shard))
        self._keys: dict[str, Container[str] | None] = {}
        self._looked = 0
        self.named: set[str] = set()  # shards that entries named

    @property
    def example(self) -> str:
        """The name of a sample."""
        shard = next(iter(self._names), None)
        keys = None if shard is None else self._keys_of(shard)
        first = next(iter(keys), None) if isinstance(keys, Iterable) else None
        return "SHARD/KEY" if shard is None else f"{self._names[shard]}/{'KEY' if first is None else first}"

    @property
    def has_more(self) -> bool:
        """Whether the source has shards that no entry named."""
        return sum(map(len, self._shards.values())) > len(self.named)

    def meaning(self, shard: str | None, key: str) -> Meaning:
        """What an entry means. Raises SettingsError: it names samples of several files.

        Args:
            shard: in its column; None for a line of text, KEY or SHARD/KEY.
        """
        if shard is not None:
            return self._of_shards(self._find(shard), shard, key)
        names, absent, elsewhere, is_named = list(dict.fromkeys((key, key.strip()))), True, False, False
        for part, rest in _divide(key.strip()):
            shards = self._find(part)
            found = self._of_shards(shards, part, rest)
            names += found.names if shards or self._source is None else []
            absent &= found.is_absent
            is_named |= bool(shards)
            elsewhere |= found.is_elsewhere and _SHARD.fullmatch(key.strip()) is not None
        if absent and not elsewhere and self._source is not None:
            absent = (is_named or None not in self._all_keys) and not any(
                storable(name) in keys for keys in self._all_keys if keys is not None for name in names[:2]
            )
        return Meaning(names, absent and self._source is not None, elsewhere and absent)

    def _of_shards(self, shards: Sequence[str], part: str, key: str) -> Meaning:
        if self._source is None:
            return Meaning([f"{part.rstrip('/').rpartition('/')[2]}/{key}", f"{part}/{key}"], False, False)
        known = {shard: self._keys_of(shard, read=True) for shard in shards}
        have = [shard for shard, keys in known.items() if keys is not None and storable(key) in keys]
        if len(have) > 1:
            both = " and ".join(f"{self._names[shard]}/{key}" for shard in have[:2])
            raise SettingsError(f"{printable(f'{part}/{key}', SHOWN)} may be {printable(both, 2 * SHOWN)}: write which")
        self.named.update(shards)
        names = [f"{self._names[shard]}/{key}" for shard in have or shards]
        return Meaning(names, not have and None not in known.values(), not shards)

    def _find(self, part: str) -> list[str]:
        """The shards that a path means."""
        if (found := self._found.get(part)) is None:
            path = whole_file(part).rstrip("/").split("/")
            there = self._shards.get(stable_name("/".join(path)), [])
            common = [len(os.path.commonprefix([path[-2::-1], other[-2::-1]])) for other, _ in there]  # noqa: RUF071
            found = [shard for (_, shard), n in zip(there, common, strict=True) if n == max(common)]
            self._found[part] = found
        return found

    def _keys_of(self, shard: str, *, read: bool = False) -> Container[str] | None:
        if self._keys.get(shard) is None:
            read = read and self._looked < LOOKED
            if shard in self._keys and not read:
                return None
            assert self._source is not None
            self._looked += read
            self._keys[shard] = self._source.known_keys(shard, read=read)
        return self._keys[shard]

    @cached_property
    def _all_keys(self) -> list[Container[str] | None]:
        shards = [shard for some in self._shards.values() for _, shard in some]
        return [self._keys_of(shard, read=len(shards) <= LOOKED) for shard in shards]


def _divide(line: str) -> Iterator[tuple[str, str]]:
    """How a line may be divided into a shard and a key."""
    if found := _SHARD.fullmatch(line):
        yield found[1], found[2]
        return
    yield from ((line[:at], line[at + 1 :]) for at, letter in enumerate(line) if letter == "/")


class KeyList:
    """The samples that a file lists, as 64-bit hashes of their names: 8 bytes each, shared by forked workers.

    A line of a text file is KEY or SHARD/KEY; spaces around it are left out, unless the key has them. A table (.csv,
    .parquet, .jsonl) has the column key, and may have shard, and source, whose other rows are ignored. Text is UTF-8 or
    UTF-16. With n names a sample that is not listed is taken for a listed one with a probability of n / 2^62.

    Args:
        path: the file.
        name: of the source that the list is for; None for rows of all sources.
        column: of a table, with a number for each sample.
        source: the source; without it, any sample may be there.
        flag: the setting, for messages.
        listed: the entries, if they are read already.

    Attributes:
        values: of `column`, float64, by entry; None without one.
        rows: of the entries in the file, int64.
        same: the number of the first entry of the same sample, int64.
        absent, elsewhere: see `Meaning`, bool.

    Raises SettingsError: the file cannot be read, or holds no entry of this source, or `column` is not there, holds no
        numbers, or two for one sample; an entry names samples of several files.
    """

    def __init__(
        self,
        path: str,
        name: str | None,
        column: str | None = None,
        source: ListedSource | None = None,
        flag: str = "",
        listed: List | None = None,
    ) -> None:
        self.path, self.flag, self.values, self._listed = path, flag, None, listed
        with errors_of_list(path):
            listed = read_list(path, name, *([] if column is None else [column])) if listed is None else listed
            if column is not None:
                self.values = np.array(listed.columns[0], dtype=np.float64)
                if self.values.ndim != 1:
                    raise ValueError(f"the column {column!r} has lists, not numbers")
        if not listed.keys:
            raise SettingsError(f"{path}: no keys{'' if name is None else f' of source {name!r}'} in it")
        self.samples, self.rows = ListedSamples(source), listed.rows
        self.absent, self.elsewhere = (np.zeros(len(listed.keys), bool) for _ in range(2))
        hashes, numbers = array("q"), array("i")
        for entry, (shard, key) in enumerate(zip(listed.shards, listed.keys, strict=True)):
            try:
                names, self.absent[entry], self.elsewhere[entry] = self.samples.meaning(shard, key)
            except SettingsError as error:
                raise SettingsError(f"{path}: {error}") from error
            hashes.extend(hash(storable(name)) for name in names)  # of this process, which forked workers have too
            numbers.extend([entry] * len(names))
        self._hashes, first, again = np.unique(np.array(hashes), return_index=True, return_inverse=True)
        self._entries = (theirs := np.array(numbers))[first]
        self.same = np.arange(len(self))
        np.minimum.at(self.same, theirs, self._entries[again])
        if self.values is not None:
            firsts = self.values[self.same]
            for n in np.flatnonzero((self.values != firsts) & ~(np.isnan(self.values) & np.isnan(firsts)))[:1].tolist():
                both = " and ".join(f"{self.values[m]:g} for {listed.name(m)!r}" for m in (int(self.same[n]), n))
                raise SettingsError(f"{path}: {column} {both}, which are one sample here: leave one of them")

    def __len__(self) -> int:
        return len(self.absent)

    def holds(self, name: str, key: str) -> bool:
        """Whether a sample is listed, by its name 'SHARD/KEY' or by its key."""
        return self.place(name, key) is not None

    def place(self, name: str, key: str) -> int | None:
        """The number of the first entry of a listed sample, by its name or else by its key; None for others."""
        return next(self.places(name, key), None)

    def places(self, name: str, key: str) -> Iterator[int]:
        """The numbers of the first entries that are the name of a sample and its key."""
        for value in (hash(storable(name)), hash(storable(key))):
            place = int(self._hashes.searchsorted(value))
            if place < len(self._hashes) and int(self._hashes[place]) == value:
                yield int(self._entries[place])

    def set_found(self, entries: Iterable[int]) -> None:
        """Note the entries of which samples were found, after all samples were read."""
        there = np.zeros(len(self), bool)
        there[np.fromiter(entries, np.int64)] = True
        self.absent = ~there[self.same]

    def check(self, others: Sequence[KeyList] = (), *, told: bool = True, advice: str = "") -> None:
        """Refuse the list if entries are absent from its source, by what is known of its keys or by `set_found`.

        If the absent ones all name shards that the sources do not have, and the list names all shards of these, it is a
        list of more shards: a warning tells.

        Args:
            others: the same file, as other sources of the run use it.
            told: whether to warn.

        Raises SettingsError.
        """
        absent, elsewhere = self.absent.copy(), self.elsewhere.copy()
        for other in others:
            absent &= ~np.isin(self.rows, other.rows[~other.absent])
            elsewhere &= ~np.isin(self.rows, other.rows[~other.elsewhere])
        if not (missing := int(absent.sum())):
            return
        listed = read_list(self.path, None) if self._listed is None else self._listed
        example = listed.name(int(np.searchsorted(listed.rows, self.rows[absent.argmax()])))
        said = f"{self.flag}: {self.path}: {len(self) - missing:,} of its {len(self):,} entries match samples of these "
        said += f"data; {printable(repr(example), SHOWN)} does not"
        if away := int((absent & elsewhere).sum()):
            said += f", and {away:,} name shards that the data do not have"
        if away == missing < len(self) and not any(one.samples.has_more for one in (self, *others)):
            if told:
                logger.warning(f"{said}: the list is of more shards than these")
            return
        hint = f": {advice}" if advice else ""
        raise SettingsError(f"{said}: samples are called {printable(self.samples.example, SHOWN)!r} here{hint}")


@dataclass(frozen=True)
class SampleLists:
    """What the settings `keep` and `drop` of a source leave."""

    keep: KeyList | None
    drop: KeyList | None

    def __call__(self, name: str, key: str) -> bool:
        """Whether a sample is used, by its name 'SHARD/KEY' and its key."""
        return (self.keep is None or self.keep.holds(name, key)) and not (self.drop and self.drop.holds(name, key))

    @property
    def lists(self) -> list[KeyList]:
        return [one for one in (self.keep, self.drop) if one is not None]

    def entries(self, samples: Iterable[tuple[str, str]]) -> list[list[int]]:
        """By list, the entries of which samples, given by name and key, are."""
        found: list[dict[int, None]] = [{} for _ in self.lists]
        for name, key in samples:
            for one, of in zip(self.lists, found, strict=True):
                of |= dict.fromkeys(one.places(name, key))
        return [[*of] for of in found]


def build_filter(settings: SourceSettings, setting: str, source: ListedSource) -> SampleLists | None:
    """The lists of a source, None if it uses all samples. Raises as KeyList.

    Args:
        setting: dotted key of the source.
    """
    name = setting.rpartition(".")[2] if setting.startswith("data.sources.") else None
    keep, drop = (
        None if path is None else KeyList(path, name, source=source, flag=f"--{setting}.{flag}")
        for flag, path in (("keep", settings.keep), ("drop", settings.drop))
    )
    return None if keep is None and drop is None else SampleLists(keep, drop)


def check_lists(
    filters: Sequence[SampleLists | None], found: Sequence[Iterable[Sequence[Sequence[int]]]] = (), *, told: bool = True
) -> None:
    """Compare the lists of a run with its sources; see KeyList.check.

    Args:
        filters: of each source.
        found: by source, what `SampleLists.entries` gave for each of its shards, if all samples were read.
    """
    for some, shards in zip(filters, found, strict=False):
        for place, one in enumerate([] if some is None else some.lists):
            one.set_found({entry for shard in shards for entry in shard[place]})
    every = [one for some in filters if some is not None for one in some.lists]
    for one in every:
        one.check([other for other in every if other is not one and other.path == one.path], told=told)


def storable(text: str) -> str:
    r"""A name as tables have it: bytes that are not UTF-8, in names of files, become `\udcXX`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class List(NamedTuple):
    """The entries of a list, or those of one source."""

    shards: Sequence[str | None]  # None for a line of text
    keys: Sequence[str]
    rows: np.ndarray[Any, np.dtype[np.int64]]  # their numbers in the file, ascending
    columns: list[list[Any]]  # further ones

    def name(self, entry: int) -> str:
        shard = self.shards[entry]
        return self.keys[entry] if shard is None else f"{shard}/{self.keys[entry]}"


@contextlib.contextmanager
def errors_of_list(path: str) -> Iterator[None]:
    """What reading a list raises, as SettingsError; pyarrow's errors are ValueErrors and KeyErrors."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingsError(f"{path}: cannot read a list of keys: {text}") from error


def read_list(path: str, source: str | None, *columns: str) -> List:
    """The entries of a file, those of this source or of all, and further columns of a table.

    Raises OSError, or ValueError or KeyError as pyarrow does: it cannot be read, or a column is missing.
    """
    if not path.endswith(TABLES):
        lines = [line for raw in read_text(Path(path)).split("\n") if (line := raw.rstrip("\r")).strip()]
        lines = lines[1:] if lines[:1] and lines[0].startswith("# ") else lines  # the heading of a val_split.txt
        return List([None] * len(lines), lines, np.arange(len(lines)), [])
    from pyarrow import csv, parquet  # on use, as its import takes long

    if path.endswith(".parquet"):
        note_input(path)
        schema = parquet.read_schema(path).names
        wanted = ("source", "shard", "key", *columns)
        table = parquet.read_table(path, columns=[name for name in wanted if name in schema])
        return list_of(table.to_pydict(), source, *columns)
    if path.endswith(".jsonl"):
        return list_of(json_columns(path, ("source", "shard", "key", *columns)), source, *columns)
    import pyarrow as pa

    text = read_text(Path(path)).encode("utf-8", "surrogateescape")
    texts = csv.ConvertOptions(column_types=dict.fromkeys(("source", "shard", "key"), pa.string()))
    table = csv.read_csv(io.BytesIO(text), convert_options=texts)
    return list_of({name.strip(): table[name].to_pylist() for name in table.column_names}, source, *columns)


def json_columns(path: str, wanted: Collection[str] | None = None) -> dict[str, list[Any]]:
    """The columns of a file with a JSON object on each line, all or those `wanted`. Raises OSError, ValueError."""
    text = read_text(Path(path)).encode("utf-8", "surrogateescape")
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected a JSON object on each line")
    names = dict.fromkeys(name for row in rows for name in row if wanted is None or name in wanted)
    return {name: [row.get(name) for row in rows] for name in names}


def list_of(table: Mapping[str, Sequence[Any]], source: str | None, *columns: str) -> List:
    """The entries of a table, those of this source or of all, and further columns.

    Raises ValueError: a column is missing.
    """
    for column in ("key", *columns):
        if column not in table:
            raise ValueError(f"no column {column!r}")
    keys, of = table["key"], table.get("source") if source is not None else None
    rows = [row for row, key in enumerate(keys) if key is not None and (of is None or of[row] == source)]
    shards = table.get("shard", [None] * len(keys))
    return List(
        [shards[row] or None for row in rows],  # a cell may be empty
        [str(keys[row]) for row in rows],
        np.array(rows, np.int64),
        [[table[column][row] for row in rows] for column in columns],
    )
