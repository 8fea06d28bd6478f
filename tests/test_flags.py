"""Short flags: the keys that each sets, and what they mean together and over files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clipstream.config import load, resolve
from clipstream.contradictions import validate_run
from clipstream.data.settings import JsonCaption, TextCaption
from clipstream.errors import SettingsError
from clipstream.evals.settings import RetrievalSettings
from clipstream.world import World
from tests.test_config import problems, write


def test_caption_flags() -> None:
    assert load(["--train-data=a", "--caption-key=cap"]).data.sources["train"].caption == TextCaption(key="cap")
    paths = JsonCaption(path=["a.b", "c.0"], fallback="cap")
    for argv in (["--caption-key=cap", "--caption-json=a.b;c.0"], ["--caption-json=a.b;c.0", "--caption-key=cap"]):
        assert load(["--train-data=a", *argv]).data.sources["train"].caption == paths


def test_val_data_is_read_as_the_training_data_are(tmp_path: Path) -> None:
    flags = ["--train-data=a", "--val-data=v", "--caption-json=en", "--image-key=png"]
    evaluator = load(flags).evals["val"]
    assert isinstance(evaluator, RetrievalSettings)
    assert evaluator.data is not None
    assert (evaluator.data.shards, evaluator.data.image_key) == ("v", "png")
    assert evaluator.data.caption == JsonCaption(path="en")
    text = "evals: {val: {type: zero_shot, classes: imagenet, every: 5, data: {shards: o, caption: {key: label}}}}"
    evaluator = load(["--config", write(tmp_path / "a.yaml", text), *flags]).evals["val"]
    assert (evaluator.type, evaluator.every) == ("zero_shot", 5)
    assert evaluator.data is not None
    assert (evaluator.data.shards, evaluator.data.caption) == ("v", TextCaption(key="label"))


def test_val_data_is_read_as_a_files_training_data_are(tmp_path: Path) -> None:
    text = "data: {sources: {train: {shards: a, image_key: png, caption: {type: json, path: [x, y], weights: [1, 2]}}}}"
    file = write(tmp_path / "a.yaml", text)
    source = load(["--config", file, "--val-data=v"]).evals["val"].data
    assert source is not None
    assert (source.shards, source.image_key) == ("v", "png")
    assert source.caption == JsonCaption(path=["x", "y"], weights=[1, 2])
    settings = load(["--config", file, "--val-data=v", "--caption-json= en ; de"])
    assert settings.data.sources["train"].caption == JsonCaption(path=["en", "de"])
    assert settings.evals["val"].data is not None
    assert settings.evals["val"].data.caption == JsonCaption(path=["en", "de"])


def test_without_training_the_captions_flags_are_the_validations() -> None:
    source = load(["--val-data=v", "--caption-json=en"], trains=False).evals["val"].data
    assert source is not None
    assert source.caption == JsonCaption(path="en")
    with pytest.raises(SettingsError, match=r"--caption-json: .*--val-data"):
        load(["--caption-json=en"], trains=False)
    assert "--train-data" in problems(["--val-data=v", "--caption-json=en"])[0]


def test_batch_flags_have_open_clips_meaning() -> None:
    settings = load(["--batch-size", "8", "--accum-freq", "3"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (96, 8)
    settings = load(["--batch-size", "8"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (32, None)
    assert problems(["--accum-freq", "2"])[0].startswith("--accum-freq: give --batch-size")
    assert "at least 1" in problems(["--batch-size", "0"])[0]


def test_tokenizer_names(tmp_path: Path) -> None:
    named = {
        "model": {"type": "model"},
        "hf-hub:o/n": {"type": "hub", "name": "o/n"},
        "o/n": {"type": "hub", "name": "o/n"},
    }
    for text, expected in named.items():
        assert load(["--tokenizer", text]).tokenizer.model_dump(exclude={"context_length"}) == expected
    assert load(["--tokenizer", str(tmp_path)]).tokenizer.type == "path"
    assert "cannot import" in problems(["--tokenizer", "no_such_module:Name"])[0]


def test_a_command_line_of_open_clip_means_the_same() -> None:
    flags = (
        "--save-frequency 1 --log-every-n-steps 32 --report-to tensorboard --train-data cc/{000..331}.tar "
        "--val-data v.tar --warmup 1000 --batch-size 128 --lr 1e-3 --wd 0.1 --epochs 30 --workers 8 --model RN50 "
        "--beta1 0.8 --beta2 0.95 --eps 1e-7 --lr-scheduler const --grad-checkpointing --lock-image --torchcompile "
        "--siglip --precision amp_bf16 --force-image-size 192 --val-frequency 2 --train-num-samples 10240 "
        "--cache-dir c --dataset-resampled --lock-text --name mine"
    )
    settings = load(flags.split(), ranks=2)
    assert (settings.log.every, settings.log.tensorboard, settings.model.image_size) == (32, True, 192)
    assert (settings.optim.betas, settings.optim.eps, settings.schedule.type) == ((0.8, 0.95), 1e-7, "constant")
    model = settings.model
    assert model.grad_checkpointing and model.lock_image and model.lock_text and model.cache_dir == "c"
    assert settings.train.compile and settings.loss.type == "siglip"
    validate_run(settings, World(size=2))
    resolved = resolve(settings, World(size=2))
    assert (resolved.checkpoint.every, resolved.evals["val"].every) == (40, 80)  # steps of 256 samples
    assert load(["--siglip=false"]).loss.type == "auto"
    assert load(["--report-to=none"]).log.tensorboard is False


@pytest.mark.parametrize(("flags", "betas"), [("--beta1=0.8", (0.8, None)), ("--beta2=0.9", (None, 0.9))])
def test_one_beta_leaves_the_other_to_the_model(flags: str, betas: tuple[float | None, float | None]) -> None:
    assert load([flags]).optim.betas == betas


def test_epochs_need_a_length() -> None:
    run = ["--train-data=a.tar", "--steps=5"]
    for flags, said in (
        (["--save-frequency=1"], "--save-frequency: checkpoint.every_epochs: how many samples are an epoch?"),
        (
            ["--checkpoint.every=5", "--save-frequency=1", "--train-num-samples=9"],
            "--checkpoint.every: every and every_epochs are both given",
        ),
        (["--val-data=v.tar", "--val-frequency=1"], "--val-frequency: evals.val.every_epochs: how many samples"),
    ):
        with pytest.raises(SettingsError, match=re.escape(said)):
            validate_run(load([*run, *flags]), World())


def test_wrong_values_of_open_clips_flags_are_told() -> None:
    assert problems(["--beta1=x"]) == ["--beta1: expected a number, not 'x'"]
    assert "at least 0 and below 1" in problems(["--beta2=1"])[0]
    assert "--report-to" in problems(["--report-to=wandb"])[0]
    assert "--lr-scheduler" in problems(["--lr-scheduler=const-cooldown"])[0]
    assert "--siglip" in problems(["--siglip=maybe"])[0]
    assert "--optim.betas" in problems(["--optim.betas=[0.9,0.95]", "--beta1=0.9"])[0]


def test_flags_that_take_several_values() -> None:
    words = "--aug-cfg|scale=(0.4, 1.0)|color_jitter=(0.4,0.4,0.4,0.1)|color_jitter_prob=0.8|--image-mean|0.5|0.4|0.3"
    more = "--image-std 1 1 0.5 --image-interpolation bilinear --image-resize-mode longest --force-patch-dropout 0.25"
    locks = "--lock-image --lock-image-unlocked-groups 2 --lock-text --lock-text-unlocked-layers 3"
    settings = load([*words.split("|"), *more.split(), *locks.split()])
    model, augment = settings.model, settings.data.augment
    assert (augment.scale, augment.color_jitter) == ((0.4, 1.0), (0.4, 0.4, 0.4, 0.1))
    assert (augment.color_jitter_prob, augment.interpolation) == (0.8, "bilinear")
    assert (model.image_mean, model.image_std) == ((0.5, 0.4, 0.3), (1.0, 1.0, 0.5))
    assert (model.image_interpolation, model.image_resize_mode, model.patch_dropout) == ("bilinear", "longest", 0.25)
    assert (model.unlocked_groups, model.unlocked_layers) == (2, 3)
    crops = load(["--image-interpolation=random"])
    assert (crops.data.augment.interpolation, crops.model.image_interpolation) == ("random", None)


def test_flags_of_captions_together() -> None:
    def caption(*flags: str) -> dict[str, object]:
        return load([*flags, "--train-data=a.csv"]).data.sources["train"].caption.model_dump()

    assert caption("--caption-json=a", "--csv-caption-key=b")["fallback"] == "b"
    assert caption("--dataset-type=csv", "--caption-json=a")["fallback"] is None
    assert caption("--csv-caption-key=b", "--dataset-type=csv")["key"] == "b"
    assert "name different members" in problems(["--csv-caption-key=b", "--caption-key=c"])[0]
    assert "must end in .csv" in problems(["--dataset-type=csv", "--train-data=pairs.txt"])[0]
    settings = load(["--val-data=v.csv", "--csv-img-key=f", "--csv-caption-key=t", "--csv-separator=;"], trains=False)
    val = settings.evals["val"].data
    assert val is not None and not settings.data.sources
    assert (val.image_key, val.caption.model_dump()["key"], val.separator) == ("f", "t", ";")


def test_flags_that_are_not_needed_say_why(tmp_path: Path) -> None:
    for flag in ("--local-loss", "--gather-with-grad", "--ddp-static-graph", "--lock-image-freeze-bn-stats"):
        assert problems([flag])[0].startswith(f"{flag}: is always so here, leave it out (")
    off = load(["--train-data=a.tar", "--save-frequency=0", "--val-data=v.tar", "--val-frequency=0"])
    assert (off.checkpoint.every, off.evals["val"].every, off.evals["val"].every_epochs) == (0, 0, None)
    assert "imagenet" not in load(["--zeroshot-frequency=0"]).evals
    config = tmp_path / "a.yaml"
    config.write_text("evals: {imagenet: {type: retrieval, data: {shards: a.tar}}}")
    assert load(["--config", str(config), "--zeroshot-frequency=2"]).evals["imagenet"].every_epochs == 2


def test_wrong_values_of_those_are_told() -> None:
    for flags, said in (
        (["--aug-cfg", "use_timm=True"], "--aug-cfg: 'use_timm' is not offered"),
        (["--aug-cfg", "scale=wide"], "--aug-cfg: expected scale=VALUE"),
        (["--aug-cfg", "scale=(2,3)"], "--aug-cfg: data.augment.scale"),
        (["--image-mean", "red"], "--image-mean"),
        (["--image-mean", "1", "2"], "--image-mean: model.image_mean"),
        (["--image-interpolation", "nearest"], "--image-interpolation"),
    ):
        assert any(one.startswith(said) for one in problems(flags)), (flags, problems(flags))
    run = ["--train-data=a.tar", "--steps=5"]
    for flag, said in (
        ("--lock-image-unlocked-groups=1", "nothing is locked: give --lock-image"),
        ("--data.augment.color-jitter-prob=0.5", "how strong"),
        ("--data.cache-gib=9", "which folder"),
        ("--data.augment.color-jitter=[0.1,0.1,0.1,0.1]", "how often"),
    ):
        with pytest.raises(SettingsError, match=said):
            validate_run(load([*run, flag]), World())
