"""Work on whole shards ahead of a run: side indexes (`clipstream index`), and copies (`clipstream stage`).

Names of shards, or sources, enter; files leave, written by the workers of an executor: an index of each shard, or
copies in a folder, with the setting `shards` that names them. A shard to copy is downloaded as during a run, scanned,
and renamed to its place once it is complete on disk. The side index of a copy records what it was made from, so that
the same call continues after an interruption.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from clipstream.data.shard_pass import PARTS, ShardPass, draft_in
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import entries, indexes, source_type, typed_shards
from clipstream.errors import DataError, SettingsError, ShardError
from clipstream.storage.backends import Monitor
from clipstream.storage.download import Fetcher, unreadable
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, in_braces, parts_of, redact, stable_name
from clipstream.storage.tar import scan
from clipstream.utils.processes import TaskFailure

PLAIN = re.compile(r"\w[\w .+=@%-]{0,180}\.tar")


class Indexed(NamedTuple):
    """A shard that has an index."""

    samples: int
    size: int  # bytes of the local file
    made: bool = False  # whether it was written now
    fault: str | None = None  # of the shard, whose complete samples are indexed


def make_indexes(
    specs: Sequence[str], *, folder: str | None = None, executor: str = "local", again: bool = False
) -> list[Indexed | TaskFailure]:
    """Index the shards that `specs` name, and print which ones are damaged; the result for each.

    Args:
        folder: of the indexes; None to write them beside local shards.
        executor: what indexes the shards, as `executors.check_executor` has it.
        again: whether to replace indexes that are not stale.

    Raises SettingsError: there is nothing to index, or no folder for the indexes of remote shards.
    """
    shards = dict(typed_shards(list(specs)))
    if others := [url for url, kind in shards.items() if not kind.tars]:
        raise SettingsError(f"{redact(others[0])}: only tars can be indexed")
    urls = list(shards)
    remote = [url for url in urls if ShardURL(url).path is None]
    if remote and folder is None:
        raise SettingsError(f"{redact(remote[0])} is remote: set a folder for the indexes with --into FOLDER")
    for parent in {path.parent for url in urls if (path := indexes.path_of(url, folder)) is not None}:
        indexes.remove_drafts(parent)
    # The cache is one of each process, so that a host that does not answer is asked once.
    with contextlib.closing(ShardCache(None)) as cache:
        walk = ShardPass(urls, lambda number: index_shard(urls[number], cache, folder, again))
        results = walk.run("indexing", executor)
    walk.tell_damaged(results, "of which intact samples are indexed")
    return results


def index_shard(url: str, cache: ShardCache, folder: str | None, again: bool) -> Indexed:
    """Index a shard, which `cache` downloads and decompresses.

    A damaged tar is indexed with its fault; a file that is no tar at all is an error.

    Raises ShardError, OSError: the shard cannot be read, or its index not be written.
    """
    path, local = indexes.path_of(url, folder), ShardURL(url).path
    assert path is not None
    if local is None:  # before the download, so that a change in between makes the index stale
        identity = indexes.Identity(version=cache.fetcher.info(ShardURL(url)).version)
    else:
        try:
            identity = indexes.identity_of(local)
        except OSError as error:
            raise unreadable(local, error) from error
    if not again:
        with contextlib.suppress(OSError, ValueError):
            head = indexes.read_head(path)
            if head.of == identity and indexes.check_count(head.samples, local, identity.size) == head.samples:
                return Indexed(head.samples, head.size or 0, fault=head.fault and str(head.fault))
    try:
        found = scan(cache.local(url))
    finally:
        cache.release(url)
    if found.fault is not None and (found.fault.reason == "not_a_tar" or identity.size == 0):
        raise ShardError(*found.fault)
    indexes.write(path, found, identity)
    return Indexed(len(found.samples), identity.size or 0, True, found.fault and str(found.fault))


@dataclass(frozen=True)
class PlannedShard:
    """A shard to copy."""

    url: str  # of the original
    file: str  # path of the copy in the folder, with slashes


@dataclass(frozen=True)
class StagedSource:
    """A source of the settings."""

    path: tuple[str, ...]  # its key
    settings: SourceSettings  # of the source
    parts: list[list[PlannedShard | str]]  # by part of its setting `shards`: shards to copy, and others as they are

    @property
    def shards(self) -> list[PlannedShard]:
        return list({one.file: one for part in self.parts for one in part if isinstance(one, PlannedShard)}.values())

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def setting_of_copies(self, folder: Path) -> list[str]:
        """The setting `shards` for a run on the copies, in the order of the originals; with factors one item a part."""
        whole = [[one for part in self.parts for one in part]]
        named: list[list[str]] = []
        for part in whole if self.settings.upsampling_factors is None else self.parts:
            named.append([])
            for staged, some in itertools.groupby(part, key=lambda one: isinstance(one, PlannedShard)):
                names = [one if isinstance(one, str) else str(folder / one.file) for one in some]
                named[-1] += in_braces(names) if staged else names
        return named[0] if len(named) == 1 else [f"{{{','.join(some)}}}" if some[1:] else some[0] for some in named]


def plan_copies(path: tuple[str, ...], source: SourceSettings, folder: Path) -> StagedSource:
    """Choose the file of each shard of a source: one with its own name, and a hash where several shards have it.

    Args:
        path: key of the source in the settings, in `data` or `evals`.

    Raises SettingsError: shards cannot be listed, or are in the folder already.
    """
    key = f"{'.'.join(path)}.shards"
    urls: list[list[tuple[str, bool]]] = []  # by part, with whether a copy can replace it
    try:
        for part in parts_of(source.shards):
            tars = any(source_type(name).staged for name, _ in entries(part, source.type, image_key=source.image_key))
            shards = typed_shards(part, source) if tars else ()
            urls.append([(url, kind.staged) for url, kind in shards] or [(part, False)])
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from error
    # The user's name as the name of a folder.
    name = re.sub(r"^\.", "%2E", quote(path[-1] if path[0] == "data" else path[1], safe=" "))
    under = f"{'sources' if path[0] == 'data' else 'evals'}/{name}"
    stems: dict[str, str] = {}
    for url in [url for part in urls for url, staged in part if staged]:
        if (local := ShardURL(url).path) and folder in Path(os.path.abspath(local)).parents:
            said = "use the original shards (without the --config written by an earlier call)"
            raise SettingsError(f"{key}: {local} is inside {folder}: {said}")
        stems[url] = stable_name(url).removesuffix(".tar")
        if not PLAIN.fullmatch(stable_name(url)):
            stems[url] = re.sub(r"[^\w.-]+", "-", stems[url]).strip("-.")[:120] or "shard"
    shared = Counter(stem.casefold() for stem in stems.values())
    files = {
        url: f"{under}/{stem}{f'-{_hash(url)[:8]}' if shared[stem.casefold()] > 1 else ''}.tar"
        for url, stem in stems.items()
    }
    return StagedSource(
        path, source, [[PlannedShard(url, files[url]) if staged else url for url, staged in part] for part in urls]
    )


def _hash(url: str) -> str:
    return hashlib.sha256(ShardURL(url).unsigned.encode()).hexdigest()[:24]


def copy_shards(
    shards: Sequence[PlannedShard], folder: Path, fetcher: Fetcher, executor: str
) -> dict[str, Indexed | TaskFailure]:
    """Copy shards into a locked folder, unless there are intact copies; the results by file. As `ShardPass.run`."""
    for shard in shards:
        (folder / shard.file).parent.mkdir(parents=True, exist_ok=True)
    walk = ShardPass([one.url for one in shards], partial(_copy, shards, folder, fetcher), folder / PARTS)
    results = walk.run("staging", executor)
    walk.tell_damaged(results, "which are copied as they are")
    return dict(zip([one.file for one in shards], results, strict=True))


def _copy(shards: Sequence[PlannedShard], folder: Path, fetcher: Fetcher, number: int) -> Indexed:
    """Copy a shard, unless there is an intact copy of its current version. Raises ShardError, OSError, DataError."""
    shard = shards[number]
    url, shown, target = ShardURL(shard.url), redact(shard.url), folder / shard.file
    version = fetcher.info(url).version
    # Up to 0.1, images could be re-encoded on the way: such copies have a recipe, and are made anew.
    origin: dict[str, object] = {"shard": _hash(shard.url), "version": version, "recipe": None}
    if target.exists():
        head = None
        with contextlib.suppress(OSError, ValueError):
            head = indexes.read_head(Path(f"{target}{indexes.SUFFIX}"))
        if head is None or head.origin is None:
            raise DataError(f"{shown}: {target} exists and was not staged: remove it, or use another folder")
        known = head.origin["version"] if version is None or head.origin["version"] is None else version
        if head.origin == {**origin, "version": known} and head.of == indexes.identity_of(target):
            return Indexed(head.samples, target.stat().st_size, fault=head.fault and str(head.fault))
    with draft_in(folder / PARTS) as (part, draft):
        for _ in range(2):  # a fault may be one of the transfer
            fetcher.fetch(url, part, Monitor())
            found = scan(part)
            if found.fault is None:
                break
        if url.path is not None and fetcher.info(url).version != version:
            raise DataError(f"{shown}: it has changed while it was copied")
        size = part.stat().st_size
        indexes.write(draft, found, indexes.identity_of(part), origin)
        indexes.place(part, draft, target)
    return Indexed(len(found.samples), size, True, found.fault and str(found.fault))
