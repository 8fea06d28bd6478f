"""The verb `clipstream completion SHELL`: prints a script that completes verbs and flags in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clipstream.config.entry import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream completion",
        description="Print a script that completes verbs, flags and their choices in a shell. For bash: "
        'eval "$(clipstream completion bash)" in ~/.bashrc; for zsh: clipstream completion zsh > a file _clipstream in '
        "a folder of $fpath; for fish: clipstream completion fish > ~/.config/fish/completions/clipstream.fish.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell")
    return parser


def _main(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    from clipstream.cli.completion import script

    print(script(options.shell))
    return 0
