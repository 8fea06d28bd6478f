"""The files of an index of images, and the call that it is for. Imports no torch.

FOLDER/features.npy    float32 [N, D], rows of length 1
FOLDER/images.jsonl    an `ImageRow` for each row
FOLDER/ends.npy        int64 [N + 1], where these lines begin and end, in bytes; the last file to be written
FOLDER/model.json      the model for `NumpyText`, once its features were found equal to torch's
FOLDER/queries/        features of queries
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from clipstream.storage.shard_cache import cache_root
from clipstream.utils.content import SUFFIXES
from clipstream.utils.section import with_home

FEATURES, IMAGES, ENDS, TEXT_MODEL, QUERIES = "features.npy", "images.jsonl", "ends.npy", "model.json", "queries"


class ImageSearch(NamedTuple):
    model: str  # as the user names it: a run, a checkpoint, a name
    data: str
    flags: tuple[str, ...] = ()  # of training, on the model and on how the data are read


class ImageRow(NamedTuple):
    name: str  # path of its file; SHARD/KEY where it is inside of another file
    caption: str
    place: tuple[str, int, int] | None  # path, offset and bytes of the image (0: the whole file); None: see `sample`
    sample: tuple[str, str]  # shard and key

    def display_name(self, data: str) -> str:
        """The name below the folder of `data`, as the user names it, or as seen from the working folder."""
        given = with_home(data).removeprefix("folder:")
        given = given.rstrip("/") if os.path.isdir(given) else os.path.dirname(given)
        for folder, name in ((os.path.abspath(given), given), (os.getcwd(), "")):
            if self.name.startswith(inside := os.path.join(folder, "")):
                return os.path.join(name, self.name.removeprefix(inside))
        return self.name


def root() -> Path:
    """The folder of all indexes in the cache."""
    return cache_root() / "search"


def is_image(query: str) -> bool:
    return query.lower().endswith(SUFFIXES)
