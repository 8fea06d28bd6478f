"""The table of short flags: the settings that each one sets, and the meaning of its text.

A flag with the name of a flag of open_clip's trainer has the same meaning. Those that have a meaning only together
(`--batch-size` and `--accum-freq`) are in `TOGETHER`; those that do not exist here have an answer in `refusal`. The
flags are those of open_clip_train 3.3.0 and of open_clip's main branch of June 2026.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from clipstream.config.plugins import is_plugin
from clipstream.config.section import Path

Sets = list[tuple[Path, Any]]
SOURCE: Path = ("data", "sources", "train")
CAPTION: Path = (*SOURCE, "caption")
IMAGENETS = {"--imagenet-val": "imagenet", "--imagenet-v2": "imagenet_v2"}  # flag -> evaluator
AUGMENTS = ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob")
MEMBERS = ("--caption-key", "--csv-caption-key")  # name a text member
READING = ("--caption-json", *MEMBERS, "--image-key", "--csv-img-key", "--csv-separator", "--dataset-type")
TOGETHER = ("--caption-json", *MEMBERS, "--batch-size", "--accum-freq", "--beta1", "--beta2", "--zeroshot-frequency")


@dataclass(frozen=True)
class FlagAlias:
    """A short flag."""

    flag: str  # its name, with dashes
    keys: tuple[str, ...]  # the dotted keys that it sets
    value: str  # placeholder for its value in the help
    meaning: str  # for the help
    # Text -> the values to set, unless it is the text for the one key; raises ValueError.
    convert: Callable[[str], Sets] | None = None
    switch: bool = False  # the flag alone means true
    many: bool = False  # several values may follow; `convert` gets them separated by line ends


def caption_sets(given: Mapping[str, str]) -> Iterator[tuple[str, Path, Any]]:
    """The caption in a text member, or of JSON paths (separated by ';') with the member as fallback.

    Raises ValueError: two members are named.
    """
    members = {flag: given[flag] for flag in MEMBERS if flag in given}
    csv, paths = given.get("--dataset-type") == "csv", given.get("--caption-json")
    if len(set(members.values())) > 1:
        raise ValueError(f"{' and '.join(members)} name different members: give one of them")
    member = next(iter(members.values()), "title" if csv and paths is None else None)
    if paths is not None:
        parts = [path.strip() for path in paths.split(";")]
        # Every key is set: weights and fallback in a file belong to the paths in that file.
        path = parts[0] if len(parts) == 1 else parts
        yield "--caption-json", CAPTION, {"type": "json", "path": path, "weights": None, "fallback": member}
    elif member is not None:
        yield next(iter(members), "--dataset-type"), CAPTION, {"type": "text", "key": member}


def batch_sets(given: Mapping[str, str], ranks: int) -> Iterator[tuple[str, Path, Any]]:
    """open_clip's arithmetic: b samples a rank, k times, on N ranks, make a global batch of b k N.

    Raises ValueError: a count is not a whole number, or --batch-size is missing.
    """
    counts: dict[str, int] = {}
    for flag in ("--batch-size", "--accum-freq"):
        if (text := given.get(flag)) is not None:
            if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
                raise ValueError(f"{flag}: expected a whole number, at least 1, not {text!r}")
            counts[flag] = int(text)
    if counts and "--batch-size" not in counts:
        raise ValueError("--accum-freq: give --batch-size as well, the samples that a rank takes at once")
    if counts:
        batch, repeats = counts["--batch-size"], counts.get("--accum-freq", 1)
        yield "--batch-size", ("data", "global_batch_size"), batch * repeats * ranks
        if "--accum-freq" in counts:
            yield "--accum-freq", ("train", "micro_batch_size"), batch if repeats > 1 else None


def beta_sets(given: Mapping[str, str]) -> Iterator[tuple[str, Path, Any]]:
    """Both betas of AdamW; None, the model's own, for one that is not given.

    Raises ValueError: one of them is not a number.
    """
    betas: dict[str, float | None] = {"--beta1": None, "--beta2": None}
    named = [flag for flag in betas if flag in given]
    for flag in named:
        try:
            betas[flag] = float(given[flag])
        except ValueError:
            raise ValueError(f"{flag}: expected a number, not {given[flag]!r}") from None
    if named:
        yield named[0], ("optim", "betas"), list(betas.values())


def zero_shot_sets(given: Mapping[str, str], evaluators: set[str]) -> Iterator[tuple[str, Path, Any]]:
    """The interval of ImageNet's evaluators that flags or files name; 0 means at the end only.

    Raises ValueError: there is none.
    """
    if (epochs := given.get(flag := "--zeroshot-frequency", "0")) != "0":
        named = [name for one, name in IMAGENETS.items() if one in given or name in evaluators]
        if not named:
            raise ValueError(f"{flag}: there is nothing to evaluate: give --imagenet-val FOLDER")
        yield from ((flag, ("evals", name, "every_epochs"), epochs) for name in named)


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


def dataset_type_sets(text: str) -> Sets:
    """open_clip's names; a file's type is known from its name, so that most of them set nothing."""
    if text not in ("synthetic", "auto", "webdataset", "csv"):
        raise ValueError(f"expected webdataset, csv, synthetic or auto, not {text!r}")
    return [((*SOURCE, "shards"), "synthetic:")] if text == "synthetic" else []


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
    """open_clip's `name=value` pairs, with Python literals as values."""
    sets: Sets = []
    for pair in text.split("\n"):
        name, _, literal = pair.partition("=")
        if name not in AUGMENTS:
            raise ValueError(f"{name!r} is not offered; {', '.join(AUGMENTS)} are (not timm's augmentation)")
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            raise ValueError(f"expected {name}=VALUE with a number or a tuple, not {pair!r}") from None
        sets.append((("data", "augment", name), list(value) if isinstance(value, tuple) else value))
    return sets


def report_to_sets(text: str) -> Sets:
    """open_clip's list of backends, separated by ','; a sink of the user's own as `module:Name`."""
    known = {"tensorboard": True, "all": True, "none": False, "": False}
    named = [name.strip() for name in text.split(",")]
    own = [name for name in named if is_plugin(name)]
    if unknown := [name for name in named if name not in known and name not in own]:
        raise ValueError(
            f"expected tensorboard, none or all, not {unknown[0]!r}: metrics.jsonl, which is always written, has every "
            "figure; a sink of your own (module:Name) can log elsewhere"
        )
    sinks: Sets = [(("log", "sinks", name.partition(":")[2], "type"), name) for name in own]
    return [(("log", "tensorboard"), any(known.get(name, False) for name in named)), *sinks]


def _alias(flag: str, keys: str, value: str, meaning: str, convert: Any = None, **more: bool) -> FlagAlias:
    return FlagAlias(flag, tuple(keys.split()), value, meaning, convert, **more)


_PRECISIONS = {"amp": "bf16", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "amp_fp16": "fp16"}
_TRAIN = "data.sources.train"

ALIASES = (
    _alias("--dataset-type", f"{_TRAIN}.shards", "NAME", "synthetic needs no --train-data; csv takes captions from the "
           "column title; webdataset, auto: as named", dataset_type_sets),
    _alias("--train-data", f"{_TRAIN}.shards", "SHARDS", "shards to train on: the source named train"),
    _alias("--val-data", "evals.val.data.shards", "SHARDS", "shards to evaluate on, by retrieval unless set"),
    _alias("--image-key", f"{_TRAIN}.image_key", "SUFFIXES", "suffixes of the image member, separated by ';'"),
    _alias("--csv-img-key", f"{_TRAIN}.image_key", "COLUMN", "column of a manifest with the picture's path"),
    _alias("--csv-caption-key", f"{_TRAIN}.caption", "COLUMN", "column of a manifest with the caption"),
    _alias("--csv-separator", f"{_TRAIN}.separator", "CHARACTER", "between the fields of a CSV"),
    _alias("--caption-key", f"{_TRAIN}.caption", "SUFFIX", "suffix of the text member with the caption"),
    _alias("--caption-json", f"{_TRAIN}.caption", "PATHS", "path into the JSON member; several, separated by ';', are "
           "tried in order, then the member --caption-key"),
    _alias("--dataset-resampled", "data.sampling.mode", "", "draw shards with replacement (the default)",
           _words("data.sampling.mode", true="resampled", false="epoch"), switch=True),
    _alias("--workers", "data.workers", "INT", "data workers on each rank, or auto"),
    _alias("--model", "model.name", "NAME", "open_clip's name, a JSON config, hf-hub:ORG/NAME or local-dir:PATH"),
    _alias("--pretrained", "model.pretrained", "TAG", "a tag, a weights file, hf-hub:ORG/NAME or local-dir:PATH"),
    _alias("--pretrained-image", "model.image_pretrained", "FILE", "weights of a timm image tower alone: a file, a "
           "tag of timm, or timm's default tag, without a value",
           _words("model.image_pretrained", true="default", false=None), switch=True),
    _alias("--text-model", "model.text_model", "FOLDER", "Hugging Face text tower in place of the Hub's"),
    _alias("--cache-dir", "model.cache_dir", "FOLDER", "the Hub's cache"),
    _alias("--force-image-size", "model.image_size", "INT", "pixels a side, in place of the model's own"),
    _alias("--image-mean", "model.image_mean", "R G B", "mean of the channels", _numbers("image_mean"), many=True),
    _alias("--image-std", "model.image_std", "R G B", "deviation of the channels", _numbers("image_std"), many=True),
    _alias("--image-interpolation", "data.augment.interpolation model.image_interpolation", "NAME",
           "bicubic, bilinear, or random (in training only)", interpolation_sets),
    _alias("--image-resize-mode", "model.image_resize_mode", "NAME", "shortest, longest or squash, in evaluation"),
    _alias("--aug-cfg", "data.augment", "NAME=VALUE …", "training's augmentation: scale, ratio, color_jitter, "
           "color_jitter_prob, gray_scale_prob", aug_cfg_sets, many=True),
    _alias("--force-patch-dropout", "model.patch_dropout", "NUMBER", "share of a ViT's patches left out"),
    _alias("--lock-image", "model.lock_image", "", "freeze the image tower", switch=True),
    _alias("--lock-image-unlocked-groups", "model.unlocked_groups", "INT", "except its last groups"),
    _alias("--lock-text", "model.lock_text", "", "freeze the text tower", switch=True),
    _alias("--lock-text-unlocked-layers", "model.unlocked_layers", "INT", "except its last layers"),
    _alias("--image-features", "data.image_features", "STORE", "a feature store in place of pictures and image tower"),
    _alias("--text-features", "data.text_features", "STORE", "a feature store in place of captions and text tower"),
    _alias("--teacher-features", "data.teacher_features", "STORES", "feature stores of teachers, separated by ';'",
           _listed("data.teacher_features")),
    _alias("--grad-checkpointing", "model.grad_checkpointing", "", "save memory, take longer",
           _words("model.grad_checkpointing", true="all", false="off"), switch=True),
    _alias("--siglip", "loss.type", "", "the sigmoid loss", _words("loss.type", true="siglip", false="auto"),
           switch=True),
    _alias("--distill-model", "distill.model", "NAME", "a live teacher, named as --model"),
    _alias("--distill-pretrained", "distill.pretrained", "TAG", "the teacher's weights, named as --pretrained"),
    _alias("--tokenizer", "tokenizer", "NAME", "model, a name on the Hub, a local path, or package.module:Name",
           tokenizer_sets),
    _alias("--batch-size", "data.global_batch_size", "INT", "samples that a rank takes at once; the global batch is "
           "this x --accum-freq x ranks"),
    _alias("--accum-freq", "data.global_batch_size train.micro_batch_size", "INT",
           "batches of --batch-size that a rank accumulates for one step"),
    _alias("--steps", "train.steps", "INT", "steps of the whole run"),
    _alias("--epochs", "train.epochs", "NUMBER", "passes over --train-num-samples samples"),
    _alias("--train-num-samples", "train.epoch_samples", "INT", "samples that make an epoch"),
    _alias("--lr", "optim.lr", "NUMBER", "peak learning rate"),
    _alias("--wd", "optim.wd", "NUMBER", "weight decay"),
    _alias("--beta1", "optim.betas", "NUMBER", "decay of the gradients' mean"),
    _alias("--beta2", "optim.betas", "NUMBER", "decay of the gradients' variance"),
    _alias("--eps", "optim.eps", "NUMBER", "added to the root of the variance in AdamW"),
    _alias("--grad-clip-norm", "optim.grad_clip_norm", "NUMBER", "largest norm of the gradients"),
    _alias("--warmup", "schedule.warmup", "INT", "steps of linear warm-up"),
    _alias("--lr-scheduler", "schedule.type", "NAME", "cosine, const, const-cooldown or linear",
           _words("schedule.type", const="constant")),
    _alias("--epochs-cooldown", "schedule.cooldown_epochs", "NUMBER", "last epochs, in which const-cooldown decays"),
    _alias("--lr-cooldown-end", "schedule.min_lr", "NUMBER", "learning rate at the end of the schedule"),
    _alias("--lr-cooldown-power", "schedule.cooldown_power", "NUMBER", "power of the decay in const-cooldown"),
    _alias("--precision", "train.precision", "NAME", "auto, fp32, bf16 (also as amp, amp_bf16), fp16 or pure_bf16",
           _words("train.precision", **_PRECISIONS)),
    _alias("--torchcompile", "train.compile", "", "torch.compile the towers", switch=True),
    _alias("--save-frequency", "checkpoint.every_epochs", "NUMBER", "epochs between checkpoints",
           _frequency("checkpoint")),
    _alias("--val-frequency", "evals.val.every_epochs", "NUMBER", "epochs between evaluations on --val-data",
           _frequency("evals.val")),
    _alias("--imagenet-val", "evals.imagenet.data.shards", "FOLDER", "zero-shot on ImageNet, one folder a class",
           _imagenet("imagenet")),
    _alias("--imagenet-v2", "evals.imagenet_v2.data.shards", "FOLDER", "zero-shot on ImageNet-V2, folders 0 to 999",
           _imagenet("imagenet_v2")),
    _alias("--zeroshot-frequency", "evals.imagenet.every_epochs", "NUMBER",
           "epochs between both zero-shot evaluations"),
    _alias("--log-every-n-steps", "log.every", "INT", "steps between training lines"),
    _alias("--profile", "log.profile", "STEPS", "steps to profile: a number of them, or the first and last, as 10-14"),
    _alias("--report-to", "log.tensorboard", "NAME", "tensorboard, none or module:Name; metrics.jsonl is always "
           "written", report_to_sets),
    _alias("--seed", "run.seed", "INT", "fixes order, augmentation, weights and dropout"),
    _alias("--device", "run.device", "NAME", "auto, cpu, cuda or cuda:N"),
    _alias("--logs", "run.logs", "FOLDER", "folder of runs"),
    _alias("--name", "run.name", "NAME", "name of the run's folder"),
    _alias("--remote-sync", "checkpoint.remote_sync", "URL", "folder that checkpoints are copied to: s3://…, gs://…"),
    _alias("--resume", "checkpoint.resume", "WHAT", "a checkpoint's path or address, latest (must exist) or auto"),
    _alias("--resume-approximate", "checkpoint.resume_approximate", "", "resume although the data order has changed",
           switch=True),
)  # fmt: skip
BY_FLAG = {alias.flag: alias for alias in ALIASES}

NEEDLESS = {  # the effect is always there, or is chosen without a flag
    "--local-loss": "the loss is exact on any number of ranks, and made of local logits",
    "--gather-with-grad --loss-dist-impl": "the loss is exact on any number of ranks",
    "--ddp-static-graph": "DDP is set up by itself",
    "--use-bn-sync": "batch norm takes its statistics over all ranks",
    "--lock-image-freeze-bn-stats": "a locked tower's batch statistics stand still",
    "--lock-text-freeze-layer-norm": "a locked tower is locked whole",
    "--save-most-recent": "checkpoints/latest names the newest; --checkpoint.keep-last says how many stay",
    "--delete-previous-checkpoint": "--checkpoint.keep-last says how many stay",
    "--val-retrieval-*": "retrieval scores are exact, and computed in tiles of bounded memory",
    "--dist-*": "ranks meet at the address that torchrun or srun gives, over nccl on GPUs and gloo on CPUs",
    "--horovod": "ranks meet at the address that torchrun or srun gives",
    "--no-set-device-rank": "a rank takes the GPU of its local number, or the only one that it sees",
    "--log-local": "rank 0 writes the run's files",
    "--copy-codebase": "metrics.jsonl has the command line and the git commit of each start",
}
REFUSED = {  # another flag does it, or nothing does
    "--opt": "the optimizer is set by --optim.type: adamw, or one of your own (module:Name)",
    "--opt-*": "the settings of AdamW are --lr, --wd, --beta1, --beta2 and --eps",
    "--momentum": "the settings of AdamW are --beta1 and --beta2",
    "--train-data-upsampling-factors": "give each source a section with its weight: --data.sources.NAME.shards and "
    "--data.sources.NAME.weight",
    "--val-num-samples": "--evals.val.max-samples limits the evaluation on --val-data",
    "--text-key": "the text member with the caption is set by --caption-key",
    "--json-text-key": "the caption's path in the JSON member is set by --caption-json",
    "--json-text-key-probs": "the weights of several caption paths are set by --data.sources.train.caption.weights",
    "--skip-scheduler": "a constant learning rate is set by --lr-scheduler const",
    "--fsdp": "FSDP2 is set by --train.parallel fsdp",
    "--torchscript --trace": "a compiled model is set by --torchcompile",
    "--debug": "tracebacks with errors are set by --run.debug",
    "--log-metric-every-n-steps": "steps between training lines, in all outputs, are set by --log-every-n-steps",
    "--remote-sync-frequency": "files are copied after each checkpoint: set --checkpoint.every or --save-frequency",
    "--remote-sync-protocol": "the protocol is the one in the URL of --remote-sync",
    "--force-context-length": "--tokenizer.context-length shortens captions; more than the model's own needs a JSON "
    "config of the model, --model FILE.json",
    "--force-quick-gelu": "give a model whose name ends in -quickgelu, or a JSON config, --model FILE.json",
    "--force-custom-text": "set custom_text in a JSON config of the model, --model FILE.json",
    "--wandb*": "Weights & Biases is not supported: log metrics.jsonl to it by a script of your own",
    "--trackio*": "trackio is not supported: log metrics.jsonl to it by a script of your own",
    "--length-bucketing --bucket-* --text-pad-multiple": "captions are padded to the model's length",
    "--*audio*": "audio is not supported",
    "--text-layer-decay": "layers have one learning rate; --lock-text freezes the text tower, whole or in part",
    "--*-layer-decay": "layers have one learning rate; --lock-image freezes the image tower, whole or in part",
    "--text-pooler-own-group": "layers have one learning rate",
    "--wd-exclude": "gains, biases and scales have no weight decay, as in open_clip, and all other weights have",
    "--fsdp-*": "--train.parallel fsdp has no settings of its own",
    "--torchcompile-*": "--torchcompile has no settings of its own",
    "--train-loss-ema-samples": "the loss is that of the step, not smoothed",
    "--max-image-pixels": "pictures of more than 178,956,970 pixels are dropped",
    "--coca-*": "CoCa's caption loss is not supported",
    "--use-bnb-linear": "bitsandbytes is not supported",
    "--use-naflex --*naflex-*": "NaFlex is not supported",
}


def refusal(flag: str) -> str | None:
    """Why the flag is not accepted and what to do, or None where it is not one of open_clip's."""
    for table, form in ((NEEDLESS, "is not needed, leave it out ({})"), (REFUSED, "{}")):
        for patterns, text in table.items():
            if any(fnmatchcase(flag, pattern) for pattern in patterns.split()):
                return form.format(text)
    return None
