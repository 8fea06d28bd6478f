"""Owns the way from what a user names to a list of shards; never opens one, and never lists a remote folder.

A data set that says itself how many shards it has (`benchmark:`) is asked.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import braceexpand

from clipstream.errors import SettingsError

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):")
NO_SLASHES = ("pipe", "file", "scenes", "synthetic", "folder", "imagenet", "benchmark")  # need no //
# Behind a pipe: command, '::' separates shards only where another one clearly begins: commands may hold '::' too.
NEXT_SHARD = re.compile(r"::(?=pipe:|(?:scenes|synthetic|folder|imagenet|benchmark):|[a-zA-Z][a-zA-Z0-9+.-]+://)")
# Of a command's braces only {00..99} and {a,b} are shards; awk '{print $1, $2}' and ${HOME} are the shell's.
PIPE_BRACES = re.compile(r"""(?<!\$)(\{[^\s{}$'":]*(?:\.\.|,)[^\s{}$'":]*\})""")
VARIABLE = re.compile(r"\$\{(\w+)\}")
USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
TAR = re.compile(r"([^\s/'\"|<>=]+)\.(?:tar|tgz)\b")
SECRET_NAME = (
    r"[\w-]*(?:token|secret|passwo?r?d|signature|credential|api-?_?key|access-?_?key\w*|cookie|bearer)[\w-]*"
    r"|sig|key|auth"
)
SECRET_VALUE = re.compile(rf"(?i)((?:[?&;]|--?|\b)(?:{SECRET_NAME})(?:=|\s+|:\s*(?!//)))(?!\*\*\*)[^\s&;'\"|]+")
AUTH_HEADER = re.compile(r"(?i)(authorization\s*[:=]\s*(?:\w+\s+)?)[^\s'\"]+")
USER_FLAG = re.compile(r"((?:^|\s)(?:-u[\s=]*|--user[\s=]+))[^\s'\"|]+")


def expand(spec: str | list[str]) -> list[str]:
    """The shards that a specification names, in its order, duplicates kept.

    Braces and `::` as webdataset has them, lists, globs and `~` for local paths (sorted), `pipe:` commands, URLs,
    `scenes:SPLIT` (the embedded data, made when they are not there), `synthetic:`, `folder:PATH`, `benchmark:ROOT`
    (CLIP_benchmark's layout). `${NAME}` is taken from the environment, or from WDS_NAME as webdataset does; in a
    `pipe:` command it is left to the shell. A single local file need not be there: it is counted when it is opened.

    Raises:
        SettingsError: a glob matches nothing, a local folder is named, a variable is not set, nothing is named, or
            a command is, where WDS_SECURE forbids them.
    """
    shards = list(itertools.chain.from_iterable(_expand_one(part) for part in parts_of(spec)))
    if not shards:
        raise SettingsError(f"{spec!r} names no shard")
    return shards


def scheme_of(url: str) -> str | None:
    """The scheme of a URL or `pipe:` command in lower case; None for a local path."""
    match = SCHEME.match(url)
    if match is None or (match.group(1) not in NO_SLASHES and not url.startswith("//", match.end())):
        return None
    return match.group(1).lower()


def local_path(url: str) -> str | None:
    """The file that a local path or a `file:` URL names; None for anything else."""
    scheme = scheme_of(url)
    return url if scheme is None else url2pathname(urlsplit(url).path) if scheme == "file" else None


@lru_cache(maxsize=4096)
def redact(url: str) -> str:
    """The URL or command without what looks like a credential, for logs and messages."""
    url = USER_INFO.sub("***@", url)
    url = AUTH_HEADER.sub(r"\1***", url)
    url = USER_FLAG.sub(r"\1***", url)
    return SECRET_VALUE.sub(r"\1***", url)


def stable_name(url: str) -> str:
    """A shard's name, which stays when its folder moves, when it is unpacked, or when it is copied out of a `pipe:`.

    The last part of the path; of what holds the name of a tar, that name, ending in .tar.
    """
    bare = redact(url).partition("?")[0]
    name = bare.rpartition("/")[2]
    if name.endswith(".tar"):
        return name
    found = TAR.findall(bare if bare.startswith("pipe:") else name)
    return f"{found[-1]}.tar" if found else name


def parts_of(spec: str | list[str]) -> list[str]:
    """The parts of a specification, cut at its `::`, each still with its braces, globs and variables."""
    return [part for item in ([spec] if isinstance(spec, str) else spec) for part in _split(item.strip())]


def _split(spec: str) -> list[str]:
    parts: list[str] = []
    rest = spec
    while rest:
        if rest.startswith("pipe:"):
            match = NEXT_SHARD.search(rest)
            part, rest = (rest, "") if match is None else (rest[: match.start()], rest[match.end() :])
        else:
            part, _, rest = rest.partition("::")
        if part:
            parts.append(part)
    return parts


def _expand_one(part: str) -> Iterable[str]:
    if part.startswith("pipe:"):
        _refuse_commands(part)
        pieces = PIPE_BRACES.split(part)
        choices = [list(braceexpand.braceexpand(p)) if i % 2 else [p] for i, p in enumerate(pieces)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]
    part = with_variables(part)
    scheme = scheme_of(part)
    if scheme == "scenes":
        from clipstream.data import scenes

        return [str(path) for path in scenes.shards(part.partition(":")[2])]
    if scheme == "synthetic":
        from clipstream.data import synthetic

        return synthetic.names(part)
    if scheme in ("folder", "imagenet"):
        from clipstream.data import folders

        return folders.names(part)
    if scheme == "benchmark":
        from clipstream.data import benchmark

        return benchmark.named(part).shards
    try:
        expanded = list(braceexpand.braceexpand(part))
    except ValueError as error:
        raise SettingsError(f"the braces of {redact(part)!r} are not paired: {error}") from error
    if scheme is not None:
        return expanded
    return [path for pattern in expanded for path in _local(os.path.expanduser(pattern))]


def _refuse_commands(part: str) -> None:
    """webdataset runs no command of a shard's name where WDS_SECURE is set, and nor do we."""
    if os.environ.get("WDS_SECURE", "0") not in ("", "0"):
        raise SettingsError(
            f"{redact(part)!r} would run a command, which WDS_SECURE={os.environ['WDS_SECURE']} in the environment "
            "forbids: name the shards by a path, or by http(s)://, s3://, gs://, az:// or hf://, or unset WDS_SECURE"
        )


def with_variables(text: str) -> str:
    """A text whose `${NAME}` are taken from the environment, or from WDS_NAME as webdataset does.

    Raises:
        SettingsError: one is not set.
    """
    return VARIABLE.sub(_variable, text)


def _variable(match: re.Match[str]) -> str:
    name = match.group(1)
    value = os.environ.get(name, os.environ.get(f"WDS_{name}"))
    if value is None:
        raise SettingsError(f"${{{name}}} is named, and neither {name} nor WDS_{name} is set in the environment")
    return value


def _local(path: str) -> list[str]:
    if os.path.isdir(path):
        raise SettingsError(f"{path} is a folder: name its shards{_suggestion(Path(path))}")
    if not glob.has_magic(path) or os.path.exists(path):
        return [path]
    found = sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
    if not found:
        folder = next(parent for parent in Path(path).parents if not glob.has_magic(str(parent)))
        where = f": the folder {folder} is not there" if not folder.is_dir() else _suggestion(folder)
        raise SettingsError(f"no file matches {path}{where}")
    return found


def _suggestion(folder: Path) -> str:
    """The tars of a folder as one would name them."""
    names = sorted(entry.name for entry in folder.iterdir() if re.search(r"\.(tar|tar\.gz|tgz)$", entry.name))
    if not names:
        inner = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        return f" (it holds no tar; its folders are {', '.join(inner[:5])})" if inner else " (it holds no tar)"
    stems = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    first, last = stems[0], stems[-1]
    if len(names) > 1 and first and last and (first[1], first[3]) == (last[1], last[3]):
        numbers = [int(stem[2]) for stem in stems if stem and (stem[1], stem[3]) == (first[1], first[3])]
        if numbers == list(range(numbers[0], numbers[0] + len(names))) and len(first[2]) == len(last[2]):
            return f", e.g. '{folder}/{first[1]}{{{first[2]}..{last[2]}}}{first[3]}' ({len(names)} tars)"
    if len(names) == 1:
        return f", e.g. '{folder}/{names[0]}'"
    return f", e.g. '{folder}/*.tar' ({len(names)} tars: {names[0]} to {names[-1]})"
