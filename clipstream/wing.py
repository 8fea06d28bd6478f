"""The door to the wing, `clipstream.curation` and `clipstream.export`, which the core never imports.

What the core takes of it is named here, and loaded on use; without the wing, the core trains, evaluates and resumes all
the same. The verbs of the wing and its Python interface are above the core (`cli.main`, `clipstream.__init__`).
"""

from __future__ import annotations

import importlib
from typing import Any

OFFERED = {"hold_out": ("clipstream.curation.val_split", "make_held_out")}  # for data.val_split: the list of a source


def load_offer(name: str) -> Any:
    """The part of the wing for `name`, a key of OFFERED."""
    module, attribute = OFFERED[name]
    return getattr(importlib.import_module(module), attribute)
