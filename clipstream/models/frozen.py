"""Frozen towers: in a precision of their own, or absent from memory while their features come from a store.

A tower whose weights no step changes needs neither a graph nor gradients, and its weights may be as narrow as its
features allow: bfloat16 halves their memory, and saves the casts of autocast. A stored tower is read from the store's
model for checkpoints, which hold both towers, and for evaluations, which have images and texts of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipstream.errors import SettingsError
from clipstream.features.manifest import RERUN
from clipstream.models.settings import FrozenPrecision, Tower

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def arithmetic(device: str, dtype: torch.dtype, *, cast: bool) -> Iterator[None]:
    """A context of passes in `dtype`: by autocast, or with `cast` False by modules whose weights have it. On the device
    'meta', which has no numbers, it changes nothing.
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
    """A tower in a precision of its own, converted in the model, whose attributes `members` it is. With `keep`, the
    weights are kept as they are now, for checkpoints.

    Attributes:
        dtype: of the tower's weights and passes.
        names: of its tensors in the model's state dict.
    """

    def __init__(self, clip: nn.Module, members: Collection[str], precision: FrozenPrecision, *, keep: bool) -> None:
        self.dtype, self._members = DTYPES[precision], frozenset(members)
        state = {name: tensor for name, tensor in clip.state_dict().items() if name.partition(".")[0] in members}
        self.names = frozenset(state)
        self._originals = {name: tensor.cpu().clone() for name, tensor in state.items()} if keep else {}
        for tensor in self.tensors(clip):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)

    def tensors(self, clip: nn.Module) -> list[torch.Tensor]:
        named = (*clip.named_parameters(), *clip.named_buffers())
        return [tensor for name, tensor in named if name.partition(".")[0] in self._members]

    def __deepcopy__(self, memo: object) -> FrozenTower:
        return self  # the originals are constant

    def with_originals(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state dict with the tower's original weights; without its tensors where none are kept."""
        kept = {name: self._originals.get(name, tensor) for name, tensor in state.items()}
        return {name: tensor for name, tensor in kept.items() if name not in self.names or name in self._originals}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the model from a checkpoint, if it is the tower's and originals are kept.

        Raises RuntimeError: its shape differs.
        """
        if name in self._originals:
            self._originals[name].copy_(tensor)


def ids_of_own(towers: Any) -> set[int]:
    """The ids of the tensors of towers in a precision of their own; none of another module."""
    frozen = getattr(towers, "own_precision", {}).values()
    return {id(tensor) for tower in frozen for tensor in tower.tensors(towers.clip)}


class StoredTower:
    """A tower that is removed from a model, in the dtypes of the run: its parameters are in a safetensors file, that of
    the store's model, and not in memory.

    Raises SettingsError: the file cannot be read, or has other weights than the model.
    """

    def __init__(self, clip: nn.Module, tower: Tower, weights: Path) -> None:
        self.tower, self.weights = tower, weights
        self._module = nn.Module()  # holds the tower while the model does not
        self._members = members(clip, tower)
        for name in self._members:
            member = getattr(clip, name)
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self._module.register_buffer(name, member, persistent=False)
            else:
                setattr(self._module, name, member)
        self._module.requires_grad_(False).eval()
        self.names = frozenset(self._module.state_dict())  # of its tensors in the model's state dict
        self._tables = dict(self._module.named_buffers())  # masks and the like, which no file may have
        self._compare()  # now, and not when the first checkpoint is written
        self.remove(clip)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tower's weights by name, on the CPU; mapped from the file, so that they take no memory until used.

        Raises SettingsError: the file cannot be read, or lacks a weight.
        """
        try:
            with safe_open(self.weights, framework="pt") as file:
                keys = set(file.keys())
                for name in self.names:  # a text tower may be a module of its own in one of the two models
                    bare = name.removeprefix("text.")
                    yield name, file.get_tensor(next((key for key in (bare, f"text.{bare}") if key in keys), name))
        except (OSError, SafetensorError) as error:
            what = f"the {self.tower} tower cannot be read from the feature store's model, {self.weights} ({error})"
            raise SettingsError(f"{what}: {RERUN}") from error

    def _compare(self) -> None:
        own = self._module.state_dict()
        for name, tensor in self.tensors():
            if not torch.equal(tensor.to(own[name]), own[name]):
                raise SettingsError(
                    f"the feature store's model, {self.weights}, has other weights ({name}) than the {self.tower} "
                    f"tower whose features are stored: {RERUN}"
                )

    def restore(self, clip: nn.Module, device: str) -> None:
        """Put the tower into the model, frozen and in evaluation mode."""
        self._module.to_empty(device=device)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(self._tables[name])
            self._module.load_state_dict(dict(self.tensors()))
        for name in self._members:
            setattr(clip, name, getattr(self._module, name))

    def remove(self, clip: nn.Module) -> None:
        """Remove the tower from the model, and free its memory."""
        for name in self._members:
            setattr(clip, name, None)
        self._module.to("meta")


def members(clip: nn.Module, tower: Tower) -> list[str]:
    """The attributes of open_clip's model that make up a tower."""
    if tower == "image":
        return ["visual"]
    if isinstance(getattr(clip, "text", None), nn.Module):
        return ["text"]
    names = [*clip._modules, *clip._parameters, *clip._buffers]
    return [name for name in names if name != "visual" and not name.startswith("logit_")]
