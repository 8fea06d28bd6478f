"""Quality of shuffling: unique keys, uniform positions of samples, distance of neighbours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from clipstream.data.order.rng import SampleRNG, mix
from clipstream.data.order.windows import EpochPlan, IndexedOrder, Order, SourceOrder

LANES, SHARDS, SIZE = 8, 40, 100
Make = Callable[[int], Order]  # seed -> order


def drawn(mode: str, split: bool = False, replacement: bool = True, window: int = 150) -> Make:
    return lambda seed: SourceOrder(seed, 0, SHARDS, LANES, mode, 4, window, split, replacement)


def exact(split: bool) -> Make:
    def make(seed: int) -> Order:
        plan = EpochPlan(seed, ("train",), (SIZE * SHARDS,), (0.7,), 16, LANES, "drop")
        return IndexedOrder(plan, 0, [SIZE] * SHARDS, split=split, open_shards=4, window=150)

    return make


ORDERS = {
    "resampled": drawn("resampled"),
    "resampled, split": drawn("resampled", split=True),
    "resampled without replacement": drawn("resampled", replacement=False),
    "epoch": drawn("epoch", window=200),  # of half the samples of a group, as two lanes share its shards
    "epoch, split": drawn("epoch", split=True),
    "indexed": exact(False),
    "indexed, split": exact(True),
}


def taken(order: Order, lane: int, count: int) -> list[tuple[int, int]]:
    """A lane's first samples, as (shard, number)."""
    found: list[tuple[int, int]] = []
    group = 0
    while len(found) < count:
        shards = order.group(lane, group)
        sizes = order.sizes(lane, group, [SIZE] * len(shards))
        for window in range(order.windows(sizes)):
            found += [(shards[place], number) for place, number in order.samples(lane, group, window, sizes)]
        group = order.next_group(lane, group)
    return found[:count]


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_short_runs_see_late_samples_of_a_shard_as_often_as_early_ones(make: Make) -> None:
    eighths, short = 8, 60
    counts: Counter[int] = Counter()
    for seed in range(60):
        order = make(seed)
        for lane in range(LANES):
            # One sample of each short run, so that the draws are independent of each other.
            one = taken(order, lane, short)[SampleRNG(mix(seed, lane)).integer(short)]
            counts[one[1] * eighths // SIZE] += 1
    total = sum(counts.values())
    shares = [sum(i * eighths // SIZE == eighth for i in range(SIZE)) / SIZE for eighth in range(eighths)]
    square = sum((counts[i] - total * share) ** 2 / (total * share) for i, share in enumerate(shares))
    assert square < 24.3, (square, counts)  # chi-square of 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_neighbours_in_a_shard_end_up_far_apart(make: Make) -> None:
    distances: list[int] = []
    for seed, lane in itertools.product(range(5), range(LANES)):
        at = {sample: step for step, sample in enumerate(dict.fromkeys(taken(make(seed), lane, 300)))}
        distances += [abs(at[s, i] - at[s, i + k]) for k in (1, 2) for s, i in at if (s, i + k) in at]
    # In a window of 117 (a third of what exact epochs give a lane), two places are 39 apart in the mean, and next to
    # each other once in 58; the others' windows have 133 samples.
    assert len(distances) > 2000
    assert np.mean(distances) > 36 and np.mean(np.array(distances) == 1) < 1.5 / 58


def test_keys_of_samples_and_of_all_purposes_never_collide() -> None:
    order = SourceOrder(3, 0, SHARDS, 32, "resampled", 4, 150)
    groups = [*range(300), *(epoch << 32 for epoch in range(1, 301))]  # of the other modes, of exact epochs
    places = [(group, *at) for group in groups for at in ((0, 0), (0, 1), (1, 0))]
    seen = {mix(at, state=order.window_key(lane, *of)) for lane in range(32) for *of, at in places}
    assert len(seen) == 32 * len(places)
    keys = list(itertools.product(range(1, 15), range(2), range(16), range(250)))  # purpose, source, lane, epoch
    assert len({mix(3, *key) for key in keys}) == len(keys)
