"""The pool of processes: results, progress, and a process that is killed."""

from __future__ import annotations

import os
import signal

from clipstream.utils.processes import Crashed, Done, Progress, run


def test_a_process_that_is_killed_costs_its_piece_alone() -> None:
    def do(number: int, tell: object) -> int:
        tell(number + 100)  # type: ignore[operator]
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    events = list(run(do, 7, 2))
    assert {event.number: event.result for event in events if isinstance(event, Done)} == {
        number: number * number for number in (0, 1, 2, 4, 5, 6)
    }
    (died,) = (event for event in events if isinstance(event, Crashed))
    assert died.number == 3 and "memory" in died.how
    assert {event.amount - event.number for event in events if isinstance(event, Progress)} == {100}
