"""What `clipstream precompute` is asked to store, besides the settings of the model and the data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STORED_DTYPES = ("float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class StoreOptions:
    """The store to write."""

    folder: Path  # of the store, absolute
    towers: tuple[Literal["image", "text"], ...]  # of the settings' model; none to store teachers alone
    views: int  # augmented views of each picture; 0: the picture as evaluations preprocess it
    dtype: str  # of STORED_DTYPES
    zstd: bool  # whether files are compressed
    chunk_rows: int  # samples of a chunk
    random_weights: bool  # whether a teacher may have no pretrained weights
    batch_size: int  # pictures, or texts, of a forward pass
