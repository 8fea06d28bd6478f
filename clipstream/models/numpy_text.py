"""Text features without torch, whose import takes longer than a search: CLIP's tokenizer and text tower in numpy.

A file of safetensors and the model's configuration enter; features leave. Only open_clip's own text tower with CLIP's
byte pair encoding is known (`NumpyText.of`); for anything else callers use torch.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import itertools
import json
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"  # of open_clip
DTYPES = {"F32": np.float32, "F16": np.float16}
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+")  # CLIP's pattern, for ASCII in lower case
KNOWN = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "quick_gelu"}  # of text_cfg
Floats = np.ndarray[Any, Any]  # float32


class NumpyText:
    """A text tower over the memory-mapped file of its weights. Use `NumpyText.of`.

    Args:
        file: safetensors with the tensors of open_clip's model.
        config: open_clip's configuration of the model.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        text = config["text_cfg"]
        self._heads, self._layers = int(text["heads"]), int(text["layers"])
        self._length, self._quick = int(text.get("context_length", 77)), bool(config.get("quick_gelu"))
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        end, self._tensors = 8 + int.from_bytes(data[:8], "little"), dict[str, Floats]()
        for name, about in json.loads(data[8:end]).items():
            if name != "__metadata__" and not name.startswith("visual."):
                size, start = math.prod(about["shape"]), end + about["data_offsets"][0]
                rows = np.frombuffer(data, DTYPES[about["dtype"]], size, start).reshape(about["shape"])
                self._tensors[name.removeprefix("text.")] = rows
        self._bpe = _BytePairs()

    @classmethod
    def of(cls, file: Path | None, config: Mapping[str, Any]) -> NumpyText | None:
        """The text tower of a model; None if it is not one that this module knows."""
        if file is None or file.suffix != ".safetensors" or not config["text_cfg"].keys() <= KNOWN:
            return None
        with contextlib.suppress(OSError, ValueError, LookupError):
            return cls(file, config)
        return None

    def encode(self, text: str) -> Floats:
        """The feature of a text, float32 [D] of length 1. Raises ValueError: the text is not ASCII."""
        ids = self._bpe.encode(text)
        ids = [*ids[: self._length - 1], ids[-1]] if len(ids) > self._length else ids
        x = self._get("token_embedding.weight", ids) + self._get("positional_embedding", slice(len(ids)))
        mask = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)  # what follows the end has no effect
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
            rows = rows / (1 + np.exp(-1.702 * rows)) if self._quick else rows * (1 + _erf(rows / math.sqrt(2))) / 2
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


class _BytePairs:
    """CLIP's byte pair encoding of ASCII texts (open_clip's SimpleTokenizer); reading its vocabulary takes 0.1 s."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("open_clip")  # found, and not imported: that would import torch
        assert spec is not None and spec.submodule_search_locations is not None
        data = gzip.decompress((Path(spec.submodule_search_locations[0]) / VOCABULARY).read_bytes())
        merges = data.decode().split("\n")[1 : 49152 - 256 - 2 + 1]
        self._ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
        own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # in which an ASCII character is itself
        letters = [*map(chr, own), *(f"\0{number}" for number in range(256 - len(own)))]
        pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, self._ranks)]
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        self._start = len(pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of the start, the pieces and the end. Raises ValueError: it is not plain ASCII."""
        if not text.isascii() or not text.isprintable() or "&" in text or "<" in text:
            raise ValueError(f"{text!r} is not plain ASCII")
        words = WORDS.findall(" ".join(text.split()).lower())
        return [self._start, *(self._ids[part] for word in words for part in self._parts(word)), self._start + 1]

    def _parts(self, word: str) -> list[str]:
        parts, none = [*word[:-1], f"{word[-1]}</w>"], len(self._ranks)
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self._ranks.get(pair, none))
            if best not in self._ranks:
                break
            before, parts = parts, []
            while before:
                size = 2 if tuple(before[:2]) == best else 1
                parts.append("".join(before[:size]))
                del before[:size]
        return parts


def _erf(x: Floats) -> Floats:
    """The error function within 2e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    found: Floats = np.sign(x) * (1 - series * np.exp(-x * x))
    return found
