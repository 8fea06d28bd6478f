"""The fate of every flag of open_clip's trainer: taken, taken with a notice, or refused.

`notice` and `refusal` give the line for a flag that no setting stands for; `table` is the page that lists all flags
(`python -m clipstream.open_clip.fates` prints it). The flags that are taken are in `aliases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from clipstream.open_clip.aliases import BY_FLAG

# Of open_clip's main branch, 4.2.0.dev0, commit 89fb801 of 27 June 2026 (open_clip_train/params.py), in its order.
_MAIN = """
train-data train-data-upsampling-factors val-data train-num-samples val-num-samples dataset-type audio-ext
pretrained-audio audio-fill audio-trunc audio-fusion audio-int16-normalize audio-zeroshot-dataset
audio-zeroshot-split audio-zeroshot-audio-key audio-zeroshot-target-key audio-zeroshot-class-key
audio-zeroshot-template audio-zeroshot-workers audio-zeroshot-multiprocessing-context audio-multiprocessing-context
dataset-resampled csv-separator csv-img-key csv-caption-key image-key max-image-pixels text-key json-text-key
json-text-key-probs imagenet-val imagenet-v2 cache-dir logs log-local name workers batch-size epochs epochs-cooldown
lr beta1 beta2 eps wd momentum warmup opt opt-kwargs opt-fallback-list text-layer-decay image-layer-decay
audio-layer-decay wd-exclude text-pooler-own-group use-bn-sync skip-scheduler lr-scheduler lr-cooldown-end
lr-cooldown-power save-frequency save-most-recent zeroshot-frequency val-frequency val-retrieval-chunk-size
val-retrieval-precision resume precision model pretrained pretrained-image lock-image lock-image-unlocked-groups
lock-image-freeze-bn-stats image-mean image-std image-interpolation image-resize-mode aug-cfg grad-checkpointing
local-loss gather-with-grad force-context-length force-image-size force-quick-gelu force-patch-dropout
force-custom-text torchcompile torchcompile-strategy torchcompile-backend torchcompile-mode accum-freq device
dist-url dist-backend report-to wandb-notes wandb-project-name debug copy-codebase ddp-static-graph fsdp
fsdp-no-reshard-after-forward fsdp-offload-cpu fsdp-checkpoint no-set-device-rank seed grad-clip-norm lock-text
lock-text-unlocked-layers lock-text-freeze-layer-norm log-every-n-steps log-metric-every-n-steps
train-loss-ema-samples coca-caption-loss-weight coca-contrastive-loss-weight remote-sync remote-sync-frequency
remote-sync-protocol delete-previous-checkpoint distill-model distill-pretrained use-bnb-linear siglip
loss-dist-impl use-naflex force-naflex-vision naflex-num-train-image-tokens naflex-patch-sizes
naflex-patch-size-probs naflex-seq-lens naflex-seq-len-probs naflex-max-tokens-per-batch naflex-max-text-tokens
naflex-batch-divisor naflex-loss-scale length-bucketing bucket-pool bucket-chunk bucket-prefetch-pools
naflex-pad-multiple text-pad-multiple
"""
MAIN = tuple(f"--{name}" for name in _MAIN.split())
RELEASED = ("--horovod", "--torchscript", "--trace")  # of 3.3.0, and no longer in main

NOTICES = {  # no work here: the effect is always there, is chosen without a flag, or concerns open_clip's own means
    "--local-loss": "the loss is exact on any number of ranks, from local logits",
    "--gather-with-grad --loss-dist-impl": "the loss is exact on any number of ranks",
    "--ddp-static-graph": "DDP does not use it",
    "--use-bn-sync": "batch norm statistics are computed over all ranks",
    "--lock-image-freeze-bn-stats": "batch statistics of a locked tower are not updated",
    "--lock-text-freeze-layer-norm": "layer norms of a locked tower are locked",
    "--save-most-recent": "checkpoints/latest names the newest checkpoint; --checkpoint.keep-last sets how many are "
    "kept",
    "--val-retrieval-*": "retrieval scores are exact, in float32, in tiles of bounded memory",
    "--val-num-samples": "an evaluation counts its samples; --evals.val.max-samples limits them",
    "--dist-*": "ranks use the address of torchrun or srun, with nccl on GPUs and gloo on CPUs",
    "--no-set-device-rank": "a rank uses the GPU of its local rank, or the only visible one",
    "--fsdp-checkpoint": "checkpoints are not sharded, resume on any number of ranks, and are written in the "
    "background",
    "--copy-codebase": "metrics.jsonl has the command line and the git commit of each start",
    "--remote-sync-frequency": "files are copied after each checkpoint (--save-frequency, --checkpoint.every)",
    "--remote-sync-protocol": "--remote-sync is a URL with its protocol",
    "--length-bucketing --bucket-*": "the texts of a batch run in buckets by length (--model.text-buckets); the "
    "order of samples stays random",
    "--text-pad-multiple": "lengths of text buckets are multiples of 8 (--model.text-buckets)",
}
REFUSED = {  # the reason, and what to do
    "--*audio*": "audio is not supported: train audio models with open_clip_train",
    "--coca-*": "CoCa's caption loss is not supported: train CoCa with open_clip_train",
    "--use-naflex --force-naflex-vision --naflex-*": "NaFlex is not supported: use a model of one image "
    "size (--force-image-size), and --force-patch-dropout to save time",
    "--use-bnb-linear": "bitsandbytes layers are not supported: use --precision bf16 and --grad-checkpointing to save "
    "memory",
    "--fsdp-offload-cpu": "CPU offload is not supported: use more ranks, --grad-checkpointing or a smaller "
    "--train.micro-batch-size",
    "--horovod": "Horovod is not supported: start the ranks with torchrun or srun",
    "--torchscript --trace": "TorchScript is not supported: compile the model with --torchcompile",
}
REMARKS = {  # what differs in a flag that is taken, for the table
    "--dataset-type": "`webdataset-audio` and `synthetic-audio` are refused",
    "--precision": "`amp` is bfloat16 where the device supports it, else float16 with a scaler; `bf16` and `fp16` keep "
    "float32 weights under autocast; `pure_fp16` is refused",
    "--aug-cfg": "timm's augmentation is refused",
    "--report-to": "wandb and trackio may be used together",
    "--wd-exclude": "position embeddings have weight decay, as in 3.3.0; `open_clip-main` selects main's rule",
    "--force-image-size": "two different numbers are refused",
    "--logs": "`none` is refused",
    "--max-image-pixels": "default 178,956,970; training only",
    "--dataset-resampled": "also without the flag; `--dataset-resampled false` reads each shard once per epoch",
    "--save-frequency": "the newest 3 checkpoints stay (`--checkpoint.keep-last`)",
    "--resume": "a checkpoint of open_clip (`epoch_N.pt`) is resumed with its optimizer",
    "--lr-scheduler": "also linear",
}


class Fate(NamedTuple):
    """What becomes of a flag."""

    flag: str
    kind: str  # taken, notice, or refused
    text: str  # the setting, and what it means; the notice; or the reason


def _told(table: Mapping[str, str], flag: str) -> str | None:
    return next((text for patterns, text in table.items() if any(fnmatchcase(flag, p) for p in patterns.split())), None)


def notice(flag: str) -> str | None:
    """Why the flag has no work here, or None where it is not one of these."""
    told = _told(NOTICES, flag)
    return None if told is None else f"not needed: {told}"


def value_notice(flag: str, text: str) -> str | None:
    """What a flag's value means where it has another meaning than in open_clip; None for the usual values."""
    if flag == "--precision" and text.lower() == "amp":
        return "amp is bfloat16 without a scaler where the device supports it; fp16 is float16 with a scaler"
    return None


def refusal(flag: str) -> str | None:
    """Why the flag is not accepted and what to do, or None where it is not one of open_clip's."""
    return _told(REFUSED, flag)


def fate(flag: str) -> Fate | None:
    """What becomes of a flag; None for one that is not known."""
    if (alias := BY_FLAG.get(flag)) is not None:
        keys = ", ".join(f"`{key}`" for key in alias.keys)
        remark = f"; {REMARKS[flag]}" if flag in REMARKS else ""
        return Fate(flag, "taken", f"{keys}: {alias.meaning}{remark}")
    if (text := notice(flag)) is not None:
        return Fate(flag, "notice", text)
    return None if (text := refusal(flag)) is None else Fate(flag, "refused", text)


_SECTIONS = {  # kind -> the title of its table, and of its second column
    "taken": ("Taken with their meaning", "setting"),
    "notice": ("Not needed, with a notice", "why"),
    "refused": ("Refused", "why, and what to use"),
}


def table() -> str:
    """The page that lists all flags with their fate, in Markdown."""
    found = [one for flag in (*MAIN, *RELEASED) if (one := fate(flag)) is not None]
    page = f"""\
# Flags of open_clip_train

<!-- Made by `python -m clipstream.open_clip.fates`; a test compares it. -->

The {len(MAIN)} flags of open_clip's main branch (4.2.0.dev0, commit 89fb801), and {len(RELEASED)} of release 3.3.0.
[Coming from open_clip_train](from-open_clip.md) shows how to move a job.
"""
    for kind, (title, column) in _SECTIONS.items():
        rows: dict[str, list[str]] = {}
        for one in found:
            if one.kind == kind:
                rows.setdefault(one.text.removeprefix("not needed: "), []).append(f"`{one.flag}`")
        page += f"\n## {title}: {sum(map(len, rows.values()))}\n\n| flag | {column} |\n|---|---|\n"
        page += "".join(f"| {', '.join(flags)} | {text} |\n" for text, flags in rows.items())
    return page


if __name__ == "__main__":
    print(table(), end="")
