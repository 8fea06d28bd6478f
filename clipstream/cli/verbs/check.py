"""The verb check: inspect a data set: which samples are used and dropped."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice

from clipstream.config.entry import entry_point, print_config, take_flag
from clipstream.config.settings import read
from clipstream.curation.check import print_report, reading_flags
from clipstream.data.decode.sample_profile import SHORT_FLAGS
from clipstream.data.settings import IMAGE_KEY
from clipstream.storage.shard_url import in_braces
from clipstream.utils import executors

OF_ALL = ("headers", "executor", "table", "json_", "html", "yaml", "strict")  # that need --all


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream check",
        description="Inspect a data set: its shards, members and JSON fields, the samples that these settings use and "
        "drop, and the flags to train on it. Exit code 3 if no sample is usable.",
        epilog=f"--{SHORT_FLAGS}.KEY VALUE is that of clipstream train, e.g. caption.type my_module:my_function.",
    )
    shards = "tar files: braces, '::', globs, pipe:, http(s):; a table; or a local folder"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=shards)
    options = (
        ("--caption-key", "SUFFIX", "text member with the caption (default: txt; for a CSV: title, else txt)"),
        (
            "--caption-json",
            "PATHS",
            "path into the JSON member, or a text of fields such as '{title} by {brand}'; several, by ';', in order",
        ),
        ("--caption-lines", "WHICH", "of a text of several lines: all (default), first, or random"),
        (
            "--image-key",
            "SUFFIXES",
            f"suffixes of the image member, separated by ';' (default: {IMAGE_KEY.replace(';', '; ')})",
        ),
        ("--folder", None, "base folder of a table's relative paths (default: the table's folder)"),
        ("--separator", "CHARACTER", "separator of a CSV (default: detected from its header)"),
    )
    for flag, metavar, meaning in options:
        parser.add_argument(flag, metavar=metavar, help=meaning)
    parser.add_argument("--print-config", action="store_true", help="print these flags as YAML for --config, and exit")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples to read; 0: all (default: 500, or all of 2,000 or fewer)"
    )
    group = parser.add_argument_group("the whole of a data set")
    group.add_argument("--all", action="store_true", help="read all samples: captions, images, duplicates, problems")
    group.add_argument("--headers", action="store_true", help="read the headers of images only: faster, no duplicates")
    group.add_argument("--table", metavar="FOLDER", help="folder for the table of samples (default: in the cache)")
    group.add_argument(
        "--json", dest="json_", metavar="FILE", help="write the figures as JSON; '-': print nothing else"
    )
    group.add_argument("--html", metavar="FILE", help="write a page with charts, the worst samples and examples")
    group.add_argument("--yaml", metavar="FILE", help="write settings that train on these data, for --config")
    group.add_argument(
        "--strict", nargs="?", type=float, const=0.0, metavar="SHARE",
        help="exit code 3 if a problem concerns more than this share of the samples (default: 0), for CI",
    )  # fmt: skip
    executors.add_flag(group)
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if no sample is usable."""
    parser = build_parser()
    every, argv = take_flag(argv)
    reading, argv = _split_reading(argv)
    options = parser.parse_args(argv)
    if options.strict is not None and not 0 <= options.strict < 1:
        parser.error(f"--strict: expected a share from 0 to below 1, not {options.strict:g}")
    if options.samples is not None and options.samples < 0:
        parser.error(f"--samples must be 0 or more, not {options.samples}")
    given = [flag for flag in OF_ALL if getattr(options, flag) not in (None, False)]
    if given and not options.all:
        parser.error(f"--{given[0].strip('_')} needs --all")
    if options.all and options.samples is not None:
        parser.error("--samples does not go with --all, which reads all samples")
    shards, flags = "::".join(in_braces(options.shards)), [*reading_flags(vars(options)), *reading]
    written = read(["--train-data", shards, *flags])
    if every is not None:
        return print_config(written, "check", every)
    print_report(written.settings, ["--train-data", shards, *flags], options)
    return 0


def _split_reading(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of training's source with their values, and the rest of a command line."""
    reading, rest, words = list[str](), list[str](), iter(argv)
    for word in words:
        if word.startswith(f"--{SHORT_FLAGS}."):
            reading += [word] if "=" in word else [word, *islice(words, 1)]
        else:
            rest.append(word)
    return reading, rest
