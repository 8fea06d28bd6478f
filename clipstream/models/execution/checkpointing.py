"""Activation checkpointing: blocks of the towers that recompute activations in the backward pass, by policy or budget.

One mechanism for the towers of open_clip, timm and Hugging Face: the `forward` of a block is replaced on the instance,
so that names in state dicts stay, and FSDP gathers the block's parameters around it. The recomputation has the random
states, autocast and attention backends of its pass, so gradients are those without it. Blocks in evaluation mode and
passes without gradients are as before.

A memory budget chooses a policy for each block. What blocks hold is measured by forward passes of two and four samples:
the difference is what two samples take, without weights and masks. Recomputing all but matrix products frees the most
memory for its time (`benchmarks/checkpointing.py`), so the first blocks recompute that, as many as the budget needs; if
all blocks are not enough, the first ones recompute everything. The first ones, because their backward pass comes last,
when the memory of the others is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import nn
from torch.backends import cuda
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from clipstream.errors import SettingsError
from clipstream.models.execution.text_buckets import VARLEN
from clipstream.models.layers import batch_norms, blocks
from clipstream.models.settings import NO_BLOCKS, RECOMPUTED_NORMS, TOWERS, ModelSettings, Tower

if TYPE_CHECKING:
    from clipstream.models.towers import Towers

Level = Literal["off", "matmuls", "all"]
Policy = str | int | float  # 'off', 'all', 'matmuls', every N-th block, or a budget

_suspended = False  # within `suspend`; a plain variable, since older torch.compile does not capture a ContextVar
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

    Raises SettingsError: the tower has no repeated blocks, or batch norm in them, which would count the statistics of
    a batch twice.
    """
    if policy == "off":
        return
    found = blocks(tower)
    if not found:
        raise NO_BLOCKS.error(key, policy, type(tower).__name__)
    if any(map(batch_norms, found)):
        raise RECOMPUTED_NORMS.error(key, policy, type(tower).__name__)
    if policy in ("all", "matmuls") or isinstance(policy, int):  # a budget is for `fit_budgets`
        for block in found[:: policy if isinstance(policy, int) else 1]:
            set_policy(block, "matmuls" if policy == "matmuls" else "all")


def set_policy(block: nn.Module, policy: Level) -> None:
    """Let a block recompute its activations, or all but the results of its matrix products, or nothing."""
    vars(block).pop("forward", None)
    if policy != "off":  # a method, so that a deep copy runs its own weights
        forward = _recompute_but_matmuls if policy == "matmuls" else _recompute
        block.forward = MethodType(forward, block)


@contextmanager
def suspend() -> Iterator[None]:
    """A context in which no block recomputes, to count a model's FLOPs."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run_checkpointed(block, {}, args, kwargs)


def _recompute_but_matmuls(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _KEPT)
    return _run_checkpointed(block, {"context_fn": contexts}, args, kwargs)


def _casting_anew(forward: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A pass that finds no weight cast by autocast: the recomputation finds none, and must take the same operations."""
    kind = x.device.type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        return forward(x, *args, **kwargs)


def _run_checkpointed(block: nn.Module, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


LEVELS: tuple[Level, ...] = ("off", "matmuls", "all")
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
Held = dict[Level, list[float]]  # bytes of a sample that each block holds for the backward pass


def fit_budgets(
    towers: Towers, settings: ModelSettings, samples: int, context: Callable[[], AbstractContextManager[None]]
) -> list[str]:
    """Set the policies of the towers whose setting is a budget; returns a line about each.

    Weights, buffers and gradients stay as they are, and random states if `context`, that of a forward pass of so many
    samples, restores them. Collective if the towers are sharded.

    Raises SettingsError: as `fit_budget`.
    """
    lines = []
    buffers = [(buffer, buffer.clone()) for buffer in towers.buffers()]  # batch statistics
    for tower in TOWERS:
        policy = settings.checkpointing_of(tower)
        if not is_budget(policy) or tower in towers.stored or tower in towers.unchanging():
            continue

        def run(samples: int, other: Tower = "text" if tower == "image" else "image") -> object:
            pixels, ids = towers.zeros(samples, str(towers.mean.device))
            rows = towers.mean.new_zeros(samples, 1)
            lengths = (ids.shape[1],) * samples if other == "image" else None
            with context():
                if other == "image":
                    return towers(rows, ids, lengths, known=(other,))
                return towers(pixels, rows, known=(other,))

        key = f"model.{tower}.grad_checkpointing"
        lines.append(fit_budget(blocks(towers.tower(tower)), policy, samples, run, key))
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return lines


def is_budget(policy: object) -> TypeGuard[float | str]:
    """Whether a policy of a tower is a budget: a share of the activations, or '12GiB'."""
    return isinstance(policy, float) or (isinstance(policy, str) and policy.endswith(tuple(UNITS)))


def fit_budget(
    tower: Sequence[nn.Module], budget: float | str, samples: int, run: Callable[[int], object], key: str
) -> str:
    """Set the policies of a tower's blocks so that their activations fit the budget, with the least recomputation.

    Args:
        tower: the blocks, in the order in which they run.
        budget: share of the activations without recomputation, or bytes as '12GiB'.
        samples: of a forward pass.
        run: forward pass of so many samples with a graph.

    Returns a line about the policies. Raises SettingsError: the inputs of the blocks take more already.
    """
    held = measure(tower, run)
    whole, gib = sum(held["off"]), samples / (1 << 30)
    limit = whole * budget if isinstance(budget, float) else float(budget[:-3]) * UNITS[budget[-3:]] / samples
    levels = choose_levels(held, limit)
    if levels is None:
        raise SettingsError(f"{key}: {budget} is less than the inputs of the blocks: raise it, or use all")
    for block, level in zip(tower, levels, strict=True):
        set_policy(block, level)
    total = sum(held[level][block] for block, level in enumerate(levels))
    counts = f"{levels.count('matmuls')} recompute all but matrix products, {levels.count('all')} everything"
    return f"{key}: of {len(tower)} blocks {counts}: {total * gib:.3g} GiB of activations, not {whole * gib:.3g}"


def choose_levels(held: Held, limit: float) -> list[Level] | None:
    """The policy of each block with at most `limit` bytes in all; None if there is none."""
    levels: list[Level] = ["off"] * len(held["off"])
    total = sum(held["off"])
    for level in LEVELS[1:]:
        for block, before in enumerate(levels):
            if total <= limit:
                return levels
            if (freed := held[before][block] - held[level][block]) > 0:
                levels[block] = level
                total -= freed
    return levels if total <= limit else None


def measure(tower: Sequence[nn.Module], run: Callable[[int], object]) -> Held:
    """Bytes that each block holds for a sample, by policy. The blocks' policies are `off` afterwards."""
    held: Held = {}
    for level in LEVELS:
        for block in tower:
            set_policy(block, level)
        found = []
        for samples in (2, 4):
            with _Made(tower) as made:
                result = run(samples)
                found.append(made.alive())
                del result
        held[level] = [(more - less) / 2 for less, more in zip(*found, strict=True)]
    for block in tower:
        set_policy(block, "off")
    return held


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages made in each block."""

    def __init__(self, tower: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: list[dict[int, tuple[Any, int]]] = [{} for _ in tower]
        self._current: int | None = None

        def enter(number: int | None) -> Callable[..., None]:
            return lambda *_: setattr(self, "_current", number)

        self._hooks = [block.register_forward_pre_hook(enter(number)) for number, block in enumerate(tower)]
        self._hooks += [block.register_forward_hook(enter(None)) for block in tower]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._current is not None:
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor:
                    storage = tensor.untyped_storage()
                    found = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                    self._storages[self._current].setdefault(storage._cdata, found)
        return made

    def alive(self) -> list[int]:
        return [
            sum(size for reference, size in storages.values() if not reference.expired()) for storages in self._storages
        ]
