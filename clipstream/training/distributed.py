"""Owns the summing of gradients over ranks: how a module is wrapped in DDP, and when it sums, alike in every run.

What is sharded (see `sharding`) sums by itself, and is told here when.

Never computes a loss. With one rank the module is used as it is.
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

from clipstream.training.precision import same_randomness
from clipstream.training.sharding import average_scalars, is_sharded
from clipstream.world import World

# torch 2.13 gave the argument a new name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_OPTIONS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False}


def wrap(module: nn.Module, world: World) -> nn.Module:
    """The module in DDP (with one rank, or sharded: itself), its weights made rank 0's.

    DDP averages gradients, so a rank's share of the loss is multiplied by `world.size` before `backward`. Buffers are
    not broadcast: batch statistics are the same on all ranks (`batch_norm.synchronize_batch_norm`). No static graph:
    what it spares is the search for unused parameters, which is off; it does not go with `no_sync`, which micro-batches
    need, and a parameter without a gradient would pass unseen.
    """
    if world.size == 1 or is_sharded(module):
        return module
    device = torch.device(world.device)
    # Of 1 x 1 convolutions, on each backward pass: their strides say the same in two ways.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_OPTIONS,
    )


def no_sync(module: nn.Module) -> AbstractContextManager[Any]:
    """A context whose forward and backward passes add gradients up on this rank alone.

    Not so those of a sharded module, which has no room for them.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def finish_gradients(module: nn.Module, world: World) -> None:
    """After a step's last backward pass: average over the ranks what is not yet."""
    if is_sharded(module):
        average_scalars(module, world)


def warm_up_buckets(module: nn.Module, forward: Callable[[], None], world: World) -> None:
    """Let DDP settle its gradient buckets before the first step, without a trace in weights, buffers or random states.

    DDP rebuilds its buckets after the first backward pass in the order in which gradients came. Their borders decide
    in which order 3 or more ranks add, so a resumed run would differ from the undisturbed one in the last bits of its
    first step. So every run, fresh or resumed, does it before its first step.

    Args:
        module: what `wrap` gave.
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
