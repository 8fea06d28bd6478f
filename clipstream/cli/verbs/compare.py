"""The verb compare: compare runs in one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag
from clipstream.config.value_tree import enumerate_words
from clipstream.errors import SettingsError, errors_as
from clipstream.report.html_report import read_run, write_page
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.logs import logger
from clipstream.utils.section import PathText, Section


class CompareFlags(Section):
    """Write one self-contained HTML file that shows runs side by side: curves, evaluations, different settings, images,
    data health.
    """

    run: list[PathText] = argument("folder of a run (LOGS/NAME)")
    out: OutPath = flag("HTML file to write", "compare.html", form="FILE")


def compare(command: CommandLine[CompareFlags]) -> None:
    """Raises SettingsError: no folder contains a run, or the file cannot be written."""
    options = command.own
    claim_output(options.out, "--out")
    runs, wrong = [], []
    for folder in options.run:
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


main = Verb("compare", CompareFlags, compare)
