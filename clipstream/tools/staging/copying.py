"""The copying of one shard: a planned shard enters, its record or a failure leaves.

A copy gets its final name once it is verified and on disk; until then it is in PARTS.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clipstream.data.decode.captions import split_keys
from clipstream.data.shard_url import redact
from clipstream.data.sources import side_index
from clipstream.data.tar import scan
from clipstream.data.transport.cache_eviction import crc_of
from clipstream.data.transport.downloader import Fetcher
from clipstream.data.transport.transfer import FileInfo, ShardError
from clipstream.tools.staging.plan import Record, Shard
from clipstream.tools.staging.reencode import Recipe, rewrite
from clipstream.utils import atomic_write

PARTS = ".parts"  # subfolder for incomplete copies
DISK_FULL = 1 << 16  # free bytes below which a disk counts as full
Report = Callable[[int], None]  # receives the bytes of the shard that are done


@dataclass(frozen=True)
class Look:
    """The state of a shard before copying: whether its copy is complete, and its server's answer."""

    whole: bool
    about: FileInfo


@dataclass(frozen=True)
class Failure:
    """The reason why a shard was not staged; `full` if it is the folder's disk."""

    reason: str
    full: bool = False


class _Monitor:
    """Reports the progress of a transfer, which is `share` of the work."""

    def __init__(self, report: Report, share: float) -> None:
        self._report, self._share = report, share

    def expect(self, size: int) -> None:
        """See transfer.Monitor."""

    def received(self, size: int) -> None:
        """See transfer.Monitor."""
        self._report(int(size * self._share))


class Copier:
    """Checks and copies shards, in any process.

    Args:
        folder: of the copies.
        recipe: how images are re-encoded, except for the background of each source; None copies bytes.
    """

    def __init__(self, folder: Path, recipe: Recipe | None) -> None:
        self.folder, self.recipe = folder, recipe
        self._fetcher = Fetcher()

    def look(self, shard: Shard, record: Record | None) -> Look:
        """Whether the recorded copy is intact, of the current version, and made by the current recipe."""
        about = self._fetcher.info(shard.url)
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

    def copy(self, shard: Shard, about: FileInfo, number: int, report: Report) -> Record | Failure:
        """Copy a shard.

        Args:
            about: its server's answer.
            number: of the shard in this call, for the names of temporary files.
        """
        parts = self.folder / PARTS
        part, changed = parts / f"{number}.part", parts / f"{number}.changed.part"
        try:
            return self._copy(shard, about, part, changed, report)
        except (ShardError, OSError) as error:
            shown = redact(shard.url)
            # The message of a command that could not write is unknown.
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if full or shutil.disk_usage(self.folder).free < DISK_FULL or getattr(error, "reason", None) == "disk":
                return Failure(f"{shown}: the disk is full", full=True)
            said = str(error) if isinstance(error, ShardError) else f"disk: {redact(str(error))}"
            return Failure(said if shown in said else f"{shown}: {said}")
        finally:
            part.unlink(missing_ok=True)
            changed.unlink(missing_ok=True)

    def _copy(self, shard: Shard, about: FileInfo, part: Path, changed: Path, report: Report) -> Record:
        recipe = self._recipe(shard)
        monitor = _Monitor(report, 0.5 if recipe else 1.0)
        self._fetcher.fetch(shard.url, part, monitor)
        found = scan(part)
        if found.fault is not None:  # perhaps of the transfer
            self._fetcher.fetch(shard.url, part, monitor)
            found = scan(part)
        pictures: Counter[str] = Counter()
        whole = part
        if recipe is not None and found.fault is None:
            size = part.stat().st_size
            keys = split_keys(shard.source.image_key)
            pictures = rewrite(part, found, changed, keys, recipe, lambda done: report((size + done) // 2))
            whole, found = changed, scan(changed)
        size, crc32 = crc_of(whole)
        atomic_write.flush(whole)
        target = self.folder / shard.file
        # The index before the shard: it names the version of its file, and is ignored beside another one.
        side_index.write(Path(f"{target}{side_index.SUFFIX}"), found, side_index.identity_of(whole))
        whole.replace(target)
        atomic_write.flush(target.parent)
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
        """The settings that determine the copy's images, for its record."""
        recipe = self._recipe(shard)
        return None if recipe is None else {**asdict(recipe), "image_key": shard.source.image_key}
