"""The verb `clipstream compare RUN…`: one page that shows runs side by side, or the report of one run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clipstream.config.config_sources import enumerate_words
from clipstream.config.entry import entry_point
from clipstream.errors import SettingsError, errors_as
from clipstream.report.html_report import read_run, write_page
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.logs import logger
from clipstream.utils.section import own_path, with_home


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clipstream compare",
        description="Write one self-contained HTML file that shows runs side by side: curves, evaluations, different "
        "settings, images, data health.",
    )
    parser.add_argument("runs", nargs="+", type=with_home, metavar="RUN", help="folder of a run (LOGS/NAME)")
    parser.add_argument(
        "--out",
        type=own_path,
        default="compare.html",
        metavar="FILE",
        help="HTML file to write (default: compare.html)",
    )
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, or 2 if no folder contains a run."""
    options = build_parser().parse_args(argv)
    claim_output(options.out, "--out")
    runs, wrong = [], []
    for folder in options.runs:
        try:
            runs.append(read_run(Path(folder)))
        except SettingsError as error:
            wrong.append(str(error))
    if not runs:
        raise SettingsError(enumerate_words(wrong))
    for text in wrong:
        print(f"warning: {text}; skipped", file=sys.stderr, flush=True)
    with errors_as(SettingsError, f"--out: cannot write {options.out}", OSError):
        others = write_page(Path(options.out), runs)
    for text in others:
        logger.warning(f"not comparable: {text}")
    print(options.out)
    return 0
