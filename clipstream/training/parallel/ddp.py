"""Gradient summation over ranks with DDP, in the same order in every run.

With one rank, or sharded (`fsdp`), the module is used as it is.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clipstream.distributed.world import World
from clipstream.training.parallel.fsdp import average_scalars, is_sharded
from clipstream.training.precision import same_randomness

# torch 2.13 renamed the argument.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_OPTIONS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False}


def wrap(module: nn.Module, world: World) -> nn.Module:
    """The module in DDP, with rank 0's weights; the module itself with one rank, or if it is sharded.

    DDP averages gradients, so a rank's share of the loss is multiplied by `world.size` before `backward`. Buffers are
    not broadcast: batch statistics are the same on all ranks (`batch_norm.synchronize_batch_norm`). There is no static
    graph: it would only save the search for unused parameters, which is off, it excludes `no_sync`, which micro-batches
    need, and it would hide a parameter without a gradient.
    """
    if world.size == 1 or is_sharded(module):
        return module
    device = torch.device(world.device)
    # 1 x 1 convolutions warn on each backward pass, as their strides are ambiguous.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_OPTIONS,
    )


def no_sync(module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which gradients accumulate on this rank without communication.

    It has no effect on a sharded module, which has no memory for whole gradients.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def finish_gradients(module: nn.Module, world: World) -> None:
    """After the last backward pass of a step: average the gradients that are not averaged yet."""
    if is_sharded(module):
        average_scalars(module, world)


def warm_up_buckets(module: nn.Module, forward: Callable[[], None], world: World) -> None:
    """Let DDP rebuild its gradient buckets before the first step; weights, buffers and random states stay.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. The bucket bounds
    decide in which order 3 or more ranks add, so a resumed run would differ from an uninterrupted one in the last bits
    of its first step. Therefore every run, new or resumed, rebuilds them first.

    Args:
        module: the result of `wrap`.
        forward: a forward and backward pass over all trainable parameters with gradients of zero.
    """
    if not isinstance(module, DistributedDataParallel):
        return
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with same_randomness(world.device):
        for _ in range(2):  # the buckets are rebuilt when the second pass begins
            forward()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    module.zero_grad(set_to_none=True)
