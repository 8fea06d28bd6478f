"""The folder for files that clipstream keeps between runs, such as drawn toy data and manifests as Arrow files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$CLIPSTREAM_CACHE, or $XDG_CACHE_HOME/clipstream, or ~/.cache/clipstream."""
    if own := os.environ.get("CLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "clipstream"
