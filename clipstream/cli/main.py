"""The console script `clipstream VERB …`, which is also `python -m clipstream VERB …`."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from clipstream import __version__
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, did_you_mean
from clipstream.utils.logs import loading

VERBS = {
    "train": "train a model, evaluate it, save it",
    "evaluate": "evaluate a checkpoint",
    "interpolate": "choose weights between the start and the end of a run, or average checkpoints",
    "check": "inspect a data set: which samples are used and dropped",
    "filter": "choose the samples to train on, by conditions on fields and scores",
    "index": "write an index of each shard, for exact epochs",
    "bench": "measure how fast shards are read, or with `bench train` how fast a model trains",
    "audit": "audit the dtypes of a training step",
    "pack": "write new shards from any data: shuffled, resized, split, merged",
    "stage": "copy shards to this machine ahead of a run",
    "precompute": "compute and store features of frozen towers and teachers",
    "search": "find images by a text or an image; near-duplicates, clusters and scores of precomputed features",
    "export": "write a model for transformers, ONNX, …, or precomputed features as Parquet or NumPy",
    "compare": "compare runs in one HTML file",
    "env": "print versions and hardware, for a bug report",
}


def main(argv: Sequence[str] | None = None, *, own: bool = False) -> int:
    """The console script: `clipstream VERB …`, or `python -m clipstream VERB …`; `own` with another name."""
    own, argv = own or argv is None, list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        from clipstream.config.help import row, terminal_width

        rows = [line for verb, meaning in VERBS.items() for line in row(verb, meaning, 14, terminal_width())]
        print("usage: clipstream VERB …", "", *rows, "", "clipstream VERB --help shows the flags of a verb.", sep="\n")
        return 0 if argv else SettingsError.exit_code
    verb, *rest = argv
    if verb == "--version":
        print(f"clipstream {__version__}")
        return 0
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS) or f"; the verbs are {', '.join(VERBS)}"
        print(f"error: unknown verb {verb!r}{near}", file=sys.stderr)
        return SettingsError.exit_code
    codes: list[int] = []
    shown = ("train", "check", "search")
    asked = any(word.startswith(("--help", "-h", "--print-config")) for word in rest)
    if own and verb in shown and not asked and World.of_launcher().is_main:
        loading.begin("loading clipstream")
    if own:
        # Else torch prints a stack of C++ for each connection that breaks, which is told in words.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        atexit.register(_end_at_once, codes)  # the first one, which runs last
        from clipstream.config.entry import handle_signals  # after the first output, as it takes a while

        handle_signals(verb)
    codes.append(int(verb_module(verb).main(rest)))
    return codes[0]


def _end_at_once(codes: Sequence[int]) -> None:
    """End the process with the exit code of its verb: taking down torch's modules may take seconds."""
    if codes:
        with suppress(OSError, ValueError):  # Python says why, and exits with 120
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])


def verb_module(verb: str) -> ModuleType:
    """The module of a verb: it has `main(argv)`, and its flags in `build_parser()` or `OWN_FLAGS`."""
    return importlib.import_module(f"clipstream.cli.verbs.{verb}")
