"""Owns what is staged, and where to: the shards of the settings' sources, and the names of their copies.

It lists shards as a run does, and never opens one. A copy keeps its shard's name where that is possible, because a run
knows its order of samples again by the names of its shards.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from clipstream.config import Settings
from clipstream.data.index import SIGNED
from clipstream.data.manifest import kind_of
from clipstream.data.settings import SourceSettings
from clipstream.data.shards import USER_INFO, expand, local_path, parts_of, scheme_of, stable_name
from clipstream.errors import SettingsError
from clipstream.tools.staging.records import Record

MADE = ("scenes", "synthetic", "folder", "imagenet")  # schemes of what is no tar, or is drawn where it is used
PLAIN = re.compile(r"\w[\w .+=@%-]{0,180}\.tar")


@dataclass(frozen=True)
class Shard:
    """A shard that is staged.

    Attributes:
        url: where it is.
        identity: a hash of what does not change with a login or a signature.
        file: path of the copy in the folder, with slashes.
        source: whose pictures' suffixes and background count.
    """

    url: str
    identity: str
    file: str
    source: SourceSettings


@dataclass(frozen=True)
class Source:
    """A source with tars.

    Attributes:
        path: where it stands in the tree of settings.
        settings: of the source.
        parts: what its `shards` become, in order: staged shards, and what is left as it is.
    """

    path: tuple[str, ...]
    settings: SourceSettings
    parts: list[Shard | str]

    @property
    def shards(self) -> list[Shard]:
        """Each shard once."""
        return list({part.file: part for part in self.parts if isinstance(part, Shard)}.values())

    @property
    def left(self) -> list[str]:
        """What is not staged."""
        return [part for part in self.parts if isinstance(part, str)]


def sources_of(settings: Settings) -> Iterator[tuple[tuple[str, ...], SourceSettings]]:
    """All sources by their path: those of training, then those of the evaluators."""
    for name, source in settings.data.sources.items():
        yield ("data", "sources", name), source
    for name, evaluator in settings.evals.items():
        if evaluator.data is not None:
            yield ("evals", name, "data"), evaluator.data


def plan(settings: Settings, folder: Path, records: Mapping[str, Record]) -> list[Source]:
    """What becomes of each source.

    Args:
        folder: where copies lie.
        records: of what lies there; a shard that is there keeps its place.

    Raises:
        SettingsError: shards that cannot be listed, or that lie in the folder already.
    """
    planned = []
    for path, source in sources_of(settings):
        place = f"{'.'.join(path)}.shards"
        try:
            urls = list(_urls(source.shards))
        except SettingsError as error:
            raise SettingsError(f"{place}: {error}") from error
        for url, staged in urls:
            if staged and (local := local_path(url)) and folder in Path(os.path.abspath(local)).parents:
                raise SettingsError(
                    f"{place}: {local} lies in {folder} itself: name the shards where they come from "
                    "(without the --config that an earlier call wrote there)"
                )
        # Names of people's own, as names of folders.
        name = re.sub(r"^\.", "%2E", quote(path[-1] if path[0] == "data" else path[1], safe=" "))
        under = f"{'sources' if path[0] == 'data' else 'evals'}/{name}"
        files = _files([url for url, staged in urls if staged], under, records)
        parts = [Shard(url, _identity(url), files[url], source) if staged else url for url, staged in urls]
        planned.append(Source(path, source, parts))
    return planned


def _urls(spec: str | list[str]) -> Iterator[tuple[str, bool]]:
    """Shards in order, each with whether it is a tar that can be staged; what is none is left as it was written."""
    for part in parts_of(spec):
        if scheme_of(part) in MADE or kind_of(part) is not None:
            yield part, False
        else:
            for url in expand(part):
                yield url, kind_of(url) is None


def _identity(url: str) -> str:
    """Of the whole name, less the login, and what signs it for a while: the shard is the same under the next one."""
    if (local := local_path(url)) is not None:
        name = os.path.abspath(local)
    else:
        name, question, query = USER_INFO.sub("", url).partition("?")
        if scheme_of(url) == "pipe":
            name += question + query
        else:
            name += "".join(f"?{part}" for part in query.split("&") if not SIGNED.match(part))
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _files(urls: Sequence[str], under: str, records: Mapping[str, Record]) -> dict[str, str]:
    """Each shard's file: where it is already, or else by its own name, with its hash behind a name that is taken."""
    here = {record.identity: file for file, record in records.items() if file.rpartition("/")[0] == under}
    files = {url: here[_identity(url)] for url in urls if _identity(url) in here}
    taken = {file.casefold() for file in files.values()}
    for url in urls:
        if url in files:
            continue
        name = stable_name(url)
        stem = name.removesuffix(".tar") if PLAIN.fullmatch(name) else _readable(name)
        file = f"{under}/{stem}.tar"
        if file.casefold() in taken:
            file = f"{under}/{stem}-{_identity(url)[:8]}.tar"
        taken.add(file.casefold())
        files[url] = file
    return files


def _readable(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name.removesuffix(".tar")).strip("-.")[:120] or "shard"


def spec(source: Source, folder: Path) -> list[str]:
    """The `shards` of a run on the copies, in the order of the originals; numbered names are put together by braces."""
    named: list[str] = []
    for part in source.parts:
        named.append(part if isinstance(part, str) else str(folder / part.file))
    found: list[str] = []
    start = 0
    while start < len(named):
        end = start + 1
        while end < len(named) and _follows(named[end - 1], named[end]):
            end += 1
        found.append(_braced(named[start], named[end - 1]) if end - start > 1 else named[start])
        start = end
    return found


NUMBERED = re.compile(r"(.*?)(\d+)\.tar", re.DOTALL)


def _follows(first: str, second: str) -> bool:
    one, other = NUMBERED.fullmatch(first), NUMBERED.fullmatch(second)
    if one is None or other is None or one[1] != other[1]:
        return False
    return int(other[2]) == int(one[2]) + 1 and len(one[2]) == len(other[2])


def _braced(first: str, last: str) -> str:
    one, other = NUMBERED.fullmatch(first), NUMBERED.fullmatch(last)
    assert one is not None and other is not None
    return f"{one[1]}{{{one[2]}..{other[2]}}}.tar"
