"""Model configurations and weights in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers

TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}


def write(folder: Path, vision: dict[str, Any] | None = None, **more: Any) -> str:
    path = folder / f"model{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({"embed_dim": 24, "vision_cfg": vision or VIT, "text_cfg": TEXT, **more}))
    return str(path)


def build(name: str, *, seed: int = 0, loss_type: str | None = None, tokenizer: Any = None, **settings: Any) -> Towers:
    chosen = ModelSettings.model_validate({"name": name, **settings})
    return build_towers(chosen, seed=seed, loss_type=loss_type, tokenizer=tokenizer)
