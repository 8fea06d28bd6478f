"""The completion scripts: every verb and flag is in them, and bash completes what is typed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from clipstream.cli.main import VERBS
from clipstream.cli.verbs.completion import console_parser, flag_of, script
from clipstream.config.settings import Settings
from clipstream.open_clip.aliases import ALIASES
from clipstream.utils.section import leaves
from tests.support.commands import python


@pytest.fixture(scope="module")
def verbs() -> dict[str, argparse.ArgumentParser]:
    actions = console_parser()._actions
    found: dict[str, argparse.ArgumentParser] = next(
        action.choices for action in actions if isinstance(action, argparse._SubParsersAction)
    )
    return found


def test_every_verb_is_there(verbs: dict[str, argparse.ArgumentParser]) -> None:
    assert verbs.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", ["train", "evaluate", "bench", "stage", "precompute"])
def test_every_setting_and_short_flag_is_there(verbs: dict[str, argparse.ArgumentParser], verb: str) -> None:
    flags = verbs[verb]._option_string_actions.keys()
    assert flags >= {flag_of(key) for key, _ in leaves(Settings)} | {alias.flag for alias in ALIASES} | {"--config"}


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
def test_the_verb_prints_a_script(shell: str) -> None:
    done = python("-m", "clipstream", "completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--train.precision" in done.stdout or shell == "tcsh"
    assert "precompute" in done.stdout
