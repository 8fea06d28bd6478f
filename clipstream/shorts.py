"""Owns the table of short flags: the keys that each sets, and what its text means; never reads a command line.

Where open_clip's trainer has a flag of the name, it means the same here.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clipstream.schema import Path

Sets = list[tuple[Path, Any]]
CAPTION: Path = ("data", "sources", "train", "caption")
PRECISIONS = {"amp": "bf16", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "amp_fp16": "fp16"}
AUGMENTS = ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob")
SCHEDULES = {"const": "constant"}
IMAGENETS = {"--imagenet-val": "imagenet", "--imagenet-v2": "imagenet_v2"}  # flag -> evaluator
MEMBERS = ("--caption-key", "--csv-caption-key")  # name a text member
READING = ("--caption-json", *MEMBERS, "--image-key", "--csv-img-key", "--csv-separator", "--dataset-type")
TOGETHER = (
    *MEMBERS,
    "--caption-json",
    "--batch-size",
    "--accum-freq",
    "--beta1",
    "--beta2",
    "--zeroshot-frequency",
)  # what they set is put together from several


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
        many: whether several values follow; `convert` has them joined by line ends.
    """

    flag: str
    keys: tuple[str, ...]
    value: str
    meaning: str
    convert: Callable[[str], Sets] | None = None
    switch: bool = False
    many: bool = False


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


def caption(paths: str | None, member: str | None) -> dict[str, Any]:
    """The caption's section: the paths first, then the text member; with one of them, that."""
    if paths is None:
        return {"type": "text", "key": member}
    parts = [path.strip() for path in paths.split(";")]
    # All of it anew: a file's weights and fallback belong to the file's paths.
    path = parts[0] if len(parts) == 1 else parts
    return {"type": "json", "path": path, "weights": None, "fallback": member}


def _dataset_type(text: str) -> Sets:
    """open_clip's names; what the files are is known from their own names, so most of them say nothing more."""
    if text == "synthetic":
        return [(("data", "sources", "train", "shards"), "synthetic:")]
    if text in ("auto", "webdataset", "csv"):
        return []
    raise ValueError(f"expected webdataset, csv, synthetic or auto, not {text!r}")


def _imagenet(name: str) -> Callable[[str], Sets]:
    def sets(folder: str) -> Sets:
        path: Path = ("evals", name)
        told = {"type": "zero_shot", "classes": "imagenet"}
        return [*(((*path, k), v) for k, v in told.items()), ((*path, "data", "shards"), f"imagenet:{folder}")]

    return sets


def _frequency(section: str) -> Callable[[str], Sets]:
    """In epochs; 0 is at the end only."""
    path = tuple(section.split("."))
    return lambda text: [((*path, "every"), 0)] if text == "0" else [((*path, "every_epochs"), text)]


def _numbers(key: str) -> Callable[[str], Sets]:
    return lambda text: [(("model", key), [float(word) for word in text.replace(",", "\n").split()])]


def _interpolation(text: str) -> Sets:
    """Of training's crops and of evaluation; random is training's alone."""
    sets: Sets = [(("data", "augment", "interpolation"), text)]
    return sets if text == "random" else [*sets, (("model", "image_interpolation"), text)]


def _aug_cfg(text: str) -> Sets:
    """open_clip's `name=value` pairs, values as Python writes them."""
    sets: Sets = []
    for pair in text.split("\n"):
        name, _, told = pair.partition("=")
        if name not in AUGMENTS:
            raise ValueError(f"{name!r} is not offered; {', '.join(AUGMENTS)} are (not timm's augmentation)")
        try:
            value = ast.literal_eval(told)
        except (ValueError, SyntaxError):
            raise ValueError(f"expected {name}=VALUE with a number or a tuple, not {pair!r}") from None
        sets.append((("data", "augment", name), list(value) if isinstance(value, tuple) else value))
    return sets


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
    Short(
        "--dataset-type",
        ("data.sources.train.shards",),
        "NAME",
        "synthetic needs no --train-data; csv takes the captions from the column title; webdataset, auto: as named",
        _dataset_type,
    ),
    Short("--train-data", ("data.sources.train.shards",), "SHARDS", "what to train on: the source named train"),
    Short("--val-data", ("evals.val.data.shards",), "SHARDS", "what to evaluate on, by retrieval unless set"),
    Short("--image-key", ("data.sources.train.image_key",), "SUFFIXES", "suffixes of the image member, by ';'"),
    Short("--csv-img-key", ("data.sources.train.image_key",), "COLUMN", "a manifest's column with the picture's path"),
    Short(
        "--csv-caption-key",
        ("data.sources.train.caption",),
        "COLUMN",
        "a manifest's column with the caption",
    ),
    Short("--csv-separator", ("data.sources.train.separator",), "CHARACTER", "of a CSV's fields"),
    Short("--caption-key", ("data.sources.train.caption",), "SUFFIX", "the text member with the caption"),
    Short(
        "--caption-json",
        ("data.sources.train.caption",),
        "PATHS",
        "path into the JSON member; several by ';' are tried in order, then the text member --caption-key, if given",
    ),
    Short(
        "--dataset-resampled",
        ("data.sampling.mode",),
        "",
        "draw shards with replacement (the default)",
        _resampled,
        True,
    ),
    Short("--workers", ("data.workers",), "INT", "reading processes a rank, or auto"),
    Short("--model", ("model.name",), "NAME", "open_clip's name, a JSON config, hf-hub:ORG/NAME or local-dir:PATH"),
    Short("--pretrained", ("model.pretrained",), "TAG", "a tag, a weights file, hf-hub:ORG/NAME or local-dir:PATH"),
    Short("--cache-dir", ("model.cache_dir",), "FOLDER", "the Hub's cache"),
    Short("--force-image-size", ("model.image_size",), "INT", "pixels a side, in place of the model's own"),
    Short("--image-mean", ("model.image_mean",), "R G B", "mean of the channels", _numbers("image_mean"), many=True),
    Short("--image-std", ("model.image_std",), "R G B", "deviation of the channels", _numbers("image_std"), many=True),
    Short(
        "--image-interpolation",
        ("data.augment.interpolation", "model.image_interpolation"),
        "NAME",
        "bicubic, bilinear, or random (in training alone)",
        _interpolation,
    ),
    Short("--image-resize-mode", ("model.image_resize_mode",), "NAME", "shortest, longest or squash, in evaluation"),
    Short(
        "--aug-cfg",
        ("data.augment",),
        "NAME=VALUE …",
        "training's augmentation: scale, ratio, color_jitter, color_jitter_prob, gray_scale_prob",
        _aug_cfg,
        many=True,
    ),
    Short("--force-patch-dropout", ("model.patch_dropout",), "NUMBER", "share of a ViT's patches left out"),
    Short("--lock-image", ("model.lock_image",), "", "freeze the image tower", switch=True),
    Short("--lock-image-unlocked-groups", ("model.unlocked_groups",), "INT", "but for its last groups"),
    Short("--lock-text", ("model.lock_text",), "", "freeze the text tower", switch=True),
    Short("--lock-text-unlocked-layers", ("model.unlocked_layers",), "INT", "but for its last layers"),
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
        ("data.global_batch_size",),
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
    Short(
        "--precision",
        ("train.precision",),
        "NAME",
        "auto, fp32, bf16 (also as amp, amp_bf16), fp16 or pure_bf16",
        _precision,
    ),
    Short("--torchcompile", ("train.compile",), "", "torch.compile the towers", switch=True),
    Short(
        "--save-frequency",
        ("checkpoint.every_epochs",),
        "NUMBER",
        "epochs between checkpoints",
        _frequency("checkpoint"),
    ),
    Short(
        "--val-frequency",
        ("evals.val.every_epochs",),
        "NUMBER",
        "epochs between evaluations on --val-data",
        _frequency("evals.val"),
    ),
    Short(
        "--imagenet-val",
        ("evals.imagenet.data.shards",),
        "FOLDER",
        "zero-shot on ImageNet, one folder a class",
        _imagenet("imagenet"),
    ),
    Short(
        "--imagenet-v2",
        ("evals.imagenet_v2.data.shards",),
        "FOLDER",
        "zero-shot on ImageNet-V2, folders 0 to 999",
        _imagenet("imagenet_v2"),
    ),
    Short("--zeroshot-frequency", ("evals.imagenet.every_epochs",), "NUMBER", "epochs between both"),
    Short("--log-every-n-steps", ("log.every",), "INT", "steps between training lines"),
    Short(
        "--report-to", ("log.tensorboard",), "NAME", "tensorboard or none; metrics.jsonl is always written", _report_to
    ),
    Short("--seed", ("run.seed",), "INT", "fixes order, augmentation, weights and dropout"),
    Short("--device", ("run.device",), "NAME", "auto, cpu, cuda or cuda:N"),
    Short("--logs", ("run.logs",), "FOLDER", "folder of runs"),
    Short("--name", ("run.name",), "NAME", "name of the run's folder"),
    Short("--remote-sync", ("checkpoint.remote_sync",), "URL", "where checkpoints are copied to: s3://…, gs://…"),
    Short("--resume", ("checkpoint.resume",), "WHAT", "a checkpoint's path or address, latest (must exist) or auto"),
    Short(
        "--resume-approximate",
        ("checkpoint.resume_approximate",),
        "",
        "go on although the data's order is another one",
        switch=True,
    ),
)
NEEDLESS = {  # open_clip's flags whose effect is always there
    "--local-loss": "the loss is exact on any number of ranks, and made of local logits",
    "--gather-with-grad": "the loss is exact on any number of ranks",
    "--ddp-static-graph": "DDP is set up by itself",
    "--use-bn-sync": "batch norm takes its statistics over all ranks",
    "--lock-image-freeze-bn-stats": "a locked tower's batch statistics stand still",
    "--lock-text-freeze-layer-norm": "a locked tower is locked whole",
    "--save-most-recent": "checkpoints/latest names the newest; --checkpoint.keep-last says how many stay",
    "--delete-previous-checkpoint": "--checkpoint.keep-last says how many stay",
}
BY_FLAG = {short.flag: short for short in SHORTS}
