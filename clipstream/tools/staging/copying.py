"""Owns one shard's way into the folder: whether its copy is there and whole, and the making of it.

A copy gets its name when all of it is verified and on the disk; until then it lies among the parts. It never chooses
which shards are copied, and never writes the list of them.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clipstream import durable
from clipstream.data import index
from clipstream.data.fetching import Fetcher
from clipstream.data.fields import split_keys
from clipstream.data.keeping import crc_of
from clipstream.data.recoding import Recipe
from clipstream.data.rewriting import rewrite
from clipstream.data.shards import redact
from clipstream.data.tarstream import scan
from clipstream.data.transfer import About, ShardError
from clipstream.tools.staging.plan import Shard
from clipstream.tools.staging.records import Record

PARTS = ".parts"  # the folder's folder for what is not whole yet
NO_ROOM = 1 << 16  # free bytes below which a disk counts as full
Tell = Callable[[int], None]  # takes the bytes of the shard that are done


@dataclass(frozen=True)
class Look:
    """What is known of a shard before it is copied: whether its copy is there and whole, and what the source says."""

    whole: bool
    about: About


@dataclass(frozen=True)
class Failure:
    """Why a shard was not staged; `full` where the folder's disk has no room."""

    reason: str
    full: bool = False


class _Watch:
    """Tells how a transfer gets on."""

    def __init__(self, tell: Tell, share: float) -> None:
        self._tell, self._share = tell, share

    def expect(self, size: int) -> None:
        """See transfer.Watch."""

    def came(self, size: int) -> None:
        """See transfer.Watch."""
        self._tell(int(size * self._share))


class Copier:
    """Looks at shards and copies them, in one process.

    Args:
        folder: where copies lie.
        recipe: what becomes of pictures, but for each source's background; None copies.
    """

    def __init__(self, folder: Path, recipe: Recipe | None) -> None:
        self.folder, self.recipe = folder, recipe
        self._fetcher = Fetcher()

    def look(self, shard: Shard, record: Record | None) -> Look:
        """Whether the copy that the record tells of is there, whole, of the source's version, and made as now asked."""
        about = self._fetcher.about(shard.url)
        if record is None or record.recipe != self._noted(shard):
            return Look(False, about)
        if None not in (record.version, about.version) and record.version != about.version:
            return Look(False, about)
        path = self.folder / record.file
        try:
            whole = path.stat().st_size == record.size and crc_of(path) == (record.size, record.crc32)
        except OSError:
            whole = False
        return Look(whole, about)

    def copy(self, shard: Shard, about: About, number: int, tell: Tell) -> Record | Failure:
        """Bring a shard into the folder.

        Args:
            about: what the source said of it.
            number: among the shards that are copied, for the names of its parts.
        """
        parts = self.folder / PARTS
        part, changed = parts / f"{number}.part", parts / f"{number}.changed.part"
        try:
            return self._copy(shard, about, part, changed, tell)
        except (ShardError, OSError) as error:
            shown = redact(shard.url)
            # A command that could not write says so in words of its own.
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or self._full():
                return Failure(f"{shown}: there is no room for it", full=True)
            said = str(error) if isinstance(error, ShardError) else f"disk: {redact(str(error))}"
            return Failure(said if shown in said else f"{shown}: {said}")
        finally:
            part.unlink(missing_ok=True)
            changed.unlink(missing_ok=True)

    def _copy(self, shard: Shard, about: About, part: Path, changed: Path, tell: Tell) -> Record:
        recipe = self._recipe(shard)
        watch = _Watch(tell, 0.5 if recipe else 1.0)
        self._fetcher.fetch(shard.url, part, watch)
        found = scan(part)
        if found.fault is not None:  # which may have come about on the way
            self._fetcher.fetch(shard.url, part, watch)
            found = scan(part)
        pictures: Counter[str] = Counter()
        whole = part
        if recipe is not None and found.fault is None:
            size = part.stat().st_size
            keys = split_keys(shard.source.image_key)
            pictures = rewrite(part, found, changed, keys, recipe, lambda done: tell((size + done) // 2))
            whole, found = changed, scan(changed)
        size, crc32 = crc_of(whole)
        whole.chmod(0o644)
        durable.flush(whole)
        target = self.folder / shard.file
        # First, as it tells of which file it is: beside another one it says nothing.
        index.write(Path(f"{target}{index.SUFFIX}"), found, index.identity_of(whole))
        whole.replace(target)
        durable.flush(target.parent)
        return Record(
            file=shard.file,
            shard=redact(shard.url),
            identity=shard.identity,
            version=about.version,
            recipe=self._noted(shard),
            size=size,
            crc32=crc32,
            samples=len(found.samples),
            fault=None if found.fault is None else str(found.fault),
            pictures=dict(pictures),
        )

    def _recipe(self, shard: Shard) -> Recipe | None:
        return None if self.recipe is None else replace(self.recipe, background=shard.source.background)

    def _noted(self, shard: Shard) -> dict[str, Any] | None:
        """What decides what becomes of the shard's pictures, for its record."""
        recipe = self._recipe(shard)
        return None if recipe is None else {**asdict(recipe), "image_key": shard.source.image_key}

    def _full(self) -> bool:
        return shutil.disk_usage(self.folder).free < NO_ROOM
