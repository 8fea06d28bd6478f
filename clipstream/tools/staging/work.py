"""Owns the staging of all shards of a plan: what is there already, what is copied, what failed.

It keeps the list of what the folder holds, and never reads settings or says how to train.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.filesize import decimal

from clipstream.data import index
from clipstream.data.shards import redact
from clipstream.data.transfer import About
from clipstream.errors import DataError
from clipstream.tools.pool import Came, Died, run
from clipstream.tools.staging import records as listing
from clipstream.tools.staging.bar import Bar
from clipstream.tools.staging.copying import PARTS, Copier, Failure, Look, Tell
from clipstream.tools.staging.plan import Shard
from clipstream.tools.staging.records import Record

Result = TypeVar("Result")
LOOKING = 8  # processes that look at shards, at least: mostly they wait for servers


@dataclass
class Work:
    """The staging of some shards.

    Attributes:
        folder: where copies lie.
        shards: each once.
        records: file -> what is known of it.
        copier: looks and copies, in the processes.
        jobs: processes.
        whole: the records of the shards that are there now.
        failures: why the others could not be staged.
        copied: how many were copied by this call.
    """

    folder: Path
    shards: Sequence[Shard]
    records: dict[str, Record]
    copier: Copier
    jobs: int
    whole: dict[str, Record] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    copied: int = 0

    def look(self) -> list[tuple[Shard, About]]:
        """Find what is there and whole; what is left to copy, with what its source says of it."""
        records = [self._record(shard) for shard in self.shards]
        looks: dict[int, Look | Failure] = {}
        bar = Bar("checking", [None] * len(records))

        def do(number: int, tell: Tell) -> Look:
            return self.copier.look(self.shards[number], records[number])

        with _showing(bar), closing(self._events(do, self.shards, max(self.jobs, LOOKING), bar)) as events:
            looks.update(events)
        missing = []
        for number, shard in enumerate(self.shards):
            look, record = looks[number], records[number]
            if isinstance(look, Look) and look.whole and record is not None:
                self.whole[shard.file] = record
            else:
                missing.append((shard, look.about if isinstance(look, Look) else About(None, None)))
        return missing

    def copy(self, missing: Sequence[tuple[Shard, About]]) -> None:
        """Copy what is missing; a failure of one shard leaves the others alone.

        Raises:
            DataError: the disk is full, or known to be too small.
        """
        if self.copier.recipe is None:
            self._expect_room(missing)
        (self.folder / PARTS).mkdir()
        for shard in self.shards:
            (self.folder / shard.file).parent.mkdir(parents=True, exist_ok=True)
        bar = Bar("staging", [about.size for _, about in missing])
        before = {shard.file: _written(self.folder / shard.file) for shard, _ in missing}
        try:
            self._copy(missing, bar)
        finally:
            self._drop_untold(before)

    def _copy(self, missing: Sequence[tuple[Shard, About]], bar: Bar) -> None:
        def do(number: int, tell: Tell) -> Record | Failure:
            return self.copier.copy(*missing[number], number, tell)

        with (
            _showing(bar),
            open(self.folder / listing.RECORDS, "a", encoding="utf-8") as file,
            closing(self._events(do, [shard for shard, _ in missing], self.jobs, bar)) as events,
        ):
            for number, made in events:
                shard = missing[number][0]
                if isinstance(made, Failure):
                    self.failures.append(made)
                    bar.say(f"failed: {made.reason}")
                    if made.full:
                        self._give_up()
                    continue
                self.records[shard.file] = self.whole[shard.file] = made
                self.copied += 1
                file.write(listing.line_of(made))
                file.flush()

    def _drop_untold(self, before: Mapping[str, int | None]) -> None:
        """Remove copies that were made while all was given up: no record tells of them, and they would take room."""
        for file, written in before.items():
            path = self.folder / file
            if file not in self.whole and _written(path) != written:
                path.unlink(missing_ok=True)
                Path(f"{path}{index.SUFFIX}").unlink(missing_ok=True)

    def _events(
        self, do: Callable[[int, Tell], Result], shards: Sequence[Shard], jobs: int, bar: Bar
    ) -> Generator[tuple[int, Result | Failure], None, None]:
        """What becomes of each shard; the bar is told how they get on."""
        with closing(run(do, len(shards), jobs)) as events:
            for event in events:
                if event is None:
                    bar.pulse()
                elif isinstance(event, Came):
                    bar.came(event.number, event.amount)
                else:
                    shown = redact(shards[event.number].url)
                    result = Failure(f"{shown}: {event.how}") if isinstance(event, Died) else event.result
                    bar.done(event.number, failed=isinstance(result, Failure))
                    yield event.number, result

    def _record(self, shard: Shard) -> Record | None:
        record = self.records.get(shard.file)
        return record if record is not None and record.identity == shard.identity else None

    def _expect_room(self, missing: Sequence[tuple[Shard, About]]) -> None:
        """End now what would end with a full disk."""
        needed = sum(about.size or 0 for _, about in missing)
        given = sum(path.stat().st_size for shard, _ in missing if (path := self.folder / shard.file).is_file())
        free = shutil.disk_usage(self.folder).free
        if needed - given > free:
            raise DataError(
                f"the {len(missing):,} shards to copy have {decimal(needed)}, and {self.folder} has room for "
                f"{decimal(free)}: make room there, name another folder, or fewer shards, or stage smaller pictures "
                "(--size)"
            )

    def _give_up(self) -> NoReturn:
        raise DataError(
            f"the disk of {self.folder} is full: {len(self.whole):,} of {len(self.shards):,} shards "
            "are staged and stay; make room, and go on by the same command"
        )


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


@contextmanager
def _showing(bar: Bar) -> Iterator[None]:
    try:
        yield
    finally:
        bar.close()
