"""Python commands in fresh interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.forks import ROOT, TIMEOUT


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python called with these arguments; neither a rank nor settings of the Hub are inherited."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "HF_"))}
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=kept | env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def run_code(code: str, *argv: str, **env: str) -> str:
    """What code prints in a fresh process, which must not fail."""
    done = python("-c", code, *argv, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_verb(*argv: str) -> subprocess.Popen[str]:
    """A verb that may not import torch, in a process and session of its own."""
    code = "import sys; sys.modules['torch'] = None; from clipstream.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell starts what goes on in the background with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
