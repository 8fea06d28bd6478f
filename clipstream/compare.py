"""The verb `python -m clipstream.compare RUN…`: one page that shows runs side by side, or one run's report anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clipstream.cli import run_main
from clipstream.errors import SettingsError
from clipstream.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and give the exit code: 0, or 2 where a folder holds no run."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m clipstream.compare",
        description="Write one HTML file, without network, that shows runs side by side: curves, evaluations, settings "
        "that differ, pictures, data health. Runs that go on or were killed are shown as far as they are.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (LOGS/NAME)")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE", help="(compare.html)")
    options = parser.parse_args(argv)
    try:
        write_report(options.runs, options.out)
    except OSError as error:
        raise SettingsError(f"--out: {options.out} cannot be written: {error.strerror}") from error
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
