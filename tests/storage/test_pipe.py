"""Commands whose output is a shard end with the process that waits for them, however and whenever it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import ROOT
from tests.support.ranks import TIMEOUT, command_ends

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
WAITER = """
import os, random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from clipstream.storage.schemes import end_commands, run_pipe

def end(*_):
    end_commands()
    os._exit(0)

seconds, part = sys.argv[1:]
signal.signal(signal.SIGALRM, end)
watch = SimpleNamespace(receive=lambda size: None, expect=lambda size: None)
for number in range(200):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.006))
    run_pipe("sleep " + seconds, Path(part), timeout=60.0, monitor=watch)
"""


def test_a_process_that_exits_at_any_moment_leaves_no_command(tmp_path: Path) -> None:
    """Also before the command is known to the process that started it; nor does that process hang."""
    mark = f"3601.{os.getpid()}"
    subprocess.run([sys.executable, "-c", WAITER, mark, tmp_path / "part"], cwd=ROOT, timeout=TIMEOUT, check=True)
    command_ends(mark)


TRACED = """
import itertools, sys
from pathlib import Path
from types import SimpleNamespace
from clipstream.storage.schemes import run_pipe

class Ended(BaseException):
    pass

def raising_at(number):
    events = itertools.count()
    def look(frame, event, argument):
        if next(events) == number:
            where.append(frame.f_code.co_name)
            raise Ended
        return look
    return look

seconds, part = sys.argv[1:]
watch = SimpleNamespace(receive=lambda size: None, expect=lambda size: None)
where = []
for number in itertools.count():
    sys.settrace(raising_at(number))
    try:
        run_pipe("sleep " + seconds, Path(part), timeout=60.0, monitor=watch)
    except Ended:
        sys.settrace(None)
    if where.count("_wait_while_growing") == 3:
        break
"""


def test_what_a_handler_raises_ends_the_command_wherever_it_comes(tmp_path: Path) -> None:
    """At every line, and behind every call: also where a lock of a class of Python's own is left taken."""
    mark = f"3603.{os.getpid()}"
    subprocess.run([sys.executable, "-c", TRACED, mark, tmp_path / "part"], cwd=ROOT, timeout=TIMEOUT, check=True)
    command_ends(mark)
