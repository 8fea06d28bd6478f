"""Mixing sources: which source each sample of a lane is read from.

A golden-ratio sequence over the weights, so that every stretch of a run holds each source in proportion to its weight;
independent draws would need long stretches for that. Exact epochs have a mix of their own (`epochs.EpochPlan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clipstream.data.order.rng import GOLDEN, MASK, mix


class Mix(Protocol):
    """Chooses the source of each sample of a lane."""

    def source(self, lane: int, drawn: int) -> int | None:
        """Number of the source of a lane's sample `drawn` (from 0), in the order of names; None for padding."""
        ...


@dataclass(frozen=True)
class SourceMix:
    """Sources in proportion to their weights.

    Sample n of the run, counted through the global batches, takes the source at frac(offset + n·φ) of the weights laid
    end to end. So after any batch each source is within O(log n) samples of its share (Weyl's equidistribution;
    `tests/data/order/test_lanes.py` asserts 5), whatever its weight, and within a batch for each rank.

    Attributes:
        seed: the run's seed.
        weights: of the sources.
        lanes: L.
        batches: (step, samples): sizes of the global batch, each from its step on; the first from step 0.
    """

    seed: int
    weights: tuple[float, ...]
    lanes: int = 1
    batches: tuple[tuple[int, int], ...] = ((0, 1),)

    def source(self, lane: int, drawn: int) -> int:
        """See Mix; never None."""
        if len(self.weights) == 1:
            return 0
        before = 0  # samples of all lanes under earlier sizes of the batch
        for i, (start, size) in enumerate(self.batches):
            first = lane * size // self.lanes
            share = (lane + 1) * size // self.lanes - first
            steps = self.batches[i + 1][0] - start if i + 1 < len(self.batches) else None
            if steps is None or drawn < steps * share:
                break
            drawn -= steps * share
            before += steps * size
        number = before + drawn // share * size + first + drawn % share
        point = ((mix(self.seed, 5) + number * GOLDEN) & MASK) * 2.0**-64 * sum(self.weights)
        for source, weight in enumerate(self.weights):
            point -= weight
            if point < 0:
                return source
        return len(self.weights) - 1
