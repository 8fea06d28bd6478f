"""The verb `precompute`: what the store holds, what another command adds, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipstream.cli.verbs.precompute import main
from clipstream.data.decode.images import EvalTransform
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from clipstream.errors import DataError, SettingsError, Stopped
from clipstream.features.manifest import decode_rows
from clipstream.features.store import FeatureStore, StoredSource
from clipstream.features.stored_rows import StoredRows
from clipstream.models.towers import Towers
from clipstream.precompute.run import ChunkComputer
from tests.support import hubtree
from tests.support.forks import TIMEOUT, fork_server, wait_until
from tests.support.model_files import build, write
from tests.support.pictures import make_shards, picture
from tests.support.ranks import end_ranks, launched
from tests.support.savers import damage, fill, small_disk
from tests.support.tars import write_tar

SMALL = {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
COUNTS = [7, 5, 9, 6, 4, 8, 5, 7]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight shards, of which one has samples that cannot be used, one of two chunks, and a model."""
    folder = tmp_path_factory.mktemp("precompute")
    make_shards(folder / "pairs", COUNTS)
    samples: list[dict[str, Any]] = [
        {"__key__": "a/first", "jpg": picture(200), "txt": "one"},
        {"__key__": "broken", "jpg": b"\xff\xd8 no picture", "txt": "two"},
        {"__key__": "silent", "jpg": picture(201)},
        {"__key__": "last", "jpg": picture(202), "txt": "four"},
    ]
    write_tar(folder / "pairs" / "00002.tar", samples)
    file = picture(1, size=8)
    write_tar(folder / "long.tar", [{"__key__": f"{n:05d}", "jpg": file, "txt": f"{n}"} for n in range(4100)])
    (folder / "model.json").write_text(Path(write(folder, SMALL)).read_text())
    return folder


def argv(place: Path, store: Path, *more: str, shards: str = "pairs/{00000..00007}.tar") -> list[str]:
    """A command line whose arithmetic does not depend on the processor."""
    return [
        str(store), "--train-data", f"{place}/{shards}", "--model", f"{place}/model.json", "--device", "cpu",
        "--run.threads", "1", "--precision", "fp32", "--workers", "1", "--batch-size", "4", "--dtype", "float32",
        *(more or ("--towers", "both")),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def of_images(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the images' features, for tests that change a copy of it."""
    store = tmp_path_factory.mktemp("of_images") / "s"
    assert main(argv(place, store, "--towers", "image")) == 0
    return store


@pytest.fixture
def store(of_images: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_images, tmp_path / "s"))


def opened(store: Path) -> StoredSource:
    source = FeatureStore(store).source("train")
    for shard in range(len(FeatureStore(store).manifest.sources["train"].shards)):
        source.hold(shard)
    return source


def numbers(source: StoredSource, shard: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return source.base(shard) + np.arange(source.samples_of(shard))


def images_of(source: StoredSource, shard: int, view: int = 0, part: str = "image") -> torch.Tensor:
    samples = numbers(source, shard)
    return decode_rows(source.gather(part, source.view_rows(samples, np.full(len(samples), view))))


def files(store: Path) -> dict[str, bytes]:
    """The content of all files of a store but its lock."""
    found = {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name != ".lock"}


def encoded(towers: Towers, pixels: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    with torch.no_grad():
        return towers.eval().encode_image(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))


def test_a_store_holds_what_the_towers_give(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv(place, tmp_path / "s")) == 0
    out = capsys.readouterr()
    assert "46 samples read now, 44 used" in out.out
    assert "dropped: undecodable_image, e.g. 00002.tar/broken" in out.out and "dropped: no_caption" in out.out
    assert "its features are random" in out.err

    source, towers = opened(tmp_path / "s"), build(str(place / "model.json"))
    assert source.keys(2) == ["a/first", "broken", "silent", "last"]
    assert [captions for _, captions in source.texts(2)] == [["one"], [], [], ["four"]]
    assert source.reasons(2) == ["", "undecodable_image", "no_caption", ""]
    rows = source.sample_rows(numbers(source, 2))
    assert rows["used"].tolist() == [1, 0, 0, 1]
    transform = EvalTransform(towers.image, "white")
    live = encoded(towers, [transform(picture(200)), transform(picture(202))])
    stored = images_of(source, 2)
    assert torch.allclose(stored[[0, 3]], live, atol=1e-6)
    assert not stored[1:3].any()

    captions = source.caption_rows(numbers(source, 2)[[0, 3]], np.zeros(2, np.int64))
    ids = source.gather("ids", captions)
    assert ids.dtype == torch.uint16
    assert torch.equal(ids.long(), towers.open_clip_tokenizer()(["one", "four"]))
    with torch.no_grad():
        texts = towers.encode_text(ids.long())
    assert torch.allclose(decode_rows(source.gather("text", captions)), texts, atol=1e-6)
    modes = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "s").rglob("*") if path.suffix in (".json", ".safetensors")
    }
    assert len(modes) == 1, "whoever can read the store can read its model"
    same = build(f"local-dir:{tmp_path}/s/model")
    assert torch.equal(same.clip.visual.conv1.weight, towers.clip.visual.conv1.weight)


def test_the_views_are_those_of_their_keys(place: Path, tmp_path: Path) -> None:
    augment = ("--data.augment.scale", "[0.3, 0.9]", "--data.augment.flip", "0.5")
    assert main(argv(place, tmp_path / "s", "--towers", "image", "--views", "3", *augment)) == 0
    source, towers = opened(tmp_path / "s"), build(str(place / "model.json"))
    transform = TrainTransform(towers.image, AugmentSettings(scale=(0.3, 0.9), flip=0.5), "white")
    rows = source.sample_rows(numbers(source, 1))
    assert rows["views"].shape == (5, 3) and len(np.unique(rows["views"])) == 15
    for view in range(3):
        keys = rows["views"][:, view].tolist()
        live = encoded(towers, [transform(picture(7 + i), SampleRNG(key)) for i, key in enumerate(keys)])
        assert torch.allclose(images_of(source, 1, view), live, atol=1e-6)
    assert not torch.allclose(images_of(source, 1, 0), images_of(source, 1, 1), atol=1e-3)
    transform_of = FeatureStore(tmp_path / "s").manifest.parts["image"].fingerprint["transform"]
    assert transform_of == {  # of all versions: training refuses a store whose record differs
        "views": 3, "seed": 0, "decoder": "fast",
        "augment": {
            "scale": [0.3, 0.9], "ratio": [0.75, 4 / 3], "max_aspect": 20.0, "interpolation": "bicubic", "flip": 0.5,
            "color_jitter": None, "color_jitter_prob": 0.0, "gray_scale_prob": 0.0,
        },
    }  # fmt: skip


def test_all_captions_of_a_picture_are_stored(place: Path, tmp_path: Path) -> None:
    alts = [json.dumps({"alt": [f"alt {n} {i}" for i in range(n)], "en": "x"}) for n in range(3)]
    write_tar(place / "many.tar", [{"__key__": f"{n}", "jpg": picture(n), "json": alts[n]} for n in range(3)])
    caption = "{type: json, path: [en, alt], weights: [1, 3]}"
    more = ("--towers", "text", "--data.sources.train.caption", caption)
    assert main(argv(place, tmp_path / "s", *more, shards="many.tar")) == 0
    source = opened(tmp_path / "s")
    assert FeatureStore(tmp_path / "s").manifest.sources["train"].weights == (1.0, 3.0)
    assert source.sample_rows(numbers(source, 0))["counts"].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert [captions for _, captions in source.texts(0)] == [["x"], ["x", "alt 1 0"], ["x", "alt 2 0", "alt 2 1"]]
    towers = build(str(place / "model.json"))
    row = source.caption_rows(numbers(source, 0)[2:], np.array([2]))
    with torch.no_grad():
        live = towers.eval().encode_text(towers.open_clip_tokenizer()(["alt 2 1"]))
    assert torch.allclose(decode_rows(source.gather("text", row)), live, atol=1e-6)


def test_teachers_have_their_own_pictures_and_tokenizer(
    place: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertConfig, BertModel

    base = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=2000)
    )
    base.save_pretrained(tmp_path / "base")
    hubtree.write_tokenizer(tmp_path / "base")
    here = str(tmp_path / "base")
    text = {"hf_model_name": here, "hf_tokenizer_name": here, "hf_pooler_type": "mean_pooler", "context_length": 12}
    config = {"embed_dim": 24, "vision_cfg": {"timm_model_name": "test_convnext", "image_size": 64}, "text_cfg": text}
    (tmp_path / "hf.json").write_text(json.dumps(config))
    before = files(store)
    # A teacher is added to a complete store, whose chunks stay as they are.
    assert main(argv(place, store, "--teacher", f"big={tmp_path}/hf.json", "--random-weights")) == 0
    after = files(store)
    assert all(after[name] == data for name, data in before.items() if name != "store.json")
    source, towers = opened(store), build(str(tmp_path / "hf.json"))
    transform = EvalTransform(towers.image, "white")
    live = encoded(towers, [transform(picture(n)) for n in range(7)])
    assert torch.allclose(images_of(source, 0, part="big.image"), live, atol=1e-5)
    rows = source.caption_rows(numbers(source, 0), np.zeros(7, np.int64))
    with torch.no_grad():
        texts = towers.encode_text(towers.open_clip_tokenizer()([f"picture {n}" for n in range(7)]))
    assert torch.allclose(decode_rows(source.gather("big.text", rows)), texts, atol=1e-5)
    info = FeatureStore(store).manifest.parts["big.text"]
    assert info.logit_scale == pytest.approx(float(towers.scalars()[0].detach()))

    for wrong, said in (
        (f"big={tmp_path}/hf.json", "has no weights: use big="),
        ("image=ViT-B-32", "the name image is already used"),
        ("big=ViT-B-31", "--teacher big: "),
    ):
        assert main(argv(place, store, "--teacher", wrong)) == SettingsError.exit_code
        assert said in capsys.readouterr().err


def test_another_tower_is_an_error_that_names_the_difference(
    place: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(store)
    for more, said in (
        (("--seed", "1"), "weights"),
        (("--precision", "fp64"), "precision"),
        (("--force-image-size", "24"), "size"),
        (("--views", "2"), "views"),
        (("--data.sources.train.background", "black"), "background"),
        (("--caption-key", "json"), "caption"),
    ):
        assert main(argv(place, store, "--towers", "image", *more)) == SettingsError.exit_code
        assert said in capsys.readouterr().err
    assert files(store) == before


def test_what_is_damaged_is_made_again_and_another_model_refused(
    place: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, weights = files(store), store / "model/open_clip_model.safetensors"
    (store / "samples/train/00005-0000.safetensors").unlink()
    damage(store / "image/train/00003-0000.safetensors")
    for spoil in (lambda: damage(weights), lambda: os.truncate(weights, 1000), lambda: os.truncate(weights, 0)):
        spoil()
        assert main(argv(place, store, "--towers", "image")) == 0
        assert files(store) == before
    damage(weights)
    assert main(argv(place, store, "--towers", "text", "--seed", "1")) == SettingsError.exit_code
    assert f"the image features in {store} were computed with other weights" in capsys.readouterr().err


def test_a_shard_that_changed_before_a_part_was_added(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, shard = tmp_path / "s", "changing.tar"
    shutil.copy(place / "pairs/00000.tar", place / shard)
    assert main(argv(place, store, "--towers", "image", shards=shard)) == 0
    before = files(store)
    shutil.copy(place / "pairs/00004.tar", place / shard)
    assert main(argv(place, store, "--towers", "text", shards=shard)) == DataError.exit_code
    assert f"{shard} has changed since features of it were computed" in capsys.readouterr().err
    assert before.items() <= files(store).items()


def test_shards_that_cannot_be_opened(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv(place, tmp_path / "s", shards="pairs/{00007..00008}.tar")) == 0
    assert "00008.tar" in capsys.readouterr().out
    shards = FeatureStore(tmp_path / "s").manifest.sources["train"].shards
    assert [shard.samples for shard in shards] == [7, 0]
    assert "missing" in shards[1].reason and not shards[0].reason
    assert main(argv(place, tmp_path / "t", shards="pairs/{00008..00009}.tar")) == DataError.exit_code
    assert "none of the 2 shards" in capsys.readouterr().err
    write_tar(place / "bad.tar", [{"__key__": "a", "jpg": b"no picture", "txt": "x"}])
    assert main(argv(place, tmp_path / "u", shards="bad.tar")) == DataError.exit_code
    assert "undecodable_image" in capsys.readouterr().err


def test_a_full_disk_loses_nothing(
    place: Path, of_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk := tmp_path / "disk").mkdir()
    with small_disk(disk, "8M"):
        model = sum(len(data) for name, data in files(of_images).items() if name.startswith("model/"))
        ballast = fill(disk, model + 96 * 1024)
        assert main(argv(place, disk / "s", "--towers", "image")) == SettingsError.exit_code
        said = capsys.readouterr().err
        assert "cannot be written" in said and "free space" in said and "rerun the same" in said
        ballast.unlink()
        assert main(argv(place, disk / "s", "--towers", "image")) == 0
        assert files(disk / "s") == files(of_images)


def run_slowly(command: list[str], errors: str) -> None:
    """The verb in a process of its own, for minutes."""
    add = ChunkComputer.add

    def add_slowly(*given: Any) -> int:
        time.sleep(0.1)
        return add(*given)

    ChunkComputer.add = add_slowly  # type: ignore[method-assign]
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    raise SystemExit(main(command))


def chunks_in(store: Path) -> int:
    # os.walk, unlike rglob, does not mind a folder that is renamed meanwhile.
    return sum(name.endswith(".safetensors") for _, _, names in os.walk(store) for name in names)


def stop(command: list[str], store: Path, errors: Path, number: signal.Signals) -> int | None:
    """Run the verb until some more chunks are written, and send it a signal; its exit code."""
    process: Any = fork_server().Process(target=run_slowly, args=(command, str(errors)))
    wanted = chunks_in(store) + 4
    process.start()
    wait_until(lambda: chunks_in(store) >= wanted or not process.is_alive())
    assert process.is_alive(), errors.read_text()
    os.kill(process.pid, number)
    process.join(TIMEOUT)
    code: int | None = process.exitcode
    return code


def test_a_killed_command_and_a_stopped_one_are_continued(place: Path, tmp_path: Path) -> None:
    more = ("--towers", "both", "--views", "2", "--batch-size", "3")
    assert main(argv(place, tmp_path / "whole", *more)) == 0
    store, errors = tmp_path / "s", tmp_path / "errors"
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, Stopped.exit_code)):
        assert stop(argv(place, store, *more), store, errors, number) == code, errors.read_text()
    assert "rerun the same command to continue" in errors.read_text() and "SIGTERM: stopping" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    written = {path: path.stat().st_mtime_ns for path in (store / "texts").rglob("*.safetensors")}
    assert main(argv(place, store, *more)) == 0
    assert files(store) == files(tmp_path / "whole")
    assert sum(path.stat().st_mtime_ns == at for path, at in written.items()) >= len(written) - 1


def test_two_ranks_give_the_store_of_one_process(place: Path, tmp_path: Path) -> None:
    """Eight shards, which the ranks take in turn; and one of two chunks, which are dealt out."""
    flags = ["--towers", "both", "--chunk-rows", "4096", "--batch-size", "512"]
    flags += ["--data.sources.long.shards", f"{place}/long.tar"]
    assert main(argv(place, tmp_path / "one", *flags)) == 0
    ends = end_ranks(2, launched, main, argv(place, tmp_path / "two", *flags))
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(list((tmp_path / "two/image/long").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("s --dtype float32", "--towers image, text or both"),
        ("s --towers images", "--towers: 'images' is not one of image, text, both"),
        ("s --towers image --dtype fp8", "--dtype: 'fp8' is not one of float32, "),
        ("s --towers image --chunk-rows 5000", "multiple of 4096"),
        ("s --towers image --views -1", "--views: expected"),
        ("s --teacher t", "--teacher: expected NAME=MODEL"),
        ("s --teacher a=RN50 --teacher A=RN50", "the name A is already used"),
        ("http://host/s --towers image", "http://host/s is a URL"),
        ("--towers image", "missing STORE"),
    ],
)
def test_wrong_flags(words: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--train-data=a.tar"]) == SettingsError.exit_code
    assert said in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_no_training_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["s", "--towers", "image"]) == SettingsError.exit_code
    assert "no training data" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["table", "folder", "tar"])
def test_what_failed_is_not_done(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    def write(good: int) -> None:
        """The images and the texts of the first `good` samples, broken ones of the others."""
        for n in range(6):
            data = picture(n) if n < good else b"broken"
            (tmp_path / f"d/{n}.jpg").write_bytes(data)
            (tmp_path / f"d/{n}.txt").write_text(f"text {n}")
        (tmp_path / "t.csv").write_text("filepath,title\n" + "".join(f"d/{n}.jpg,text {n}\n" for n in range(6)))
        samples = [
            {"__key__": f"{n}", "jpg": (tmp_path / f"d/{n}.jpg").read_bytes(), "txt": f"text {n}"} for n in range(6)
        ]
        write_tar(tmp_path / "0.tar", samples)

    (tmp_path / "d").mkdir()
    shards, store = {"table": "t.csv", "folder": "d", "tar": "0.tar"}[kind], tmp_path / "s"
    command = argv(tmp_path, store, shards=shards)
    command[command.index("--model") + 1] = f"{place}/model.json"
    used = []
    for good, calls in ((0, 2), (4, 2), (6, 1)):
        write(good)
        for _ in range(calls):  # again without a change
            assert main(command) == (0 if good else 3)
            assert good or "no sample is usable" in (said := capsys.readouterr().err) or "has no rows" in said
        if good:
            used.append(len(StoredRows(FeatureStore(store))))
    assert used == [4, 6]
