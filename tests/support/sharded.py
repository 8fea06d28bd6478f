"""Towers with several blocks for FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.runs import MODEL
from tests.support.steps import TinyTowers

LAYERS = {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "layers": 3}, "text_cfg": {**MODEL["text_cfg"], "layers": 2}}  # type: ignore[dict-item]
FSDP = ("--train.parallel", "fsdp")


class DeepTowers(TinyTowers):
    """Towers with blocks, of which some are frozen, and one tensor under two names."""

    def __init__(self, kind: str = "clip") -> None:
        super().__init__(kind)
        with torch.random.fork_rng():
            torch.manual_seed(2)
            parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.clip.layers = nn.ModuleList(parts)
        self.clip.layers[0].requires_grad_(False)
        self.clip.again = nn.Embedding(2, 2)
        self.clip.again.weight = self.clip.words.weight
        self.register_buffer("shift", torch.full((8,), 0.25), persistent=False)
        self.watched: list[nn.Parameter] = []
        self.seen: list[bool] = []

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Any:
        """As Towers.forward."""
        if torch.is_grad_enabled():
            self.seen.append(any(p.grad is not None for p in self.watched))
        features = super().forward(pixels, ids)
        hidden = self.clip.words(ids).mean(1) + self.shift
        for layer in self.clip.layers:
            hidden = layer(hidden)
        return features._replace(text=F.normalize(features.text + self.clip.text(hidden), dim=-1))
