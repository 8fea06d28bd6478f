"""Tiny towers, batches, and the full-batch reference of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clipstream.data.batch import Batch, ImageSpec
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SigmoidLoss, SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.models.towers import Features
from clipstream.training.parallel import full_tensor
from clipstream.training.settings import TrainSettings
from clipstream.training.step import StepResult, TrainStep
from tests.support.losses import sigmoid_loss, softmax_loss

SIZE, TOKENS, VOCABULARY, WIDTH = 4, 5, 11, 6
CUTS = {1: [10], 2: [7, 3], 3: [5, 1, 4], 4: [3, 1, 4, 2]}
LOSSES = {"clip": SoftmaxLoss(ClipLossSettings()), "siglip": SigmoidLoss(SiglipLossSettings())}


class TinyTowers(nn.Module):
    """Two small towers with the interface of clipstream.models.towers.Towers."""

    def __init__(self, kind: str = "clip", *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.image, self.context_length = ImageSpec((SIZE, SIZE)), TOKENS
        self.has_batch_norm, self.adapters = batch_norm, None
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.clip: Any = nn.Module()
            self.clip.visual = nn.Sequential(
                nn.Linear(3 * SIZE * SIZE, 9),
                nn.BatchNorm1d(9) if batch_norm else nn.LayerNorm(9),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(9, WIDTH),
            )
            self.clip.words = nn.Embedding(VOCABULARY, 8)
            self.clip.text = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, WIDTH))
        self.clip.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.clip.logit_bias = nn.Parameter(torch.tensor(-4.0)) if kind == "siglip" else None

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Features:
        image = self.clip.visual(pixels.to(self.clip.words.weight.dtype).flatten(1) / 255)
        text = self.clip.text(self.clip.words(ids).mean(1))
        unit = lambda x: F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)  # noqa: E731
        return Features(unit(image), unit(text), self.clip.logit_scale.exp(), self.clip.logit_bias)

    def changing_locks(self, step: int) -> list[Any]:
        return []

    def text_lengths(self, ids: torch.Tensor) -> None:
        """As Towers.text_lengths; there are no buckets."""

    def unchanging(self) -> frozenset[str]:
        return frozenset()

    def description(self) -> dict[str, bytes]:
        return {"open_clip_config.json": b"{}"}

    def zeros(self, n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(n, 3, SIZE, SIZE, dtype=torch.uint8), torch.zeros(n, TOKENS, dtype=torch.int32)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        return self.clip.state_dict()

    def skip_stored(self, saved: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        return saved


def make_batch(step: int = 0, rank: int = 0, size: int = 1, weights: torch.Tensor | None = None) -> Batch:
    """A rank's part of global batch `step`."""
    generator = torch.Generator().manual_seed(step)
    n = sum(CUTS[1])
    pixels = torch.randint(0, 256, (n, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    ids = torch.randint(0, VOCABULARY, (n, TOKENS), dtype=torch.int32, generator=generator)
    weights = torch.ones(n) if weights is None else weights
    start, stop = sum(CUTS[size][:rank]), sum(CUTS[size][: rank + 1])
    part = slice(start, stop)
    keys = tuple(f"0.tar/{number}" for number in range(start, stop))
    return Batch(pixels[part], ids[part], weights[part], keys, torch.zeros(stop - start), step, n)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def make_step(
    model: Any,
    world: World | None = None,
    loss: Any = "clip",
    optimizer: torch.optim.Optimizer | None = None,
    clip_norm: float | None = None,
    **settings: Any,
) -> TrainStep:
    """A step of plain descent in float32; `settings` are those of training."""
    train = TrainSettings(**{"precision": "fp32", **settings})
    loss = LOSSES[loss] if isinstance(loss, str) else loss
    return TrainStep(model, loss, optimizer or sgd(model), world or World(), train, clip_norm=clip_norm)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def taken(step: TrainStep, batch: Batch) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """What a step of plain descent says, and the gradients that it went along."""
    before = values(step.towers)
    result = step(batch, lr=1.0)
    return result, {name: before[name] - after for name, after in values(step.towers).items()}


def assert_close(found: Any, wanted: Any, atol: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), tensor, rtol=0, atol=atol, msg=name)


def reference(kind: str, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The full batch's loss and gradients by the papers' formulas, on one process."""
    model, batch = TinyTowers(kind).double(), make_batch()
    assert batch.pixels is not None
    image, text, scale, bias = model(batch.pixels, batch.ids)
    logits = scale * image @ text.T + (0 if bias is None else bias)
    loss = (softmax_loss if kind == "clip" else sigmoid_loss)(logits, weights, torch.arange(len(weights)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}
