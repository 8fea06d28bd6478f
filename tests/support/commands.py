"""Python commands in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | env
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
