"""The toy data: properties of its images and captions, safe and repeatable creation."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from PIL import Image

from clipstream.data.sources import toy_data
from clipstream.errors import SettingsError
from tests.support.ranks import TIMEOUT

CONFIGS = Path(__file__).parents[2].parent / "configs"


def read(path: str) -> list[dict[str, bytes]]:
    """The samples of a tar, in order, as suffix -> bytes."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, suffix = member.name.split(".", 1)
            content = tar.extractfile(member)
            assert content is not None
            samples.setdefault(key, {})[suffix] = content.read()
    return list(samples.values())


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and shards of 40 samples."""
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(toy_data, "SHARD_SAMPLES", 40)
    monkeypatch.setattr(toy_data, "SHARDS", {"train": 2, "heldout": 1, "gallery": 1})
    toy_data.gallery_scenes.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def forget_small_gallery() -> object:
    """Leave no gallery of 40 scenes behind for other tests of this process."""
    yield
    toy_data.gallery_scenes.cache_clear()


def test_heldout_pairs_are_many_and_spread() -> None:
    pairs = toy_data.heldout_pairs()
    assert len(set(pairs)) == len(pairs) == 20
    assert {colour for colour, _ in pairs} == set(toy_data.COLOURS)
    assert {shape for _, shape in pairs} == set(toy_data.SHAPES)


def test_members_and_held_out_pairs() -> None:
    held = set(toy_data.heldout_pairs())
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
    captions = [sample["txt"] for sample in read(toy_data.shards("gallery")[0])]
    assert len(set(captions)) == 40
    shown = {json.dumps(json.loads(s["json"])["groups"]) for path in toy_data.shards("train") for s in read(path)}
    pairs = [scene for scene in gallery if scene.where in ("left", "above")]
    assert pairs
    assert not shown & {json.dumps([vars(group) for group in scene.groups]) for scene in pairs}


def test_written_once_with_the_same_bytes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(path) for path in toy_data.shards("train")]
    first, made = [path.read_bytes() for path in paths], paths[0].stat().st_mtime_ns
    assert first[0] != first[1]
    assert toy_data.shards("train") == [str(path) for path in paths] and paths[0].stat().st_mtime_ns == made
    assert sorted(entry.name for entry in paths[0].parent.parent.iterdir()) == ["train", "train.lock"]
    assert (paths[0].parent / "classnames.txt").read_text().split("\n")[:-1] == toy_data.classes()
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(small / "other"))
    assert [Path(path).read_bytes() for path in toy_data.shards("train")] == first


def test_ranks_that_call_at_once_get_one_whole_folder(small: Path) -> None:
    code = (
        "from clipstream.data.sources import toy_data \n"
        "toy_data.SHARD_SAMPLES = 40; toy_data.SHARDS = {'train': 2, 'heldout': 1, 'gallery': 1}\n"
        "print(*toy_data.shards('train'), sep=chr(10))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = {rank.communicate(timeout=TIMEOUT)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    (paths,) = told
    assert [len(read(path)) for path in paths.splitlines()] == [40, 40]


def test_a_process_killed_midway_leaves_nothing_that_counts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(toy_data, "draw_image", killed)
        with pytest.raises(KeyboardInterrupt):
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
    for shape in toy_data.SHAPES:
        for texture in toy_data.TEXTURES:
            for size in toy_data.SIZES:
                scene = toy_data.Scene((toy_data.Group(1, size, "blue", texture, shape),), "in the middle")
                picture = Image.open(io.BytesIO(toy_data.draw_image(scene, Random(1)))).convert("RGB")
                red, _, blue = np.asarray(picture, dtype=int).transpose(2, 0, 1)
                assert (blue - red > 90).sum() >= 12, (shape, texture, size)


def test_wording_follows_the_scene() -> None:
    first = toy_data.Group(2, "small", "green", "striped", "triangle")
    second = toy_data.Group(1, "large", "red", "plain", "circle")
    worded = {toy_data.word_scene(toy_data.Scene((first, second), "left"), Random(i), 1.0) for i in range(3000)}
    assert len(worded) > 50
    assert "two small green striped triangles left of a large red plain circle" in worded
    assert all("two" in text and "triangles" in text and "circle" in text for text in worded)


def test_quickstart_lists_the_classes_and_the_toy_splits() -> None:
    tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    zero_shot = [e for e in tree["evals"].values() if e["type"] == "zero_shot"]
    assert [e["classes"] for e in zero_shot] == [toy_data.classes()]
    assert tree["data"]["sources"]["train"]["shards"] == "toy:train"


@pytest.mark.parametrize("name", ["quickstart", "emoji"])
def test_configs_open_with_their_command_and_name_their_model(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"clipstream train --config configs/{name}.yaml" in head
    assert (CONFIGS.parent / yaml.safe_load(path.read_text())["model"]["name"]).is_file()
