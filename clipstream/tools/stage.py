"""Owns the staging of a run's shards: what is asked for, the file that the run is given, and what is said at the end.

It never trains and never imports torch.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from rich.filesize import decimal

from clipstream import durable
from clipstream.cli import own_flags
from clipstream.config import Settings, load
from clipstream.data.fields import split_keys
from clipstream.data.recoding import Format, Recipe
from clipstream.data.shards import expand, redact
from clipstream.data.sizes import SIZES
from clipstream.errors import DataError, SettingsError, Stopped
from clipstream.flags import split
from clipstream.folder import held
from clipstream.layers import Dumper
from clipstream.report.progress import duration
from clipstream.tools.pool import cores
from clipstream.tools.staging import records as listing
from clipstream.tools.staging.copying import PARTS, Copier
from clipstream.tools.staging.plan import Source, plan, spec
from clipstream.tools.staging.records import RECORDS, Record
from clipstream.tools.staging.work import Work

SETTINGS_FILE = "staged.yaml"
COPYING = 16  # processes that copy unless told otherwise: they wait for servers and disks
SHOWN = 20  # shards that a message names
OWN_FLAGS = {
    "--jobs": f"processes; {COPYING} unless given, with --size or --format one a processor",
    "--size": "pixels: pictures whose shorter side is longer get this one, their ratio stays",
    "--format": f"of all pictures: {', '.join(get_args(Format))} (each its own, the default)",
    "--quality": "of the JPEG, WebP and AVIF pictures that are written anew, 1 to 100 (95)",
}


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        folder: where to, absolute.
        jobs: processes.
        recipe: what becomes of pictures; None leaves shards as they are.
        flags: those of the settings.
        settings: what they say.
    """

    folder: Path
    jobs: int
    recipe: Recipe | None
    flags: list[str]
    settings: Settings


def stage(argv: Sequence[str]) -> int:
    """Stage what the command line names; the exit code.

    Raises:
        SettingsError: wrong flags or settings, nothing to stage, or a folder that another call works in.
        DataError: shards that could not be staged, or a disk that is full.
        Stopped: by SIGINT or SIGTERM.
    """
    asked = arguments(argv)
    advice = "wait for its end, or end it, or name another folder"
    with held(asked.folder, "the folder", lambda holder: f"{holder} stages into {asked.folder}: {advice}"):
        try:
            _own(asked.folder)
            with _terminated_as_interrupted():
                return _stage(asked)
        except BrokenPipeError:  # who reads what is printed has gone
            raise
        except OSError as error:
            raise DataError(f"cannot write to {asked.folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(asked.folder / PARTS, ignore_errors=True)


def arguments(argv: Sequence[str]) -> Asked:
    """What the command line asks for.

    Raises:
        SettingsError: it is wrong.
    """
    if not argv or argv[0].startswith("-"):
        raise SettingsError("name the folder first: python -m clipstream.stage FOLDER --train-data SHARDS")
    folder = Path(os.path.abspath(os.path.expanduser(argv[0])))
    _check_name(folder)
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
    return Asked(folder, jobs, recipe, flags, load(flags))


def _check_name(folder: Path) -> None:
    """A run names what lies in the folder, and reads braces and the like in it."""
    inside = str(folder / "0.tar")
    try:
        plain = expand(inside) == [inside]
    except SettingsError:
        plain = False
    if not plain:
        raise SettingsError(f"{folder}: braces, brackets, * and :: have a meaning in the names of shards: name another")


def _number(own: Mapping[str, str], flag: str, least: int, most: int | None) -> int | None:
    if (text := own.get(flag)) is None:
        return None
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise SettingsError(f"{flag}: expected a whole number, {least} to {most or '…'}, not {text!r}")
    return int(text)


def _own(folder: Path) -> None:
    """Make the folder one of staged shards; what others put there is not touched."""
    if not (folder / RECORDS).is_file():
        if theirs := [name for name in ("sources", "evals", SETTINGS_FILE) if (folder / name).exists()]:
            raise SettingsError(f"{folder} holds {theirs[0]}, which was not staged: name a folder of its own")
        (folder / RECORDS).touch()
    shutil.rmtree(folder / PARTS, ignore_errors=True)  # of a killed call


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is what Ctrl-C is."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stage(asked: Asked) -> int:
    began = time.monotonic()
    records = listing.read(asked.folder)
    listing.write(asked.folder, records.values())
    sources = plan(asked.settings, asked.folder, records)
    _announce(asked, sources)
    shards = [shard for source in sources for shard in source.shards]
    work = Work(asked.folder, shards, records, Copier(asked.folder, asked.recipe), asked.jobs)
    try:
        if missing := work.look():
            # From here on the folder is not what an earlier call left, until all is gone through.
            (asked.folder / SETTINGS_FILE).unlink(missing_ok=True)
            work.copy(missing)
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted: {len(work.whole):,} of {len(shards):,} shards are in {asked.folder} and stay; "
            "go on by the same command"
        ) from None
    _conclude(asked, sources, work, time.monotonic() - began)
    return 0


def _announce(asked: Asked, sources: Sequence[Source]) -> None:
    """Say what is staged and what is not.

    Raises:
        SettingsError: there is nothing to stage, or a run would not find the pictures by their new suffixes.
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


def _conclude(asked: Asked, sources: Sequence[Source], work: Work, seconds: float) -> None:
    """Write what the run is given, and say what was done and how to train on it.

    Raises:
        DataError: shards that could not be staged.
    """
    whole = list(work.whole.values())
    for fault in [f"{record.shard}: {record.fault}" for record in whole if record.fault][:SHOWN]:
        print(f"warning: broken where it comes from, and staged as it is: {fault}")
    pictures = sum((Counter(record.pictures) for record in whole), Counter[str]())
    if pictures:
        print("pictures: " + ", ".join(f"{count:,} {what}" for what, count in pictures.most_common()))
    samples, size = sum(record.samples for record in whole), sum(record.size for record in whole)
    print(
        f"{len(whole):,} of {len(work.shards):,} shards are in {asked.folder}: {samples:,} samples, {decimal(size)}; "
        f"{work.copied:,} were copied now, in {duration(seconds)}"
    )
    if whole:
        _write_sizes(asked.folder, work.records)
        path = asked.folder / SETTINGS_FILE
        command = shlex.join(redact(word) for word in _command(asked, sources, path))
        _write_settings(asked, sources, path, command)
        print(f"train on them with: {command}")
        for flag, source in _not_staged(asked, sources, path):
            print(f"note: {flag} wins over files, and says where {source} is: write that into a file, and call again")
    if work.failures:
        told = [f"  {failure.reason}" for failure in work.failures[:SHOWN]]
        more = [f"  and {len(work.failures) - SHOWN:,} more"] if len(work.failures) > SHOWN else []
        advice = "the same command tries them again; a run on what is here counts them as shards that are missing"
        raise DataError(
            "\n".join(
                [f"{len(work.failures):,} of {len(work.shards):,} shards could not be staged", *told, *more, advice]
            )
        )


def _write_sizes(folder: Path, records: Mapping[str, Record]) -> None:
    """Say beside the copies how many samples each has, as a run looks for it."""
    sizes: dict[str, dict[str, int]] = {}
    for file, record in sorted(records.items()):
        under, _, name = file.rpartition("/")
        sizes.setdefault(under, {})[name] = record.samples
    for under, counts in sizes.items():
        durable.replace(folder / under / SIZES, json.dumps(counts).encode())


def _write_settings(asked: Asked, sources: Sequence[Source], path: Path, command: str) -> None:
    """The settings of the staged sources, to lie over those that the shards were named by."""
    tree: dict[str, Any] = {}
    for source in sources:
        if not source.shards:
            continue
        # What --val-data takes over from training's source goes with the flag.
        by_flag = asked.settings.places.of((*source.path, "shards")) == "--val-data"
        section = source.settings.model_dump(mode="json", exclude_unset=True) if by_flag else {}
        at = tree
        for part in source.path[:-1]:
            at = at.setdefault(part, {})
        at[source.path[-1]] = {**section, "shards": spec(source, asked.folder)}
    head = f"# Shards that `clipstream stage` copied here. Train on them with\n#     {command}\n"
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    durable.replace(path, (head + text).encode())


def _command(asked: Asked, sources: Sequence[Source], path: Path) -> list[str]:
    """The command that trains on the copies: the same settings, but for the flags that name what is staged."""
    configs, given = split(asked.flags, [])
    named = {asked.settings.places.of((*source.path, "shards")) for source in sources if source.shards}
    words = ["python", "-m", "clipstream.train"]
    for file in configs:
        words += ["--config", file]
    for one in given:
        if not {one.flag, one.flag.replace("_", "-")} & named:
            words += [one.flag] if one.text is None else [one.flag, *one.text.split("\n")]
    return [*words, "--config", str(path)]


def _not_staged(asked: Asked, sources: Sequence[Source], path: Path) -> Iterator[tuple[str, str]]:
    """The sources that a run by the command would read elsewhere or in another way, and the flags that do it."""
    tree = load(_command(asked, sources, path)[3:]).model_dump(mode="json")
    for source in sources:
        found: Any = tree
        for part in source.path:
            found = found[part]
        wanted = {**source.settings.model_dump(mode="json"), "shards": spec(source, asked.folder)}
        if source.shards and found != wanted:
            yield asked.settings.places.of((*source.path, "shards")), _dotted(source)


def _dotted(source: Source) -> str:
    return ".".join(source.path)
