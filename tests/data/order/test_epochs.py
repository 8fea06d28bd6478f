"""Exact epochs: how often each sample is used, and how lanes and sources share them; quality of shuffling."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.data.order.rng import SampleRNG, mix
from clipstream.data.order.windows import EpochPlan, IndexedOrder, Order, SourceOrder
from clipstream.errors import SettingsError

Sample = tuple[int, int, int]  # source, shard, number
LANES, SHARDS, SIZE = 8, 40, 100


def plan(
    samples: Sequence[int], batch: int, lanes: int, tail: str, weights: Sequence[float] | None = None
) -> EpochPlan:
    names = tuple(f"source{i}" for i in range(len(samples)))
    return EpochPlan(5, names, tuple(samples), tuple(weights or [1.0] * len(samples)), batch, lanes, tail)


def orders(epochs: EpochPlan, counts: Sequence[Sequence[int]], split: bool, window: int = 7) -> list[IndexedOrder]:
    return [IndexedOrder(epochs, i, held, split=split, open_shards=2, window=window) for i, held in enumerate(counts)]


def stream(order: Order, lane: int) -> Iterator[tuple[int, int]]:
    """A lane's samples of a source, as (shard, number), without end; of SIZE in a shard where none is known."""
    group = 0
    while True:
        sizes = order.sizes(lane, group, [SIZE] * len(shards := order.group(lane, group)))
        for window in range(order.windows(sizes)):
            for place, number in order.samples(lane, group, window, sizes):
                yield shards[place], number
        group = order.next_group(lane, group)


def places(epochs: EpochPlan, of: Sequence[IndexedOrder], lane: int) -> Iterator[Sample | None]:
    """A lane's places, one after the other, as a sampler takes them: a sample, or None of padding."""
    every = np.arange(25 * epochs.steps * -(-epochs.batch // epochs.lanes))
    streams = [stream(order, lane) for order in of]
    for source in epochs.sources(np.full(len(every), lane), every).tolist():
        yield None if source < 0 else (source, *next(streams[source]))


def run(epochs: EpochPlan, of: Sequence[IndexedOrder], count: int) -> list[list[list[Sample | None]]]:
    """By epoch, the global batches."""
    lanes = [places(epochs, of, lane) for lane in range(epochs.lanes)]
    ends = [lane * epochs.batch // epochs.lanes for lane in range(epochs.lanes + 1)]
    batches = (
        [sample for lane, own in enumerate(lanes) for sample in itertools.islice(own, ends[lane + 1] - ends[lane])]
        for _ in range(count * epochs.steps)
    )
    return [list(itertools.islice(batches, epochs.steps)) for _ in range(count)]


COUNTS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    COUNTS,
    st.sampled_from(["drop", "pad", "wrap"]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 25),
    st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.7, 2.0, 3.0]), min_size=4, max_size=4),
)
def test_every_sample_comes_as_often_as_its_weight_says(
    counts: list[list[int]], tail: str, split: bool, lanes: int, more: int, weights: list[float]
) -> None:
    try:
        epochs = plan([sum(held) for held in counts], lanes + more, lanes, tail, weights[: len(counts)])
    except SettingsError:
        wanted = sum(max(1, round(sum(held) * weight)) for held, weight in zip(counts, weights, strict=False))
        assert tail == "drop" and wanted < lanes + more
        return
    of = orders(epochs, counts, split)
    for batches in run(epochs, of, 3):
        seen = Counter(sample for batch in batches for sample in batch if sample is not None)
        pads = sum(sample is None for batch in batches for sample in batch)
        told = epochs.remainders()
        assert pads == sum(tails.get("padded", 0) for tails in told) and (pads == 0 or tail == "pad")
        assert all(sample is not None for batch in batches[:-1] for sample in batch)
        for source, held in enumerate(counts):
            taken = sum(count for sample, count in seen.items() if sample[0] == source)
            left_out, repeated = (told[source].get(name, 0) for name in ("left_out", "repeated"))
            assert taken == epochs.wanted[source] - left_out + repeated
            low, rest = divmod(taken, sum(held))
            every = [seen[source, shard, number] for shard, size in enumerate(held) for number in range(size)]
            assert min(every) == low and max(every) == low + (rest > 0)
            assert sum(every) == taken  # and no sample that is not there


@pytest.mark.parametrize("split", [False, True])
def test_epochs_come_in_an_order_of_their_own(split: bool) -> None:
    counts = [50, 20, 31, 40, 9, 60]
    epochs = plan([210], 20, 4, "drop")
    first, second, third = run(epochs, orders(epochs, [counts], split), 3)
    assert first != second != third
    every = {(0, shard, i) for shard, n in enumerate(counts) for i in range(n)}
    left = [every - set(itertools.chain(*epoch)) for epoch in (first, second, third)]
    assert all(len(some) == 10 for some in left) and left[0] != left[1] != left[2]


def test_split_lanes_take_the_same_samples_each_epoch() -> None:
    counts = [[50, 20, 31, 40, 9, 60]]
    for tail, weight in (("pad", 1.0), ("pad", 2.0), ("drop", 1.0), ("wrap", 1.5)):
        epochs = plan([210], 18, 5, tail, [weight])
        of = orders(epochs, counts, True)
        for lane in range(5):
            shards = [{piece.shard for piece in of[0]._pieces(lane, epoch)} for epoch in range(6)]
            held = set().union(*shards)
            assert len(held) <= 4, (tail, lane, shards)
            if tail == "pad":
                assert all(some == held for some in shards)


def test_a_fraction_of_a_source_is_another_one_each_epoch() -> None:
    for split in (False, True):
        epochs = plan([400, 1000], 50, 5, "drop", [0.25, 1.0])
        of = orders(epochs, [[40] * 10, [100] * 10], split)
        seen = Counter(s for batches in run(epochs, of, 24) for batch in batches for s in batch if s and s[0] == 0)
        assert sum(seen.values()) == 24 * 100
        assert len(seen) > 380, "nearly all come in so many epochs"
        halves = [sum(n for (_, _, i), n in seen.items() if (i < 20) == early) for early in (True, False)]
        assert abs(halves[0] - halves[1]) < 0.1 * sum(halves), "late samples of a shard as often as early ones"


@pytest.mark.parametrize("scale", [1, 10**9])  # products of the merge exceed 64 bits
@pytest.mark.parametrize("sizes", [(3000, 1000), (2000, 1000, 1000), (5000, 37, 900, 1800)])
def test_sources_of_an_epoch_come_within_one_percent_of_their_shares(sizes: tuple[int, ...], scale: int) -> None:
    epochs = plan([size * scale for size in sizes], 64, 48, "wrap", [2.0] * len(sizes))
    shares = [100 * ((lane + 1) * 64 // 48 - lane * 64 // 48) for lane in range(48)]
    drawn = np.concatenate([np.arange(share) for share in shares])
    found = epochs.sources(np.repeat(np.arange(48), shares), drawn)
    counts = np.bincount(found, minlength=len(sizes))
    assert abs(counts / 6400 - np.array(sizes) / sum(sizes)).max() < 0.01
    first = found[drawn == 0] == 0
    assert first.any() and not first.all(), "lanes begin with different sources"


def test_an_epoch_below_one_batch_needs_another_tail() -> None:
    with pytest.raises(SettingsError, match="an epoch of 9 samples is smaller than a batch of 12"):
        plan([9], 12, 4, "drop")
    padded, wrapped = (plan([9], 12, 4, tail) for tail in ("pad", "wrap"))
    assert padded.steps == wrapped.steps == 1 and padded.remainders() == [{"padded": 3}]
    ((batch,),) = run(wrapped, orders(wrapped, [[9]], False), 1)
    assert sorted(Counter(batch).values()) == [1] * 6 + [2] * 3
    with pytest.raises(SettingsError, match=r"source1\.shards: no samples"):
        plan([9, 0], 4, 2, "pad")
    told = "27 steps for 1,750 samples (source0 1,000, source1 500 x 1.5); remainder drop: 22 samples are left out"
    assert plan([1000, 500], 64, 4, "drop", [1.0, 1.5]).summary() == f"{told} each time"


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
    return list(itertools.islice(stream(order, lane), count))


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
