"""The staging of all shards of a plan: a plan enters, copies, their records and failures leave."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.filesize import decimal

from clipstream.data.shard_url import redact
from clipstream.data.sources import side_index
from clipstream.data.transport.transfer import FileInfo
from clipstream.errors import DataError
from clipstream.tools.staging import plan as listing
from clipstream.tools.staging.bar import Bar
from clipstream.tools.staging.copying import PARTS, Copier, Failure, Look, Report
from clipstream.tools.staging.plan import Record, Shard
from clipstream.utils.process_pool import Crashed, Progress, run

Result = TypeVar("Result")
LOOKING = 8  # least processes for checks, which mostly wait for servers


@dataclass
class Work:
    """The staging of some shards.

    Attributes:
        folder: of the copies.
        shards: each once.
        records: of the files in the folder.
        copier: checks and copies, in the processes.
        jobs: number of processes.
        whole: records of the complete copies, by file.
        failures: of the other shards.
        copied: number of shards copied by this call.
    """

    folder: Path
    shards: Sequence[Shard]
    records: dict[str, Record]
    copier: Copier
    jobs: int
    whole: dict[str, Record] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    copied: int = 0

    def look(self) -> list[tuple[Shard, FileInfo]]:
        """Check the copies in the folder; the shards to copy, with their servers' answers."""
        found = [self.records.get(shard.file) for shard in self.shards]
        records = [
            record if record is not None and record.identity == shard.identity else None
            for record, shard in zip(found, self.shards, strict=True)
        ]
        looks: dict[int, Look | Failure] = {}
        bar = Bar("checking", [None] * len(records))

        def do(number: int, report: Report) -> Look:
            return self.copier.look(self.shards[number], records[number])

        with closing(bar), closing(self._events(do, self.shards, max(self.jobs, LOOKING), bar)) as events:
            looks.update(events)
        missing = []
        for number, shard in enumerate(self.shards):
            look, record = looks[number], records[number]
            if isinstance(look, Look) and look.whole and record is not None:
                self.whole[shard.file] = record
            else:
                missing.append((shard, look.about if isinstance(look, Look) else FileInfo(None, None)))
        return missing

    def copy(self, missing: Sequence[tuple[Shard, FileInfo]]) -> None:
        """Copy the missing shards; the failure of one does not stop the others.

        Raises:
            DataError: the disk is full, or known to be too small.
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
        bar = Bar("staging", [about.size for _, about in missing])
        before = {shard.file: _written(self.folder / shard.file) for shard, _ in missing}
        try:
            self._copy(missing, bar)
        finally:
            # Copies finished during an abort have no record and would only take space.
            for file, written in before.items():
                path = self.folder / file
                if file not in self.whole and _written(path) != written:
                    path.unlink(missing_ok=True)
                    Path(f"{path}{side_index.SUFFIX}").unlink(missing_ok=True)

    def _copy(self, missing: Sequence[tuple[Shard, FileInfo]], bar: Bar) -> None:
        def do(number: int, report: Report) -> Record | Failure:
            return self.copier.copy(*missing[number], number, report)

        with (
            closing(bar),
            open(self.folder / listing.RECORDS, "a", encoding="utf-8") as file,
            closing(self._events(do, [shard for shard, _ in missing], self.jobs, bar)) as events,
        ):
            for number, made in events:
                shard = missing[number][0]
                if isinstance(made, Failure):
                    self.failures.append(made)
                    bar.say(f"failed: {made.reason}")
                    if made.full:
                        raise DataError(
                            f"the disk of {self.folder} is full: {len(self.whole):,} of {len(self.shards):,} shards "
                            "are staged and stay; free some space, and continue by the same command"
                        )
                    continue
                self.records[shard.file] = self.whole[shard.file] = made
                self.copied += 1
                file.write(listing.line_of(made))
                file.flush()

    def _events(
        self, do: Callable[[int, Report], Result], shards: Sequence[Shard], jobs: int, bar: Bar
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


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
