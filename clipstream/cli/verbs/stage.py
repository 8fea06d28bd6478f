"""The verb stage: copy shards to this machine ahead of a run.

A command line enters; copies and settings that train on them are written. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag
from clipstream.config.help import READING
from clipstream.config.settings import Settings, load, split
from clipstream.config.value_tree import Node, to_yaml
from clipstream.data.shard_pass import PARTS, lock_output
from clipstream.data.sources import expand
from clipstream.data.sources.tars import SIZES
from clipstream.data.staging import Indexed, StagedSource, copy_shards, plan_copies
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import redact
from clipstream.text import MESSAGE, duration, listed, printable
from clipstream.utils import atomic_write
from clipstream.utils.console import print_training
from clipstream.utils.executors import MEANING, check_executor, require_all
from clipstream.utils.section import Section, Tree

SETTINGS_FILE = "staged.yaml"
COPYING = 16  # default number of local processes, which mostly wait for servers and disks


class StageFlags(Section):
    """Copy the shards of a run's sources and evaluators to FOLDER, and print the command that trains on the copies."""

    folder: OutPath = argument("folder to copy to")
    executor: str | None = flag(MEANING.replace("local, one process per core", f"local:{COPYING}"), form="EXECUTOR")


def run(command: CommandLine[StageFlags]) -> None:
    """Raises SettingsError: wrong usage. Raises DataError: some shards could not be copied."""
    folder, executor = folder_of(command.own.folder), check_executor(command.own.executor, COPYING)
    atomic_write.claim_output(folder / PARTS, "FOLDER", holds=True)
    settings, places = command.load()
    named = [(("data", "sources", name), source) for name, source in settings.data.sources.items()]
    named += [(("evals", name, "data"), one.data) for name, one in settings.evals.items() if one.data is not None]
    with lock_output(folder):
        sources = [plan_copies(*one, folder) for one in named]  # refuses inputs in the folder, before any are removed
        try:
            _stage(folder, executor, settings, command.flags, places, sources)
        finally:
            shutil.rmtree(folder / PARTS, ignore_errors=True)


def folder_of(name: str) -> Path:
    """The folder of copies, absolute. Raises SettingsError: its name has a meaning as a pattern."""
    folder = Path(os.path.abspath(name))
    inside = str(folder / "0.tar")
    with contextlib.suppress(SettingsError):
        if expand(inside) == [inside]:
            return folder
    raise SettingsError(f"{folder}: a folder's name cannot contain braces, brackets, * or ::")


def _stage(
    folder: Path,
    executor: str,
    settings: Settings,
    flags: Sequence[str],
    places: Node,
    sources: Sequence[StagedSource],
) -> None:
    """Copy the shards, and write the settings for a run on the copies. Raises SettingsError, DataError as `run`."""
    began, staged = time.monotonic(), [source for source in sources if source.shards]
    for source in sources:
        if left := [redact(one) for part in source.parts for one in part if isinstance(one, str)]:
            print(printable(f"{source.name}: not copied, no tar: {listed(left, 3)}", MESSAGE), flush=True)
    if not staged:
        raise SettingsError("nothing to stage: set tars with --train-data, --val-data or --config")
    counts = ", ".join(f"{source.name} {len(source.shards):,}" for source in staged)
    print(f"shards to stage in {folder}: {counts}", flush=True)
    # The settings of an earlier call are valid again once all shards are copied.
    (folder / SETTINGS_FILE).unlink(missing_ok=True)
    shards = [shard for source in staged for shard in source.shards]
    copies = copy_shards(shards, folder, settings.data.fetcher, executor)
    whole = {file: copy for file, copy in copies.items() if isinstance(copy, Indexed)}
    samples, size = sum(copy.samples for copy in whole.values()), sum(copy.size for copy in whole.values())
    made = sum(copy.made for copy in whole.values())
    print(
        f"{len(whole):,} of {len(copies):,} shards are in {folder}: {samples:,} samples, {decimal(size)}; "
        f"{made:,} were copied now, in {duration(time.monotonic() - began)}"
    )
    for source in staged if whole else ():
        sizes = {Path(shard.file).name: whole[shard.file].samples for shard in source.shards if shard.file in whole}
        atomic_write.replace((folder / source.shards[0].file).parent / SIZES, json.dumps(sizes).encode())
    if whole:
        _write_settings(folder, places, flags, staged)
    require_all(
        "staging", [*copies.values()], "rerun the same command to copy them; until then training counts them as missing"
    )


def _write_settings(folder: Path, places: Node, argv: Sequence[str], staged: Sequence[StagedSource]) -> None:
    """Write the settings that name the copies in place of the originals, and print the command that uses them."""
    # The same settings without the flags that name staged shards.
    configs, given = split(argv, [])
    flags = {source.name: places.place_of((*source.path, "shards")) for source in staged}
    words = ["python", "-m", "clipstream.train"]
    words += [word for file in configs for word in ("--config", file)]
    for word, text in given:
        if not {word, word.replace("_", "-")} & set(flags.values()):
            words += [word] if text is None else [word, *text.split("\n")]
    words += ["--config", str(folder / SETTINGS_FILE)]
    tree: Tree = {}
    for source in staged:
        # --val-data also copies settings from training's source.
        by_flag = flags[source.name] == "--val-data"
        section = source.settings.model_dump(mode="json", exclude_unset=True) if by_flag else {}
        at = tree
        for part in source.path[:-1]:
            at = at.setdefault(part, {})
        at[source.path[-1]] = {**section, "shards": source.setting_of_copies(folder)}
    command = print_training(map(redact, words))
    head = f"# Shards copied by `clipstream stage`. Train on them by\n#     {command}\n"
    atomic_write.replace(folder / SETTINGS_FILE, (head + to_yaml(tree)).encode())
    resolved = load(words[3:]).model_dump(mode="json")
    for source in staged:
        found: Any = resolved
        for part in source.path:
            found = found[part]
        if found != {**source.settings.model_dump(mode="json"), "shards": source.setting_of_copies(folder)}:
            print(f"note: {flags[source.name]} overrides {SETTINGS_FILE}: set that source in a file, and rerun")


main = Verb("stage", StageFlags, run, (*READING, "Evaluation"))
