"""The console for results: its width, and its end of a pipe."""

from __future__ import annotations

import io
import subprocess
import sys

from clipstream.utils.console import ResultConsole

PRINTS = """
import sys
from clipstream.utils.console import ResultConsole
console = ResultConsole(40)
for _ in range(3000):
    console.print("a long line of text " * 10)
sys.exit(7)
"""


def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    command = [sys.executable, "-c", PRINTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 7 and said == ""


def test_the_width_is_fixed_where_there_is_no_terminal() -> None:
    for terminal, width in ((False, 160), (True, 80)):
        out = io.StringIO()
        ResultConsole(160, file=out, force_terminal=terminal, _environ={"COLUMNS": "80"}).print("x" * 200)
        assert len(out.getvalue().splitlines()[0]) == width
