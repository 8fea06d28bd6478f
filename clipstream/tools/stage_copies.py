"""The copying of shards for `clipstream stage`: planned shards enter; verified copies and their records leave.

A copy gets its final name once it is verified and on disk; until then it is in PARTS. The records of copied shards are
kept in the folder, one JSON object per line.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from clipstream.data.decode.captions import split_keys
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import indexes
from clipstream.errors import DataError
from clipstream.storage.downloader import Fetcher
from clipstream.storage.shard_url import ShardURL, redact
from clipstream.storage.tar import scan
from clipstream.storage.transfer import FileInfo, Monitor, ShardError
from clipstream.text import duration, printable_lines
from clipstream.tools.reencode import Recipe, rewrite
from clipstream.utils import atomic_write
from clipstream.utils.processes import Crashed, Progress, run

RECORDS = "staged.jsonl"
PARTS = ".parts"  # subfolder for incomplete copies
DISK_FULL = 1 << 16  # free bytes below which a disk counts as full
LOOKING = 8  # least processes for checks, which mostly wait for servers
LINES_EVERY = 10.0  # s between two lines of progress where there is no terminal
REFRESH = 0.2  # s between two updates of the bar
Report = Callable[[int], None]  # receives the bytes of the shard that are done
Result = TypeVar("Result")


@dataclass(frozen=True)
class PlannedShard:
    """A shard to copy."""

    url: str  # of the original
    identity: str  # hash of the URL without login and signature, so that the shard is recognised under the next one
    file: str  # path of the copy in the folder, with slashes
    source: SourceSettings  # settings of its source, which name the suffixes and the background of images


@dataclass(frozen=True)
class Record:
    """A staged shard."""

    # file, identity: see PlannedShard
    file: str
    shard: str  # URL of the original, without credentials
    identity: str
    version: str | None  # of the original; None if its server gives none
    recipe: dict[str, object] | None  # how its images were re-encoded; None for a plain copy
    # size, crc32, samples: of the copy: bytes, checksum and number of complete samples
    size: int
    crc32: int
    samples: int
    fault: str | None  # of the original; None for an intact tar
    pictures: dict[str, int]  # number of images by what was done to them; empty for a plain copy

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_records(folder: Path) -> dict[str, Record]:
    """The newest record of each file; lines that a crash left incomplete are ignored."""
    path = folder / RECORDS
    found: dict[str, Record] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[record.file] = record
    return found


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Replace all records. Raises OSError: the disk is full, or the folder cannot be written."""
    atomic_write.replace(folder / RECORDS, "".join(record.line() for record in records).encode())


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


@dataclass
class _ShareMonitor(Monitor):
    """Reports the progress of a transfer, which is `share` of the work."""

    report: Report
    share: float

    def received(self, size: int) -> None:
        self.report(int(size * self.share))


class Copier:
    """Checks and copies shards, in any process.

    Args:
        recipe: how images are re-encoded, except for the background of each source; None copies bytes.
    """

    def __init__(self, folder: Path, recipe: Recipe | None) -> None:
        self.folder, self.recipe = folder, recipe
        self._fetcher = Fetcher()

    def look(self, shard: PlannedShard, record: Record | None) -> Look:
        """Whether the recorded copy is intact, of the current version, and made by the current recipe."""
        about = self._fetcher.info(ShardURL(shard.url))
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

    def copy(self, shard: PlannedShard, about: FileInfo, number: int, report: Report) -> Record | Failure:
        """Copy a shard.

        Args:
            about: its server's answer.
            number: of the shard in this call, for the names of temporary files.
        """
        parts = self.folder / PARTS
        part, changed = parts / f"{number}.part", parts / f"{number}.changed.part"
        recipe = self._recipe(shard)
        monitor = _ShareMonitor(report, 0.5 if recipe else 1.0)
        try:
            self._fetcher.fetch(ShardURL(shard.url), part, monitor)
            found = scan(part)
            if found.fault is not None:  # perhaps of the transfer
                self._fetcher.fetch(ShardURL(shard.url), part, monitor)
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
            indexes.write(Path(f"{target}{indexes.SUFFIX}"), found, indexes.identity_of(whole))
            whole.replace(target)
            atomic_write.flush(target.parent)
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

    def _recipe(self, shard: PlannedShard) -> Recipe | None:
        return None if self.recipe is None else replace(self.recipe, background=shard.source.background)

    def _noted(self, shard: PlannedShard) -> dict[str, object] | None:
        """The settings that determine the copy's images, for its record."""
        recipe = self._recipe(shard)
        return None if recipe is None else {**asdict(recipe), "image_key": shard.source.image_key}


@dataclass
class Copies:
    """The staging of some shards, by several processes."""

    folder: Path  # of the copies
    shards: Sequence[PlannedShard]  # each once
    records: dict[str, Record]  # of the files in the folder
    copier: Copier  # checks and copies, in the processes
    jobs: int  # number of processes
    whole: dict[str, Record] = field(default_factory=dict)  # records of the complete copies, by file
    failures: list[Failure] = field(default_factory=list)  # of the other shards
    copied: int = 0  # number of shards copied by this call

    def look(self) -> list[tuple[PlannedShard, FileInfo]]:
        """Check the copies in the folder; the shards to copy, with their servers' answers."""
        found = [self.records.get(shard.file) for shard in self.shards]
        records = [
            record if record is not None and record.identity == shard.identity else None
            for record, shard in zip(found, self.shards, strict=True)
        ]
        bar = Bar("checking", [None] * len(records))

        def do(number: int, report: Report) -> Look:
            return self.copier.look(self.shards[number], records[number])

        with closing(bar), closing(self._events(do, self.shards, max(self.jobs, LOOKING), bar)) as events:
            looks: dict[int, Look | Failure] = dict(events)
        missing = []
        for number, shard in enumerate(self.shards):
            look, record = looks[number], records[number]
            if isinstance(look, Look) and look.whole and record is not None:
                self.whole[shard.file] = record
            else:
                missing.append((shard, look.about if isinstance(look, Look) else FileInfo()))
        return missing

    def copy(self, missing: Sequence[tuple[PlannedShard, FileInfo]]) -> None:
        """Copy the missing shards; the failure of one does not stop the others.

        Raises DataError: the disk is full, or known to be too small.
        """
        needed = sum(about.size or 0 for _, about in missing)
        given = sum(path.stat().st_size for shard, _ in missing if (path := self.folder / shard.file).is_file())
        free = shutil.disk_usage(self.folder).free
        if self.copier.recipe is None and needed - given > free:
            raise DataError(
                f"the {len(missing):,} shards to copy take {decimal(needed)}, and {self.folder} has {decimal(free)} "
                "free: free some space there, name another folder, or fewer shards, or stage smaller pictures (--size)"
            )
        (self.folder / PARTS).mkdir()
        for shard in self.shards:
            (self.folder / shard.file).parent.mkdir(parents=True, exist_ok=True)

        def do(number: int, report: Report) -> Record | Failure:
            return self.copier.copy(*missing[number], number, report)

        bar = Bar("staging", [about.size for _, about in missing])
        before = {shard.file: _written(self.folder / shard.file) for shard, _ in missing}
        try:
            with (
                closing(bar),
                open(self.folder / RECORDS, "a", encoding="utf-8") as file,
                closing(self._events(do, [shard for shard, _ in missing], self.jobs, bar)) as events,
            ):
                for _, made in events:
                    if isinstance(made, Record):
                        self.records[made.file] = self.whole[made.file] = made
                        self.copied += 1
                        file.write(made.line())
                        file.flush()
                        continue
                    self.failures.append(made)
                    bar.say(f"failed: {made.reason}")
                    if made.full:
                        raise DataError(
                            f"the disk of {self.folder} is full: {len(self.whole):,} of {len(self.shards):,} shards "
                            "are staged and stay; free some space, and continue by the same command"
                        )
        finally:
            # Copies finished during an abort have no record and would only take space.
            for name, written in before.items():
                path = self.folder / name
                if name not in self.whole and _written(path) != written:
                    path.unlink(missing_ok=True)
                    Path(f"{path}{indexes.SUFFIX}").unlink(missing_ok=True)

    def _events(
        self, do: Callable[[int, Report], Result], shards: Sequence[PlannedShard], jobs: int, bar: Bar
    ) -> Generator[tuple[int, Result | Failure], None, None]:
        """(number, result) of each shard as it is done; updates the bar."""
        with closing(run(do, len(shards), jobs)) as events:
            for event in events:
                if event is None:
                    bar.pulse()
                elif isinstance(event, Progress):
                    bar.received(event.number, event.amount)
                else:
                    shown = redact(shards[event.number].url)
                    result = Failure(f"{shown}: {event.how}") if isinstance(event, Crashed) else event.result
                    bar.done(event.number, failed=isinstance(result, Failure))
                    yield event.number, result


def crc_of(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            size += len(data)
            checksum = zlib.crc32(data, checksum)
    return size, checksum


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


class Bar:
    """The progress of work on shards: a bar on a terminal, lines elsewhere.

    Args:
        sizes: bytes of each shard; None if unknown.
    """

    def __init__(self, label: str, sizes: Sequence[int | None]) -> None:
        self.label, self.sizes = label, sizes
        known = [size for size in sizes if size is not None]
        # The output of a command has an unknown size: the mean of the others is assumed.
        self.size = sum(known) * len(sizes) // len(known) if known else None
        self._about = "" if len(known) == len(sizes) else "about "
        self._done = self._failed = self._bytes = 0
        self._coming: dict[int, int] = {}
        self._began = self._said = time.monotonic()
        self._bar: RichProgress | None = None
        if sys.stdout.isatty():
            columns = TextColumn(label), BarColumn(), TextColumn("{task.description}")
            console = Console(force_terminal=True)
            # Without a refreshing thread, as processes are forked while the bar is shown.
            self._bar = RichProgress(*columns, console=console, auto_refresh=False)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
            self._draw()

    def received(self, number: int, amount: int) -> None:
        """Set the bytes of a shard, at most its size: a transfer that decompresses may exceed it."""
        size = self.sizes[number]
        self._coming[number] = amount if size is None else min(amount, size)
        self.pulse()

    def done(self, number: int, failed: bool = False) -> None:
        received, size = self._coming.pop(number, 0), self.sizes[number]
        self._bytes += received if failed or size is None else size
        self._done += 1
        self._failed += failed
        self.pulse()

    def pulse(self) -> None:
        now = time.monotonic()
        if now - self._said >= (REFRESH if self._bar else LINES_EVERY):
            self._said = now
            self._draw()

    def say(self, text: str) -> None:
        text = printable_lines(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.stop()

    def _draw(self) -> None:
        here, seconds = self._bytes + sum(self._coming.values()), max(time.monotonic() - self._began, 1e-3)
        # By bytes if sizes are known, else by shards.
        share = min(1.0, here / self.size if self.size else self._done / max(1, len(self.sizes)))
        parts = [f"{self._done:,} of {len(self.sizes):,} shards"]
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        if here:
            parts.append(f"{decimal(here)}{f' of {self._about}{decimal(self.size)}' if self.size else ''}")
            parts.append(f"{decimal(int(here / seconds))}/s")
        if 0 < share < 1:
            parts.append(f"{duration(seconds * (1 - share) / share)} left")
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description="  ".join(parts), refresh=True)
        else:
            self.say(f"{self.label}: {'  '.join(parts)}")
