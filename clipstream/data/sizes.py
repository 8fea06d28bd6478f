"""Owns what a folder of tars tells of their numbers of samples: `sizes.json` and `__len__`, as open_clip has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clipstream.data.shards import scheme_of

SIZES = "sizes.json"  # {"00000.tar": 1000, …}
LENGTH = "__len__"  # one number, of all tars of the folder


def samples_of_tars(tars: Sequence[str]) -> int | None:
    """Samples of the tars, each as often as it is named; None where a folder does not tell.

    `__len__` counts only where every tar of its folder is named once, as it says nothing of a part.
    """
    total = 0
    folders: dict[Path, list[str]] = {}
    for tar in tars:
        if scheme_of(tar) is not None:
            return None
        path = Path(tar)
        folders.setdefault(path.parent, []).append(path.name)
    for folder, names in folders.items():
        sizes, length = _told(folder)
        if all(name in sizes for name in names):
            total += sum(sizes[name] for name in names)
        elif length is not None and sorted(names) == sorted(path.name for path in folder.glob("*.tar")):
            total += length
        else:
            return None
    return total


def _told(folder: Path) -> tuple[dict[str, int], int | None]:
    """What the folder's two files say; a file that is not of their form says nothing."""
    sizes: dict[str, int] = {}
    length: int | None = None
    try:
        told = json.loads((folder / SIZES).read_bytes())
        sizes = {name: int(count) for name, count in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        sizes = {}
    try:
        length = int((folder / LENGTH).read_text())
    except (OSError, ValueError):
        length = None
    return sizes, length
