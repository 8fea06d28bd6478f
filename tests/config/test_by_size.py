"""Settings by the size of the data: what is chosen, what stays as it is set, and where it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipstream.cli import main
from clipstream.config import by_size
from clipstream.config.by_size import BATCH, EVERY, LENGTHS, LR, MODE, REMAINDER, STEPS, WARMUP, Facts, choose
from clipstream.config.dump import dump
from clipstream.config.settings import load, open_sources, resolve
from clipstream.config.validate import prepare_run
from clipstream.data.order_plan import epoch_plan
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from tests.support.runs import furnish

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
    assert resolve(load(argv), World()).checkpoint.keep_best == best


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


def test_a_run_has_them_and_its_configuration_repeats_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = furnish(tmp_path)
    argv = ["--train-data", f"{place}/pairs/*.tar", "--val-data", f"{place}/val/*.tar"]
    argv += ["--model", f"{place}/model.json"]
    settings = prepare_run(load(argv))
    assert (settings.data.global_batch_size, settings.data.sampling.mode) == (32, "resampled")
    # `val` has 20 samples
    assert (settings.total_steps, settings.schedule.warmup, settings.evals["val"].every) == (80, 4, 8)
    assert (
        by_size._evaluated(settings, 100) == 20
        and by_size._evaluated(load([*argv, "--evals.val.max-samples", "7"]), 1) == 7
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump(settings))
    again = load(["--config", str(file)])
    assert by_size.by_size(again, 1) == (again, []) and again.train.steps == 80
    assert main.main(["train", *argv, "--print-config", "--lr", "2e-3"]) == 0
    printed = capsys.readouterr().out
    assert "# chosen: warm-up 4 steps: 5% of the run; --warmup sets it\n" in printed and "  warmup: 4\n" in printed
    with monkeypatch.context() as patch:  # fewer samples are left beside the held-out ones than were counted
        patch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
        patch.setattr(by_size, "BATCHES", (2, 512))
        patch.setattr(by_size, "_samples", lambda _: 100)
        split = [*argv[:2], *argv[4:], "--val-split", "0.1", "--data.sampling.mode", "indexed"]
        left = prepare_run(load(split))
        assert (
            left.data.global_batch_size == 4
            and left.train.epoch_samples == 4 * (62 // 4)
            and left.epochs == epoch_plan(left.data, list(open_sources(left).values()))
        )
    # Settings of the user stay; so does everything of data that are large, or whose size is not known.
    argv += ["--steps", "40", "--batch-size", "24"]
    own = load([*argv, "--warmup", "0", "--evals.val.every-epochs", "1", "--data.sampling.remainder", "drop"])
    assert by_size.by_size(own, 1) == (own, [])
    assert by_size.by_size(load(argv), 1)[0].schedule.warmup == 2
    kept = load([*argv, "--data.sources.train.keep", "keys.txt"])
    assert by_size.by_size(kept, 1) == (kept, [])  # how many are kept is not known
    assert BATCH not in by_size.by_size(load([*argv[:-2], "--data.lanes", "128"]), 1)[0]._chosen
    for name, value in (("LARGE", 61), ("COUNTED", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(by_size, name, value)
            assert by_size.by_size(load(argv), 1) == (load(argv), [])


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
    flags: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = furnish(tmp_path)
    images = [f"{number}.png" for number in range(12)]
    for number, name in enumerate(images):
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(tmp_path / name)
    rows = [f"{name},a picture of {name}" for name in images]
    (tmp_path / "pairs.csv").write_text("\n".join(["picture,title", *rows, ""]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClipstreamError) as error:
        prepare_run(load([*flags.split(), "--model", f"{place}/model.json", "--val-split", "0.2"]))
    assert told in str(error.value) and "length" not in str(error.value)
