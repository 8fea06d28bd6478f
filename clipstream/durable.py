"""Owns putting a file on the disk so that a crash leaves the old one or the new one; never knows what is in it."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, on the disk when this returns.

    The draft beside it is called `path` with `.tmp` behind it; one that a crash left is written over.

    Raises:
        OSError: the disk is full, or the folder is not there; `path` is as it was.
    """
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(content)
    flush(draft)
    draft.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file, or a folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
