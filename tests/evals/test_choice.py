"""Choice equals clip-benchmark's image_caption_selection on tars and tables, on 1 and 3 ranks: its formula, restated in
NumPy, and with `make reference` its own code."""

from __future__ import annotations

import csv
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clipstream.data.decode.labels import ChoicesField
from clipstream.data.source_settings import TextCaption
from clipstream.distributed.world import World
from clipstream.errors import DataError, Dropped, SettingsError
from clipstream.evals.choice import first_of, pair_scores
from clipstream.evals.context import DryRun
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import EvalSettings
from clipstream.evals.statistics import bounds, chance_of
from clipstream.models.towers import Towers
from tests.support.evaluating import context_of, evaluated, tiny_towers
from tests.support.pictures import picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar

N = 46


@lru_cache
def towers() -> Towers:
    """A model whose answers depend on the image by more than float32 rounds."""
    found = tiny_towers(3)
    with torch.no_grad():
        for weight in found.clip.visual.parameters():
            weight *= 5 if weight.ndim > 1 else 1
    return found


CATEGORIES = ("swap att", "add")


def kind_of(i: int) -> int:
    return int(i % 3 == 0)


def row(i: int) -> dict[str, Any]:
    draw = np.random.default_rng(i)
    # CLIP pools where the largest id is, here the z: all of a text counts.
    texts = [f"{draw.integers(10**9)} {k}z" for k in range(2 + i % 3)]
    kind = CATEGORIES[kind_of(i)]
    return {"caption": texts[0], "wrong": texts[1:], "kind": kind, "pair": i // 2, "answer": i % len(texts)}


def options(of: dict[str, Any]) -> list[str]:
    """All texts, with the right one in the place of the answer."""
    left = list(of["wrong"])
    left.insert(of["answer"], of["caption"])
    return left


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("choice")
    rows = [{**row(i), "options": options(row(i))} for i in range(N)]
    samples: list[dict[str, Any]] = [
        {
            "__key__": f"{i:04d}",
            "png": picture(i, kind="PNG"),
            "txt": "\n".join([one["caption"], *one["wrong"]]),
            "json": json.dumps({**one, "maps": [{"text": text} for text in one["wrong"]]}),
        }
        for i, one in enumerate(rows)
    ]
    for shard in range(3):
        write_tar(folder / f"set/test/{shard}.tar", samples[shard::3])
    (folder / "set/test/nshards.txt").write_text("3\n")
    (folder / "set/dataset_type.txt").write_text("retrieval\n")
    for i, sample in enumerate(samples):
        (folder / f"{i}.png").write_bytes(sample["png"])
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "caption", "wrong", "kind", "pair"])
        table.writerows(
            [f"{i}.png", o["caption"], json.dumps(o["wrong"]), o["kind"], o["pair"]] for i, o in enumerate(rows)
        )
    images = [{"bytes": sample["png"], "path": f"{i}.png"} for i, sample in enumerate(samples)]
    labels = [[one["caption"], *one["wrong"]] for one in rows]
    (folder / "hub/data").mkdir(parents=True)
    pq.write_table(
        pa.table({"image": images, "tested_labels": labels}), folder / "hub/data/test-00000-of-00001.parquet"
    )
    rows_of_two: dict[str, Any] = {"id": range(0, N, 2)}
    rows_of_two |= {f"image_{n}": images[n::2] for n in (0, 1)}
    rows_of_two |= {f"caption_{n}": [one["caption"] for one in rows[n::2]] for n in (0, 1)}
    pq.write_table(pa.table(rows_of_two), folder / "winoground.parquet")
    return folder


TARS: dict[str, Any] = {"caption": {"type": "json", "path": "caption"}}
FORMS: dict[str, dict[str, Any]] = {
    "benchmark": {"data": {"shards": "benchmark:{}/set"}},
    "list": {"data": {"shards": "{}/set/test/*.tar", **TARS}, "wrong": "json:wrong", "category": "json:kind"},
    "maps": {"data": {"shards": "{}/set/test/*.tar", **TARS}, "wrong": ["json:maps"]},
    "answer": {"data": {"shards": "{}/set/test/*.tar"}, "wrong": "json:options", "answer": "json:answer"},
    "table": {"data": {"shards": "{}/table.csv"}, "wrong": "json:wrong", "category": "json:kind"},
    "hub": {"data": {"shards": "{}/hub/data/*.parquet", "caption": {"type": "json", "path": "tested_labels"}}},
    "pairs": {"data": {"shards": "{}/set/test/*.tar", **TARS}, "group": "json:pair"},
    "pairs_of_table": {"data": {"shards": "{}/table.csv"}, "group": "json:pair"},
    "pairs_of_rows": {
        "data": {
            "shards": "{}/winoground.parquet",
            "image_key": "image_{n}",
            "caption": {"type": "json", "path": "caption_{n}"},
        },
        "group": "json:id",
    },
}


def section(place: Path, form: str, **more: Any) -> EvalSettings:
    told = {"type": "choice", "batch_size": 7, "on_error": "raise", **FORMS[form], **more}
    told["data"] = {**told["data"], "shards": told["data"]["shards"].format(place)}
    return EvalSettings.model_validate(told)


def evaluate(world: World, place: Path) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    runner = EvalRunner({form: section(place, form) for form in FORMS}, context_of(world, towers=towers()))
    runner.dry_run()
    return {
        one["eval"]: {name: one[name] for name in one["metrics"] if name != "seconds"} for one in runner(1, last=True)
    }


def selection(instances: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> dict[str, float]:
    """clip_benchmark 1.6, metrics/image_caption_selection.py: of features of images and of texts."""
    found = []
    for images, texts in instances:
        scores, right = images @ texts.T, np.arange(min(len(images), len(texts)))
        text = bool((scores.argmax(axis=1)[: len(right)] == right).all())
        image = bool((scores.argmax(axis=0)[: len(right)] == right).all())
        found.append((text, image, text and image))
    return dict(zip(("text_acc", "image_acc", "acc"), np.mean(found, axis=0).tolist(), strict=True))


def pixels(place: Path) -> list[torch.Tensor]:
    """Of the pictures in the order of their numbers, as the model takes them."""
    source = section(place, "list").data
    assert source is not None
    by_key: dict[int, torch.Tensor] = {}
    for batch in context_of(World(), towers=towers()).batches(source, 8):
        by_key.update(zip((int(key.rpartition("/")[2]) for key in batch.keys), batch.images, strict=True))
    return [by_key[i] for i in range(N)]


def features(place: Path) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """Of the pictures, and of the texts of each."""
    context, texts = context_of(World(), towers=towers()), []
    images = torch.cat([context.encode_image(one[None]) for one in pixels(place)]).numpy()
    for i in range(N):
        ids = context.tokenizer.encode([row(i)["caption"], *row(i)["wrong"]])
        texts.append(context.encode_text(torch.from_numpy(ids)).numpy())
    return images, texts


@pytest.mark.slow
def test_equal_to_clip_benchmarks_own_code(place: Path) -> None:
    """`make reference` installs it."""
    theirs = pytest.importorskip("clip_benchmark.metrics.image_caption_selection")
    images, context = pixels(place), context_of(World(), towers=towers())
    texts = [[row(i)["caption"], *row(i)["wrong"]] for i in range(N)]
    choices = [(images[i][None], [texts[i]]) for i in range(N)]
    pairs = [(torch.stack(images[i : i + 2])[None], [[texts[i][0], texts[i + 1][0]]]) for i in range(0, N, 2)]
    of_each, of_pairs = (
        theirs.evaluate(context, some, lambda some: torch.from_numpy(context.tokenizer.encode(some)), "cpu", amp=False)
        for some in (choices, pairs)
    )
    for size in (1, 3):
        for found in run_ranks(size, evaluate, place):
            assert found["list"]["accuracy"] == pytest.approx(of_each["text_acc"], abs=1e-6)
            ours = [found["pairs"][f"{name}_score"] for name in ("text", "image", "group")]
            assert ours == pytest.approx([of_pairs[name] for name in ("text_acc", "image_acc", "acc")], abs=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_clip_benchmarks_formula(place: Path, size: int) -> None:
    images, texts = features(place)
    choice = selection([(images[i : i + 1], texts[i]) for i in range(N)])["text_acc"]
    kinds = [
        selection([(images[i : i + 1], texts[i]) for i in range(N) if kind_of(i) == k])["text_acc"] for k in (0, 1)
    ]
    captions = np.stack([some[0] for some in texts])
    pairs = selection([(images[i : i + 2], captions[i : i + 2]) for i in range(0, N, 2)])
    assert 0.1 < choice < 0.9 and kinds[0] != kinds[1] and 0 < pairs["acc"] < pairs["image_acc"]
    for found in run_ranks(size, evaluate, place):
        for form in ("benchmark", "list", "maps", "answer", "table", "hub"):
            assert found[form]["accuracy"] == pytest.approx(choice, abs=1e-6), form
            assert found[form]["n"] == N and found[form]["dropped"] == 0
            assert found[form]["chance_accuracy"] == pytest.approx(np.mean([1 / (2 + i % 3) for i in range(N)]))
        for form in ("list", "table"):
            assert [found[form][f"{kind}_accuracy"] for kind in ("swap_att", "add")] == pytest.approx(kinds, abs=1e-6)
        for form in ("pairs", "pairs_of_table", "pairs_of_rows"):
            ours = [found[form][f"{name}_score"] for name in ("text", "image", "group")]
            assert ours == pytest.approx([pairs[name] for name in ("text_acc", "image_acc", "acc")], abs=1e-6)
            assert found[form]["n"] == N // 2


def test_ties_receive_their_expected_share(place: Path) -> None:
    """Constant features, as those of a dry run, score chance."""
    ones = torch.ones(2, 4) / 2
    assert first_of(ones, ones[[0, 0, 0, 0, 0]], torch.tensor([2, 3])).tolist() == pytest.approx([1 / 2, 1 / 3])
    assert pair_scores(torch.ones(1, 2, 2).double())[0].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 6])
    assert pair_scores(torch.tensor([[[2.0, 1], [1, 1]]]).double())[0].tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 3])
    assert not pair_scores(torch.full((1, 2, 2), torch.nan).double()).any()
    for form in ("list", "table", "pairs"):
        found = evaluated(section(place, form), DryRun.of(context_of(World()), form))
        for name in (name for name in found if f"chance_{name}" in found):
            assert found[name] == pytest.approx(found[f"chance_{name}"]), (form, name)
        assert sum(name.startswith("chance_") for name in found) == 3


def test_an_image_without_a_wrong_text_is_never_right(place: Path) -> None:
    only = ChoicesField(TextCaption(key="txt"), ["json:wrong"], None, None)
    sample = {"__key__": "a", "__url__": "b", "txt": b"right"}
    for wrong in ('["", null]', '"nan"', '" right "'):
        with pytest.raises(Dropped, match="no text to choose besides"):
            only({**sample, "json": f'{{"wrong": {wrong}}}'.encode()}, None)
    for wrong, texts in (
        ('"no\\nbody"', ["right", "no body"]),
        ('["nan", 3, 2.0]', ["right", "3", "2"]),
        ('["right", "left"]', ["right", "left"]),  # the right text is no wrong one
    ):
        assert json.loads(only({**sample, "json": f'{{"wrong": {wrong}}}'.encode()}, None))[0] == texts
    for form, more, text in (
        ("list", {"wrong": "json:none"}, "no usable"),
        ("pairs", {"group": "json:kind"}, "do not have exactly two usable samples"),
        ("pairs", {"group": "json:none"}, "no usable pair with json:none"),
        ("list", {"category": "json:none"}, "no category: see the evaluator's category"),
    ):
        with pytest.raises(DataError, match=text):
            evaluated(section(place, form, **more))


@pytest.mark.parametrize(("told", "texts"), [
    ({"o": ["a", "b"], "a": 1}, ["b", "a"]),
    ({"o": ["a", "b"], "a": "1.0"}, ["b", "a"]),
    ({"o": ["", "b", "c"], "a": 2}, ["c", "b"]),  # a blank text keeps its number
    ({"o": ["a", None, "c"], "a": 2}, ["c", "a"]),
    ({"o": ["a", "", "c"], "a": 1}, None),
    ({"o": ["a", "b"], "a": 7}, None),
])  # fmt: skip
def test_the_answer_is_the_number_of_a_text(told: dict[str, Any], texts: list[str] | None) -> None:
    field = ChoicesField(TextCaption(key="txt"), ["json:o"], "json:a", None)
    sample = {"__key__": "a", "__url__": "b", "txt": b"right", "json": json.dumps(told).encode()}
    if texts is None:
        with pytest.raises(Dropped, match="is not the number of a text"):
            field(sample, None)
    else:
        assert json.loads(field(sample, None))[0] == texts


def test_an_image_may_have_many_texts_and_any_category(tmp_path: Path) -> None:
    names = ["chance", "a" * 80 + "b", "a b", "a-b"]
    wrong = [f"{k}z" for k in range(1, 100)]
    fields = [json.dumps({"wrong": wrong, "kind": names[i % 4]}) for i in range(8)]
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": "0z", "json": of} for i, of in enumerate(fields)]
    write_tar(tmp_path / "0.tar", samples)
    told = {"type": "choice", "wrong": "json:wrong", "category": "json:kind", "data": {"shards": f"{tmp_path}/0.tar"}}
    found = evaluated(told)
    assert found["chance_accuracy"] == pytest.approx(1 / 100)
    assert [found[f"n_{name}"] for name in ("of_chance", names[1], "a_b", "a_b_2")] == [2, 2, 2, 2] and found["n"] == 8


@pytest.mark.parametrize(("told", "text"), [
    ({"group": "json:a", "wrong": "json:b"}, "remove wrong"),
    ({"group": "json:a", "category": "json:b"}, "remove category"),
    ({"answer": "json:a"}, "requires wrong"),
    ({"wrong": "json:a[*"}, "json"),
    ({"wrong": ""}, "expected a member or json:PATH"),
])  # fmt: skip
def test_settings_that_do_not_fit(told: dict[str, str], text: str) -> None:
    with pytest.raises((ValueError, SettingsError), match=text):
        EvalSettings.model_validate({"type": "choice", **told})


def test_intervals_and_chance_by_category() -> None:
    record = {"accuracy": 0.5, "add_accuracy": 0.5, "n": 100, "chance_accuracy": 0.4, "chance_add_accuracy": 0.5}
    assert bounds(record, "accuracy") == pytest.approx((0.4038, 0.5962), abs=1e-4)
    few = {**record, "n_add": 4}
    assert (
        bounds(few, "add_accuracy") == pytest.approx((0.1500, 0.8500), abs=1e-4) and bounds(few, "accuracy") is not None
    )
    assert (chance_of(record, "accuracy"), chance_of(record, "add_accuracy")) == (0.4, 0.5)
    assert bounds({"text_score": 0.5, "n": 100}, "text_score") is not None
