"""The short flags: the settings that each one sets, the meaning of its text, and what several mean together.

A flag with the name of a flag of open_clip's trainer has the same meaning. Flags as typed enter `translate`; settings
by path leave, before they are validated. The flags are those of open_clip_train 3.3.0 and of
open_clip's main branch of June 2026; for those without effect here, or without an equivalent, `notice` and `refusal`
give a line. Imports no torch.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from clipstream.data.json_path import step_of
from clipstream.data.settings import MAX_PIXELS
from clipstream.report.settings import SinkSettings
from clipstream.storage.shard_url import parts_of, redact, table_format
from clipstream.training.optim import OptimSettings
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import Path, builtin_parts, types_of

Sets = list[tuple[Path, Any]]
Given = Mapping[str, str]
Found = Iterator[tuple[str, Path, Any]]
SOURCE: Path = ("data", "sources", "train")
CAPTION: Path = (*SOURCE, "caption")
IMAGENETS = {"--imagenet-val": "imagenet", "--imagenet-v2": "imagenet_v2"}  # flag -> evaluator
AUGMENTS = ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob")


@dataclass(frozen=True)
class FlagAlias:
    flag: str  # its name, with dashes
    keys: tuple[str, ...]  # the dotted keys that it sets
    value: str = ""  # placeholder for its value in the help
    meaning: str = ""  # for the help; empty: that of its key's setting, whose form of a value it has, too
    words: Mapping[str, Any] = field(default_factory=dict)  # text, in lower case -> another value, or its error
    convert: Callable[[str], Any] | None = None  # other text -> the value of its keys; raises ValueError
    sets: Callable[[str], Sets] | None = None  # text -> paths and values, where these differ by key
    switch: bool = False  # the flag alone means true; so it does where true is one of the words, or the key is a bool
    many: bool = False  # several values may follow; `convert` gets them separated by line ends
    together: bool = False  # its meaning depends on other flags: see `translate`


def tokenizer_of(text: str) -> dict[str, str]:
    """The tokenizer that a name means: `model`, a local path, `module:Name`, or a repository on the Hub."""
    if text == "model":
        return {"type": "model"}
    if not text.startswith("hf-hub:"):
        if text.startswith((".", "/", "~")) or os.path.exists(text):
            return {"type": "path", "name": text}
        if ":" in text:
            return {"type": text}
    return {"type": "hub", "name": text.removeprefix("hf-hub:")}


def _one_size(text: str) -> str:
    """One number, or open_clip's height and width, which must be equal."""
    sizes = text.split()
    if len(sizes) > 2 or len(set(sizes)) > 1:
        raise ValueError(f"expected one number (images are square), not {' '.join(sizes)!r}")
    return sizes[0]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.replace(",", "\n").split()]


def _imagenet(name: str) -> Callable[[str], Sets]:
    path: Path = ("evals", name)
    return lambda folder: [
        ((*path, "type"), "zero_shot"),
        ((*path, "classes"), "imagenet"),
        ((*path, "data", "shards"), f"imagenet:{folder}"),
    ]


def _frequency(*path: str) -> Callable[[str], Sets]:
    """In epochs; 0 means at the end only."""
    return lambda text: [((*path, "every"), 0)] if text == "0" else [((*path, "every_epochs"), text)]


def _interpolation(text: str) -> Sets:
    """In training and evaluation; `random` in training only."""
    keys = ("data", "augment", "interpolation"), ("model", "image_interpolation")
    return [(key, text) for key in keys[: 1 if text == "random" else 2]]


def _debug(text: str) -> Sets:
    return [] if text.lower() == "false" else [(("log", "level"), "debug"), (("run", "debug"), True)]


def _literal(text: str) -> Any:
    """A Python literal, with tuples as lists. Raises ValueError, SyntaxError: the text is no literal."""
    value = ast.literal_eval(text)
    return list(value) if isinstance(value, tuple) else value


def _augment(text: str) -> Sets:
    """open_clip's `name=value` pairs, with Python literals as values.

    As in timm, one strength of color_jitter, or three, is of every image unless color_jitter_prob is given.
    """
    found: dict[str, Any] = {}
    for pair in text.split("\n"):
        name, _, literal = pair.partition("=")
        if name not in AUGMENTS:
            known = f"{', '.join(AUGMENTS)} (timm's augmentation is not supported)"
            raise ValueError(f"unknown key {name!r}; choose from {known}")
        try:
            found[name] = _literal(literal)
        except (ValueError, SyntaxError):
            raise ValueError(f"expected {name}=VALUE with a number or a tuple, not {pair!r}") from None
    jitter = found.get("color_jitter")
    if jitter and (not isinstance(jitter, list) or len(jitter) == 3):
        found.setdefault("color_jitter_prob", 1.0)
    return [(("data", "augment", name), value) for name, value in found.items()]


def _alias(flag: str, keys: str, value: str = "", meaning: str = "", **more: Any) -> FlagAlias:
    return FlagAlias(flag, tuple(keys.split()), value, meaning, **more)


_joint = partial(_alias, together=True)


_PRECISIONS = {
    "amp": "auto", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "amp_fp16": "fp16",
    "pure_fp16": ValueError(
        "weights in float16 alone do not train: use fp16 (autocast with a scaler) or pure_bf16"
    ),
}  # fmt: skip
_NO_LOGS = ValueError("a run requires a folder for checkpoints and metrics, such as /tmp/runs")
_TRAIN = "data.sources.train"

ALIASES = (
    _joint("--open-clip-defaults", "model.name data.global_batch_size train.epochs schedule.warmup data.workers", "",
           "use open_clip's defaults for flags that are not given: --model RN50 --batch-size 64 --epochs 32 --warmup "
           "10000 --workers 4 and others", switch=True),
    _joint("--dataset-type", f"{_TRAIN}.shards", "NAME", "synthetic: generated samples, without --train-data; "
           "webdataset, csv, auto: detected from file names"),
    _alias("--train-data", f"{_TRAIN}.shards", "SHARDS", "images and captions to train on: shards, a table or a "
           "directory"),
    _alias("--train-data-upsampling-factors", f"{_TRAIN}.upsampling_factors"),
    _alias("--val-data", "evals.val.data.shards", "SHARDS", "shards or directory to evaluate on; retrieval unless "
           "evals.val.type is set"),
    _alias("--val-split", "data.val_split"),
    _alias("--image-key", f"{_TRAIN}.image_key", "SUFFIXES", "suffixes of the image member, separated by ';'"),
    _alias("--csv-img-key", f"{_TRAIN}.image_key", "COLUMN", "column with the image's path"),
    _joint("--csv-caption-key", f"{_TRAIN}.caption", "COLUMN", "column with the caption (CSV default: title, else "
           "txt)"),
    _alias("--csv-separator", f"{_TRAIN}.separator"),
    _joint("--caption-key", f"{_TRAIN}.caption", "SUFFIX", "suffix of the text member with the caption; of several, "
           "separated by ';', the first that exists is used"),
    _alias("--caption-lines", f"{_TRAIN}.caption.lines", "WHICH", "of a text of several lines: all, first, or random"),
    _joint("--text-key", f"{_TRAIN}.caption", "SUFFIX", "same as --caption-key"),
    _joint("--caption-json", f"{_TRAIN}.caption", "PATHS", "paths into the JSON member, separated by ';', tried in "
           "order, then --caption-key"),
    _joint("--json-text-key", f"{_TRAIN}.caption", "FIELDS", "top-level fields of the JSON member, separated by ';', "
           "tried in order; text members are ignored"),
    _joint("--json-text-key-probs", f"{_TRAIN}.caption", "NUMBER …", "sampling weights of these fields; those with "
           "weight 0 or without a number are fallbacks", many=True),
    _alias("--max-image-pixels", "data.max_image_pixels", "INT", "drop training images with more pixels; 0: the "
           "largest possible limit", words={"0": MAX_PIXELS}),
    _alias("--dataset-resampled", "data.sampling.mode", "", "sample shards with replacement (default)",
           words={"true": "resampled", "false": "epoch"}),
    _alias("--workers", "data.workers", "", "data workers per rank, or auto"),
    _alias("--model", "model.name", "NAME", "open_clip's name, small-vit, path of a run or JSON, or ORG/NAME"),
    _alias("--pretrained", "model.pretrained", "TAG", "a tag, a weights file, a run, or ORG/NAME of the Hub"),
    _alias("--pretrained-image", "model.image_pretrained", "FILE", "weights of the timm image tower: a file, a timm "
           "tag, or without a value timm's default tag", words={"true": "default", "false": None}),
    _alias("--text-model", "model.text_model"),
    _alias("--cache-dir", "model.cache_dir"),
    _alias("--force-image-size", "model.image_size", "INT", "image size in pixels, overriding the model config",
           convert=_one_size, many=True),
    _alias("--force-context-length", "tokenizer.context_length", "", "maximum length of a caption in tokens, "
           "overriding the model config; position embeddings are resampled, or stretched for longer texts"),
    _alias("--force-quick-gelu", "model.quick_gelu"),
    _alias("--force-custom-text", "model.custom_text"),
    _alias("--image-mean", "model.image_mean", "R G B", "channel means", convert=_numbers, many=True),
    _alias("--image-std", "model.image_std", "R G B", "channel standard deviations", convert=_numbers, many=True),
    _alias("--image-interpolation", "data.augment.interpolation model.image_interpolation", "NAME", "bicubic, "
           "bilinear, or random (in training only)", sets=_interpolation),
    _alias("--image-resize-mode", "model.image_resize_mode"),
    _alias("--aug-cfg", "data.augment", "NAME=VALUE …", "training augmentation: scale, ratio, color_jitter, "
           "color_jitter_prob, gray_scale_prob", sets=_augment, many=True),
    _alias("--force-patch-dropout", "model.patch_dropout"),
    _alias("--lock-image", "model.lock_image"),
    _alias("--lock-image-unlocked-groups", "model.unlocked_groups"),
    _alias("--lock-text", "model.lock_text"),
    _alias("--lock-text-unlocked-layers", "model.unlocked_layers"),
    _alias("--lora", "model.image.lora.rank model.text.lora.rank", "INT", "train low-rank adapters of this rank in "
           "both towers, and freeze all else"),
    _alias("--image-features", "data.image_features"),
    _alias("--text-features", "data.text_features"),
    _alias("--teacher-features", "data.teacher_features", "STORES", "feature stores of teachers, separated by ';'",
           convert=lambda text: [part.strip() for part in text.split(";") if part.strip()]),
    _alias("--grad-checkpointing", "model.grad_checkpointing", "", "recompute activations: less memory, more time",
           words={"true": "all", "false": "off"}),
    _alias("--siglip", "loss.type", "", "use the sigmoid loss", words={"true": "siglip", "false": "auto"}),
    _alias("--distill-model", "distill.model"),
    _alias("--distill-pretrained", "distill.pretrained"),
    _alias("--tokenizer", "tokenizer", "NAME", "model, a name on the Hub, a local path, or package.module:Name",
           convert=tokenizer_of),
    _joint("--batch-size", "data.global_batch_size", "INT", "samples per rank (device) and micro-batch; global batch: "
           "this x --accum-freq x ranks"),
    _joint("--accum-freq", "data.global_batch_size train.micro_batch_size", "INT", "gradient accumulation: "
           "micro-batches of --batch-size samples per step"),
    _alias("--steps", "train.steps", "", "maximum number of training steps"),
    _alias("--epochs", "train.epochs", "", "passes over --train-num-samples samples"),
    _alias("--train-num-samples", "train.epoch_samples", "", "samples per epoch"),
    _alias("--lr", "optim.lr"),
    _alias("--wd", "optim.wd"),
    _joint("--beta1", "optim.betas", "NUMBER", "beta1 of AdamW"),
    _joint("--beta2", "optim.betas", "NUMBER", "beta2 of AdamW"),
    _alias("--eps", "optim.eps", "NUMBER", "epsilon of AdamW"),
    _joint("--opt", "optim.type optim.name", "NAME", "optimizer: a type of optim.type, timm/NAME or module:Name"),
    _joint("--opt-kwargs", "optim.kwargs", "NAME=VALUE …", "additional arguments of the optimizer class",
           many=True, switch=True),
    _joint("--opt-fallback-list", "optim.fallback", "PATTERN …", "patterns of parameter names that timm's Muon "
           "optimizers update with AdamW", many=True),
    _joint("--momentum", "optim.momentum", "NUMBER", "momentum of a timm optimizer"),
    _alias("--text-layer-decay", "optim.text_layer_decay"),
    _alias("--image-layer-decay", "optim.image_layer_decay"),
    _alias("--visual-layer-decay", "optim.image_layer_decay", "NUMBER", "same as --image-layer-decay"),
    _alias("--text-pooler-own-group", "optim.text_pooler_own_group"),
    _alias("--wd-exclude", "optim.wd_exclude", "PATTERN …", "patterns of parameter names without weight decay, in "
           "addition to gains, biases and scales", convert=str.splitlines, many=True),
    _alias("--grad-clip-norm", "optim.grad_clip_norm"),
    _alias("--warmup", "schedule.warmup"),
    _alias("--lr-scheduler", "schedule.type", "NAME", "cosine, const, const-cooldown or linear",
           words={"const": "constant"}),
    _joint("--skip-scheduler", "schedule.type schedule.warmup", "", "keep the learning rate at --lr, without warm-up",
           switch=True),
    _alias("--epochs-cooldown", "schedule.cooldown_epochs"),
    _alias("--lr-cooldown-end", "schedule.min_lr"),
    _alias("--lr-cooldown-power", "schedule.cooldown_power"),
    _alias("--precision", "train.precision", "NAME", "auto (alias amp), fp32, bf16 (alias amp_bf16), fp16 or "
           "pure_bf16", words=_PRECISIONS),
    _alias("--fsdp", "train.parallel", "", "shard the model over ranks (FSDP2)",
           words={"true": "fsdp", "false": "ddp"}),
    _alias("--fsdp-no-reshard-after-forward", "train.reshard_after_forward", "", "keep gathered weights until the "
           "backward pass", words={"true": False, "false": True}),
    _alias("--audit-precision", "log.audit_precision"),
    _joint("--torchcompile", "train.compile", "", "compile the repeated blocks of the towers", switch=True),
    _joint("--torchcompile-strategy", "train.compile", "NAME", "what to compile: blocks, towers (aliases model, task) "
           "or step"),
    _joint("--torchcompile-backend", "train.compile_backend", "NAME", "backend of torch.compile"),
    _joint("--torchcompile-mode", "train.compile_mode", "NAME", "mode of torch.compile's inductor"),
    _alias("--save-frequency", "checkpoint.every_epochs", "NUMBER", "epochs between saved checkpoints; in steps: "
           "--checkpoint.every", sets=_frequency("checkpoint")),
    _alias("--delete-previous-checkpoint", "checkpoint.keep_last", "", "keep the newest checkpoint only",
           words={"true": 1, "false": None}),
    _alias("--val-frequency", "evals.val.every_epochs", "NUMBER", "epochs between evaluations on --val-data; in steps: "
           "--evals.val.every", sets=_frequency("evals", "val")),
    _alias("--imagenet-val", "evals.imagenet.data.shards", "FOLDER", "zero-shot on ImageNet; one folder per class",
           sets=_imagenet("imagenet")),
    _alias("--imagenet-v2", "evals.imagenet_v2.data.shards", "FOLDER", "zero-shot on ImageNet-V2, folders 0 to 999",
           sets=_imagenet("imagenet_v2")),
    _joint("--zeroshot-frequency", "evals.imagenet.every_epochs", "NUMBER", "epochs between zero-shot evaluations on "
           "ImageNet and ImageNetV2"),
    _joint("--log-every-n-steps", "log.every log.terminal_every", "INT", "steps between training lines"),
    _joint("--log-metric-every-n-steps", "log.every", "INT", "steps between training lines, except in the terminal"),
    _alias("--profile", "log.profile"),
    _alias("--train-loss-ema-samples", "log.loss_ema_samples"),
    _alias("--log-local", "log.local"),
    _alias("--debug", "log.level run.debug", "", "show more messages, and tracebacks with errors",
           sets=_debug, switch=True),
    _joint("--report-to", "log.tensorboard log.sinks", "NAMES", "tensorboard, wandb, trackio, all (tensorboard and "
           "wandb), none or module:Name, separated by ','; metrics.jsonl is always written"),
    _joint("--wandb-project-name", "log.sinks", "NAME", "project in wandb or trackio"),
    _joint("--wandb-notes", "log.sinks", "TEXT", "notes of the run in wandb"),
    _alias("--seed", "run.seed"),
    _alias("--device", "run.device"),
    _alias("--logs", "run.logs", "FOLDER", "output directory, in which each run saves its own folder",
           words={"none": _NO_LOGS}),
    _alias("--name", "run.name"),
    _alias("--remote-sync", "checkpoint.remote_sync"),
    _alias("--resume", "checkpoint.resume"),
    _alias("--resume-approximate", "checkpoint.resume_approximate"),
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


MEMBERS = ("--caption-key", "--text-key", "--csv-caption-key")  # name a text member
# Flags that say how training data are read; --val-data is read likewise.
READING_FLAGS = tuple(
    flag
    for flag, alias in BY_FLAG.items()
    if alias.keys[0].startswith("data.sources.train.") and not alias.keys[0].endswith(("shards", "factors"))
)
UNSCHEDULED = ("--warmup", "--lr-scheduler", "--epochs-cooldown", "--lr-cooldown-end", "--lr-cooldown-power")
# open_clip's defaults (main branch; open_clip_train/params.py) where they differ from those of the settings.
DEFAULTS = {
    "--model": "RN50",
    "--batch-size": "64",
    "--epochs": "32",
    "--warmup": "10000",
    "--workers": "4",
    "--dataset-resampled": "false",
    "--max-image-pixels": "25000000",
    "--logs": "./logs/",
    "--report-to": "",
    "--log-every-n-steps": "100",
    "--log-metric-every-n-steps": "10",
    "--train-loss-ema-samples": "50000",
    "--save-frequency": "1",
    "--val-frequency": "1",
    "--zeroshot-frequency": "2",
}
# Flag of an interval -> the flags, and the names of the evaluators, that it is about.
INTERVALS = {
    "--val-frequency": (("--val-data", "--val-split"), ("val",)),
    "--zeroshot-frequency": (tuple(IMAGENETS), tuple(IMAGENETS.values())),
}


class Typed(str):
    """A value as it was typed, to be read as YAML."""


@dataclass(frozen=True)
class Around:
    """What else the meaning of short flags depends on."""

    evaluators: Collection[str]  # names of the evaluators that files and dotted keys set
    ranks: int  # processes of the run
    notices: list[str]  # gets a line for each flag without effect


def translate(given: Given, around: Around, problems: list[str]) -> Found:
    """All settings that short flags make; their mistakes are added to `problems`, one line each."""
    given = _without_idle(given, around)
    for flag, alias in BY_FLAG.items():
        if alias.together or (text := given.get(flag)) is None:
            continue
        try:
            value = alias.words.get(text.lower(), Typed(text))
            if isinstance(value, ValueError):
                raise value
            if alias.convert is not None and isinstance(value, Typed):
                value = alias.convert(text)
            found = [(tuple(key.split(".")), value) for key in alias.keys] if alias.sets is None else alias.sets(text)
            yield from ((flag, path, value) for path, value in found)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    for group in (_data_type, _caption, _batch, _optimizer, _compile, _intervals, _sinks):
        try:
            yield from group(given, around)
        except ValueError as error:
            problems.append(str(error))


def _without_idle(given: Given, around: Around) -> dict[str, str]:
    """The flags that have an effect beside the others.

    --skip-scheduler turns the schedule off, warm-up included. An evaluation's interval has no effect without its data.
    """
    idle: dict[str, str] = {}  # flag -> why
    if given.get("--skip-scheduler", "false").lower() != "false":
        idle = dict.fromkeys(UNSCHEDULED, ", as --skip-scheduler keeps the learning rate at --lr from the first step")
    for flag, (data, named) in INTERVALS.items():
        if not any(one in given for one in data) and not any(name in around.evaluators for name in named):
            idle[flag] = f" without {data[0]}; any other evaluator has --evals.NAME.every-epochs"
    around.notices.extend(f"{flag}: has no effect{why}" for flag, why in idle.items() if flag in given)
    return {flag: text for flag, text in given.items() if flag not in idle}


def _data_type(given: Given, around: Around) -> Found:
    """--dataset-type, which must agree with the names of the files, as these tell their types."""
    kind = given.get(flag := "--dataset-type")
    if kind == "synthetic":
        yield flag, (*SOURCE, "shards"), "synthetic:"
    elif kind in ("csv", "webdataset"):
        for part in parts_of(given.get("--train-data", "")):
            if table_format(part) != ("csv" if kind == "csv" else None):
                raise ValueError(
                    f"{flag} {kind}: the name of {redact(part)} says otherwise (.csv and .tsv are CSV): rename the "
                    "file, or leave the flag out"
                )
    elif kind not in (None, "auto"):
        known = "audio is not supported" if kind.endswith("-audio") else f"{kind!r} is not a type"
        raise ValueError(f"{flag}: {known}: expected webdataset, csv, synthetic or auto")


def _caption(given: Given, around: Around) -> Found:
    """The caption in a text member, or of JSON paths (separated by ';') with the member as fallback.

    --json-text-key takes names of fields at the top of the JSON member; no text member then counts, as in open_clip.
    """
    members = {flag: given[flag] for flag in MEMBERS if flag in given}
    member = next(iter(members.values()), None)
    paths, fields = (given.get(flag) for flag in ("--caption-json", "--json-text-key"))
    weights = given.get("--json-text-key-probs")
    if paths is not None and fields is not None:
        raise ValueError("--json-text-key and --caption-json both set the caption: give one of them")
    if fields is None and weights is not None:
        raise ValueError("--json-text-key-probs requires --json-text-key")
    if fields is not None:
        names = [step_of(name.strip()) for name in fields.split(";") if name.strip()]
        around.notices.extend(f"{flag}: has no effect beside --json-text-key" for flag in members)
        try:
            drawn = None if weights is None else _numbers(weights)
        except ValueError:
            shown = (weights or "").replace("\n", " ")
            raise ValueError(f"--json-text-key-probs: expected numbers, not {shown!r}") from None
        if drawn is not None and len(drawn) > len(names):
            raise ValueError(f"--json-text-key-probs: {len(drawn)} numbers for {len(names)} fields of --json-text-key")
        if drawn is not None:  # fields without a number have weight 0
            drawn += [0.0] * (len(names) - len(drawn))
        caption: dict[str, Any] = {"path": names[0] if len(names) == 1 else names, "weights": drawn, "fallback": None}
        yield "--json-text-key", CAPTION, {"type": "json", **caption}
        return
    if len(set(members.values())) > 1:
        raise ValueError(f"{' and '.join(members)} name different members: give one of them")
    if paths is not None:
        parts = re.split(r"(?<!\\);(?![^{}]*\})", paths)  # a template's joiner may be one
        if "{" in paths and len(parts) > 1 and any(path != path.strip() for path in parts):
            advice = "write \\; for one in a text"
            raise ValueError(f"--caption-json: {paths!r}: ; is between paths, without spaces: {advice}")
        parts = [path.strip() for path in parts]
        # Every key is set: weights and fallback in a file belong to the paths in that file.
        caption = {"path": parts[0] if len(parts) == 1 else parts, "weights": None, "fallback": member}
        yield "--caption-json", CAPTION, {"type": "json", **caption}
    elif member is not None:
        yield next(iter(members)), CAPTION, {"type": "text", "key": member}


def _batch(given: Given, around: Around) -> Found:
    """open_clip's arithmetic: b samples a rank, k times, on N ranks, make a global batch of b k N."""
    counts: dict[str, int] = {}
    for flag in ("--batch-size", "--accum-freq"):
        if (text := given.get(flag)) is not None:
            if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
                raise ValueError(f"{flag}: expected a whole number, at least 1, not {text!r}")
            counts[flag] = int(text)
    if counts and "--batch-size" not in counts:
        raise ValueError("--accum-freq requires --batch-size, the samples per rank and forward pass")
    if counts:
        batch, repeats = counts["--batch-size"], counts.get("--accum-freq", 1)
        yield "--batch-size", ("data", "global_batch_size"), batch * repeats * around.ranks
        if "--accum-freq" in counts:
            yield "--accum-freq", ("train", "micro_batch_size"), batch if repeats > 1 else None


def _optimizer(given: Given, around: Around) -> Found:
    """The optimizer (a built-in one, timm/NAME or module:Name), its betas and further arguments; the schedule is off
    with --skip-scheduler.
    """
    opt = given.get("--opt", "adamw")
    timm = opt.removeprefix("timm/") if opt.lower().startswith("timm/") else None
    if "--opt" in given:
        names = [name for name in builtin_parts(OptimSettings) if name != "timm"]
        if timm is None and opt.lower() not in names and not is_plugin(opt):
            raise ValueError(f"--opt: expected {', '.join(names)}, timm/NAME or module:Name, not {opt!r}")
        yield "--opt", ("optim", "type"), "timm" if timm else opt if is_plugin(opt) else opt.lower()
    if timm is not None:
        yield "--opt", ("optim", "name"), timm
    if given.get("--opt-kwargs", "true") != "true":
        yield "--opt-kwargs", ("optim", "kwargs"), _arguments(given["--opt-kwargs"])
    if "--opt-fallback-list" in given:
        if timm is None:
            raise ValueError("--opt-fallback-list requires one of timm's Muon optimizers, as --opt timm/nadamuon")
        yield "--opt-fallback-list", ("optim", "fallback"), given["--opt-fallback-list"].split("\n")
    if "--momentum" in given:
        kind = types_of(OptimSettings).get("timm" if timm else opt.lower(), OptimSettings)
        if "momentum" in kind.model_fields:
            yield "--momentum", ("optim", "momentum"), given["--momentum"]
        else:
            around.notices.append("--momentum: has no effect, as AdamW has --beta1; it is for --opt timm/NAME")
    named = [flag for flag in ("--beta1", "--beta2") if flag in given]
    if len(named) == 1 and timm is not None:
        raise ValueError(f"{named[0]}: give both --beta1 and --beta2 for an optimizer of timm")
    if named:
        yield named[0], ("optim", "betas"), [given.get(flag) for flag in ("--beta1", "--beta2")]
    if given.get("--skip-scheduler", "false").lower() != "false":
        yield "--skip-scheduler", ("schedule", "type"), "constant"
        yield "--skip-scheduler", ("schedule", "warmup"), 0


def _arguments(text: str) -> dict[str, Any]:
    """`name=value` pairs, with Python literals or plain text as values."""
    found: dict[str, Any] = {}
    for pair in text.split("\n"):
        name, equals, literal = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--opt-kwargs: expected NAME=VALUE, not {pair!r}")
        try:
            found[name] = _literal(literal)
        except (ValueError, SyntaxError):
            found[name] = literal
    return found


def _compile(given: Given, around: Around) -> Found:
    """What is compiled: the blocks, unless a strategy says more; open_clip's `model` and `task` are whole towers."""
    flag = "--torchcompile"
    text = given.get(flag, "absent").lower()
    if text not in ("absent", "true", "false"):
        raise ValueError(f"{flag}: expected true or false, not {given[flag]!r}")
    options = {key: given[name] for key in ("strategy", "backend", "mode") if (name := f"{flag}-{key}") in given}
    if text == "true":
        strategy = options.pop("strategy", "blocks")
        yield flag, ("train", "compile"), "towers" if strategy in ("model", "task") else strategy
        yield from ((f"{flag}-{key}", ("train", f"compile_{key}"), value) for key, value in options.items())
        return
    if text == "false":
        yield flag, ("train", "compile"), "off"
    around.notices.extend(f"{flag}-{key}: has no effect without {flag}" for key in options)


def _intervals(given: Given, around: Around) -> Found:
    """Epochs between ImageNet's evaluations (0: at the end only), and steps between training lines."""
    if (epochs := given.get(flag := "--zeroshot-frequency", "0")) != "0":
        named = [name for one, name in IMAGENETS.items() if one in given or name in around.evaluators]
        yield from ((flag, ("evals", name, "every_epochs"), epochs) for name in named)
    console, metrics = (given.get(f"--log-{kind}every-n-steps") for kind in ("", "metric-"))
    if metrics is not None:
        yield "--log-metric-every-n-steps", ("log", "every"), metrics
    if console is not None:
        yield "--log-every-n-steps", ("log", "every" if metrics is None else "terminal_every"), console


def _sinks(given: Given, around: Around) -> Found:
    """open_clip's list of backends, separated by ','; a sink of the user's own as `module:Name`."""
    flag = "--report-to"
    wanted = [name.strip() for name in given.get(flag, "").split(",")]
    plugins, known = [name for name in wanted if is_plugin(name)], builtin_parts(SinkSettings)
    if unknown := {*wanted} - {"", "none", "all", "tensorboard", *known, *plugins}:
        raise ValueError(
            f"{flag}: expected tensorboard, {', '.join(known)}, none, all or module:Name, not {min(unknown)!r}; "
            "metrics.jsonl, which is always written, has every figure: pandas.read_json(path, lines=True)"
        )
    trackers = [name for name in known if name in wanted or (name == "wandb" and "all" in wanted)]
    if flag in given:
        yield flag, ("log", "tensorboard"), "tensorboard" in wanted or "all" in wanted
        sinks = {name.partition(":")[2]: name for name in plugins} | {name: name for name in trackers}
        yield from ((flag, ("log", "sinks", name, "type"), kind) for name, kind in sinks.items())
    for own, key, users in (("--wandb-project-name", "project", trackers), ("--wandb-notes", "notes", ["wandb"])):
        used = [name for name in users if name in trackers]
        if own in given and not used:
            around.notices.append(f"{own}: has no effect without --report-to wandb")
        elif own in given:
            yield from ((own, ("log", "sinks", name, key), given[own]) for name in used)
