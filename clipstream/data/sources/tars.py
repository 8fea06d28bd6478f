"""Tars as a source type, local or remote, and data sets of tars in CLIP_benchmark's layout.

URLs enter; open tars leave, downloaded through the cache and read by their side index where they have one. A data set
of CLIP_benchmark also has class names and templates beside its shards:

    ROOT/test/{nshards.txt,0.tar,1.tar,…}   (and train/ likewise)
    ROOT/classnames.txt, ROOT/zeroshot_classification_templates.txt, ROOT/dataset_type.txt

`benchmark:ROOT` is the test split, `benchmark:ROOT#train` another one. ROOT is a folder, a URL (http(s)://, hf://, …),
or the page of a data set on the Hugging Face Hub, as in CLIP_benchmark. The small files are read once per process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clipstream.data.source_settings import AUTO, SourceSettings
from clipstream.data.sources import OpenShard, SourceContext, SourceType, indexes
from clipstream.errors import SettingsError, ShardError
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import ShardURL, redact, with_variables
from clipstream.storage.tar import BLOCK, Shard
from clipstream.utils.content import file_state
from clipstream.utils.section import Count, parse_as, part, with_home

SIZES = "sizes.json"  # {"00000.tar": 1000, …}, as open_clip has it
LENGTH = "__len__"  # one number: the samples of all tars of the folder
BENCHMARK = "benchmark"
MARKS = (  # tool, how many folders above its shards, file
    ("clipstream pack", 2, "pack.json"),
    ("Megatron-Energon", 3, ".nv-meta"),
    ("CLIP_benchmark", 1, "nshards.txt"),
    ("img2dataset", 1, "{stem}_stats.json"),
)
OWNER = slice(265, 273)  # start of the owner's name in a tar header, which webdataset's TarWriter sets
HUB_PAGE = re.compile(r"(https://huggingface\.co/datasets/[^/]+/[^/]+)(?:/tree/([^/]+))?/?")
RETRIEVAL, MULTILABEL, CLASSIFICATION = "retrieval", "multilabel", "classification"


@part(SourceSettings, "tar")
class TarSource(SourceType):
    """WebDataset shards: local tars, URLs and `pipe:` commands."""

    tars = True
    staged = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self._indexes, self._context = settings.index, context
        self._states: dict[str, list[int]] = {}  # of the local shards that are listed

    def list_shards(self, spec: str) -> Sequence[str]:
        self._states[spec] = file_state(ShardURL(spec).path or "")[:2]
        return [spec]

    def describe(self, shards: Sequence[str]) -> str:
        tool = find_writer(shards[0]) if shards else ""
        return super().describe(shards) + (f" by {tool}" if tool else "")

    def open(self, shard: str) -> OpenShard:
        assert self._context.shard_cache is not None, "a source without a cache only lists shards"
        local = self._context.shard_cache.local(shard)
        # The index describes the file that is named, not an unpacked or downloaded one.
        indexed = ShardURL(shard).path == str(local)
        try:
            index = indexes.open_index(shard, self._indexes) if indexed else None
            return Shard(local, index, self._states.get(shard, ()) if indexed else ())
        except BaseException:
            self._context.shard_cache.release(shard)
            raise

    def total_samples(self, shards: Sequence[str]) -> int | None:
        """Samples by `sizes.json` or `__len__` of the tars' folders, each tar as often as it is named.

        `__len__` counts only if every tar of its folder is named once.
        """
        total = 0
        folders: dict[Path, list[str]] = {}
        for tar in shards:
            if ShardURL(tar).scheme is not None:
                return None
            path = Path(tar)
            folders.setdefault(path.parent, []).append(path.name)
        for folder, names in folders.items():
            sizes = _parse_file(dict[str, Count], folder / SIZES) or {}
            if all(name in sizes for name in names):
                total += sum(sizes[name] for name in names)
                continue
            length = _parse_file(Count, folder / LENGTH)
            if length is None or sorted(names) != sorted(path.name for path in folder.glob("*.tar")):
                return None
            total += length
        return total

    def missing(self, shards: Sequence[str]) -> list[str]:
        return [shard for shard in shards if ShardURL(shard).scheme is None and not os.path.exists(shard)]

    def is_remote(self, shard: str) -> bool:
        return ShardURL(shard).is_remote

    def prefetch(self, shard: str) -> bool:
        assert self._context.shard_cache is not None, "a source without a cache only lists shards"
        return self._context.shard_cache.prefetch(shard)

    def release(self, shard: str, *, keep: bool = True) -> None:
        if self._context.shard_cache is not None:
            self._context.shard_cache.release(shard, keep=keep)


def _parse_file(kind: Any, path: Path) -> Any:
    """The value in a file of JSON; None if there is no such file, or no such value in it."""
    with suppress(OSError, ValueError):
        return parse_as(kind, path.read_bytes())
    return None


def find_writer(shard: str) -> str:
    """The tool that wrote a local shard, by files beside it or the owner in its headers; '' if it is not known."""
    if (local := ShardURL(shard).path) is None:
        return ""
    path = Path(local).absolute()
    for tool, folders, name in MARKS:
        if any((folder / name.format(stem=path.stem)).exists() for folder in path.parents[:folders]):
            return tool
    with suppress(OSError), open(path, "rb") as file:  # a header of PAX may be before the first member's
        return "webdataset" if b"bigdata\0" in [file.read(BLOCK)[OWNER] for _ in range(3)] else ""
    return ""


@part(SourceSettings, "benchmark")
class BenchmarkSource(TarSource):
    """The tars of a split."""

    def list_shards(self, spec: str) -> Sequence[str]:
        """Their paths or URLs. Raises SettingsError if there is no such data set or split."""
        return parse_benchmark(spec).shards


@dataclass(frozen=True)
class Benchmark:
    """A data set: its folder or URL, and the folder in it with the shards."""

    root: str
    split: str

    @property
    def shards(self) -> list[str]:
        """The tars of the split. Raises SettingsError if there is no such split."""
        where = f"{self.split}/nshards.txt"
        text = _text(self.root, where)
        if text is None or not text.strip().isdecimal():
            said = "is not there" if text is None else f"holds {text.strip()[:20]!r}, not the number of tars"
            raise SettingsError(
                f"{BENCHMARK}:{redact(self.root)}: {where} {said}; CLIP_benchmark's layout is "
                "ROOT/test/{nshards.txt,0.tar,…}, and '#train' behind ROOT names another split"
            )
        return [f"{self.root}/{self.split}/{number}.tar" for number in range(int(text))]

    @property
    def kind(self) -> str:
        """classification, multilabel or retrieval."""
        return (_text(self.root, "dataset_type.txt") or CLASSIFICATION).strip().lower()

    @property
    def classes(self) -> list[str] | None:
        """The class names in the order of their numbers; None if the data set has none."""
        return _lines(_text(self.root, "classnames.txt"))

    @property
    def templates(self) -> list[str] | None:
        """The prompt templates, with {c} for the class name; None if the data set has none."""
        return _lines(_text(self.root, "zeroshot_classification_templates.txt"))


def parse_benchmark(spec: str) -> Benchmark:
    """The data set that `benchmark:ROOT` or `benchmark:ROOT#SPLIT` names. Raises SettingsError if ROOT is empty."""
    root, _, split = spec.partition(":")[2].partition("#")
    page = HUB_PAGE.fullmatch(root)
    root = f"{page[1]}/resolve/{page[2] or 'main'}" if page else root.rstrip("/")
    if not root:
        raise SettingsError(f"{spec!r}: expected {BENCHMARK}:ROOT, a folder or a URL")
    folder = ShardURL(root).path
    return Benchmark(root if folder is None else with_home(folder), split or "test")


def of_source(shards: str | list[str], type: str = AUTO) -> Benchmark | None:
    """The data set that a source's `shards` name, if they name one and nothing else."""
    specs = [shards] if isinstance(shards, str) else shards
    spec = specs[0].strip()
    if type == BENCHMARK and not spec.startswith(f"{BENCHMARK}:"):
        spec = f"{BENCHMARK}:{spec}"
    if len(specs) != 1 or not spec.startswith(f"{BENCHMARK}:") or "::" in spec:
        return None
    return parse_benchmark(with_variables(spec))


def _lines(text: str | None) -> list[str] | None:
    """The lines as CLIP_benchmark reads them: a blank one is a class too, as numbers are line numbers."""
    return None if text is None else [line.strip() for line in text.splitlines()]


@lru_cache(maxsize=256)
def _text(root: str, name: str) -> str | None:
    """A small file beside the shards; None if it does not exist.

    Raises SettingsError: it cannot be read, its host cannot be reached, or ROOT does not exist.
    """
    is_local = ShardURL(root).path is not None
    if is_local and not Path(root).is_dir():
        raise SettingsError(f"{root} does not exist")
    try:
        if is_local:
            return Path(root, name).read_text(encoding="utf-8-sig")
        with closing(ShardCache(None)) as cache:
            return cache.local(f"{root}/{name}", tar=False).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except ShardError as error:
        if error.reason in ("missing", "http_404"):
            return None
        raise SettingsError(f"{BENCHMARK}:{redact(root)}: {name}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{BENCHMARK}:{redact(root)}: cannot read {name}: {error}") from error
