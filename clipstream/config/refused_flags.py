"""Advice on flags of open_clip's trainer that do not exist here: the replacement, or the reason why there is none.

The flags are those of open_clip_train 3.3.0 and of open_clip's main branch of June 2026.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

NEEDLESS = {  # the effect is always there, or is chosen without a flag
    "--local-loss": "the loss is exact on any number of ranks, and made of local logits",
    "--gather-with-grad": "the loss is exact on any number of ranks",
    "--loss-dist-impl": "the loss is exact on any number of ranks",
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
    "--torchscript": "a compiled model is set by --torchcompile",
    "--trace": "a compiled model is set by --torchcompile",
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
    "--length-bucketing": "captions are padded to the model's length",
    "--bucket-*": "captions are padded to the model's length",
    "--text-pad-multiple": "captions are padded to the model's length",
    "--*audio*": "audio is not supported",
    "--text-layer-decay": "layers have one learning rate; --lock-text freezes the text tower, whole or in part",
    "--*-layer-decay": "layers have one learning rate; --lock-image freezes the image tower, whole or in part",
    "--text-pooler-own-group": "layers have one learning rate",
    "--wd-exclude": "gains, biases and scales have no weight decay, as in open_clip, and all other weights have",
    "--fsdp-*": "--train.parallel fsdp has no settings of its own",
    "--torchcompile-*": "--torchcompile has no settings of its own",
    "--train-loss-ema-samples": "the loss is that of the step, not smoothed",
    "--max-image-pixels": "pictures of more than 178,956,970 pixels are dropped",
    "--pretrained-image": "a model's weights are loaded whole, by --pretrained",
    "--coca-*": "CoCa's caption loss is not supported",
    "--distill-*": "distillation is not supported",
    "--use-bnb-linear": "bitsandbytes is not supported",
    "--use-naflex": "NaFlex is not supported",
    "--*naflex-*": "NaFlex is not supported",
}


def refusal(flag: str) -> str | None:
    """Why the flag is not accepted and what to do, or None where it is not one of open_clip's."""
    for pattern, text in NEEDLESS.items():
        if fnmatchcase(flag, pattern):
            return f"is not needed, leave it out ({text})"
    return next((text for pattern, text in REFUSED.items() if fnmatchcase(flag, pattern)), None)
