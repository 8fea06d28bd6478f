"""Start and end of verbs: help, errors, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pty
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from clipstream import __version__
from clipstream.cli import main
from clipstream.config import command_line
from clipstream.config.help import help_text
from clipstream.config.settings import Settings, read
from clipstream.config.short_flags import ALIASES
from clipstream.errors import DataError, DivergedError, SettingsError, Stopped
from clipstream.utils.section import leaves
from tests.support.commands import ROOT, python


def test_help_imports_nothing_heavy() -> None:
    heavy = "torch", "numpy", "transformers", "open_clip", "huggingface_hub"
    code = (
        "import sys\nfrom clipstream.cli.verbs.train import main\nassert main(['--help']) == 0\n"
        f"found = [name for name in {heavy} if name in sys.modules]\n"
        "from clipstream.cli.verbs.check import main\nassert main(['synthetic:']) == 0\n"
        "sys.exit(', '.join(found) or 'torch' in sys.modules)"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["train --run.sed 3", "check a.nothing"])
def test_a_terminal_says_at_once_that_a_verb_loads_and_a_pipe_does_not(verb: str) -> None:
    argv = [sys.executable, "-m", "clipstream", *verb.split()]
    ours, theirs = pty.openpty()
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # which Linux raises where the other end is closed
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
    assert process.returncode in (2, 3) and shown.startswith("\r\x1b[Kloading clipstream … 0 s\r".encode())
    assert re.search(rb"\r\x1b\[K(error: |1 shard)", shown), "the line is erased before another one"
    assert "loading" not in subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False).stderr


@pytest.mark.parametrize("width", [60, 120])
def test_help_all_tells_every_key(width: int) -> None:
    """Those of a source once, though evaluators have sources as well, and those of a tower once."""
    text = help_text(Settings, main.verb_of("train"), "all", width=width)
    for given, field in leaves(Settings):
        key = given
        for same, first in ((r"evals\.NAME\.(data|train)\.", "data.sources.NAME."), (r"model\.text\.", "model.image.")):
            if repeated := re.match(same, key):
                assert f"--{repeated[0]}KEY" in text
                key = key.replace(repeated[0], first)
        flag = f"--{key.replace('_', '-')} "
        assert flag in text
        assert key == given or text.count(f"\n  {flag}") <= 2  # `key` is of two types of captions
        assert field.description
    for short in ALIASES:
        assert f"\n  {short.flag}" in text
    for part in ("[default 512]", "auto|INT", "resampled|epoch", "with --loss.type siglip:", "\nschedule: "):
        assert part in (text if width == 120 else re.sub(r"(?<=default)\s+", " ", text))
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith(("usage", "  --")))


@pytest.mark.parametrize("verb", ["train", "evaluate", "bench", "stage"])
def test_help_is_short_and_says_how_to_see_more(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    own = {"evaluate": "--checkpoint", "bench": "--gpu-rate", "stage": "--executor"}.get(verb, "--resume")
    data = "--val-data" if verb == "evaluate" else "--train-data"
    for argv in ([verb, "--help"], [verb, "-h", "--steps", "3"]):
        assert main.main(argv) == 0
        text = capsys.readouterr().out
        assert len(text.splitlines()) <= 85
        for flag in (own, data, "--help SECTION", "--help all", "--print-config"):
            assert f"\n  {flag}" in text
    assert all(len(line) <= 80 for line in help_text(Settings, main.verb_of(verb), width=80).splitlines())


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    helps = {}
    for verb in (*main.VERBS, ""):
        with contextlib.suppress(SystemExit):
            main.main([verb, "--help"] if verb else ["--help"])
        helps[verb] = capsys.readouterr().out
        assert helps[verb].startswith("usage: ") and all(len(line) <= 60 for line in helps[verb].splitlines()), verb
        assert "[--config\n" not in helps[verb] and "--section.key\n" not in helps[verb]
    assert "\n  bench        measure how fast shards are read, or with" in helps[""]
    for verb in ("evaluate", "stage"):  # which have no steps
        assert "--val-data" in helps[verb] and "--val-frequency" not in helps[verb]
    assert "--val-frequency" in helps["train"]


@pytest.mark.parametrize(
    ("topic", "there", "not_there"),
    [
        ("data", ["--data.lanes", "--data.augment.scale", "--train-data"], ["--optim.lr", "--evals."]),
        ("data.sources", ["--data.sources.NAME.shards", "--image-key"], ["--data.lanes"]),
        ("--data.sources.train.caption.json", ["--data.sources.NAME.caption.fallback"], [".NAME.shards"]),
        ("evals", ["--evals.NAME.k ", "--evals.NAME.data.KEY", "--data.sources.NAME.KEY"], ["NAME.data.shards"]),
        ("evals.zero_shot", ["--evals.NAME.templates", "--evals.NAME.every ", ".type zero_shot"], ["--evals.NAME.k "]),
        ("lr", ["[sets optim.lr]"], ["--wd"]),
    ],
)
def test_help_of_a_section(
    topic: str, there: list[str], not_there: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ([f"--help={topic}"], *([["--help", topic]] if not topic.startswith("-") else [])):
        assert main.main(["train", *argv]) == 0
        text = capsys.readouterr().out
        assert all(part in text for part in there)
        assert not any(part in text for part in not_there)


@pytest.mark.parametrize(
    ("topic", "told"),
    [
        ("dta", "unknown section 'dta'; did you mean 'data'?; choose from: run, model, tokenizer, data, "),
        ("data.source", "data has no 'source'; did you mean 'sources'?; choose from: global_batch_size, "),
        ("evals.zeroshot", "evals.NAME has no 'zeroshot'; did you mean 'zero_shot'?; choose from: retrieval, zero_"),
        ("optim.lr.x", "optim.lr is a setting without parts"),
    ],
)
def test_help_of_what_is_not_there(topic: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "--help", topic]) == 2
    assert capsys.readouterr().err.startswith(f"error: --help {topic}: {told}")


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError, 2), (DataError, 3), (DivergedError, 4), (Stopped, 75), (KeyboardInterrupt, 130)]
)
def test_errors_end_with_their_code(
    error: type[Exception], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(argv: list[str]) -> int:
        command_line.begin_log(read(argv))
        raise error("what and how")

    assert command_line.run_main(verb, []) == code
    told = "interrupted" if code == 130 else "what and how" if code == 75 else "error: what and how"
    assert capsys.readouterr().err == f"{told}\n"
    (tmp_path / "a.yaml").write_text("run: {debug: true}")
    for argv in (["--run.debug", "true"], ["--config", str(tmp_path / "a.yaml")]):
        command_line.run_main(verb, argv)
        assert ("Traceback" in capsys.readouterr().err) == (code != 130)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "some/where"), "some/where: No space left on device"),
        (OSError(27, "File too large"), "a file: File too large"),
        (OSError(122, "Disk quota exceeded", "a"), "a: Disk quota exceeded"),
        (OSError(30, "Read-only file system", b"a"), "Read-only file system"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "a file: No space left on device"),
    ],
)
def test_a_disk_that_refuses_a_write_is_one_line(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As errors of Python, and of libraries: safetensors 0.7 and tokenizers 0.23 raise those of Rust as texts."""

    def fail(argv: list[str]) -> int:
        raise error

    assert command_line.run_main(fail, []) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: cannot write ") and said in text and len(text.splitlines()) == 1


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        command_line.run_main(lambda argv: 1 // 0, [])


def test_ranks_sign_their_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(["train", "--run.sed", "3"]) == 2
    assert capsys.readouterr().err.startswith("[rank 1] error: --run.sed: unknown key; did you mean 'seed'?")


def test_console_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main.main([]) == 2
    assert main.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("clipstream ")
    assert main.main(["train", "--run.sed", "3", "--lr", "fast"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --run.sed: unknown key; did you mean 'seed'?",
        "error: --lr: optim.lr: expected a number, not 'fast'",
    ]


def test_help_into_a_closed_pipe() -> None:
    command = f"'{sys.executable}' -m clipstream.train --help | head -1"
    ended = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=False)
    assert ended.stdout.startswith(b"usage: ")
    assert not ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_output_that_cannot_be_written_is_an_error() -> None:
    code = "from clipstream.cli import main\nprint('a line')\nmain._end_at_once([0])"
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-c", code]
        ended = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False)
    assert ended.returncode == 120 and b"No space left on device" in ended.stderr


@pytest.mark.parametrize(("given", "expected"), [("", "passive"), ("active", "active")])
def test_threads_sleep_while_they_wait(given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is set before torch is imported, which reads it."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = "import os, sys, clipstream; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    ended = python("-c", code, **({"OMP_WAIT_POLICY": given} if given else {}))
    assert ended.stdout.split() == [expected, "False"], ended.stderr


def test_env_prints_versions_and_hardware_and_nothing_that_identifies_a_person() -> None:
    ended = python("-m", "clipstream", "env", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert found.items() >= {"clipstream": __version__, "python": platform.python_version()}.items()
    assert found["torch"].startswith(version("torch"))
    assert found.keys() >= {"webdataset", "open_clip_torch", "system", "cpu", "memory", "gpu", "cuda"}
    assert socket.gethostname() not in found.values()
