"""A tower whose features come from a store: not in memory while training, read from the store's model when needed.

Training takes the tower's features from the store; checkpoints take its weights from the store's model, so that they
hold both towers; evaluations, which read pictures and texts of their own, load it for their duration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from clipstream.errors import SettingsError

Tower = Literal["image", "text"]


class StoredTower:
    """A tower of a model without its modules and parameters.

    Args:
        clip: the model; the tower is removed from it.
        tower: which of the two.
        weights: the safetensors file with the weights of the store's model.
        build: builds the store's model on the CPU, in the dtypes of the run.
    """

    def __init__(self, clip: nn.Module, tower: Tower, weights: Path, build: Callable[[], nn.Module]) -> None:
        self.tower, self.weights = tower, weights
        self._build = build
        self._members = members(clip, tower)
        self._loaded: dict[str, Any] | None = None
        self.remove(clip)

    @cached_property
    def names(self) -> frozenset[str]:
        """The tower's tensors in the model's state dict."""
        with safe_open(self.weights, framework="pt") as file:
            return frozenset(name for name in file.keys() if name.partition(".")[0] in self._members)  # noqa: SIM118

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tower's weights by name, on the CPU; mapped from the file, so that they take no memory until used.

        Raises SettingsError: the file cannot be read.
        """
        try:
            with safe_open(self.weights, framework="pt") as file:
                for name in self.names:
                    yield name, file.get_tensor(name)
        except OSError as error:
            raise SettingsError(f"the {self.tower} tower of the feature store cannot be read: {error}") from error

    def restore(self, clip: nn.Module, device: str) -> None:
        """Put the tower into the model, frozen and in evaluation mode."""
        if self._loaded is None:
            built = self._build().requires_grad_(False).eval()
            self._loaded = {name: getattr(built, name) for name in self._members}
        for name, member in self._loaded.items():
            moved = member.to(device)
            setattr(clip, name, nn.Parameter(moved, requires_grad=False) if isinstance(member, nn.Parameter) else moved)

    def remove(self, clip: nn.Module) -> None:
        """Remove the tower from the model. Once loaded, it stays in the CPU's memory for the next evaluation."""
        for name in self._members:
            member = getattr(clip, name)
            if self._loaded is not None and isinstance(member, nn.Module):
                member.to("cpu")
            setattr(clip, name, None)


def members(clip: nn.Module, tower: Tower) -> list[str]:
    """The attributes of open_clip's model that make up a tower."""
    if tower == "image":
        return ["visual"]
    if isinstance(getattr(clip, "text", None), nn.Module):
        return ["text"]
    names = [*clip._modules, *clip._parameters, *clip._buffers]
    return [name for name in names if name != "visual" and not name.startswith("logit_")]
