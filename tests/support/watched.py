"""A process's memory and children."""

from __future__ import annotations

import contextlib
from pathlib import Path


def private_bytes(pid: int) -> int:
    """Memory that a process shares with nobody: what of a fork's memory it has written to, and what it has made."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def children(pid: int) -> int:
    """Processes that it has started and that are there, also as a zombie."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += len((task / "children").read_text().split())
    return found
