"""The verb pack: write new shards from any data: shuffled, resized, split, merged."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Literal

from clipstream.checkpoint.remote_sync import RemoteDir
from clipstream.config.command_line import CommandLine, Verb, argument, flag
from clipstream.config.help import READING
from clipstream.curation.pack import Asked, pack
from clipstream.curation.pack_shards import Format, Recipe, Recording
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import cache_root
from clipstream.storage.shard_url import ShardURL, in_braces
from clipstream.utils.executors import MEANING, check_executor
from clipstream.utils.section import GIVEN, SET, Conflict, Section, own_path

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class PackFlags(Section):
    """Write the samples of SOURCE… (what --train-data takes: folders, tables, tars) to OUT as new tars, shuffled over
    all of them, and print the command that trains on them. Rerun the same command to continue after an interruption;
    the bytes are the same for any number of workers.
    """

    out: str = argument("folder or URL to write to")
    source: list[str] = argument("what --train-data takes: folders, tables, tars", [])
    shard_size: str = flag(
        "most samples of a shard, or its bytes with a unit, such as 500MB; source: one new shard for each of the "
        "sources, in their order", "10000", form="SIZE",
    )  # fmt: skip
    order: Literal["shuffled", "source"] | None = flag(
        "shuffled: over all samples, by --seed (default); source: as the sources have them"
    )
    val_split: float | None = flag(
        "share of the samples for OUT/val, without near-duplicates in OUT/train (decodes all images)", gt=0, lt=1
    )
    group: str | None = flag(
        "with --val-split: member, column or json:PATH whose equal values stay on one side", form="NAME"
    )
    merge: str | None = flag(
        "source with further captions, by key: tars, or a table with the columns key and caption", form="SOURCE"
    )
    check_images: Literal["header", "decode"] = flag("decode: drop images that cannot be decoded, too", "header")
    size: int | None = flag("resize images whose shorter side is longer than this, in pixels", ge=1)
    format: Format = flag("image format", "keep")
    quality: int | None = flag("quality of re-encoded JPEG, WebP and AVIF images, 1 to 100 (default: 95)", ge=1, le=100)
    license: str = flag("license of the data, for the data card", "unknown")
    executor: str | None = flag(MEANING, form="EXECUTOR")

    pairs = (
        Conflict({"group": SET, "val_split": None}, "requires --val-split"),
        Conflict(
            {"val_split": GIVEN, "merge": GIVEN},
            "does not compare the captions of --merge: pack with --merge first, then what it wrote with --val-split",
        ),
        *(
            Conflict(
                {key: GIVEN, "shard_size": "source"},
                "not supported with --shard-size source, which keeps the sources' shards",
            )
            for key in ("val_split", "order")
        ),
        Conflict({"quality": GIVEN, "size": None, "format": "keep"}, "requires --size or --format"),
    )


def run(command: CommandLine[PackFlags]) -> None:
    pack(read_command(command))


def read_command(command: CommandLine[PackFlags]) -> Asked:
    """Check the command line. Raises SettingsError: a flag or a setting is wrong."""
    own, data = command.own, command.own.source
    settings = command.load([*(["--train-data", "::".join(in_braces(data))] if data else []), *command.flags]).settings
    if not settings.data.sources:
        raise SettingsError("missing SOURCE: clipstream pack OUT SOURCE…, or --config with data.sources")
    size = None if own.shard_size == "source" else _shard_size(own.shard_size)
    recipe = None
    if own.size is not None or own.format != "keep":
        recipe = Recipe(own.size, own.format, 95 if own.quality is None else own.quality)
    out = own.out
    if (local := ShardURL(out).path) is not None:
        out = str(folder := Path(os.path.abspath(own_path(local))))
        if folder.is_file():
            raise SettingsError(
                f"{own.out} is a file: name the folder of the new shards first (clipstream pack OUT SOURCE)"
            )
    else:
        folder = cache_root() / "packs" / hashlib.sha256(out.encode()).hexdigest()[:24]
        RemoteDir(out, "OUT")  # tells what is wrong with it
    return Asked(
        out,
        folder,
        settings,
        Recording(recipe, own.check_images == "decode", settings.data.max_image_pixels),
        size,
        size is not None and own.order != "source",
        own.val_split,
        own.group,
        own.merge,
        own.license,
        check_executor(own.executor),
    )


def _shard_size(text: str) -> tuple[int, bool]:
    """A number of samples, or of bytes; and whether it is of bytes. Raises SettingsError: it is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", text.strip().lower())
    size = 0 if found is None else int(float(found[1]) * UNITS[found[2] or ""])
    if found is None or size < 1 or (not found[2] and not found[1].isdigit()):
        raise SettingsError(f"--shard-size: expected a number of samples, bytes such as 500MB, or source, not {text!r}")
    return size, bool(found[2])


main = Verb("pack", PackFlags, run, READING)
