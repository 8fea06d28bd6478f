"""Python commands as forks of a process that has torch, open_clip and this package imported.

A fork starts at once, where a fresh interpreter takes seconds of a processor. It is for tests of what a command does;
those of how it starts (imports, variables that libraries read on import, the first signals) take a fresh interpreter.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1].parent
TIMEOUT = 900.0  # s; a busy machine is fifty times slower than an idle one, and only a failure waits this long
PRELOADED = [
    "torch", "torch._dynamo", "clipstream.models.towers", "clipstream.train", "clipstream.data.sequential_loader",
    "clipstream.evals.runner", "clipstream.report.outputs", "hypothesis", "tests.support.runs",
    "clipstream.training.trainer", "torch._dynamo.backends.debugging",
]  # fmt: skip


def fork_server() -> Any:
    """The context of processes that fork from the server; dynamo is imported there because DDP imports it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Fork:
    """`python …` in a session of its own, with the methods of `subprocess.Popen`; its output goes to files.

    Args:
        argv: what follows `python`: `-m MODULE …` or `SCRIPT …`.
        env: the whole environment; None for this process's own.
        merged: whether stderr goes where stdout goes.
    """

    def __init__(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path = ROOT, merged: bool = False
    ) -> None:
        self.stdout, self.stderr = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115
        outputs = self.stdout.name, (self.stdout if merged else self.stderr).name
        given = list(argv), dict(os.environ if env is None else env), str(cwd), outputs
        self._process = fork_server().Process(target=_command, args=given, daemon=True)  # ended with this process
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = TIMEOUT) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"a process did not end in {timeout} s"
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT) -> tuple[bytes, bytes]:
        """Wait for its end; what was not yet read of its stdout and stderr."""
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_for_messages(self, *texts: bytes) -> bytes:
        """What it has written to stderr once each of the texts is in it; `communicate` gives what follows."""
        said = b""

        def all_said() -> bool:
            nonlocal said
            said += self.stderr.read()
            return all(text in said for text in texts)

        wait_until(all_said, self)
        return said


def wait_until(done: Callable[[], bool], process: Any = None) -> None:
    """Wait until it is so. The process, a `Fork` or a `Popen`, must still run then."""
    limit = time.monotonic() + TIMEOUT
    while not done():
        assert time.monotonic() < limit
        assert process is None or process.poll() is None or done(), process.communicate()
        time.sleep(0.01)


def run_fork(*argv: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command prints that must not fail; see `Fork`."""
    process = Fork(argv, env=env, cwd=cwd)
    out, error = process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode()


def _command(argv: list[str], env: dict[str, str], cwd: str, outputs: tuple[str, str]) -> None:
    os.setsid()
    multiprocessing.current_process().daemon = False  # it has processes of its own
    for path, number in zip((os.devnull, *outputs), range(3), strict=True):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    module, rest = (argv[1], argv[2:]) if argv[0] == "-m" else ("", argv[1:])
    folders = [cwd if module else str(Path(argv[0]).resolve().parent), *env.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = filter(None, folders)
    sys.orig_argv, sys.argv = [sys.executable, *argv], [argv[0], *rest]
    atexit._clear()  # what the server is to do at its own end, such as to remove wandb's temporary folder
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
