"""Owns data sets in CLIP_benchmark's layout: which shards they have, and the class names and templates beside them.

    ROOT/test/{nshards.txt,0.tar,1.tar,…}   (and train/ likewise)
    ROOT/classnames.txt, ROOT/zeroshot_classification_templates.txt, ROOT/dataset_type.txt

`benchmark:ROOT` names its test split, `benchmark:ROOT#train` another one. ROOT is a folder or an address (http(s)://,
hf://, …); a data set's page on the Hugging Face Hub, as CLIP_benchmark takes it, stands for its files. The small files
are read once a process. It opens no shard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from clipstream.data.shards import local_path, redact, with_variables
from clipstream.data.transfer import ShardError
from clipstream.errors import SettingsError

SCHEME = "benchmark"
HUB_PAGE = re.compile(r"(https://huggingface\.co/datasets/[^/]+/[^/]+)(?:/tree/([^/]+))?/?")
RETRIEVAL, MULTILABEL, CLASSIFICATION = "retrieval", "multilabel", "classification"


@dataclass(frozen=True)
class Benchmark:
    """A data set.

    Attributes:
        root: folder or address that holds it.
        split: of its folders with shards.
    """

    root: str
    split: str

    @property
    def shards(self) -> list[str]:
        """The tars of the split.

        Raises:
            SettingsError: there is no such split.
        """
        where = f"{self.split}/nshards.txt"
        text = _text(self.root, where)
        if text is None or not text.strip().isdecimal():
            said = "is not there" if text is None else f"holds {text.strip()[:20]!r}, and not how many tars there are"
            raise SettingsError(
                f"{SCHEME}:{redact(self.root)}: {where} {said}; CLIP_benchmark's layout is "
                "ROOT/test/{nshards.txt,0.tar,…}, and '#train' behind ROOT names another split"
            )
        return [f"{self.root}/{self.split}/{number}.tar" for number in range(int(text))]

    @property
    def kind(self) -> str:
        """classification, multilabel or retrieval."""
        return (_text(self.root, "dataset_type.txt") or CLASSIFICATION).strip().lower()

    @property
    def classes(self) -> list[str] | None:
        """The class names in the order of their numbers; None where the data set has none."""
        return _lines(_text(self.root, "classnames.txt"))

    @property
    def templates(self) -> list[str] | None:
        """The prompts' templates, with {c} for the class name; None where the data set has none."""
        return _lines(_text(self.root, "zeroshot_classification_templates.txt"))


def named(spec: str) -> Benchmark:
    """The data set that `benchmark:ROOT` or `benchmark:ROOT#SPLIT` names.

    Raises:
        SettingsError: it names none.
    """
    root, _, split = spec.partition(":")[2].partition("#")
    page = HUB_PAGE.fullmatch(root)
    root = f"{page[1]}/resolve/{page[2] or 'main'}" if page else root.rstrip("/")
    if not root:
        raise SettingsError(f"{spec!r} names no data set: write {SCHEME}:ROOT, a folder or an address")
    folder = local_path(root)
    return Benchmark(root if folder is None else str(Path(folder).expanduser()), split or "test")


def of_source(shards: str | list[str]) -> Benchmark | None:
    """The data set that a source's shards are, where they are one as a whole."""
    specs = [shards] if isinstance(shards, str) else shards
    if len(specs) != 1 or not specs[0].strip().startswith(f"{SCHEME}:") or "::" in specs[0]:
        return None
    return named(with_variables(specs[0].strip()))


def _lines(text: str | None) -> list[str] | None:
    """The lines as CLIP_benchmark reads them: a blank one is a class, too, or the numbers would not fit."""
    return None if text is None else [line.strip() for line in text.splitlines()]


@lru_cache(maxsize=256)
def _text(root: str, name: str) -> str | None:
    """A small file beside the shards; None where it is not there.

    Raises:
        SettingsError: it cannot be read, or its host not be reached; there is no data set at all.
    """
    from clipstream.data.remote import ShardStore

    url = f"{root}/{name}"
    if local_path(root) is not None and not Path(root).is_dir():
        raise SettingsError(f"there is no folder {root}")
    try:
        if local_path(url) is not None:
            return Path(url).read_text(encoding="utf-8")
        store = ShardStore(None)
        try:
            return store.local(url).read_text(encoding="utf-8")
        finally:
            store.close()
    except FileNotFoundError:
        return None
    except ShardError as error:
        if error.reason in ("missing", "http_404"):
            return None
        raise SettingsError(f"{SCHEME}:{redact(root)}: {name}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{SCHEME}:{redact(root)}: {name} cannot be read: {error}") from error
