"""The plan of staging: the shards of the sources of the settings, and the names of their copies.

The records of copied shards are kept in the folder, one JSON object per line. Nothing here reads a shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clipstream.config.settings import Settings
from clipstream.data.settings import SourceSettings
from clipstream.data.shard_url import USER_INFO, local_path, parts_of, scheme_of, stable_name
from clipstream.data.sources.patterns import in_braces
from clipstream.data.sources.registry import entries, source_type, typed_shards
from clipstream.data.sources.side_index import SIGNED
from clipstream.errors import SettingsError
from clipstream.utils import atomic_write

RECORDS = "staged.jsonl"


@dataclass(frozen=True)
class Record:
    """A staged shard.

    Attributes:
        file: path of the copy in the folder, with slashes.
        shard: URL of the original, without credentials.
        identity: see Shard.
        version: of the original; None if its server gives none.
        recipe: how its images were re-encoded; None for a plain copy.
        size: bytes of the copy.
        crc32: checksum of the copy.
        samples: complete samples in the copy.
        fault: of the original; None for an intact tar.
        pictures: number of images by what was done to them; empty for a plain copy.
    """

    file: str
    shard: str
    identity: str
    version: str | None
    recipe: dict[str, Any] | None
    size: int
    crc32: int
    samples: int
    fault: str | None
    pictures: dict[str, int]


def read(folder: Path) -> dict[str, Record]:
    """The newest record of each file; lines that a crash left incomplete are ignored."""
    try:
        lines = (folder / RECORDS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, Record] = {}
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[record.file] = record
    return found


def write(folder: Path, records: Iterable[Record]) -> None:
    """Replace all records.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    atomic_write.replace(folder / RECORDS, "".join(map(line_of, records)).encode())


def line_of(record: Record) -> str:
    """A line of the file of records."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


PLAIN = re.compile(r"\w[\w .+=@%-]{0,180}\.tar")


@dataclass(frozen=True)
class Shard:
    """A shard to copy.

    Attributes:
        url: of the original.
        identity: hash of the URL without login and signature, so that the shard is recognised under the next one.
        file: path of the copy in the folder, with slashes.
        source: settings of its source, which name the suffixes and the background of images.
    """

    url: str
    identity: str
    file: str
    source: SourceSettings


@dataclass(frozen=True)
class StagedSource:
    """A source of the settings.

    Attributes:
        path: its key.
        settings: of the source.
        parts: its setting `shards`, in order: shards to copy, and parts that are not copied.
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
        """The parts that are not copied."""
        return [part for part in self.parts if isinstance(part, str)]


def sources_of(settings: Settings) -> Iterator[tuple[tuple[str, ...], SourceSettings]]:
    """(key, settings) of all sources: of training, then of the evaluators."""
    for name, source in settings.data.sources.items():
        yield ("data", "sources", name), source
    for name, evaluator in settings.evals.items():
        if evaluator.data is not None:
            yield ("evals", name, "data"), evaluator.data


def plan(settings: Settings, folder: Path, records: Mapping[str, Record]) -> list[StagedSource]:
    """Choose the file of each shard: its file of an earlier call, or one with its own name.

    Args:
        folder: of the copies.
        records: of the shards in the folder.

    Raises:
        SettingsError: shards cannot be listed, or are in the folder already.
    """
    planned = []
    for path, source in sources_of(settings):
        key = f"{'.'.join(path)}.shards"
        urls: list[tuple[str, bool]] = []  # with whether a copy can replace it
        try:
            for part in parts_of(source.shards):
                if any(source_type(name).staged for name, _ in entries(part, source.type)):
                    urls += [(url, kind.staged) for url, kind in typed_shards(part, source.type)]
                else:
                    urls.append((part, False))
        except SettingsError as error:
            raise SettingsError(f"{key}: {error}") from error
        # The user's name as the name of a folder.
        name = re.sub(r"^\.", "%2E", quote(path[-1] if path[0] == "data" else path[1], safe=" "))
        under = f"{'sources' if path[0] == 'data' else 'evals'}/{name}"
        before = {record.identity: file for file, record in records.items() if file.rpartition("/")[0] == under}
        copied = {url: _identity(url) for url, staged in urls if staged}
        files = {url: before[identity] for url, identity in copied.items() if identity in before}
        taken = {file.casefold() for file in files.values()}
        for url, identity in copied.items():
            if (local := local_path(url)) and folder in Path(os.path.abspath(local)).parents:
                raise SettingsError(
                    f"{key}: {local} lies in {folder} itself: name the shards where they come from "
                    "(without the --config that an earlier call wrote there)"
                )
            if url in files:
                continue
            stem = stable_name(url).removesuffix(".tar")
            if not PLAIN.fullmatch(stable_name(url)):
                stem = re.sub(r"[^\w.-]+", "-", stem).strip("-.")[:120] or "shard"
            file = f"{under}/{stem}.tar"
            if file.casefold() in taken:
                file = f"{under}/{stem}-{identity[:8]}.tar"
            taken.add(file.casefold())
            files[url] = file
        parts = [Shard(url, copied[url], files[url], source) if staged else url for url, staged in urls]
        planned.append(StagedSource(path, source, parts))
    return planned


def _identity(url: str) -> str:
    """See Shard."""
    if (local := local_path(url)) is not None:
        name = os.path.abspath(local)
    else:
        name, question, query = USER_INFO.sub("", url).partition("?")
        if scheme_of(url) == "pipe":
            name += question + query
        else:
            name += "".join(f"?{part}" for part in query.split("&") if not SIGNED.match(part))
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def spec(source: StagedSource, folder: Path) -> list[str]:
    """The setting `shards` for a run on the copies, in the order of the originals."""
    named: list[str] = []
    for copied, parts in groupby(source.parts, key=lambda part: isinstance(part, Shard)):
        names = [part if isinstance(part, str) else str(folder / part.file) for part in parts]
        named += in_braces(names) if copied else names
    return named
