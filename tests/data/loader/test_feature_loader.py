"""Training from stored features: the batches, positions and counts are those of the loader that reads the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.data.build import training_loader
from clipstream.data.loader.features import FeatureLoader
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.stored import StoredData
from clipstream.data.order.lanes import DataState
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.features.codec import decode_rows
from tests.support.feature_stores import WIDTH, feature, write_store
from tests.support.loaders import IMAGE, OPEN, data, loader
from tests.support.pictures import ByteTokenizer, picture
from tests.support.tars import write_tar

CAPTIONS = {"type": "json", "path": ["long", "short", "none"], "weights": [3, 1, 2], "fallback": "txt"}


def samples(count: int, start: int) -> list[dict[str, Any]]:
    """Samples with several captions, with copies of pictures, and some broken in each way."""
    made = []
    for number in range(start, start + count):
        fields: dict[str, Any] = {"long": [f"{number} {i}" for i in range(number % 4)], "short": f"s{number}"}
        sample = {"__key__": f"{number:05d}", "jpg": picture(number % 50), "json": json.dumps(fields)}
        if number % 7 == 3:
            sample["jpg"] = b"broken"
        if number % 11 == 5:
            sample["json"] = json.dumps({"long": "", "none": 3})
        if number % 13 == 6:
            sample |= {"json": "{", "txt": f"text {number}"}
        if number % 17 == 2:
            del sample["jpg"]
        made.append(sample)
    return made


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("shards")
    counts = {"a": [31, 5, 48, 17], "b": [23, 40], "rare": [9]}
    return {
        name: [
            str(write_tar(folder / name / f"{i:05d}.tar", samples(count, 1000 * n + 100 * i)))
            for i, count in enumerate(sizes)
        ]
        for n, (name, sizes) in enumerate(counts.items())
    }


def sources(shards: dict[str, list[str]], weights: Sequence[float] = (1,)) -> dict[str, Any]:
    return {
        name: {"shards": shards[name], "caption": CAPTIONS, "weight": weight}
        for name, weight in zip(shards, weights, strict=False)
    }


def stored(
    settings: DataSettings, store: str | StoredData, rank: int = 0, size: int = 1, start: DataState | None = None
) -> FeatureLoader:
    features = store if isinstance(store, StoredData) else StoredData.open(image=store)
    world = World(rank=rank, size=size)
    made = training_loader(
        settings, world=world, seed=3, tokenizer=ByteTokenizer(), image=IMAGE, start=start, features=features
    )
    OPEN.add(made)
    assert isinstance(made, FeatureLoader)
    return made


def assert_same(live: Batch, found: Batch, ids: bool = True) -> None:
    for name in ("weights", "sources", "pictures", *(["ids"] if ids else [])):
        assert torch.equal(getattr(live, name), getattr(found, name)), name
    assert (live.step, live.global_size, len(live)) == (found.step, found.global_size, len(found))
    assert found.keys == live.keys and found.pixels is None
    for name, rows in found.features.items():
        if name.endswith("image"):
            names = [
                key.rpartition("/")[2] if weight else "" for key, weight in zip(live.keys, live.weights, strict=True)
            ]
            expected = [feature(f"{key} 0") if key else [0] * WIDTH for key in names]
        else:
            texts = [ByteTokenizer().decode(row) for row in live.ids.tolist()]
            expected = [feature(text) if text else [0] * WIDTH for text in texts]
        assert decode_rows(rows).tolist() == [list(row) for row in expected], name


def counts(one: Loader) -> dict[str, Any]:
    """Health without what the store does not know: examples and faults that left samples intact."""
    return {
        name: {key: summary.get(key) for key in ("read", "used", "dropped", "shards", "left_out", "padded", "repeated")}
        for name, summary in one.health.summary().items()
    }


MODES: dict[str, dict[str, Any]] = {
    "resampled": {},
    "without replacement": {"sampling": {"replacement": False}},
    "split": {"sampling": {"shards": "split"}},
    "schedule": {"batch_schedule": [(4, 20), (9, 7)], "lanes": 7},
    "epoch": {"sampling": {"mode": "epoch"}},
    "epoch, split": {"sampling": {"mode": "epoch", "shards": "split"}},
    "drop": {"sampling": {"mode": "indexed"}},
    "pad": {"sampling": {"mode": "indexed", "remainder": "pad"}},
    "wrap": {"sampling": {"mode": "indexed", "remainder": "wrap"}},
    "indexed, split": {"sampling": {"mode": "indexed", "shards": "split", "remainder": "pad"}},
    "large window": {"shuffle": {"window": 1000, "shards": 4}, "global_batch_size": 50},
    "few lanes": {"lanes": 3, "global_batch_size": 30, "shuffle": {"window": 7, "shards": 1}},
}


@pytest.fixture(scope="module")
def store(shards: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = data([], sources=sources(shards, (1, 1, 1)))
    return write_store(tmp_path_factory.mktemp("store") / "all", settings)


@pytest.mark.parametrize(("ranks", "weights"), [(1, (1,)), (3, (1, 2.5, 0.4))])
@pytest.mark.parametrize("mode", MODES)
def test_batches_positions_and_counts_are_those_of_pictures(
    shards: dict[str, list[str]], store: str, mode: str, weights: tuple[float, ...], ranks: int
) -> None:
    settings = data([], sources=sources(shards, weights), **MODES[mode])
    opened = StoredData.open(image=store)
    for rank in range(ranks):
        live, found = loader(settings, rank, ranks), stored(settings, opened, rank, ranks)
        assert found.fingerprint == live.fingerprint and found.state() == live.state()
        for _ in range(25):
            assert_same(next(live), next(found))
            assert found.state() == live.state()
            assert counts(found) == counts(live)
        assert sum(one["dropped"] != {} for one in counts(live).values())
        live.close()
        found.close()


@pytest.mark.parametrize("mode", ["resampled", "epoch", "pad", "schedule"])
def test_a_run_resumes_from_pictures_with_features_and_the_other_way_round(
    shards: dict[str, list[str]], store: str, mode: str
) -> None:
    settings = data([], sources=sources(shards, (1, 2)), **MODES[mode])
    reference = loader(settings)
    expected = [next(reference) for _ in range(24)]
    state, make = (
        None,
        {0: lambda start: loader(settings, start=start), 1: lambda start: stored(settings, store, start=start)},
    )
    for step, batch in enumerate(expected):
        if step % 3 == 0:
            running = make[step // 3 % 2](state)
        found = next(running)
        if isinstance(running, FeatureLoader):
            assert_same(batch, found)
        else:
            assert found.keys == batch.keys and torch.equal(found.ids, batch.ids)
        state = DataState.merge([running.state()])
        if step % 3 == 2:
            running.close()
    assert state == reference.state()


def test_samples_that_the_settings_leave_out_are_left_out(
    shards: dict[str, list[str]], store: str, tmp_path: Path
) -> None:
    kept, dropped = tmp_path / "kept.txt", tmp_path / "dropped.txt"
    kept.write_text("".join(f"{number:05d}\n" for number in range(0, 2000, 2)))
    dropped.write_text("00000.tar/00008\n01104\n")
    for mode in ("resampled", "pad"):
        lists = {"keep": str(kept), "drop": str(dropped)}
        read = {name: source | lists for name, source in sources(shards, (1, 2)).items()}
        settings = data([], sources=read, **MODES[mode])
        live, found = loader(settings), stored(settings, store)
        for _ in range(12):
            assert_same(next(live), next(found))
            assert counts(found) == counts(live) and found.state() == live.state()
        assert all(one["dropped"]["not_kept"] > 10 for one in counts(found).values())
