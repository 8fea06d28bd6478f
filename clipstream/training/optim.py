"""Owns the optimiser: its parameter groups, the learning rate over the steps, and gradient clipping.

Never reads a batch. The learning rate is a function of the step alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream.errors import SettingsError
from clipstream.training.settings import OptimSettings, ScheduleSettings
from clipstream.world import World

VIT_BETAS, VIT_EPS = (0.9, 0.98), 1e-6
RESNET_BETAS, RESNET_EPS = (0.9, 0.999), 1e-8


def parameter_groups(module: nn.Module, wd: float) -> list[dict[str, Any]]:
    """The trainable parameters in three groups: matrices with weight decay `wd`; gains and biases with none; and, with
    none, single numbers, which are never sharded as the others may be.

    A group without parameters is left out.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": wd},
        {"params": [p for p in trainable if p.ndim < 2 and p.numel() > 1], "weight_decay": 0.0},
        {"params": [p for p in trainable if p.ndim < 2 and p.numel() == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, settings: OptimSettings, *, batch_norm: bool) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) over the module's trainable parameters, fused.

    Args:
        module: the towers, on their device and in their final type.
        settings: of the optimiser; where betas or eps are not set, they are CLIP's (arXiv:2103.00020, table 18).
        batch_norm: whether the model is of the ResNet kind, which wants another beta2 and eps than a ViT.

    Raises:
        SettingsError: nothing is trainable.
    """
    groups = parameter_groups(module, settings.wd)
    if not groups:
        raise SettingsError("nothing is left to train: unset model.lock_image or model.lock_text")
    usual = RESNET_BETAS if batch_norm else VIT_BETAS
    beta1, beta2 = (own if given is None else given for given, own in zip(settings.betas or usual, usual, strict=True))
    eps = settings.eps or (RESNET_EPS if batch_norm else VIT_EPS)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(beta1, beta2), eps=eps, fused=True)


def lr_at(step: int, *, peak: float, schedule: ScheduleSettings, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of a run of `total_steps`.

    Warm-up is linear, peak * (step + 1) / warmup; then the course of the schedule's type from `peak` towards
    `min_lr`, which would be reached at step `total_steps`. The same as open_clip's for min_lr = 0.
    """
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.type == "constant":
        return peak
    done = (step - schedule.warmup) / max(1, total_steps - schedule.warmup)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.type == "cosine" else 1 - done
    return schedule.min_lr + (peak - schedule.min_lr) * left


def gradient_norm(parameters: Iterable[nn.Parameter], world: World | None = None) -> torch.Tensor:
    """Scalar L2 norm of all gradients as one vector, in their type but float32 at least, without a host sync.

    Args:
        world: the ranks over which some of them are sharded (collective); None where none is.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    norm = _norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if world is None or not shards:
        return norm
    return (world.all_reduce_sum(_norm(shards).square()) + norm.square()).sqrt()


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float | None) -> None:
    """Scale all gradients in place by limit / norm where `norm` is above `limit`; without a host sync."""
    if limit is None:
        return
    parameters = list(parameters)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if not isinstance(p, DTensor)], limit, norm)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if isinstance(p, DTensor)], limit, norm)
