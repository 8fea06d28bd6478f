"""Owns FSDP2: parameters, gradients and moments cut over the ranks, and the ways between shards and the whole.

Never computes a loss, and writes no file. What is not sharded goes through its functions unchanged, so callers need
not ask.

**What is cut.** Each block of a tower is a unit: its parameters are gathered when it runs, forward and backward, and
its gradients are averaged over the ranks as soon as they are whole; what lies outside of blocks is a unit too. Scale
and bias of the logits are single numbers, which cannot be cut: every rank holds them, and `average_scalars` does for
them what FSDP does for the others. A rank holds 1/N of parameters, gradients and moments, and one or two whole units.
Communication: parameters for each pass forward and back, and gradients for each pass back. So every micro-batch costs
as much as a whole batch does: to add gradients up until the last one would take the memory of whole ones.

**Arithmetic** is that of the run without sharding: parameters travel in their own type, and gradients are summed in
float32 at least.
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

from clipstream.errors import SettingsError
from clipstream.training.precision import Precision
from clipstream.world import World


class Modules(Protocol):
    """What has modules: nn.Module, and what looks like one."""

    def modules(self) -> Iterator[nn.Module]:
        """All of them."""
        ...


class FullTowers:
    """Towers that every rank has whole, with the interface of `ShardedTowers`."""

    def __init__(self, towers: Any) -> None:
        self.full = towers

    @contextmanager
    def full_weights(self, device: str, *, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """The towers, where they are, for as long as the context is open with the parameters that `instead` names."""
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
    """Towers whose parameters are cut over the ranks, in place, and the way to a copy with whole ones.

    Args:
        towers: on the CPU or on this rank's device, in their final type; the device's when this returns.
        world: several ranks.
        precision: of the forward pass.

    Attributes:
        full: towers like these, whose tensors have content only in the context that `full_weights` gives.

    Raises:
        SettingsError: what does not go together with sharding: batch norm, fp16.
    """

    def __init__(self, towers: Any, world: World, precision: Precision) -> None:
        if towers.has_batch_norm:
            raise SettingsError("train.parallel: fsdp takes models without batch norm (a ViT): use ddp")
        if precision == "fp16":
            raise SettingsError("train.parallel: fsdp has no scaler for fp16: use --precision bf16 or fp32, or ddp")
        self.towers, self.world = towers, world
        # A deep copy, but of tensors without content.
        tensors = (*towers.parameters(), *towers.buffers())
        empty = {id(tensor): _empty_like(tensor, "meta") for tensor in tensors}
        self.full: Any = copy.deepcopy(towers, cast("dict[int, Any]", empty))
        mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
        # No type of their own for parameters: autocast narrows what it multiplies by, and leaves embeddings and norms.
        reduce_dtype = torch.float32 if precision == "pure_bf16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for block in blocks(towers):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(towers, mesh=mesh, mp_policy=policy, ignored_params=set(_scalars(towers)))
        towers.to(world.device)

    @contextmanager
    def full_weights(self, device: str, *, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """The copy, with the present weights on a device for as long as the context is open. Collective.

        Args:
            instead: tensors in place of the parameters of these names, sharded like them.
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
    """The towers on this rank's device: whole, or with 'fsdp' on several ranks sharded, in place.

    Raises:
        SettingsError: as ShardedTowers.
    """
    if parallel == "fsdp" and world.size > 1:
        return ShardedTowers(towers, world, precision)
    return FullTowers(towers.to(world.device))


def blocks(towers: nn.Module) -> list[nn.Module]:
    """The repeated parts of the towers: outermost modules that stand in a list with others of their class."""
    if isinstance(towers, nn.ModuleList | nn.Sequential):
        children = list(towers.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            return [child for child in children if any(True for _ in child.parameters())]
    return [block for child in towers.children() for block in blocks(child)]


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def reshard(module: Modules) -> None:
    """Give up what is gathered of the parameters, which then are those that `state_dict` names: the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank (collective); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A whole tensor, which every rank has, sharded as `like` is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    sharded = distribute_tensor(
        tensor.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None
    )
    return sharded.clone()  # a part of the whole tensor's memory would keep all of it


def shard_state(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state of an optimiser, cut as this one's parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            name: shard_like(value, parameters[index]) if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
        if index < len(parameters)
    }
    return {**saved, "state": state}


def average_scalars(towers: nn.Module, world: World) -> None:
    """Average over the ranks the gradients of what FSDP leaves alone, so that they are like the others."""
    for parameter in _scalars(towers):
        if parameter.grad is not None:
            world.all_reduce_sum(parameter.grad).div_(world.size)


def _scalars(towers: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in towers.parameters() if parameter.numel() == 1]


def _move(module: nn.Module, device: str) -> None:
    """All tensors to another device, without their content; what has two names keeps both, unlike with `to_empty`."""
    for tensor in {id(tensor): tensor for tensor in _tensors(module).values()}.values():
        torch.utils.swap_tensors(tensor, _empty_like(tensor, device))  # type: ignore[no-untyped-call]


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names, also what a checkpoint leaves out."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
