"""Owns averaged weights: moving averages of what is trained, on its device, in float32 at least; and their file.

After each step that changed the weights, average += (1 - d) (weight - average), with the decay d. With a warm-up, the
t-th update (from 1) has d = min(decay, 1 - t^(-2/3)), so that the first steps are soon forgotten: this is timm's
ModelEmaV3 with `use_warmup` (timm/utils/model_ema.py, gamma 1, power 2/3).

Frozen parameters have no average, and batch norm's statistics are those of the training. The average of a sharded
parameter is sharded as it is; unsharded, every rank has the same averages. It never decides when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from clipstream.errors import SettingsError
from clipstream.training.sharding import shard_like

WARMUP_POWER = 2 / 3
_PREFIX = "clip."  # of the model in the towers: a checkpoint's names have none


class Averages:
    """Averages of the towers' trainable parameters.

    Args:
        towers: on their device, sharded if they are to be, with the weights to begin with.
        decay: 0 to 1.
        warmup: whether the decay rises to it.

    Attributes:
        tensors: name in the towers (all of its names, where a tensor has several) -> average.
        updates: how often they were moved.
    """

    def __init__(self, towers: nn.Module, decay: float, *, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        trained = {name: p for name, p in towers.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._parameters = list({id(p): p for p in trained.values()}.values())
        self._averages = [_wide(p).clone() for p in self._parameters]
        of = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        self.tensors = {name: of[id(p)] for name, p in trained.items()}

    def decay_at(self, update: int) -> float:
        """Of an update, from 1."""
        return min(self.decay, 1 - update**-WARMUP_POWER) if self.warmup else self.decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present weights."""
        self.updates += 1
        share = 1 - self.decay_at(self.updates)
        averages, weights = [], []
        for average, parameter in zip(map(_local, self._averages), map(_local, self._parameters), strict=True):
            if average.dtype == parameter.dtype:
                averages.append(average)
                weights.append(parameter)
            else:
                average.lerp_(parameter.to(average.dtype), share)
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    def state(self) -> dict[str, Any]:
        """What belongs to the tensors, JSON-able."""
        return {"updates": self.updates}

    def among(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint by name, with the averages in place of what is trained; sharded as it is."""
        return {**weights, **{name.removeprefix(_PREFIX): average for name, average in self.tensors.items()}}

    @torch.no_grad()
    def load(self, file: Path, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's averages; begin at the present weights where it has none.

        Args:
            file: of the averaged weights.
            state: what `state()` gave.

        Raises:
            SettingsError: the file cannot be read, or is of another model.
        """
        if state is None:
            self.updates = 0
            for average, parameter in zip(self._averages, self._parameters, strict=True):
                _local(average).copy_(_local(parameter))
            return
        try:
            saved = load_file(file)
            for name, average in self.tensors.items():
                _local(average).copy_(_local(shard_like(saved[name.removeprefix(_PREFIX)], average)))
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise SettingsError(f"{file} cannot be read, or does not fit this run's model: {error}") from error
        self.updates = int(state["updates"])


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """In float32 at least: a narrower average would lose what an update adds."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
