"""Training on several ranks: gradient summation with DDP, sharding with FSDP2, and batch norm over the ranks.

With one rank, functions here return modules and tensors unchanged; those about shards do so for whatever is not
sharded. So callers need not distinguish.

**DDP** sums gradients in the same order in every run (`warm_up_buckets`).

**FSDP2.** Each block of a tower is a unit: its parameters are gathered when it runs, forward and backward, and its
gradients are averaged over the ranks as soon as they are complete; everything outside of blocks is one more unit.
Scale and bias of the logits are single numbers, which cannot be sharded: every rank holds them, and `finish_gradients`
averages their gradients. A rank holds 1/N of parameters, gradients and moments (with R replicas, HSDP: R/N), and one or
two whole units. Parameters are communicated in each pass forward and back, gradients in each pass back; so every
micro-batch costs as much as a whole batch, as accumulating gradients would take the memory of whole ones.

Numerics are those of the run without sharding. With `bf16`, the matrices of blocks are gathered in bfloat16 (torch 2.15
or newer): autocast would round them alike, and keep its copies, which are not sharded, until the backward pass. Norms,
biases and everything outside of blocks are gathered in float32, and gradients are summed in at least float32.

**Batch norm** uses statistics of the whole global batch: torch's SyncBatchNorm, which requires CUDA.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.frozen import ids_of_own
from clipstream.models.layers import batch_norms, blocks
from clipstream.models.settings import Precision
from clipstream.training.settings import FP16_SHARDS, SHARDED_NORMS, TrainSettings
from clipstream.training.state import same_randomness

# torch 2.13 renamed the argument.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
_SELECTS_DTYPES = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")  # per parameter; torch 2.15


def wrap(module: nn.Module, world: World, settings: TrainSettings | None = None) -> nn.Module:
    """The module in DDP, with rank 0's weights; the module itself with one rank, or if it is sharded.

    DDP averages gradients, so a rank's share of the loss is multiplied by `world.size` before `backward`. Buffers are
    not broadcast: batch statistics are the same on all ranks (`synchronize_batch_norm`). A static graph would exclude
    `no_sync`, which micro-batches need, and hide a parameter without a gradient.
    """
    if world.size == 1 or is_sharded(module):
        return module
    # 1 x 1 convolutions warn on each backward pass, as their strides are ambiguous.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    options: Any = {_SYNC_BUFFERS: False, "bucket_cap_mb": None if settings is None else settings.ddp_bucket_mib}
    # No `device_ids`: with them, DDP looks at each number of the texts' lengths, to move it to the device.
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    if settings is not None and settings.ddp_hook == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def no_sync(module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which gradients accumulate on this rank without communication; no effect on a sharded module."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def sums_gradients(module: nn.Module) -> bool:
    """Whether the backward pass of the next forward pass sums gradients over the ranks (DDP)."""
    return isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync


def finish_gradients(module: nn.Module, world: World) -> None:
    """After the last backward pass of a step: average the gradients of the scalars, which FSDP ignores."""
    if is_sharded(module):
        for parameter in _scalars(module):
            if parameter.grad is not None:
                world.all_reduce_sum(parameter.grad).div_(world.size)


def warm_up_buckets(module: nn.Module, forward: Callable[[], None], world: World) -> None:
    """Let DDP rebuild its gradient buckets before the first step, by passes forward and backward over all trainable
    parameters with gradients of zero; weights, buffers and random states stay.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. The bucket bounds
    decide in which order 3 or more ranks add, so a resumed run would differ from an uninterrupted one in the last bits
    of its first step. Therefore every run, new or resumed, rebuilds them first.
    """
    if not isinstance(module, DistributedDataParallel):
        return
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with same_randomness(world.device):
            for _ in range(2):  # the buckets are rebuilt when the second pass begins
                forward()
    finally:  # also where another rank fails, and this one saves
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    module.zero_grad(set_to_none=True)


class FullTowers:
    """Unsharded towers, with the interface of `ShardedTowers`."""

    def __init__(self, towers: Any) -> None:
        self.towers = self.full = towers

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
        reshard_after_forward: whether the blocks' gathered weights are freed until their backward pass.
        replicas: copies of the shards, each over as many ranks in a row.

    Attributes:
        full: an unsharded copy, whose tensors have content only within the context of `full_weights`.

    Raises SettingsError: batch norm or fp16, which are not supported, or a number of ranks that cannot be divided.
    """

    def __init__(
        self, towers: Any, world: World, precision: Precision, *, reshard_after_forward: bool = True, replicas: int = 1
    ) -> None:
        if world.size % replicas:
            raise SettingsError(f"train.fsdp_replicas: {replicas} does not divide the {world.size} ranks")
        if towers.has_batch_norm:
            raise SHARDED_NORMS.error("train.parallel")
        if precision == "fp16":
            raise FP16_SHARDS.error("train.parallel")
        self.towers = towers
        # A deep copy with tensors without content.
        empty = {id(tensor): _empty_like(tensor, "meta") for tensor in (*towers.parameters(), *towers.buffers())}
        self.full: Any = copy.deepcopy(towers, cast("dict[int, Any]", empty))
        if (buckets := getattr(towers, "text_buckets", None)) is not None:
            towers.text_buckets = buckets.for_shards()  # the ranks must take the same number of passes
        kind, sizes = torch.device(world.device).type, (replicas, world.size // replicas)
        whole = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
        mesh = whole["shard"] if replicas == 1 else whole
        reduce_dtype = torch.float32 if precision in ("bf16", "pure_bf16") else None
        policy = of_blocks = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        if precision == "bf16" and _SELECTS_DTYPES:
            adapters = getattr(towers, "adapters", None)
            own = ids_of_own(towers) | (set() if adapters is None else adapters.wide(towers.clip))

            def keep_dtype(parameter: nn.Parameter) -> torch.dtype | None:
                return parameter.dtype if parameter.ndim < 2 or id(parameter) in own else None

            of_blocks = replace(policy, param_dtype=torch.bfloat16, param_dtype_override_fn=keep_dtype)
        for block in blocks(towers):
            fully_shard(block, mesh=mesh, mp_policy=of_blocks, reshard_after_forward=reshard_after_forward)
        fully_shard(towers, mesh=mesh, mp_policy=policy, ignored_params=set(_scalars(towers)))
        towers.to(world.device)

    @contextmanager
    def full_weights(self, device: str, *, instead: Mapping[str, torch.Tensor] | None = None) -> Iterator[Any]:
        """The unsharded copy on a device, with the present weights, or values `instead` by name, sharded like them,
        within the context. Collective.
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


def parallelize(towers: Any, world: World, settings: TrainSettings) -> FullTowers | ShardedTowers:
    """The towers on this rank's device, sharded in place with 'fsdp' on several ranks.

    Raises SettingsError: as ShardedTowers.
    """
    if settings.parallel != "fsdp" or world.size == 1:
        return FullTowers(towers.to(world.device))
    options: Any = {"reshard_after_forward": settings.reshard_after_forward, "replicas": settings.fsdp_replicas}
    with world.connecting():
        return ShardedTowers(towers, world, settings.arithmetic, **options)


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that `state_dict` returns the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole, on every rank (collective); any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A whole tensor that every rank holds, sharded like `like`."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    sharded = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return sharded.clone()  # a view would keep the memory of the whole tensor


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
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


def synchronize_batch_norm(module: nn.Module, world: World, frozen: Collection[nn.Module] = ()) -> None:
    """Make batch norm use statistics over all ranks, in place, so that features do not depend on their number; `frozen`
    modules stay in evaluation mode, and need not be changed.

    Raises SettingsError: on the CPU, for which torch has no such batch norm.
    """
    if world.size == 1 or all(part in frozen for part in batch_norms(module)):
        return
    if not world.device.startswith("cuda"):
        advice = "use one rank, or a model without batch norm (a ViT)"
        raise SettingsError(f"batch norm over several ranks requires CUDA: {advice}")
    convert_sync_batchnorm(module)  # torch's own would leave out the activations of timm's norms
