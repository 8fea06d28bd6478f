"""Settings that do not go together: each record is refused or told, and the documentation lists it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs.train import main
from clipstream.config.settings import read
from clipstream.config.validate import records, validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.utils.section import Conflict, Is
from docs.generate import conflict_row, conflicts_page
from tests.support.pictures import make_shards
from tests.support.runs import MODEL, flags

# A value with which the first or the second condition on a key holds, where the record does not say it.
VALUES = {
    "data.augment.ratio": "[0.9, 1.1]", "data.augment.scale": "[0.5, 1]", "data.augment.interpolation": "bilinear",
    "data.augment.color_jitter": "[0.4, 0.4, 0.4, 0.1]", "data.augment.color_jitter_prob": "0.5",
    "data.augment.flip": "0.5", "data.augment.gray_scale_prob": "0.5", "data.batch_schedule": "[[5, 9]]",
    "data.image_features": "STORE", "data.text_features": "STORE", "data.cache": "FOLDER",
    "data.teacher_features": "[STORE]",
    "data.sources.NAME.caption.negatives": "swap", "data.sources.NAME.caption.short": "sentence",
    "data.sampling.mode": "epoch", "data.sampling.remainder": "pad", "data.sources.NAME.upsampling_factors": "[1]",
    "distill": "{weight: 2}", "distill.model": "RN50", "distill.pretrained": "openai", "evals.NAME.prompts": "[a cat]",
    "evals.NAME.data.upsampling_factors": "[1]", "loss.duplicates_by": "captions", "model.image_pretrained": "in1k",
    "model.image.lora": "{rank: 4}", "model.text.lora": "{rank: 4}",
    "model.image.precision": "bf16", "model.text.precision": "bf16", "model.name": "hf-hub:a/b",
    "model.pretrained": "openai", "model.patch_dropout": "0.5", "optim.fallback": "[head]", "optim.name": "lamb",
    "train.compile": "blocks", "train.compile_backend": "eager", "train.compile_mode": "default", "train.ema": "0.9",
    "train.early_stop.metric_by": "max",
    "train.kept_micro_batches": "2", "train.ema_warmup": "true",
    "model.grad_checkpointing": "2GiB", "model.image.grad_checkpointing": "2GiB",
    "model.text.grad_checkpointing": "2GiB", "train.early_stop.min_delta": "0.1", "optim.lr": "0",
}  # fmt: skip
# What else must be set, so that the rest is right; by the start of the first key.
BESIDE = {
    "optim.fallback": ["--optim.type=timm"],
    "optim.name": ["--optim.type=timm"],
    "optim.text_pooler_own_group": ["--optim.type=adamw"],
    "schedule.cooldown": ["--schedule.type=const-cooldown"],
    "loss.": ["--loss.type=clip"],
    "data.shuffle": ["--data.sampling.mode=indexed", "--data.sources.one.shards=synthetic:"],
    "evals.NAME": ["--evals.one.data.shards=a.tar", "--evals.one.type=retrieval"],
    "train.epochs": ["--train-num-samples=99"],
    "train.samples": ["--train-num-samples=99"],
    "data.augment.color_jitter set": ["--data.augment.color_jitter_prob=0.5"],
    "data.augment.color_jitter_prob": ["--data.augment.color_jitter=[0.4, 0.4, 0.4, 0.1]"],
}


# Numbers that do not fit each other, in a run of 20 steps on 3 ranks where ranks matter.
NUMBERS = {
    "schedule.warmup train.steps": "21", "model.unlock_image_at train.steps": "20 --lock-image",
    "model.unlock_text_at train.steps": "20 --lock-text", "data.batch_schedule train.steps": "[[20,9]]",
    "log.profile train.steps": "19-21", "schedule.min_lr optim.lr": "1", "data.global_batch_size ranks": "2",
    "data.lanes ranks": "2", "data.lanes data.global_batch_size": "9999",
    "train.micro_batch_size data.global_batch_size": "9999", "run.timeout data.stall_timeout": "9",
    "stages.NAME.until train.steps": "20 --stages.one.set={optim.lr: 1}",
}  # fmt: skip


def argv_of(prefix: str, pair: Conflict) -> list[str]:
    first = prefix + next(iter(pair.when))
    argv = ["--data.sources.one.shards=a.tar", "--name=x"]
    if (value := NUMBERS.get(" ".join(pair.when))) is not None:
        first = first.replace("NAME", "one")
        return [*argv, "--train.steps=20", *f"--{first}={value}".split(" ", 1)]
    argv += [word for start, words in BESIDE.items() if f"{first} set".startswith(start) for word in words]
    keys = {prefix + key: wanted for key, wanted in pair.when.items()}
    for key, wanted in keys.items():
        literal: Any = wanted[0] if isinstance(wanted, tuple) else wanted
        if key == "ranks" or (isinstance(literal, Is) and literal.words == "not set"):
            continue
        text = "null" if literal is None else str(literal).lower()
        if isinstance(literal, Is):
            text = literal.words if literal.test is None else VALUES.get(key, "7")
        argv.append(f"--{key.replace('NAME', 'one')}={text}")
    adapts = any(".lora" in key for key in keys)  # which no locked tower does
    if not adapts and any(key.startswith(("model.image.", "model.unlock_image", "model.unlocked_gr")) for key in keys):
        argv += [] if keys.get("model.lock_image") is False else ["--model.lock_image=true"]
    if not adapts and any(key.startswith(("model.text.", "model.unlock_text", "model.unlocked_l")) for key in keys):
        argv += [] if keys.get("model.lock_text") is False else ["--model.lock_text=true"]
    return argv if keys.keys() & {"train.steps", "train.samples", "train.epochs"} else [*argv, "--train.steps=20"]


RECORDS = {conflict_row(prefix, pair): (prefix, pair) for prefix, pair in records()}


# The model of a command by which code that knows the model or the machine refuses, by the second key.
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
CONVOLUTIONS = {"timm_model_name": "test_efficientnet", "image_size": 32, "timm_pool": "avg", "timm_proj": "linear"}
LATE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a tower without repeated blocks": ({"vision_cfg": RESNET}, ["--model.image.grad_checkpointing=all"]),
    "a tower with batch norm in its blocks": ({"vision_cfg": CONVOLUTIONS}, ["--grad-checkpointing"]),
    "the image tower without patches that it can leave out": (
        {"vision_cfg": CONVOLUTIONS | {"timm_model_name": "test_convnext"}}, ["--force-patch-dropout=0.5"],
    ),
    "a text tower that depends on padding (SigLIP)": (
        {"text_cfg": MODEL["text_cfg"] | {"no_causal_mask": True}, "custom_text": True}, ["--model.text_buckets=2"],
    ),
    "micro_batch_size, the model with batch norm": ({"vision_cfg": RESNET}, ["--train.micro-batch-size=8"]),
    "micro_batch_size, the device a CPU": ({}, ["--train.micro-batch-size=auto"]),
}  # fmt: skip
# Refused on several ranks or by a tower of a class of one's own, or told of a store: tests of these packages hold them.
ELSEWHERE = (
    "parallel, the model with batch norm", "compile, the model without repeated blocks",
    "the features of images without augmented views",
)  # fmt: skip
SHOWN = ("the ", "a ")


def late(pair: Conflict) -> str | None:
    """What the model or the machine shows, in the words of the page; None for a record of settings alone."""
    first, *others = pair.when
    words = [f"{key} {pair.when[key].words}" for key in others if key.startswith(SHOWN)]
    if not words:
        return None
    return next(known for known in (*LATE, *ELSEWHERE) if known in (words[0], f"{first}, {words[0]}"))


EARLY = {row: found for row, found in RECORDS.items() if late(found[1]) is None}


@pytest.mark.parametrize("known", LATE)
def test_what_a_model_does_not_take(known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shards(tmp_path / "pairs", [9] * 4)
    model, argv = LATE[known]
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, **model}), encoding="utf-8")
    (pair,) = [pair for _, pair in RECORDS.values() if late(pair) == known]
    reason = max(re.split(r"\{[^}]*\}", pair.reason), key=len)
    assert main(flags(tmp_path, "x", *argv, "--data.global-batch-size", "8", "--workers", "0")) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("row", "found"), EARLY.items(), ids=[row.split(" | ")[0][2:] for row in EARLY])
def test_what_does_not_go_together(
    row: str, found: tuple[str, Conflict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    prefix, pair = found
    monkeypatch.chdir(tmp_path)
    reason = max(re.split(r"\{[^}]*\}", pair.reason), key=len).strip()
    argv = argv_of(prefix, pair)
    world = World(rank=0, size=3 if {"ranks", "run.timeout"} & pair.when.keys() else 1)
    if pair.notice:
        caplog.set_level(logging.INFO, "clipstream")
        validate_run(read(argv, ranks=world.size), world)
        assert reason in caplog.text and "notice: " in caplog.text
        return
    with pytest.raises(SettingsError) as caught:
        validate_run(read(argv, ranks=world.size), world)
    assert reason in str(caught.value)


def test_the_page_lists_every_record() -> None:
    page = conflicts_page()
    assert [line for line in page.splitlines() if line.startswith(("| `", "| the"))] == [
        row for notice in (False, True) for row, (_, pair) in RECORDS.items() if pair.notice == notice
    ]
