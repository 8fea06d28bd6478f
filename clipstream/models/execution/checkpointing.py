"""Activation checkpointing by policy: blocks of the towers that recompute their activations in the backward pass.

One mechanism for the towers of open_clip, timm and Hugging Face: the `forward` of a block is replaced on the instance,
so that names in state dicts stay, and FSDP gathers the block's parameters around it. The recomputation has the random
states, autocast and attention backends of its pass, so gradients are those without it. Blocks in evaluation mode and
passes without gradients are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from clipstream.models.execution.blocks import blocks
from clipstream.models.execution.packed_text import VARLEN
from clipstream.models.settings import NO_BLOCKS, RECOMPUTED_NORMS

Policy = str | int | float  # 'off', 'all', 'matmuls', every N-th block, or a budget (see `activation_budget`)

_suspended = False  # within `suspended`; a plain variable, since older torch.compile does not capture a ContextVar
# The backends of attention, on CPUs as well, and whether a context leaves them enabled.
_BACKENDS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}
_ATEN = torch.ops.aten
# Results that `matmuls` keeps: matrix products, convolutions and attention.
_KEPT: list[Any] = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    *([torch.ops.torch_attn._varlen_attn.default] if VARLEN else []),
]


def checkpoint_blocks(tower: nn.Module, policy: Policy, key: str) -> None:
    """Let the blocks of one tower recompute, in place: 'all' of them, every N-th, or all but their matrix products.

    With a budget, this only checks that they can.

    Args:
        key: the setting, for messages.

    Raises SettingsError: the tower has no repeated blocks, or batch norm in them, which would count the statistics of
    a batch twice.
    """
    if policy == "off":
        return
    found = blocks(tower)
    if not found:
        raise NO_BLOCKS.error(key, policy, type(tower).__name__)
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for block in found for part in block.modules()):
        raise RECOMPUTED_NORMS.error(key, policy, type(tower).__name__)
    if policy in ("all", "matmuls") or isinstance(policy, int):  # a budget is for `activation_budget`
        for block in found[:: policy if isinstance(policy, int) else 1]:
            set_policy(block, "matmuls" if policy == "matmuls" else "all")


def set_policy(block: nn.Module, policy: Literal["off", "matmuls", "all"]) -> None:
    """Let a block recompute its activations, or all but the results of its matrix products, or nothing."""
    vars(block).pop("forward", None)
    if policy != "off":  # a method, so that a deep copy runs its own weights
        forward = _recompute_but_matmuls if policy == "matmuls" else _recompute
        block.forward = MethodType(forward, block)


@contextmanager
def suspended() -> Iterator[None]:
    """A context in which no block recomputes, to count a model's FLOPs."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(block, {}, args, kwargs)


def _recompute_but_matmuls(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _KEPT)
    return _checkpointed(block, {"context_fn": contexts}, args, kwargs)


def _casting_anew(forward: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A pass that finds no weight cast by autocast: the recomputation finds none, and must take the same operations."""
    kind = x.device.type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        return forward(x, *args, **kwargs)


def _checkpointed(block: nn.Module, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward = partial(type(block).forward, block)  # which torch.compile can capture, unlike a method made here
    if options:
        forward = partial(_casting_anew, forward)
    if not (block.training and torch.is_grad_enabled()) or _suspended:
        return forward(*args, **kwargs)
    # torch restores random states and autocast. Without the backends, other tensors would be saved.
    forward = partial(_attending, enabled_backends(), forward)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def enabled_backends() -> list[SDPBackend]:
    """The backends of attention that torch may choose from."""
    return [backend for backend, on in _BACKENDS.items() if on()]


def _attending(backends: list[SDPBackend], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(backends):
        return forward(*args, **kwargs)
