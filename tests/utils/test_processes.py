"""The pool of processes: results, progress, and a process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from clipstream.utils.processes import TaskFailure, note, run


def killed_at(folder: Path, deaths: dict[int, int]) -> Callable[[int], int]:
    """A task whose process is killed as often as `deaths` says of its number."""

    def do(number: int) -> int:
        note(f"shard/{number}")
        before = len(list(folder.glob(f"{number}-*")))
        if before < deaths.get(number, 0):
            (folder / f"{number}-{before}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    return do


def test_a_task_whose_process_is_killed_is_done_again(tmp_path: Path) -> None:
    results = dict(event for event in run(killed_at(tmp_path, {0: 2, 3: 1}), 7, 2) if event is not None)
    assert results == {number: number * number for number in range(7)} and len(list(tmp_path.iterdir())) == 3


def test_a_process_that_is_killed_costs_its_piece_alone(tmp_path: Path) -> None:
    do = killed_at(tmp_path, {3: 9})

    results = dict(event for event in run(do, 7, 2) if event is not None)
    died = results.pop(3)
    assert results == {number: number * number for number in (0, 1, 2, 4, 5, 6)}
    assert (
        isinstance(died, TaskFailure)
        and "memory" in died.error
        and died.error.endswith(", at shard/3")
        and len(list(tmp_path.iterdir())) == 3
    )
