"""Text features without torch, whose import takes longer than a search: CLIP's tokenizer and text tower in numpy.

A file of safetensors and the model's configuration enter; features leave. Only open_clip's own text tower with CLIP's
byte pair encoding is known (`NumpyText.of`); for anything else callers use torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clipstream.curation.byte_pairs import BytePairs

DTYPES = {"F32": np.float32, "F16": np.float16}
KNOWN = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "quick_gelu"}  # of text_cfg
Floats = np.ndarray[Any, Any]  # float32
ERF = np.vectorize(math.erf, otypes=[np.float32])


class NumpyText:
    """A text tower over the memory-mapped file of its weights. Use `NumpyText.of`.

    Args:
        file: safetensors with the tensors of open_clip's model.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        text = config["text_cfg"]
        self._heads, self._layers = int(text["heads"]), int(text["layers"])
        self._length, self._quick = int(text.get("context_length", 77)), bool(config.get("quick_gelu"))
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        end, self._tensors = 8 + int.from_bytes(data[:8], "little"), dict[str, Floats]()
        for name, about in json.loads(data[8:end]).items():
            if name != "__metadata__" and not name.startswith("visual."):
                size, start = math.prod(about["shape"]), end + about["data_offsets"][0]
                rows = np.frombuffer(data, DTYPES[about["dtype"]], size, start).reshape(about["shape"])
                self._tensors[name.removeprefix("text.")] = rows
        self._bpe = BytePairs()

    @classmethod
    def of(cls, file: Path | None, config: Mapping[str, Any]) -> NumpyText | None:
        """The text tower of a model; None if it is not one that this module knows."""
        if file is None or file.suffix != ".safetensors" or not config["text_cfg"].keys() <= KNOWN:
            return None
        with contextlib.suppress(OSError, ValueError, LookupError):
            return cls(file, config)
        return None

    def encode(self, text: str) -> Floats:
        """The feature of a text, float32 [D] of length 1."""
        ids = self._bpe.encode(text)
        ids = [*ids[: self._length - 1], ids[-1]] if len(ids) > self._length else ids
        ids = ids[: ids.index(max(ids)) + 1]  # what follows the end has no effect
        x = self._get("token_embedding.weight", ids) + self._get("positional_embedding", slice(len(ids)))
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

    def _get(self, name: str, rows: Any = ...) -> Floats:
        return np.asarray(self._tensors[name][rows], np.float32)

    def _linear(self, x: Floats, weight: str, bias: str) -> Floats:
        # Of few rows, a product without BLAS, whose threads cost six times as much where cores are shared.
        return np.asarray(np.einsum("ij,kj->ki", self._get(weight), x) + self._get(bias))

    def _norm(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
        return np.asarray(x * self._get(f"{name}.weight") + self._get(f"{name}.bias"))
