"""The verb `clipstream check SHARDS`, and the function `clipstream.check`: the content of a data set, and the
samples that training would use.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from clipstream.cli.main import run_main
from clipstream.config.dump import print_config, take_flag
from clipstream.config.python_settings import PathLike
from clipstream.config.settings import load
from clipstream.data.settings import SourceSettings
from clipstream.errors import SettingsError, each, wrong_type
from clipstream.utils.logs import on_terminal

if TYPE_CHECKING:
    from clipstream.tools.check import CheckReport

DEFAULT_IMAGE_KEY: str = SourceSettings.model_fields["image_key"].default


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if no sample is usable."""
    return run_main(_main, argv)


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream check",
        description="Inspect a data set: its shards, members and JSON fields, the samples that these settings would "
        "use and drop, and the flags to train on it. Exit code 3 if no sample is usable.",
    )
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS",
        help="tars: braces, '::', globs, pipe:, http(s):; or a manifest",
    )
    parser.add_argument(
        "--caption-key", metavar="SUFFIX", help="the text member with the caption (txt; of a CSV: title, or txt)"
    )
    parser.add_argument(
        "--caption-json", metavar="PATHS", help="path into the JSON member; several by ';' are tried in order"
    )
    parser.add_argument(
        "--image-key",
        metavar="SUFFIXES",
        help=f"suffixes of the image member, by ';' ({DEFAULT_IMAGE_KEY.replace(';', '; ')})",
    )
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
    from clipstream.data.sources.patterns import in_braces
    from clipstream.storage.shard_url import redact
    from clipstream.tools.check import check as print_checked

    shards = "::".join(in_braces(options.shards))
    words = ["--train-data", redact(shards)]
    for name in ("caption_key", "caption_json", "image_key", "folder", "separator"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-") if name not in ("folder", "separator") else f"{SHORT_FLAGS}.{name}"
            words += [f"--{flag}", getattr(options, name)]
    if every is not None:
        return print_config(load(["--train-data", shards, *words[2:]]), "check", every)
    settings = _source(options.shards, vars(options))
    print_checked(settings, shlex.join(["python", "-m", "clipstream.train", *words]), options.samples)
    return 0


def check(
    shards: PathLike | Sequence[PathLike],
    *,
    caption_key: str | None = None,
    caption_json: str | None = None,
    image_key: str | None = None,
    folder: PathLike | None = None,
    separator: str | None = None,
    samples: int = 500,
) -> CheckReport:
    """Look into a data set: its members and JSON fields, and the samples that training would use and drop.

    Args:
        shards: as `--train-data` takes them: tars, manifests, folders; with braces, globs and `::`; text or a path,
            or a list of them.
        caption_key: suffix of the text member with the caption; unless set 'txt', and of a CSV 'title' before it.
        caption_json: path into the JSON member, such as 'caption.en'; several by ';' are tried in order.
        image_key: suffixes of the image member, by ';'.
        folder: what a manifest's relative paths begin at.
        separator: of a CSV.
        samples: number of samples to read, spread over the shards; 0 for all.

    Returns:
        The findings, also where no sample is usable.

    Raises:
        SettingsError: the shards cannot be listed, or the caption settings do not fit together.
        DataError: a manifest cannot be read.

    Examples:
        >>> import clipstream
        >>> report = clipstream.check("shards/*.tar")
        >>> report.ok, report.used, report.drops
        (True, 24, Counter())
        >>> dict(report.profile.suffixes)
        {'jpg': 24, 'txt': 24, 'json': 24, 'cls': 24}
        >>> clipstream.check("shards/*.tar", caption_json="caption.de").drops
        Counter({'no_caption': 24})
    """
    from clipstream.tools.check import look

    given = {"caption_key": caption_key, "caption_json": caption_json, "image_key": image_key, "separator": separator}
    for name, value in given.items():
        if not isinstance(value, str | None):
            raise wrong_type(name, "text", value)
    if not isinstance(folder, str | os.PathLike | None):
        raise wrong_type("folder", "a path", folder)
    if not isinstance(samples, int) or samples < 0:
        raise SettingsError(f"samples: expected a number of samples, 0 or more, not {samples!r}")
    with on_terminal():
        return look(_source(shards, {**given, "folder": None if folder is None else os.fspath(folder)}), samples)


def _source(shards: PathLike | Sequence[PathLike], options: Mapping[str, str | None]) -> SourceSettings:
    """The settings of a source. Raises SettingsError: an option has an invalid value."""
    expected = "a pattern or a list of patterns"
    source: dict[str, object] = {
        "shards": [os.fspath(one) for one in each("shards", expected, shards, (str, os.PathLike))]
    }
    source |= {name: options[name] for name in ("image_key", "folder", "separator") if options[name]}
    key, json = options["caption_key"], options["caption_json"]
    if json is not None:  # with both flags, the text member is the fallback
        source["caption"] = {"type": "json", "path": [path.strip() for path in json.split(";")], "fallback": key}
    elif key is not None:
        source["caption"] = {"key": key}
    try:
        return SourceSettings.model_validate(source)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        if flag == "caption":
            flag += "-key" if json is None else "-json"
        raise SettingsError(f"--{flag}: {first['msg'].removeprefix('Value error, ')}") from error
