"""The toy data: properties of its images and captions, safe and repeatable creation."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from PIL import Image

from clipstream.data.sources import toy_data
from clipstream.errors import SettingsError
from clipstream.storage.tar import Shard
from clipstream.utils.section import shipped_models

CONFIGS = Path(__file__).parents[2].parent / "configs"


def read(path: str) -> list[dict[str, bytes]]:
    """The samples of a tar, in order, as suffix -> bytes."""
    shard = Shard(path)
    return [shard.load(ref) for ref in shard.index.samples]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and shards of 40 samples."""
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(toy_data, "SHARD_SAMPLES", 40)
    monkeypatch.setattr(toy_data, "SHARDS", {"train": 2, "heldout": 1, "gallery": 1})
    toy_data.gallery_scenes.cache_clear()
    yield tmp_path
    toy_data.gallery_scenes.cache_clear()  # other tests of this process have the whole one


def test_members_and_held_out_pairs() -> None:
    pairs = toy_data.heldout_pairs()
    held = set(pairs)
    assert len(held) == len(pairs) == 20
    assert [{pair[i] for pair in held} for i in (0, 1)] == [set(toy_data.COLOURS), set(toy_data.SHAPES)]
    for split in ("train", "gallery"):
        for sample in read(toy_data.shards(split)[0]):
            assert set(sample) == {"jpg", "txt", "json"} and Image.open(io.BytesIO(sample["jpg"])).size == (64, 64)
            told = json.loads(sample["json"])
            assert told["caption"] == sample["txt"].decode() and len(told["captions"]) == 3
            assert len(told["groups"]) == (2 if told["where"] in ("left", "above") else 1)
            assert not any((group["colour"], group["shape"]) in held for group in told["groups"])
            assert not any(f" {colour} {shape}" in f" {sample['txt'].decode()}" for colour, shape in held)
    names = toy_data.classes()
    for sample in read(toy_data.shards("heldout")[0]):
        (group,) = json.loads(sample["json"])["groups"]
        assert names[int(sample["cls"])] == f"{group['colour']} {group['shape']}"


def test_the_gallery_denotes_different_scenes_none_of_them_in_training() -> None:
    gallery = toy_data.gallery_scenes()
    assert len(set(gallery)) == len(gallery) == 40
    assert len({sample["txt"] for sample in read(toy_data.shards("gallery")[0])}) == 40
    shown = {json.dumps(json.loads(s["json"])["groups"]) for path in toy_data.shards("train") for s in read(path)}
    pairs = [scene for scene in gallery if scene.where in ("left", "above")]
    assert pairs and not shown & {json.dumps([vars(group) for group in scene.groups]) for scene in pairs}


def test_written_once_with_the_same_bytes_also_by_ranks_at_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        told = pool.map(toy_data.shards, ["train"] * 3, chunksize=1)
    assert told[0] == told[1] == told[2] and [len(read(path)) for path in told[0]] == [40, 40]
    paths = [Path(path) for path in told[0]]
    first, made = [path.read_bytes() for path in paths], paths[0].stat().st_mtime_ns
    assert first[0] != first[1]
    assert toy_data.shards("train") == told[0] and paths[0].stat().st_mtime_ns == made
    assert sorted(entry.name for entry in paths[0].parent.parent.iterdir()) == ["train", "train.lock"]
    assert (paths[0].parent / "classnames.txt").read_text().split("\n")[:-1] == toy_data.classes()
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(small / "other"))
    assert [Path(path).read_bytes() for path in toy_data.shards("train")] == first


def test_a_process_killed_midway_leaves_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(toy_data, "draw_image", lambda *_: 1 / 0)
        toy_data.shards("gallery")
    assert len(read(toy_data.shards("gallery")[0])) == 40


def test_wrong_split_and_unwritable_cache_are_settings_errors(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="train, heldout, gallery"):
        toy_data.shards("test")
    (small / "file").write_text("")
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(small / "file"))
    with pytest.raises(SettingsError, match="CLIPSTREAM_CACHE"):
        toy_data.shards("train")


def test_every_shape_shows_its_colour_in_every_texture_and_size() -> None:
    for shape, texture, size in itertools.product(toy_data.SHAPES, toy_data.TEXTURES, toy_data.SIZES):
        scene = toy_data.Scene((toy_data.Group(1, size, "blue", texture, shape),), "in the middle")
        image = Image.open(io.BytesIO(toy_data.draw_image(scene, Random(1)))).convert("RGB")
        red, _, blue = np.asarray(image, dtype=int).transpose(2, 0, 1)
        assert (blue - red > 90).sum() >= 12, (shape, texture, size)


def test_quickstart_lists_the_classes_and_the_toy_splits() -> None:
    tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    zero_shot = [e for e in tree["evals"].values() if e["type"] == "zero_shot"]
    assert [e["classes"] for e in zero_shot] == [toy_data.classes()]
    assert tree["data"]["sources"]["train"]["shards"] == "toy:train"
    named = [
        yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["name"] for name in ("quickstart", "emoji")
    ]
    assert set(named) <= set(shipped_models())
