"""Owns the list of what a folder holds of staged shards, a JSON object a line; never looks at the shards themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipstream import durable

RECORDS = "staged.jsonl"


@dataclass(frozen=True)
class Record:
    """A shard that was staged.

    Attributes:
        file: its path in the folder, with slashes.
        shard: where it came from, without credentials.
        identity: what says that another call means the same shard.
        version: what changes when the source does; None where the source does not say.
        recipe: what was done to its pictures; None for a plain copy.
        size: bytes of the staged file.
        crc32: its checksum.
        samples: whole ones in it.
        fault: what was wrong with it at its source; None for a whole tar.
        pictures: how many were resized and so on; empty for a plain copy.
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
    """The newest record of each file; a line that a crash left unfinished says nothing."""
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
    """Make these the list.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    durable.replace(folder / RECORDS, "".join(map(line_of, records)).encode())


def line_of(record: Record) -> str:
    """The record's line."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"
