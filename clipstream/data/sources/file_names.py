"""What the names of files and folders tell: which text is of which image, and which split (training, validation,
test) they are of.

Paths of files, relative to a folder, or cells of a table enter; the texts of each image, or an error that says where
else texts may lie, and splits leave.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path

from clipstream.data.decode.sample_profile import CAPTION_NAMES
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import table_format
from clipstream.text import counted, listed
from clipstream.utils import content

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = "", TRAIN, VALIDATION, TEST  # by the group of SPLIT that matches
COLUMNS = ("split", "data_split", "subset", "partition", "set", "phase")  # of a table, with the split of each row
SPLIT = re.compile(
    r"(?i)(?:^|[/._ =-])(?:(train(?:ing|val)?)|(val(?:id(?:ation)?)?|dev)|(test(?:ing)?|eval(?:uation)?))(?:set)?"
    r"(?=[/._ \d-]|$)"
)
# Columns of a table with images, beside those that `image_key` names.
IMAGE_NAMES = (
    *("path", "filename", "file", "img", "img_path", "image_file", "image_filename", "image_file_name", "imagepath"),
    *("picture", "photo"),
)
TEXTS = ("json", "tags", "md", *CAPTION_NAMES)  # suffixes of the text beside an image
# Between the name of an image and the suffix of its text: 1.jpg.txt, 1.caption.txt, 1_caption.txt.
_MIDDLE = re.compile(rf"(?i)(?:[._-](?:{'|'.join(TEXTS)})|{'|'.join(map(re.escape, content.SUFFIXES))})$")
# Names of folders that say nothing about the images in them.
_PLAIN = re.compile(r"(?i)(?:images?|imgs?|pics?|pictures?|photos?|jpe?gs?|jpegimages|pngs?|data|raw|files?|media)\d*")
_LISTS = re.compile(r"(?i)(?!readme|licen[sc]e|notice|requirements).+\.(?:txt|csv|tsv|jsonl?|ndjson|token|lst|caption)")


def suffix_of(file: str) -> str:
    """The suffix of a path in lower case, without the dot."""
    return os.path.splitext(file)[1].lower().removeprefix(".")


def stem_of(file: str) -> str:
    """A path without its suffix."""
    return os.path.splitext(file)[0]


def image_of(file: str, images: Collection[str]) -> str | None:
    """The path without suffix of the image that a text file is of by its name; None if there is none."""
    if suffix_of(file) not in TEXTS:
        return None
    return next((name for name in (stem_of(file), _MIDDLE.sub("", stem_of(file))) if name in images), None)


def pairs_of(files: Iterable[str], image_keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Path of an image without suffix -> ends of the paths of the image and of its texts, in the order of paths."""
    files = sorted(files)
    found: dict[str, list[str]] = {stem_of(file): [] for file in files if suffix_of(file) in image_keys}
    for file in files:
        if (name := stem_of(file) if suffix_of(file) in image_keys else image_of(file, found)) is not None:
            found[name].append(file[len(name) :])
    return {name: tuple(sorted(ends, key=len)) for name, ends in found.items()}


def are_plain(folders: Iterable[str]) -> bool:
    """Whether none of the names of folders tells of a class: images, train, val2017, …"""
    return all(_PLAIN.fullmatch(name) or re.fullmatch(rf"{SPLIT.pattern}.*", name) for name in folders)


def refuse_texts_elsewhere(folder: str, images: Collection[str], others: Sequence[str]) -> None:
    """Raises SettingsError: files that are no texts beside images may have their captions.

    Args:
        images: paths of images in the folder, without suffix.
        others: its files that are no images.
    """
    held, names = counted(len(images), "image", ","), {os.path.basename(name) for name in images}
    alike: dict[str, list[str]] = defaultdict(list)  # by suffix, the files with names of images
    for file in others:
        name = os.path.basename(stem_of(file))
        if name in names or _MIDDLE.sub("", name) in names:
            alike[suffix_of(file)].append(file)
    texts = max(alike.values(), key=len, default=[])
    if len(texts) >= max(2, len(images) / 2) and _is_text(Path(folder, texts[0])):
        raise SettingsError(
            f"{folder} holds {held} and {len(texts):,} .{suffix_of(texts[0])} files of the same names, such as "
            f"{texts[0]}: captions must lie beside their images, as cat.txt beside cat.jpg: move, link or rename these"
        )
    tops = {name.partition("/")[0] for name in images}
    if len(tops) > 1 and not are_plain(tops):
        return
    for file in others:
        if _LISTS.fullmatch(os.path.basename(file)) and _has_lines(path := Path(folder, file), len(images)):
            with open(path, "rb") as opened:
                head = opened.read(content.HEAD)
            named = ("COCO",) if table_format(file) else ("COCO", "CSV", "sep", "utf16")
            known = content.describe(head) if content.kind(head) in named else ""
            raise SettingsError(
                f"{folder} holds {held} (in {listed(sorted(tops), 3)}) without texts beside them, and {file}"
                f"{f' ({known})' if known else ''}: if it has the captions, name it as a table, or write a table with "
                "the columns filepath and title from it; if it has not, move it elsewhere"
            )


def _is_text(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(content.HEAD)
    return b"\0" not in head and content.kind(head) in (None, *content.TEXTS)


def _has_lines(path: Path, images: int) -> bool:
    """Whether a file of text has a line for every second image, or is JSON."""
    if not _is_text(path) and suffix_of(path.name) != "json":
        return False
    with open(path, "rb") as file:
        return suffix_of(path.name) == "json" or sum(1 for _ in file) >= max(2, images // 2)


@cache
def split_in(name: str) -> str:
    """The split that a name tells of; '' for none."""
    found = SPLIT.search(name)
    return SPLITS[(found.lastindex or 0) if found else 0]


def splits_to_read(evaluates: bool) -> list[str]:
    """The splits that are read in place of all, the first that exists."""
    return [VALIDATION, TEST, TRAIN] if evaluates else [TRAIN]


def split_of_cell(cells: Sequence[str], are_paths: bool) -> Callable[[str], str] | None:
    """How a cell of a column tells its row's split; None if these cells do not tell of training and another split.

    Of paths, the first folder counts that is one of a split in all of them.
    """
    if not are_paths:
        return split_in if {"", TRAIN} < {*map(split_in, cells), ""} else None
    parts = [_folders(cell) for cell in cells]
    for level in range(min(map(len, parts), default=0)):
        found = {split_in(part[level]) for part in parts}
        if "" not in found and {TRAIN} < found:
            return lambda cell: next(map(split_in, _folders(cell)[level : level + 1]), "")
    return None


def _folders(path: str) -> list[str]:
    return path.strip().replace("\\", "/").split("/")[:-1]
