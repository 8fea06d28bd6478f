"""Held-out samples: groups of the same caption, file or look, the same for any number of ranks, and their lists."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipstream.cli.main import main
from clipstream.config.settings import read
from clipstream.config.validate import validate_run
from clipstream.curation.duplicates import NEAR, choose, make_held_out, near_pairs
from clipstream.curation.sample_table import caption_hash, hashes_of, look_of
from clipstream.data.decode.key_lists import KeyList
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support.image_files import save
from tests.support.pictures import photo, picture
from tests.support.runs import MODEL, flags, go, lines
from tests.support.tars import write_tar


def differing(one: int, other: int) -> int:
    return (one ^ other).bit_count()


@given(st.integers(0, 1 << 32), st.integers(2, 300))
@settings(max_examples=20, deadline=None)
def test_all_near_pairs_are_found(seed: int, count: int) -> None:
    random = Random(seed)
    found = {random.getrandbits(64) for _ in range(count // 2)}
    for look in random.choices(sorted(found), k=count):  # copies with up to 8 bits flipped
        found.add(look ^ sum(1 << bit for bit in random.sample(range(64), random.randrange(9))))
    hashes = np.array(sorted(found), np.uint64)
    near = {
        frozenset(pair) for parts in near_pairs(hashes) for pair in zip(*(part.tolist() for part in parts), strict=True)
    }
    numbers = itertools.combinations(range(len(hashes)), 2)
    assert near == {frozenset(p) for p in numbers if differing(int(hashes[p[0]]), int(hashes[p[1]])) <= NEAR}


@given(st.integers(0, 1 << 32), st.integers(10, 200), st.floats(0.05, 0.5))
@settings(max_examples=30, deadline=None)
def test_a_group_is_on_one_side(seed: int, count: int, share: float) -> None:
    random = Random(seed)
    names = [f"{n % 3}.tar/{random.randrange(count)}" for n in range(count)]
    captions = [random.sample(range(3 * count), random.randrange(1, 3)) for _ in names]
    columns = {"image_hash": [random.getrandbits(64) for _ in names], "caption_hash": [one[0] for one in captions],
               "file_hash": [random.randrange(4 * count) for _ in names], "other_hashes": [one[1:] for one in captions],
               "group": [random.randrange(5 * count) for _ in names]}  # fmt: skip
    kinds = [pa.list_(pa.uint64()) if name == "other_hashes" else pa.uint64() for name in columns]
    rows = pa.table(columns, pa.schema(list(zip(columns, kinds, strict=True))))
    held, said = choose(names, rows, share)
    assert (
        choose(names[::-1], rows.take([*range(count)][::-1]), share)[0] == held
    )  # the order of shards does not matter
    if held is None:
        assert "can be held out" in said
        return
    alone = zip(names, *(columns[name] for name in ("file_hash", "image_hash", "group")), strict=True)
    marks = [{*enumerate(one), *((4, text) for text in texts)} for one, texts in zip(alone, captions, strict=True)]
    sides = [[of for name, of in zip(names, marks, strict=True) if (name in held) == side] for side in (True, False)]
    assert len(sides[0]) == len(held) <= round(share * count) and f"{len(held):,} of {count:,} samples" in said
    assert not set().union(*sides[0]) & set().union(*sides[1])
    if ", the largest of 1;" in said:
        assert len(held) == round(share * count)


def test_images_that_are_near_by_chance_are_no_group() -> None:
    random, looks = Random(0), [0]
    for _ in range(99):  # each is near the one before
        looks.append(looks[-1] ^ sum(1 << bit for bit in random.sample(range(64), 7)))
    rows = pa.table({"image_hash": pa.array(looks * 2, pa.uint64()), "file_hash": range(200)})
    held, said = choose([f"0.tar/{number}" for number in range(200)], rows, 0.2)
    assert "(of at most 6 differing bits)" in said and held is not None and len(held) == 40
    assert {int(name[6:]) % 100 for name in held} == {int(name[6:]) for name in held if int(name[6:]) < 100}


def test_copies_of_one_image_are_no_chain() -> None:
    looks = [0] * 60 + [(n << 32) * 0x9E3779B9 % 2**64 | 1 for n in range(1, 71) for _ in range(2)]
    looks[61::2] = [look ^ 0b1111110 for look in looks[61::2]]  # near the one before
    rows = pa.table({"image_hash": pa.array(looks, pa.uint64()), "file_hash": range(200)})
    held, said = choose([f"0.tar/{number}" for number in range(200)], rows, 0.2)
    numbers = {int(name[6:]) for name in held or ()}
    assert "(of at most 8 differing bits)" in said and len(numbers) == 40 and min(numbers) >= 60
    assert {number ^ 1 for number in numbers} == numbers


def hash_alone(image: Image.Image, kind: str = "JPEG", **options: int) -> int:
    return int(hashes_of([look_of(save(image, kind, **options), (255, 255, 255)).grey])[0])


def test_a_copy_looks_alike_and_another_image_does_not() -> None:
    looks = []
    for seed in range(12):
        image = photo(seed)
        looks.append(hash_alone(image, "PNG"))
        large = image.resize((517, 407))  # decoded at an eighth
        for copy in (image.resize((64, 50)), image.convert("L"), large, image.crop((3, 3, 125, 125))):
            assert differing(looks[-1], hash_alone(copy)) <= NEAR
        assert differing(looks[-1], hash_alone(image, quality=40)) <= NEAR
    assert all(differing(one, other) > 2 * NEAR for one, other in itertools.combinations(looks, 2))


def write_pairs(folder: Path) -> None:
    """Two shards of 30 samples with the same keys: captions repeat over shards, and images are copied there."""
    for shard in range(2):
        samples = []
        for number in range(30):
            image = photo(number if number < 10 else 100 + number + 30 * shard)
            words = ("A  text" if shard else "a text", number) if number > 25 else ("a text", number + 30 * shard)
            data = save(image, "JPEG", quality=95 - 40 * shard)
            samples.append({"__key__": f"{number:03d}", "jpg": data, "txt": "{} {}".format(*words)})
        write_tar(folder / "pairs" / f"{shard:05d}.tar", samples)
    (folder / "model.json").write_text(json.dumps(MODEL))


def test_runs_hold_out_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    shards = ["--train-data", f"{tmp_path}/pairs", "--val-split=0.2", "--workers=0", "--evals.val.every=1"]
    go(flags(tmp_path, "one", *shards, steps=2))
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "another"))
    go(flags(tmp_path, "two", *shards, steps=2), 2)
    one, two = (tmp_path / "runs" / name / "val_split.txt" for name in ("one", "two"))
    text, (head, *held) = one.read_text(), one.read_text().splitlines()
    assert head == "# 12 of 60 usable samples"
    assert two.read_text() == text and len(held) == len(set(held)) == 12
    for name in held:  # captions and images of these numbers are in both shards
        shard, _, key = name.partition(".tar/")
        if int(key) < 10 or int(key) > 25:
            assert f"{1 - int(shard):05d}.tar/{key}" in held
    (line,) = [line for line in lines(tmp_path, "two", "eval") if line["step"] == 2]
    assert line["n"] == 12 and line["dropped"] == 0
    config = yaml.safe_load((tmp_path / "runs/two/config.yaml").read_text())
    assert config["data"]["val_split"] is None and config["data"]["sources"]["train"]["drop"] == str(two)
    assert config["evals"]["val"]["data"]["keep"] == str(two) and KeyList(str(two), "train").holds(held[0], "")
    evaluate = ["evaluate", "--checkpoint", f"{tmp_path}/runs/one", "--workers=0"]
    assert main(evaluate) == 0
    other = ["--val-data", f"{tmp_path}/pairs/00000.tar", "--output", f"{tmp_path}/other.jsonl"]
    assert main([*evaluate, *other]) == 0  # of which all samples count
    assert json.loads((tmp_path / "other.jsonl").read_text())["n"] == 30
    # A resumed run keeps its list, also where the data have changed.
    write_tar(tmp_path / "pairs" / "00002.tar", [{"__key__": "0", "jpg": picture(0), "txt": "new"}])
    near = "--resume-approximate"
    go(flags(tmp_path, "one", *shards, "--resume=latest", near, steps=3))
    assert one.read_text() == text
    capsys.readouterr()
    first = f"--resume={tmp_path}/runs/one"
    go(flags(tmp_path, "three", *shards, first, near, "--val-split=0.3", steps=4))
    assert f"val_split 12 samples held out for the evaluator val, as in {tmp_path}/runs/one" in capsys.readouterr().out
    assert (tmp_path / "runs/three/val_split.txt").read_text() == text
    # It must not train on what it holds out.
    argv = flags(tmp_path, "one", *(word for word in shards if "val" not in word), "--resume=latest", near, steps=5)
    assert main(["train", *argv]) == 2 and "one holds samples out of its training data" in capsys.readouterr().err
    # One that has trained on all samples cannot hold out some.
    one.unlink()
    for name, resume in (("one", "--resume=latest"), ("four", first)):
        assert main(["train", *flags(tmp_path, name, *shards, resume, near, steps=5)]) == 2
        assert f"not supported with --resume of {tmp_path}/runs/one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--val-data=a.tar"], "not supported with data of the evaluator val"),
        (["--data.sources.b.shards=a.tar"], "not supported with several sources"),
        (["--data.sources.train.drop=x.txt"], "not supported with data.sources.train.drop"),
        (["--val-split=1.5"], "--val-split"),
        (["--evals.val=null"], "requires the evaluator val"),
    ],
)
def test_what_does_not_go_together_is_told(more: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        validate_run(read(["--train-data=a.tar", "--steps=2", "--val-split=0.1", *more]), World())


def test_captions_are_compared_by_their_characters() -> None:
    assert len({caption_hash(text) for text in ("cafe\u0301  1", "CAF\u00c9 \uff11", "caf\u00e9\u00a01")}) == 1


def test_a_list_is_chosen_again_where_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "held").mkdir()
    for number in range(20):
        (folder / f"{number}.png").write_bytes(save(photo(number)))
        (folder / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "keep.txt").write_text("".join(f"{number}\n" for number in range(20)))
    for keep in (None, str(tmp_path / "keep.txt")):
        source = SourceSettings(shards=str(folder), keep=keep)
        before = make_held_out(source, 0.2, DataSettings(), "data.sources.train")
        assert make_held_out(source, 0.2, DataSettings(), "data.sources.train") == before
        (folder / "0.txt").write_text(f"another text {keep}")
        assert make_held_out(source, 0.2, DataSettings(), "data.sources.train") != before
    with pytest.raises(SettingsError, match="none of 20 samples is usable: 20 x image_too_large"):
        make_held_out(source, 0.2, DataSettings(max_image_pixels=100), "data.sources.train")
    for file in folder.glob("*.txt"):
        file.write_text("the same")
    with pytest.raises(SettingsError, match=r"only 0 of 20 usable samples can be held out \(share 0\.2, 1 group"):
        make_held_out(source, 0.2, DataSettings(), "data.sources.train")


def test_a_list_of_a_part_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    source = SourceSettings(shards=f"{tmp_path}/pairs/{{00000..00002}}.tar")
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"1 of 3 shards cannot be compared .*00002\.tar"):
            make_held_out(source, 0.2, DataSettings(), "data.sources.train")
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "model.json"))
    with pytest.raises(SettingsError, match=r"cannot create .* CLIPSTREAM_CACHE"):
        make_held_out(source, 0.2, DataSettings(), "data.sources.train")
