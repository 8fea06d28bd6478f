"""The verb `stage`: a command line enters; copies of a run's shards and settings that train on them are written.

Never imports torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from rich.filesize import decimal

from clipstream.checkpoint.run_lock import held
from clipstream.config.config_sources import Dumper
from clipstream.config.flags import own_flags, split
from clipstream.config.print_config import print_config, take_flag
from clipstream.config.section import with_home
from clipstream.config.settings import Settings, load
from clipstream.data.decode.captions import split_keys
from clipstream.data.shard_url import redact
from clipstream.data.sources.registry import expand
from clipstream.data.sources.tars import SIZES
from clipstream.errors import DataError, SettingsError, Stopped
from clipstream.report.terminal import duration
from clipstream.tools.staging import plan as listing
from clipstream.tools.staging.copying import PARTS, Copier
from clipstream.tools.staging.plan import RECORDS, StagedSource, plan, spec
from clipstream.tools.staging.reencode import Format, Recipe
from clipstream.tools.staging.work import Work
from clipstream.utils import atomic_write
from clipstream.utils.escape import printable
from clipstream.utils.logs import set_level
from clipstream.utils.process_pool import cores

SETTINGS_FILE = "staged.yaml"
COPYING = 16  # default number of processes, which mostly wait for servers and disks
SHOWN = 20  # shards that a message names
OWN_FLAGS = {
    "--jobs": f"processes; {COPYING} unless given, with --size or --format one a processor",
    "--size": "pixels: pictures whose shorter side is longer get this one, their ratio stays",
    "--format": f"of all pictures: {', '.join(get_args(Format))} (each its own, the default)",
    "--quality": "of the JPEG, WebP and AVIF pictures that are written anew, 1 to 100 (95)",
}


@dataclass(frozen=True)
class Asked:
    """The parsed command line.

    Attributes:
        folder: of the copies, absolute.
        jobs: number of processes.
        recipe: how images are re-encoded; None to copy shards unchanged.
        flags: of the settings.
        settings: by those flags.
    """

    folder: Path
    jobs: int
    recipe: Recipe | None
    flags: list[str]
    settings: Settings


def stage(argv: Sequence[str]) -> int:
    """Stage the shards of the settings; returns the exit code.

    Raises:
        SettingsError: flags or settings are wrong, there is nothing to stage, or the folder is in use or not ours.
        DataError: shards could not be staged, or the disk is full.
        Stopped: by SIGINT or SIGTERM.
    """
    every, argv = take_flag(argv)
    asked = arguments(argv)
    if every is not None:
        return print_config(asked.settings, "stage", every)
    advice = "wait for its end, or end it, or name another folder"
    with held(asked.folder, "the folder", lambda holder: f"{holder} stages into {asked.folder}: {advice}"):
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like SIGINT
        try:
            if not (asked.folder / RECORDS).is_file():
                if other := [name for name in ("sources", "evals", SETTINGS_FILE) if (asked.folder / name).exists()]:
                    raise SettingsError(
                        f"{asked.folder} holds {other[0]}, which was not staged: name a folder of its own"
                    )
                (asked.folder / RECORDS).touch()
            shutil.rmtree(asked.folder / PARTS, ignore_errors=True)  # of a killed call
            _stage(asked)
        except BrokenPipeError:  # the reader of our output has ended
            raise
        except OSError as error:
            raise DataError(f"cannot write to {asked.folder}: {error.strerror or error}") from error
        finally:
            signal.signal(signal.SIGTERM, before)
            shutil.rmtree(asked.folder / PARTS, ignore_errors=True)
    return 0


def arguments(argv: Sequence[str]) -> Asked:
    """Parse the command line.

    Raises:
        SettingsError: a flag or a setting is wrong.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SettingsError("name the folder first: python -m clipstream.stage FOLDER --train-data SHARDS")
    folder = Path(os.path.abspath(with_home(argv[0])))
    inside = str(folder / "0.tar")
    try:
        plain = expand(inside) == [inside]
    except SettingsError:
        plain = False
    if not plain:
        raise SettingsError(f"{folder}: braces, brackets, * and :: have a meaning in the names of shards: name another")
    own, flags = own_flags(argv[1:], OWN_FLAGS)
    size, kind = _number(own, "--size", 1, None), own.get("--format", "keep")
    quality = _number(own, "--quality", 1, 100)
    if kind not in get_args(Format):
        raise SettingsError(f"--format: expected {', '.join(get_args(Format))}, not {kind!r}")
    recipe = None
    if size is not None or kind != "keep":
        recipe = Recipe(size, cast(Format, kind), 95 if quality is None else quality)
    elif quality is not None:
        raise SettingsError("--quality: no picture is written anew without --size or --format")
    jobs = _number(own, "--jobs", 1, None) or (cores() if recipe else COPYING)
    settings = load(flags)
    set_level(settings.log.level)
    return Asked(folder, jobs, recipe, flags, settings)


def _number(own: Mapping[str, str], flag: str, least: int, most: int | None) -> int | None:
    if (text := own.get(flag)) is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least or (most is not None and int(text) > most):
        raise SettingsError(f"{flag}: expected a whole number, {least} to {most or '…'}, not {text!r}")
    return int(text)


def _stage(asked: Asked) -> None:
    began = time.monotonic()
    records = listing.read(asked.folder)
    listing.write(asked.folder, records.values())
    sources = plan(asked.settings, asked.folder, records)
    _announce(asked, sources)
    shards = [shard for source in sources for shard in source.shards]
    work = Work(asked.folder, shards, records, Copier(asked.folder, asked.recipe), asked.jobs)
    try:
        if missing := work.look():
            # The settings of an earlier call do not hold until all shards are copied.
            (asked.folder / SETTINGS_FILE).unlink(missing_ok=True)
            work.copy(missing)
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted: {len(work.whole):,} of {len(shards):,} shards are in {asked.folder} and stay; "
            "go on by the same command"
        ) from None
    _conclude(asked, sources, work, time.monotonic() - began)


def _announce(asked: Asked, sources: Sequence[StagedSource]) -> None:
    """Print which sources are staged.

    Raises:
        SettingsError: there is nothing to stage, or a run would not find the images by their new suffixes.
    """
    staged = [source for source in sources if source.shards]
    for source in sources:
        if source.left:
            names = ", ".join(map(redact, source.left[:3])) + (" …" if len(source.left) > 3 else "")
            print(f"{_dotted(source)}: left as it is, no tar: {names}", flush=True)
    if not staged:
        raise SettingsError("there is nothing to stage: name tars by --train-data, --val-data or --config")
    for source in staged:
        keys = split_keys(source.settings.image_key)
        lost = {asked.recipe.suffix(key) for key in keys}.difference(keys) if asked.recipe else set()
        if lost:
            flag = f"--{_dotted(source)}.image-key"
            raise SettingsError(
                f"--format: the run would not find pictures with the suffix {min(lost)}: add it, {flag} "
                f"'{';'.join([*keys, *sorted(lost)])}'"
            )
    counts = ", ".join(f"{_dotted(source)} {len(source.shards):,}" for source in staged)
    print(f"shards to have in {asked.folder}: {counts}", flush=True)


def _conclude(asked: Asked, sources: Sequence[StagedSource], work: Work, seconds: float) -> None:
    """Write the settings for a run on the copies, and print a summary and the command of that run.

    Raises:
        DataError: shards could not be staged.
    """
    whole = list(work.whole.values())
    for fault in [f"{record.shard}: {record.fault}" for record in whole if record.fault][:SHOWN]:
        print(f"warning: broken where it comes from, and staged as it is: {printable(fault, 800)}")
    pictures = sum((Counter(record.pictures) for record in whole), Counter[str]())
    if pictures:
        print("pictures: " + ", ".join(f"{count:,} {what}" for what, count in pictures.most_common()))
    samples, size = sum(record.samples for record in whole), sum(record.size for record in whole)
    print(
        f"{len(whole):,} of {len(work.shards):,} shards are in {asked.folder}: {samples:,} samples, {decimal(size)}; "
        f"{work.copied:,} were copied now, in {duration(seconds)}"
    )
    if whole:
        sizes: dict[str, dict[str, int]] = {}
        for file, record in sorted(work.records.items()):
            under, _, name = file.rpartition("/")
            sizes.setdefault(under, {})[name] = record.samples
        for under, counts in sizes.items():
            atomic_write.replace(asked.folder / under / SIZES, json.dumps(counts).encode())
        path = asked.folder / SETTINGS_FILE
        command = shlex.join(redact(word) for word in _command(asked, sources, path))
        _write_settings(asked, sources, path, command)
        print(f"train on them with: {command}")
        for flag, source in _not_staged(asked, sources, path):
            print(f"note: {flag} wins over files, and says where {source} is: write that into a file, and call again")
    if work.failures:
        reasons = [f"  {failure.reason}" for failure in work.failures[:SHOWN]]
        more = [f"  and {len(work.failures) - SHOWN:,} more"] if len(work.failures) > SHOWN else []
        advice = "the same command tries them again; a run on what is here counts them as shards that are missing"
        raise DataError(
            "\n".join(
                [f"{len(work.failures):,} of {len(work.shards):,} shards could not be staged", *reasons, *more, advice]
            )
        )


def _write_settings(asked: Asked, sources: Sequence[StagedSource], path: Path, command: str) -> None:
    """Write the settings of the staged sources, which override those that name the originals."""
    tree: dict[str, Any] = {}
    for source in sources:
        if not source.shards:
            continue
        # --val-data also copies settings from training's source.
        by_flag = asked.settings.places.of((*source.path, "shards")) == "--val-data"
        section = source.settings.model_dump(mode="json", exclude_unset=True) if by_flag else {}
        at = tree
        for part in source.path[:-1]:
            at = at.setdefault(part, {})
        at[source.path[-1]] = {**section, "shards": spec(source, asked.folder)}
    head = f"# Shards that `clipstream stage` copied here. Train on them with\n#     {command}\n"
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    atomic_write.replace(path, (head + text).encode())


def _command(asked: Asked, sources: Sequence[StagedSource], path: Path) -> list[str]:
    """The command that trains on the copies: the same settings without the flags that name staged shards."""
    configs, given = split(asked.flags, [])
    named = {asked.settings.places.of((*source.path, "shards")) for source in sources if source.shards}
    words = ["python", "-m", "clipstream.train"]
    for file in configs:
        words += ["--config", file]
    for one in given:
        if not {one.flag, one.flag.replace("_", "-")} & named:
            words += [one.flag] if one.text is None else [one.flag, *one.text.split("\n")]
    return [*words, "--config", str(path)]


def _not_staged(asked: Asked, sources: Sequence[StagedSource], path: Path) -> Iterator[tuple[str, str]]:
    """(flag, source) of the staged sources that the command would not read from the copies."""
    tree = load(_command(asked, sources, path)[3:]).model_dump(mode="json")
    for source in sources:
        found: Any = tree
        for part in source.path:
            found = found[part]
        wanted = {**source.settings.model_dump(mode="json"), "shards": spec(source, asked.folder)}
        if source.shards and found != wanted:
            yield asked.settings.places.of((*source.path, "shards")), _dotted(source)


def _dotted(source: StagedSource) -> str:
    return ".".join(source.path)
