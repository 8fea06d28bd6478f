"""FSDP2: parameters, gradients and moments sharded over the ranks, and conversion between shards and whole tensors.

Functions here return tensors and modules that are not sharded unchanged, so callers need not distinguish.

**Units.** Each block of a tower is a unit: its parameters are gathered when it runs, forward and backward, and its
gradients are averaged over the ranks as soon as they are complete; everything outside of blocks is one more unit.
Scale and bias of the logits are single numbers, which cannot be sharded: every rank holds them, and `average_scalars`
averages their gradients. A rank holds 1/N of parameters, gradients and moments, and one or two whole units. Parameters
are communicated in each pass forward and back, gradients in each pass back; so every micro-batch costs as much as a
whole batch, as accumulating gradients would take the memory of whole ones.

**Numerics** are those of the run without sharding: parameters are gathered in their own dtype, and gradients summed in
at least float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.training.precision import Precision


class Modules(Protocol):
    """nn.Module, or anything with its `modules`."""

    def modules(self) -> Iterator[nn.Module]:
        """All of them."""
        ...


class FullTowers:
    """Unsharded towers, with the interface of `ShardedTowers`."""

    def __init__(self, towers: Any) -> None:
        self.full = towers

    @contextmanager
    def full_weights(self, device: str, *, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """The towers on their device; within the context, parameters named in `instead` have those values."""
        instead = instead or {}
        parts = [(p, p.data, instead[name]) for name, p in self.full.named_parameters() if name in instead]
        for parameter, _, tensor in parts:
            parameter.data = tensor.to(parameter.dtype)
        try:
            yield self.full
        finally:
            for parameter, trained, _ in parts:
                parameter.data = trained


class ShardedTowers:
    """Shards towers over the ranks, in place, and fills an unsharded copy on demand.

    Args:
        towers: on the CPU or on this rank's device, in their final dtype; moved to the device.
        world: several ranks.
        precision: of the forward pass.

    Attributes:
        full: an unsharded copy, whose tensors have content only within the context of `full_weights`.

    Raises:
        SettingsError: batch norm or fp16, which are not supported.
    """

    def __init__(self, towers: Any, world: World, precision: Precision) -> None:
        if towers.has_batch_norm:
            raise SettingsError("train.parallel: fsdp takes models without batch norm (a ViT): use ddp")
        if precision == "fp16":
            raise SettingsError("train.parallel: fsdp has no scaler for fp16: use --precision bf16 or fp32, or ddp")
        self.towers, self.world = towers, world
        # A deep copy with tensors without content.
        tensors = (*towers.parameters(), *towers.buffers())
        empty = {id(tensor): _empty_like(tensor, "meta") for tensor in tensors}
        self.full: Any = copy.deepcopy(towers, cast("dict[int, Any]", empty))
        mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
        # No separate dtype for parameters: autocast converts matrices, and leaves embeddings and norms.
        reduce_dtype = torch.float32 if precision == "pure_bf16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for block in blocks(towers):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(towers, mesh=mesh, mp_policy=policy, ignored_params=set(_scalars(towers)))
        towers.to(world.device)

    @contextmanager
    def full_weights(self, device: str, *, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """The unsharded copy on a device, with the present weights, within the context. Collective.

        Args:
            instead: values for the parameters of these names, sharded like them.
        """
        reshard(self.towers)
        _move(self.full, device)
        with torch.no_grad():
            into = _tensors(self.full)
            for name, tensor in _tensors(self.towers).items():
                into[name].copy_(full_tensor((instead or {}).get(name, tensor)))
        try:
            yield self.full
        finally:
            _move(self.full, "meta")


def parallelize(towers: Any, world: World, *, parallel: str, precision: Precision) -> FullTowers | ShardedTowers:
    """The towers on this rank's device, sharded in place with 'fsdp' on several ranks.

    Raises:
        SettingsError: as ShardedTowers.
    """
    if parallel == "fsdp" and world.size > 1:
        return ShardedTowers(towers, world, precision)
    return FullTowers(towers.to(world.device))


def blocks(towers: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the towers: outermost modules in a list of modules of the same class."""
    if isinstance(towers, nn.ModuleList | nn.Sequential):
        children = list(towers.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            return [child for child in children if any(True for _ in child.parameters())]
    return [block for child in towers.children() for block in blocks(child)]


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def reshard(module: Modules) -> None:
    """Free gathered parameters, so that `state_dict` returns the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole, on every rank (collective); any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A whole tensor that every rank holds, sharded like `like`."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    sharded = distribute_tensor(
        tensor.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None
    )
    return sharded.clone()  # a view would keep the memory of the whole tensor


def average_scalars(towers: nn.Module, world: World) -> None:
    """Average the gradients of the scalars, which FSDP ignores, over the ranks."""
    for parameter in _scalars(towers):
        if parameter.grad is not None:
            world.all_reduce_sum(parameter.grad).div_(world.size)


def _scalars(towers: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in towers.parameters() if parameter.numel() == 1]


def _move(module: nn.Module, device: str) -> None:
    """Move all tensors to another device without their content; unlike `to_empty`, keeps tied tensors tied."""
    for tensor in {id(tensor): tensor for tensor in _tensors(module).values()}.values():
        torch.utils.swap_tensors(tensor, _empty_like(tensor, device))  # type: ignore[no-untyped-call]


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names, non-persistent ones included."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
