"""Checkpoints as open_clip's trainer writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import torch


def write_epoch(folder: Path, config: dict[str, Any], **more: Any) -> tuple[Path, Any]:
    """A checkpoint as open_clip_train.main writes it, and its model, after two steps of AdamW."""
    torch.manual_seed(3)
    model = open_clip.CLIP(**config)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for _, p in named if (p.ndim < 2) is which]} for which in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    for number in range(2):
        for index, (_, parameter) in enumerate(named):
            generator = torch.Generator().manual_seed(100 * number + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"epoch": 2, "name": "theirs", "state_dict": state, "optimizer": optimizer.state_dict(), **more}
    path = folder / "epoch_2.pt"
    torch.save(content, path)
    return path, model
