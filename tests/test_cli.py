"""How verbs start and end: help, errors, exit codes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clipstream import cli
from clipstream.config import Settings
from clipstream.errors import ClipstreamError, DataError, DivergedError, SettingsError, Stopped
from clipstream.helptext import help_text
from clipstream.schema import leaves
from clipstream.shorts import SHORTS

ROOT = Path(__file__).parents[1]


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | env
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def seconds_of(*argv: str) -> float:
    """CPU seconds of a process, which other processes on the machine do not stretch as they do wall time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python(*argv).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_there_at_once() -> None:
    """Under 1 s; where importing pydantic alone takes more than 0.1 s (a busy machine), under ten times that."""
    for argv in (("-m", "clipstream.train", "--help"), ("-c", "import pydantic.fields")):
        python(*argv)  # compiles to bytecode where nothing has yet
    pydantic = min(seconds_of("-c", "import pydantic.fields") for _ in range(3))
    assert min(seconds_of("-m", "clipstream.train", "--help") for _ in range(3)) < max(1.0, 10 * pydantic)


def test_help_imports_nothing_heavy() -> None:
    heavy = "torch", "numpy", "transformers", "open_clip", "huggingface_hub", "pydantic_settings"
    code = (
        "import sys\nfrom clipstream.train import main\nassert main(['--help']) == 0\n"
        f"sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("width", [60, 120])
def test_help_tells_every_key(width: int) -> None:
    text = help_text(Settings, "train", width)
    for key, field in leaves(Settings):
        assert f"--{key.replace('_', '-')} " in text
        assert field.description
    for short in SHORTS:
        assert f"\n  {short.flag}" in text
    for part in ("[default 512]", "auto|INT", "resampled|epoch", "with --loss.type siglip:", "\nschedule: "):
        assert part in (text if width == 120 else re.sub(r"(?<=default)\s+", " ", text))
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith(("usage", "  --")))


def test_short_flags_set_keys_that_exist() -> None:
    known = {key for key, _ in leaves(Settings)}
    for short in SHORTS:
        for key in short.keys:
            generic = key.replace("sources.train", "sources.NAME").replace("evals.val", "evals.NAME")
            generic = generic.replace("evals.imagenet_v2", "evals.NAME").replace("evals.imagenet", "evals.NAME")
            assert any(name == generic or name.startswith(f"{generic}.") for name in known), key


@pytest.mark.parametrize("error", [SettingsError, DataError, DivergedError, Stopped])
def test_errors_end_with_their_code(error: type[ClipstreamError], capsys: pytest.CaptureFixture[str]) -> None:
    def verb(argv: list[str]) -> int:
        raise error("what and how")

    assert cli.run_main(verb, []) == error.exit_code
    assert capsys.readouterr().err == "error: what and how\n"
    cli.run_main(verb, ["--run.debug", "true"])
    assert "Traceback" in capsys.readouterr().err


def test_debug_in_a_file_counts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verb(argv: list[str]) -> int:
        raise DataError("x")

    (tmp_path / "a.yaml").write_text("run: {debug: true}")
    cli.run_main(verb, ["--config", str(tmp_path / "a.yaml")])
    assert "Traceback" in capsys.readouterr().err


def test_bugs_and_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def bug(argv: list[str]) -> int:
        raise ZeroDivisionError

    def ctrl_c(argv: list[str]) -> int:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError):
        cli.run_main(bug, [])
    assert cli.run_main(ctrl_c, []) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_ranks_sign_their_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run_main(lambda argv: int(cli.load_or_help("train", argv) is None), ["--run.sed", "3"]) == 2
    assert capsys.readouterr().err.startswith("[rank 1] error: --run.sed: there is no such key; did you mean 'seed'?")


def test_every_error_stands_on_a_line_of_its_own() -> None:
    ended = python("-m", "clipstream.train", "--run.sed", "3", "--lr", "fast")
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: --run.sed: there is no such key; did you mean 'seed'?",
        "error: --lr: optim.lr: expected a number, not 'fast'",
    ]


def test_console_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert cli.main(["train", "--help"]) == 0
    assert "--train-data" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("clipstream ")


def test_help_into_a_closed_pipe() -> None:
    ended = subprocess.run(
        f"{sys.executable} -m clipstream.train --help | head -1", shell=True, cwd=ROOT, capture_output=True, check=False
    )
    assert ended.stdout.startswith(b"usage: ")
    assert not ended.stderr
