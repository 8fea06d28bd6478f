"""Signals in the first and last seconds of a command: one line, an exit code, no traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forks import ROOT, TIMEOUT, wait_until
from tests.support.ranks import reserved_port
from tests.support.runs import flags, furnish

HOLD = """
import os, sys, time

class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("HELD_AT"):
            open(os.environ["HELD"], "w").close()
            time.sleep(600)

sys.meta_path.insert(0, Hold())
"""
LATE = """
import atexit, os, time

@atexit.register
def linger():
    open(os.environ["AT_EXIT"], "w").close()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A furnished folder with modules that hold up a process: where it imports a module, and at its end."""
    folder = furnish(tmp_path_factory.mktemp("starting"))
    (folder / "sitecustomize.py").write_text(HOLD)  # which Python imports when it starts
    (folder / "late.py").write_text(LATE)
    return folder


def heed() -> None:
    """Ignore no signal: a shell's background jobs ignore SIGINT, and xdist's workers SIGTERM; that is inherited."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def begin(place: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    """Start a command that signals reach."""
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed,
    )


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the end; what was written to stderr."""
    try:
        return process.communicate(timeout=TIMEOUT)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def begin_held(place: Path, held: Path, module: str, *command: str) -> subprocess.Popen[str]:
    """Start a command that is held where it begins to import a module, and wait until it is there."""
    process = begin(place, sys.executable, "-m", *command, HELD_AT=module, HELD=str(held))
    wait_until(held.exists, process)
    return process


@pytest.mark.parametrize(("number", "module"), [(signal.SIGINT, "torch.nn"), (signal.SIGTERM, "open_clip")])
def test_a_signal_while_training_is_set_up(place: Path, tmp_path: Path, number: signal.Signals, module: str) -> None:
    argv = flags(place, f"{number.name}-{module}", steps=100_000)
    process = begin_held(place, tmp_path / "held", module, "clipstream.train", *argv)
    process.send_signal(number)
    said = end(process)
    assert process.returncode == 75, said
    assert "Traceback" not in said
    assert said.endswith(f"stopped by {number.name} before the first step: rerun the same command\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_a_rank_waits_for_another(place: Path, rank: int) -> None:
    """Rank 0 waits for a rank that never comes; rank 1 waits in torch for a rank 0 that does not answer."""
    with contextlib.ExitStack() as opened:
        server = None if rank == 0 else opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = opened.enter_context(reserved_port()) if server is None else server.getsockname()[1]
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        argv = flags(place, f"connecting{rank}", steps=100_000)
        process = begin(place, sys.executable, "-m", "clipstream.train", *argv, **env)
        if server is None:
            wait_until(lambda: listens(port), process)
        else:
            server.settimeout(TIMEOUT)
            opened.enter_context(server.accept()[0])
        time.sleep(0.2)  # so that it usually waits in torch; it may as well come before
        process.send_signal(signal.SIGTERM)
        said = end(process)
    assert process.returncode == 75 and "Traceback" not in said, said
    assert rank == 1 or said.endswith("stopped by SIGTERM before the first step: rerun the same command\n"), said


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_ctrl_c_while_another_verb_starts(place: Path, tmp_path: Path) -> None:
    evaluator = ["--evals.a.type", "loss", "--evals.a.data.shards", f"{place}/pairs/{{00000..00003}}.tar"]
    argv = ["--model", f"{place}/model.json", *evaluator]
    process = begin_held(place, tmp_path / "held", "torch.nn", "clipstream", "evaluate", *argv)
    process.send_signal(signal.SIGINT)
    said = end(process)
    assert (process.returncode, said) == (130, "interrupted\n")


def test_a_signal_while_the_process_ends_leaves_its_exit_code(place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "at-exit"
    more = ("--data.sources.train.transform", "late:no_such_function")
    process = begin(place, sys.executable, "-m", "clipstream.train", *flags(place, "late", *more), AT_EXIT=str(mark))
    wait_until(mark.exists, process)
    process.send_signal(signal.SIGUSR1)  # ignored: there is nothing to save
    process.send_signal(signal.SIGINT)
    said = end(process)
    assert process.returncode == 2, said
    assert "no_such_function" in said and "Traceback" not in said
