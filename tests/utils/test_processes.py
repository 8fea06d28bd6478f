"""The pool of processes: results, progress, and a process that is killed."""

from __future__ import annotations

import os
import signal

from clipstream.utils.processes import Crashed, run


def test_a_process_that_is_killed_costs_its_piece_alone() -> None:
    def do(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    results = dict(event for event in run(do, 7, 2) if event is not None)
    died = results.pop(3)
    assert results == {number: number * number for number in (0, 1, 2, 4, 5, 6)}
    assert isinstance(died, Crashed) and "memory" in died.how
