"""The sample table: its columns, drops with their reasons, and what is done again after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

from clipstream.config.settings import load
from clipstream.curation.sample_table import Columns, SampleTable, _Counts, part_of, sample_table
from clipstream.data.decode.tokenizers import clip_byte_pairs
from clipstream.data.settings import DataSettings
from clipstream.data.shard_pass import ImageReader
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import ShardCache
from tests.support.pictures import picture
from tests.support.tars import write_tar

COLUMNS = Columns()


def table(folder: Path, *flags: str, columns: Columns = COLUMNS) -> SampleTable:
    settings = load(["--train-data", f"{folder}/*.tar", *flags])
    source = Source(settings.data.sources["train"], SourceContext(key="data.sources.train"))
    return sample_table(source, settings.data, columns)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    for shard in range(3):
        samples = [{"__key__": f"{n}", "jpg": picture(10 * shard + n, 300), "txt": f"a text {n}"} for n in range(4)]
        about = [{"score": 0.5, "of": {"lang": "en"}}, {"score": 1, "of": None}, {"score": None}, []]
        samples = [{**one, "json": json.dumps(of).encode()} for one, of in zip(samples, about, strict=True)]
        del samples[1]["txt"]
        samples[2]["jpg"] = samples[2]["jpg"][:-400]
        samples[3]["jpg"] = samples[0]["jpg"]
        write_tar(tmp_path / "shards" / f"{shard}.tar", samples)
    return tmp_path / "shards"


def test_a_row_for_each_sample(shards: Path) -> None:
    found = table(shards, columns=Columns(fields=("json.score", "json.of.lang")))
    rows = found.read().to_pylist()
    assert [(row["shard"], row["key"]) for row in rows] == [(f"{s}.tar", f"{n}") for s in range(3) for n in range(4)]
    first, second, third, fourth = rows[:4]
    assert [row["reason"] for row in rows[:4]] == ["", "no_caption", "undecodable_image", ""]
    told = ("caption", "caption_chars", "caption_tokens", "captions", "format", "language", "one_colour")
    assert [first[name] for name in told] == ["a text 0", 8, 5, 1, "JPEG", None, False]
    assert third["caption"] == "a text 2" and third["image_hash"] is None and third["width"] == first["width"]
    assert second["caption"] is None and second["image_hash"] is not None and "no member .txt" in second["detail"]
    assert fourth["file_hash"] == first["file_hash"] and fourth["image_hash"] == first["image_hash"]
    assert [row["json.score"] for row in rows[:4]] == [0.5, 1.0, None, None]
    assert [row["json.of.lang"] for row in rows[:4]] == ["en", None, None, None]
    (about, *_) = found.abouts()
    assert about.members == {"jpg": 4, "txt": 3, "json": 4} and about.title.endswith("/0.tar") and not about.fault
    assert about.fields["json.score"] == {"float": 1, "int": 1, "null": 1}
    assert about.fields["json.of.lang"] == {"str": 1}


def test_only_missing_shards_are_read(shards: Path) -> None:
    before = table(shards)
    rows = before.read()
    part_of(before.folder, 1).unlink()  # as of a kill
    stamps = [part.stat().st_mtime_ns for part in (before.parts[0], before.parts[2])]
    after = table(shards)
    assert [part.stat().st_mtime_ns for part in (after.parts[0], after.parts[2])] == stamps
    assert after.read().equals(rows)
    (shards / "1.tar").write_bytes(b"no tar")
    broken = table(shards)
    assert broken.folder != after.folder and list(broken.abouts())[1].fault.startswith("not_a_tar")
    assert broken.read().num_rows == 8 and broken.read(["key"]).column_names == ["key"]


def test_headers_alone_and_kept_samples(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "drop.txt").write_text("0.tar/0\n")
    rows = table(shards, f"--data.sources.train.drop={tmp_path}/drop.txt", columns=Columns(decode=False)).read()
    assert rows["reason"].to_pylist()[:4] == ["not_kept", "no_caption", "", ""]
    assert rows["image_hash"].null_count == rows["file_hash"].null_count == len(rows)
    assert rows["width"].null_count == 1 and rows["format"][2].as_py() == "JPEG"
    with pytest.raises(SettingsError, match=r"expected json\.PATH"):
        table(shards, columns=Columns(fields=("score",)))


def test_images_are_read_with_one_open_shard(shards: Path) -> None:
    found = table(shards)
    source = Source(load(["--train-data", f"{shards}/*.tar"]).data.sources["train"], SourceContext(ShardCache(None)))
    read = ImageReader(source)
    assert [read(name, 0) is None for name in (source.names[0], "gone.tar", source.names[0])] == [False, True, False]
    del read
    before = len(os.listdir("/proc/self/fd"))
    images = found.images(source, range(12))
    assert images[8] == picture(20, 300) and len(images) == 12 and len(os.listdir("/proc/self/fd")) <= before + 1


def test_fields_of_json_are_counted_by_path() -> None:
    counts = _Counts()
    for number in range(9):
        counts.add({"json": json.dumps({"boxes": [{"x": 1}] * number}).encode()})
    assert counts.result()[1] == {"json.boxes": {"empty": 1}, "json.boxes.*.x": {"int": sum(range(9))}}


def test_tokens_are_those_of_open_clip() -> None:
    from open_clip.tokenizer import SimpleTokenizer

    theirs, ours, random = SimpleTokenizer(), clip_byte_pairs(), Random(0)
    letters = [
        chr(one) for part in (range(32, 127), range(9, 14), range(160, 1500), range(0x3040, 0x3060)) for one in part
    ]
    texts = ["a photo of a dog", "", "Don't &amp;amp; I'LL", "<start_of_text> x", "½ Ⅷ İ ſ 🇩🇪 e\u0301", "x" * 200]
    texts += ["".join(random.choices(letters, k=random.randrange(40))) for _ in range(300)]
    wanted = [theirs.encode(text) for text in texts]
    assert [ours.count(text) for text in texts] == [len(ids) + 2 for ids in wanted]
    assert [ours.encode(text)[1:-1] for text in texts] == wanted


@pytest.mark.parametrize("kind", ["t.csv", "d"])
def test_an_image_that_is_mended_in_place_is_read_again(tmp_path: Path, kind: str) -> None:
    """Also one of the same size and date, as `cp -p` and `rsync -t` leave it."""
    (tmp_path / "d").mkdir()
    good = picture(1)
    for n in range(4):
        (tmp_path / f"d/{n}.jpg").write_bytes(good if n else bytes(len(good)))
        (tmp_path / f"d/{n}.txt").write_text("a text")
    (tmp_path / "t.csv").write_text("filepath,title\n" + "".join(f"d/{n}.jpg,a text\n" for n in range(4)))
    reasons = []
    for _ in range(2):
        source = Source(SourceSettings(shards=str(tmp_path / kind)), SourceContext(key="data.sources.train"))
        reasons.append(sample_table(source, DataSettings()).read(["reason"])["reason"].to_pylist())
        path = tmp_path / "d/0.jpg"
        times = path.stat()
        path.write_bytes(good)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reasons == [["undecodable_image", "", "", ""], [""] * 4]
