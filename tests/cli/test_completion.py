"""The completion scripts: every verb and flag is in them, and bash completes what is typed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.main import VERBS, main
from clipstream.cli.verbs.completion import console_parser, flag_of, script
from clipstream.config.settings import Settings
from clipstream.open_clip.flags import ALIASES
from clipstream.utils.section import leaves


def test_every_verb_setting_and_short_flag_is_there() -> None:
    actions = console_parser()._actions
    verbs: Any = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    assert verbs.keys() == VERBS.keys()
    for verb in ("train", "evaluate", "bench", "stage", "precompute"):
        flags = verbs[verb]._option_string_actions.keys()
        known = {flag_of(key) for key, _ in leaves(Settings)} | {alias.flag for alias in ALIASES}
        assert flags >= known | {"--config"}, verb


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["clipstream", "prec"], {"precompute"}),
        (["clipstream", "train", "--train.prec"], {"--train.precision"}),
        (["clipstream", "train", "--siglip", "--train.precision", "pure"], {"pure_bf16"}),
        (["clipstream", "bench", "--gpu-r"], {"--gpu-rate"}),
        (["clipstream", "bench", "train", "--loss-st"], {"--loss-steps"}),
        (["clipstream", "search", "dup"], {"duplicates"}),
        (["clipstream", "export", "features", "--form"], {"--format"}),
    ],
)
def test_bash_completes(typed: list[str], completed: set[str], tmp_path: Path) -> None:
    file = tmp_path / "completion.bash"
    file.write_text(script("bash"))
    words = " ".join(f"'{word}'" for word in typed)
    code = (
        f"source {file}; COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; COMP_LINE='{' '.join(typed)}'; "
        '_shtab_clipstream; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=False)
    assert {word.strip() for word in done.stdout.splitlines()} == completed, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_the_verb_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "precompute" in text and ("--train.precision" in text or shell == "tcsh")
