"""Groups of samples and hard neighbours: labels in batches, batches of them, and fields and files that do not fit."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from clipstream.cli.verbs.train import main
from clipstream.data.batch import Batch
from clipstream.data.groups import NeighbourOrder, group_labels
from clipstream.data.loader.stored import StoredData
from clipstream.data.order.windows import EpochPlan
from clipstream.data.pipeline import training_loader
from clipstream.data.settings import DataSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.features.manifest import IDS
from tests.support.feature_stores import write_store
from tests.support.loaders import COUNTS, INPUTS, OPEN, assert_layouts, data, drawn_keys, indexed, loader, numbered
from tests.support.pictures import ByteTokenizer, make_shards, picture
from tests.support.runs import flags, furnish
from tests.support.tars import write_tar

SKU = "json:product.sku"


def shards(folder: Path, *counts: int, broken: int = 11) -> list[str]:
    """Tars whose samples have a product in most cases, one of so many of them broken; none of 1."""
    paths, numbers = [], itertools.count()
    for i, count in enumerate(counts):
        samples = []
        for n in itertools.islice(numbers, count):
            fields: dict[str, Any] = {"product": {"sku": f"A{n % 5}"}} if n % 6 else {"product": {"sku": None}}
            fields |= {} if n % 4 else {"few": n // 8}
            sample = {"__key__": f"{n:04d}", "jpg": picture(n), "txt": f"text {n}", "json": json.dumps(fields)}
            samples.append(sample | ({"jpg": b"broken"} if n % broken == 3 else {}))
        paths.append(str(write_tar(folder / f"{i:05d}.tar", samples)))
    return paths


def batches(settings: DataSettings, field: str, steps: int = 4, **inputs: Any) -> list[Batch]:
    made = training_loader(settings, replace(INPUTS, groups=field, **inputs), world=World(), seed=3)
    OPEN.add(made)
    return [next(made) for _ in range(steps)]


def by_label(found: list[Batch]) -> dict[int, set[str]]:
    """Label -> keys of the samples that have it."""
    groups = defaultdict(set)
    for batch in found:
        assert batch.groups is not None
        for label, key, weight in zip(batch.groups.tolist(), batch.keys, batch.weights.tolist(), strict=True):
            assert bool(label) == bool(weight)
            if weight:
                groups[label].add(key.rpartition("/")[2])
    return groups


def test_samples_of_a_product_share_a_label_and_others_have_their_own(tmp_path: Path) -> None:
    paths = shards(tmp_path / "tars", 23, 9, 16)
    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(picture(n))
    (tmp_path / "table.csv").write_text("\n".join(["filepath,title,sku", *(f"{n}.jpg,t,A{n}" for n in range(3))]))
    for name in ("A1", "A2"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "one.jpg").write_bytes(picture(7))
    found = by_label(batches(indexed(paths, "pad"), SKU, 4))
    shared = [keys for keys in found.values() if len(keys) > 1]
    assert len(shared) == 5 and all(len({int(key) % 5 for key in keys}) == 1 for keys in shared)
    for label, keys in found.items():
        assert label % 2 == (len(keys) == 1)
    # The value is the label, wherever it is from.
    table = f"{tmp_path}/table.csv"
    columns = by_label(batches(indexed(table, "pad", batch=4, lanes=2), "sku", 1))
    assert len(columns) == 3 and set(columns) <= set(found)
    mixed = indexed([], "pad", sources={"tars": {"shards": paths}, "table": {"shards": table}})
    assert {label for label in by_label(batches(mixed, SKU)) if label % 2 == 0} <= set(found)
    folder = {"shards": f"folder:{tmp_path}/classes", "caption": {"type": "text", "key": "class"}}
    classes = by_label(batches(indexed([], "pad", sources={"t": folder}, batch=4, lanes=2), "class", 1))
    assert len(classes) == 2 and set(classes) <= set(found)
    copies = indexed([], "pad", sources={name: {"shards": paths[1]} for name in "ab"}, batch=18)
    alone = [label for label in by_label(batches(copies, SKU, 1)) if label % 2]
    assert len(alone) == 4, "samples of the same name in two sources"


def test_labels_of_a_pass_are_those_of_reading(tmp_path: Path) -> None:
    paths = shards(tmp_path / "tars", 23, 9, 16)
    for settings in (data(paths), indexed(paths, "wrap", workers=2)):
        store = write_store(tmp_path / settings.sampling.mode, settings, ("image", IDS))
        live = batches(settings, SKU)
        stored = batches(settings, SKU, stores=StoredData.open(image=store))
        for one, other in zip(live, stored, strict=True):
            assert one.groups is not None and other.groups is not None and torch.equal(one.groups, other.groups)
    drop = tmp_path / "drop.txt"
    drop.write_text("0001\n")
    section = data(paths, sources={"train": {"shards": paths, "drop": str(drop)}}).sources["train"]
    source = Source(section, SourceContext(key="data.sources.train"))
    labels = group_labels(source, SKU, settings, "loss.positives.by")
    assert [len(one) for one in labels] == [23, 9, 16]
    assert [n for one in labels for n, label in enumerate(one) if not label] == [1]
    for n in range(2):
        (tmp_path / f"{n}.jpg").write_bytes(picture(n))
    (tmp_path / "table.csv").write_text('filepath,title,sku\n0.jpg,t,"A ""1"""\n1.jpg,t,"A ""1"""\n')
    for quoting, groups in ((True, 1), (False, 2)):
        table = section.model_copy(update={"shards": str(tmp_path / "table.csv"), "drop": None, "quoting": quoting})
        labels = group_labels(Source(table, SourceContext(key="data.sources.train")), "sku", settings, "")
        assert len({int(label) for one in labels for label in one}) == groups, "labels of other settings of the table"


def test_a_negative_with_the_ids_of_a_caption_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ("a bird on a branch", "a bird on a branch at night", "another")  # of which 16 bytes are tokens
    samples = [
        {"__key__": f"{n:04d}", "jpg": picture(n), "json": json.dumps({"en": texts[0], "wrong": texts[1 + n % 2]})}
        for n in range(12)
    ]
    caption = {"type": "json", "path": "en", "per_image": 2, "negatives": "wrong"}
    source = {"shards": str(write_tar(tmp_path / "0.tar", samples)), "caption": caption}
    settings = indexed([], lanes=6, sources={"train": source})
    (batch,) = batches(settings, SKU, 1, texts=settings.texts)
    assert batch.roles is not None
    for key, ids, roles in zip(batch.keys, batch.ids.view(12, 3, -1), batch.roles.tolist(), strict=True):
        assert roles == [1, -(int(key[-1]) % 2), 0], "first the caption, and a negative of every other sample"
        assert torch.equal(ids[0], ids[2]) and torch.equal(ids[0], ids[1]) == (roles[1] == 0)
    train = "--data.sources.train.caption"
    for path in ("en", "wrong"):
        given = [f"{train}.type=json", f"{train}.path=en", f"{train}.negatives={path}"]
        given += ["--train-data", source["shards"]]
        assert main(flags(furnish(tmp_path / path), "none", *given, steps=1)) == 0
        warned = "caption.negatives: no sample of the first batch has such a text" in capsys.readouterr().err
        assert warned == (path == "en")


def test_a_short_text_is_the_last_of_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "A bird. It sits."  # as long as tokens are read
    samples = [
        {"__key__": f"{n:04d}", "jpg": picture(n), "json": json.dumps({"en": long, **({"s": "bird"} if n % 3 else {})})}
        for n in range(12)
    ]
    tar = str(write_tar(tmp_path / "0.tar", samples))
    for short, wanted in (("s", "bird"), ("sentence", "A bird")):
        caption = {"type": "json", "path": "en", "short": short, "negatives": "swap"}
        settings = indexed([], lanes=6, sources={"train": {"shards": tar, "caption": caption}})
        assert settings.texts == 3 and settings.has_short
        (batch,) = batches(settings, SKU, 1, texts=3, has_short=True)
        assert batch.roles is not None and batch.has_short
        for key, ids, roles in zip(batch.keys, batch.ids.view(12, 3, -1), batch.roles.tolist(), strict=True):
            has = short == "sentence" or int(key[-2:]) % 3 != 0
            assert roles == [1, -1, 2 * has]
            assert ByteTokenizer().decode(ids[2].tolist()) == (
                wanted if has else ByteTokenizer().decode(ids[0].tolist())
            )
    main(flags(furnish(tmp_path), "none", "--loss.type=clip", "--loss.short=0.5", steps=1))
    assert "loss.short: requires short texts" in capsys.readouterr().err


def test_class_folders_train_by_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = furnish(tmp_path)
    for n in range(60):
        folder = place / "birds" / ("red_kite", "bulbul", "great tit")[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.jpg").write_bytes(picture(n))
    label = "--data.sources.train.caption.type=label"
    argv = flags(
        place, "birds", label, "--loss.positives.by=class", "--val-split=0.1", "--data.trace=3", "--workers=0", steps=2
    )
    argv[1] = str(place / "birds")
    assert main(argv) == 0, "samples of a class can be held out apart"
    told = capsys.readouterr().err
    assert re.search(r"caption    '[^']*(red kite|bulbul|great tit)[^']*'", told), told
    assert main([*argv, "--name", "other", "--data.sources.train.caption.templates=[a bird]"]) == 2
    assert "caption.templates: 'a bird' has no {c} or {} where the class name goes" in capsys.readouterr().err


def test_a_field_that_few_samples_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = furnish(tmp_path)
    shards(place / "pairs", 21, 17, 19, 5)
    runs = {SKU: "", "txt": "no two of the ", "json:colour": "none of the ", "json:few": "only "}
    for number, (field, said) in enumerate(runs.items()):
        argv = "--loss.positives.by", field, "--data.sampling.mode", "indexed"
        code = main(flags(place, f"run{number}", *argv, steps=1))
        err = capsys.readouterr().err
        assert said in err and (code == 0) is (not said.startswith("none")), err
        assert said or "loss.positives" not in err


def test_batches_of_groups_are_the_same_on_any_ranks_and_go_on(tmp_path: Path) -> None:
    paths = shards(tmp_path, 23, 9, 16, broken=1)
    for tail in ("drop", "pad", "wrap"):
        settings = indexed(paths, tail, batch=9, groups={"by": SKU, "samples": 3})
        plain = drawn_keys(settings, 1, 13, groups=SKU)
        assert_layouts(settings, plain, *[(2, 0), (3, 2)][tail == "drop" :], groups=SKU)
        steps = {"drop": 5}.get(tail, 6)
        for epoch in (plain[:steps], plain[steps : 2 * steps]):
            keys = [key for _, names in epoch for key in names]
            assert len(set(keys)) == {"drop": 45}.get(tail, 48) and (tail == "wrap" or len(keys) == len(set(keys)))
            # Runs of three of a product: all that it gives, as 48 samples have 8 of each of 5 products.
            runs = [names[n : n + 3] for _, names in epoch for n in range(0, len(names), 3)]
            assert sum(len({product(key) for key in run}) == 1 for run in runs) >= 8
        assert plain[:steps] != plain[steps : 2 * steps]
    one = drawn_keys(indexed(paths, "wrap", batch=9, lanes=1, groups={"by": SKU, "samples": 3}), 1, 12, groups=SKU)
    assert [keys for _, keys in one[:6]] != [keys for _, keys in one[6:12]], "one lane goes on with another epoch"


def product(number: int) -> int:
    """The product of a sample; a number of its own where it has none."""
    return number % 5 if number % 6 else number + 5


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    paths = shards(tmp_path, 12)
    for field, said in (("json:colour", "none of the 12 samples has 'json:colour'"), ("txt", "no two of the 12 ")):
        with pytest.raises(SettingsError, match=f"data.groups.by: {said}"):
            batches(indexed(paths, groups={"by": field}), SKU, 1)
    for changes, said in (
        ({"groups": {"by": "cls", "samples": 5}}, "5 samples of a group do not divide the global batch of 12"),
        ({"groups": {"by": "cls"}, "sources": {"a": {"shards": paths, "weight": 2}}}, "with the weight of a source"),
        ({"groups": {"by": "cls"}, "sources": {n: {"shards": paths} for n in "ab"}}, "not supported with several"),
    ):
        with pytest.raises(ValueError, match=said):
            indexed(paths, **changes)
    state = drawn_keys(indexed(paths, groups={"by": SKU}, batch=6, lanes=6), 1, 1, groups=SKU)[-1]
    with pytest.raises(SettingsError, match=r"data.groups: 2 samples by json:product.sku, .* -> 3 samples by"):
        drawn_keys(indexed(paths, groups={"by": SKU, "samples": 3}, batch=6, lanes=6), 1, 1, state, groups=SKU)


NEAR = 5  # of each sample: those with the same number modulo 8


def mined(path: Path, **more: Any) -> str:
    """The file of neighbours, as `clipstream search neighbours --out` writes it."""
    names = {n: f"{i:05d}.tar/{n:06d}" for i, n in numbered(COUNTS)}
    near = [[names[m] for m in range(n % 8, 48, 8) if m != n][:NEAR] for n in names]
    near[3] = [names[3], names[11], names[11], "00009.tar/000001", *near[3]]
    table = {"source": ["train"] * 48, "shard": [name[:9] for name in names.values()],
             "key": [name[10:] for name in names.values()], "neighbours": near} | more  # fmt: skip
    parquet.write_table(pa.table(table), path)
    return str(path)


def test_batches_are_seeds_with_their_neighbours_on_any_ranks(tmp_path: Path) -> None:
    shards, path = make_shards(tmp_path, COUNTS), mined(tmp_path / "hard.parquet")
    for tail in ("drop", "pad", "wrap"):
        settings = indexed(shards, tail, batch=9, hard_negatives=path)
        plain = drawn_keys(settings, 1, 13)
        assert_layouts(settings, plain, *([(3, 0), (2, 1)] if tail == "wrap" else []))
        steps = {"drop": 5}.get(tail, 6)
        for epoch in (plain[:steps], plain[steps : 2 * steps]):
            keys = [n for _, batch in epoch for n in batch]
            assert len(set(keys)) == {"drop": 45}.get(tail, 48) and (tail == "wrap" or len(keys) == len(set(keys)))
            # Of 8 other samples of a batch, 1.06 would be a neighbour by chance.
            near = [sum(a % 8 == b % 8 for b in batch) - 1 for _, batch in epoch for a in batch]
            assert sum(near) / len(near) > 3
        assert plain[:steps] != plain[steps : 2 * steps]


def test_a_batch_begins_with_a_seed_and_has_its_best_neighbours() -> None:
    plan = EpochPlan(3, ("train",), (12,), (1.0,), 12, 2, "drop")
    neighbours = np.full((12, 5), -1, dtype=np.int32)
    neighbours[0] = [4, 5, 6, 7, 8]
    for epoch in range(50):
        line = NeighbourOrder(plan, [5, 7], neighbours)._line(epoch).tolist()
        assert sorted(line) == list(range(12))
        place = line.index(0)
        free = [n for n in (4, 5, 6, 7, 8) if n not in line[:place]]
        assert line[place + 1 : place + 1 + len(free)] == free, "no other seed as long as it has neighbours"


def test_files_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = make_shards(tmp_path, COUNTS)

    def said(path: str) -> str:
        with pytest.raises(SettingsError) as error:
            loader(indexed(shards, hard_negatives=path))
        return str(error.value)

    next(loader(indexed(shards, hard_negatives=mined(tmp_path / "1.parquet"))))
    said_of = "48 of its 49 entries match samples of these data; '00009.tar/000001' does not, and 1 name shards"
    assert said_of in caplog.text  # a list of more shards
    absent = mined(tmp_path / "8.parquet", neighbours=[["00000.tar/absent"]] * 48)
    assert "48 of its 49 entries match samples of these data; '00000.tar/absent' does not" in said(absent)
    other = mined(tmp_path / "2.parquet", shard=["other.tar"] * 48, neighbours=[[f"x.tar/{n}"] for n in range(48)])
    assert "0 of its 96 entries match samples of these data" in said(other)
    assert "the column 'neighbours' has no lists" in said(mined(tmp_path / "3.parquet", neighbours=["a"] * 48))
    assert "no keys of source 'train' in it" in said(mined(tmp_path / "4.parquet", source=["other"] * 48))
    parquet.write_table(pa.table({"key": ["1"]}), tmp_path / "5.parquet")
    assert "no column 'neighbours'" in said(str(tmp_path / "5.parquet"))
    assert "No such file" in said(str(tmp_path / "none.parquet"))
    path = mined(tmp_path / "6.parquet")
    for changes, why in (
        ({"sources": {"a": {"shards": shards, "weight": 2}}}, "not supported with the weight"),
        ({"sources": {name: {"shards": shards} for name in "ab"}}, "not supported with several"),
    ):
        with pytest.raises(ValueError, match=why):
            indexed(shards, hard_negatives=path, **changes)
    state = drawn_keys(indexed(shards, hard_negatives=path), 1, 1)[-1]
    other = mined(tmp_path / "7.parquet", neighbours=[["00000.tar/000001"]] * 48)
    with pytest.raises(SettingsError, match=r"data.hard_negatives: .* -> "):
        drawn_keys(indexed(shards, hard_negatives=other), 1, 1, state)
    assert data(shards).hard_negatives is None
