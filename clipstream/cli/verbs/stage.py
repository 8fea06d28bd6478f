"""The verb `clipstream stage FOLDER`: copies the shards of a run ahead of it.

A command line enters; copies and settings that train on them are written. A shard is downloaded as during a run,
scanned, and renamed to its place once it is complete on disk. The side index of a copy records what it was made from,
so that the same command continues after an interruption. Never imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.filesize import decimal

from clipstream.config.config_sources import Node, to_yaml
from clipstream.config.entry import command_line, entry_point, working_in
from clipstream.config.flags import split
from clipstream.config.settings import Settings, load
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import entries, expand, indexes, source_type, typed_shards
from clipstream.data.sources.tars import SIZES
from clipstream.errors import SettingsError
from clipstream.storage.download import Monitor, ShardError, failed
from clipstream.storage.schemes import Fetcher
from clipstream.storage.shard_cache import written
from clipstream.storage.shard_url import ShardURL, in_braces, parts_of, redact, stable_name
from clipstream.storage.tar import scan
from clipstream.text import MESSAGE, duration, listed, printable
from clipstream.utils import atomic_write
from clipstream.utils.executors import FLAG, MEANING, SHOWN, checked, require_all, work_off
from clipstream.utils.processes import Failed
from clipstream.utils.section import Tree, own_path

SETTINGS_FILE = "staged.yaml"
PARTS = ".parts"  # subfolder for incomplete copies
COPYING = 16  # default number of local processes, which mostly wait for servers and disks
PLAIN = re.compile(r"\w[\w .+=@%-]{0,180}\.tar")
OWN_FLAGS = {FLAG: f"{MEANING} (default: local:{COPYING})"}


@dataclass(frozen=True)
class Asked:
    """The parsed command line."""

    folder: Path  # of the copies, absolute
    executor: str  # what copies the shards
    flags: list[str]  # of the settings
    settings: Settings  # by those flags
    places: Node  # of the settings


@dataclass(frozen=True)
class PlannedShard:
    """A shard to copy."""

    url: str  # of the original
    file: str  # path of the copy in the folder, with slashes


@dataclass(frozen=True)
class StagedSource:
    """A source of the settings."""

    path: tuple[str, ...]  # its key
    settings: SourceSettings  # of the source
    parts: list[list[PlannedShard | str]]  # by part of its setting `shards`: shards to copy, and others as they are

    @property
    def shards(self) -> list[PlannedShard]:
        """Each shard once."""
        return list({one.file: one for part in self.parts for one in part if isinstance(one, PlannedShard)}.values())

    @property
    def name(self) -> str:
        """Its dotted key."""
        return ".".join(self.path)

    def copied(self, folder: Path) -> list[str]:
        """The setting `shards` for a run on the copies, in the order of the originals; with factors one item a part."""
        whole = [[one for part in self.parts for one in part]]
        named: list[list[str]] = []
        for part in whole if self.settings.upsampling_factors is None else self.parts:
            named.append([])
            for staged, some in itertools.groupby(part, key=lambda one: isinstance(one, PlannedShard)):
                names = [one if isinstance(one, str) else str(folder / one.file) for one in some]
                named[-1] += in_braces(names) if staged else names
        return named[0] if len(named) == 1 else [f"{{{','.join(some)}}}" if some[1:] else some[0] for some in named]


@dataclass(frozen=True)
class Copy:
    """A complete copy of a shard."""

    samples: int
    size: int  # bytes
    fault: str | None = None  # of the original, which is copied as it is
    made: bool = False  # whether it was copied now


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if some shards could not be copied."""
    asked = arguments(argv)
    folder = asked.folder
    with working_in(folder):
        began, sources = time.monotonic(), plan(asked.settings, folder)
        try:
            shutil.rmtree(folder / PARTS, ignore_errors=True)  # of a killed call
            _announce(asked, sources)
            # The settings of an earlier call are valid again once all shards are copied.
            (folder / SETTINGS_FILE).unlink(missing_ok=True)
            shards = [shard for source in sources for shard in source.shards]
            copies = dict(zip([one.file for one in shards], copy_all(asked, shards), strict=True))
            _conclude(asked, sources, copies, time.monotonic() - began)
        finally:
            shutil.rmtree(folder / PARTS, ignore_errors=True)
    return 0


def arguments(argv: Sequence[str]) -> Asked:
    """Parse the command line. Raises SettingsError: a flag or a setting is wrong."""
    command = command_line("stage", argv, OWN_FLAGS)
    own, (named, *flags) = command.own, command.flags or [""]
    if not named or named.startswith("-"):
        raise SettingsError("missing FOLDER: clipstream stage FOLDER --train-data SHARDS")
    folder = Path(os.path.abspath(own_path(named)))
    inside = str(folder / "0.tar")
    with contextlib.suppress(SettingsError):
        if expand(inside) == [inside]:
            inside = ""
    if inside:
        raise SettingsError(f"{folder}: a folder's name cannot contain braces, brackets, * or ::")
    atomic_write.claim_output(folder / PARTS, "FOLDER", holds=True)
    return Asked(folder, checked(own.get(FLAG), COPYING), flags, *command.load(flags))


def plan(settings: Settings, folder: Path) -> list[StagedSource]:
    """Choose the file of each shard: one with its own name, and a hash where several shards of a source have it.

    Raises:
        SettingsError: shards cannot be listed, or are in the folder already.
    """
    planned = []
    named = [(("data", "sources", name), source) for name, source in settings.data.sources.items()]
    of_evals = [(("evals", name, "data"), one.data) for name, one in settings.evals.items() if one.data is not None]
    for path, source in [*named, *of_evals]:
        key = f"{'.'.join(path)}.shards"
        urls: list[list[tuple[str, bool]]] = []  # by part, with whether a copy can replace it
        try:
            for part in parts_of(source.shards):
                tars = any(
                    source_type(name).staged for name, _ in entries(part, source.type, image_key=source.image_key)
                )
                shards = typed_shards(part, source.type, image_key=source.image_key) if tars else ()
                urls.append([(url, kind.staged) for url, kind in shards] or [(part, False)])
        except SettingsError as error:
            raise SettingsError(f"{key}: {error}") from error
        # The user's name as the name of a folder.
        name = re.sub(r"^\.", "%2E", quote(path[-1] if path[0] == "data" else path[1], safe=" "))
        under = f"{'sources' if path[0] == 'data' else 'evals'}/{name}"
        stems: dict[str, str] = {}
        for url, staged in itertools.chain(*urls):
            if staged:
                if (local := ShardURL(url).path) and folder in Path(os.path.abspath(local)).parents:
                    raise SettingsError(
                        f"{key}: {local} is inside {folder}: use the original shards (without the --config written by "
                        f"an earlier call)"
                    )
                stems[url] = stable_name(url).removesuffix(".tar")
                if not PLAIN.fullmatch(stable_name(url)):
                    stems[url] = re.sub(r"[^\w.-]+", "-", stems[url]).strip("-.")[:120] or "shard"
        shared = Counter(stem.casefold() for stem in stems.values())
        hashed = {
            url: f"{stem}-{_hash(url)[:8]}" if shared[stem.casefold()] > 1 else stem for url, stem in stems.items()
        }
        planned.append(
            StagedSource(
                path,
                source,
                [
                    [PlannedShard(url, f"{under}/{hashed[url]}.tar") if staged else url for url, staged in part]
                    for part in urls
                ],
            )
        )
    return planned


def _hash(url: str) -> str:
    return hashlib.sha256(ShardURL(url).unsigned.encode()).hexdigest()[:24]


def _announce(asked: Asked, sources: Sequence[StagedSource]) -> None:
    """Print which sources are staged. Raises SettingsError: there is nothing to stage."""
    staged = [source for source in sources if source.shards]
    for source in sources:
        if left := [redact(one) for part in source.parts for one in part if isinstance(one, str)]:
            print(printable(f"{source.name}: not copied, no tar: {listed(left, 3)}", MESSAGE), flush=True)
    if not staged:
        raise SettingsError("nothing to stage: set tars with --train-data, --val-data or --config")
    counts = ", ".join(f"{source.name} {len(source.shards):,}" for source in staged)
    print(f"shards to stage in {asked.folder}: {counts}", flush=True)


def copy_all(asked: Asked, shards: Sequence[PlannedShard]) -> list[Copy | Failed]:
    """Copy the shards by the executor; those with an intact copy are left. Raises as `work_off`."""
    parts, began = asked.folder / PARTS, time.monotonic()
    parts.mkdir()
    for shard in shards:
        (asked.folder / shard.file).parent.mkdir(parents=True, exist_ok=True)
    fetcher, names = asked.settings.data.fetcher, [redact(one.url) for one in shards]
    do = partial(stage_shard, shards, asked.folder, fetcher)
    return work_off("staging", do, names, asked.executor, lambda done: written(done, parts, began))


def stage_shard(shards: Sequence[PlannedShard], folder: Path, fetcher: Fetcher, number: int) -> Copy | Failed:
    """Copy a shard, unless there is an intact copy of its current version."""
    shard = shards[number]
    shown, target, parts = redact(shard.url), folder / shard.file, folder / PARTS
    if not parts.exists():
        return Failed(f"{shown}: {folder} is not on {socket.gethostname()}: use a folder that all workers share")
    index = Path(f"{target}{indexes.SUFFIX}")
    own = secrets.token_hex(8)  # a shard may be copied twice at once, by a worker that was given up and another one
    part, draft = (parts / f"{own}.{name}" for name in ("part", "index.part"))
    version = fetcher.info(ShardURL(shard.url)).version
    # Up to 0.1, images could be re-encoded on the way: such copies have a recipe, and are made anew.
    origin: dict[str, object] = {"shard": _hash(shard.url), "version": version, "recipe": None}
    try:
        head = None
        with contextlib.suppress(OSError, ValueError):
            head = indexes.read_head(index)
        if target.exists():
            if head is None or head.origin is None:
                return Failed(f"{shown}: {target} exists and was not staged: remove it, or use another folder")
            if version is None or head.origin["version"] is None:
                origin["version"] = head.origin["version"]
            if head.origin == origin and head.of == indexes.identity_of(target):
                fault = None if head.fault is None else str(head.fault)
                return Copy(head.samples, target.stat().st_size, fault)
            origin["version"] = version
        for _ in range(2):  # a fault may be one of the transfer
            fetcher.fetch(ShardURL(shard.url), part, Monitor())
            found = scan(part)
            if found.fault is None:
                break
        if ShardURL(shard.url).path is not None and fetcher.info(ShardURL(shard.url)).version != version:
            return Failed(f"{shown}: it has changed while it was copied")
        size = part.stat().st_size
        indexes.write(draft, found, indexes.identity_of(part), origin)
        indexes.place(part, draft, target)
    except (ShardError, OSError) as error:
        return failed(error, shown, folder)
    finally:
        for path in (part, draft):
            path.unlink(missing_ok=True)
    return Copy(len(found.samples), size, None if found.fault is None else str(found.fault), True)


def _conclude(
    asked: Asked, sources: Sequence[StagedSource], copies: Mapping[str, Copy | Failed], seconds: float
) -> None:
    """Write the settings for a run on the copies, and print a summary and the command of that run.

    Raises:
        DataError: shards could not be staged.
    """
    whole = {file: copy for file, copy in copies.items() if isinstance(copy, Copy)}
    urls = {shard.file: redact(shard.url) for source in sources for shard in source.shards}
    for shown in [f"{urls[file]}: {copy.fault}" for file, copy in whole.items() if copy.fault][:SHOWN]:
        print(f"warning: the original is damaged and was copied unchanged: {printable(shown, 800)}")
    samples, size = sum(copy.samples for copy in whole.values()), sum(copy.size for copy in whole.values())
    made = sum(copy.made for copy in whole.values())
    print(
        f"{len(whole):,} of {len(copies):,} shards are in {asked.folder}: {samples:,} samples, {decimal(size)}; "
        f"{made:,} were copied now, in {duration(seconds)}"
    )
    staged = [source for source in sources if source.shards]
    if whole:
        for source in staged:
            counts = {
                Path(shard.file).name: whole[shard.file].samples for shard in source.shards if shard.file in whole
            }
            under = (asked.folder / source.shards[0].file).parent
            atomic_write.replace(under / SIZES, json.dumps(counts).encode())
        _write_settings(asked, staged)
    advice = "rerun the same command to copy them; until then training counts them as missing"
    require_all("staging", [*copies.values()], advice)


def _write_settings(asked: Asked, staged: Sequence[StagedSource]) -> None:
    """Write the settings that name the copies in place of the originals, and print the command that uses them."""
    # The same settings without the flags that name staged shards.
    configs, given = split(asked.flags, [])
    flags = {source.name: asked.places.place_of((*source.path, "shards")) for source in staged}
    words = ["python", "-m", "clipstream.train"]
    words += [word for file in configs for word in ("--config", file)]
    for flag, text in given:
        if not {flag, flag.replace("_", "-")} & set(flags.values()):
            words += [flag] if text is None else [flag, *text.split("\n")]
    words += ["--config", str(asked.folder / SETTINGS_FILE)]
    command = printable(shlex.join(redact(word) for word in words), MESSAGE)
    tree: Tree = {}
    for source in staged:
        # --val-data also copies settings from training's source.
        by_flag = flags[source.name] == "--val-data"
        section = source.settings.model_dump(mode="json", exclude_unset=True) if by_flag else {}
        at = tree
        for part in source.path[:-1]:
            at = at.setdefault(part, {})
        at[source.path[-1]] = {**section, "shards": source.copied(asked.folder)}
    head = f"# Shards copied by `clipstream stage`. Train on them by\n#     {command}\n"
    atomic_write.replace(asked.folder / SETTINGS_FILE, (head + to_yaml(tree)).encode())
    print(f"train on them with: {command}")
    resolved = load(words[3:]).model_dump(mode="json")
    for source in staged:
        found: Any = resolved
        for part in source.path:
            found = found[part]
        if found != {**source.settings.model_dump(mode="json"), "shards": source.copied(asked.folder)}:
            print(f"note: {flags[source.name]} overrides {SETTINGS_FILE}: set that source in a file, and rerun")
