"""Staging killed in the middle: the folder contains what its list says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clipstream.data.settings import SourceSettings
from clipstream.errors import DataError
from clipstream.storage.transfer import FileInfo
from clipstream.tools.stage_copies import Copier, Copies, Failure, PlannedShard, Record, Report
from tests.support.pictures import make_shards


class Slow(Copier):
    """Finds the disk full at the first shard once the second one is copied, and never reports the second one."""

    def copy(self, shard: PlannedShard, about: FileInfo, number: int, report: Report) -> Record | Failure:
        """See Copier."""
        if number == 1:
            made = super().copy(shard, about, number, report)
            time.sleep(60)
            return made
        while not (self.folder / "1.tar").exists():
            time.sleep(0.01)
        return Failure("full", full=True)


def test_a_copy_that_was_not_told_of_goes(tmp_path: Path) -> None:
    folder = tmp_path / "staged"
    folder.mkdir()
    paths = make_shards(tmp_path / "shards", [3, 3, 3])
    source = SourceSettings(shards=paths)
    shards = [PlannedShard(path, str(number), f"{number}.tar", source) for number, path in enumerate(paths)]
    (folder / "2.tar").write_bytes(b"of an earlier call")
    work = Copies(folder, shards, {}, Slow(folder, None), jobs=2)
    with pytest.raises(DataError, match="0 of 3 shards are staged"):
        work.copy([(shard, FileInfo()) for shard in shards])
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["2.tar", "staged.jsonl"]
