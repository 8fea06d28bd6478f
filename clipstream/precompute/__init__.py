"""Features of frozen towers and teachers, computed once and stored (`clipstream precompute`).

Settings and `StoreOptions` enter; a store (`features.store`) leaves, to train from and to search.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clipstream.models.settings import Tower

StoredDtype = Literal["float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class StoreOptions:
    """The store to write."""

    folder: Path  # of the store, absolute
    towers: tuple[Tower, ...]  # of the settings' model; none to store teachers alone
    views: int  # augmented views of each image; 0: the image as evaluations preprocess it
    dtype: StoredDtype
    zstd: bool  # whether files are compressed
    chunk_rows: int  # samples of a chunk
    random_weights: bool  # whether a teacher may have no pretrained weights
    batch_size: int  # images, or texts, of a forward pass
    with_model: bool = True  # whether the store has the model too
    label: str = ""  # of progress; then only dropped samples are told in the end
