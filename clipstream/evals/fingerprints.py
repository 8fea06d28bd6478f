"""Owns the numbers that say what an evaluation was made with: which weights, and which samples it read.

Equal content gives equal fingerprints, whatever the device, the number of ranks, the order, or how samples are packed
into shards. They tell accidents, not forgers: they are sums and products of 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clipstream.batch import Batch

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

AT_ONCE = 1 << 18  # numbers of a tensor that are summed together: what fits a CPU's cache is five times as fast
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64


def of_weights(state: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits of a model's tensors by name, as they are in float32; the same on all devices.

    Args:
        state: as `state_dict` gives it.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tuple(tensor.shape)} {_sum(tensor)}\n".encode())
    return digest.hexdigest()[:16]


def _sum(tensor: torch.Tensor) -> int:
    """The bits of the numbers times different odd factors, summed modulo 2^64: no single change leaves it as it is."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), AT_ONCE):
        bits = flat[start : start + AT_ONCE].float().view(torch.int32).long()
        factors = torch.arange(start, start + len(bits), device=flat.device).mul_(2).add_(1).mul_(FACTOR)
        total += (bits * factors).sum()
    return int(total) % (1 << 64)


def of_samples(batch: Batch) -> tuple[Numbers, Numbers]:
    """Two numbers for each sample, uint64 [n]: of its picture's file, and of that with its ids."""
    pictures = torch.zeros(len(batch), dtype=torch.int64) if batch.pictures is None else batch.pictures
    files = _scrambled(pictures.numpy().astype(np.uint64))
    ids = batch.ids.numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        factors = np.arange(1, 2 * ids.shape[1], 2, dtype=np.uint64) * np.uint64(FACTOR % (1 << 64))
        return files, _scrambled(files + _scrambled((ids * factors).sum(axis=1, dtype=np.uint64)))


def _scrambled(x: Numbers) -> Numbers:
    """splitmix64's finaliser, as `data.order` has it."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scrambled: Numbers = x ^ (x >> np.uint64(31))
    return scrambled


@dataclass
class Reading:
    """What was read of a source.

    Attributes:
        shards: how the source names them, without credentials.
        samples: how many were used.
        pictures: sum of their pictures' numbers, modulo 2^64.
        pairs: sum of the numbers of their pictures with ids, which the tokenizer has made (or classes).
    """

    shards: str
    samples: int = 0
    pictures: int = 0
    pairs: int = 0

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        pictures, pairs = of_samples(batch)
        self.samples += len(batch)
        self.pictures = (self.pictures + int(pictures.sum(dtype=np.uint64))) % (1 << 64)
        self.pairs = (self.pairs + int(pairs.sum(dtype=np.uint64))) % (1 << 64)

    def with_others(self, parts: list[Reading]) -> dict[str, Any]:
        """What all ranks read of it, for a record."""
        return {
            "shards": self.shards,
            "samples": sum(part.samples for part in parts),
            "pictures": f"{sum(part.pictures for part in parts) % (1 << 64):016x}",
            "pairs": f"{sum(part.pairs for part in parts) % (1 << 64):016x}",
        }
