"""Training from stored features: the batches, positions and counts are those of the loader that reads the pictures."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.loader.features import FeatureBatches
from clipstream.data.loader.health import merge_counts
from clipstream.data.loader.loader import Loader, ThreadWorker
from clipstream.data.loader.stored import StoredData
from clipstream.data.order.lanes import DataState
from clipstream.data.order.rng import SampleRNG
from clipstream.data.pipeline import training_loader
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.features.manifest import decode_rows
from tests.support.fake_cuda import SlowCopies
from tests.support.feature_stores import WIDTH, feature, view_key, write_store
from tests.support.loaders import IMAGE, INPUTS, OPEN, data, digest, loader
from tests.support.pictures import ByteTokenizer, picture
from tests.support.tars import write_tar

CAPTIONS = {"type": "json", "path": ["long", "short", "none"], "weights": [3, 1, 2], "fallback": "txt"}


def samples(count: int, start: int) -> list[dict[str, Any]]:
    """Samples with several captions, with copies of pictures, and some broken in each way."""
    made = []
    for n in range(start, start + count):
        fields = {"long": [f"{n} {i}" for i in range(n % 4)], "short": f"s{n}"}
        sample = {"__key__": f"{n:05d}", "jpg": picture(n % 50), "json": json.dumps(fields)}
        sample |= {"jpg": b"broken"} if n % 7 == 3 else {}
        sample |= {"json": json.dumps({"long": "", "none": 3})} if n % 11 == 5 else {}
        sample |= {"json": "{", "txt": f"text {n}"} if n % 13 == 6 else {}
        made.append({name: value for name, value in sample.items() if name != "jpg" or n % 17 != 2})
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


def sources(shards: dict[str, list[str]], weights: Sequence[float] = (1,), **more: Any) -> dict[str, Any]:
    return {
        name: {"shards": shards[name], "caption": CAPTIONS, "weight": weight, **more.get(name, {})}
        for name, weight in zip(shards, weights, strict=False)
    }


def stored(
    settings: DataSettings, store: str | StoredData, rank: int = 0, size: int = 1, start: DataState | None = None
) -> Loader:
    """A loader with features, of images where `store` is a path."""
    features = store if isinstance(store, StoredData) else StoredData.open(image=store)
    world = World(rank=rank, size=size)
    made = training_loader(settings, replace(INPUTS, stores=features), world=world, seed=3, start=start)
    OPEN.add(made)
    assert isinstance(made.source, FeatureBatches) or not isinstance(store, str)
    return made


def expected_rows(batch: Batch, part: str) -> list[list[float]]:
    """The features of the batch's images or texts; those of padding are 0."""
    if part.endswith("image"):
        weights = batch.weights.tolist()
        names = [f"{key.rpartition('/')[2]} 0" if w else "" for key, w in zip(batch.keys, weights, strict=True)]
    else:
        names = [ByteTokenizer().decode(row) for row in batch.ids.tolist()]
    return [feature(name).tolist() if name else [0.0] * WIDTH for name in names]


def assert_same(live: Batch, found: Batch) -> None:
    for name in ("weights", "sources", "checksums", "ids"):
        assert torch.equal(getattr(live, name), getattr(found, name)), name
    assert (live.step, live.global_size, len(live)) == (found.step, found.global_size, len(found))
    assert found.keys == live.keys and found.pixels is None
    for name, rows in found.features.items():
        assert decode_rows(rows).tolist() == expected_rows(live, name), name


def trained(one: Loader) -> Batch:
    """The next batch, counted as trained on."""
    batch = next(one)
    one.mark_trained()
    return batch


def counts(one: Loader) -> dict[str, Any]:
    """Health without what the store does not know: examples and faults that left samples intact."""
    return {
        name: {key: summary.get(key) for key in ("read", "used", "dropped", "shards", "left_out", "padded", "repeated")}
        for name, summary in merge_counts([one.trained.counts()]).items()
    }


MODES: dict[str, dict[str, Any]] = {
    "resampled": {},
    "factors": {"a": {"upsampling_factors": [1, 4, 2, 0.5]}},
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


@pytest.mark.parametrize("mode", MODES)
def test_batches_positions_and_counts_are_those_of_pictures(
    shards: dict[str, list[str]], store: str, mode: str
) -> None:
    more = dict(MODES[mode])
    settings = data([], sources=sources(shards, (1, 2.5, 0.4), a=more.pop("a", {})), **more)
    for rank in (0, 2):
        live, found = loader(settings, rank, 3), stored(settings, store, rank, 3)
        assert found.fingerprint == live.fingerprint and found.state() == live.state()
        for _ in range(25):
            assert_same(trained(live), trained(found))
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
    state, make = None, (partial(loader, settings), partial(stored, settings, store))
    for step, batch in enumerate(expected):
        if step % 3 == 0:
            running = make[step // 3 % 2](start=state)
        found = next(running)
        if isinstance(running.source, FeatureBatches):
            assert_same(batch, found)
        else:
            assert found.keys == batch.keys and torch.equal(found.ids, batch.ids)
        state = DataState.merge([running.state()])
        if step % 3 == 2:
            running.close()
    assert state == reference.state()


def test_samples_that_lists_or_their_probability_leave_out_are_left_out(
    shards: dict[str, list[str]], store: str, tmp_path: Path
) -> None:
    rows, chances = ["shard,key,probability"], tmp_path / "p.csv"
    for n, counts_of in enumerate([(31, 5, 48, 17), (23, 40)]):
        keys = [(i, 1000 * n + 100 * i + k) for i, count in enumerate(counts_of) for k in range(count)]
        rows += [f"{i:05d}.tar,{key:05d},{key % 10 / 9}" for i, key in keys if key % 100 != 9]
    chances.write_text("\n".join(rows))
    kept = tmp_path / "kept.txt"
    kept.write_text("".join(f"{number:05d}\n" for number in range(2000) if number % 5 != 4 or number % 100 == 9))
    (tmp_path / "dropped.txt").write_text("00000.tar/00008\n01104\n")
    for mode, drawn in (("resampled", True), ("epoch", True), ("pad", True), ("pad", False)):
        lists = {"keep": str(kept), "drop": str(tmp_path / "dropped.txt")}
        lists |= {"probability": str(chances)} if drawn else {}
        read = {name: source | lists for name, source in sources(shards, (1, 2)).items()}
        settings = data([], sources=read, **MODES[mode])
        live, found = loader(settings), stored(settings, store)
        assert found.fingerprint == live.fingerprint
        for _ in range(16):
            assert_same(trained(live), trained(found))
            assert counts(found) == counts(live) and found.state() == live.state()
        reasons = {"not_kept", "not_drawn", "no_probability"} if drawn else {"not_kept"}
        wanted = {"not_drawn"} if mode == "pad" and drawn else reasons  # an exact epoch is of those that can be drawn
        assert [{*one["dropped"]} & reasons for one in counts(found).values()] == [wanted] * 2, mode


@pytest.mark.parametrize(("mode", "workers"), [("resampled", 0), ("pad", 2)])
def test_features_of_teachers_and_texts_come_with_the_pictures(
    shards: dict[str, list[str]], tmp_path: Path, mode: str, workers: int
) -> None:
    settings = data([], sources=sources(shards, (1, 2)), workers=workers, **MODES[mode])
    teacher = write_store(tmp_path / "teacher", settings, ["t.image", "t.text"], reverse=True)
    texts = write_store(tmp_path / "texts", settings, ["text"])
    live, found = loader(settings), stored(settings, StoredData.open(text=texts, teachers=[teacher]))
    for _ in range(12):
        plain, batch = trained(live), trained(found)
        assert digest([plain]) == digest([batch]) and set(batch.features) == {"t.image", "t.text", "text"}
        for part, rows in batch.features.items():
            assert decode_rows(rows).tolist() == expected_rows(batch, part)
        assert found.state() == live.state()
    assert counts(found) == counts(live)


@pytest.mark.parametrize("mode", ["resampled", "pad"])
def test_views_are_those_whose_features_are_stored(shards: dict[str, list[str]], tmp_path: Path, mode: str) -> None:
    settings = data([], sources=sources(shards, (1, 2)), **MODES[mode])
    both = write_store(tmp_path / "both", settings, ["image", "ids"], views=3)
    teacher = write_store(tmp_path / "teacher", settings, ["t.image"], views=3, reverse=True)
    whole = stored(settings, StoredData.open(image=both, teachers=[teacher]))
    live = stored(settings, StoredData.open(teachers=[teacher]))
    drawn = set()
    for _ in range(6):
        features, batch = next(whole), next(live)
        rows = decode_rows(batch.features["t.image"])
        assert torch.equal(rows, decode_rows(features.features["t.image"]))
        assert torch.equal(rows, decode_rows(features.features["image"])) and torch.equal(batch.ids, features.ids)
        for row, key, pixels, weight in zip(rows, batch.keys, batch.pixels, batch.weights.tolist(), strict=True):
            if not weight:
                continue
            url, _, name = key.rpartition("/")
            (view,) = (v for v in range(3) if row.tolist() == list(feature(f"{name} {v}")))
            drawn.add(view)
            number = int(name)
            source, shard = ("a", "b")[number // 1000], number % 1000 // 100
            rng = SampleRNG(view_key(source, shard, number % 100, view))
            transform = TrainTransform(IMAGE, settings.augment, "white", True, settings.decoder)
            made = transform(picture(number % 50), rng)
            assert url == f"{shard:05d}.tar" and torch.equal(torch.from_numpy(made.copy()).permute(2, 0, 1), pixels)
    assert drawn == {0, 1, 2}


def test_images_and_texts_from_two_stores(shards: dict[str, list[str]], tmp_path: Path) -> None:
    settings = data([], sources=sources(shards, (1, 2)), shuffle={"window": 5, "shards": 1})
    images = write_store(tmp_path / "images", settings, ["image", "ids"], zstd=True)
    texts = write_store(tmp_path / "texts", settings, ["text"], reverse=True, chunk_rows=8192)
    both = StoredData.open(image=images, text=texts, cache=str(tmp_path / "cache"))
    live, found = loader(settings), stored(settings, both)
    for _ in range(8):
        assert_same(next(live), batch := next(found))
        assert set(batch.features) == {"image", "text"}
    other = {name: {**source, "caption": {**CAPTIONS, "path": ["short", "long", "none"]}}
             for name, source in sources(shards, (1, 2)).items()}  # fmt: skip
    changed = write_store(tmp_path / "changed", data([], sources=other), ["text"])
    with pytest.raises(DataError, match=r"images and .*changed hold different captions of .*\.tar: precompute both"):
        next(stored(settings, StoredData.open(image=images, text=changed)))
    seen = write_store(tmp_path / "views", settings, ["t.image"], views=2)
    more = write_store(tmp_path / "more", settings, ["image", "ids"], views=3)
    with pytest.raises(SettingsError, match=r"more has 3 views per image, but .*views has 2"):
        stored(settings, StoredData.open(image=more, teachers=[seen]))


def test_a_shard_that_has_changed_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Where no shard is read in training, one is looked at before."""
    for folder, first in (("own", 0), ("other", 500)):
        write_tar(tmp_path / folder / "00000.tar", samples(20, first))
    own, other = (
        data([], sources={"train": {"shards": str(tmp_path / folder / "00000.tar"), "caption": CAPTIONS}})
        for folder in ("own", "other")
    )
    store, teacher = write_store(tmp_path / "store", own), write_store(tmp_path / "teacher", own, ["t.image"])
    next(stored(own, store))
    with pytest.raises(DataError, match=r"other/00000\.tar has changed since its features were computed"):
        stored(other, store)
    next(stored(own, StoredData.open(teachers=[teacher])))
    write_tar(tmp_path / "own" / "00000.tar", samples(20, 1))
    with pytest.raises(DataError, match=r"own/00000\.tar has changed since its features were computed.*teacher"):
        next(stored(own, StoredData.open(teachers=[teacher])))


def test_shards_that_could_not_be_read_are_skipped_as_those_of_pictures(tmp_path: Path) -> None:
    names = [write_tar(tmp_path / f"{i:05d}.tar", samples(30, 100 * i)) for i in range(4)]
    names[1].unlink()
    names[2].write_bytes(b"")
    pattern = str(tmp_path / "{00000..00003}.tar")
    source = {"shards": pattern, "caption": CAPTIONS}
    settings = data([], sources={"train": source}, max_shard_failures=1, global_batch_size=8)
    live, found = loader(settings), stored(settings, write_store(tmp_path / "store", settings))
    for _ in range(20):
        assert_same(trained(live), trained(found))
        assert found.state() == live.state()
    assert counts(found) == counts(live)
    assert set(found.health.sources["train"].faults) == set(live.health.sources["train"].faults)
    few = settings.model_copy(update={"max_shard_failures": 0.0})
    with pytest.raises(DataError, match=r"\d of the \d shards tried .* are broken"):
        for _ in range(9):
            next(stored(few, str(tmp_path / "store")))


@pytest.mark.parametrize("mode", ["resampled", "pad"])
def test_pictures_may_be_gone(tmp_path: Path, mode: str) -> None:
    names = [write_tar(tmp_path / f"{i:05d}.tar", samples(30, 100 * i)) for i in range(3)]
    one = {"shards": str(tmp_path / "{00000..00002}.tar"), "caption": CAPTIONS}
    settings = data([], sources={"train": one}, **MODES[mode])
    path, live = write_store(tmp_path / "store", settings), loader(settings)
    expected = [next(live) for _ in range(8)]
    for name in names:
        name.unlink()
    found = stored(settings, path)
    assert found.fingerprint == live.fingerprint
    for batch in expected:
        assert_same(batch, next(found))


def test_wrong_stores_and_settings_are_refused(shards: dict[str, list[str]], store: str, tmp_path: Path) -> None:
    settings = data([], sources=sources(shards, (1, 2)))
    alone = write_store(tmp_path / "alone", data([], sources=sources(shards)), ["image"])
    with pytest.raises(SettingsError, match="alone has no token ids"):
        StoredData.open(image=alone)
    with pytest.raises(SettingsError, match="alone has no text features, only image"):
        StoredData.open(text=alone)
    with pytest.raises(SettingsError, match=r"both have teacher\.image"):
        StoredData.open(teachers=[alone, store])
    assert StoredData.open(teachers=[alone, alone]).teachers == ["teacher"]
    with pytest.raises(SettingsError, match="has no source 'b'"):
        stored(settings, StoredData.open(image=alone, text=store))
    more = {"a": {**sources(shards)["a"], "shards": [*shards["a"], "/x/new.tar"]}}
    with pytest.raises(SettingsError, match=r"data.sources.a.shards: the feature store .* does not have /x/new.tar"):
        stored(data([], sources=more), store)
    with pytest.raises(SettingsError, match=r"data\.trace"):
        stored(settings.model_copy(update={"trace": 1}), store)


def test_keys_are_read_when_they_are_asked_for_and_a_closed_loader_ends_its_thread(
    shards: dict[str, list[str]], store: str
) -> None:
    settings = data([], sources=sources(shards))
    live, running = next(loader(settings)), stored(settings, store)
    found = next(running)
    keys = found.keys
    assert len(keys) == 12 and keys[3] == live.keys[3] and keys[:4] == live.keys[:4] and list(keys) == list(live.keys)
    assert pickle.loads(pickle.dumps(keys)) == live.keys and live.keys[0] in keys
    assert found.without_padding().keys == live.keys
    assert running.worker_pids() == [] and running.take_times().summary()["read"]["count"] >= 1
    (worker,) = running._workers
    for _ in range(2):
        running.close()
    assert isinstance(worker, ThreadWorker) and not worker.thread.is_alive()


def test_no_buffer_is_filled_while_it_is_copied(
    shards: dict[str, list[str]], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, copies = data([], sources=sources(shards, (1, 2)), prefetch=1), SlowCopies()
    plain = loader(settings)
    expected = [next(plain) for _ in range(16)]
    monkeypatch.setattr("clipstream.data.loader.loader.device_prefetch_for", lambda *_: copies)
    running = stored(settings, store)
    found = [next(running) for _ in range(16)]
    for copy in copies.copies.values():
        copy.join()
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def table(folder: Path) -> str:
    """A CSV of 60 pictures, some of which are missing or have no caption."""
    folder.mkdir()
    for number in (n for n in range(60) if n % 7):
        (folder / f"{number}.jpg").write_bytes(picture(number))
    rows = [f"{n}.jpg,{'' if n % 9 == 4 else f'text {n}'}" for n in range(60)]
    (folder / "rows.csv").write_text("\n".join(["filepath,title", *rows]))
    return str(folder / "rows.csv")


Trained = tuple[dict[str, Any], DataState, int]


@pytest.mark.parametrize(("kind", "mode"), [("tar", "resampled"), ("tar", "pad"), ("table", "pad"), ("stored", "pad")])
def test_counts_are_those_of_batches_that_were_trained_on(
    shards: dict[str, list[str]], store: str, tmp_path: Path, kind: str, mode: str
) -> None:
    """Also after a run was resumed, with more workers or ranks: what was filled ahead counts when it is trained on."""
    given = sources(shards, (1, 2))
    if kind == "table":
        given = {"a": {"shards": table(tmp_path / "table")}}
    elif kind == "tar" and mode == "resampled":
        (tmp_path / "broken.tar").write_bytes(Path(shards["a"][0]).read_bytes()[:20_000])
        (tmp_path / "no.tar").write_bytes(b"no tar")
        given["a"]["shards"] = [*shards["a"], str(tmp_path / "broken.tar"), str(tmp_path / "no.tar")]

    def train(steps: int, ranks: int, workers: int, before: Trained | None = None) -> Trained:
        settings = data([], sources=given, workers=workers, max_shard_failures=0.5, **MODES[mode])
        make = partial(stored, settings, store) if kind == "stored" else partial(loader, settings)
        running = [make(rank, ranks, None if before is None else before[1]) for rank in range(ranks)]
        used = 0
        for _ in range(steps):
            for one in running:
                used += int(next(one).weights.sum())
                one.mark_trained()
        state = DataState.merge([one.state() for one in running])
        for one in running:
            next(one)  # it is not trained on, as where a run is stopped
        counts = merge_counts([*([before[0]] if before else []), *(one.trained.counts() for one in running)])
        for one in running:
            one.close()
        return json.loads(json.dumps(counts)), state, used + (before[2] if before else 0)

    whole, _, used = train(23, 1, 0)
    assert sum(one["used"] for one in whole.values()) == used
    assert all(one["read"] == one["used"] + sum(one["dropped"].values()) for one in whole.values())
    alike, mixed = [(1, 2), (1, 2), (1, 2)], [(2, 0), (1, 3), (3, 1)]  # ranks and workers
    for layouts in (mixed, alike)[: 1 + (mode == "resampled")]:
        run = None
        for steps, (ranks, workers) in zip((4, 5, 14), layouts, strict=True):
            run = train(steps, ranks, workers, run)
        assert run is not None and run[2] == used
        for name, one in whole.items():
            assert run[0][name] == one, (name, layouts)
