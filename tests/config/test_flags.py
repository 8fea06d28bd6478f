"""Short flags: the keys that each sets, alone, together and over files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clipstream.config.dump import dump
from clipstream.config.settings import load, resolve
from clipstream.config.validate import validate_run
from clipstream.data.settings import JsonCaption, TextCaption
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, nearest
from clipstream.evals.settings import RetrievalSettings
from tests.support.settings_files import problems, write


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
    with pytest.raises(SettingsError, match=r"--data.sources: expected a mapping of names, not 3"):
        load(["--val-data=v", "--caption-json=en", "--data.sources=3"], trains=False)
    assert "--train-data" in problems(["--val-data=v", "--caption-json=en"])[0]


def test_batch_flags_have_open_clips_meaning() -> None:
    settings = load(["--batch-size", "8", "--accum-freq", "3"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (96, 8)
    settings = load(["--batch-size", "8"], ranks=4)
    assert (settings.data.global_batch_size, settings.train.micro_batch_size) == (32, None)
    assert problems(["--accum-freq", "2"])[0].startswith("--accum-freq requires --batch-size")
    assert "at least 1" in problems(["--batch-size", "0"])[0]


def test_tokenizer_names(tmp_path: Path) -> None:
    named = {
        "model": {"type": "model"},
        "hf-hub:o/n": {"type": "hub", "name": "o/n"},
        "o/n": {"type": "hub", "name": "o/n"},
    }
    for text, expected in named.items():
        assert (
            load(["--tokenizer", text]).tokenizer.model_dump(exclude={"context_length", "trust_remote_code"})
            == expected
        )
    assert load(["--tokenizer", str(tmp_path)]).tokenizer.type == "path"
    assert "cannot import" in problems(["--tokenizer", "no_such_module:Name"])[0]


def test_intervals_in_epochs_become_steps() -> None:
    flags = (
        "--save-frequency 1 --val-frequency 2 --train-data a --val-data v --train-num-samples 10240 --batch-size 128"
    )
    resolved = resolve(load([*flags.split(), "--name=x"], ranks=2), World(size=2))
    assert (resolved.checkpoint.every, resolved.evals["val"].every) == (40, 80)  # steps of 256 samples


def test_epochs_need_a_length() -> None:
    run = ["--train-data=a.tar", "--steps=5"]
    for flags, said in (
        (["--save-frequency=1"], "--save-frequency: checkpoint.every_epochs: requires the length of an epoch"),
        (
            ["--checkpoint.every=5", "--save-frequency=1", "--train-num-samples=9"],
            "--checkpoint.every: every and every_epochs are mutually exclusive",
        ),
        (["--val-data=v.tar", "--val-frequency=1"], "--val-frequency: evals.val.every_epochs: requires the length"),
    ):
        with pytest.raises(SettingsError, match=re.escape(said)):
            validate_run(load([*run, *flags]), World())


def test_wrong_values_of_open_clips_flags_are_told() -> None:
    assert load(["--beta1=0.8"]).optim.betas == (0.8, None) and load(["--beta2=0.9"]).optim.betas == (None, 0.9)
    assert problems(["--beta1=x"]) == ["--beta1: optim.betas.0: expected a number, not 'x'"]
    assert "at least 0 and below 1" in problems(["--beta2=1"])[0]
    assert "--report-to" in problems(["--report-to=comet"])[0]
    assert "--lr-scheduler" in problems(["--lr-scheduler=const-warmup"])[0]
    assert "--siglip" in problems(["--siglip=maybe"])[0]
    assert "--optim.betas" in problems(["--optim.betas=[0.9,0.95]", "--beta1=0.9"])[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "off"),
        ("--torchcompile", "blocks"),
        ("--torchcompile-strategy=task --torchcompile-mode=default", "off"),
        ("--torchcompile=false --torchcompile-strategy=model", "off"),
        *((f"--torchcompile --torchcompile-strategy={theirs}", "towers") for theirs in ("model", "task")),
        ("--torchcompile --torchcompile-strategy=step", "step"),
        ("--train.compile=true", "blocks"),
        ("--train.compile=off", "off"),
    ],
)
def test_open_clips_strategies_of_compilation(flags: str, expected: str) -> None:
    assert load(["--train-data=a.tar", *flags.split()]).train.compile == expected


def test_backend_and_mode_of_compilation() -> None:
    train = load(
        ["--train-data=a.tar", "--torchcompile", "--torchcompile-strategy=task", "--torchcompile-mode=max-autotune"]
    ).train
    assert (train.compile_backend, train.compile_mode) == ("inductor", "max-autotune")
    assert (
        load(["--train-data=a.tar", "--torchcompile", "--torchcompile-backend=eager"]).train.compile_backend == "eager"
    )


def test_const_cooldown_is_taken_as_open_clip_takes_it(tmp_path: Path) -> None:
    run = ["--train-data=a.tar", "--batch-size=64", "--train-num-samples=640", "--epochs=5"]
    run += ["--lr-scheduler=const-cooldown"]
    more = ["--epochs-cooldown=2", "--lr-cooldown-end=1e-5", "--lr-cooldown-power=0.5"]
    settings = load([*run, *more], ranks=1)
    validate_run(settings, World())
    schedule = resolve(settings, World()).schedule
    assert (schedule.type, schedule.cooldown, schedule.cooldown_epochs) == ("const-cooldown", 20, None)
    assert (schedule.min_lr, schedule.cooldown_power) == (1e-5, 0.5)
    in_steps = load([*run, "--schedule.cooldown=7"])
    assert resolve(in_steps, World()).schedule.cooldown == 7
    assert load(["--config", write(tmp_path / "a.yaml", dump(resolve(settings, World())))]).schedule == schedule


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lr-scheduler const-cooldown", "requires --epochs-cooldown"),
        ("--lr-scheduler const-cooldown --epochs-cooldown 1 --schedule.cooldown 5", "mutually exclusive"),
        ("--epochs-cooldown 1", "a key of type const-cooldown only"),
        ("--lr-cooldown-power 2", "a key of type const-cooldown only"),
        ("--lr-scheduler const-cooldown --epochs-cooldown -1", "--epochs-cooldown"),
    ],
)
def test_a_cooldown_without_its_schedule_or_length_is_told(flags: str, said: str) -> None:
    found = problems(flags.split())
    assert len(found) == 1 and said in found[0]


def test_a_cooldown_in_epochs_needs_their_length() -> None:
    cooled = ["--train-data=a.tar", "--steps=9", "--lr-scheduler=const-cooldown", "--epochs-cooldown=1"]
    with pytest.raises(SettingsError, match=r"--epochs-cooldown: .*requires the length of an epoch"):
        validate_run(load(cooled), World())
    varied = [*cooled, "--train-num-samples=9", "--data.batch-schedule=[[5, 9]]"]
    with pytest.raises(SettingsError, match=r"--epochs-cooldown: .*set --schedule.cooldown, in steps"):
        validate_run(load(varied), World())


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
    for words, strengths, share in (
        (["0.2"], (0.2, 0.2, 0.2, 0.0), 1.0),  # of every picture, as in timm
        (["0.2", "color_jitter_prob=0.5"], (0.2, 0.2, 0.2, 0.0), 0.5),
        (["(0.4,0.3,0.2)"], (0.4, 0.3, 0.2, 0.0), 1.0),
        (["0"], None, 0.0),
    ):
        augment = load(["--aug-cfg", f"color_jitter={words[0]}", *words[1:]]).data.augment
        assert (augment.color_jitter, augment.color_jitter_prob) == (strengths, share)
    crops = load(["--image-interpolation=random"])
    assert (crops.data.augment.interpolation, crops.model.image_interpolation) == ("random", None)


def test_flags_of_captions_together() -> None:
    def caption(*flags: str) -> dict[str, object]:
        return load([*flags, "--train-data=a.csv"]).data.sources["train"].caption.model_dump()

    assert caption("--caption-json=a", "--csv-caption-key=b")["fallback"] == "b"
    assert caption("--dataset-type=csv", "--caption-json=a")["fallback"] is None
    assert caption("--csv-caption-key=b", "--dataset-type=csv")["key"] == "b"
    assert "name different members" in problems(["--csv-caption-key=b", "--caption-key=c"])[0]
    assert "the name of pairs.txt says otherwise" in problems(["--dataset-type=csv", "--train-data=pairs.txt"])[0]
    settings = load(["--val-data=v.csv", "--csv-img-key=f", "--csv-caption-key=t", "--csv-separator=;"], trains=False)
    val = settings.evals["val"].data
    assert val is not None and not settings.data.sources
    assert (val.image_key, val.caption.model_dump()["key"], val.separator) == ("f", "t", ";")


def test_intervals_of_0_are_at_the_end_only(tmp_path: Path) -> None:
    off = load(["--train-data=a.tar", "--save-frequency=0", "--val-data=v.tar", "--val-frequency=0"])
    assert (off.checkpoint.every, off.evals["val"].every, off.evals["val"].every_epochs) == (0, 0, None)
    assert "imagenet" not in load(["--zeroshot-frequency=0"]).evals
    other = load(["--val-frequency=2", "--evals.heldout.type=loss", "--evals.heldout.data.shards=v.tar"])
    (notice,) = other.places.notices
    assert (
        other.evals["heldout"].every_epochs is None and "--val-frequency: has no effect without --val-data;" in notice
    )
    config = tmp_path / "a.yaml"
    config.write_text("evals: {imagenet: {type: retrieval, data: {shards: a.tar}}}")
    assert load(["--config", str(config), "--zeroshot-frequency=2"]).evals["imagenet"].every_epochs == 2


def test_wrong_values_of_those_are_told() -> None:
    for flags, said in (
        (["--aug-cfg", "use_timm=True"], "--aug-cfg: unknown key 'use_timm'"),
        (["--aug-cfg", "scale=wide"], "--aug-cfg: expected scale=VALUE"),
        (["--aug-cfg", "scale=(2,3)"], "--aug-cfg: data.augment.scale"),
        (["--image-mean", "red"], "--image-mean"),
        (["--image-mean", "1", "2"], "--image-mean: model.image_mean"),
        (["--image-interpolation", "nearest"], "--image-interpolation"),
    ):
        assert any(one.startswith(said) for one in problems(flags)), (flags, problems(flags))
    run = ["--train-data=a.tar", "--steps=5"]
    for flag, said in (
        ("--lock-image-unlocked-groups=1", "requires --lock-image"),
        ("--data.augment.color-jitter-prob=0.5", "requires data.augment.color_jitter, e.g."),
        ("--data.cache-gib=9", "requires data.cache"),
        ("--data.augment.color-jitter=[0.1,0.1,0.1,0.1]", "requires data.augment.color_jitter_prob"),
    ):
        with pytest.raises(SettingsError, match=said):
            validate_run(load([*run, flag]), World())


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--use-bnb-linear", "bitsandbytes layers are not supported"),
        ("--audio-ext", "audio is not supported"),
        ("--lock-imgae", "did you mean '--lock-image'?"),
        ("--zeroshot", "did you mean '--zeroshot-frequency'?"),
        ("--warmup-steps", "did you mean '--warmup'?"),
        ("--global-batchsize", "did you mean '--data.global-batch-size'?"),
        ("--every", "'--checkpoint.every' or '--log.every'"),
        ("--learning-rate", "see --help all"),
        ("--foo", "see --help all"),
    ],
)
def test_a_flag_that_is_not_known_is_guessed_only_where_one_is_near(flag: str, told: str) -> None:
    (found,) = problems([flag, "adamw"])
    assert told in found
    assert "did you mean" in found or "mean" not in told


@pytest.mark.parametrize("wrong", ["opt", "fsdp", "adam", "rate", "x", "momentum"])
def test_far_words_are_no_guess(wrong: str) -> None:
    assert nearest(wrong, ["eps", "seed", "lr", "wd", "data", "name", "train", "augment"]) == []


def test_report_to_says_what_it_takes() -> None:
    assert load(["--report-to", "tensorboard,none"]).log.tensorboard is True
    for text in ("comet", "tensorboard,comet", "true", "csv"):
        (found,) = problems(["--report-to", text])
        assert found.startswith("--report-to: expected tensorboard, wandb, trackio, none, all or module:Name, not ")
        assert "metrics.jsonl" in found and "pandas.read_json(path, lines=True)" in found
