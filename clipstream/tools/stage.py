"""The verb `stage`: a command line enters; copies of a run's shards and settings that train on them are written.

The plan chooses the file of each shard without reading it; `stage_copies` copies. Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast, get_args
from urllib.parse import quote

from rich.filesize import decimal

from clipstream.checkpoint.run_lock import held
from clipstream.config.config_sources import to_yaml
from clipstream.config.dump import print_config, take_flag
from clipstream.config.flags import own_flags, split
from clipstream.config.settings import Settings, load
from clipstream.data.decode.captions import split_keys
from clipstream.data.settings import SourceSettings
from clipstream.data.sources.indexes import SIGNED
from clipstream.data.sources.patterns import in_braces
from clipstream.data.sources.registry import entries, expand, source_type, typed_shards
from clipstream.data.sources.tars import SIZES
from clipstream.distributed.capabilities import cores
from clipstream.errors import DataError, SettingsError, Stopped
from clipstream.storage.shard_url import USER_INFO, ShardURL, parts_of, redact, stable_name
from clipstream.text import duration, printable
from clipstream.tools.reencode import Format, Recipe
from clipstream.tools.stage_copies import (
    PARTS,
    RECORDS,
    Copier,
    Copies,
    PlannedShard,
    Record,
    read_records,
    write_records,
)
from clipstream.utils import atomic_write
from clipstream.utils.logs import set_level
from clipstream.utils.section import Tree, own_path

SETTINGS_FILE = "staged.yaml"
COPYING = 16  # default number of processes, which mostly wait for servers and disks
SHOWN = 20  # shards that a message names
PLAIN = re.compile(r"\w[\w .+=@%-]{0,180}\.tar")
OWN_FLAGS = {
    "--jobs": f"processes; {COPYING} unless given, with --size or --format one a processor",
    "--size": "pixels: pictures whose shorter side is longer get this one, their ratio stays",
    "--format": f"of all pictures: {', '.join(get_args(Format))} (each its own, the default)",
    "--quality": "of the JPEG, WebP and AVIF pictures that are written anew, 1 to 100 (95)",
}


@dataclass(frozen=True)
class Asked:
    """The parsed command line."""

    folder: Path  # of the copies, absolute
    jobs: int  # number of processes
    recipe: Recipe | None  # how images are re-encoded; None to copy shards unchanged
    flags: list[str]  # of the settings
    settings: Settings  # by those flags


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
    folder, advice = asked.folder, "wait for its end, or end it, or name another folder"
    with held(folder, "the folder", lambda holder: f"{holder} stages into {folder}: {advice}"):
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like SIGINT
        try:
            if not (folder / RECORDS).is_file():
                if other := [name for name in ("sources", "evals", SETTINGS_FILE) if (folder / name).exists()]:
                    raise SettingsError(f"{folder} holds {other[0]}, which was not staged: name a folder of its own")
                (folder / RECORDS).touch()
            shutil.rmtree(folder / PARTS, ignore_errors=True)  # of a killed call
            began, records = time.monotonic(), read_records(folder)
            write_records(folder, records.values())
            sources = plan(asked.settings, folder, records)
            _announce(asked, sources)
            shards = [shard for source in sources for shard in source.shards]
            copies = Copies(folder, shards, records, Copier(folder, asked.recipe), asked.jobs)
            try:
                if missing := copies.look():
                    # The settings of an earlier call do not hold until all shards are copied.
                    (folder / SETTINGS_FILE).unlink(missing_ok=True)
                    copies.copy(missing)
            except KeyboardInterrupt:
                raise Stopped(
                    f"interrupted: {len(copies.whole):,} of {len(shards):,} shards are in {folder} and stay; "
                    "go on by the same command"
                ) from None
            _conclude(asked, sources, copies, time.monotonic() - began)
        except BrokenPipeError:  # the reader of our output has ended
            raise
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {error.strerror or error}") from error
        finally:
            signal.signal(signal.SIGTERM, before)
            shutil.rmtree(folder / PARTS, ignore_errors=True)
    return 0


def arguments(argv: Sequence[str]) -> Asked:
    """Parse the command line. Raises SettingsError: a flag or a setting is wrong."""
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SettingsError("name the folder first: clipstream stage FOLDER --train-data SHARDS")
    folder = Path(os.path.abspath(own_path(argv[0])))
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
    settings.log_notices()
    return Asked(folder, jobs, recipe, flags, settings)


def _number(own: Mapping[str, str], flag: str, least: int, most: int | None) -> int | None:
    if (text := own.get(flag)) is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least or (most is not None and int(text) > most):
        raise SettingsError(f"{flag}: expected a whole number, {least} to {most or '…'}, not {text!r}")
    return int(text)


@dataclass(frozen=True)
class StagedSource:
    """A source of the settings."""

    path: tuple[str, ...]  # its key
    settings: SourceSettings  # of the source
    parts: list[PlannedShard | str]  # its setting `shards`, in order: shards to copy, and parts that are not copied

    @property
    def shards(self) -> list[PlannedShard]:
        """Each shard once."""
        return list({part.file: part for part in self.parts if isinstance(part, PlannedShard)}.values())

    @property
    def name(self) -> str:
        """Its dotted key."""
        return ".".join(self.path)

    @property
    def left(self) -> list[str]:
        """The parts that are not copied."""
        return [part for part in self.parts if isinstance(part, str)]

    def copied(self, folder: Path) -> list[str]:
        """The setting `shards` for a run on the copies, in the order of the originals."""
        named: list[str] = []
        for staged, parts in groupby(self.parts, key=lambda part: isinstance(part, PlannedShard)):
            names = [part if isinstance(part, str) else str(folder / part.file) for part in parts]
            named += in_braces(names) if staged else names
        return named


def plan(settings: Settings, folder: Path, records: Mapping[str, Record]) -> list[StagedSource]:
    """Choose the file of each shard: its file of an earlier call, or one with its own name.

    Args:
        records: of the shards in the folder.

    Raises:
        SettingsError: shards cannot be listed, or are in the folder already.
    """
    planned = []
    named = [(("data", "sources", name), source) for name, source in settings.data.sources.items()]
    of_evals = [(("evals", name, "data"), one.data) for name, one in settings.evals.items() if one.data is not None]
    for path, source in [*named, *of_evals]:
        key = f"{'.'.join(path)}.shards"
        urls: list[tuple[str, bool]] = []  # with whether a copy can replace it
        try:
            for part in parts_of(source.shards):
                if any(source_type(name).staged for name, _ in entries(part, source.type)):
                    urls += [(url, kind.staged) for url, kind in typed_shards(part, source.type)]
                else:
                    urls.append((part, False))
        except SettingsError as error:
            raise SettingsError(f"{key}: {error}") from error
        # The user's name as the name of a folder.
        name = re.sub(r"^\.", "%2E", quote(path[-1] if path[0] == "data" else path[1], safe=" "))
        under = f"{'sources' if path[0] == 'data' else 'evals'}/{name}"
        before = {record.identity: file for file, record in records.items() if file.rpartition("/")[0] == under}
        copied = {url: _identity(url) for url, staged in urls if staged}
        files = {url: before[identity] for url, identity in copied.items() if identity in before}
        taken = {file.casefold() for file in files.values()}
        for url, identity in copied.items():
            if (local := ShardURL(url).path) and folder in Path(os.path.abspath(local)).parents:
                raise SettingsError(
                    f"{key}: {local} lies in {folder} itself: name the shards where they come from "
                    "(without the --config that an earlier call wrote there)"
                )
            if url in files:
                continue
            stem = stable_name(url).removesuffix(".tar")
            if not PLAIN.fullmatch(stable_name(url)):
                stem = re.sub(r"[^\w.-]+", "-", stem).strip("-.")[:120] or "shard"
            file = f"{under}/{stem}.tar"
            if file.casefold() in taken:
                file = f"{under}/{stem}-{identity[:8]}.tar"
            taken.add(file.casefold())
            files[url] = file
        parts = [PlannedShard(url, copied[url], files[url], source) if staged else url for url, staged in urls]
        planned.append(StagedSource(path, source, parts))
    return planned


def _identity(url: str) -> str:
    """See PlannedShard."""
    if (local := ShardURL(url).path) is not None:
        name = os.path.abspath(local)
    else:
        name, question, query = USER_INFO.sub("", url).partition("?")
        if ShardURL(url).scheme == "pipe":
            name += question + query
        else:
            name += "".join(f"?{part}" for part in query.split("&") if not SIGNED.match(part))
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _announce(asked: Asked, sources: Sequence[StagedSource]) -> None:
    """Print which sources are staged.

    Raises SettingsError: there is nothing to stage, or a run would not find the images by their new suffixes.
    """
    staged = [source for source in sources if source.shards]
    for source in sources:
        if source.left:
            names = ", ".join(map(redact, source.left[:3])) + (" …" if len(source.left) > 3 else "")
            print(f"{source.name}: left as it is, no tar: {names}", flush=True)
    if not staged:
        raise SettingsError("there is nothing to stage: name tars by --train-data, --val-data or --config")
    for source in staged:
        keys = split_keys(source.settings.image_key)
        lost = {asked.recipe.suffix(key) for key in keys}.difference(keys) if asked.recipe else set()
        if lost:
            flag = f"--{source.name}.image-key"
            raise SettingsError(
                f"--format: the run would not find pictures with the suffix {min(lost)}: add it, {flag} "
                f"'{';'.join([*keys, *sorted(lost)])}'"
            )
    counts = ", ".join(f"{source.name} {len(source.shards):,}" for source in staged)
    print(f"shards to have in {asked.folder}: {counts}", flush=True)


def _conclude(asked: Asked, sources: Sequence[StagedSource], copies: Copies, seconds: float) -> None:
    """Write the settings for a run on the copies, which override those that name the originals; print a summary and
    the command of that run.

    Raises:
        DataError: shards could not be staged.
    """
    whole = list(copies.whole.values())
    for fault in [f"{record.shard}: {record.fault}" for record in whole if record.fault][:SHOWN]:
        print(f"warning: broken where it comes from, and staged as it is: {printable(fault, 800)}")
    pictures = sum((Counter(record.pictures) for record in whole), Counter[str]())
    if pictures:
        print("pictures: " + ", ".join(f"{count:,} {what}" for what, count in pictures.most_common()))
    samples, size = sum(record.samples for record in whole), sum(record.size for record in whole)
    print(
        f"{len(whole):,} of {len(copies.shards):,} shards are in {asked.folder}: {samples:,} samples, {decimal(size)}; "
        f"{copies.copied:,} were copied now, in {duration(seconds)}"
    )
    if whole:
        sizes: dict[str, dict[str, int]] = {}
        for file, record in sorted(copies.records.items()):
            under, _, name = file.rpartition("/")
            sizes.setdefault(under, {})[name] = record.samples
        for under, counts in sizes.items():
            atomic_write.replace(asked.folder / under / SIZES, json.dumps(counts).encode())
        staged = [source for source in sources if source.shards]
        # The same settings without the flags that name staged shards.
        configs, given = split(asked.flags, [])
        named = {asked.settings.places.place_of((*source.path, "shards")) for source in staged}
        words = ["python", "-m", "clipstream.train"]
        words += [word for file in configs for word in ("--config", file)]
        for one in given:
            if not {one.flag, one.flag.replace("_", "-")} & named:
                words += [one.flag] if one.text is None else [one.flag, *one.text.split("\n")]
        words += ["--config", str(asked.folder / SETTINGS_FILE)]
        command = shlex.join(redact(word) for word in words)
        tree: Tree = {}
        for source in staged:
            # --val-data also copies settings from training's source.
            by_flag = asked.settings.places.place_of((*source.path, "shards")) == "--val-data"
            section = source.settings.model_dump(mode="json", exclude_unset=True) if by_flag else {}
            at = tree
            for part in source.path[:-1]:
                at = at.setdefault(part, {})
            at[source.path[-1]] = {**section, "shards": source.copied(asked.folder)}
        head = f"# Shards that `clipstream stage` copied here. Train on them with\n#     {command}\n"
        atomic_write.replace(asked.folder / SETTINGS_FILE, (head + to_yaml(tree)).encode())
        print(f"train on them with: {command}")
        resolved = load(words[3:]).model_dump(mode="json")
        for source in staged:
            found: Any = resolved
            for part in source.path:
                found = found[part]
            if found != {**source.settings.model_dump(mode="json"), "shards": source.copied(asked.folder)}:
                flag = asked.settings.places.place_of((*source.path, "shards"))
                advice = "write that into a file, and call again"
                print(f"note: {flag} wins over files, and says where {source.name} is: {advice}")
    if copies.failures:
        failed = len(copies.failures)
        reasons = [f"  {failure.reason}" for failure in copies.failures[:SHOWN]]
        more = [f"  and {failed - SHOWN:,} more"] if failed > SHOWN else []
        advice = "the same command tries them again; a run on what is here counts them as shards that are missing"
        told = f"{failed:,} of {len(copies.shards):,} shards could not be staged"
        raise DataError("\n".join([told, *reasons, *more, advice]))
