"""Parameter groups with and without weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

UNDECAYED = ("bn", "ln", "bias", "logit_scale")  # parts of names, from open_clip_train.main


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter: the rule of open_clip_train.main."""
    return parameter.ndim >= 2 and not any(part in name for part in UNDECAYED)


def parameter_groups(module: nn.Module, wd: float) -> list[dict[str, Any]]:
    """The trainable parameters in up to three groups, as torch optimizers take them.

    The first has weight decay `wd` (see `decays`); the second has none; the third holds single numbers, which have none
    either, and which FSDP never shards. Empty groups are left out.
    """
    trainable = [(decays(name, p), p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for decayed, p in trainable if decayed], "weight_decay": wd},
        {"params": [p for decayed, p in trainable if not decayed and p.numel() > 1], "weight_decay": 0.0},
        {"params": [p for decayed, p in trainable if not decayed and p.numel() == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
