"""Fingerprints of what an evaluation used: weights, tokenizer and samples.

Equal content has equal fingerprints on any device and number of ranks, in any order and packing into shards. They
detect accidents, not forgery: they are 64-bit sums and products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.tokenizers import Tokenizer

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

AT_ONCE = 1 << 18  # elements summed at once: fits a CPU's cache, which is five times as fast
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64


def of_weights(state: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits for a state dict, as float32; the same on all devices.

    Of each tensor, the bits of its elements times different odd factors are summed modulo 2^64, so that any single
    change changes the sum.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        flat = state[name].detach().reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, len(flat), AT_ONCE):
            bits = flat[start : start + AT_ONCE].float().view(torch.int32).long()
            factors = torch.arange(start, start + len(bits), device=flat.device).mul_(2).add_(1).mul_(FACTOR)
            total += (bits * factors).sum()
        digest.update(f"{name} {tuple(state[name].shape)} {int(total) % (1 << 64)}\n".encode())
    return digest.hexdigest()[:16]


def of_tokenizer(tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits for a tokenizer, from its ids of a sample text."""
    ids = tokenizer.encode(["A photo of 2 red-brown cats, isn't it?", "Tokenizers differ"]).astype(np.int64)
    return hashlib.sha256(f"{ids.shape}".encode() + ids.tobytes()).hexdigest()[:16]


def of_samples(batch: Batch) -> tuple[Numbers, Numbers]:
    """Two numbers per sample, uint64 [n] each: of its image file, and of that file with its ids."""
    pictures = torch.zeros(len(batch), dtype=torch.int64) if batch.pictures is None else batch.pictures
    files = _scrambled(pictures.numpy().astype(np.uint64))
    ids = batch.ids.numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        factors = np.arange(1, 2 * ids.shape[1], 2, dtype=np.uint64) * np.uint64(FACTOR % (1 << 64))
        return files, _scrambled(files + _scrambled((ids * factors).sum(axis=1, dtype=np.uint64)))


def _scrambled(x: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scrambled: Numbers = x ^ (x >> np.uint64(31))
    return scrambled


@dataclass
class Reading:
    """The samples that were read from a source."""

    shards: str  # as in the settings, without credentials
    samples: int = 0  # used ones
    pictures: int = 0  # sum of their image numbers (see `of_samples`), modulo 2^64
    pairs: int = 0  # sum of their numbers of image and ids, modulo 2^64

    def add(self, batch: Batch) -> None:
        pictures, pairs = of_samples(batch)
        self.samples += len(batch)
        self.pictures = (self.pictures + int(pictures.sum(dtype=np.uint64))) % (1 << 64)
        self.pairs = (self.pairs + int(pairs.sum(dtype=np.uint64))) % (1 << 64)

    def with_others(self, parts: list[Reading]) -> dict[str, object]:
        """The sum over the ranks' `parts`, for a record."""
        return {
            "shards": self.shards,
            "samples": sum(part.samples for part in parts),
            "pictures": f"{sum(part.pictures for part in parts) % (1 << 64):016x}",
            "pairs": f"{sum(part.pairs for part in parts) % (1 << 64):016x}",
        }
