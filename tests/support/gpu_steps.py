"""Small towers, batches and steps on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.towers import Towers
from clipstream.training.optim import AdamW
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep
from tests.support.model_files import build, write

TOKENS, END = 24, 255
VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
TEXT = {"context_length": TOKENS, "vocab_size": END + 1, "width": 64, "heads": 2, "layers": 2}


def make_towers(folder: Path, device: str, vision: dict[str, Any] | None = None, **settings: Any) -> Towers:
    """Towers of two layers, with the same weights on each device."""
    return build(write(folder, vision or VISION, text_cfg=TEXT), **settings).to(device).train()


def make_batch(count: int = 16, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)
    ids = torch.zeros(count, TOKENS, dtype=torch.int32)
    for row, length in zip(ids, torch.randint(2, TOKENS + 1, (count,), generator=draw).tolist(), strict=True):
        row[: length - 1] = torch.randint(1, END, (length - 1,), generator=draw)
        row[length - 1] = END
    return Batch(pixels, ids, torch.ones(count), ("",) * count, torch.zeros(count), seed, count)


def make_step(
    towers: Towers, device: str, *, plain: bool = False, world: World | None = None, **settings: Any
) -> TrainStep:
    """A step with AdamW, or with `plain` descent, by which weights move as far as the gradient says."""
    of_step = {key: settings.pop(key) for key in ("clip_norm", "caches") if key in settings}
    loss = settings.pop("loss", None) or build_loss(ClipLossSettings(), "clip")
    train = TrainSettings(**{"precision": "fp32", **settings})
    optimizer = torch.optim.SGD(towers.parameters()) if plain else AdamW.Settings().build(towers, "ViT-B-32")
    return TrainStep(towers, loss, optimizer, world or World(device=device), train, **of_step)


def weights(towers: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in towers.named_parameters()}


def gradients(step: TrainStep, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of a step by name, on the CPU; those of the parameters are dropped."""
    lengths = step.towers.text_lengths(batch.ids)  # on the CPU, as a step does
    step.gradcache(replace(batch, lengths=lengths).to(step.world.device))
    found = {name: p.grad.cpu() for name, p in step.towers.named_parameters() if p.grad is not None}
    step.optimizer.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Differences are at most so large, as a share of the largest of the tensor's values and of a thousandth of all."""
    assert found.keys() == wanted.keys()
    least = 1e-3 * max(float(tensor.abs().max()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        largest = max(float(tensor.abs().max()), least)
        assert float((found[name].float() - tensor.float()).abs().max()) <= tolerance * largest, name
