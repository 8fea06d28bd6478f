"""The console script `clipstream VERB …`, which is also `python -m clipstream VERB …`."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipstream import __version__
from clipstream.cli import verbs
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, did_you_mean
from clipstream.text import row, terminal_width
from clipstream.utils.logs import loading

if TYPE_CHECKING:
    from clipstream.config.command_line import Verb

_FIRST_LINE = re.compile(r'"""The verb (\S+): (.+?)\.?(?:""")?\n')


def find_verbs() -> dict[str, str]:
    """Name -> meaning of each verb, of the first line of its module: `The verb NAME: MEANING.` Nothing is imported."""
    found: dict[str, str] = {}
    folder = Path(verbs.__path__[0])
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
        with path.open(encoding="utf-8") as file:
            if (line := _FIRST_LINE.match(file.readline())) is not None:
                found[line[1]] = line[2]
    return dict(sorted(found.items(), key=lambda verb: verb[0] != "train"))  # what most come for, first


VERBS = find_verbs()


def main(argv: Sequence[str] | None = None, *, own: bool = False) -> int:
    """The console script: `clipstream VERB …`, or `python -m clipstream VERB …`; `own` with another name."""
    own, argv = own or argv is None, list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        rows = [line for verb, meaning in VERBS.items() for line in row(verb, meaning, 15, terminal_width())]
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
    shown = ("train", "check", "label", "search")
    asked = any(word.startswith(("--help", "-h", "--print-config")) for word in rest)
    if own and verb in shown and not asked and World.of_launcher().is_main:
        loading.begin("loading clipstream")
    if own:
        # Else torch prints a stack of C++ for each connection that breaks, which is told in words.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        atexit.register(_end_at_once, codes)  # the first one, which runs last
        from clipstream.config.command_line import handle_signals  # after the first output, as it takes a while

        handle_signals(verb)
    codes.append(verb_of(verb)(rest))
    return codes[0]


def _end_at_once(codes: Sequence[int]) -> None:
    """End the process with the exit code of its verb: taking down torch's modules may take seconds."""
    if codes:
        with suppress(OSError, ValueError):  # Python says why, and exits with 120
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])


def verb_of(name: str) -> Verb[Any]:
    """The verb of this name: `main` of its module."""
    found: Verb[Any] = importlib.import_module(f"clipstream.cli.verbs.{name}").main
    return found
