"""Norm and clipping of gradients, without synchronizing with the host; parameters may be sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream.distributed.world import World


def gradient_norm(parameters: Iterable[nn.Parameter], world: World | None = None) -> torch.Tensor:
    """Scalar L2 norm of all gradients as one vector, in their dtype but at least float32.

    Args:
        world: the ranks over which parameters are sharded (collective); None if none is.
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
    """Scale all gradients in place by limit / norm if `norm` is above `limit`."""
    if limit is None:
        return
    parameters = list(parameters)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if not isinstance(p, DTensor)], limit, norm)
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if isinstance(p, DTensor)], limit, norm)
