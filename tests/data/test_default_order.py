"""The default order: equal for all ranks and workers, and how well it mixes shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_run
from clipstream.data.loader.workers import resolve_workers
from clipstream.data.order import default_lanes
from clipstream.data.order.windows import SourceOrder
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support.loaders import loader
from tests.support.pictures import make_shards
from tests.support.settings_files import planned

BATCH = 16


def settings_of(shards: Sequence[str], *argv: str, ranks: int = 1) -> Settings:
    flags = ["--train-data", "::".join(shards), "--name=x", "--steps=1", *argv]
    return planned(load(flags, ranks=ranks), ranks)


def first_keys(shards: Sequence[str], ranks: int, workers: str, mode: str) -> list[list[str]]:
    """Keys of the first global batches under the default lanes, from all ranks."""
    argv = (f"--data.global-batch-size={BATCH}", f"--data.sampling.mode={mode}", f"--workers={workers}")
    data = settings_of(shards, *argv, ranks=ranks).data
    if data.workers == "auto":
        workers, _ = resolve_workers(data, World(size=ranks))
        data = data.model_copy(update={"workers": workers})
    with ExitStack() as stack:
        loaders = [stack.enter_context(loader(data, rank, ranks)) for rank in range(ranks)]
        return [[key for one in loaders for key in next(one).keys] for _ in range(3)]


@pytest.mark.parametrize("mode", ["resampled", "epoch", "indexed"])
def test_the_default_order_is_the_same_for_all_ranks_and_workers(tmp_path: Path, mode: str) -> None:
    shards = make_shards(tmp_path, [9] * 12)
    expected = first_keys(shards, 1, "0", mode)
    assert [len(keys) for keys in expected] == [BATCH] * 3
    for ranks, workers in [(4, "auto"), (8, "0")]:
        assert first_keys(shards, ranks, workers, mode) == expected, (ranks, workers)


def test_the_number_of_lanes_follows_the_batch_alone() -> None:
    for ranks, workers in [(1, "auto"), (1, "0"), (4, "99"), (192, "auto")]:
        settings = settings_of(["a.tar"], f"--workers={workers}", "--data.global-batch-size=512", ranks=ranks)
        assert settings.data.lanes == 192
    batches = {7: 7, 191: 191, 512: 192, 2047: 192, 2048: 384, 4096: 768, 16_384: 3072, 10**6: 3072}
    assert {batch: default_lanes(batch) for batch in batches} == batches
    large = settings_of(["a.tar"], "--data.global-batch-size=16384", ranks=1024)
    assert int(large.data.lanes) % 1024 == 0
    argv = ["--train-data=a.tar", "--name=x", "--steps=1", "--data.global-batch-size=512"]
    with pytest.raises(SettingsError, match=r"data.lanes: .*512 cannot be divided among 193 ranks: set 193 or a mult"):
        validate_run(read(argv, ranks=193), World(size=193))


@pytest.mark.parametrize(("batch", "limit"), [(64, 1.5), (512, 4.7), (4096, 2.2), (16_384, 1.4)])
def test_batches_mix_shards(batch: int, limit: float) -> None:
    """Pairs of samples from one shard in the first batches of the default order, over those of independent draws."""
    size, lanes, shards = 10_000, default_lanes(batch), 1000
    pairs = 0
    for seed in range(3):
        order = SourceOrder(seed, 0, shards, lanes, "resampled", None, 2000)
        found: Counter[int] = Counter()
        for lane in range(lanes):
            group = order.group(lane, 0)
            places = order.samples(lane, 0, 0, order.sizes(lane, 0, [size] * len(group)))
            found.update(group[place] for place in places[: (lane + 1) * batch // lanes - lane * batch // lanes, 0])
        pairs += sum(count * (count - 1) // 2 for count in found.values())
    assert pairs / 3 / (batch * (batch - 1) / 2 / shards) < limit


@pytest.mark.parametrize(
    ("shards", "lanes", "split"), [(3, 24, False), (100, 24, False), (3, 24, True), (50, 12, True)]
)
def test_a_pass_gives_every_sample_once_also_where_lanes_share_shards(shards: int, lanes: int, split: bool) -> None:
    order = SourceOrder(5, 0, shards, lanes, "epoch", None, 7, split)
    sizes = [13 + shard for shard in range(shards)]
    for number in range(3):
        found: Counter[tuple[int, int]] = Counter()
        for lane in range(lanes):
            groups = order.groups_per_pass(lane)
            for group in range(number * groups, (number + 1) * groups):
                held = order.group(lane, group)
                parts = order.sizes(lane, group, [sizes[shard] for shard in held])
                for window in range(order.windows(parts)):
                    found.update((held[place], n) for place, n in order.samples(lane, group, window, parts).tolist())
        assert found == Counter((shard, n) for shard in range(shards) for n in range(sizes[shard]))


def test_a_shard_with_fewer_samples_than_lanes_serves_all_of_them(tmp_path: Path) -> None:
    (shard,) = make_shards(tmp_path, [5])
    keys = first_keys([shard], 2, "0", "epoch")
    counts = Counter(key for batch in keys for key in batch)
    assert sum(counts.values()) == 3 * BATCH and len(counts) == 5, counts
