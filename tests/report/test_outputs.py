"""Start and end records of a run: metrics.jsonl, report.html, out.log."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clipstream.checkpoint.store import holds_a_run, lock_folder
from clipstream.cli.verbs.train import main
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.run_record import git_state
from clipstream.distributed.world import World
from clipstream.report.terminal import LOG_FILE, ProgressDisplay, run_log
from clipstream.utils.logs import logger
from tests.support.runs import flags, lines


def end_of(place: Path, name: str) -> dict[str, Any]:
    """The last line of a run's metrics, which is its end."""
    last = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]
    found: dict[str, Any] = json.loads(last)
    return found


def check_end(place: Path, name: str, status: str, code: int, error: str) -> dict[str, Any]:
    """The end is the last line and the first of the report; returns it."""
    told = end_of(place, name)
    assert (told["end"]["status"], told["end"]["code"]) == (status, code)
    assert told["seconds"] >= 0 and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", told["time"])
    if error:
        assert error in told["end"]["error"]
        log = (place / "runs" / name / LOG_FILE).read_text()
        assert f"| ERROR | error: {told['end']['error'].splitlines()[0]}" in log
    assert f'class="status {status}"' in (place / "runs" / name / "report.html").read_text()
    return told


def test_a_run_says_its_start_and_its_end_and_a_start_that_fails_leaves_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(place, "done", steps=4)
    secret = "pipe:curl https://me:hunter2@host/x.tar?sig=hunter2 -H 'Authorization: Bearer hunter2'"
    monkeypatch.setattr(sys, "argv", ["train.py", *argv, "--note", secret])
    assert main(argv) == 0
    told = check_end(place, "done", "done", 0, "")
    assert told["end"]["error"] is None and told["step"] == 4
    assert "| INFO | step 4/4  loss " in (place / "runs/done" / LOG_FILE).read_text()
    begun = next(line["start"] for line in lines(place, "done", "start"))
    assert f"--logs {place}/runs" in begun["command"] and "hunter2" not in begun["command"]
    assert begun["folder"] == str(Path.cwd())
    assert begun["hardware"]["cores"] >= 1 and begun["hardware"]["memory_gib"] > 0 and begun["hardware"]["cpu"]
    assert main([*argv, "--resume", "latest", "--seed", "7"]) == 2
    assert end_of(place, "done") == told
    log = (place / "runs/done" / LOG_FILE).read_text().splitlines()
    assert any("| ERROR | error: " in line for line in log[-3:])


@pytest.mark.parametrize(
    ("more", "code", "status", "error"),
    [
        (["--caption-key", "nothing"], 3, "failed", "--caption-key"),
        (["--train.micro-batch-size", "auto"], 2, "failed", "micro_batch_size: auto"),
        (["--lr", "1e30", "--train.max-nonfinite", "1", "--train.max-rollbacks", "0"], 4, "diverged", "not finite"),
    ],
)
def test_a_failure_is_the_end_and_a_failed_start_leaves_the_name_free(
    place: Path, more: list[str], code: int, status: str, error: str
) -> None:
    name = f"failed-{code}"
    assert main(flags(place, name, *more, steps=4)) == code
    check_end(place, name, status, code, error)
    assert holds_a_run(place / "runs" / name) == (code == 4)
    if code == 3:
        assert main(flags(place, name, steps=1)) == 0
        assert [line["end"]["status"] for line in lines(place, name, "end")] == ["done"]


def test_the_state_of_git(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    if subprocess.run([*git, "init", "-q"], check=False).returncode:
        pytest.skip("there is no git here")
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    state = git_state(tmp_path)
    assert state is not None and re.fullmatch("[0-9a-f]{40,}", state["commit"]) and state["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert (git_state(tmp_path) or {})["dirty"] is True


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_log_has_lines_and_no_redraws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen = sys.stdout
    with run_log(tmp_path):
        progress = ProgressDisplay(100)
        for step in (10, 20):
            progress.write({"step": step, "samples": 64 * step, "loss": 1.5, "samples_per_s": 100.0})
        print("\x1b[31mwarning: \x1b[0mred", file=sys.stderr)
        print("10%\r55%\r100%", "see s3://key:hunter2@place/x.tar?token=hunter2", sep="\n")
        progress.write({"step": 21, "eval": "val", "top1": 0.5})
        progress.close()
        print("no end of line", end="")
    assert isinstance(screen, Terminal) and "step 20/" not in screen.getvalue() and "20/100" in screen.getvalue()
    log = (tmp_path / LOG_FILE).read_text()
    assert "\x1b" not in log and "hunter2" not in log
    said = [line.split(" | ", 1)[1] for line in log.splitlines()]
    assert [line for line in said if "step 20/100" in line] == ["INFO | step 20/100  loss 1.5  100 samples/s  eta 51s"]
    for line in ("WARNING | warning: red", "INFO | 100%", "INFO | val at step 21: top1 50.0%",
                 "INFO | no end of line"):  # fmt: skip
        assert line in said
    assert not [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    assert sys.stdout is screen


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_loses_the_log_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    with run_log(tmp_path):
        print("still said")
    assert capsys.readouterr() == ("still said\n", "")


def test_a_run_goes_on_where_nobody_reads_its_output(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, pipe)
        assert main(flags(place, "unread", steps=2)) == 0
        assert sys.stdout is pipe
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, None)
        assert main(["--help"]) == 0, "started without output"
    log = (place / "runs/unread" / LOG_FILE).read_text()
    assert "WARNING | standard output cannot be written (Broken pipe)" in log and "step 2/2" in log
    assert (place / "runs/unread/checkpoints/step_00000002").is_dir()


def test_the_lock_is_held_until_the_end_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = FailureWatch(World())
    watch.held.enter_context(lock_folder(tmp_path))
    held: list[int] = []
    watch.on_end = lambda code, _: held.append(code)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert watch.report(KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == "interrupted\n"  # no error
    finally:
        signal.signal(signal.SIGTERM, before)
    assert held == [130]
    watch.held.close()
    with lock_folder(tmp_path):
        pass
