"""Patterns in names of shards: braces, globs and commands.

A pattern enters, names leave, and the other way round (`in_braces`). Remote folders are never listed.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import braceexpand

from clipstream.errors import SettingsError
from clipstream.storage.shard_url import TABLE_FORMATS, ShardURL, redact
from clipstream.utils.section import with_home

# In a command only {00..99} and {a,b} name shards; awk '{print $1, $2}' and ${HOME} are the shell's.
PIPE_BRACES = re.compile(r"""(?<!\$)(\{[^\s{}$'":]*(?:\.\.|,)[^\s{}$'":]*\})""")
MOST_SHARDS = 1_000_000  # of one pattern; LAION-5B has 231,349
RANGE = re.compile(r"\{(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


def in_braces(names: Sequence[str]) -> list[str]:
    """The names, with each run of numbered ones, such as 00.tar to 07.tar, as one brace pattern."""
    parts: list[str] = []
    while names:
        run = _run(names)
        first, last = NUMBERED.fullmatch(names[0]), NUMBERED.fullmatch(names[run - 1])
        if run > 1 and first and last:
            parts.append(f"{first[1]}{{{first[2]}..{last[2]}}}{first[3]}")
        else:
            parts.append(names[0])
        names = names[run:]
    return parts


def _run(names: Sequence[str]) -> int:
    """How many of the first names have consecutive numbers, at least 1."""
    first = NUMBERED.fullmatch(names[0])
    if first is None or set("{},*?[]") & set(names[0]):
        return 1
    for n, name in enumerate(names):
        if name != f"{first[1]}{int(first[2]) + n:0{len(first[2])}d}{first[3]}" or len(name) != len(names[0]):
            return n
    return len(names)


def expand_pipe(command: str) -> list[str]:
    """The commands that the braces of a `pipe:` command stand for.

    Raises:
        SettingsError: WDS_SECURE is set, with which webdataset does not run commands either.
    """
    if (secure := os.environ.get("WDS_SECURE", "0")) not in ("", "0"):
        raise SettingsError(
            f"{redact(command)!r} would run a command, which WDS_SECURE={secure} in the environment forbids: name the "
            "shards by a path, or by http(s)://, s3://, gs://, az:// or hf://, or unset WDS_SECURE"
        )
    pieces = PIPE_BRACES.split(command)
    choices = [list(braceexpand.braceexpand(p)) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def expand_pattern(pattern: str) -> list[str]:
    """The paths or URLs that braces and, in a local path, globs stand for.

    Raises:
        SettingsError: the braces are not paired or stand for too many, a glob matches nothing, or a folder is named.
    """
    try:
        # braceexpand makes a list of each range before it returns the first name.
        vast = any(abs(int(last) - int(first)) >= MOST_SHARDS for first, last in RANGE.findall(pattern))
        expanded = [] if vast else list(itertools.islice(braceexpand.braceexpand(pattern), MOST_SHARDS + 1))
    except ValueError as error:
        raise SettingsError(f"the braces of {redact(pattern)!r} are not paired: {error}") from error
    if vast or len(expanded) > MOST_SHARDS:
        raise SettingsError(f"the braces of {redact(pattern)!r} name more than {MOST_SHARDS:,} shards")
    if ShardURL(pattern).scheme is not None:
        return expanded
    paths: list[str] = []
    for path in map(with_home, expanded):
        if os.path.isdir(path):
            raise SettingsError(f"{path} is a folder: name its shards{_suggestion(Path(path))}")
        found = [path]
        if glob.has_magic(path) and not os.path.exists(path):
            found = sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
        if not found:
            folder = next(parent for parent in Path(path).parents if not glob.has_magic(str(parent)))
            where = f": the folder {folder} is not there" if not folder.is_dir() else _suggestion(folder)
            raise SettingsError(f"no file matches {path}{where}")
        paths += found
    return paths


def _suggestion(folder: Path) -> str:
    """A pattern for the tars of a folder, for messages."""
    names = sorted(entry.name for entry in folder.iterdir() if re.search(r"\.(tar|tar\.gz|tgz)$", entry.name))
    if not names:
        tables = {entry.suffix.lower() for entry in folder.iterdir()} & (TABLE_FORMATS.keys() - {".json"})
        if tables:  # as `datasets.save_to_disk` leaves them
            return f" (it holds no tar, but tables), e.g. '{folder}/*{min(tables)}'"
        if any(entry.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp") for entry in folder.iterdir()):
            return " (it holds pictures and no tar: give a table of their paths and captions, such as a CSV)"
        inner = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        return f" (it holds no tar; its folders are {', '.join(inner[:5])})" if inner else " (it holds no tar)"
    if len(names) > 1 and _run(names) == len(names):
        return f", e.g. '{folder}/{in_braces(names)[0]}' ({len(names)} tars)"
    if len(names) == 1:
        return f", e.g. '{folder}/{names[0]}'"
    return f", e.g. '{folder}/*.tar' ({len(names)} tars: {names[0]} to {names[-1]})"
