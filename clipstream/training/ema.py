"""Exponential moving averages (EMA) of the weights.

Towers and the steps that changed them enter; averages by parameter name leave, for checkpoints and evaluations.

After each step that changed the weights, average += (1 - d) (weight - average), with decay d. With a
warm-up, update t (from 1) has d = min(decay, 1 - t^(-2/3)), so that the first steps are soon forgotten; this is timm's
ModelEmaV3 with `use_warmup` (timm/utils/model_ema.py, gamma 1, power 2/3).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from clipstream.errors import SettingsError
from clipstream.models.weights import check_finite, fit_positions
from clipstream.training.parallel import local_tensor, shard_like

WARMUP_POWER = 2 / 3
_PREFIX = "clip."  # of the model in the towers: a checkpoint's names have none


class WeightAverages:
    """Exponential moving averages of the towers' trainable parameters, on their device, in at least float32.

    Frozen parameters have no average, and batch norm statistics are those of training. The average of a sharded
    parameter is sharded likewise; unsharded, every rank holds the same averages.

    Args:
        towers: on their device, already sharded if at all, with the initial weights.

    Attributes:
        tensors: averages by parameter name in the towers (by all names of a tied parameter).
        updates: number of updates; to read it waits for the device.
    """

    def __init__(self, towers: nn.Module, decay: float, *, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        trained = {name: p for name, p in towers.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._parameters = list(dict.fromkeys(trained.values()))
        # In at least float32: a narrower average would lose what an update adds.
        of = {p: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for p in self._parameters}
        self._averages = [*of.values()]
        self.tensors = {name: of[p] for name, p in trained.items()}
        device = self._averages[0].device if self._averages else None
        self._updates = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def updates(self) -> int:
        return int(self._updates.item())

    @updates.setter
    def updates(self, number: int) -> None:
        self._updates.fill_(number)

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor) -> None:
        """Move the averages towards the present weights, after a step, unless `found_inf` (float32 scalar) is 1."""
        self._updates += 1 - found_inf
        share: Any = 1 - self.decay
        if self.warmup:
            share = self._updates.pow(-WARMUP_POWER).clamp(min=share)
            share = share.float() if share.is_cuda else share  # as the kernel of CUDA takes it
        # With these signs a step of SGD is a lerp, average += share (weight - average), that takes the flag.
        move = partial(
            torch._fused_sgd_, momentum_buffer_list=[], weight_decay=-1.0, momentum=0.0, lr=-share, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False, found_inf=found_inf,
        )  # fmt: skip
        pairs = zip(map(local_tensor, self._averages), map(local_tensor, self._parameters), strict=True)
        averages, weights = [], []
        for average, parameter in pairs:
            if average.dtype == parameter.dtype:
                averages.append(average)
                weights.append(parameter)
            else:
                move([average], [parameter.to(average.dtype)])
        if averages:
            move(averages, weights)

    @torch.no_grad()
    def load(
        self, file: Path, updates: int | None, clip: Any, adapters: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Continue from a checkpoint's averages, or start from the present weights if it has none.

        Args:
            updates: how often they were updated; None if the checkpoint has no averages.
            clip: the model in the towers, to whose sizes positions are resampled.
            adapters: those of adapters, by name in the model.

        Raises SettingsError: the file cannot be read, is of another model, or holds weights that are not finite.
        """
        if updates is None:
            self.updates = 0
            for average, parameter in zip(self._averages, self._parameters, strict=True):
                local_tensor(average).copy_(local_tensor(parameter))
            return
        try:
            saved = {**dict(check_finite(load_file(file).items(), file)), **(adapters or {})}
            for name, average in self.tensors.items():
                name = name.removeprefix(_PREFIX)
                fitting = fit_positions(name, saved[name], average, clip)
                local_tensor(average).copy_(local_tensor(shard_like(fitting, average)))
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise SettingsError(f"{file} cannot be read, or does not fit this run's model: {error}") from error
        self.updates = updates
