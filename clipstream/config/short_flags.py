"""The table of short flags: the settings that each one sets, and the meaning of its text.

A flag with the name of a flag of open_clip's trainer has the same meaning. What several flags mean together
(`--batch-size` and `--accum-freq`) is in `flags.translate`. The flags are those of open_clip_train 3.3.0 and of
open_clip's main branch of June 2026; for those without effect here, or without an equivalent, `notice` and `refusal`
give a line. Imports no torch.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from clipstream.utils.section import Path

Sets = list[tuple[Path, Any]]
SOURCE: Path = ("data", "sources", "train")
CAPTION: Path = (*SOURCE, "caption")
IMAGENETS = {"--imagenet-val": "imagenet", "--imagenet-v2": "imagenet_v2"}  # flag -> evaluator
AUGMENTS = ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob")


@dataclass(frozen=True)
class FlagAlias:
    flag: str  # its name, with dashes
    keys: tuple[str, ...]  # the dotted keys that it sets
    value: str  # placeholder for its value in the help
    meaning: str  # for the help
    # Text -> the values to set, unless it is the text for the one key; raises ValueError.
    convert: Callable[[str], Sets] | None = None
    switch: bool = False  # the flag alone means true
    many: bool = False  # several values may follow; `convert` gets them separated by line ends
    together: bool = False  # its meaning depends on other flags: see `flags.translate`


def tokenizer_sets(text: str) -> Sets:
    """The tokenizer that a name means: `model`, a local path, `module:Name`, or a repository on the Hub."""
    kind: dict[str, str] = {"type": "hub", "name": text.removeprefix("hf-hub:")}
    if text == "model":
        kind = {"type": "model"}
    elif not text.startswith("hf-hub:"):
        if text.startswith((".", "/", "~")) or os.path.exists(text):
            kind = {"type": "path", "name": text}
        elif ":" in text:
            kind = {"type": text}
    return [(("tokenizer",), kind)]


def _words(key: str, **words: Any) -> Callable[[str], Sets]:
    """Words with another value of the key; all other texts are the value themselves."""
    return lambda text: [(tuple(key.split(".")), words.get(text.lower(), text))]


def precision_sets(text: str) -> Sets:
    """open_clip's names of precisions."""
    if text.lower() == "pure_fp16":
        raise ValueError("weights in float16 alone do not train: use fp16 (autocast with a scaler) or pure_bf16")
    return [(("train", "precision"), _PRECISIONS.get(text.lower(), text))]


def image_size_sets(text: str) -> Sets:
    """One number, or open_clip's height and width, which must be equal."""
    sizes = text.split()
    if len(sizes) > 2 or len(set(sizes)) > 1:
        raise ValueError(f"expected one number (images are square), not {' '.join(sizes)!r}")
    return [(("model", "image_size"), sizes[0])]


def logs_sets(text: str) -> Sets:
    if text.lower() == "none":
        raise ValueError("a run needs a folder for checkpoints and metrics, such as /tmp/runs")
    return [(("run", "logs"), text)]


def pixels_sets(text: str) -> Sets:
    """A number; 0, no limit, is the largest one."""
    return [] if text == "0" else [(("data", "max_image_pixels"), text)]


def _true(**keys: Any) -> Callable[[str], Sets]:
    """Values of keys (with __ for a dot) that a switch sets; none if it is false."""
    values: Sets = [(tuple(key.split("__")), value) for key, value in keys.items()]
    return lambda text: [] if text.lower() == "false" else values


def _imagenet(name: str) -> Callable[[str], Sets]:
    path: Path = ("evals", name)
    return lambda folder: [
        ((*path, "type"), "zero_shot"),
        ((*path, "classes"), "imagenet"),
        ((*path, "data", "shards"), f"imagenet:{folder}"),
    ]


def _frequency(section: str) -> Callable[[str], Sets]:
    """In epochs; 0 means at the end only."""
    path = tuple(section.split("."))
    return lambda text: [((*path, "every"), 0)] if text == "0" else [((*path, "every_epochs"), text)]


def _numbers(key: str) -> Callable[[str], Sets]:
    return lambda text: [(("model", key), [float(word) for word in text.replace(",", "\n").split()])]


def _listed(key: str) -> Callable[[str], Sets]:
    """Several values, separated by ';'."""
    return lambda text: [(tuple(key.split(".")), [part.strip() for part in text.split(";") if part.strip()])]


def interpolation_sets(text: str) -> Sets:
    """In training and evaluation; `random` in training only."""
    sets: Sets = [(("data", "augment", "interpolation"), text)]
    return sets if text == "random" else [*sets, (("model", "image_interpolation"), text)]


def aug_cfg_sets(text: str) -> Sets:
    """open_clip's `name=value` pairs, with Python literals as values.

    As in timm, one strength of color_jitter, or three, is of every image unless color_jitter_prob is given.
    """
    sets: Sets = []
    for pair in text.split("\n"):
        name, _, literal = pair.partition("=")
        if name not in AUGMENTS:
            raise ValueError(
                f"unknown key {name!r}; choose from {', '.join(AUGMENTS)} (timm's augmentation is not supported)"
            )
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            raise ValueError(f"expected {name}=VALUE with a number or a tuple, not {pair!r}") from None
        sets.append((("data", "augment", name), list(value) if isinstance(value, tuple) else value))
        few = not isinstance(value, tuple | list) or len(value) == 3
        if name == "color_jitter" and value and few and "color_jitter_prob=" not in text:
            sets.append((("data", "augment", "color_jitter_prob"), 1.0))
    return sets


def _alias(flag: str, keys: str, value: str, meaning: str, convert: Any = None, **more: bool) -> FlagAlias:
    return FlagAlias(flag, tuple(keys.split()), value, meaning, convert, **more)


_PRECISIONS = {"amp": "auto", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "amp_fp16": "fp16"}
_TRAIN = "data.sources.train"

ALIASES = (
    _alias("--open-clip-defaults", "model.name data.global_batch_size train.epochs schedule.warmup data.workers", "",
           "use open_clip's defaults for flags that are not given: --model RN50 --batch-size 64 --epochs 32 "
           "--warmup 10000 --workers 4 and others", together=True, switch=True),
    _alias("--dataset-type", f"{_TRAIN}.shards", "NAME", "synthetic: generated samples, without --train-data; "
           "webdataset, csv, auto: detected from file names", together=True),
    _alias("--train-data", f"{_TRAIN}.shards", "SHARDS", "images and captions to train on: shards, a table or a "
           "directory"),
    _alias("--train-data-upsampling-factors", f"{_TRAIN}.upsampling_factors", "F::F", "relative sampling "
           "frequency of the shards in each '::'-separated part of --train-data"),
    _alias("--val-data", "evals.val.data.shards", "SHARDS", "shards or directory to evaluate on; retrieval unless "
           "evals.val.type is set"),
    _alias("--val-split", "data.val_split", "SHARE", "hold out this share of --train-data for the evaluator val, "
           "without near-duplicates in training"),
    _alias("--image-key", f"{_TRAIN}.image_key", "SUFFIXES", "suffixes of the image member, separated by ';'"),
    _alias("--csv-img-key", f"{_TRAIN}.image_key", "COLUMN", "column with the image's path"),
    _alias("--csv-caption-key", f"{_TRAIN}.caption", "COLUMN", "column with the caption (CSV default: title, "
           "else txt)", together=True),
    _alias("--csv-separator", f"{_TRAIN}.separator", "CHARACTER", "field separator of a CSV"),
    _alias("--caption-key", f"{_TRAIN}.caption", "SUFFIX", "suffix of the text member with the caption; of several, "
           "separated by ';', the first that exists is used", together=True),
    _alias("--caption-lines", f"{_TRAIN}.caption.lines", "WHICH", "of a text of several lines: all, first, or random"),
    _alias("--text-key", f"{_TRAIN}.caption", "SUFFIX", "same as --caption-key", together=True),
    _alias("--caption-json", f"{_TRAIN}.caption", "PATHS", "paths into the JSON member, separated by ';', tried in "
           "order, then --caption-key", together=True),
    _alias("--json-text-key", f"{_TRAIN}.caption", "FIELDS", "top-level fields of the JSON member, separated by ';', "
           "tried in order; text members are ignored", together=True),
    _alias("--json-text-key-probs", f"{_TRAIN}.caption", "NUMBER …", "sampling weights of these fields; those with "
           "weight 0 or without a number are fallbacks", many=True, together=True),
    _alias("--max-image-pixels", "data.max_image_pixels", "INT", "drop training images with more pixels; 0: the "
           "largest possible limit", pixels_sets),
    _alias("--dataset-resampled", "data.sampling.mode", "", "sample shards with replacement (default)",
           _words("data.sampling.mode", true="resampled", false="epoch"), switch=True),
    _alias("--workers", "data.workers", "INT", "data workers per rank, or auto"),
    _alias("--model", "model.name", "NAME", "open_clip's name, small-vit, path of a run or JSON, or ORG/NAME"),
    _alias("--pretrained", "model.pretrained", "TAG", "a tag, a weights file, a run, or ORG/NAME of the Hub"),
    _alias("--pretrained-image", "model.image_pretrained", "FILE", "weights of the timm image tower: a file, a "
           "timm tag, or without a value timm's default tag",
           _words("model.image_pretrained", true="default", false=None), switch=True),
    _alias("--text-model", "model.text_model", "FOLDER", "Hugging Face text tower in a local folder"),
    _alias("--cache-dir", "model.cache_dir", "FOLDER", "cache of the Hugging Face Hub"),
    _alias("--force-image-size", "model.image_size", "INT", "image size in pixels, overriding the model config",
           image_size_sets, many=True),
    _alias("--force-context-length", "tokenizer.context_length", "INT", "maximum length of a caption in tokens, "
           "overriding the model "
           "config; position embeddings are resampled, or stretched for longer texts"),
    _alias("--force-quick-gelu", "model.quick_gelu", "", "use QuickGELU instead of GELU", switch=True),
    _alias("--force-custom-text", "model.custom_text", "", "build the text tower as a separate module", switch=True),
    _alias("--image-mean", "model.image_mean", "R G B", "channel means", _numbers("image_mean"), many=True),
    _alias("--image-std", "model.image_std", "R G B", "channel standard deviations", _numbers("image_std"), many=True),
    _alias("--image-interpolation", "data.augment.interpolation model.image_interpolation", "NAME",
           "bicubic, bilinear, or random (in training only)", interpolation_sets),
    _alias("--image-resize-mode", "model.image_resize_mode", "NAME", "shortest, longest or squash, in evaluation"),
    _alias("--aug-cfg", "data.augment", "NAME=VALUE …", "training augmentation: scale, ratio, color_jitter, "
           "color_jitter_prob, gray_scale_prob", aug_cfg_sets, many=True),
    _alias("--force-patch-dropout", "model.patch_dropout", "NUMBER", "fraction of a ViT's patches to drop"),
    _alias("--lock-image", "model.lock_image", "", "freeze the image tower", switch=True),
    _alias("--lock-image-unlocked-groups", "model.unlocked_groups", "INT", "leave the last N groups of the image "
           "tower unlocked"),
    _alias("--lock-text", "model.lock_text", "", "freeze the text tower", switch=True),
    _alias("--lock-text-unlocked-layers", "model.unlocked_layers", "INT", "leave the last N layers of the text tower "
           "unlocked"),
    _alias("--lora", "model.image.lora.rank model.text.lora.rank", "INT", "train low-rank adapters of this rank in "
           "both towers, and freeze all else", lambda text: [(("model", kind, "lora", "rank"), text) for kind in
           ("image", "text")]),
    _alias("--image-features", "data.image_features", "STORE", "feature store that replaces images and image tower"),
    _alias("--text-features", "data.text_features", "STORE", "feature store that replaces captions and text tower"),
    _alias("--teacher-features", "data.teacher_features", "STORES", "feature stores of teachers, separated by ';'",
           _listed("data.teacher_features")),
    _alias("--grad-checkpointing", "model.grad_checkpointing", "", "recompute activations: less memory, more time",
           _words("model.grad_checkpointing", true="all", false="off"), switch=True),
    _alias("--siglip", "loss.type", "", "use the sigmoid loss", _words("loss.type", true="siglip", false="auto"),
           switch=True),
    _alias("--distill-model", "distill.model", "NAME", "teacher model to run beside training; same forms as --model"),
    _alias("--distill-pretrained", "distill.pretrained", "TAG", "teacher weights; same forms as --pretrained"),
    _alias("--tokenizer", "tokenizer", "NAME", "model, a name on the Hub, a local path, or package.module:Name",
           tokenizer_sets),
    _alias("--batch-size", "data.global_batch_size", "INT", "samples per rank (device) and micro-batch; "
           "global batch: this x --accum-freq x ranks", together=True),
    _alias("--accum-freq", "data.global_batch_size train.micro_batch_size", "INT",
           "gradient accumulation: micro-batches of --batch-size samples per step", together=True),
    _alias("--steps", "train.steps", "INT", "maximum number of training steps"),
    _alias("--epochs", "train.epochs", "NUMBER", "passes over --train-num-samples samples"),
    _alias("--train-num-samples", "train.epoch_samples", "INT", "samples per epoch"),
    _alias("--lr", "optim.lr", "NUMBER", "peak learning rate"),
    _alias("--wd", "optim.wd", "NUMBER", "weight decay"),
    _alias("--beta1", "optim.betas", "NUMBER", "beta1 of AdamW", together=True),
    _alias("--beta2", "optim.betas", "NUMBER", "beta2 of AdamW", together=True),
    _alias("--eps", "optim.eps", "NUMBER", "epsilon of AdamW"),
    _alias("--opt", "optim.type optim.name", "NAME", "optimizer: a type of optim.type, timm/NAME or module:Name",
           together=True),
    _alias("--opt-kwargs", "optim.kwargs", "NAME=VALUE …", "additional arguments of the optimizer class",
           many=True, together=True, switch=True),
    _alias("--opt-fallback-list", "optim.fallback", "PATTERN …", "patterns of parameter names that timm's Muon "
           "optimizers update with AdamW", many=True, together=True),
    _alias("--momentum", "optim.momentum", "NUMBER", "momentum of a timm optimizer", together=True),
    _alias("--text-layer-decay", "optim.text_layer_decay", "NUMBER", "layer-wise learning rate decay of the text "
           "tower"),
    _alias("--image-layer-decay", "optim.image_layer_decay", "NUMBER", "layer-wise learning rate decay of the image "
           "tower"),
    _alias("--visual-layer-decay", "optim.image_layer_decay", "NUMBER", "same as --image-layer-decay"),
    _alias("--text-pooler-own-group", "optim.text_pooler_own_group", "", "for layer decay, treat the pooler of a "
           "Hugging Face text tower as a layer below the projection", switch=True),
    _alias("--wd-exclude", "optim.wd_exclude", "PATTERN …", "patterns of parameter names without weight decay, in "
           "addition to gains, biases and scales", lambda text: [(("optim", "wd_exclude"), text.split("\n"))],
           many=True),
    _alias("--grad-clip-norm", "optim.grad_clip_norm", "NUMBER", "maximum gradient norm"),
    _alias("--warmup", "schedule.warmup", "INT", "steps of linear warm-up"),
    _alias("--lr-scheduler", "schedule.type", "NAME", "cosine, const, const-cooldown or linear",
           _words("schedule.type", const="constant")),
    _alias("--skip-scheduler", "schedule.type schedule.warmup", "", "keep the learning rate at --lr, without "
           "warm-up", together=True, switch=True),
    _alias("--epochs-cooldown", "schedule.cooldown_epochs", "NUMBER", "final epochs in which const-cooldown decays "
           "the learning rate"),
    _alias("--lr-cooldown-end", "schedule.min_lr", "NUMBER", "learning rate at the end of the schedule"),
    _alias("--lr-cooldown-power", "schedule.cooldown_power", "NUMBER", "power of const-cooldown's decay"),
    _alias("--precision", "train.precision", "NAME", "auto (alias amp), fp32, bf16 (alias amp_bf16), fp16 or "
           "pure_bf16", precision_sets),
    _alias("--fsdp", "train.parallel", "", "shard the model over ranks (FSDP2)",
           _words("train.parallel", true="fsdp", false="ddp"), switch=True),
    _alias("--fsdp-no-reshard-after-forward", "train.reshard_after_forward", "", "keep gathered weights until the "
           "backward pass", _true(train__reshard_after_forward=False), switch=True),
    _alias("--audit-precision", "log.audit_precision", "", "audit the dtypes of a step before training",
           switch=True),
    _alias("--torchcompile", "train.compile", "", "compile the repeated blocks of the towers", together=True,
           switch=True),
    _alias("--torchcompile-strategy", "train.compile", "NAME", "what to compile: blocks, towers (aliases model, "
           "task) or step", together=True),
    _alias("--torchcompile-backend", "train.compile_backend", "NAME", "backend of torch.compile", together=True),
    _alias("--torchcompile-mode", "train.compile_mode", "NAME", "mode of torch.compile's inductor", together=True),
    _alias("--save-frequency", "checkpoint.every_epochs", "NUMBER", "epochs between saved checkpoints; in steps: "
           "--checkpoint.every",
           _frequency("checkpoint")),
    _alias("--delete-previous-checkpoint", "checkpoint.keep_last", "", "keep the newest checkpoint only",
           _true(checkpoint__keep_last=1), switch=True),
    _alias("--val-frequency", "evals.val.every_epochs", "NUMBER", "epochs between evaluations on --val-data; in "
           "steps: --evals.val.every",
           _frequency("evals.val")),
    _alias("--imagenet-val", "evals.imagenet.data.shards", "FOLDER", "zero-shot on ImageNet; one folder per class",
           _imagenet("imagenet")),
    _alias("--imagenet-v2", "evals.imagenet_v2.data.shards", "FOLDER", "zero-shot on ImageNet-V2, folders 0 to 999",
           _imagenet("imagenet_v2")),
    _alias("--zeroshot-frequency", "evals.imagenet.every_epochs", "NUMBER",
           "epochs between zero-shot evaluations on ImageNet and ImageNetV2", together=True),
    _alias("--log-every-n-steps", "log.every log.terminal_every", "INT", "steps between training lines", together=True),
    _alias("--log-metric-every-n-steps", "log.every", "INT", "steps between training lines, except in the "
           "terminal", together=True),
    _alias("--profile", "log.profile", "STEPS", "steps to profile: a number, or a range such as 10-14"),
    _alias("--train-loss-ema-samples", "log.loss_ema_samples", "INT", "samples of the moving average of the loss, "
           "shown in brackets in the terminal; 0: none"),
    _alias("--log-local", "log.local", "", "write a log file for the first rank of each node", switch=True),
    _alias("--debug", "log.level run.debug", "", "show more messages, and tracebacks with errors",
           _true(log__level="debug", run__debug=True), switch=True),
    _alias("--report-to", "log.tensorboard log.sinks", "NAMES", "tensorboard, wandb, trackio, all (tensorboard "
           "and wandb), none or module:Name, separated by ','; metrics.jsonl is always written", together=True),
    _alias("--wandb-project-name", "log.sinks", "NAME", "project in wandb or trackio", together=True),
    _alias("--wandb-notes", "log.sinks", "TEXT", "notes of the run in wandb", together=True),
    _alias("--seed", "run.seed", "INT", "seed of order, augmentation, initial weights and dropout"),
    _alias("--device", "run.device", "NAME", "auto, cpu, cuda or cuda:N"),
    _alias("--logs", "run.logs", "FOLDER", "output directory, in which each run saves its own folder", logs_sets),
    _alias("--name", "run.name", "NAME", "name of the run's folder"),
    _alias("--remote-sync", "checkpoint.remote_sync", "URL", "copy checkpoints to this URL: s3://…, gs://…"),
    _alias("--resume", "checkpoint.resume", "WHAT", "path or URL of a checkpoint, latest (must exist) or auto"),
    _alias("--resume-approximate", "checkpoint.resume_approximate", "", "resume with a changed data order",
           switch=True),
)  # fmt: skip
BY_FLAG = {alias.flag: alias for alias in ALIASES}
PAGE = "docs/from-open_clip.md"
# Flags of open_clip_train that are accepted without effect, and those that are refused.
UNNEEDED = (
    "--local-loss", "--gather-with-grad", "--loss-dist-impl", "--ddp-static-graph", "--use-bn-sync",
    "--lock-image-freeze-bn-stats", "--lock-text-freeze-layer-norm", "--save-most-recent", "--val-retrieval-*",
    "--val-num-samples", "--dist-*", "--no-set-device-rank", "--fsdp-checkpoint", "--copy-codebase",
    "--remote-sync-frequency", "--remote-sync-protocol", "--length-bucketing", "--bucket-*", "--text-pad-multiple",
)  # fmt: skip
UNSUPPORTED = (
    "--*audio*", "--coca-*", "--*naflex*", "--use-bnb-linear", "--fsdp-offload-cpu", "--horovod", "--torchscript",
    "--trace",
)  # fmt: skip


def notice(flag: str) -> str | None:
    """The line about a flag that has no effect here; None for other flags."""
    return f"not needed: see {PAGE}" if any(fnmatchcase(flag, pattern) for pattern in UNNEEDED) else None


def refusal(flag: str) -> str | None:
    """The error about a flag of open_clip's that is not supported; None for other flags."""
    known = any(fnmatchcase(flag, pattern) for pattern in UNSUPPORTED)
    return f"not supported: see {PAGE}" if known else None
