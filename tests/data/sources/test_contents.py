"""What a folder holds: tars, tables, images with texts beside them, or classes; and its splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import webdataset
from pyarrow import parquet

from clipstream.data.source_settings import AUTO, SourceSettings
from clipstream.data.sources import Source, SourceContext, expand
from clipstream.data.sources.folders import contents, with_split
from clipstream.errors import Dropped, SettingsError
from tests.support.clipbenchmark import drawn, write_benchmark
from tests.support.pictures import make_shards, picture


def write(folder: Path, *names: str) -> str:
    """Write files: images by their suffix, texts of their name."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = {"caption": f"caption of {name}"} if name.endswith(".json") else f"the text {name}"
        image = name.lower().endswith((".jpg", ".png"))
        data = picture(number) if image else json.dumps(text).encode()
        if name.endswith((".token", ".tsv", ".csv", "caption.txt")):
            data = b"a line\n" * 3
        if name.endswith((".zip", ".xml")):
            data = b"PK\3\4" if name.endswith(".zip") else b"<?xml version='1.0'?>"
        (folder / name).write_bytes(data)
    return str(folder)


def samples(shards: str, key: str = "data.sources.train", **more: Any) -> dict[str, str]:
    """'SHARD/KEY' -> caption, or the reason of a dropped sample, of all samples in the order of the shards."""
    source = Source(SourceSettings.model_validate({"shards": shards, **more}), SourceContext(key=key))
    found = {}
    for name in source.names:
        shard = source.open(name)
        for ref in shard.index.samples:
            where = f"{Path(source.types[name].title(name)).name}/{ref.key}"
            try:
                members = shard.load(ref, ("jpg", "png", "image", "txt"))
                image = members.get("image", members.get("jpg", members.get("png", b"")))
                found[where] = members["txt"].decode() if image else "no image"
            except (Dropped, KeyError) as error:
                found[where] = repr(error)
        if shard.index.samples:
            assert source.num_samples(name) == len(shard.index.samples)
    assert len(source.names) == len(set(source.names)) and source.samples in (None, len(found))
    return found


def rows_of(shards: str, key: str, **more: Any) -> list[tuple[str, str]]:
    """(key, caption) of all rows in the order of the shards."""
    source = Source(SourceSettings.model_validate({"shards": shards, **more}), SourceContext(key=key))
    opened = (source.open(name) for name in source.names)
    return [(ref.key, shard.load(ref)["txt"].decode()) for shard in opened for ref in shard.index.samples]


MANY = *(f"{number}.txt" for number in range(10)), *(f"{number}.jpg" for number in range(10))
PAIRS = ("a/cat.jpg", "a/cat.txt", "a/b/dog.v1.PNG", "a/b/dog.v1.json", "eel.jpg", "eel.ogg", "old.txt")


@pytest.mark.parametrize(
    ("names", "kind", "what"),
    [
        (PAIRS, "pairs", "3 images with texts beside them"),
        (("0.tar", "0.parquet", "0_stats.json", "1.tar.zst", "sizes.json", "0.tar.index", "x/2.tgz"), "tars", "3 tars"),
        (("0/1.jpg", "0/1.txt", "0/1.json", "0.parquet", "0_stats.json"), "pairs", "1 image with texts beside them"),
        (("pairs.csv", "images/1.jpg"), "tables", "1 table"),
        (("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "README.md"), "tables", "2 tables"),
        (("data-00000-of-00001.arrow", "state.json", "dataset_info.json", "cache-1.arrow"), "tables", "1 table"),
        (("cat/1.jpg", "dog/1.jpg", "labels.csv", "cat/notes.txt"), "classes", "images in one folder per class"),
        (("cat/1.jpg", "dog/1.jpg", "dog/1.txt", "dog/2.jpg"), "classes", "images in one folder per class"),
        (("cat/1.jpg", "dog/1.jpg", "notes/1.xml", "notes/2.xml"), "classes", "images in one folder per class"),
        (
            ("val2017/a/1.jpg", "train2017/b/1.jpg"),
            "classes",
            "images in folders that are no classes (train2017, val2017)",
        ),
    ],
)
def test_a_folder_is_read_by_what_is_in_it(tmp_path: Path, names: tuple[str, ...], kind: str, what: str) -> None:
    folder = write(tmp_path / "held", *names)
    if "pairs.csv" in names:
        (tmp_path / "held" / "pairs.csv").write_text("file_name,caption\nimages/1.jpg,a cat\n")
    found = contents(folder)
    assert (found.kind, found.what) == (kind, what)
    if kind in ("tars", "tables"):
        assert expand(folder) == expand(f"folder:{folder}") == sorted(found.files)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("1.jpg", "2.jpg"), r"holds 2 images and no captions: name tars .* \(cat\.jpg, cat\.txt\), or sort"),
        (("a.ogg", "b.ogg", "c/d.dat"), r"no tar, no table and no image, but 2 \.ogg, 1 \.dat: name tars"),
        (("0.tar", "a.csv"), "holds 1 tar and 1 table: name what is to be read"),
        (("b.tar", *MANY[:-1]), "holds 1 tar and 9 images with a text beside each: name what"),
        (("a.jsonl", "1.jpg", "1.txt"), "holds 1 table and 1 image with a text beside it: name what"),
        (("a.zip", "b.ogg"), r"1 \.zip, 1 \.ogg \(a\.zip: a zip archive: unpack it and use what it holds\): name tars"),
        (
            ("a.tar.001", "a.tar.002"),
            r"a\.tar\.001: a part of an archive: join the parts, as 'cat a\.tar\.\* > a\.tar'",
        ),
        (("x/a.tgz.partaa", "x/a.tgz.partab"), "join the parts, as 'cat a.tgz.. > a.tgz'"),
        *(
            (
                (f"{images}1.jpg", f"{images}2.jpg", f"{texts}1{end}", f"{texts}2{end}"),
                rf"2 images and 2 \.\w+ files of the same names, such as {texts}1.*: captions must lie beside",
            )
            for images, texts, end in (
                ("images/", "captions/", ".txt"),
                ("train/img/", "train/text/", ".json"),
                ("images/val/", "labels/val/", ".txt"),
                ("cat/", "words/", ".lab"),
                ("", "", ".lab"),
                ("cat/", "cat/", "_prompt.lab"),
                ("a/b/", "a/", ".caption.txt"),
            )
        ),
        *(
            (
                (*(f"{images}/{number}.jpg" for number in range(3)), f"{captions}"),
                rf"3 images \(in {images}\) without texts beside them, and {captions}( \(.*\))?: if it has",
            )
            for images, captions in (
                ("images", "caption.txt"),
                ("Flicker8k_Dataset", "Flickr8k.token"),
                ("train2017", "annotations/a.json"),
                ("flickr30k-images", "results.csv"),
                ("jpg", "jpg/all.tsv"),
            )
        ),
        (
            ("test/0.tar", "val/0.tar"),
            r"no split 'train' .* \(there is test, validation\): name one, as 'folder:.*#test'",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Source(SourceSettings(shards=write(tmp_path, *names)))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.jpg", "a.txt", "b.JPG", "b.txt", "a.MOV", "b.mov", "c.txt"), "3 files not used: 2 .mov, 1 .txt"),
        (("cat/1.jpg", "cat/1.aae", "dog/2.jpg", "dog/3.cr2"), "2 files not used: 1 .aae, 1 .cr2"),
        (("a.HEIC", "a.txt", "b.jpg", "b.txt"), ""),
    ],
)
def test_files_that_nothing_uses_are_counted_by_suffix(
    tmp_path: Path, names: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    contents(folder := write(tmp_path / "held", *names))
    assert [one.getMessage() for one in caplog.records] == ([f"{folder}: {said}"] if said else [])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("t/_delta_log/00.json", "t/part-0.parquet"), "held/t is a Delta table, which is not read: write it"),
        (("_versions/1.manifest", "data/0.lance"), r"held is a Lance data set, .*lance\.dataset\('.*held'\)"),
        (("metadata/v1.metadata.json", "data/0.parquet"), "held is an Iceberg table"),
    ],
)
def test_tables_of_several_files_are_named_with_a_way_out(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        contents(write(tmp_path / "held", *names))


@pytest.mark.parametrize("stray", ["labels.csv", "config.json", "all.tar"])
def test_a_file_beside_many_pairs_is_left_out(tmp_path: Path, stray: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "held", stray, *MANY)
    assert len(samples(folder)) == len(samples(folder, "evals.val.data")) == 10
    assert [one.getMessage() for one in caplog.records] == [
        f"{folder}: 10 images with a text beside each are read, and not {stray}: to read that, name it"
    ]


def test_texts_beside_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / f"{number}.photo").write_bytes(picture(number))
        (tmp_path / f"{number}.txt").write_text("a text")
    photos = SourceSettings(shards=str(tmp_path), image_key="photo")
    names = Source(photos).names
    assert len(names) == 2 and expand(str(tmp_path), photos) == names, "images of another suffix"
    assert with_split(str(tmp_path), AUTO, "photo") == str(tmp_path)
    folder = write(tmp_path / "held", *PAIRS)
    expected = {
        "held/a/b/dog.v1": "caption of a/b/dog.v1.json",
        "held/a/cat": '"the text a/cat.txt"',
        "held/eel": "KeyError('txt')",
    }
    assert samples(folder) == samples(f"folder:{folder}/") == expected
    names = Source(SourceSettings(shards=folder)).names
    monkeypatch.chdir(folder)
    assert Source(SourceSettings(shards=".")).names == names == [f"folder:{folder}#{n}-{n}" for n in range(3)]
    monkeypatch.chdir(tmp_path / "held" / "a" / "b")
    write(tmp_path / "held", "a/cat.png", "new/0.jpg", "new/0.txt")  # a program that goes on sees what has changed
    assert [*samples(".")] == ["b/dog.v1"] and samples(folder).keys() == {*expected, "held/new/0"}
    (tmp_path / "held" / "new" / "0.jpg").unlink()
    (tmp_path / "held" / "a" / "cat.txt").unlink()
    (tmp_path / "held" / "a" / "cat.txt").symlink_to("nowhere")
    (tmp_path / "held" / "a" / "b" / "dog.v1.json").write_text("{")
    assert [text.partition("(")[0] for text in samples(folder).values()] == ["Dropped", "Dropped", "KeyError"]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        *(
            (end, "t")
            for end in (".TXT", ".caption", ".cap", ".text", ".jpg.txt", ".caption.txt", "_caption.txt", ".png.cap")
        ),
        *((end, None) for end in (".tags", ".md")),  # named by --caption-key
    ],
)
def test_texts_beside_images_with_other_names(tmp_path: Path, end: str, text: str | None) -> None:
    for number in range(3):
        (tmp_path / "10_dogs").mkdir(exist_ok=True)
        (tmp_path / f"10_dogs/{number}.jpg").write_bytes(picture(number))
        (tmp_path / f"10_dogs/{number}{end}").write_text("t")
    source = Source(SourceSettings(shards=str(tmp_path)))
    for name in source.names:
        (ref,) = (shard := source.open(name)).index.samples
        assert shard.load(ref).get("txt") == (text and b"t") and shard.load(ref, ["jpg"])["jpg"]
        assert [file.startswith(f"{tmp_path}/10_dogs/") for file in shard.files(ref)] == [True] * 2
    for number in range(3):  # the text of the image's own name comes first
        (tmp_path / f"10_dogs/{number}.txt").write_text("own")
    if end != ".TXT":
        assert {*samples(str(tmp_path)).values()} == {"own"}


def test_splits_are_known_by_their_names(tmp_path: Path) -> None:
    train, test, more = (Path(shard) for shard in make_shards(tmp_path / "made", [2, 1, 1]))
    for tar, name in ((train, "train-0.tar"), (test, "test/0.tar"), (more, "plain.tar")):
        (tmp_path / "tars" / name).parent.mkdir(parents=True, exist_ok=True)
        tar.rename(tmp_path / "tars" / name)
    folder = f"{tmp_path}/tars"
    assert [Path(name).name for name in expand(folder)] == ["plain.tar", "train-0.tar"]
    assert expand(folder, evaluates=True) == expand(f"{folder}#test") == [f"{folder}/test/0.tar"]
    folder = write(tmp_path / "pairs", "train2017/a.jpg", "train2017/a.txt", "val2017/b.jpg", "val2017/b.txt")
    assert [*samples(folder)] == [*samples(f"folder:{folder}#train")] == ["pairs/train2017/a"]
    assert [*samples(folder, "evals.val.data")] == [*samples(f"{folder}#val")] == ["pairs/val2017/b"]
    for name, where in (("spark", "split={}/part-0.tar"), ("sets", "{}set/a.tar"), ("images", "{}_images/0.tar")):
        for split, tar in (("train", "train-0.tar"), ("test", "test/0.tar")):
            (tmp_path / name / where.format(split)).parent.mkdir(parents=True)
            (tmp_path / name / where.format(split)).symlink_to(tmp_path / "tars" / tar)
        assert expand(f"{tmp_path}/{name}") == [f"{tmp_path}/{name}/{where.format('train')}"]
    folder = write(tmp_path / "kinds", "test/a.jpg", "test/a.txt", "toy/b.jpg", "toy/b.txt")  # of which none is a split
    assert len(samples(folder)) == 2


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "of_train", "of_test"),
    [
        ("file_name", "train/", "test/"),  # metadata of Hugging Face's imagefolder, above its splits
        ("file_name", "{}/images/train2017/a/", "{}/images/val2017/a/"),
        ("file_name", "split=train/", "split=dev/"),
        ("split", "train", "test"),  # Karpathy's
        ("partition", "Training", "valid"),
        ("phase", "train", "test"),
    ],
)
def test_rows_of_a_split(tmp_path: Path, form: str, column: str, of_train: str, of_test: str) -> None:
    rows = []
    for number in range(700):
        split = (of_test if number % 7 == 3 else of_train).format(tmp_path)
        path = f"{split if column == 'file_name' else ''}{number % 9}.jpg"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"jpg")
        rows.append({"file_name": path, "txt": f"{number}"} | ({} if column == "file_name" else {column: split}))
    file = tmp_path / f"metadata.{form}"
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif form == "csv":
        file.write_text("".join(",".join(map(str, row)) + "\n" for row in [rows[0], *(row.values() for row in rows)]))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"image_key": "file_name", "caption": {"type": "text"}}
    numbers = [str(number) for number in range(700)]
    for shards in (str(file), f"folder:{tmp_path}"):
        source = Source(SourceSettings.model_validate({"shards": shards, **more}))
        assert source.samples == 600 and f"split train, 600 of 700 rows, by column {column}" in source.summary()
    for key, expected in (("data.sources.train", {0, 1, 2, 4, 5, 6}), ("evals.val.data", {3})):
        found = rows_of(str(file), key, **more)
        assert found == [(number, number) for number in numbers if int(number) % 7 in expected]


def test_rows_that_tell_of_no_split_are_all_read(tmp_path: Path) -> None:
    """`train` and `bus` may be classes; a column may hold the split of all rows."""
    for name, folders, split in (
        ("a", ("train", "bus"), "train"),
        ("b", ("train", "train"), "val"),
        ("c", ("", ""), ""),
    ):
        lines = [f"{folders[number % 2]}/{number}.jpg,t,{split}\n" for number in range(9)]
        (tmp_path / f"{name}.csv").write_text("file_name,txt,split\n" + "".join(lines))
        assert Source(SourceSettings(shards=f"{tmp_path}/{name}.csv")).samples == 9


def test_layouts_of_hugging_faces_datasets(tmp_path: Path) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": picture(n), "path": None} for n in range(3)]
    table = pa.table({"image": pa.array(rows, image), "text": [f"text {n}" for n in range(3)]})
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name, some in (("train-00000-of-00001", table), ("validation-00000-of-00001", table.slice(2))):
        parquet.write_table(some, tmp_path / "hub" / "data" / f"{name}.parquet")
        folder = tmp_path / "saved" / name.partition("-")[0]
        folder.mkdir(parents=True)
        with (
            pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, some.schema) as out,
        ):
            out.write_table(some)
        write(folder, "state.json", "dataset_info.json")
    write(tmp_path / "saved", "dataset_dict.json")
    more = {"caption": {"type": "text", "key": "txt"}}
    for name in ("hub", "saved"):
        found = samples(f"{tmp_path}/{name}", **more)
        assert list(found.values()) == ["text 0", "text 1", "text 2"]
        assert list(samples(f"{tmp_path}/{name}", "evals.val.data").values()) == ["text 2"]


def test_shards_of_other_tools_are_known_by_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"a": "img2dataset", "b": "Megatron-Energon", "c": "CLIP_benchmark", "d": "webdataset", "e": ""}
    for name in "abe":
        make_shards(tmp_path / name, [2, 2, 2])
    (tmp_path / "d").mkdir()
    for number in range(3):
        (tmp_path / f"a/{number:05d}_stats.json").write_text("{}")
        (tmp_path / f"a/{number:05d}.parquet").write_bytes(b"PAR1")
    (tmp_path / "b/.nv-meta").mkdir()
    (tmp_path / "b/.nv-meta/split.yaml").write_text(
        "exclude: []\nsplit_parts: {train: ['0000{0..1}.tar'], val: [00002.tar], test: []}\n"
    )
    write_benchmark(tmp_path / "c", drawn(3), split="train")
    with webdataset.ShardWriter(str(tmp_path / "d/%05d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number}", "jpg": picture(number), "txt": "a"})
    for name, tool in tools.items():
        said = Source(SourceSettings(shards=str(tmp_path / name))).summary()
        assert said.endswith(f"by {tool}" if tool else "shards"), said
    (tmp_path / "b/inner").mkdir()
    monkeypatch.chdir(tmp_path / "b/inner")  # what lies here is not beside a remote shard
    assert Source(SourceSettings(shards="https://h/0.tar")).summary() == "1 shard"
    splits = {split: contents(f"{tmp_path}/b{split}").files for split in ("", "#train", "#val")}
    assert [len(files) for files in splits.values()] == [2, 2, 1] and splits[""] == splits["#train"]
    assert contents(f"{tmp_path}/b", evaluates=True).files == splits["#val"]
