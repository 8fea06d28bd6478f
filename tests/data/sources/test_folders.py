"""Image folders, synthetic data, and the sample counts beside folders of tars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from clipstream.config.config_file import dump
from clipstream.config.plan import draft, survey
from clipstream.config.settings import load, load_settings, read
from clipstream.config.validate import validate_run
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards, picture

SYNSETS = {"n01440764": 0, "n01443537": 1, "n03417042": 569, "n15075141": 999}


def write_classes(root: Path, names: list[str], each: int = 2) -> Path:
    for number, name in enumerate(names):
        (root / name / "inner").mkdir(parents=True)
        for i in range(each):
            where = root / name / ("inner" if i % 2 else "")
            (where / f"{i}.JPEG").write_bytes(picture(10 * number + i))
        (root / name / "notes.txt").write_text("no image")
    return root


def labels(shards: str) -> list[tuple[str, str]]:
    source = Source(SourceSettings(shards=shards))
    opened = (source.open(name) for name in source.names)
    members = [shard.load(ref) for shard in opened for ref in shard.index.samples]
    assert all(set(one) == {"jpeg", "cls", "class"} for one in members)
    return [(one["class"].decode(), one["cls"].decode()) for one in members]


def test_classes_are_numbered_by_their_names_and_a_part_of_imagenet_keeps_its_numbers(tmp_path: Path) -> None:
    write_classes(tmp_path / "own", ["dog", "cat", "eel"])
    names = ["cat", "cat", "dog", "dog", "eel", "eel"]
    assert labels(f"folder:{tmp_path}/own") == list(zip(names, "001122", strict=True))
    write_classes(tmp_path / "a", list(SYNSETS), 1)
    assert labels(f"imagenet:{tmp_path / 'a'}") == [(name, str(n)) for name, n in SYNSETS.items()]
    write_classes(tmp_path / "v2", ["0", "7", "10", "999"], 1)
    assert {label for _, label in labels(f"imagenet:{tmp_path / 'v2'}")} == {"0", "7", "10", "999"}


def test_what_tools_leave_is_no_class_and_no_picture(tmp_path: Path) -> None:
    for name in ("a", "b", "b/.ipynb_checkpoints", "a/__MACOSX", "a/@eaDir", ".ipynb_checkpoints", "@eaDir/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.jpg").write_bytes(picture(1))
    (tmp_path / "a" / "._1.jpg").write_bytes(b"\0\5\x16\7")
    source = Source(SourceSettings(shards=f"folder:{tmp_path}"))
    assert [Path(shard).name for shard in source.names] == ["a", "b"]
    assert [len(source.open(shard).index.samples) for shard in source.names] == [1, 1]


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_classes(tmp_path / "mine", ["n01440764", "cat"])
    write_classes(tmp_path / "part", ["a new folder"], each=0)  # sorts first, and would shift the labels
    write_classes(tmp_path / "part", ["cat", "dog"])
    for shards, said in (
        (f"imagenet:{tmp_path / 'mine'}", r"'cat' is not a class of ImageNet \(1 of 2 folders"),
        (f"folder:{tmp_path / 'none'}", "does not exist"),
        (f"folder:{tmp_path / 'empty'}", "holds no tar, no table and no image, but no files: name tars or a table"),
        (f"folder:{tmp_path / 'part'}", "1 of 3 folders have no images, such as 'a new folder'"),
    ):
        with pytest.raises(SettingsError, match=said):
            Source(SourceSettings(shards=shards))


def test_synthetic_pictures_need_no_disk() -> None:
    settings = data("synthetic:32", global_batch_size=8, lanes=4)
    runs = []
    for _ in range(2):
        with loader(settings) as stream:
            runs.append([next(stream).keys for _ in range(3)])
    assert runs[0] == runs[1] and len({key for keys in runs[0] for key in keys}) == 24
    assert Source(SourceSettings(shards="synthetic:")).samples == 100_000
    with pytest.raises(SettingsError, match="8 to 4096 pixels"):
        Source(SourceSettings(shards="synthetic:big"))


def test_the_length_of_an_epoch_is_taken_from_the_data_or_summed_over_the_named_tars(tmp_path: Path) -> None:
    make_shards(tmp_path, [3, 4])
    run = ["--train-data", f"{tmp_path}/{{00000..00001}}.tar", "--epochs=3", "--save-frequency=1", "--batch-size=2"]
    with pytest.raises(SettingsError, match="the length of an epoch is unknown"):
        validate_run(read(run), World())
    (tmp_path / "__len__").write_text("7\n")
    known = draft(survey(load(run)), 1)
    assert known.settings.total_steps == 11  # 21 samples, 2 a step
    assert yaml.safe_load(dump(known.repeatable))["train"]["epoch_samples"] is None  # other data tell another length
    assert yaml.safe_load(dump(load([*run, "--train-num-samples=9"])))["train"]["epoch_samples"] == 9
    one = ["--train-data", f"{tmp_path}/00001.tar", *run[2:]]
    assert draft(survey(load(one)), 1).settings.train.epoch_samples is None  # __len__ is the whole folder's

    (tmp_path / "__len__").unlink()
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00001.tar": 4, "00002.tar": 99}))
    run = ["--train-data", f"{tmp_path}/{{00000..00001}}.tar::{tmp_path}/00001.tar", "--epochs=1", "--batch-size=2"]
    assert draft(survey(load(run)), 1).settings.train.epoch_samples == 11
    assert draft(survey(load([*run, "--train-num-samples=5"])), 1).settings.train.epoch_samples == 5
    assert Source(SourceSettings(shards=f"{tmp_path}/00000.tar")).summary() == "1 shard, 3 samples"


def key_of(source: SourceSettings | None) -> str:
    assert source is not None
    return str(source.caption.model_dump()["key"])


def key_in(**source: object) -> str:
    return key_of(load_settings({"data": {"sources": {"own": source}}}).data.sources["own"])


def test_captions_of_a_csv_are_found_alike_in_yaml_python_and_flags() -> None:
    for shards in ("a.csv", "a.tsv.gz", "x/*.csv::b.tsv", ["a.csv", "b.tsv"]):
        assert key_in(shards=shards) == key_in(shards=shards, type="table") == "title;txt"
        assert key_in(shards=shards, caption=None) == "title;txt"
        assert key_in(shards=shards, caption={"type": "text"}) == "txt"
        assert key_in(shards=shards, caption={"key": "words"}) == "words"
    for shards in ("a.tar", "a.parquet", "pipe:cat a.csv", ["a.tar", "b.jsonl"]):
        assert key_in(shards=shards) == "txt"
    again = load_settings(load_settings({"data": {"sources": {"own": {"shards": "a.csv"}}}}), {"run.seed": 3})
    assert key_of(again.data.sources["own"]) == "title;txt"


def test_a_csv_beside_other_shards_needs_its_caption_named() -> None:
    told = r"shards: a CSV \(a\.csv\) and other shards \(s3://b\.tar\) have different default captions: set the caption"
    with pytest.raises(SettingsError, match=rf"^--train-data: .*{told}"):
        load(["--train-data", "a.csv::s3://b.tar"])
    with pytest.raises(SettingsError, match=rf"^data\.sources\.own\.{told}"):
        key_in(shards=["a.csv", "s3://b.tar"])
    assert key_in(shards="a.csv::b.tar", caption={"key": "title;txt"}) == "title;txt"


@pytest.mark.parametrize(
    ("flags", "train", "val"),
    [
        ("--dataset-type csv --train-data a.csv --csv-img-key file --csv-separator \\t --val-data b.csv",
         "title;txt", "title;txt"),
        ("--train-data=a.csv --val-data=b.tsv.gz", "title;txt", "title;txt"),
        ("--config own.yaml --train-data=a.csv --val-data=v.csv", "words", None),
        ("--train-data=a.csv --caption-key=c --val-data=v.csv", "c", "c"),
        ("--train-data=a.tar --val-data=v.csv", "txt", "title;txt"),
        ("--train-data=a.csv --val-data=v.tar", "title;txt", "txt"),
        ("--csv-caption-key words --dataset-type csv --train-data a.csv", "words", None),
        ("--dataset-type csv --caption-json a.b --train-data a.csv::b.tsv", "json", None),
    ],
)  # fmt: skip
def test_flags_of_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, train: str, val: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("data: {sources: {train: {caption: {key: words}}}}")
    settings = load(flags.split())
    sources = [settings.data.sources["train"], *([settings.evals["val"].data] if val else [])]
    assert [key_of(one) for one in sources] == [train, *([val] if val else [])]
    if "--csv-img-key" in flags:
        assert [(one.image_key, one.separator) for one in sources if one] == [("file", "\t")] * 2


def test_the_type_of_a_data_set_says_what_its_names_say() -> None:
    assert load(["--dataset-type", "synthetic"]).data.sources["train"].shards == "synthetic:"
    for kind, names in (("csv", "a.jsonl"), ("csv", "a.csv::b.tar"), ("webdataset", "a.tar::b.parquet")):
        told = rf"--dataset-type {kind}: .* {names.split('::')[-1]} says otherwise.*leave the flag out"
        with pytest.raises(SettingsError, match=told):
            load(["--dataset-type", kind, "--train-data", names, "--caption-key", "txt"])
    for wrong in ("--dataset-type=parquet", "--csv-separator=ab"):
        with pytest.raises(SettingsError, match=wrong.partition("=")[0]):
            load([wrong, "--train-data=a.csv"])
