"""A tiny real model and an EvalContext around it."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path

from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from tests.support.pictures import ByteTokenizer

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 256, "layers": 1, "width": 32, "heads": 2},
}


@lru_cache
def tiny_towers(seed: int = 0) -> Towers:
    """A CLIP of two one-layer towers for 16 px and 16 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tiny.json"
        config.write_text(json.dumps(CONFIG))
        return build_towers(ModelSettings.model_validate({"name": str(config)}), seed=seed)


def context_of(world: World, workers: int = 0) -> EvalContext:
    """The tiny model on this rank."""
    return EvalContext(tiny_towers(), ByteTokenizer(), world, DataSettings(workers=workers))
