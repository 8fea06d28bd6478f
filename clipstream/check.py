"""The verb `python -m clipstream.check SHARDS`: the content of a data set, and the samples that training would use."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from clipstream.cli.main import run_main
from clipstream.config.dump import print_config, take_flag
from clipstream.config.settings import load
from clipstream.data.settings import SourceSettings
from clipstream.errors import SettingsError

DEFAULT_IMAGE_KEY: str = SourceSettings.model_fields["image_key"].default


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if no sample is usable."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m clipstream.check",
        description="Inspect a data set: its shards, members and JSON fields, the samples that these settings would "
        "use and drop, and the flags to train on it. Exit code 3 if no sample is usable.",
    )
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS",
        help="tars: braces, '::', globs, pipe:, http(s):; or a manifest",
    )
    parser.add_argument("--caption-key", metavar="SUFFIX", help="the text member with the caption (txt)")
    parser.add_argument(
        "--caption-json", metavar="PATHS", help="path into the JSON member; several by ';' are tried in order"
    )
    parser.add_argument("--image-key", metavar="SUFFIXES", help=f"suffixes of the image member ({DEFAULT_IMAGE_KEY})")
    parser.add_argument("--folder", help="what a manifest's relative paths begin at (its own folder)")
    parser.add_argument("--separator", metavar="CHARACTER", help="of a CSV (from its header)")
    parser.add_argument("--print-config", action="store_true", help="print these flags as YAML for --config, and end")
    parser.add_argument("--samples", type=int, default=500, metavar="N", help="samples to read; 0 for all (500)")
    return parser


def _main(argv: list[str]) -> int:
    parser = build_parser()
    every, argv = take_flag(argv)
    options = parser.parse_args(argv)
    if options.samples < 0:
        parser.error(f"--samples must be 0 or more, not {options.samples}")
    # Not before, so that --help and wrong usage answer at once.
    from clipstream.data.decode.sample_profile import SHORT_FLAGS
    from clipstream.data.shard_url import redact
    from clipstream.data.sources.patterns import in_braces
    from clipstream.tools.check import check

    shards = "::".join(in_braces(options.shards))
    words = ["--train-data", redact(shards)]
    for name in ("caption_key", "caption_json", "image_key", "folder", "separator"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-") if name not in ("folder", "separator") else f"{SHORT_FLAGS}.{name}"
            words += [f"--{flag}", getattr(options, name)]
    if every is not None:
        return print_config(load(["--train-data", shards, *words[2:]]), "check", every)
    source = {name: getattr(options, name) for name in ("image_key", "folder", "separator") if getattr(options, name)}
    caption: dict[str, object] = {"type": "text"} if options.caption_key is None else {"key": options.caption_key}
    if options.caption_json is not None:  # with both flags, the text member is the fallback
        paths = [path.strip() for path in options.caption_json.split(";")]
        caption = {"type": "json", "path": paths, "fallback": options.caption_key}
    try:
        settings = SourceSettings.model_validate({**source, "shards": options.shards, "caption": caption})
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        if flag == "caption":
            flag += "-key" if options.caption_json is None else "-json"
        raise SettingsError(f"--{flag}: {first['msg'].removeprefix('Value error, ')}") from error
    check(settings, shlex.join(["python", "-m", "clipstream.train", *words]), options.samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
