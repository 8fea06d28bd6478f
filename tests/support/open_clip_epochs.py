"""Checkpoints as open_clip's trainer writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import torch


def excluded(name: str, parameter: torch.nn.Parameter) -> bool:
    """`exclude` of open_clip_train.main, 3.3.0."""
    return parameter.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name


def write_epoch(
    folder: Path, config: dict[str, Any], kind: str, **more: Any
) -> tuple[Path, torch.optim.Optimizer, Any]:
    """A checkpoint as open_clip_train.main writes it, after two steps of its AdamW."""
    torch.manual_seed(3)
    model = open_clip.CLIP(**config)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if kind == "3.3.0":
        groups = [[p for n, p in named if excluded(n, p)], [p for n, p in named if not excluded(n, p)]]
    else:  # main: in the order in which they come first; position embeddings have no weight decay
        none = {"positional_embedding", "visual.positional_embedding", "visual.class_embedding"}
        split = [[p for n, p in named if (p.ndim <= 1 or n in none) is which] for which in (True, False)]
        groups = split
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    for number in range(2):
        for index, (_, parameter) in enumerate(named):
            generator = torch.Generator().manual_seed(100 * number + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"epoch": 2, "name": "theirs", "state_dict": state, "optimizer": optimizer.state_dict(), **more}
    path = folder / "epoch_2.pt"
    torch.save(content, path)
    return path, optimizer, model
