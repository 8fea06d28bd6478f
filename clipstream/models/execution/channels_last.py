"""Channels-last layout of pictures for convolutional image towers.

Only the pixels are laid out so: convolutions, batch norm and pooling keep the format of their input, and a convolution
converts its weights as it needs them. Parameters, gradients, moments and checkpoints are those without it. Features
and gradients differ from those of the contiguous format by rounding alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from clipstream.errors import SettingsError

# oneDNN's backward pass of a strided 1 x 1 convolution over fewer channels than a vector register holds writes outside
# of its memory in channels-last format (torch 2.15 on the CPU: seen for 2 to 5 input channels; registers have 8 or 16
# floats). Such convolutions read the pixels of FastViT, MobileOne and RepVGG.
VECTOR = 16


def is_convolutional(tower: nn.Module) -> bool:
    """Whether a tower has several convolutions over neighbouring pixels, more than a ViT's patch embedding."""
    return sum(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1 for module in tower.modules()) > 1


def tune_convolutions(towers: nn.Module, device: str) -> None:
    """Let cuDNN measure, in this process, which algorithm is the fastest for each shape, if a tower is convolutional;
    not with torch's deterministic algorithms, as the choice may differ between runs.
    """
    if device.startswith("cuda") and not torch.are_deterministic_algorithms_enabled() and is_convolutional(towers):
        torch.backends.cudnn.benchmark = True


@dataclass(frozen=True)
class ChannelsLast:
    """How an image tower takes its pixels.

    Attributes:
        always: whether on every device; else on the CPU, and on GPUs in 16 bits, whose tensor cores compute
            convolutions in channels-last format.
    """

    always: bool = False

    @classmethod
    def of(cls, tower: nn.Module, setting: Literal["auto", "on", "off"]) -> ChannelsLast | None:
        """The layout for a tower; None for contiguous pixels: for 'off', and for 'auto' where it does not pay (a ViT)
        or is not safe.

        Raises SettingsError: 'on' where it is not safe.
        """
        convolutions = [module for module in tower.modules() if isinstance(module, nn.Conv2d)]
        unsafe = [c for c in convolutions if max(c.kernel_size) == 1 and max(c.stride) > 1 and c.in_channels < VECTOR]
        if setting == "on":
            if unsafe:
                raise SettingsError(
                    f"model.channels_last: {type(tower).__name__} has a strided 1 x 1 convolution over "
                    f"{unsafe[0].in_channels} channels, which torch cannot compute in this format without memory "
                    "errors on the CPU: give auto or off"
                )
            return cls(always=True)
        return None if setting == "off" or unsafe or not is_convolutional(tower) else cls()

    def apply(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels [n, 3, H, W] in the layout for a tower with weights of `dtype`, outside or inside of autocast."""
        device = pixels.device.type
        # torch knows no autocast on the meta device, on which FLOPs are counted.
        narrow = dtype.itemsize == 2 or (device != "meta" and torch.is_autocast_enabled(device))
        pays = self.always or device == "cpu" or narrow
        return pixels.contiguous(memory_format=torch.channels_last) if pays else pixels
