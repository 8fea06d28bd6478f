"""The plan of a run: what is chosen by the size of the data, what stays as it is set, what is read for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.cli import main
from clipstream.config import plan as plan_module
from clipstream.config.config_file import dump
from clipstream.config.plan import (
    BATCH,
    EVERY,
    LENGTHS,
    LR,
    MODE,
    REMAINDER,
    STEPS,
    WARMUP,
    Facts,
    agree,
    batch_of,
    choose,
    choose_by_size,
    draft,
    survey,
)
from clipstream.config.settings import load, read
from clipstream.config.validate import prepare_run
from clipstream.data.order_plan import epoch_plan
from clipstream.data.sources import indexes
from clipstream.data.sources.tars import TarSource
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.train import build_loader, build_model, build_plan
from tests.support.runs import furnish
from tests.support.settings_files import planned

USUAL = {BATCH: 512, MODE: "resampled", REMAINDER: "drop", LR: 5e-4, WARMUP: 0, EVERY: 0} | dict.fromkeys(LENGTHS)


@pytest.mark.parametrize(
    ("samples", "fresh", "given", "chosen"),
    [
        (700, True, {}, {BATCH: 64, STEPS: 319, WARMUP: 15, EVERY: 31}),
        (707, False, {}, {BATCH: 64, STEPS: 120, LR: 1e-5, WARMUP: 6, EVERY: 12}),
        # siglip.md as it was: a warm-up of 5% in place of one longer than the run, and no samples left out
        (707, False, {MODE: "indexed", BATCH: 256, "train.epochs": 3.0, LR: 1e-5}, {REMAINDER: "pad"}),
        (90_000, True, {STEPS: 1000, LR: 1e-3, EVERY: 500}, {WARMUP: 50}),
        (90_000, True, {STEPS: 50_000, REMAINDER: "drop"}, {}),  # a run that is long on purpose
        (20, True, {STEPS: 8}, {BATCH: 32}),
        (707, True, {WARMUP: 500}, {BATCH: 64, STEPS: 1000, EVERY: 100}),
    ],
)  # fmt: skip
def test_what_is_chosen(samples: int, fresh: bool, given: dict[str, Any], chosen: dict[str, Any]) -> None:
    free = frozenset(USUAL.keys() - given.keys() - ({STEPS} if {*LENGTHS} & given.keys() else set()))
    found = list(choose(Facts(samples, 1, fresh, USUAL | given, free)))
    assert {key: value for key, value, _ in found} == chosen
    assert all(reason.rpartition("; ")[2].startswith("--") for _, _, reason in found)
    grouped = {key: value for key, value, _ in choose(Facts(samples, 1, fresh, USUAL | given, free, group=64))}
    assert grouped.get(BATCH, 64) % 64 == 0 or BATCH in given, "samples of a group fill a batch"


@pytest.mark.parametrize(
    ("more", "best"),
    [
        ([], "val/image_to_text_R@1"),
        (["--evals.val.every", "0"], None),  # its only evaluation is of the last step
        (["--evals.val.type", "loss", "--evals.val.weights", "averaged"], "val_averaged/val_loss"),
        (["--evals.val.type", "zero_shot"], None),  # top1 or mAP, by the labels of the data
        (["--checkpoint.keep-best", "a/b"], "a/b"),
    ],
)
def test_the_best_checkpoint_is_kept_where_val_is_evaluated_during_the_run(more: list[str], best: str | None) -> None:
    argv = ["--train-data", "synthetic:", "--val-data", "synthetic:", "--evals.val.every", "5", "--steps", "20"]
    argv += ["--model", "ViT-B-32", "--train.ema", "0.9", "--precision", "fp32", *more]
    assert planned(load(argv)).checkpoint.keep_best == best


@pytest.mark.parametrize(
    ("steps", "batch", "evaluated", "every"),
    [(20, 32, 60, 8), (20, 32, 6, 2), (20, 32, 200, 0), (1000, 64, 300, 100), (1000, 64, 3000, 188), (5, 32, 1, 0)],
)
def test_training_sees_four_samples_for_each_that_is_evaluated(
    steps: int, batch: int, evaluated: int, every: int
) -> None:
    """At the end alone where the run is too short for that."""
    values = USUAL | {STEPS: steps, BATCH: batch, EVERY: 999}
    found = {
        key: value for key, value, _ in choose(Facts(60, 1, True, values, frozenset({EVERY}), evaluated=evaluated))
    }
    assert found == {EVERY: every}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A furnished folder: 62 samples to train on, 20 of `val`."""
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return furnish(tmp_path)


def chosen_of(place: Path, more: str) -> dict[str, Any]:
    """What is chosen for a command line on the furnished data."""
    argv = f"--train-data {place}/pairs/*.tar --val-data {place}/val/*.tar --model {place}/model.json {more}"
    found = survey(load(argv.split()))
    return {key: value for key, value, _ in choose_by_size(found, 1)[1]}


OF_62 = {BATCH: 32, STEPS: 80, WARMUP: 4, EVERY: 8}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", OF_62),
        ("--evals.val.max-samples 7", OF_62),
        ("--evals.val.every-epochs 1 --steps 40 --batch-size 24 --warmup 0 --data.sampling.remainder drop", {}),
        ("--steps 40 --batch-size 24", {WARMUP: 2, EVERY: 4}),
        ("--data.sources.train.keep keys.txt", {}),  # how many are kept is not known
        ("--data.lanes 128 --steps 40", {WARMUP: 2, EVERY: 4}),
        ("--batch-size 24 --data.batch-schedule [[9,8]]", {}),
    ],
)
def test_settings_of_the_user_stay(place: Path, more: str, expected: dict[str, Any]) -> None:
    assert chosen_of(place, more) == expected


@pytest.mark.parametrize(("name", "value"), [("LARGE", 61), ("COUNTED", 3)])
def test_large_data_and_data_of_unknown_size_have_the_usual_defaults(
    place: Path, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, name, value)
    assert chosen_of(place, "") == {}


def test_a_run_has_them_and_its_configuration_repeats_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--train-data", f"{place}/pairs/*.tar", "--val-data", f"{place}/val/*.tar"]
    argv += ["--model", f"{place}/model.json"]
    settings = draft(prepare_run(read(argv)), 1).settings
    assert (settings.data.global_batch_size, settings.data.sampling.mode) == (32, "resampled")
    assert (settings.total_steps, settings.schedule.warmup, settings.evals["val"].every) == (80, 4, 8)
    file = place / "config.yaml"
    file.write_text(dump(settings))
    again = choose_by_size(survey(load(["--config", str(file)])), 1)
    assert again[1] == () and again[0].train.steps == 80
    capsys.readouterr()
    assert main.main(["train", *argv, "--print-config", "--lr", "2e-3"]) == 0
    printed = capsys.readouterr().out
    assert "# chosen: warm-up 4 steps: 5% of the run; --warmup sets it\n" in printed and "  warmup: 4\n" in printed


def test_choices_count_the_samples_that_are_not_held_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "BATCHES", (2, 512))
    monkeypatch.setattr(plan_module, "_samples", lambda *_: 100)  # more than there are
    split = ["--train-data", f"{place}/pairs/*.tar", "--model", f"{place}/model.json", "--val-split", "0.1"]
    found = prepare_run(read([*split, "--name", "x", "--data.sampling.mode", "indexed"]))
    left = draft(found, 1)
    assert left.settings.data.global_batch_size == batch_of(62 - 6) == 4
    assert left.settings.train.epoch_samples == 4 * (62 // 4)
    assert left.epochs == epoch_plan(left.settings.data, list(found.sources.values()))
    assert left.repeatable.train.epoch_samples is None


@pytest.mark.parametrize("mode", ["resampled", "epoch", "indexed"])
def test_a_source_is_listed_and_its_indexes_are_read_once(
    place: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the settings to the first batch."""
    listed, counted = Counter[str](), Counter[str]()
    of_tars, by_index = TarSource.list_shards, indexes._by_index

    def list_shards(self: TarSource, spec: str) -> Any:
        listed[spec] += 1
        return of_tars(self, spec)

    def count(name: str, *args: Any) -> Any:
        counted[name] += 1
        return by_index(name, *args)

    monkeypatch.setattr(TarSource, "list_shards", list_shards)
    monkeypatch.setattr(indexes, "_by_index", count)
    argv = ["--train-data", f"{place}/pairs/*.tar", "--model", f"{place}/model.json", "--workers", "0"]
    found = prepare_run(read([*argv, "--precision", "fp32", "--name", "x", "--data.sampling.mode", mode]))
    made = build_plan(agree(found, World()), World())
    with build_loader(made, World(), build_model(made, World())) as loader:
        assert len(next(loader)) == 32
    shards = [f"{place}/pairs/{number:05}.tar" for number in range(4)]
    assert listed == counted == Counter(shards)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--train-data piars", "data.sources.train.shards: piars does not exist; did you mean 'pairs'?"),
        ("--train-data piars/*.tar", "the folder piars does not exist; did you mean 'pairs'?"),
        ("--train-data piars/00000.tar", "piars/00000.tar does not exist; did you mean 'pairs/00000.tar'?"),
        ("--train-data pairs/{00000..00009}.tar", "6 of 10 shards: pairs/00004.tar does not exist"),
        ("--train-data pairs.tsv", "pairs.tsv does not exist; did you mean 'pairs.csv'?"),
        ("--train-data pairs.tsv --steps 3", "pairs.tsv does not exist; did you mean 'pairs.csv'?"),
        ("--train-data pairs.csv --image-key pciture", "set the column of image paths with --image-key; did you mean "
         "'picture'?"),
        ("--train-data pairs.csv --caption-key desc", "none of 12 samples is usable: 12 x no_caption"),
        ("--train-data pairs.csv --caption-key desc --steps 3", "use --caption-key title"),
        ("--train-data pairs/00000.tar --image-key gif", "none of 21 samples is usable: 21 x no_image"),
        ("--train-data pairs/00000.tar --image-key gif --steps 3", "use --image-key jpg"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_come_first(
    flags: str, told: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [f"{number}.png" for number in range(12)]
    for number, name in enumerate(images):
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(tmp_path / name)
    rows = [f"{name},a picture of {name}" for name in images]
    (tmp_path / "pairs.csv").write_text("\n".join(["picture,title", *rows, ""]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClipstreamError) as error:
        prepare_run(read([*flags.split(), "--model", f"{place}/model.json", "--val-split", "0.2"]))
    assert told in str(error.value) and "length" not in str(error.value)
