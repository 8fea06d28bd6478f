"""The files of an index of images, the call that it is for, and text features without torch. Imports no torch.

FOLDER/features.npy    float32 [N, D], rows of length 1
FOLDER/images.jsonl    an `ImageRow` for each row, then for each sample without a readable image
FOLDER/ends.npy        int64 [N + 1], where the lines of rows begin and end, in bytes; the last file to be written
FOLDER/model.json      the model for `NumpyText`, once its features were found equal to torch's
FOLDER/queries/        features of queries

torch's import takes longer than a search: `NumpyText` is CLIP's tokenizer and text tower in numpy. Only open_clip's own
text tower with CLIP's byte pair encoding is known (`NumpyText.of`); for anything else callers use torch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from clipstream.data.decode.tokenizers import clip_byte_pairs
from clipstream.storage.shard_cache import cache_root
from clipstream.utils.content import SUFFIXES
from clipstream.utils.section import with_home

FEATURES, IMAGES, ENDS, TEXT_MODEL, QUERIES = "features.npy", "images.jsonl", "ends.npy", "model.json", "queries"
KNOWN = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "quick_gelu"}  # of text_cfg
Floats = np.ndarray[Any, Any]  # float32
# Of labels: title -> names and templates, as `Model.label` takes them.
Columns = Mapping[str, tuple[Sequence[str], str]]
ERF = np.vectorize(math.erf, otypes=[np.float32])


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


class NumpyText:
    """A text tower over the memory-mapped file of its weights. Use `NumpyText.of`.

    Args:
        file: safetensors with the tensors of open_clip's model.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        text = config["text_cfg"]
        self._heads, self._layers = int(text["heads"]), int(text["layers"])
        self._length, self._quick = int(text.get("context_length", 77)), bool(config.get("quick_gelu"))
        tensors: Any = safe_open(file, "numpy")
        own = [name for name in tensors.keys() if not name.startswith("visual.")]  # noqa: SIM118
        self._tensors = {name.removeprefix("text."): tensors.get_slice(name) for name in own}
        if not {tensor.get_dtype() for tensor in self._tensors.values()} <= {"F32", "F16"}:
            raise ValueError(f"{file} has numbers that numpy lacks")
        self._bpe = clip_byte_pairs()

    @classmethod
    def of(cls, file: Path | None, config: Mapping[str, Any]) -> NumpyText | None:
        """The text tower of a model; None if it is not one that this module knows."""
        if file is None or file.suffix != ".safetensors" or not config["text_cfg"].keys() <= KNOWN:
            return None
        with contextlib.suppress(OSError, ValueError, LookupError, SafetensorError):
            return cls(file, config)
        return None

    def encode(self, text: str) -> Floats:
        """The feature of a text, float32 [D] of length 1."""
        ids = self._bpe.encode(text)
        ids = [*ids[: self._length - 1], ids[-1]] if len(ids) > self._length else ids
        ids = ids[: ids.index(max(ids)) + 1]  # what follows the end has no effect
        tokens = [self._get("token_embedding.weight", slice(number, number + 1)) for number in ids]
        x = np.concatenate(tokens) + self._get("positional_embedding", slice(len(ids)))
        mask = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
        for number in range(self._layers):
            block = f"transformer.resblocks.{number}."
            rows = self._linear(
                self._norm(x, f"{block}ln_1"), f"{block}attn.in_proj_weight", f"{block}attn.in_proj_bias"
            )
            q, k, v = rows.reshape(len(ids), 3, self._heads, -1).transpose(1, 2, 0, 3)
            weights = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]) + mask
            weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            rows = (weights @ v).swapaxes(0, 1).reshape(len(ids), -1)
            x = x + self._linear(rows, f"{block}attn.out_proj.weight", f"{block}attn.out_proj.bias")
            rows = self._linear(self._norm(x, f"{block}ln_2"), f"{block}mlp.c_fc.weight", f"{block}mlp.c_fc.bias")
            rows = rows / (1 + np.exp(-1.702 * rows)) if self._quick else rows * (1 + ERF(rows / math.sqrt(2))) / 2
            x = x + self._linear(rows, f"{block}mlp.c_proj.weight", f"{block}mlp.c_proj.bias")
        feature: Floats = self._norm(x[-1], "ln_final") @ self._get("text_projection")
        return np.asarray(feature / np.linalg.norm(feature))

    def _get(self, name: str, rows: slice = slice(None)) -> Floats:
        return np.asarray(self._tensors[name][rows], np.float32)

    def _linear(self, x: Floats, weight: str, bias: str) -> Floats:
        # Of few rows, a product without BLAS, whose threads cost six times as much where cores are shared.
        return np.asarray(np.einsum("ij,kj->ki", self._get(weight), x) + self._get(bias))

    def _norm(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
        return np.asarray(x * self._get(f"{name}.weight") + self._get(f"{name}.bias"))
