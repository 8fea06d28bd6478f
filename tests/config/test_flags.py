"""Flags: the keys that each sets, alone, together and over files. What is refused is in tests/cli/test_wrong_inputs."""

from __future__ import annotations

import shlex
from math import inf
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.config_file import dump
from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_run
from clipstream.config.value_tree import advice
from clipstream.data.source_settings import JsonCaption, TextCaption
from clipstream.distributed.world import World
from clipstream.errors import nearest
from tests.support.settings_files import at, planned, problems, write

TAR = "--train-data=a.tar"
CAPTION, SINKS = "data.sources.train.caption", "log.sinks"

# Words -> values by key, and the flags that are answered by a notice; on two ranks.
SETS: list[tuple[str, dict[str, Any]]] = [
    ("--run.name 00001", {"run.name": "00001"}),
    ("--name true", {"run.name": "true"}),
    ("--run.name null", {"run.name": None}),
    ("--run.name 'a # b'", {"run.name": "a # b"}),
    ("--run.seed 1e3", {"run.seed": 1000}),
    ("--optim.betas '[0.9, 0.95]'", {"optim.betas": (0.9, 0.95)}),
    ("--run.debug", {"run.debug": True}),
    ("--run.debug no", {"run.debug": False}),
    ("--data.global_batch-size 64", {"data.global_batch_size": 64}),
    ("--lr 1 --lr 2", {"optim.lr": 2.0}),
    ("--beta1=0.8", {"optim.betas": (0.8, None)}),
    ("--beta2=0.9", {"optim.betas": (None, 0.9)}),
    ("--grad-clip-norm=inf --data.stall-timeout=inf", {"optim.grad_clip_norm": inf, "data.stall_timeout": inf}),
    ("--data.sources.my-set.shards {0..9}.tar", {"data.sources.my-set.shards": "{0..9}.tar"}),
    ("""--data.sources.a.shards "pipe:cat 'x: y' # z" """, {"data.sources.a.shards": "pipe:cat 'x: y' # z"}),
    ("--data.sources.a.shards '[a.tar, 007]'", {"data.sources.a.shards": ["a.tar", "007"]}),
    ("--data.sources.a.shards [ab].tar", {"data.sources.a.shards": "[ab].tar"}),
    ("--train-data {00..11}.tar", {"data.sources.train.shards": "{00..11}.tar"}),
    ("--evals '{e: {data: {shards: 1}}}'", {"evals.e.data.shards": "1"}),
    ("--precision amp", {"train.precision": "auto", "notices": ["--precision"]}),
    ("--precision amp_bf16", {"train.precision": "bf16"}),
    ("--dataset-resampled", {"data.sampling.mode": "resampled"}),
    ("--dataset_resampled false", {"data.sampling.mode": "epoch"}),
    ("--train-num-samples 1000", {"train.epoch_samples": 1000}),
    ("--batch-size 8 --accum-freq 3", {"data.global_batch_size": 48, "train.micro_batch_size": 8}),
    ("--batch-size 8", {"data.global_batch_size": 16, "train.micro_batch_size": None}),
    ("--tokenizer model", {"tokenizer.type": "model"}),
    ("--tokenizer hf-hub:o/n", {"tokenizer.type": "hub", "tokenizer.name": "o/n"}),
    ("--tokenizer o/n", {"tokenizer.type": "hub", "tokenizer.name": "o/n"}),
    ("--tokenizer /usr", {"tokenizer.type": "path"}),
    (f"{TAR} --caption-key=cap", {CAPTION: TextCaption(key="cap")}),
    (f"{TAR} --caption-key=cap --caption-json='a;c.0'", {CAPTION: JsonCaption(path=["a", "c.0"], fallback="cap")}),
    (f"{TAR} --caption-json='a;c.0' --caption-key=cap", {CAPTION: JsonCaption(path=["a", "c.0"], fallback="cap")}),
    (f"{TAR} --text-key 'txt;caption'", {CAPTION: TextCaption(key="txt;caption")}),
    (
        f"{TAR} --json-text-key 'a-b;c.d;e' --json-text-key-probs 0.2 0.8",
        {CAPTION: JsonCaption(path=["a-b", "c.d", "e"], weights=[0.2, 0.8, 0])},
    ),
    (
        f"{TAR} --val-data=v.tar --json-text-key a --text-key txt",
        {CAPTION: JsonCaption(path="a"), "evals.val.data.caption": JsonCaption(path="a"), "notices": ["--text-key"]},
    ),
    ("--train-data=a.csv --caption-json=a --csv-caption-key=b", {f"{CAPTION}.fallback": "b"}),
    ("--train-data=a.csv --dataset-type=csv --caption-json=a", {f"{CAPTION}.fallback": None}),
    (
        "--train-data=x/{0..2}.tar::y.tar --train-data-upsampling-factors=2::1 --caption-json=en",
        {
            "data.sources.train.parts": ["x/{0..2}.tar", "y.tar"],
            "data.sources.train.upsampling_factors": [2.0, 1.0],
            "data.sources.train.weight": 1.0,
        },
    ),
    (
        "--train-data=a --val-data=v --caption-json=en --image-key=png",
        {
            "evals.val.type": "retrieval", "evals.val.data.shards": "v", "evals.val.data.image_key": "png",
            "evals.val.data.caption": JsonCaption(path="en"),
        },
    ),
    (
        f"{TAR} --save-frequency=0 --val-data=v.tar --val-frequency=0",
        {"checkpoint.every": 0, "evals.val.every": 0, "evals.val.every_epochs": None},
    ),
    ("--zeroshot-frequency=0 --val-frequency=1", {"evals": {}, "notices": ["--val-frequency", "--zeroshot-frequency"]}),
    (
        "--imagenet-val=i --imagenet-v2=j --zeroshot-frequency=2",
        {
            "evals.imagenet.type": "zero_shot", "evals.imagenet.data.shards": "imagenet:i",
            "evals.imagenet_v2.data.shards": "imagenet:j", "evals.imagenet_v2.every_epochs": 2,
        },
    ),
    (
        "--val-frequency=2 --evals.heldout.type=loss --evals.heldout.data.shards=v.tar",
        {"evals.heldout.every_epochs": None, "notices": ["--val-frequency"]},
    ),
    *(
        (f"--val-retrieval-{flag} --lr=0.1", {"optim.lr": 0.1, "notices": [f"--val-retrieval-{flag.split()[0]}"]})
        for flag in ("chunk-size 128", "precision model")
    ),
    ("", {"train.compile": "off"}),
    ("--torchcompile", {"train.compile": "blocks"}),
    (
        "--torchcompile=false --torchcompile-strategy=task --torchcompile-mode=default",
        {"train.compile": "off", "notices": ["--torchcompile-strategy", "--torchcompile-mode"]},
    ),
    ("--torchcompile --torchcompile-strategy=model", {"train.compile": "towers"}),
    ("--torchcompile --torchcompile-strategy=step", {"train.compile": "step"}),
    ("--train.compile=true", {"train.compile": "blocks"}),
    (
        "--torchcompile --torchcompile-strategy=task --torchcompile-mode=max-autotune",
        {"train.compile": "towers", "train.compile_backend": "inductor", "train.compile_mode": "max-autotune"},
    ),
    ("--torchcompile --torchcompile-backend=eager", {"train.compile_backend": "eager"}),
    (
        "--aug-cfg 'scale=(0.4, 1.0)' 'color_jitter=(0.4,0.4,0.4,0.1)' color_jitter_prob=0.8 --image-mean 0.5 0.4 0.3 "
        "--image-std 1 1 0.5 --image-interpolation bilinear --image-resize-mode longest --force-patch-dropout 0.25",
        {
            "data.augment.scale": (0.4, 1.0), "data.augment.color_jitter": (0.4, 0.4, 0.4, 0.1),
            "data.augment.color_jitter_prob": 0.8, "data.augment.interpolation": "bilinear",
            "model.image_mean": (0.5, 0.4, 0.3), "model.image_std": (1.0, 1.0, 0.5),
            "model.image_interpolation": "bilinear", "model.image_resize_mode": "longest", "model.patch_dropout": 0.25,
        },
    ),
    *(
        (
            f"--aug-cfg {words}",
            {"data.augment.color_jitter": strengths, "data.augment.color_jitter_prob": share},
        )
        for words, strengths, share in (
            ("color_jitter=0.2", (0.2, 0.2, 0.2, 0.0), 1.0),  # of every picture, as in timm
            ("color_jitter=0.2 color_jitter_prob=0.5", (0.2, 0.2, 0.2, 0.0), 0.5),
            ("'color_jitter=(0.4,0.3,0.2)'", (0.4, 0.3, 0.2, 0.0), 1.0),
            ("color_jitter=0", None, 0.0),
        )
    ),
    ("--image-interpolation=random", {"data.augment.interpolation": "random", "model.image_interpolation": None}),
    (
        "--lock-image --lock-image-unlocked-groups 2 --lock-text --lock-text-unlocked-layers 3",
        {"model.unlocked_groups": 2, "model.unlocked_layers": 3},
    ),
    (
        "--opt timm/lamb --momentum 0.8 --beta1 0.9 --beta2 0.95 --opt-kwargs trust_clip=True most=1.5 a=b",
        {
            "optim.name": "lamb", "optim.momentum": 0.8, "optim.betas": (0.9, 0.95),
            "optim.kwargs": {"trust_clip": True, "most": 1.5, "a": "b"},
        },
    ),
    ("--opt=timm/nadamuon --opt-fallback-list token* *.proj", {"optim.fallback": ["token*", "*.proj"]}),
    ("--opt NAdamW", {"optim.type": "nadamw"}),
    (
        "--opt adamw --opt-kwargs --momentum 0.9 --wd-exclude *.bias visual.proj* --text-layer-decay 0.65",
        {
            "optim.wd_exclude": ["*.bias", "visual.proj*"], "optim.text_layer_decay": 0.65, "notices": ["--momentum"],
        },
    ),
    ("--visual-layer-decay=0.5", {"optim.image_layer_decay": 0.5}),
    (
        "--report-to wandb,tensorboard --wandb-notes n --wandb-project-name p",
        {"log.tensorboard": True, f"{SINKS}.wandb.project": "p", f"{SINKS}.wandb.notes": "n"},
    ),
    ("--report-to trackio --wandb-project-name p", {"log.tensorboard": False, f"{SINKS}.trackio.project": "p"}),
    ("--report-to=all", {"log.tensorboard": True, f"{SINKS}.wandb.type": "wandb"}),
    ("--report-to ''", {"log.tensorboard": False}),
    ("--report-to tensorboard,none", {"log.tensorboard": True, SINKS: {}}),
    ("--wandb-notes=n", {SINKS: {}, "notices": ["--wandb-notes"]}),
    (
        "--skip-scheduler --warmup 100 --lr-scheduler cosine --debug --fsdp --fsdp-no-reshard-after-forward",
        {
            "schedule.type": "constant", "schedule.warmup": 0, "log.level": "debug", "run.debug": True,
            "train.parallel": "fsdp", "train.reshard_after_forward": False, "notices": ["--warmup", "--lr-scheduler"],
        },
    ),
    (
        "--delete-previous-checkpoint --log-every-n-steps 100 --log-metric-every-n-steps 10",
        {"checkpoint.keep_last": 1, "log.every": 10, "log.terminal_every": 100},
    ),
    ("--log-every-n-steps=7", {"log.every": 7}),
    (
        "--force-context-length 20 --force-quick-gelu --force-custom-text --max-image-pixels 99",
        {
            "tokenizer.context_length": 20, "data.max_image_pixels": 99, "model.quick_gelu": True,
            "model.custom_text": True,
        },
    ),
    ("--max-image-pixels=0", {"data.max_image_pixels": Settings().data.max_image_pixels}),
    ("--force-image-size 64 64", {"model.image_size": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), SETS, ids=[words[:50] for words, _ in SETS])
def test_what_flags_set(words: str, expected: dict[str, Any]) -> None:
    settings, places = read(shlex.split(words), ranks=2)
    assert {key: at(settings, key) for key in expected if key != "notices"} | {
        "notices": [line.partition(":")[0] for line in places.notices]
    } == {"notices": [], **expected}


def test_val_data_are_read_as_the_training_data_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    flags = ["--train-data=a", "--val-data=v", "--caption-json=en", "--image-key=png"]
    text = "evals: {val: {type: zero_shot, classes: imagenet, every: 5, data: {shards: o, caption: {key: label}}}}"
    evaluator: Any = load(["--config", write(tmp_path / "a.yaml", text), *flags]).evals["val"]
    assert (evaluator.type, evaluator.every, evaluator.data.shards) == ("zero_shot", 5, "v")
    assert evaluator.data.caption == TextCaption(key="label")
    text = "data: {sources: {train: {shards: a, image_key: png, caption: {type: json, path: [x, y], weights: [1, 2]}}}}"
    file = write(tmp_path / "a.yaml", text)
    for more, caption in (
        ([], JsonCaption(path=["x", "y"], weights=[1, 2])),
        (["--caption-json= en ; de"], JsonCaption(path=["en", "de"])),
        (["--caption-json={a} by {b|;};c"], JsonCaption(path=["{a} by {b|;}", "c"])),
        ([r"--caption-json={a}\; {b}"], JsonCaption(path=r"{a}\; {b}")),
    ):
        settings = load(["--config", file, "--val-data=v", *more])
        assert at(settings, "evals.val.data.image_key") == "png"
        assert at(settings, "evals.val.data.caption") == at(settings, CAPTION) == caption
    file = write(tmp_path / "a.yaml", "evals: {imagenet: {type: retrieval, data: {shards: a.tar}}}")
    assert load(["--config", file, "--zeroshot-frequency=2"]).evals["imagenet"].every_epochs == 2


def test_the_samples_that_a_run_has_held_out_are_those_of_its_own_data(tmp_path: Path) -> None:
    own = write(tmp_path / "run.yaml", "evals: {val: {data: {shards: a, keep: /runs/one/val_split.txt}}}\n")
    found = [load(["--config", own, "--val-data=v", *more], trains=False).evals["val"].data for more in (
        [], ["--evals.val.data.keep=/runs/one/val_split.txt"],
    )]  # fmt: skip
    assert [data and data.keep for data in found] == [None, "/runs/one/val_split.txt"], "unless they are given"


def test_without_training_the_flags_of_captions_are_the_validations() -> None:
    words = "--val-data=v.csv --csv-img-key=f --csv-caption-key=t --csv-separator=;"
    settings = load(words.split(), trains=False)
    assert not settings.data.sources and at(settings, "evals.val.data.caption.key") == "t"
    assert (at(settings, "evals.val.data.image_key"), at(settings, "evals.val.data.separator")) == ("f", ";")
    assert "--val-data" in problems(["--caption-json=en"], trains=False)[0]
    assert "--train-data" in problems(["--val-data=v", "--caption-json=en"])[0]


def test_a_semicolon_in_a_text_of_fields_is_told_from_one_between_paths() -> None:
    """Of '{a}; {b}', the second field would be a fallback that no sample takes."""
    for paths in ("{a}; {b}", "a ;{b}", "{a};b "):
        assert r"write \; for one in a text" in problems(["--train-data=x", f"--caption-json={paths}"])[0]


def test_epochs_become_steps(tmp_path: Path) -> None:
    run = ["--train-data=a", "--name=x", "--batch-size=128", "--train-num-samples=10240"]
    resolved = planned(load([*run, "--save-frequency=1", "--val-data=v", "--val-frequency=2"], ranks=2), ranks=2)
    assert (resolved.checkpoint.every, resolved.evals["val"].every) == (40, 80)  # steps of 256 samples
    run += ["--epochs=5", "--lr-scheduler=const-cooldown"]
    more = ["--epochs-cooldown=2", "--lr-cooldown-end=1e-5", "--lr-cooldown-power=0.5"]
    settings = validate_run(read([*run, *more], ranks=1), World()).settings
    schedule = planned(settings).schedule
    assert (schedule.type, schedule.cooldown, schedule.cooldown_epochs) == ("const-cooldown", 160, None)
    assert (schedule.min_lr, schedule.cooldown_power) == (1e-5, 0.5)
    assert planned(load([*run, "--schedule.cooldown=7"])).schedule.cooldown == 7
    assert load(["--config", write(tmp_path / "a.yaml", dump(planned(settings)))]).schedule == schedule


@pytest.mark.parametrize("wrong", ["opt", "fsdp", "adam", "rate", "x", "momentum"])
def test_far_words_are_no_guess(wrong: str) -> None:
    assert nearest(wrong, ["eps", "seed", "lr", "wd", "data", "name", "train", "augment"]) == []


@pytest.mark.parametrize(
    "names",
    [  # of transformers' TrainingArguments, Lightning's Trainer, timm's train.py, and of habit
        ("--lr", "learning-rate", "base-learning-rate"),
        ("--wd", "weight-decay"),
        ("--epochs", "num-train-epochs", "num-epochs", "max-epochs", "epochs-num"),
        ("--steps", "max-steps", "num-steps"),
        ("--logs", "output-dir", "save-dir", "log-dir", "output"),
        ("--train-data", "data-dir", "train-dir", "train-dataset", "image-dir"),
        ("--val-data", "eval-data", "val-dir", "eval-dataset"),
        ("--val-split", "validation-split", "train-split"),
        ("--batch-size", "per-device-train-batch-size", "train-batch-size", "batch"),
        ("--accum-freq", "gradient-accumulation-steps", "accumulate-grad-batches"),
        ("--grad-clip-norm", "max-grad-norm", "gradient-clip-val", "clip-grad"),
        ("--grad-checkpointing", "gradient-checkpointing"),
        ("--warmup", "warmup-steps", "warmup-ratio"),
        ("--workers", "num-workers", "dataloader-num-workers"),
        ("--precision", "bf16", "fp16", "mixed-precision"),
        ("--resume", "resume-from-checkpoint"),
        ("--opt", "optimizer"),
        ("--beta1", "adam-beta1"),
        ("--device", "devices"),
        ("--name", "run-name"),
        ("--csv-img-key", "image-column"),
        ("--csv-caption-key", "caption-column"),
        ("--log-every-n-steps", "logging-steps"),
        ("--lock-image", "freeze-image"),
        ("--force-context-length", "max-length"),
    ],
    ids=lambda names: names[0],
)
def test_names_of_other_trainers_are_known_by_the_descriptions(names: tuple[str, ...]) -> None:
    for name in names[1:]:
        assert f"'{names[0]}'" in advice(Settings, f"--{name}"), name
    assert advice(Settings, "--push-to-hub") == advice(Settings, "--xyzzy") == "unknown flag; see --help all"
