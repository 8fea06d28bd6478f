"""The verb pack: write new shards from any data: shuffled, resized, split, merged."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from clipstream.checkpoint.remote_sync import RemoteDir
from clipstream.config.entry import command_line, entry_point
from clipstream.config.flags import choice_flag, number_flag
from clipstream.curation.pack import Asked, pack
from clipstream.curation.pack_sample import Format, Recipe, Recording
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import cache_root
from clipstream.storage.shard_url import ShardURL, in_braces
from clipstream.utils.executors import MEANING, checked
from clipstream.utils.section import own_path

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
OWN_FLAGS = {
    "--shard-size": "most samples of a shard, or its bytes with a unit, such as 500MB (default: 10000); source: one "
    "new shard for each of the sources, in their order",
    "--order": "shuffled: over all samples, by --seed (default); source: as the sources have them",
    "--val-split": "share of the samples for OUT/val, without near-duplicates in OUT/train (decodes all images)",
    "--group": "with --val-split: member, column or json:PATH whose equal values stay on one side",
    "--merge": "source with further captions, by key: tars, or a table with the columns key and caption",
    "--check-images": "header (default), or decode: drop images that cannot be decoded, too",
    "--size": "resize images whose shorter side is longer than this, in pixels",
    "--format": f"image format: {', '.join(get_args(Format))} (default: keep)",
    "--quality": "quality of re-encoded JPEG, WebP and AVIF images, 1 to 100 (default: 95)",
    "--license": "license of the data, for the data card (default: unknown)",
    "--executor": f"{MEANING} (default: local, one process per core)",
}


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if samples cannot be read or written."""
    pack(arguments(argv))
    return 0


def arguments(argv: Sequence[str]) -> Asked:
    """Parse the command line. Raises SettingsError: a flag or a setting is wrong."""
    command = command_line("pack", argv, OWN_FLAGS)
    own, names = command.own, list[str]()
    flags = list(command.flags)
    while flags and not flags[0].startswith("-"):
        names.append(flags.pop(0))
    if not names:
        raise SettingsError("missing OUT: clipstream pack OUT SOURCE…")
    if names[1:]:
        flags = ["--train-data", "::".join(in_braces(names[1:])), *flags]
    settings = command.load(flags).settings
    if not settings.data.sources:
        raise SettingsError("missing SOURCE: clipstream pack OUT SOURCE…, or --config with data.sources")
    recipe = _recipe(own)
    share = number_flag(own, "--val-split", None)
    if share is not None and share >= 1:
        raise SettingsError(f"--val-split: expected a share above 0 and below 1, not {own['--val-split']!r}")
    if share is None and "--group" in own:
        raise SettingsError("--group requires --val-split")
    if share is not None and "--merge" in own:
        raise SettingsError(
            "--val-split does not compare the captions of --merge: pack with --merge first, then what it wrote with "
            "--val-split"
        )
    size = None if own.get("--shard-size") == "source" else _shard_size(own.get("--shard-size", "10000"))
    for flag in ("--val-split", "--order") if size is None else ():
        if flag in own:
            raise SettingsError(f"{flag} is not supported with --shard-size source, which keeps the sources' shards")
    decode = choice_flag(own, "--check-images", ("header", "decode"), "header") == "decode"
    out = names[0]
    if (local := ShardURL(out).path) is not None:
        out = str(folder := Path(os.path.abspath(own_path(local))))
        if folder.is_file():
            raise SettingsError(
                f"{names[0]} is a file: name the folder of the new shards first (clipstream pack OUT SOURCE)"
            )
    else:
        folder = cache_root() / "packs" / hashlib.sha256(out.encode()).hexdigest()[:24]
        RemoteDir(out, "OUT")  # tells what is wrong with it
    return Asked(
        out,
        folder,
        settings,
        Recording(recipe, decode, settings.data.max_image_pixels),
        size,
        size is not None and choice_flag(own, "--order", ("shuffled", "source"), "shuffled") == "shuffled",
        share,
        own.get("--group"),
        own.get("--merge"),
        own.get("--license", "unknown"),
        checked(own.get("--executor")),
    )


def _recipe(own: Mapping[str, str]) -> Recipe | None:
    """How images are re-encoded; None for no change. Raises SettingsError: a flag is wrong."""
    size, kind = number_flag(own, "--size", None, least=1), choice_flag(own, "--format", get_args(Format), "keep")
    quality = number_flag(own, "--quality", None, least=1, most=100)
    if size is not None or kind != "keep":
        return Recipe(size, cast(Format, kind), 95 if quality is None else quality)
    if quality is not None:
        raise SettingsError("--quality requires --size or --format")
    return None


def _shard_size(text: str) -> tuple[int, bool]:
    """A number of samples, or of bytes; and whether it is of bytes. Raises SettingsError: it is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", text.strip().lower())
    size = 0 if found is None else int(float(found[1]) * UNITS[found[2] or ""])
    if found is None or size < 1 or (not found[2] and not found[1].isdigit()):
        raise SettingsError(f"--shard-size: expected a number of samples, bytes such as 500MB, or source, not {text!r}")
    return size, bool(found[2])
