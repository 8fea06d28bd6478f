"""The door to the wing, `clipstream.curation` and `clipstream.export`, which the core never imports.

What the core takes of it stands here, and is loaded on use; without the wing, the core trains, evaluates and resumes
all the same. The verbs of the wing and its Python interface are above the core (`cli.main`, `clipstream.__init__`).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def make_held_out(section: Any, share: float, data: Any, key: str) -> Path:
    """The list of the samples of a source that `data.val_split` holds out, as `curation.duplicates` makes it."""
    found: Path = importlib.import_module("clipstream.curation.duplicates").make_held_out(section, share, data, key)
    return found
