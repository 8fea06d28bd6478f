"""How far gradients are from the limits of 16-bit numbers, by group of parameters.

Gradients of a step and the loss scale enter; for each group, a histogram of log2 |g| and shares leave. float16 has
normal numbers from 2^-14 to 65504 and subnormal ones, with fewer digits, down to 2^-24; half of that rounds to 0.
bfloat16 has the exponents of float32: normal numbers from 2^-126.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from clipstream.models.execution.blocks import blocks

LOWEST, HIGHEST, BIN = -40, 20, 2  # of the histogram, in log2
FP16_ZERO, FP16_NORMAL, FP16_MOST = 2.0**-25, 2.0**-14, 65504.0
BF16_NORMAL = 2.0**-126
ASSUMED_SCALE = 2.0**16  # GradScaler's first one, for runs without a loss scale
EMBEDDINGS = ("embed", "conv1", "stem", "pos_", "positions")


@dataclass
class GradientGroup:
    """The gradients of a group of parameters, times the loss scale.

    Attributes:
        name: tower and kind.
        n: elements.
        zeros: exact zeros; in fp16, also what the backward pass has rounded to 0.
        underflow: others that float16 rounds to 0.
        subnormal: others that float16 holds with fewer digits.
        overflow: above float16's largest number, or not finite.
        bf16_subnormal: others below bfloat16's normal numbers.
        histogram: counts of log2 |g| from `LOWEST` in steps of `BIN`; the ends hold what is beyond them.
    """

    name: str
    n: int = 0
    zeros: int = 0
    underflow: int = 0
    subnormal: int = 0
    overflow: int = 0
    bf16_subnormal: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * ((HIGHEST - LOWEST) // BIN))

    def add(self, gradient: torch.Tensor, scale: float) -> None:
        """Add a gradient of any shape, which was not multiplied by the loss scale."""
        sizes = gradient.detach().double().abs().flatten() * scale
        self.n += sizes.numel()
        finite, some = sizes.isfinite(), sizes > 0
        self.zeros += int((~some & finite).sum())
        self.underflow += int((some & (sizes < FP16_ZERO)).sum())
        self.subnormal += int(((sizes >= FP16_ZERO) & (sizes < FP16_NORMAL)).sum())
        self.overflow += int((~finite | (sizes > FP16_MOST)).sum())
        self.bf16_subnormal += int((some & (sizes < BF16_NORMAL)).sum())
        logs = sizes[some & finite].log2().clamp(LOWEST, HIGHEST - BIN / 2)
        counts = torch.histc(logs.float(), bins=len(self.histogram), min=LOWEST, max=HIGHEST)
        self.histogram = [old + int(new) for old, new in zip(self.histogram, counts.tolist(), strict=True)]

    def share(self, count: int) -> float:
        """A count as a share of the elements that are not exactly 0."""
        return count / max(self.n - self.zeros, 1)

    @property
    def median(self) -> float:
        """Median of log2 |g| of the elements that are not 0, as the middle of its bin; nan if there are none."""
        half, seen = sum(self.histogram) / 2, 0
        for number, count in enumerate(self.histogram):
            seen += count
            if seen > half:
                return LOWEST + BIN * (number + 0.5)
        return float("nan")


def group_of(name: str, parameter: nn.Parameter, repeated: Iterable[str]) -> str:
    """The group of a parameter: its tower, and whether it is an embedding, in a block, a projection, a vector.

    Args:
        name: of the parameter in the towers.
        repeated: names of the repeated blocks, each with a dot behind it.
    """
    if parameter.numel() == 1:
        return "scale and bias of the logits"
    tower = "image" if name.startswith("clip.visual.") else "text"
    if any(part in name for part in EMBEDDINGS):
        return f"{tower} embeddings"
    if name.startswith(tuple(repeated)):
        return f"{tower} blocks, {'matrices' if parameter.ndim > 1 else 'vectors'}"
    return f"{tower} {'projections' if parameter.ndim > 1 else 'norms and biases'}"


def gradient_groups(towers: nn.Module, scale: float) -> list[GradientGroup]:
    """The groups of the trained parameters, with the gradients that they have now.

    Args:
        scale: factor to judge them with; they are not multiplied by it yet.
    """
    within = blocks(towers)
    repeated = [f"{name}." for name, module in towers.named_modules() if any(module is block for block in within)]
    groups: dict[str, GradientGroup] = {}
    for name, parameter in towers.named_parameters():
        if parameter.grad is not None:
            key = group_of(name, parameter, repeated)
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            groups.setdefault(key, GradientGroup(key)).add(gradient, scale)
    return [groups[key] for key in sorted(groups)]
