"""Owns how a verb starts and ends: its help, its settings, its errors on stderr, its exit code; and the console script.

Imports no torch: a verb does, once its settings are known to be right.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence

from clipstream import __version__
from clipstream.config import Settings, load
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean
from clipstream.helptext import help_text
from clipstream.world import World

INTERRUPTED = 130

VERBS = {
    "train": "train a model, evaluate it, save it",
    "evaluate": "evaluate a checkpoint",
    "check": "look into a data set: what would be used and dropped",
    "index": "note what each shard holds, for exact epochs",
    "bench": "measure how fast shards are read here, by stage and number of workers",
    "stage": "copy shards to this machine ahead of a run",
    "compare": "show runs side by side in one HTML file",
}


def load_or_help(verb: str, argv: Sequence[str]) -> Settings | None:
    """The settings of a verb, or None where help was asked for and has been printed.

    Raises:
        SettingsError: as `load`.
    """
    if wants_help(argv):
        sys.stdout.write(help_text(Settings, verb))
        return None
    return load(argv)


def own_flags(
    argv: Sequence[str], meanings: Mapping[str, str], many: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """A verb's own flags with their values, and the rest of the command line.

    Args:
        meanings: flag -> what it is for.
        many: those that may be given again: their values are joined by line ends; of others the last counts.

    Raises:
        SettingsError: one of them has no value.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        flag, equals, value = tokens.pop(0).partition("=")
        if flag not in meanings:
            rest.append(flag + equals + value)
            continue
        if not equals:
            value = tokens.pop(0) if tokens and not tokens[0].startswith("--") else ""
        if not value:
            raise SettingsError(f"{flag}: needs a value: {meanings[flag]}")
        own[flag] = f"{own[flag]}\n{value}" if flag in many and flag in own else value
    return own, rest


def wants_help(argv: Sequence[str]) -> bool:
    """Whether `--help` or `-h` stands in the command line."""
    return any(token in ("--help", "-h") for token in argv)


def run_main(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a verb and give its exit code.

    Errors for users are printed to stderr as `error: …`, with the rank before them where there are several, and with
    a traceback only where `run.debug` is on. Any other exception is a bug of ours and goes through.

    Args:
        main: the verb; takes the command line without the program's name, returns an exit code.
        argv: that command line; the process's own unless given.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names are bytes, and need not be text that can be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except ClipstreamError as error:
        if _debug(argv):
            traceback.print_exc()
        print(f"{_rank()}error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{_rank()}interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python still holds for stdout has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _rank() -> str:
    try:
        world = World.from_env()
    except SettingsError:
        return ""
    return f"[rank {world.rank}] " if world.size > 1 else ""


def _debug(argv: Sequence[str]) -> bool:
    """Whether the settings ask for tracebacks; where they are wrong themselves, whether the flag does."""
    try:
        return load(argv).run.debug
    except ClipstreamError:
        flags = [token for token in argv if token.split("=")[0] == "--run.debug"]
        return bool(flags) and flags[-1] != "--run.debug=false"


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: `clipstream VERB …` is `python -m clipstream.VERB …`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        rows = [f"  {verb:<10}{meaning}" for verb, meaning in VERBS.items()]
        print("usage: clipstream VERB [--help] …", "", *rows, sep="\n")
        return 0 if argv else SettingsError.exit_code
    verb, *rest = argv
    if verb == "--version":
        print(f"clipstream {__version__}")
        return 0
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS) or f"; the verbs are {', '.join(VERBS)}"
        print(f"error: there is no verb {verb!r}{near}", file=sys.stderr)
        return SettingsError.exit_code
    entry: Callable[[list[str]], int] = importlib.import_module(f"clipstream.{verb}").main
    return entry(rest)
