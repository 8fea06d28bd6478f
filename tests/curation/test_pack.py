"""The verb pack: each sample once, the same bytes from any workers and after a kill, and what training reads."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipstream.cli.verbs.filter import main as filtered
from clipstream.cli.verbs.pack import main
from clipstream.config.settings import load
from clipstream.curation import pack as pack_module
from clipstream.curation.check import check
from clipstream.curation.duplicates import near_pairs
from clipstream.curation.pack import PackPlan, PackShard
from clipstream.curation.pack_shards import Packed
from clipstream.curation.sample_table import hashes_of, look_of
from clipstream.data.decode.captions import build_caption, candidates
from clipstream.data.shard_pass import PARTS
from clipstream.data.sources import indexes
from clipstream.storage.tar import Shard, scan
from clipstream.utils import atomic_write
from tests.support.commands import start_verb
from tests.support.forks import wait_until
from tests.support.image_files import save
from tests.support.pictures import make_shards, picture
from tests.support.sites import Site
from tests.support.tars import tar_bytes, write_tar

Samples = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, [13, 7, 20, 3, 16, 9])
    return str(folder)


def files(folder: Path) -> dict[str, bytes]:
    """All that must be the same; indexes have the times of the shards."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".index", ".lock"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.name != ".lock"}


def samples(*tars: Path) -> Samples:
    """All samples by key, which is unique."""
    found: Samples = {}
    for path in tars:
        shard = Shard(path)
        assert shard.index.fault is None and not {ref.key for ref in shard.index.samples} & set(found)
        found |= {ref.key: shard.load(ref) for ref in shard.index.samples}
        shard.close()
    return found


def packed(folder: Path, *argv: str) -> Samples:
    assert main([str(folder), *argv]) == 0
    tars = sorted(folder.rglob("*.tar"))
    for tar in tars:
        assert indexes.open_index(str(tar), None) == scan(tar), "the index beside it is right"
    sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {tar.relative_to(folder).as_posix(): hashlib.sha256(tar.read_bytes()).hexdigest() for tar in tars}
    assert not (folder / PARTS).exists()
    return samples(*tars)


def captions(folder: str, *flags: str) -> Counter[str]:
    """All that training may draw from a source."""
    source = load(["--train-data", folder, *flags]).data.sources["train"]
    extract, found = build_caption(source.caption), Counter[str]()
    for tar in sorted(Path(folder).glob("*.tar")):
        for sample in samples(tar).values():
            found.update(text for path in candidates(extract, sample) for text in path)
    return found


def test_each_sample_once_in_the_same_bytes(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [shards, "--shard-size", "10"]
    before = samples(*sorted(Path(shards).glob("*.tar")))
    after = packed(tmp_path / "1/x", *argv, "--executor", "local:1")
    assert after == before and list(after) != list(before)
    assert "train on them with: clipstream train --train-data" in capsys.readouterr().out
    sizes = json.loads((tmp_path / "1/x/sizes.json").read_text())
    assert sum(sizes.values()) == 68 and set(sizes.values()) == {9, 10} and len(sizes) == 7, "none is under-filled"
    for jobs in ("2", "4"):
        packed(tmp_path / jobs / "x", *argv, "--executor", f"local:{jobs}")
        assert files(tmp_path / jobs) == files(tmp_path / "1")
    other = packed(tmp_path / "other", *argv, "--seed", "1")
    assert other == before and list(other) != list(after)
    kept = packed(tmp_path / "kept", shards, "--order", "source", "--shard-size", "25KB")
    assert list(kept) == list(before)
    sizes = [path.stat().st_size for path in (tmp_path / "kept").glob("*.tar")]
    assert max(sizes) < 40_000 and len(sizes) > 5
    assert check(tmp_path / "1/x", samples=0).used == 68


def test_a_shard_for_each_of_the_sources(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With smaller images, as a copy to train on; other members stay."""
    before = [samples(path) for path in sorted(Path(shards).glob("*.tar"))]
    argv = [shards, "--shard-size", "source", "--size", "9", "--format", "webp"]
    packed(tmp_path / "x", *argv)
    after = [samples(path) for path in sorted((tmp_path / "x").glob("*.tar"))]
    assert "| images resized | 68 |" in (tmp_path / "x/README.md").read_text()
    for old, new in zip(before, after, strict=True):
        assert list(old) == list(new)
        for key, members in new.items():
            assert min(Image.open(io.BytesIO(members.pop("webp"))).size) == 9
            assert members == {name: data for name, data in old[key].items() if name != "jpg"}


def test_killed_at_any_time_it_goes_on_to_the_same_bytes(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--shard-size", "3", "--executor", "local:2", "--check-images", "decode"]
    packed(tmp_path / "a/x", shards, *argv)
    draw, target = random.Random(0), tmp_path / "b/x"
    for _ in range(3):
        killed = start_verb("pack", str(target), shards, *argv)
        wait_until(lambda: (target / PARTS).exists() or (target / "README.md").exists())
        time.sleep(draw.uniform(0, 0.2))
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    packed(target, shards, *argv)
    assert files(target) == files(tmp_path / "a/x")
    capsys.readouterr()
    packed(target, shards, *argv)
    assert "23 shards in" in (out := capsys.readouterr().out) and "complete since an earlier call" in out
    (target / "00003.tar").write_bytes(b"")
    (target / "00004.tar.index").unlink()
    packed(target, shards, *argv)
    assert files(target) == files(tmp_path / "a/x"), "what is damaged is written anew"


def test_a_source_in_place_of_the_new_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.csv").write_text("filepath,title\n")
    assert main([str(tmp_path / "pairs.csv"), str(tmp_path / "new")]) == 2
    assert "pairs.csv is a file: name the folder of the new shards first" in capsys.readouterr().err


def test_lists_of_another_pack_are_not_used(shards: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_text("<html>")
    out, other = tmp_path / "x", f"{shards}/00001.tar::{shards}/00003.tar"
    assert main([str(out), f"{shards}/00000.tar::{tmp_path}/bad.tar"]) == 3
    assert list((out / PARTS).glob("*/lists/*.list"))
    (out / "pack.json").unlink()
    assert len(packed(out, other)) == 10
    (out / "SHA256SUMS").unlink()
    assert len(packed(out, other)) == 10, "a pack without checksums is not complete"


def test_two_workers_write_one_shard(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others, plain = list[PackShard](), atomic_write.write

    def write(path: Path, parts: Iterable[Any]) -> tuple[int, str]:
        found = plain(path, parts)
        if others and ".index" in path.name:  # before this worker renames its index, another one is done
            assert isinstance(others.pop()(0), Packed)
        return found

    def run(do: Callable[[int], object], count: int, executor: str) -> Iterator[tuple[int, object]]:
        others.extend([do] if isinstance(do, PackShard) else [])
        yield from ((number, do(number)) for number in range(count))

    monkeypatch.setattr(atomic_write, "write", write)
    monkeypatch.setattr("clipstream.utils.executors.run", run)
    for out in (str(tmp_path / "x"), f"local://{tmp_path}/y"):
        assert main([out, shards]) == 0 and not others
    assert samples(tmp_path / "x/00000.tar") == samples(tmp_path / "y/00000.tar")
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.tmp"))


def test_a_shard_is_the_same_from_a_worker_that_unpickles_its_task(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(do: Callable[[int], object], count: int, executor: str) -> Iterator[tuple[int, object]]:
        for number in range(count):
            yield number, pickle.loads(pickle.dumps(do))(number)

    (tmp_path / "more.csv").write_text("key,title\n000001,more\n")
    argv = [shards, "--shard-size", "9", "--merge", f"{tmp_path}/more.csv", "--caption-json", "caption.en"]
    packed(tmp_path / "1/x", *argv)
    monkeypatch.setattr("clipstream.utils.executors.run", run)
    packed(tmp_path / "2/x", *argv)
    assert files(tmp_path / "1/x") == files(tmp_path / "2/x")


def test_another_plan_is_refused(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path / "x", shards)
    for argv, told in (([shards, "--seed", "1"], "differs in seed"), ([f"{shards}/00000.tar"], "differs in sources")):
        assert main([str(tmp_path / "x"), *argv]) == 2
        assert told in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    assert main([str(tmp_path / "mine"), shards]) == 2 and "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_every_source_is_read_with_default_flags(tmp_path: Path) -> None:
    """Folders with texts, class folders, tables and captions in JSON become jpg, txt, json and cls."""
    pairs, classes = tmp_path / "pairs/a.b", tmp_path / "classes"
    pairs.mkdir(parents=True)
    for number in range(4):
        (pairs / f"my cat.{number}.JPG").write_bytes(picture(number))
        (pairs / f"my cat.{number}.txt").write_text(f"text {number}")
        (classes / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        (classes / f"c{number % 2}/{number // 2}.png").write_bytes(picture(number, kind="PNG"))
    found = packed(tmp_path / "p", str(tmp_path / "pairs"))
    assert found == {f"a_b/my_cat_{n}": {"jpg": picture(n), "txt": f"text {n}".encode()} for n in range(4)}
    found = packed(tmp_path / "c", f"folder:{classes}")
    labels = Counter((sample["cls"], sample["class"]) for sample in found.values())
    assert labels == {(b"0", b"c0"): 2, (b"1", b"c1"): 2} and all("png" in sample for sample in found.values())
    assert set(found) == {f"{n:09d}-{n % 2}" for n in range(4)}, "keys that are not unique get numbers"
    with open(tmp_path / "t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["key", "image", "title", "score"])
        rows.writerows([[f"k{n}", pairs / f"my cat.{n}.JPG", f"title {n}", n / 2] for n in range(4)])
    found = packed(tmp_path / "t", str(tmp_path / "t.csv"))
    assert {key: (s["txt"], json.loads(s["json"])["score"]) for key, s in found.items()} == {
        f"k{n}": (f"title {n}".encode(), str(n / 2)) for n in range(4)
    }
    assert all(sample.keys() == {"jpg", "txt", "json"} for sample in found.values())
    texts = [{"caption": {"en": f"a {n}", "alt": [f"b {n}", "[c]"]}} for n in range(3)]
    images = [{"__key__": f"{n}", "jpg": picture(9), "img.png": picture(n, kind="PNG")} for n in range(3)]
    made = [{**one, "txt": "old", "json": json.dumps(text)} for one, text in zip(images, texts, strict=True)]
    write_tar(tmp_path / "j/0.tar", made)
    for flags in (["--caption-json", "caption.alt"], ["--caption-json", "caption.en"]):
        found = packed(tmp_path / flags[1], f"{tmp_path}/j", *flags, "--image-key", "img.png")
        assert captions(str(tmp_path / flags[1])) == captions(f"{tmp_path}/j", *flags)
        assert all(s.keys() == {"png", "txt", "json", "other.txt", "other.jpg"} for s in found.values())


def test_repairs_and_counts_what_it_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [{"__key__": f"{n}", "jpg": picture(n, 90), "txt": f"text {n}"} for n in range(8)]
    odd = [
        {"__key__": "8", "jpg": b"<html>", "txt": "x"},
        {"__key__": "9", "jpg": picture(1)},
        {"__key__": "z", "txt": "x"},
    ]
    write_tar(tmp_path / "s/0.tar", [*whole[:4], *odd])
    (tmp_path / "s/1.tar").write_bytes(tar_bytes(whole[4:])[:-11_000])
    found = packed(tmp_path / "x", f"{tmp_path}/s", "--size", "40", "--format", "webp", "--license", "CC-BY-4.0")
    assert set(found) == set("012345"), "the last whole header is that of sample 6"
    assert all(min(Image.open(io.BytesIO(s["webp"])).size) == 40 for s in found.values())
    out, card = capsys.readouterr().out, (tmp_path / "x/README.md").read_text()
    assert "damaged shards, of which intact samples are used: 1" in out and "truncated" in out
    assert all(f"dropped: {reason} | 1" in card for reason in ("undecodable_image", "no_caption", "no_image"))
    assert "images resized | 6" in card
    assert 'license: "CC-BY-4.0"' in card
    (tmp_path / "keep.txt").write_text("0\n0.tar/2\n")
    keep = ["--data.sources.train.keep", f"{tmp_path}/keep.txt"]
    assert set(packed(tmp_path / "y", f"{tmp_path}/s/0.tar", *keep)) == set("02")
    assert "not_kept" in capsys.readouterr().out
    (tmp_path / "s/2.tar").write_text("<html>")
    assert main([str(tmp_path / "z"), f"{tmp_path}/s"]) == 3 and "1 of 3 shards failed" in capsys.readouterr().err


def test_captions_are_merged_by_key(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "more.csv"
    table.write_text("key,title\n" + "".join(f"{n:06d},more {n}\n" for n in range(0, 80, 2)))
    found = packed(tmp_path / "x", shards, "--merge", str(table))
    assert len(found) == 68 and "captions are merged into 34 of 68 samples" in capsys.readouterr().out
    for key, sample in found.items():
        both = [f"picture {int(key)}", f"more {int(key)}"]
        assert sample["txt"].decode() == (both[0] if int(key) % 2 else json.dumps(both))
    table.write_text("key,title\nnone,more\n")
    assert main([str(tmp_path / "y"), shards, "--merge", str(table)]) == 3
    assert "such as '000000'" in capsys.readouterr().err


def test_validation_has_no_near_duplicates_and_no_shared_groups(tmp_path: Path) -> None:
    rows = []
    for number in range(60):
        image = Image.open(io.BytesIO(picture(number // 2, 64)))
        data, about = save(image, "JPEG", quality=95 if number % 2 else 60), json.dumps({"product": number // 2 // 3})
        rows.append({"__key__": f"{number}", "jpg": data, "txt": f"text {number}", "json": about})
    write_tar(tmp_path / "s/0.tar", rows)
    packed(tmp_path / "x", f"{tmp_path}/s", "--val-split", "0.3", "--group", "json:product", "--shard-size", "10")
    train, val = (samples(*sorted((tmp_path / "x" / part).glob("*.tar"))) for part in ("train", "val"))
    assert len(train) + len(val) == 60 and 6 <= len(val) <= 18
    looks = [hashes_of([look_of(s["jpg"], (0, 0, 0)).grey for s in part.values()]) for part in (train, val)]
    assert not set(looks[0].tolist()) & set(looks[1].tolist())
    both = np.unique(np.concatenate(looks))
    sides = np.isin(both, looks[1])
    assert all((sides[a] == sides[b]).all() for a, b in near_pairs(both))
    groups = [{json.loads(s["json"])["product"] for s in part.values()} for part in (train, val)]
    assert not groups[0] & groups[1]
    sizes = [json.loads((tmp_path / "x" / part / "sizes.json").read_text()) for part in ("train", "val")]
    assert sum(sum(one.values()) for one in sizes) == 60


def test_samples_of_a_class_are_on_both_sides_of_a_split(tmp_path: Path) -> None:
    rows = [{"__key__": f"{n}", "jpg": picture(n, 64), "cls": f"{n % 2}"} for n in range(40)]
    write_tar(tmp_path / "s/0.tar", rows)
    label = ["--data.sources.train.caption", "{type: label, label: cls, classes: [cat, dog]}"]
    packed(tmp_path / "x", f"{tmp_path}/s", "--val-split", "0.3", *label)
    for part in ("train", "val"):
        assert {one["cls"] for one in samples(*(tmp_path / "x" / part).glob("*.tar")).values()} == {b"0", b"1"}


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for n in range(40):
        (tmp_path / f"s/caf\udce9{n}.jpg").write_bytes(picture(n, 64))
        (tmp_path / f"s/caf\udce9{n}.txt").write_text(f"text {n}")
    assert len(packed(tmp_path / "x", f"{tmp_path}/s", "--val-split", "0.3")) == 40
    keep = str(tmp_path / "keep.parquet")
    assert filtered([f"{tmp_path}/s", "--where", "caption_chars = 6", "--out", keep]) == 0
    assert len(packed(tmp_path / "y", f"{tmp_path}/s", "--data.sources.train.keep", keep)) == 10


def test_urls_that_are_signed_anew_are_the_same_sources(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site := Site()).bodies["0.tar"] = (Path(shards) / "00000.tar").read_bytes()
    for day in "12":
        assert main([str(tmp_path / "x"), f"{site.root}/0.tar?X-Amz-Date={day}&X-Amz-Signature=s{day}"]) == 0
    assert "complete since an earlier call" in capsys.readouterr().out
    site.close()


def test_a_shard_that_left_the_cache_is_listed_again(shards: str, tmp_path: Path) -> None:
    bodies = [(Path(shards) / f"0000{n}.tar").read_bytes() for n in range(2)]
    (site := Site()).bodies |= {"0.tar": bodies[0], "1.tar": b"<html>"}
    argv = [f"{site.root}/{{0,1}}.tar", "--data.cache", str(tmp_path / "cache")]
    assert main([str(tmp_path / "x"), *argv]) == 3
    shutil.rmtree(tmp_path / "cache")
    site.bodies["1.tar"] = bodies[1]
    assert len(packed(tmp_path / "x", *argv)) == 20
    site.close()


def test_remote_shards_are_downloaded_once(shards: str, tmp_path: Path) -> None:
    site = Site()
    site.bodies = {path.name: path.read_bytes() for path in Path(shards).glob("*.tar")}
    small = ["--data.cache", str(tmp_path / "cache"), "--data.cache-gib", "1e-6"]  # of training: no shard fits
    found = packed(tmp_path / "x", f"{site.root}/{{00000..00005}}.tar", "--shard-size", "9", *small)
    assert not list((tmp_path / "cache").glob("*.tar"))
    assert found == samples(*sorted(Path(shards).glob("*.tar")))
    assert {name: n for name, n in site.asked.items() if "GET" in name} == {f"GET 0000{n}.tar": 1 for n in range(6)}
    site.close()


def test_a_remote_target(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path / "here/x", shards, "--shard-size", "9")
    out = f"local://{tmp_path}/there/x"
    argv = [out, shards, "--shard-size", "9"]
    assert main(argv) == 0
    assert files(tmp_path / "there/x") == files(tmp_path / "here/x")
    assert f"clipstream train --train-data '{out}/{{00000..00007}}.tar'" in capsys.readouterr().out
    (tmp_path / "there/x/00002.tar").unlink()
    (tmp_path / "there/x/00003.tar.index").unlink()
    assert main(argv) == 0 and "2 were written now" in capsys.readouterr().out
    assert files(tmp_path / "there/x") == files(tmp_path / "here/x")
    assert main([*argv, "--seed", "3"]) == 2 and "differs in seed" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--order", "source"], ["--shard-size", "source"], ["--merge", "{more}"]])
def test_a_tar_that_is_replaced_after_listing_is_an_error(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, other = make_shards(tmp_path / "old", [8, 8])
    (new,) = make_shards(tmp_path / "new", [9])
    made, more = pack_module._plan, write_tar(tmp_path / "more.tar", [{"__key__": "000003", "txt": "more"}])

    def plan(*args: Any) -> PackPlan:
        os.replace(new, old)
        return made(*args)

    monkeypatch.setattr(pack_module, "_plan", plan)
    argv = [str(tmp_path / "out"), old, other, "--executor", "local:1", *(flag.format(more=more) for flag in flags)]
    assert main(argv) == 3
    assert f"{old} has changed since its samples were listed: run the command again" in capsys.readouterr().err
    monkeypatch.undo()
    assert main([str(tmp_path / "out"), old, other]) == 2 and "differs in sources" in capsys.readouterr().err
    assert main([str(tmp_path / "again"), old, other]) == 0 and len(samples(*(tmp_path / "again").glob("*.tar"))) == 17


def test_a_missing_shard_is_named(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "x"), f"{shards}/{{00000,gone}}.tar", "--executor", "local:1"]) == 3
    assert f"listing: 1 of 2 shards failed:\n  missing: {shards}/gone.tar does not exist" in capsys.readouterr().err


def test_a_plan_covers_all_samples_in_bounded_memory() -> None:
    held = np.array([0, 5, 6, 99], np.int64)
    for kept in (None, held):
        plan = PackPlan(np.array([10, 10, 63, 100]), 7, True, 3, True, kept)
        numbers = [plan.shard(number) for number in range(len(plan))]
        assert sorted(np.concatenate([found for _, found in numbers]).tolist()) == list(range(100))
        assert {name[:4] for name, found in numbers if set(found.tolist()) & set(held.tolist())} != {"trai"}
    large = PackPlan(np.arange(10_000, 100_000_001, 10_000), 10_000, True, 0, True)
    tracemalloc.start()
    _, found = large.shard(7777)
    shard, row = next(large.places(found))
    assert len(set(found.tolist())) == 10_000 and shard * 10_000 + row == found[0]
    assert tracemalloc.get_traced_memory()[1] < 16 << 20, "of a shard's samples alone"
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "missing OUT"),
        (["{tmp}/x"], "missing SOURCE"),
        (["{tmp}/x", "0.tar", "--shard-size", "5XB"], "--shard-size: expected"),
        (["{tmp}/x", "0.tar", "--quality", "5"], "--quality: requires"),
        (["{tmp}/x", "0.tar", "--size", "0"], "--size"),
        (["{tmp}/x", "0.tar", "--format", "gif"], "--format: 'gif' is not one of keep, jpg, webp, png"),
        (["{tmp}/x", "0.tar", "--shard-size", "source", "--order", "shuffled"], "--order: not supported with"),
        (["{tmp}/x", "0.tar", "--group", "json:a"], "--group: requires --val-split"),
        (["{tmp}/x", "0.tar", "--val-split", "0.2", "--merge", "0.csv"], "does not compare the captions of --merge"),
        (["{tmp}/x", "0.tar", "--val-split", "2"], "--val-split: expected a number below 1"),
    ],
)
def test_wrong_usage(argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("{tmp}", str(tmp_path)) for word in argv]) == 2
    assert told in capsys.readouterr().err
