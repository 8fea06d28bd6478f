"""Frozen towers in a precision of their own.

A tower whose weights no step changes needs neither a graph nor gradients, and its weights may be as narrow as its
features allow: bfloat16 halves their memory, and saves the casts of autocast. Checkpoints hold the weights as they were
before: the ranks that write them keep a copy on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

FrozenPrecision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def arithmetic(device: str, dtype: torch.dtype, *, cast: bool) -> Iterator[None]:
    """A context of passes in `dtype`: by autocast, or with `cast` False by modules whose weights have it.

    Args:
        device: type of the device; on 'meta', which has no numbers, the context changes nothing.
    """
    with ExitStack() as stack:
        if device != "meta":
            stack.enter_context(torch.autocast(device, dtype if cast else None, enabled=cast))
        if device == "cpu" and dtype == torch.bfloat16:
            # In bfloat16, plain matrices take this share of the time of the CPU's fused attention, forward and back
            # (torch 2.15): with AMX 0.2 to 0.3; with AVX512-BF16 0.3 to 0.9 at 16 to 77 tokens, and 1.5 at 197, where
            # a whole ViT takes 1.04 to 1.22; with AVX2 0.4 to 0.7 at all of these.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif device == "cpu" and not cast:  # inside of a run in bfloat16
            stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]))
        yield


class FrozenTower:
    """A tower in a precision of its own.

    Args:
        clip: the model; the tower in it is converted.
        members: the model's attributes that make up the tower.
        keep: whether to keep the weights as they are now, for checkpoints.

    Attributes:
        dtype: of the tower's weights and passes.
        names: of its tensors in the model's state dict.
    """

    def __init__(self, clip: nn.Module, members: Collection[str], precision: FrozenPrecision, *, keep: bool) -> None:
        self.dtype, self._members = DTYPES[precision], frozenset(members)
        state = {name: tensor for name, tensor in clip.state_dict().items() if self._owns(name)}
        self.names = frozenset(state)
        self._originals = {name: tensor.cpu().clone() for name, tensor in state.items()} if keep else {}
        for tensor in self.tensors(clip):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)

    def _owns(self, name: str) -> bool:
        return name.partition(".")[0] in self._members

    def __deepcopy__(self, memo: object) -> FrozenTower:
        return self  # the originals are constant

    def tensors(self, clip: nn.Module) -> list[torch.Tensor]:
        """The tower's parameters and buffers."""
        return [tensor for name, tensor in [*clip.named_parameters(), *clip.named_buffers()] if self._owns(name)]

    def saved(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state dict with the tower's original weights; without its tensors where none are kept."""
        kept = {name: self._originals.get(name, tensor) for name, tensor in state.items()}
        return {name: tensor for name, tensor in kept.items() if name not in self.names or name in self._originals}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the model from a checkpoint, if it is the tower's and originals are kept.

        Raises RuntimeError: its shape differs.
        """
        if name in self._originals:
            self._originals[name].copy_(tensor)
