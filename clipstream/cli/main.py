"""The console script `clipstream VERB …`, which is also `python -m clipstream VERB …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from clipstream import __version__
from clipstream.config.entry import handle_signals
from clipstream.config.help import row, terminal_width
from clipstream.errors import SettingsError, did_you_mean

VERBS = {
    "train": "train a model, evaluate it, save it",
    "evaluate": "evaluate a checkpoint",
    "check": "look into a data set: what would be used and dropped",
    "index": "note what each shard holds, for exact epochs",
    "bench": "measure how fast shards are read here; with `bench train`, how fast a model trains under which settings",
    "audit": "find casts, float32 operations and 16-bit numbers that a training step should not have",
    "stage": "copy shards to this machine ahead of a run",
    "precompute": "compute features of frozen towers and teachers once, and store them",
    "search": "search in precomputed features: neighbours, near-duplicates, clusters, scores",
    "export": "write precomputed features as Parquet or NumPy",
    "compare": "show runs side by side in one HTML file",
    "env": "print versions and hardware, for a bug report",
    "completion": "print a script that completes verbs and flags in a shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: `clipstream VERB …`, or `python -m clipstream VERB …`."""
    own, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        rows = [line for verb, meaning in VERBS.items() for line in row(verb, meaning, 14, terminal_width())]
        print("usage: clipstream VERB …", "", *rows, "", "clipstream VERB --help says more.", sep="\n")
        return 0 if argv else SettingsError.exit_code
    verb, *rest = argv
    if verb == "--version":
        print(f"clipstream {__version__}")
        return 0
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS) or f"; the verbs are {', '.join(VERBS)}"
        print(f"error: there is no verb {verb!r}{near}", file=sys.stderr)
        return SettingsError.exit_code
    if own:
        handle_signals(verb)
    return int(verb_module(verb).main(rest))


def verb_module(verb: str) -> ModuleType:
    """The module of a verb: it has `main(argv)`, and its flags in `build_parser()` or `OWN_FLAGS`."""
    return importlib.import_module(f"clipstream.cli.verbs.{verb}")
