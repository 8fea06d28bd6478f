"""Sampling modes through the loader: the same order for every layout, exact epochs and their remainder, resume."""

from __future__ import annotations

import gzip
import itertools
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.cli.verbs.index import main as index
from clipstream.data.batch import Batch
from clipstream.data.loader.health import merge_counts
from clipstream.data.order.lanes import DataState
from clipstream.data.settings import DataSettings
from clipstream.data.sources.indexes import identity_of, write
from clipstream.errors import DataError, SettingsError
from clipstream.storage.tar import ShardIndex, scan
from tests.support.loaders import data, digests, indexed, loader
from tests.support.pictures import make_shards, picture
from tests.support.tars import write_tar

SIZES = [13, 7, 20, 1, 16, 9]
KINDS = list(itertools.product(["resampled", "epoch", "indexed"], ["shared", "split"]))
AUGMENT = {"scale": (0.5, 1.0), "flip": 0.5}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), SIZES)


def mixed(shards: list[str], mode: str, owned: str, lanes: int = 6, **changes: Any) -> DataSettings:
    """Two sources; an indexed epoch has 9 batches, and a short tail."""
    sources = {"a": {"shards": shards, "weight": 1.5}, "b": {"shards": shards, "weight": 0.25}}
    sampling = {"mode": mode, "shards": owned, **changes.pop("sampling", {})}
    return data(shards, sampling=sampling, lanes=lanes, sources=sources, augment=AUGMENT, **changes)


@pytest.mark.parametrize(("mode", "owned"), KINDS)
def test_global_batches_are_the_same_for_every_layout_also_after_a_resume(
    shards: list[str], mode: str, owned: str
) -> None:
    expected = digests(mixed(shards, mode, owned), 1, 12)
    assert len(set(expected)) == 12
    for ranks, workers in [(3, 1), (1, 8 if mode == "epoch" else 2)]:  # 8 are more than lanes
        assert digests(mixed(shards, mode, owned, workers=workers), ranks, 12) == expected, (ranks, workers)
    for stop, ranks, workers in [(7, 3, 0), (9, 1, 2)]:  # an indexed epoch has nine steps
        halves = [loader(mixed(shards, mode, owned), rank, 2) for rank in range(2)]
        for half in halves:
            for _ in range(stop):
                next(half)
        state = DataState.merge([half.state() for half in halves])
        resumed = digests(mixed(shards, mode, owned, workers=workers), ranks, 12 - stop, state)
        assert resumed == expected[stop:], (stop, ranks, workers)


def play(settings: DataSettings, ranks: int, steps: int) -> tuple[list[list[Batch]], dict[str, Any]]:
    """Each global batch as its ranks' parts; and the counts of all ranks."""
    loaders = [loader(settings, rank, ranks) for rank in range(ranks)]
    batches = [[next(one) for one in loaders] for _ in range(steps)]
    counts: Counter[str] = Counter()
    for one in loaders:
        for source in merge_counts([one.health.counts()]).values():
            counts.update({key: value for key, value in source.items() if isinstance(value, int)})
            counts.update(source["dropped"])
        one.close()
    return batches, counts


def used(batches: list[list[Batch]]) -> list[str]:
    """Keys of the samples that count."""
    pairs = (pair for part in itertools.chain(*batches) for pair in zip(part.keys, part.weights.tolist(), strict=True))
    return [key for key, weight in pairs if weight]


def blanks(batches: list[list[Batch]]) -> list[str]:
    """Keys of the samples that weigh nothing: padding, and what could not be read."""
    found = []
    for part in itertools.chain(*batches):
        for i in (part.weights == 0).nonzero().flatten().tolist():
            assert not part.pixels[i].any() and not part.ids[i].any()
            found.append(part.keys[i])
    return found


@pytest.mark.parametrize("owned", ["shared", "split"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_indexed_epoch_has_every_sample_once(shards: list[str], ranks: int, owned: str) -> None:
    every = {f"{i:06d}" for i in range(66)}
    for tail, steps, added in (("drop", 5, -6), ("pad", 6, 6), ("wrap", 6, 6)):
        settings = indexed(shards, tail, workers=int(ranks == 3 and tail == "pad"), sampling={"shards": owned})
        batches, counts = play(settings, ranks, 2 * steps)
        assert all(sum(len(part) for part in parts) == 12 for parts in batches), "equal steps"
        for epoch in (batches[:steps], batches[steps:]):
            seen = Counter(key.split("/")[1] for key in used(epoch))
            if tail == "drop":
                assert max(seen.values()) == 1 and len(seen) == 60
            elif tail == "pad":
                assert seen == Counter(every) and blanks(epoch) == [""] * 6
            else:
                assert set(seen) == every and max(seen.values()) == 2 and seen.total() == 72
        word = {"drop": "left_out", "pad": "padded", "wrap": "repeated"}[tail]
        assert counts[word] == 2 * abs(added) and len({"left_out", "padded", "repeated"} & set(counts)) == 1


def test_a_bad_sample_keeps_its_place_and_weighs_nothing(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": f"text {i}"} for i in range(30)]
    samples[3]["jpg"] = b"no picture"
    samples[4]["txt"] = "  "
    shard = str(write_tar(tmp_path / "a.tar", samples))
    others = make_shards(tmp_path, [18])
    settings = indexed([shard, *others], lanes=5, workers=1)
    batches, counts = play(settings, 2, 8)
    for epoch in (batches[:4], batches[4:]):
        keys = [key for parts in epoch for part in parts for key in part.keys]
        assert len(set(keys)) == len(keys) == 48
        assert sorted(blanks(epoch)) == ["a.tar/3", "a.tar/4"]
    assert counts["undecodable_image"] >= 2 and counts["empty_caption"] >= 2  # what was read ahead counts too
    assert digests(settings, 3, 8) == digests(settings, 1, 8)


def test_samples_of_a_shard_that_is_gone_keep_their_places(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [20, 16, 24])
    assert index([*paths, "--executor=local:1"]) == 0
    first, _ = play(indexed(paths), 1, 5)
    settings = indexed(paths, max_shard_failures=1.0)
    stream = loader(settings)
    os.unlink(paths[1])  # after the start has looked
    batches = [[next(stream)] for _ in range(5)]
    stream.close()
    lost = blanks(batches)
    assert len(lost) == 16 and all(key.startswith("00001.tar/#") for key in lost)
    before, after = ([key for (batch,) in some for key in batch.keys] for some in (first, batches))
    assert len(after) == 60 and all(old == new for old, new in zip(before, after, strict=True) if new not in lost)
    health = stream.health.sources["train"]
    assert health.dropped == {"unreadable_shard": 16} and list(health.faults) == [paths[1]]
    with pytest.raises(SettingsError, match=r"1 of 3 shards do not exist, e\.g\. .*00001\.tar"):
        loader(settings)


def test_a_shard_with_other_samples_than_its_index_tells_is_named(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [20, 16])
    for path, told in zip(paths, (23, 11), strict=True):
        samples = list(scan(path).samples)
        write(Path(f"{path}.index"), ShardIndex([*samples, *samples][:told], None), identity_of(path))
    stream = loader(indexed(paths, max_shard_failures=1.0, lanes=4, batch=17))
    for path in paths:  # the shard is not opened by an index of another one
        os.unlink(f"{path}.index")
    batches = [[next(stream)] for _ in range(2)]
    stream.close()
    faults = stream.health.sources["train"].faults
    assert faults[paths[0]].startswith("stale_index: 20 samples, but 23 in its index")
    assert faults[paths[1]].startswith("stale_index: 16 samples, but 11 in its index")
    assert len(used(batches)) == 34 - 3 == len(set(used(batches)))


def test_each_rank_reads_only_its_lanes_shards_where_they_are_split(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [10] * 12)
    for mode in ("resampled", "epoch", "indexed"):
        settings = data(paths, sampling={"mode": mode, "shards": "split"}, lanes=4, global_batch_size=8)
        loaders = [loader(settings, rank, 2) for rank in range(2)]
        for one in loaders:
            for _ in range(60):
                next(one)
        read = [one.health.sources["train"].shards for one in loaders]
        assert read == [set(range(6)), set(range(6, 12))], mode


def test_without_replacement_a_lane_sees_all_its_shards_before_one_again(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [6] * 9)
    for owned, own in (("shared", 9), ("split", 3)):
        sampling = {"mode": "resampled", "shards": owned, "replacement": False}
        settings = data(paths, sampling=sampling, lanes=3, global_batch_size=3, shuffle={"window": 100, "shards": 2})
        with loader(settings) as stream:
            batches = [next(stream).keys for _ in range(6 * own * 4)]
        for lane in range(3):
            keys = [keys[lane] for keys in batches]
            passes = [keys[i : i + 6 * own] for i in range(0, len(keys), 6 * own)]
            assert all(len(set(some)) == 6 * own for some in passes), "each shard once a pass"
            assert passes[0] != passes[1] != passes[2]


def test_weights_are_repetition_factors_in_exact_epochs(shards: list[str], tmp_path: Path) -> None:
    more = make_shards(tmp_path, [30], start=100)
    sources = {"a": {"shards": shards, "weight": 2}, "b": {"shards": more, "weight": 0.5}}
    settings = indexed(shards, "pad", sources=sources)
    batches, counts = play(settings, 1, 13)
    seen = Counter(used(batches))
    of_a = {key: n for key, n in seen.items() if int(key.split("/")[1]) < 100}
    assert len(of_a) == 66 and set(of_a.values()) == {2}
    assert sum(seen.values()) - 132 == 15 and counts["padded"] == 9
    first_two = torch.cat([part.sources for parts in batches[:6] for part in parts]).float().mean()
    assert abs(float(first_two) - 15 / 147) < 0.05, "from the beginning"


@pytest.mark.parametrize("mode", ["resampled", "indexed"])
def test_any_number_of_sources_is_mixed(tmp_path: Path, mode: str) -> None:
    """Positions of sources are no bytes: 300 sources, of which each gives its share."""
    (shard,) = make_shards(tmp_path, [4])
    sources = {f"s{number:03d}": {"shards": shard} for number in range(300)}
    seen = Counter[int]()
    with loader(data(shard, sources=sources, sampling={"mode": mode}, global_batch_size=60, lanes=4)) as stream:
        for _ in range(20):
            seen.update(next(stream).sources.tolist())
    assert sorted(seen) == list(range(300)) and max(seen.values()) - min(seen.values()) <= 5


def test_shards_without_an_index_are_told_with_the_command_or_as_ones_to_leave_out(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(gzip.compress(Path(shards[0]).read_bytes())[:-500])
    paths = [str(shutil.copy(shard, tmp_path)) for shard in shards]
    with monkeypatch.context() as patch:
        patch.setattr("clipstream.data.sources.indexes.SMALL", 100_000)
        with pytest.raises(SettingsError) as caught:
            loader(indexed(paths))
    told = "data.sources.train.shards: the mode 'indexed' requires an index of each shard, but 6 of 6 have"
    assert str(caught.value).startswith(told) and f"  clipstream index {' '.join(paths)}" in str(caught.value)
    assert index([*paths, str(broken), "--executor=local:1"]) == 3
    with pytest.raises(SettingsError) as caught:
        loader(indexed([*paths, str(broken)]))
    told = f"or remove it from --data.sources.train.shards. Without an index: {broken}"
    assert str(caught.value).endswith(told), caught.value
    next(loader(indexed(paths)))


@pytest.mark.parametrize("by_index", [False, True])
def test_a_broken_shard_without_samples_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by_index: bool
) -> None:
    shards = make_shards(tmp_path, [40] * 3)
    broken = tmp_path / "broken.tar"
    content = Path(shards[0]).read_bytes()[:700] if by_index else b"<html>not found</html>" * 100
    broken.write_bytes(content)
    if by_index:  # only of tars
        assert index([*shards, str(broken), "--executor=local:1"]) == 0
    with loader(indexed([*shards, str(broken)])) as stream:
        next(stream)
        train = merge_counts([stream.health.counts()])["train"]
    reason = "truncated_member" if by_index else "not_a_tar"
    assert (train["shards"], train["shard_faults"], train["fault_reasons"]) == (4, 1, {reason: 1})
    assert capsys.readouterr().err.count(f"warning: source 'train': {broken}: {reason}: ") == 1
    settings = indexed([*shards, str(broken)], max_shard_failures=0)
    with pytest.raises(DataError, match=r"max-shard-failures 0:"), loader(settings) as stream:
        next(stream)


def test_another_tail_or_other_counts_are_another_order(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, SIZES)
    with loader(indexed(paths)) as stream:
        next(stream)
        state = stream.state()
    for settings in (indexed(paths, "wrap"), indexed(paths, sampling={"shards": "split"})):
        with pytest.raises(SettingsError, match="data order"):
            loader(settings, start=state)
    os.rename(make_shards(tmp_path / "other", [8])[0], paths[3])
    with pytest.raises(SettingsError, match="data order"):
        loader(indexed(paths), start=state)


@pytest.mark.parametrize(("factors", "first", "second"), [(None, 333, 333), ("1::2", 250, 500)])
def test_upsampling_factors_give_the_shares_of_open_clip_and_are_part_of_the_order(
    tmp_path: Path, factors: str | None, first: int, second: int
) -> None:
    """As in open_clip's tests/test_wds.py: two tars of 10 and 5 samples, of which 5,000 are drawn."""
    ten, five = make_shards(tmp_path, [10, 5])

    def settings(factors: str | None, **changes: Any) -> DataSettings:
        sources = {"train": {"shards": f"{ten}::{five}", "upsampling_factors": factors}}
        return data(None, sources=sources, **{"global_batch_size": 100, "lanes": 1, "shuffle": {}, **changes})

    stream = loader(settings(factors))
    drawn = Counter(int(key.rpartition("/")[2]) for _ in range(50) for key in next(stream).keys)
    assert all(drawn[key] == pytest.approx(first if key < 10 else second, rel=0.2) for key in range(15)), drawn
    if factors:
        state = stream.state()
        small = {"lanes": 4, "global_batch_size": 12}
        assert digests(settings(factors, **small, workers=2), 2, 12) == digests(settings(factors, **small), 1, 12)
        with pytest.raises(SettingsError, match=r"upsampling_factors: \[1.0, 2.0\] -> \[2.0, 3.0\]"):
            loader(settings("2::3"), start=state)


def test_a_shard_with_fewer_samples_than_lanes_serves_all_of_them(tmp_path: Path) -> None:
    with loader(data(make_shards(tmp_path, [5]), sampling={"mode": "epoch"}, lanes=16, global_batch_size=16)) as stream:
        counts = Counter(key for _ in range(3) for key in next(stream).keys)
    assert counts.total() == 48 and len(counts) == 5, counts
