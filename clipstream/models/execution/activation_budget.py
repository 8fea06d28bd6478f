"""Activation checkpointing by memory budget: which blocks of a tower recompute, and how much.

A budget and the measured activations of each block enter; a policy for each block leaves. Blocks keep all of their
activations, or only the results of matrix products and attention, or only their input. What they hold is measured by
forward passes of two and four samples: the difference is what two samples take, without weights and masks.

Recomputing all but matrix products frees the most memory for its time (`benchmarks/checkpointing.py`). So the first
blocks recompute that, as many as the budget needs; if all blocks are not enough, the first ones recompute everything.
The first ones, because their backward pass comes last, when the memory of the others is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipstream.errors import SettingsError
from clipstream.models.execution.blocks import blocks
from clipstream.models.execution.checkpointing import set_policy
from clipstream.models.stored import TOWERS, Tower

if TYPE_CHECKING:
    from clipstream.models.settings import ModelSettings
    from clipstream.models.towers import Towers

Level = Literal["off", "matmuls", "all"]
LEVELS: tuple[Level, ...] = ("off", "matmuls", "all")
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
Held = dict[Level, list[float]]  # bytes of a sample that each block holds for the backward pass


def fit_budgets(
    towers: Towers, settings: ModelSettings, samples: int, context: Callable[[], AbstractContextManager[None]]
) -> list[str]:
    """Set the policies of the towers whose setting is a budget; returns a line about each.

    Weights, buffers and gradients stay as they are, and random states if `context` restores them. Collective if the
    towers are sharded.

    Args:
        samples: of a forward pass in training.
        context: returns the context of a forward pass.

    Raises SettingsError: as `fit_budget`.
    """
    lines = []
    buffers = [(buffer, buffer.clone()) for buffer in towers.buffers()]  # batch statistics
    for tower in TOWERS:
        policy = settings.recomputed(tower)
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
        key: the setting, for messages.

    Returns a line about the policies. Raises SettingsError: the inputs of the blocks take more already.
    """
    held = measured(tower, run)
    whole = sum(held["off"])
    limit = whole * budget if isinstance(budget, float) else float(budget[:-3]) * UNITS[budget[-3:]] / samples
    levels = chosen(held, limit)
    gib = samples / (1 << 30)
    if levels is None:
        least = sum(min(held[level][block] for level in LEVELS) for block in range(len(tower)))
        raise SettingsError(
            f"{key}: {budget} is too little: with all recomputed, the blocks hold {least / whole:.2f} of their "
            f"activations, {least * gib:.3g} GiB for {samples} samples: raise it, or give all"
        )
    for block, level in zip(tower, levels, strict=True):
        set_policy(block, level)
    total = sum(held[level][block] for block, level in enumerate(levels))
    what = ", ".join(
        f"{levels.count(level)} recompute {text}"
        for level, text in (("matmuls", "all but matrix products"), ("all", "everything"))
        if level in levels
    )
    text = f"of {len(tower)} blocks, {what or 'none recomputes'}: {total * gib:.3g} GiB of activations for {samples} "
    return f"{key}: {text}samples in place of {whole * gib:.3g}"


def chosen(held: Held, limit: float) -> list[Level] | None:
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


def measured(tower: Sequence[nn.Module], run: Callable[[int], object]) -> Held:
    """Bytes that each block holds for a sample, by policy. The blocks' policies are `off` afterwards."""
    held: Held = {}
    for level in LEVELS:
        for block in tower:
            set_policy(block, level)
        two, four = (_alive(tower, run, samples) for samples in (2, 4))
        held[level] = [(more - less) / 2 for less, more in zip(two, four, strict=True)]
    for block in tower:
        set_policy(block, "off")
    return held


def _alive(tower: Sequence[nn.Module], run: Callable[[int], object], samples: int) -> list[int]:
    """Bytes of the tensors that are made in each block and are alive after a pass."""
    with _Made(len(tower)) as made, made.watching(tower):
        result = run(samples)
        alive: list[int] = made.alive()
        del result
    return alive


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages made in each block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: list[dict[int, tuple[Any, int]]] = [{} for _ in range(blocks)]
        self._current: int | None = None

    @contextmanager
    def watching(self, tower: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which the passes of the blocks are told apart."""

        def enter(number: int) -> Callable[..., None]:
            return lambda *_: setattr(self, "_current", number)

        hooks = [block.register_forward_pre_hook(enter(number)) for number, block in enumerate(tower)]
        hooks += [block.register_forward_hook(lambda *_: setattr(self, "_current", None)) for block in tower]
        try:
            yield
        finally:
            for hook in hooks:
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
        """Bytes of those that are alive, by block."""
        return [
            sum(size for reference, size in storages.values() if not reference.expired()) for storages in self._storages
        ]
