"""Owns the table of short flags: the keys that each sets, and what its text means; never reads a command line.

Where open_clip's trainer has a flag of the name, it means the same here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clipstream.schema import Path

Sets = list[tuple[Path, Any]]
CAPTION: Path = ("data", "sources", "train", "caption")
PRECISIONS = {"amp": "bf16", "amp_bf16": "bf16", "amp_bfloat16": "bf16"}
SCHEDULES = {"const": "constant"}
TOGETHER = ("--batch-size", "--accum-freq", "--beta1", "--beta2")  # what they set is put together from several


@dataclass(frozen=True)
class Short:
    """A short flag.

    Attributes:
        flag: its name, with dashes.
        keys: the keys that it sets, dotted.
        value: what stands for its value in the help.
        meaning: for the help.
        convert: text -> the values to set, where it is more than the one key with the text.
        switch: whether the flag alone means true.
    """

    flag: str
    keys: tuple[str, ...]
    value: str
    meaning: str
    convert: Callable[[str], Sets] | None = None
    switch: bool = False


def tokenizer_sets(text: str) -> Sets:
    """The tokenizer that a name means: the model's, one's own, a local path, or a name on the Hub."""
    if text == "model":
        return [(("tokenizer",), {"type": "model"})]
    if text.startswith("hf-hub:"):
        return [(("tokenizer",), {"type": "hub", "name": text.removeprefix("hf-hub:")})]
    if text.startswith((".", "/", "~")) or os.path.exists(text):
        return [(("tokenizer",), {"type": "path", "name": os.path.expanduser(text)})]
    if ":" in text:
        return [(("tokenizer",), {"type": text})]
    return [(("tokenizer",), {"type": "hub", "name": text})]


def _caption_key(text: str) -> Sets:
    return [(CAPTION, {"type": "text", "key": text})]


def caption_json(text: str) -> Sets:
    paths = [path.strip() for path in text.split(";")]
    # All of it anew: a file's weights and fallback belong to the file's paths.
    path = paths[0] if len(paths) == 1 else paths
    return [(CAPTION, {"type": "json", "path": path, "weights": None, "fallback": None})]


def _resampled(text: str) -> Sets:
    modes = {"true": "resampled", "false": "epoch"}
    return [(("data", "sampling", "mode"), modes.get(text.lower(), text))]


def _precision(text: str) -> Sets:
    return [(("train", "precision"), PRECISIONS.get(text, text))]


def _schedule(text: str) -> Sets:
    return [(("schedule", "type"), SCHEDULES.get(text, text))]


def _siglip(text: str) -> Sets:
    return [(("loss", "type"), {"true": "siglip", "false": "auto"}.get(text.lower(), text))]


def _report_to(text: str) -> Sets:
    return [(("log", "tensorboard"), {"tensorboard": True, "all": True, "none": False, "": False}.get(text, text))]


SHORTS = (
    Short("--train-data", ("data.sources.train.shards",), "SHARDS", "what to train on: the source named train"),
    Short("--val-data", ("evals.val.data.shards",), "SHARDS", "what to evaluate on, by retrieval unless set"),
    Short("--image-key", ("data.sources.train.image_key",), "SUFFIXES", "suffixes of the image member, by ';'"),
    Short("--caption-key", ("data.sources.train.caption",), "SUFFIX", "the text member with the caption", _caption_key),
    Short(
        "--caption-json",
        ("data.sources.train.caption",),
        "PATHS",
        "path into the JSON member; several by ';' are tried in order, then the text member --caption-key, if given",
        caption_json,
    ),
    Short(
        "--dataset-resampled",
        ("data.sampling.mode",),
        "",
        "draw shards with replacement (the default)",
        _resampled,
        True,
    ),
    Short("--workers", ("data.workers",), "INT", "reading processes a rank"),
    Short("--model", ("model.name",), "NAME", "open_clip's name, a JSON config, hf-hub:ORG/NAME or local-dir:PATH"),
    Short("--pretrained", ("model.pretrained",), "TAG", "a tag, a weights file, hf-hub:ORG/NAME or local-dir:PATH"),
    Short("--cache-dir", ("model.cache_dir",), "FOLDER", "the Hub's cache"),
    Short("--force-image-size", ("model.image_size",), "INT", "pixels a side, in place of the model's own"),
    Short("--lock-image", ("model.lock_image",), "", "freeze the image tower", switch=True),
    Short("--lock-text", ("model.lock_text",), "", "freeze the text tower", switch=True),
    Short("--grad-checkpointing", ("model.grad_checkpointing",), "", "save memory, take longer", switch=True),
    Short("--siglip", ("loss.type",), "", "the sigmoid loss", _siglip, True),
    Short(
        "--tokenizer",
        ("tokenizer",),
        "NAME",
        "model, a name on the Hub, a local path, or package.module:Name",
        tokenizer_sets,
    ),
    Short(
        "--batch-size",
        ("data.global_batch_size", "train.micro_batch_size"),
        "INT",
        "samples that a rank takes at once; the global batch is this x --accum-freq x ranks",
    ),
    Short(
        "--accum-freq",
        ("data.global_batch_size", "train.micro_batch_size"),
        "INT",
        "batches of --batch-size that a rank puts together for one step",
    ),
    Short("--steps", ("train.steps",), "INT", "steps of the whole run"),
    Short("--epochs", ("train.epochs",), "NUMBER", "passes over --train-num-samples samples"),
    Short("--train-num-samples", ("train.epoch_samples",), "INT", "samples that make an epoch"),
    Short("--lr", ("optim.lr",), "NUMBER", "peak learning rate"),
    Short("--wd", ("optim.wd",), "NUMBER", "weight decay"),
    Short("--beta1", ("optim.betas",), "NUMBER", "decay of the gradients' mean"),
    Short("--beta2", ("optim.betas",), "NUMBER", "decay of the gradients' variance"),
    Short("--eps", ("optim.eps",), "NUMBER", "what AdamW adds to the variance's root"),
    Short("--grad-clip-norm", ("optim.grad_clip_norm",), "NUMBER", "largest norm of the gradients"),
    Short("--warmup", ("schedule.warmup",), "INT", "steps of linear warm-up"),
    Short("--lr-scheduler", ("schedule.type",), "NAME", "cosine, const or linear", _schedule),
    Short("--precision", ("train.precision",), "NAME", "fp32 or bf16 (also as amp, amp_bf16)", _precision),
    Short("--torchcompile", ("train.compile",), "", "torch.compile the towers", switch=True),
    Short("--save-frequency", ("checkpoint.every_epochs",), "NUMBER", "epochs between checkpoints"),
    Short("--val-frequency", ("evals.val.every_epochs",), "NUMBER", "epochs between evaluations on --val-data"),
    Short("--log-every-n-steps", ("log.every",), "INT", "steps between training lines"),
    Short(
        "--report-to", ("log.tensorboard",), "NAME", "tensorboard or none; metrics.jsonl is always written", _report_to
    ),
    Short("--seed", ("run.seed",), "INT", "fixes order, augmentation, weights and dropout"),
    Short("--device", ("run.device",), "NAME", "auto, cpu, cuda or cuda:N"),
    Short("--logs", ("run.logs",), "FOLDER", "folder of runs"),
    Short("--name", ("run.name",), "NAME", "name of the run's folder"),
    Short("--resume", ("checkpoint.resume",), "WHAT", "a checkpoint's path, latest (must exist) or auto"),
)
BY_FLAG = {short.flag: short for short in SHORTS}
