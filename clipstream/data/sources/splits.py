"""Splits (training, validation, test) by the names of files and folders, or by the cells of a table.

Names enter; the split that each tells of leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = "", TRAIN, VALIDATION, TEST  # by the group of SPLIT that matches
COLUMNS = ("split", "data_split", "subset", "partition", "set", "phase")  # of a table, with the split of each row
SPLIT = re.compile(
    r"(?i)(?:^|[/._ =-])(?:(train(?:ing|val)?)|(val(?:id(?:ation)?)?|dev)|(test(?:ing)?|eval(?:uation)?))(?:set)?"
    r"(?=[/._ \d-]|$)"
)


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
