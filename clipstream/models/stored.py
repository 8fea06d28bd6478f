"""A tower whose features come from a store: not in memory while training, read from the store's model when needed.

Training takes the tower's features from the store; checkpoints take its weights from the store's model, so that they
hold both towers; evaluations, which read pictures and texts of their own, load it for their duration.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from clipstream.errors import SettingsError
from clipstream.features.manifest import RERUN

Tower = Literal["image", "text"]
TOWERS: tuple[Tower, ...] = ("image", "text")


class StoredTower:
    """A tower of a model whose parameters are not in memory.

    Args:
        clip: the model, in the dtypes of the run; the tower is removed from it.
        tower: which of the two.
        weights: the safetensors file with the weights of the store's model.

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
            raise SettingsError(
                f"the {self.tower} tower cannot be read from the feature store's model, {self.weights} ({error}): "
                f"{RERUN}"
            ) from error

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
