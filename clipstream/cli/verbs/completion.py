"""The verb `clipstream completion SHELL`: prints a script that completes verbs and flags in a shell."""

from __future__ import annotations

import argparse
from typing import Literal, get_args, get_origin

import shtab
from pydantic.fields import FieldInfo

from clipstream.cli.main import VERBS, verb_module
from clipstream.config.entry import entry_point
from clipstream.config.settings import Settings
from clipstream.open_clip.flags import ALIASES
from clipstream.utils.section import kinds, leaves

SOURCE, EVALUATOR = "data.sources.NAME.", "evals.NAME."  # keys below a name of the user's own
NAMES = {SOURCE: "data.sources.train.", EVALUATOR: "evals.val."}  # the names that the flags of open_clip set
LONGEST = 100  # characters of a meaning


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clipstream completion",
        description="Print a script that completes verbs, flags and their choices in a shell. For bash: "
        'eval "$(clipstream completion bash)" in ~/.bashrc; for zsh: clipstream completion zsh > a file _clipstream in '
        "a folder of $fpath; for fish: clipstream completion fish > ~/.config/fish/completions/clipstream.fish.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell")
    return parser


@entry_point
def main(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    text: str = shtab.complete(console_parser(), shell)
    return text


def console_parser() -> argparse.ArgumentParser:
    """The whole command line of the console script. It describes flags, and is not used to read them."""
    parser = argparse.ArgumentParser(prog="clipstream")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for verb, meaning in VERBS.items():
        module = verb_module(verb)
        if (build := getattr(module, "build_parser", None)) is not None:
            own: argparse.ArgumentParser = build()
            verbs.add_parser(verb, help=meaning, parents=[own], add_help=False, conflict_handler="resolve")
            continue
        added = verbs.add_parser(verb, help=meaning)
        added.add_argument("--config", metavar="FILE", help="settings in YAML").complete = shtab.FILE  # type: ignore[attr-defined]
        added.add_argument("--print-config", nargs="?", choices=["all"], help="print the settings as YAML")
        known = {"--config", "--print-config"}
        for table in ("OWN_FLAGS", "WATCH_FLAGS"):
            for flag, text in getattr(module, table, {}).items():
                _add(added, flag.split()[0], text, known)
        for alias in ALIASES:
            _add(added, alias.flag, alias.meaning, known, switch=alias.switch)
        for key, info in leaves(Settings):
            _add(added, flag_of(key), info.description or "", known, choices_of(info))
    return parser


def flag_of(key: str) -> str:
    """The flag of a setting; of a source or evaluator, with the name that short flags give it."""
    for generic, named in NAMES.items():
        key = key.replace(generic, named)
    return f"--{key.replace('_', '-')}"


def choices_of(info: FieldInfo) -> list[str] | None:
    """The values of a setting that is a choice or a switch; None for other settings."""
    found: list[str] = []
    for kind in kinds(info.annotation):
        if kind is bool:
            found += ["true", "false"]
        elif get_origin(kind) is Literal:
            found += [str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(kind)]
    return found or None


def _add(
    parser: argparse.ArgumentParser,
    flag: str,
    meaning: str,
    known: set[str],
    choices: list[str] | None = None,
    *,
    switch: bool = False,
) -> None:
    if flag in known:
        return
    known.add(flag)
    text = " ".join(meaning.split())[:LONGEST].replace("%", "%%")
    if switch:
        parser.add_argument(flag, action="store_true", help=text)
        return
    argument = parser.add_argument(flag, choices=choices, metavar=None if choices else "VALUE", help=text)
    if choices is None:
        argument.complete = shtab.FILE  # type: ignore[attr-defined]
