"""Shard URLs: their scheme, their local path, their credentials, and the syntax that names several.

Text enters and leaves. Every message with a URL or a command shows it through `redact`. Patterns (braces, globs, `::`)
become names, and the other way round (`in_braces`). Remote folders are never listed.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import braceexpand

from clipstream.errors import SettingsError, absent, errors_as
from clipstream.text import listed
from clipstream.utils.section import map_leaves, with_home

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):")
PATH_SCHEMES = ("folder", "imagenet", "benchmark")  # take a path
GENERATED = ("toy", "synthetic")
WITHHELD = "withheld:"  # before the place of a name that a run's own settings have, and that is not to be used
ONLY_NAMED = "not used, as its run is only named: read {0}, and add --config {0} to use it"
NO_SLASHES = ("pipe", "file", *PATH_SCHEMES, *GENERATED)  # need no //
# After a pipe: command, '::' is a separator only if a scheme follows, as commands may contain '::' too.
NEXT_SHARD = re.compile(rf"::(?=pipe:|(?:{'|'.join((*PATH_SCHEMES, *GENERATED))}):|[a-zA-Z][a-zA-Z0-9+.-]+://)")
VARIABLE = re.compile(r"\$\{(\w+)\}")
USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
ROWS = re.compile(r"#\d+-\d+$")  # behind the file of a shard that is a block of its rows
TAR = re.compile(r"([^\s/'\"|<>=]+)\.(?:tar|tgz)\b")
SECRET_NAME = (
    r"[\w-]*(?:token|secret|passwo?r?d|signature|credential|api-?_?key|access-?_?key\w*|cookie|bearer)[\w-]*"
    r"|sig|key|auth"
)
# The value of `NAME=`, `NAME:`, `--NAME ` and `NAME `, but no word of a sentence, as in "the token has expired".
SECRET_VALUE = re.compile(
    rf"(?i)((?:[?&;]|--?|\b)(?:{SECRET_NAME})(?:=|:\s*(?!//))|--?(?:{SECRET_NAME})\s+"
    rf"|\b(?:{SECRET_NAME})\s+(?![a-z]{{1,12}}[.,;:]?(?:\s|$)))(?!\*\*\*)[^\s&;'\"|]+"
)
AUTH_HEADER = re.compile(r"(?i)(authorization\s*[:=]\s*(?:\w+\s+)?)[^\s'\"]+")
TABLE_FORMATS = {
    ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
# Parts of a query that differ each time a URL is signed.
SIGNED = re.compile(r"(?i)^(?:x-(?:amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|signature|sig|se|st|sp|sv|sr|expires"
                    r"|policy|key-pair-id|.*token.*)=")  # fmt: skip
# In a command only {00..99} and {a,b} name shards; awk '{print $1, $2}' and ${HOME} are the shell's.
PIPE_BRACES = re.compile(r"""(?<!\$)(\{[^\s{}$'":]*(?:\.\.|,)[^\s{}$'":]*\})""")
MOST_SHARDS = 1_000_000  # of one pattern; LAION-5B has 231,349
RANGE = re.compile(r"\{(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)
_MASKED = re.compile(r"[^\s/@'\":=]*:\*\*\*")  # user:*** in front of an @
USER_FLAG = re.compile(r"((?:^|\s)(?:-u[\s=]*|--user[\s=]+))[^\s'\"|]+")


@dataclass(frozen=True)
class ShardURL:
    """The path, URL or command of a shard, parsed; `str` and `repr` mask its credentials.

    Sources and downloads parse a shard's name where they use it. Lists of shards, checkpoints and the order fingerprint
    keep the name itself, a `str`: users' own source types name their shards freely, and the names are JSON.
    """

    full: str  # the text, with its credentials

    @cached_property
    def scheme(self) -> str | None:
        """The scheme in lower case; None for a local path."""
        match = SCHEME.match(self.full)
        if match is None or (match[1] not in NO_SLASHES and not self.full.startswith("//", match.end())):
            return None
        return match[1].lower()

    @property
    def path(self) -> str | None:
        """The path of a local file, also of a `file:` URL; None for anything else."""
        if self.scheme is None:
            return self.full
        return url2pathname(urlsplit(self.full).path) if self.scheme == "file" else None

    @property
    def host(self) -> str:
        """Host, port and login, or the bucket; also of a malformed URL."""
        return self.full.partition("//")[2].partition("/")[0]

    @property
    def is_remote(self) -> bool:
        """Whether it has to be downloaded, unlike paths and what a source type reads or makes in place."""
        return self.scheme not in (None, "file", *PATH_SCHEMES, *GENERATED)

    @property
    def unsigned(self) -> str:
        """The absolute path, or the URL without login and signature: the same for each link to a shard."""
        if self.path is not None:
            return os.path.abspath(self.path)
        full = str(self).replace("***@", "")
        if self.scheme == "pipe":
            return full
        path, _, query = full.partition("?")
        kept = [part for part in query.split("&") if part and not SIGNED.match(part)]
        return "?".join([path, "&".join(kept)]) if kept else path

    def __str__(self) -> str:
        return redact(self.full)

    def __repr__(self) -> str:
        return f"ShardURL({str(self)!r})"


@lru_cache(maxsize=4096)
def redact(url: str) -> str:
    """The URL or command with everything that looks like a credential masked."""
    url = USER_INFO.sub("***@", url)
    url = AUTH_HEADER.sub(r"\1***", url)
    url = USER_FLAG.sub(r"\1***", url)
    return SECRET_VALUE.sub(r"\1***", url)


def redact_value(text: str) -> str:
    """As `redact`, for a setting that may be something else than a URL or a command."""
    return redact(text) if "://" in text or "pipe:" in text else text


def redact_tree(tree: Any) -> Any:
    """As `redact_value`, for all texts of nested mappings and lists."""
    return map_leaves(tree, lambda value: redact_value(value) if isinstance(value, str) else value)


def has_secret(text: str) -> bool:
    """Whether a setting holds a credential; `${NAME}` and the shell's `$NAME` only refer to one."""
    bare = _MASKED.sub("***", re.sub(r"\$\{?\w+\}?", "***", text))
    return redact_value(bare) != bare


def stable_name(url: str) -> str:
    """A name that does not change if the shard is moved, decompressed, or copied from a `pipe:`.

    The last part of the path, or the name of a tar in it, ending in .tar.
    """
    bare = redact(url).partition("?")[0]
    name = bare.rpartition("/")[2]
    if name.endswith(".tar"):
        return name
    found = TAR.findall(bare if bare.startswith("pipe:") else name)
    return f"{found[-1]}.tar" if found else name


def shard_names(titles: Iterable[str]) -> dict[str, str]:
    """The name of each shard in names of samples, SHARD/KEY: the last part of its path, and as many of the folders
    above it as tell it from the other shards. A block of rows has the name of its file.
    """
    left, found, depth = {title: whole_file(title).rstrip("/") for title in titles}, dict[str, str](), 0
    while left:
        depth += 1
        names = {title: "/".join(file.rsplit("/", depth)[-depth:]) for title, file in left.items()}
        counts = Counter("/".join(file.rsplit("/", depth)[-depth:]) for file in {*left.values()})
        found |= {title: name for title, name in names.items() if counts[name] == 1 or name == left[title]}
        left = {title: file for title, file in left.items() if title not in found}
    return found


def whole_file(shard: str) -> str:
    """The table or folder that a block of its rows, `FILE#FIRST-LAST`, is of; other shards as they are."""
    return ROWS.sub("", shard)


def parts_of(spec: str | list[str]) -> list[str]:
    """The parts of the setting `shards` between `::`, with their braces, globs and variables."""
    parts: list[str] = []
    for item in [spec] if isinstance(spec, str) else spec:
        rest = item.strip()
        while rest:
            if rest.startswith("pipe:"):
                match = NEXT_SHARD.search(rest)
                part, rest = (rest, "") if match is None else (rest[: match.start()], rest[match.end() :])
            else:
                part, _, rest = rest.partition("::")
            if part:
                parts.append(part)
    return parts


def table_format(url: str) -> str | None:
    """`csv`, `json`, `parquet` or `arrow` by the suffix, also before `.gz` or `.zst`; None for other names."""
    if url.startswith("pipe:"):
        return None
    name = url.partition("?")[0].lower().removesuffix(".gz").removesuffix(".zst")
    return TABLE_FORMATS.get(name[name.rfind(".") :]) if "." in name.rpartition("/")[2] else None


def with_variables(text: str) -> str:
    """The text with each `${NAME}` replaced from the environment, or by WDS_NAME as in webdataset.

    Raises SettingsError: one is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        found = os.environ.get(name, os.environ.get(f"WDS_{name}"))
        if found is None:
            raise SettingsError(f"${{{name}}}: neither {name} nor WDS_{name} is set in the environment")
        return found

    return VARIABLE.sub(value, text)


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


def allow_command(command: str) -> None:
    """Raises SettingsError: WDS_SECURE is set, with which webdataset does not run commands either."""
    if (secure := os.environ.get("WDS_SECURE", "0")) not in ("", "0"):
        raise SettingsError(
            f"{redact(command)!r} would run a command, which WDS_SECURE={secure} in the environment forbids: name the "
            "shards by a path, or by http(s)://, s3://, gs://, az:// or hf://, or unset WDS_SECURE"
        )


def expand_pipe(command: str) -> list[str]:
    """The commands that the braces of a `pipe:` command stand for. Raises SettingsError: as `allow_command`."""
    allow_command(command)
    pieces = PIPE_BRACES.split(command)
    choices = [list(braceexpand.braceexpand(p)) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def expand_pattern(pattern: str) -> list[str]:
    """The paths or URLs that braces and, in a local path, globs stand for.

    Raises SettingsError: the braces are not paired or stand for too many, a glob matches nothing, or a folder is named.
    """
    with errors_as(SettingsError, f"unpaired braces in {redact(pattern)!r}", ValueError):
        # braceexpand makes a list of each range before it returns the first name.
        vast = any(abs(int(last) - int(first)) >= MOST_SHARDS for first, last in RANGE.findall(pattern))
        expanded = [] if vast else list(itertools.islice(braceexpand.braceexpand(pattern), MOST_SHARDS + 1))
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
            where = f": the folder {absent(folder)}" if not folder.is_dir() else _suggestion(folder)
            raise SettingsError(f"no file matches {path}{where}")
        paths += found
    return paths


def _suggestion(folder: Path) -> str:
    """A hint on what a folder holds, for messages."""
    suffixes = Counter(path.suffix.lower() for path in folder.iterdir())
    for suffix in (".tar", ".tgz", *TABLE_FORMATS):
        if suffixes[suffix] and suffix != ".json":
            return f", e.g. '{folder}/*{suffix}' ({suffixes[suffix]} files)"
    if suffixes.keys() & {".jpg", ".jpeg", ".png", ".webp"}:
        return " (it holds images and no tar: name a table of their paths and captions, such as a CSV)"
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    if having := [path.name for path in inner if any(path.glob("*.tar"))]:
        return f" (it holds no tar itself; its folders with tars: {listed(having)}, as '{folder / having[0]}/*.tar')"
    return f" (it holds no tar{'; its folders: ' if inner else ''}{listed([path.name for path in inner])})"
